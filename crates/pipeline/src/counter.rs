//! The counter: counts each client's messages in the store and passes them on, keyed by text, in one transaction with
//! its offsets.
//!
//! A message is counted when it is the client's next (`last + 1`). One that was counted before is passed on again if the
//! attempt that counted it may not have committed, and left aside otherwise. One behind a gap is left aside only while the
//! gateway keeps it; otherwise the partition is read again, and what cannot be helped goes to the dead letters with the reason.
//! What is no text goes to the dead letters with its origin, in the same transaction, and its number counts as done so that the
//! next one goes on.
//!
//! | file | owns |
//! |---|---|
//! | `counter/tally.rs` | a batch on its way into the store |
//! | `counter/gaps.rs` | what to do behind a gap |
//! | `counter/sizing.rs` | how large a batch is |

mod gaps;
mod sizing;
pub(crate) mod tally;

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::consumer::Consumer;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::runtime::Handle;
use tokio::time::Instant;

use moim_base::task::Shutdown;

use self::sizing::Sizing;
use self::tally::{Out, Record, Step, Tally};
use crate::consume::{self, Failed, Source, Watch, patiently};
use crate::partition;
use crate::progress::{self, Progress};
use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::{Store, Verdict, hash_of};

/// A transaction that cannot be carried on for so long is undone: meanwhile the group waits for us.
const CALL: Duration = Duration::from_secs(10);
/// Between looks whether everything was stored: only failures are reported.
const REPORT_POLL: Duration = Duration::from_millis(2);
/// An idle counter looks so often whether a client is behind, and less and less often while none is.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_LEAST: Duration = Duration::from_secs(30);

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

struct Counter<'w> {
    watch: &'w Watch,
    sizing: Sizing,
    source: Source,
    producer: BaseProducer<DefaultProducerContext>,
    tally: Tally,
    runtime: Handle,
    /// Over how many partitions texts are spread.
    texts: i32,
    look_at: Instant,
    look_every: Duration,
    progress: Progress,
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
        let there = watch.during(|| queue::partitions(producer.client(), MESSAGE_AGGREGATION))?;
        let texts = runtime.block_on(patiently(&Shutdown::new(), || store.pin_texts(there)))?;
        let source = Source::subscribe(&options.queue.consumer("counter"), CLIENT_MESSAGE)?;
        watch.reads_from(&source);
        Ok(Self {
            watch,
            sizing: Sizing::up_to(options.transaction_size),
            source,
            producer,
            tally: Tally::new(store),
            runtime,
            texts,
            look_at: Instant::now() + LOOK,
            look_every: LOOK,
            progress,
        })
    }

    fn step(&mut self, shutdown: &Shutdown) -> Result<(), Failed> {
        let batch = self.source.gather(self.sizing.now(), shutdown);
        if self.source.has_changed() {
            self.tally.on_change();
        }
        if batch.is_empty() {
            return match self.rereads_when_idle()? {
                rereads if rereads.is_empty() => Ok(()),
                rereads => self.read_again(&rereads, &rereads),
            };
        }
        self.look_at = Instant::now() + LOOK;
        self.look_every = LOOK;
        let since = Instant::now();
        let records: Vec<Record<'_>> = batch.iter().map(record).collect();
        let outs = match self.runtime.block_on(self.tally.count(&records, shutdown)) {
            // Another counter has been given the partition and has begun: the next rebalance tells us, or told us.
            Err(Failed::Fenced) => {
                self.tally.on_change();
                return Ok(self.source.rewind()?);
            }
            Ok(Step::Reread(rereads)) => {
                let mut seeks = BTreeMap::new();
                for record in &records {
                    seeks.entry(record.partition).or_insert(record.offset);
                }
                seeks.extend(&rereads);
                return self.read_again(&rereads, &seeks);
            }
            Ok(Step::PassOn(outs)) => outs,
            Err(error) => return Err(error),
        };
        let after = consume::after(CLIENT_MESSAGE, &batch)?;
        let passed = self.pass_on(&outs, &after);
        self.sizing.on_end(batch.len(), since.elapsed(), passed.is_ok());
        match passed {
            Ok(()) => {
                self.note(&outs);
                for at in after.elements() {
                    if let Offset::Offset(next) = at.offset() {
                        self.tally.on_committed(at.partition(), next);
                    }
                }
                Ok(())
            }
            Err(error) => self.undo(error),
        }
    }

    /// Partitions in which a client is behind although everything was read: the store went back.
    fn rereads_when_idle(&mut self) -> Result<BTreeMap<i32, i64>, Failed> {
        if Instant::now() < self.look_at {
            return Ok(BTreeMap::new());
        }
        let assigned = self.source.consumer.assignment()?;
        let assigned: Vec<i32> = assigned.elements().iter().map(|at| at.partition()).collect();
        let mut rereads = match self.runtime.block_on(self.tally.behind(&assigned)) {
            Ok(rereads) => rereads,
            Err(error) => {
                tracing::debug!(%error, "cannot look for clients that are behind");
                BTreeMap::new()
            }
        };
        self.look_every =
            if self.tally.has_suspects() { LOOK } else { (self.look_every * 2).min(LOOK_LEAST) };
        self.look_at = Instant::now() + self.look_every;
        if !rereads.is_empty() {
            let committed = self.watch.during(|| self.source.consumer.committed(CALL))?;
            let committed = committed.elements();
            for (partition, from) in &mut rereads {
                let at = committed.iter().find(|at| at.partition() == *partition).map(|at| at.offset());
                let committed = if let Some(Offset::Offset(offset)) = at { offset } else { 0 };
                // What a transaction that was undone has counted is behind the client's position, and not passed on.
                *from = committed.min(*from);
                let offset = *from;
                tracing::warn!(
                    partition,
                    offset,
                    "client counts behind the queue; reading the partition again"
                );
            }
        }
        Ok(rereads)
    }

    /// Goes back to `seeks`. The offsets of `rereads` are committed first: whatever happens from then on, no counter begins
    /// behind what has to be read again.
    fn read_again(&mut self, rereads: &BTreeMap<i32, i64>, seeks: &BTreeMap<i32, i64>) -> Result<(), Failed> {
        progress::add(&self.progress.reread, rereads.len() as u64);
        let mut offsets = TopicPartitionList::with_capacity(rereads.len());
        for (partition, offset) in rereads {
            offsets.add_partition_offset(CLIENT_MESSAGE, *partition, Offset::Offset(*offset))?;
        }
        let committed = self.producer.begin_transaction().and_then(|()| self.commit(&offsets));
        if let Err(error) = committed {
            self.tally.on_change();
            return self.undo(error);
        }
        // What lies behind is about to be counted once more, and passed on once more.
        for (partition, offset) in rereads {
            self.tally.on_committed(*partition, *offset);
        }
        for (partition, offset) in seeks {
            self.source.consumer.seek(CLIENT_MESSAGE, *partition, Offset::Offset(*offset), CALL)?;
        }
        Ok(())
    }
}

fn record<'a>(message: &'a BorrowedMessage<'a>) -> Record<'a> {
    Record {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().unwrap_or_default(),
        payload: message.payload(),
        origin: queue::origin(message),
    }
}

impl Counter<'_> {
    /// Passes the batch on and commits it, in one transaction.
    fn pass_on(&self, outs: &[Out<'_>], after: &TopicPartitionList) -> Result<(), KafkaError> {
        self.producer.begin_transaction()?;
        for out in outs {
            if out.verdict == Verdict::Dropped {
                continue;
            }
            let payload = out.record.payload.unwrap_or_default();
            match (&out.dead, out.record.origin) {
                (None, Some((client, sn))) => {
                    let key = hash_of(payload);
                    let partition = partition::of(key.as_bytes(), self.texts);
                    let record = BaseRecord::to(MESSAGE_AGGREGATION)
                        .partition(partition)
                        .key(key.as_bytes())
                        .payload(payload);
                    self.send(record.headers(queue::headers(client, sn)))?;
                }
                (why, _) => {
                    let headers = dead_headers(&out.record, why.as_deref().unwrap_or("no origin"));
                    let record = BaseRecord::to(DEAD_LETTER).key(out.record.key).payload(payload);
                    self.send(record.headers(headers))?;
                }
            }
        }
        self.wait_for_reports()?;
        self.commit(after)
    }

    /// Ends a transaction with these offsets.
    fn commit(&self, offsets: &TopicPartitionList) -> Result<(), KafkaError> {
        let group = self.source.consumer.group_metadata().ok_or(KafkaError::Canceled)?;
        self.watch.during(|| self.producer.send_offsets_to_transaction(offsets, &group, CALL))?;
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
    fn undo(&mut self, error: KafkaError) -> Result<(), Failed> {
        progress::add(&self.progress.aborted, 1);
        tracing::info!(%error, "transaction aborted");
        self.watch.during(|| self.producer.abort_transaction(CALL))?;
        Ok(self.source.rewind()?)
    }

    fn note(&self, outs: &[Out<'_>]) {
        let counted = outs.iter().filter(|out| out.verdict == Verdict::Counted);
        if let Some(latency) = self.progress.latency.get() {
            latency.on_counted(counted.clone().filter_map(|out| out.record.origin));
        }
        let (mut fine, mut dead) = (0, 0);
        counted.for_each(|out| if out.dead.is_some() { dead += 1 } else { fine += 1 });
        let parked = outs.iter().filter(|out| out.verdict == Verdict::Ahead).count();
        progress::add(&self.progress.parked, parked as u64);
        progress::add(&self.progress.transactions, 1);
        progress::add(&self.progress.counted, fine);
        progress::add(&self.progress.dead, dead);
    }
}

fn dead_headers(record: &Record<'_>, why: &str) -> OwnedHeaders {
    let (partition, offset) = (record.partition.to_string(), record.offset.to_string());
    let mut headers = OwnedHeaders::new()
        .insert(Header { key: "why", value: Some(why) })
        .insert(Header { key: "topic", value: Some(CLIENT_MESSAGE) })
        .insert(Header { key: "partition", value: Some(&partition) })
        .insert(Header { key: "offset", value: Some(&offset) });
    if let Some((client, sn)) = record.origin {
        let sn = sn.to_string();
        headers = headers
            .insert(Header { key: "cid", value: Some(client) })
            .insert(Header { key: "sn", value: Some(&sn) });
    }
    headers
}
