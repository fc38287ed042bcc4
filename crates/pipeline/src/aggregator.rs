//! The aggregator: counts each distinct text in the store, once per client and sequence number.
//!
//! Offsets are committed after the store has everything up to them. Messages that are re-read after a crash are
//! recognised, so counting is idempotent (`aggregator/tally.rs`).

pub(crate) mod tally;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::topic_partition_list::Offset;
use tokio::runtime::Handle;
use tokio::time::Instant;

use moim_base::task::Shutdown;

use crate::consume::{self, BatchError, Source, Watchdog};
use crate::progress::{self, Progress};
use crate::queue::{self, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::{Store, hash_of};

use self::tally::{Record, Step, Tally};

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which an idle aggregator checks whether the store has lost counts; it doubles while none is found.
const IDLE_CHECK_MIN: Duration = Duration::from_secs(1);
const IDLE_CHECK_MAX: Duration = Duration::from_secs(60);

/// Settings of an aggregator.
#[derive(Clone, Debug)]
pub struct AggregatorOptions {
    /// The queue to read from.
    pub queue: QueueOptions,
    /// Instance number.
    pub instance: usize,
    /// Maximum number of messages between two commits.
    pub batch: usize,
}

/// Starts an aggregator on its own thread; it ends with `shutdown`.
pub fn start(
    options: AggregatorOptions,
    store: Store,
    progress: Progress,
    runtime: Handle,
    shutdown: Shutdown,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let name = format!("aggregator-{}", options.instance);
    consume::run(name, shutdown, work(options, store, progress, runtime))
}

/// Aggregates until the shutdown or a failure.
fn work(
    options: AggregatorOptions,
    store: Store,
    progress: Progress,
    runtime: Handle,
) -> impl Fn(&Shutdown, &Watchdog) -> Result<(), BatchError> + Send + Sync + 'static {
    move |shutdown, watchdog| {
        let source = Source::subscribe(&options.queue.consumer("aggregator"), MESSAGE_AGGREGATION)?;
        watchdog.register_consumer(&source);
        let mut tally = Tally::new(store.clone());
        let (mut next_check, mut check_interval) = (Instant::now() + IDLE_CHECK_MIN, IDLE_CHECK_MIN);
        while !shutdown.is_stopped() {
            let batch = source.gather(options.batch, shutdown);
            if source.has_rebalanced() {
                tally.on_rebalance();
            }
            if batch.is_empty() {
                if Instant::now() >= next_check {
                    let assigned = source.consumer.assignment()?;
                    let assigned: Vec<i32> = assigned.elements().iter().map(|at| at.partition()).collect();
                    if let Step::Reread(rereads) = runtime.block_on(tally.idle_check(&assigned, shutdown))? {
                        seek(&source, &rereads)?;
                    }
                    check_interval = (check_interval * 2).min(IDLE_CHECK_MAX);
                    next_check = Instant::now() + check_interval;
                }
                continue;
            }
            (next_check, check_interval) = (Instant::now() + IDLE_CHECK_MIN, IDLE_CHECK_MIN);
            if let Step::Reread(rereads) = runtime.block_on(aggregate(&mut tally, &batch, shutdown))? {
                let mut seeks = BTreeMap::new();
                for message in &batch {
                    seeks.entry(message.partition()).or_insert(message.offset().unsigned_abs());
                }
                seeks.extend(rereads);
                seek(&source, &seeks)?;
                continue;
            }
            progress::add(&progress.aggregated, batch.len() as u64);
            progress::add(&progress.steps, 1);
            let offsets = consume::offsets_after(MESSAGE_AGGREGATION, &batch)?;
            if let Err(error) = watchdog.guard_call(|| source.consumer.commit(&offsets, CommitMode::Sync)) {
                // The batch is re-read, here or by another aggregator, and still counts once.
                tracing::debug!(%error, "offset commit failed");
            }
        }
        Ok(())
    }
}

/// Seeks to these offsets.
fn seek(source: &Source, offsets: &BTreeMap<i32, u64>) -> Result<(), BatchError> {
    for (partition, offset) in offsets {
        let offset = Offset::Offset(i64::try_from(*offset).unwrap_or(i64::MAX));
        source.consumer.seek(MESSAGE_AGGREGATION, *partition, offset, CALL_TIMEOUT)?;
    }
    Ok(())
}

async fn aggregate(
    tally: &mut Tally,
    batch: &[BorrowedMessage<'_>],
    shutdown: &Shutdown,
) -> Result<Step, BatchError> {
    let hashes: Vec<Cow<'_, str>> = batch.iter().map(hash_in).collect();
    // Only the counter writes to this topic, always with an origin.
    let records = batch.iter().zip(&hashes).filter_map(|(message, hash)| {
        let (client, sn) = queue::origin(message)?;
        Some(Record {
            partition: message.partition(),
            offset: message.offset().unsigned_abs(),
            client,
            sn,
            hash,
            text: message.payload().unwrap_or_default(),
        })
    });
    let records: Vec<Record<'_>> = records.collect();
    Ok(tally.count(&records, shutdown).await?)
}

/// Hash of a text: the record key that the counter computed.
fn hash_in<'a>(message: &'a BorrowedMessage<'_>) -> Cow<'a, str> {
    let is_hash = |key: &&[u8]| key.len() == 32 && key.iter().all(u8::is_ascii_hexdigit);
    let key = message.key().filter(is_hash).and_then(|key| std::str::from_utf8(key).ok());
    key.map_or_else(|| hash_of(message.payload().unwrap_or_default()).into(), Cow::Borrowed)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, mpsc};

    use bytes::Bytes;
    use rdkafka::ClientConfig;
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

    use super::*;
    use crate::store::{BoxFuture, Commands, Reply, StoreError};

    /// A store that accepts every command, and reports every aggregated text.
    struct AcceptAll {
        told: mpsc::SyncSender<()>,
        go_on: std::sync::Mutex<mpsc::Receiver<()>>,
    }

    impl Commands for AcceptAll {
        fn call<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Reply, StoreError>> {
            // A counted text stays counted.
            if command[0] == b"HGET" {
                return Box::pin(std::future::ready(Ok(Reply::Int(i64::MAX))));
            }
            let reply = match command[0] {
                b"HMGET" => command[2..].iter().map(|_| Reply::Nil).collect(),
                // Nothing has been read yet, for one client.
                b"EVAL" | b"EVALSHA" if command[2] == b"2" => {
                    vec![
                        Reply::Bytes("ok".into()),
                        Reply::Int(0),
                        Reply::Int(0),
                        Reply::Int(0),
                        Reply::Int(0),
                    ]
                }
                _ => vec![Reply::Bytes("ok".into()), Reply::Int(1)],
            };
            // The aggregation script is the one with five keys.
            if command[0].starts_with(b"EVAL") && command[2] == b"5" {
                self.told.send(()).unwrap();
                self.go_on.lock().unwrap().recv().unwrap();
            }
            Box::pin(std::future::ready(Ok(Reply::Array(reply))))
        }

        fn call_all<'a>(&'a self, _: &[&[u8]]) -> BoxFuture<'a, Result<Vec<Reply>, StoreError>> {
            Box::pin(std::future::ready(Ok(Vec::new())))
        }

        fn keys<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Bytes>, StoreError>> {
            Box::pin(std::future::ready(Ok(Vec::new())))
        }
    }

    fn put(brokers: &str, sn: u64) {
        let producer: BaseProducer = ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap();
        let record = BaseRecord::to(MESSAGE_AGGREGATION).key("k").payload("text");
        producer.send(record.headers(queue::headers("c", sn))).map_err(|(error, _)| error).unwrap();
        producer.flush(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn aggregator_with_a_hung_commit_is_replaced() {
        let patience = Duration::from_secs(60);
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic(MESSAGE_AGGREGATION, 1, 1).unwrap();
        let queue = QueueOptions {
            brokers: cluster.bootstrap_servers(),
            partitions: 1,
            factor: None,
            name: "test".to_owned(),
        };
        let ((told, heard), (go_on, going)) = (mpsc::sync_channel(10), mpsc::sync_channel(10));
        let store = Store::new(Arc::new(AcceptAll { told, go_on: std::sync::Mutex::new(going) }));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let options = AggregatorOptions { queue: queue.clone(), instance: 0, batch: 10 };
        let work = work(options, store, Progress::default(), runtime.handle().clone());
        let starts = Arc::new(AtomicU64::new(0));
        let counted = {
            let starts = Arc::clone(&starts);
            move |shutdown: &Shutdown, watchdog: &Watchdog| {
                starts.fetch_add(1, Ordering::SeqCst);
                work(shutdown, watchdog)
            }
        };
        let shutdown = Shutdown::new();
        let limit = Duration::from_millis(500);
        let watched =
            consume::run_with_limit("test".to_owned(), shutdown.clone(), limit, Arc::new(counted)).unwrap();
        put(&queue.brokers, 1);
        heard.recv_timeout(patience).expect("the first message was not counted");
        // From now on the broker does not answer: the next commit hangs.
        cluster.broker_round_trip_time(1, Duration::from_secs(3_600)).unwrap();
        go_on.send(()).unwrap();
        for _ in 0..6_000 {
            if starts.load(Ordering::SeqCst) > 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(starts.load(Ordering::SeqCst) > 1, "the hung instance was not replaced");
        cluster.broker_round_trip_time(1, Duration::ZERO).unwrap();
        (0..9).for_each(|_| go_on.send(()).unwrap());
        put(&queue.brokers, 2);
        heard.recv_timeout(patience).expect("the second message was not counted");
        shutdown.stop();
        watched.join().unwrap();
    }
}
