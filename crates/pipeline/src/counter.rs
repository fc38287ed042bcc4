//! The counter: counts each client's messages in the store and passes them on, keyed by text, in one transaction with
//! its offsets.
//!
//! A message is counted when it is the client's next (`last + 1`). One that was counted before is passed on again if the
//! attempt that counted it may not have committed, and left aside otherwise; one behind a gap is left aside, because the
//! gateway sends it again. What is no text goes to the dead letters with its origin, in the same transaction, and its
//! number counts as done so that the next one goes on.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::consumer::Consumer;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};
use tokio::runtime::Handle;
use tokio::time::Instant;

use moim_base::task::Shutdown;

use crate::consume::{self, Failed, Source, Watch, patiently};
use crate::progress::{self, Progress};
use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::{Counting, Store, Verdict, hash_of};

/// A transaction that cannot be carried on for so long is undone: meanwhile the group waits for us.
const CALL: Duration = Duration::from_secs(10);
/// How long a transaction should last at most: what cannot be finished in time is undone, and done again for nothing. Batches
/// are made so small that it does, and larger again where there is time.
const LASTS: Duration = Duration::from_secs(1);
/// The first batch, and the smallest that is tried.
const FIRST: usize = 4_000;
const SMALLEST: usize = 100;
/// Between looks whether everything was stored: only failures are reported.
const REPORT_POLL: Duration = Duration::from_millis(2);

/// How a counter works.
#[derive(Clone, Debug)]
pub struct CounterOptions {
    /// The queue.
    pub queue: QueueOptions,
    /// Which instance; each needs a number of its own.
    pub instance: usize,
    /// At most so many messages in one transaction.
    pub transaction_size: usize,
}

/// Starts a counter on a thread of its own; it ends with `shutdown`.
pub fn start(
    options: CounterOptions,
    store: Store,
    progress: Progress,
    runtime: Handle,
    shutdown: Shutdown,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let name = format!("counter-{}", options.instance);
    consume::run(name, shutdown, move |shutdown, watch| {
        let mut counter = Counter::open(&options, watch, store.clone(), progress.clone(), runtime.clone())?;
        while !shutdown.is_stopped() {
            counter.step(shutdown)?;
        }
        Ok(())
    })
}

/// How many messages to put into a transaction, by how long the last ones took.
#[derive(Debug)]
struct Size {
    now: usize,
    largest: usize,
}

impl Size {
    fn up_to(largest: usize) -> Self {
        Self { now: FIRST.min(largest), largest }
    }

    /// A transaction of so many messages took so long, or was undone.
    fn on_end(&mut self, messages: usize, took: Duration, is_fine: bool) {
        if !is_fine || took > LASTS {
            self.now = (self.now / 2).max(SMALLEST.min(self.largest));
        } else if messages >= self.now && took < LASTS / 2 {
            self.now = (self.now * 2).min(self.largest);
        }
    }
}

struct Counter<'w> {
    watch: &'w Watch,
    size: Size,
    source: Source,
    producer: BaseProducer<DefaultProducerContext>,
    tally: Tally,
    progress: Progress,
}

/// The side of the store.
struct Tally {
    store: Store,
    runtime: Handle,
    /// The generation under which a partition is counted, from the store.
    generations: HashMap<i32, u64>,
}

/// A message of the batch and where it goes.
struct Out<'a> {
    message: &'a BorrowedMessage<'a>,
    /// Client and sequence number; none when the record does not say.
    origin: Option<(&'a str, u64)>,
    dead: Option<&'static str>,
    verdict: Verdict,
}

impl<'w> Counter<'w> {
    fn open(
        options: &CounterOptions,
        watch: &'w Watch,
        store: Store,
        progress: Progress,
        runtime: Handle,
    ) -> Result<Self, Failed> {
        let role = format!("counter-{}", options.instance);
        let producer: BaseProducer<DefaultProducerContext> = options.queue.transactional(&role).create()?;
        watch.during(|| producer.init_transactions(CALL))?;
        let source = Source::subscribe(&options.queue.consumer("counter"), CLIENT_MESSAGE)?;
        watch.reads_from(&source);
        let tally = Tally { store, runtime, generations: HashMap::new() };
        let size = Size::up_to(options.transaction_size);
        Ok(Self { watch, size, source, producer, tally, progress })
    }

    fn step(&mut self, shutdown: &Shutdown) -> Result<(), Failed> {
        let batch = self.source.gather(self.size.now, shutdown);
        if self.source.has_changed() {
            self.tally.generations.clear();
        }
        if batch.is_empty() {
            return Ok(());
        }
        let since = Instant::now();
        let outs = match self.tally.count(&batch, shutdown) {
            // Another counter has been given the partition and has begun: the next rebalance tells us, or told us.
            Err(Failed::Fenced) => {
                self.tally.generations.clear();
                return Ok(self.source.rewind()?);
            }
            other => other?,
        };
        let passed = self.pass_on(&outs, &batch);
        self.size.on_end(batch.len(), since.elapsed(), passed.is_ok());
        match passed {
            Ok(()) => {
                self.note(&outs);
                Ok(())
            }
            Err(error) => self.undo(error),
        }
    }
}

impl Tally {
    /// Counts the batch in the store, client by client.
    fn count<'a>(
        &mut self,
        batch: &'a [BorrowedMessage<'a>],
        shutdown: &Shutdown,
    ) -> Result<Vec<Out<'a>>, Failed> {
        let mut outs: Vec<Out<'a>> = batch.iter().map(judge).collect();
        let by_client = by_client(&outs);
        let mut steps = Vec::with_capacity(by_client.len());
        for ((client, partition), places) in by_client {
            let generation = self.generation(partition, shutdown)?;
            let counting: Vec<Counting> = places
                .iter()
                .map(|at| {
                    let out = &outs[*at];
                    let sn = out.origin.map_or(0, |(_, sn)| sn);
                    Counting { sn, offset: out.message.offset(), dead: out.dead.is_some() }
                })
                .collect();
            let store = self.store.clone();
            steps.push(async move {
                let call = || store.count(client, (generation, partition), &counting);
                (places, patiently(shutdown, call).await)
            });
        }
        for (places, counted) in self.runtime.block_on(futures_util::future::join_all(steps)) {
            let verdicts = counted?.map_err(|_| Failed::Fenced)?;
            places.into_iter().zip(verdicts).for_each(|(at, verdict)| outs[at].verdict = verdict);
        }
        Ok(outs)
    }

    fn generation(&mut self, partition: i32, shutdown: &Shutdown) -> Result<u64, Failed> {
        if let Some(generation) = self.generations.get(&partition) {
            return Ok(*generation);
        }
        let call = || self.store.next_generation("counter", partition);
        let generation = self.runtime.block_on(patiently(shutdown, call))?;
        self.generations.insert(partition, generation);
        Ok(generation)
    }
}

/// Where the messages of each client stand in the batch, by partition. A client's messages stand together as a rule: they came
/// together.
fn by_client<'a>(outs: &[Out<'a>]) -> Vec<((&'a str, i32), Vec<usize>)> {
    let mut groups: Vec<((&'a str, i32), Vec<usize>)> = Vec::new();
    let (mut known, mut present) = (HashMap::new(), None);
    for (at, out) in outs.iter().enumerate() {
        let Some((client, _)) = out.origin else { continue };
        let whose = (client, out.message.partition());
        let group = match present {
            Some((before, group)) if before == whose => group,
            _ => *known.entry(whose).or_insert_with(|| {
                groups.push((whose, Vec::new()));
                groups.len() - 1
            }),
        };
        present = Some((whose, group));
        groups[group].1.push(at);
    }
    groups
}

impl Counter<'_> {
    /// Passes the batch on and commits it, in one transaction.
    fn pass_on(&self, outs: &[Out<'_>], batch: &[BorrowedMessage<'_>]) -> Result<(), KafkaError> {
        self.producer.begin_transaction()?;
        for out in outs {
            if out.verdict == Verdict::Dropped {
                continue;
            }
            let payload = out.message.payload().unwrap_or_default();
            match (out.dead, out.origin) {
                (None, Some((client, sn))) => {
                    let key = hash_of(payload);
                    let record = BaseRecord::to(MESSAGE_AGGREGATION).key(key.as_bytes()).payload(payload);
                    self.send(record.headers(queue::headers(client, sn)))?;
                }
                (why, _) => {
                    let key = out.message.key().unwrap_or_default();
                    let headers = dead_headers(out.message, why.unwrap_or("no origin"));
                    self.send(BaseRecord::to(DEAD_LETTER).key(key).payload(payload).headers(headers))?;
                }
            }
        }
        self.wait_for_reports()?;
        let group = self.source.consumer.group_metadata().ok_or(KafkaError::Canceled)?;
        let offsets = consume::after(CLIENT_MESSAGE, batch)?;
        self.watch.during(|| self.producer.send_offsets_to_transaction(&offsets, &group, CALL))?;
        self.watch.during(|| self.producer.commit_transaction(CALL))
    }

    /// Waits until the queue has everything that was sent. The client's own wait inside of a commit looks up only ten
    /// times a second, which would be most of a transaction's time; and a look that may wait for less than a millisecond
    /// spins.
    fn wait_for_reports(&self) -> Result<(), KafkaError> {
        let rounds = CALL.as_millis() / REPORT_POLL.as_millis();
        for _ in 0..rounds {
            if self.producer.in_flight_count() == 0 {
                return Ok(());
            }
            self.producer.poll(Duration::ZERO);
            std::thread::sleep(REPORT_POLL);
        }
        Err(KafkaError::Flush(RDKafkaErrorCode::OperationTimedOut))
    }

    fn send(&self, mut record: BaseRecord<'_, [u8], [u8]>) -> Result<(), KafkaError> {
        loop {
            match self.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                    self.producer.poll(Duration::from_millis(2));
                    record = back;
                }
                Err((error, _)) => return Err(error),
            }
        }
    }

    /// After a failed transaction: what was counted is passed on with the next attempt.
    fn undo(&self, error: KafkaError) -> Result<(), Failed> {
        progress::add(&self.progress.aborted, 1);
        tracing::info!(%error, "a transaction is undone");
        self.watch.during(|| self.producer.abort_transaction(CALL))?;
        Ok(self.source.rewind()?)
    }

    fn note(&self, outs: &[Out<'_>]) {
        let counted = outs.iter().filter(|out| out.verdict == Verdict::Counted);
        if let Some(latency) = self.progress.latency.get() {
            latency.on_counted(counted.clone().filter_map(|out| out.origin));
        }
        let (mut fine, mut dead) = (0, 0);
        counted.for_each(|out| if out.dead.is_some() { dead += 1 } else { fine += 1 });
        progress::add(&self.progress.transactions, 1);
        progress::add(&self.progress.counted, fine);
        progress::add(&self.progress.dead, dead);
    }
}

/// Whether a message can be processed. A record that does not say where it comes from cannot be counted for anybody.
fn judge<'a>(message: &'a BorrowedMessage<'a>) -> Out<'a> {
    let origin = queue::origin(message);
    let text = message.payload().is_some_and(|payload| std::str::from_utf8(payload).is_ok());
    let dead = match (&origin, text) {
        (None, _) => Some("no client or sequence number"),
        (Some(_), false) => Some("not text"),
        (Some(_), true) => None,
    };
    // Without an origin nobody's count is concerned: it goes to the dead letters with this transaction.
    let verdict = if origin.is_none() { Verdict::Counted } else { Verdict::Dropped };
    Out { message, origin, dead, verdict }
}

fn dead_headers(message: &BorrowedMessage<'_>, why: &str) -> OwnedHeaders {
    let (partition, offset) = (message.partition().to_string(), message.offset().to_string());
    let origin = queue::origin(message);
    let mut headers = OwnedHeaders::new()
        .insert(Header { key: "why", value: Some(why) })
        .insert(Header { key: "topic", value: Some(message.topic()) })
        .insert(Header { key: "partition", value: Some(&partition) })
        .insert(Header { key: "offset", value: Some(&offset) });
    if let Some((client, sn)) = origin {
        let sn = sn.to_string();
        headers = headers
            .insert(Header { key: "cid", value: Some(client) })
            .insert(Header { key: "sn", value: Some(&sn) });
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_as_large_as_there_is_time_for() {
        let mut size = Size::up_to(20_000);
        let quick = Duration::from_millis(100);
        for (messages, took, is_fine, then) in [
            (3_999, quick, true, 4_000),
            (4_000, quick, true, 8_000),
            (8_000, LASTS * 3 / 4, true, 8_000),
            (8_000, quick, true, 16_000),
            (16_000, LASTS * 2, true, 8_000),
            (8_000, quick, false, 4_000),
        ] {
            size.on_end(messages, took, is_fine);
            assert_eq!(size.now, then, "after {messages} in {took:?}, {is_fine}");
        }
        (0..20).for_each(|_| size.on_end(size.now, quick, true));
        assert_eq!(size.now, 20_000);
        (0..20).for_each(|_| size.on_end(size.now, quick, false));
        assert_eq!(size.now, SMALLEST);
        let mut small = Size::up_to(10);
        small.on_end(10, quick, false);
        assert_eq!(small.now, 10);
    }
}
