//! The counter: counts each client's messages in the store and forwards them, keyed by text, in one transaction with
//! its offsets.
//!
//! A message is counted if it is the client's next one (`last + 1`). A message that was counted before is forwarded
//! again if the attempt that counted it may not have committed, and skipped otherwise. A message behind a gap is
//! skipped only while the gateway keeps it; otherwise the partition is re-read, and messages behind a permanent gap
//! go to the dead-letter topic with the reason. A message that is not text goes to the dead-letter topic with its
//! origin, in the same transaction, and its sequence number counts as processed so that the next message can be
//! counted.
//!
//! | file | owns |
//! |---|---|
//! | `counter/tally.rs` | counting a batch in the store |
//! | `counter/gaps.rs` | handling of sequence gaps |
//! | `counter/sizing.rs` | the batch size |

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
use self::tally::{CountedRecord, Record, Step, Tally};
use crate::consume::{self, BatchError, Source, Watchdog, retry_while_unavailable};
use crate::partition;
use crate::progress::{self, Progress};
use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::{CountOutcome, Store, hash_of};

/// Timeout of transactional calls. The transaction is then aborted, because the group waits for this member.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval while waiting for deliveries: only failures are reported.
const REPORT_POLL: Duration = Duration::from_millis(2);
/// Interval at which an idle counter checks for clients that are behind; it doubles while none is found.
const IDLE_CHECK_MIN: Duration = Duration::from_secs(1);
const IDLE_CHECK_MAX: Duration = Duration::from_secs(30);

/// Settings of a counter.
#[derive(Clone, Debug)]
pub struct CounterOptions {
    /// The queue to read from and write to.
    pub queue: QueueOptions,
    /// Instance number; unique per instance.
    pub instance: usize,
    /// Maximum number of messages per transaction.
    pub transaction_size: usize,
}

/// Starts a counter on its own thread; it ends with `shutdown`.
pub fn start(
    options: CounterOptions,
    store: Store,
    progress: Progress,
    runtime: Handle,
    shutdown: Shutdown,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let name = format!("counter-{}", options.instance);
    consume::run(name, shutdown, move |shutdown, watchdog| {
        let mut counter =
            Counter::open(&options, watchdog, store.clone(), progress.clone(), runtime.clone())?;
        while !shutdown.is_stopped() {
            counter.step(shutdown)?;
        }
        Ok(())
    })
}

struct Counter<'w> {
    watchdog: &'w Watchdog,
    sizing: Sizing,
    source: Source,
    producer: BaseProducer<DefaultProducerContext>,
    tally: Tally,
    runtime: Handle,
    /// Partition count over which texts are spread.
    text_partitions: i32,
    next_check: Instant,
    check_interval: Duration,
    progress: Progress,
}

impl<'w> Counter<'w> {
    fn open(
        options: &CounterOptions,
        watchdog: &'w Watchdog,
        store: Store,
        progress: Progress,
        runtime: Handle,
    ) -> Result<Self, BatchError> {
        let role = format!("counter-{}", options.instance);
        let producer: BaseProducer<DefaultProducerContext> = options.queue.transactional(&role).create()?;
        watchdog.guard_call(|| producer.init_transactions(CALL_TIMEOUT))?;
        let there = watchdog.guard_call(|| queue::partitions(producer.client(), MESSAGE_AGGREGATION))?;
        let text_partitions =
            runtime.block_on(retry_while_unavailable(&Shutdown::new(), || store.pin_texts(there)))?;
        let source = Source::subscribe(&options.queue.consumer("counter"), CLIENT_MESSAGE)?;
        watchdog.register_consumer(&source);
        Ok(Self {
            watchdog,
            sizing: Sizing::up_to(options.transaction_size),
            source,
            producer,
            tally: Tally::new(store),
            runtime,
            text_partitions,
            next_check: Instant::now() + IDLE_CHECK_MIN,
            check_interval: IDLE_CHECK_MIN,
            progress,
        })
    }

    fn step(&mut self, shutdown: &Shutdown) -> Result<(), BatchError> {
        let batch = self.source.gather(self.sizing.now(), shutdown);
        if self.source.has_rebalanced() {
            self.tally.on_rebalance();
        }
        if batch.is_empty() {
            return match self.rereads_when_idle()? {
                rereads if rereads.is_empty() => Ok(()),
                rereads => self.reread(&rereads, &rereads),
            };
        }
        self.next_check = Instant::now() + IDLE_CHECK_MIN;
        self.check_interval = IDLE_CHECK_MIN;
        let since = Instant::now();
        let records: Vec<Record<'_>> = batch.iter().map(record).collect();
        let outs = match self.runtime.block_on(self.tally.count(&records, shutdown)) {
            // Another counter owns the partition and has begun to count: a rebalance is due, or has already been
            // announced.
            Err(BatchError::Fenced) => {
                self.tally.on_rebalance();
                return Ok(self.source.rewind()?);
            }
            Ok(Step::Reread(rereads)) => {
                let mut seeks = BTreeMap::new();
                for record in &records {
                    seeks.entry(record.partition).or_insert(record.offset);
                }
                seeks.extend(&rereads);
                return self.reread(&rereads, &seeks);
            }
            Ok(Step::Forward(outs)) => outs,
            Err(error) => return Err(error),
        };
        let after = consume::offsets_after(CLIENT_MESSAGE, &batch)?;
        let forwarded = self.forward(&outs, &after);
        self.sizing.on_end(batch.len(), since.elapsed(), forwarded.is_ok());
        match forwarded {
            Ok(()) => {
                self.record_progress(&outs);
                for at in after.elements() {
                    if let Offset::Offset(next) = at.offset() {
                        self.tally.on_committed(at.partition(), next);
                    }
                }
                Ok(())
            }
            Err(error) => self.abort(error),
        }
    }

    /// Partitions in which a client is behind although everything was read: the store has lost writes.
    fn rereads_when_idle(&mut self) -> Result<BTreeMap<i32, i64>, BatchError> {
        if Instant::now() < self.next_check {
            return Ok(BTreeMap::new());
        }
        let assigned = self.source.consumer.assignment()?;
        let assigned: Vec<i32> = assigned.elements().iter().map(|at| at.partition()).collect();
        let mut rereads = match self.runtime.block_on(self.tally.find_behind(&assigned)) {
            Ok(rereads) => rereads,
            Err(error) => {
                tracing::debug!(%error, "idle check failed");
                BTreeMap::new()
            }
        };
        self.check_interval = if self.tally.has_suspects() {
            IDLE_CHECK_MIN
        } else {
            (self.check_interval * 2).min(IDLE_CHECK_MAX)
        };
        self.next_check = Instant::now() + self.check_interval;
        if !rereads.is_empty() {
            let committed = self.watchdog.guard_call(|| self.source.consumer.committed(CALL_TIMEOUT))?;
            let committed = committed.elements();
            for (partition, from) in &mut rereads {
                let at = committed.iter().find(|at| at.partition() == *partition).map(|at| at.offset());
                let committed = if let Some(Offset::Offset(offset)) = at { offset } else { 0 };
                // Messages counted by an aborted transaction lie before the client's position, and are not forwarded
                // yet.
                *from = committed.min(*from);
                let offset = *from;
                tracing::warn!(partition, offset, "client counts behind the queue; partition re-read");
            }
        }
        Ok(rereads)
    }

    /// Seeks to `seeks`. The offsets of `rereads` are committed first: from then on no counter starts after the
    /// messages that must be re-read.
    fn reread(&mut self, rereads: &BTreeMap<i32, i64>, seeks: &BTreeMap<i32, i64>) -> Result<(), BatchError> {
        progress::add(&self.progress.reread, rereads.len() as u64);
        let mut offsets = TopicPartitionList::with_capacity(rereads.len());
        for (partition, offset) in rereads {
            offsets.add_partition_offset(CLIENT_MESSAGE, *partition, Offset::Offset(*offset))?;
        }
        let committed = self.producer.begin_transaction().and_then(|()| self.commit(&offsets));
        if let Err(error) = committed {
            self.tally.on_rebalance();
            return self.abort(error);
        }
        // The messages from this offset on are about to be counted and forwarded again.
        for (partition, offset) in rereads {
            self.tally.on_committed(*partition, *offset);
        }
        for (partition, offset) in seeks {
            self.source.consumer.seek(CLIENT_MESSAGE, *partition, Offset::Offset(*offset), CALL_TIMEOUT)?;
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
    /// Forwards the batch and commits its offsets, in one transaction.
    fn forward(&self, outs: &[CountedRecord<'_>], after: &TopicPartitionList) -> Result<(), KafkaError> {
        self.producer.begin_transaction()?;
        for out in outs {
            if out.outcome == CountOutcome::Dropped {
                continue;
            }
            let payload = out.record.payload.unwrap_or_default();
            match (&out.dead, out.record.origin) {
                (None, Some((client, sn))) => {
                    let key = hash_of(payload);
                    let partition = partition::of(key.as_bytes(), self.text_partitions);
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

    /// Commits a transaction with these offsets.
    fn commit(&self, offsets: &TopicPartitionList) -> Result<(), KafkaError> {
        let group = self.source.consumer.group_metadata().ok_or(KafkaError::Canceled)?;
        self.watchdog
            .guard_call(|| self.producer.send_offsets_to_transaction(offsets, &group, CALL_TIMEOUT))?;
        self.watchdog.guard_call(|| self.producer.commit_transaction(CALL_TIMEOUT))
    }

    /// Waits until all sent records are delivered. The client's own flush inside a commit polls only ten times a
    /// second, which would be most of a transaction's time; a poll with a timeout below one millisecond spins.
    fn wait_for_reports(&self) -> Result<(), KafkaError> {
        let rounds = CALL_TIMEOUT.as_millis() / REPORT_POLL.as_millis();
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

    /// Aborts a failed transaction: its counted messages are forwarded by the next attempt.
    fn abort(&mut self, error: KafkaError) -> Result<(), BatchError> {
        progress::add(&self.progress.aborted, 1);
        tracing::info!(%error, "transaction aborted");
        self.watchdog.guard_call(|| self.producer.abort_transaction(CALL_TIMEOUT))?;
        Ok(self.source.rewind()?)
    }

    fn record_progress(&self, outs: &[CountedRecord<'_>]) {
        let counted = outs.iter().filter(|out| out.outcome == CountOutcome::Counted);
        if let Some(latency) = self.progress.latency.get() {
            latency.on_counted(counted.clone().filter_map(|out| out.record.origin));
        }
        let (mut fine, mut dead) = (0, 0);
        counted.for_each(|out| if out.dead.is_some() { dead += 1 } else { fine += 1 });
        let parked = outs.iter().filter(|out| out.outcome == CountOutcome::Ahead).count();
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
