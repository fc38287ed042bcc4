//! The consumer shared by counter and aggregator: a thread per instance that gathers batches and detects rebalances.
//!
//! The transactional calls of the Kafka client block, so each instance has its own thread; it calls the store through
//! the runtime's handle.
//!
//! Some of these calls may never return: librdkafka 2.12 drops the waiter when the broker it had asked leaves the
//! cluster metadata. So every instance has a watchdog thread ([`run`]). An instance whose call exceeds its own
//! timeout is abandoned and replaced. The replacement's transactional id fences the abandoned instance.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::{ClientConfig, ClientContext};
use tokio::time::Instant;

use moim_base::task::Shutdown;
use moim_base::{Clock, SystemClock};

use crate::store::StoreError;

/// How long an idle consumer polls for the next message.
const POLL_TIMEOUT: Duration = Duration::from_millis(50);
/// Byte limit of a batch, whatever its message count: a single message can have a megabyte.
const BATCH_BYTES: usize = 16 << 20;
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a batch waits for more messages under load: the cost of a batch does not depend on its size. A previous
/// batch of at least [`BUSY_BATCH`] messages indicates load.
const LINGER: Duration = Duration::from_millis(10);
const BUSY_BATCH: usize = 500;

/// How long the store may be unavailable before the batch, and with it the group membership, is given up: another
/// member may reach the store. Shorter than `max.poll.interval.ms`.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);
const STORE_RETRY: Duration = Duration::from_millis(100);

/// Why a batch failed. The consumer rewinds to the committed offsets.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BatchError {
    #[error(transparent)]
    Kafka(#[from] KafkaError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("partition fenced by a newer counter generation")]
    Fenced,
}

/// Counts rebalances.
#[derive(Default)]
pub(crate) struct RebalanceCounter {
    changes: Arc<AtomicU64>,
}

impl ClientContext for RebalanceCounter {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "consumer error");
    }
}

impl ConsumerContext for RebalanceCounter {
    fn pre_rebalance(&self, _: &BaseConsumer<Self>, _: &Rebalance<'_>) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }
}

/// A consumer of one topic.
pub(crate) struct Source {
    pub(crate) consumer: Arc<BaseConsumer<RebalanceCounter>>,
    changes: Arc<AtomicU64>,
    seen: Cell<u64>,
    /// The fetch of the committed offsets failed.
    needs_offset_refetch: Cell<bool>,
    /// The last batch was a large one.
    is_busy: Cell<bool>,
}

impl Source {
    pub(crate) fn subscribe(config: &ClientConfig, topic: &str) -> Result<Self, KafkaError> {
        let context = RebalanceCounter::default();
        let changes = Arc::clone(&context.changes);
        let consumer: BaseConsumer<RebalanceCounter> = config.create_with_context(context)?;
        consumer.subscribe(&[topic])?;
        let (seen, needs_offset_refetch, is_busy) = (Cell::new(0), Cell::new(false), Cell::new(false));
        Ok(Self { consumer: Arc::new(consumer), changes, seen, needs_offset_refetch, is_busy })
    }

    /// True if a rebalance happened since the last call.
    pub(crate) fn has_rebalanced(&self) -> bool {
        let now = self.changes.load(Ordering::SeqCst);
        self.seen.replace(now) != now
    }

    /// Gathers up to `at_most` messages; fewer as soon as none is waiting, or after [`LINGER`] under load. The
    /// messages borrow the client's buffers.
    pub(crate) fn gather(&self, at_most: usize, shutdown: &Shutdown) -> Vec<BorrowedMessage<'_>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        if self.needs_offset_refetch.take()
            && let Err(error) = self.refetch_committed_offsets()
        {
            tracing::debug!(%error, "committed offset fetch failed; retrying");
            self.needs_offset_refetch.set(true);
        }
        let mut until = None;
        while batch.len() < at_most && bytes < BATCH_BYTES && !shutdown.is_stopped() {
            match self.next(batch.is_empty(), &mut until) {
                Some(Ok(message)) => {
                    bytes += message.payload_len();
                    batch.push(message);
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "consumer poll error");
                    self.needs_offset_refetch
                        .set(self.needs_offset_refetch.get() || leaves_partitions_unread(&error));
                    break;
                }
                None => break,
            }
        }
        self.is_busy.set(batch.len() >= BUSY_BATCH);
        batch
    }

    /// The next message. `until` is the deadline of a batch that is not full, once it is set.
    fn next(
        &self,
        is_first: bool,
        until: &mut Option<Instant>,
    ) -> Option<Result<BorrowedMessage<'_>, KafkaError>> {
        if is_first {
            return self.consumer.poll(POLL_TIMEOUT);
        }
        let waiting = self.consumer.poll(Duration::ZERO);
        if waiting.is_some() || !self.is_busy.get() {
            return waiting;
        }
        let now = Instant::now();
        let until = *until.get_or_insert(now + LINGER);
        self.consumer.poll(until.saturating_duration_since(now))
    }

    /// Fetches the committed offsets again. Only between batches: messages that were read and not committed are read
    /// again.
    fn refetch_committed_offsets(&self) -> Result<(), KafkaError> {
        let mut partitions = self.consumer.assignment()?;
        if partitions.count() == 0 {
            return Ok(()); // a new assignment fetches the offsets anyway
        }
        partitions.set_all_offsets(Offset::Stored)?;
        self.consumer.assign(&partitions)
    }

    /// Seeks to the committed offsets.
    pub(crate) fn rewind(&self) -> Result<(), KafkaError> {
        let committed = self.consumer.committed(CALL_TIMEOUT)?;
        for partition in committed.elements() {
            let offset = match partition.offset() {
                Offset::Offset(offset) => Offset::Offset(offset),
                _ => Offset::Beginning,
            };
            self.consumer.seek(partition.topic(), partition.partition(), offset, CALL_TIMEOUT)?;
        }
        Ok(())
    }
}

/// True if partitions may stay unread: librdkafka fetches the committed offsets of an assignment once, passes a
/// NOT_COORDINATOR error on to the application, and waits for the next assignment.
fn leaves_partitions_unread(error: &KafkaError) -> bool {
    use rdkafka::types::RDKafkaErrorCode::{CoordinatorNotAvailable, NotCoordinator};
    matches!(error.rdkafka_error_code(), Some(NotCoordinator | CoordinatorNotAvailable))
}

/// Retries a store call until it succeeds, or until the store has been unavailable for [`STORE_TIMEOUT`].
pub(crate) async fn retry_while_unavailable<T, F: Future<Output = Result<T, StoreError>>>(
    shutdown: &Shutdown,
    mut call: impl FnMut() -> F,
) -> Result<T, StoreError> {
    let until = Instant::now() + STORE_TIMEOUT;
    loop {
        match call().await {
            Err(StoreError::Unavailable(why)) if Instant::now() < until && !shutdown.is_stopped() => {
                tracing::debug!(why, "store call failed; retrying");
                tokio::time::sleep(STORE_RETRY).await;
            }
            other => return other,
        }
    }
}

/// The offsets to commit after a batch.
pub(crate) fn offsets_after(
    topic: &str,
    batch: &[BorrowedMessage<'_>],
) -> Result<TopicPartitionList, KafkaError> {
    let mut next = BTreeMap::new();
    // Messages of a partition are usually adjacent.
    for row in batch.chunk_by(|one, other| one.partition() == other.partition()) {
        next.extend(row.last().map(|message| (message.partition(), message.offset() + 1)));
    }
    let mut list = TopicPartitionList::with_capacity(next.len());
    for (partition, offset) in next {
        list.add_partition_offset(topic, partition, Offset::Offset(offset))?;
    }
    Ok(list)
}

/// Limit for a call that has its own timeout of [`CALL_TIMEOUT`]; then the watchdog abandons the instance.
const CALL_LIMIT: Duration = Duration::from_secs(12);
/// Watchdog interval.
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(100);

/// State shared between an instance and its watchdog.
pub(crate) struct Watchdog {
    clock: SystemClock,
    /// Start of a blocking call in progress; 0 if absent.
    since_ms: AtomicU64,
    /// The consumer through which the watchdog leaves the group.
    leave_group: Mutex<Option<Arc<BaseConsumer<RebalanceCounter>>>>,
}

impl Watchdog {
    fn new() -> Self {
        Self { clock: SystemClock::new(), since_ms: AtomicU64::new(0), leave_group: Mutex::default() }
    }

    /// Registers the consumer of the instance.
    pub(crate) fn register_consumer(&self, source: &Source) {
        *self.leave_group.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&source.consumer));
    }

    /// Runs a call that may never return.
    pub(crate) fn guard_call<T>(&self, call: impl FnOnce() -> T) -> T {
        self.since_ms.store(self.clock.monotonic_ms().max(1), Ordering::SeqCst);
        let result = call();
        self.since_ms.store(0, Ordering::SeqCst);
        result
    }

    fn is_overdue(&self, limit: Duration) -> bool {
        let since = self.since_ms.load(Ordering::SeqCst);
        since > 0 && u128::from(self.clock.monotonic_ms().saturating_sub(since)) > limit.as_millis()
    }

    /// Leaves the group. Leaving causes a rebalance, which the consumer must poll for.
    fn leave_group(&self) {
        let Some(consumer) = self.leave_group.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        consumer.unsubscribe();
        for _ in 0..10 {
            // The next owner of the partition reads these messages again: none of them is committed.
            let _ = consumer.poll(WATCHDOG_INTERVAL);
        }
    }
}

/// Runs `work` on a thread until the shutdown. Restarts it after a pause when it fails, and on another thread when a
/// call does not return.
pub(crate) fn run(
    name: String,
    shutdown: Shutdown,
    work: impl Fn(&Shutdown, &Watchdog) -> Result<(), BatchError> + Send + Sync + 'static,
) -> std::io::Result<JoinHandle<()>> {
    run_with_limit(name, shutdown, CALL_LIMIT, Arc::new(work))
}

/// [`run`] with a given call limit.
pub(crate) fn run_with_limit<W>(
    name: String,
    shutdown: Shutdown,
    limit: Duration,
    work: Arc<W>,
) -> std::io::Result<JoinHandle<()>>
where
    W: Fn(&Shutdown, &Watchdog) -> Result<(), BatchError> + Send + Sync + 'static,
{
    std::thread::Builder::new().name(format!("{name}-watch")).spawn(move || {
        while !shutdown.is_stopped() {
            let (watchdog, instance_shutdown) = (Arc::new(Watchdog::new()), Shutdown::new());
            let instance = run_instance(
                name.clone(),
                instance_shutdown.clone(),
                Arc::clone(&watchdog),
                Arc::clone(&work),
            );
            let Ok(instance) = instance else {
                std::thread::sleep(WATCHDOG_INTERVAL);
                continue;
            };
            while !instance.is_finished() && !watchdog.is_overdue(limit) {
                if shutdown.is_stopped() {
                    instance_shutdown.stop();
                }
                std::thread::sleep(WATCHDOG_INTERVAL);
            }
            instance_shutdown.stop();
            if instance.is_finished() {
                // A panic has been reported by the thread itself.
                let _ = instance.join();
            } else {
                tracing::warn!(instance = name, "instance hung in a Kafka call; instance replaced");
                watchdog.leave_group();
            }
        }
    })
}

fn run_instance<W>(
    name: String,
    instance_shutdown: Shutdown,
    watchdog: Arc<Watchdog>,
    work: Arc<W>,
) -> std::io::Result<JoinHandle<()>>
where
    W: Fn(&Shutdown, &Watchdog) -> Result<(), BatchError> + Send + Sync + 'static,
{
    std::thread::Builder::new().name(name.clone()).spawn(move || {
        while !instance_shutdown.is_stopped() {
            if let Err(error) = work(&instance_shutdown, &watchdog) {
                tracing::info!(instance = name, %error, "instance failed; restarting");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;

    #[test]
    fn not_coordinator_on_offset_fetch_is_retried() {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("t", 1, 1).unwrap();
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", cluster.bootstrap_servers());
        let producer: BaseProducer = config.create().unwrap();
        producer.send(BaseRecord::<(), str>::to("t").payload("found")).map_err(|(error, _)| error).unwrap();
        producer.flush(Duration::from_secs(60)).unwrap();

        let moved = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_COORDINATOR;
        cluster.request_errors(RDKafkaApiKey::OffsetFetch, &[moved, moved]);
        config.set("group.id", "g").set("auto.offset.reset", "earliest").set("enable.auto.commit", "false");
        let source = Source::subscribe(&config, "t").unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let read = loop {
            let batch = source.gather(1, &Shutdown::new());
            if let Some(message) = batch.first() {
                break message.payload().map(<[u8]>::to_vec);
            }
            assert!(Instant::now() < until, "the partition stayed unread");
        };
        assert_eq!(read.as_deref(), Some(b"found".as_slice()));
    }

    #[test]
    fn hung_instance_is_replaced() {
        let (shutdown, lives) = (Shutdown::new(), Arc::new(AtomicU64::new(0)));
        let (hang, hung) = sync_channel::<()>(0);
        let (hung, began) = (Mutex::new(hung), sync_channel(1));
        let work = {
            let (lives, began) = (Arc::clone(&lives), began.0);
            move |instance_shutdown: &Shutdown, watchdog: &Watchdog| {
                if lives.fetch_add(1, Ordering::SeqCst) == 0 {
                    // Blocks until the end of the test.
                    let _ = watchdog.guard_call(|| hung.lock().unwrap().recv());
                    assert!(instance_shutdown.is_stopped(), "the replaced instance is stopped");
                    return Ok(());
                }
                watchdog.guard_call(|| began.send(())).unwrap();
                while !instance_shutdown.is_stopped() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
        };
        let limit = Duration::from_millis(50);
        let watched = run_with_limit("test".to_owned(), shutdown.clone(), limit, Arc::new(work)).unwrap();
        began.1.recv_timeout(Duration::from_secs(60)).expect("the hung instance was not replaced");
        shutdown.stop();
        watched.join().unwrap();
        assert_eq!(lives.load(Ordering::SeqCst), 2);
        drop(hang);
    }
}
