//! What the counter and the aggregator share: a consumer on a thread of its own that gathers batches and knows when
//! partitions have changed hands.
//!
//! The Kafka client's transactional calls block, so each instance has its thread; the store is asked through the
//! runtime's handle.
//!
//! Some of those calls may never return: librdkafka 2.12 forgets who waits when the broker it had asked leaves the cluster's
//! metadata. So every instance has a second thread that watches it ([`run`]); one whose call has outlasted its own timeout is
//! left behind and another takes its place. The new one's transactional id fences what the old one may still do.

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

/// How long an idle consumer waits for the next message before it looks at anything else.
const POLL: Duration = Duration::from_millis(50);
/// At most so many bytes of messages are taken at once, however many messages may be: a megabyte is a message, too.
const BYTES: usize = 16 << 20;
const CALL: Duration = Duration::from_secs(10);
/// Where there is much to do a batch waits so long for more: what a batch costs is the same however large it is. A batch of
/// [`MUCH`] messages is a sign of that.
const LINGER: Duration = Duration::from_millis(10);
const MUCH: usize = 500;

/// The store may be away for so long before a batch is given up, and with it the place in the group: others may reach it.
/// Less than the group waits for us.
const STORE: Duration = Duration::from_secs(20);
const STORE_PAUSE: Duration = Duration::from_millis(100);

/// Why a batch was not finished. The consumer goes back to what is committed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error(transparent)]
    Kafka(#[from] KafkaError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("another consumer has this partition by now")]
    Fenced,
}

/// Counts changes of the assignment.
#[derive(Default)]
pub(crate) struct Hands {
    changes: Arc<AtomicU64>,
}

impl ClientContext for Hands {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "a consumer of the pipeline");
    }
}

impl ConsumerContext for Hands {
    fn pre_rebalance(&self, _: &BaseConsumer<Self>, _: &Rebalance<'_>) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }
}

/// A consumer of one topic.
pub(crate) struct Source {
    pub(crate) consumer: Arc<BaseConsumer<Hands>>,
    changes: Arc<AtomicU64>,
    seen: Cell<u64>,
    /// Where to begin was asked for, and the answer was an error.
    is_stranded: Cell<bool>,
    /// The last batch was a large one.
    is_busy: Cell<bool>,
}

impl Source {
    pub(crate) fn subscribe(config: &ClientConfig, topic: &str) -> Result<Self, KafkaError> {
        let hands = Hands::default();
        let changes = Arc::clone(&hands.changes);
        let consumer: BaseConsumer<Hands> = config.create_with_context(hands)?;
        consumer.subscribe(&[topic])?;
        let (seen, is_stranded, is_busy) = (Cell::new(0), Cell::new(false), Cell::new(false));
        Ok(Self { consumer: Arc::new(consumer), changes, seen, is_stranded, is_busy })
    }

    /// Whether partitions have changed hands since this was last asked.
    pub(crate) fn has_changed(&self) -> bool {
        let now = self.changes.load(Ordering::SeqCst);
        self.seen.replace(now) != now
    }

    /// Up to `at_most` messages; fewer as soon as none is waiting, or a moment later under load. They stay where the client has
    /// put them.
    pub(crate) fn gather(&self, at_most: usize, shutdown: &Shutdown) -> Vec<BorrowedMessage<'_>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        if self.is_stranded.take()
            && let Err(error) = self.begin_again()
        {
            tracing::debug!(%error, "a consumer of the pipeline does not know where to begin");
            self.is_stranded.set(true);
        }
        let mut until = None;
        while batch.len() < at_most && bytes < BYTES && !shutdown.is_stopped() {
            match self.next(batch.is_empty(), &mut until) {
                Some(Ok(message)) => {
                    bytes += message.payload_len();
                    batch.push(message);
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "a consumer of the pipeline");
                    self.is_stranded.set(self.is_stranded.get() || strands(&error));
                    break;
                }
                None => break,
            }
        }
        self.is_busy.set(batch.len() >= MUCH);
        batch
    }

    /// The next message. `until` is when a batch that is not full goes on its way, once it is known.
    fn next(
        &self,
        is_first: bool,
        until: &mut Option<Instant>,
    ) -> Option<Result<BorrowedMessage<'_>, KafkaError>> {
        if is_first {
            return self.consumer.poll(POLL);
        }
        let waiting = self.consumer.poll(Duration::ZERO);
        if waiting.is_some() || !self.is_busy.get() {
            return waiting;
        }
        let now = Instant::now();
        let until = *until.get_or_insert(now + LINGER);
        self.consumer.poll(until.saturating_duration_since(now))
    }

    /// Asks once more where to begin. Only between batches: what was read and is not committed is read again.
    fn begin_again(&self) -> Result<(), KafkaError> {
        let mut partitions = self.consumer.assignment()?;
        if partitions.count() == 0 {
            return Ok(()); // whoever gets partitions asks anyway
        }
        partitions.set_all_offsets(Offset::Stored)?;
        self.consumer.assign(&partitions)
    }

    /// Goes back to what is committed.
    pub(crate) fn rewind(&self) -> Result<(), KafkaError> {
        let committed = self.consumer.committed(CALL)?;
        for partition in committed.elements() {
            let offset = match partition.offset() {
                Offset::Offset(offset) => Offset::Offset(offset),
                _ => Offset::Beginning,
            };
            self.consumer.seek(partition.topic(), partition.partition(), offset, CALL)?;
        }
        Ok(())
    }
}

/// Whether partitions may be left unread: librdkafka asks for the committed offsets of what it was assigned once, passes an
/// answer on that the coordinator has moved, and waits for the next assignment.
fn strands(error: &KafkaError) -> bool {
    use rdkafka::types::RDKafkaErrorCode::{CoordinatorNotAvailable, NotCoordinator};
    matches!(error.rdkafka_error_code(), Some(NotCoordinator | CoordinatorNotAvailable))
}

/// Asks the store until it answers, or has not for too long.
pub(crate) async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(
    shutdown: &Shutdown,
    mut call: impl FnMut() -> F,
) -> Result<T, StoreError> {
    let until = Instant::now() + STORE;
    loop {
        match call().await {
            Err(StoreError::Unavailable(why)) if Instant::now() < until && !shutdown.is_stopped() => {
                tracing::debug!(why, "the store does not answer; trying again");
                tokio::time::sleep(STORE_PAUSE).await;
            }
            other => return other,
        }
    }
}

/// The offsets after a batch.
pub(crate) fn after(topic: &str, batch: &[BorrowedMessage<'_>]) -> Result<TopicPartitionList, KafkaError> {
    let mut next = BTreeMap::new();
    // Messages of a partition stand together as a rule.
    for row in batch.chunk_by(|one, other| one.partition() == other.partition()) {
        next.extend(row.last().map(|message| (message.partition(), message.offset() + 1)));
    }
    let mut list = TopicPartitionList::with_capacity(next.len());
    for (partition, offset) in next {
        list.add_partition_offset(topic, partition, Offset::Offset(offset))?;
    }
    Ok(list)
}

/// How long a call that has its own timeout, of [`CALL`], may take before nobody waits for it any more.
const OVERDUE: Duration = Duration::from_secs(12);
/// How often an instance is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// What an instance tells the thread that watches it.
pub(crate) struct Watch {
    clock: SystemClock,
    /// Since when a call has been under way that may not return; 0 for none.
    since_ms: AtomicU64,
    /// How its place in the group is given up.
    leave: Mutex<Option<Arc<BaseConsumer<Hands>>>>,
}

impl Watch {
    fn new() -> Self {
        Self { clock: SystemClock::new(), since_ms: AtomicU64::new(0), leave: Mutex::default() }
    }

    /// The instance reads from here.
    pub(crate) fn reads_from(&self, source: &Source) {
        *self.leave.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&source.consumer));
    }

    /// Makes a call that may not return.
    pub(crate) fn during<T>(&self, call: impl FnOnce() -> T) -> T {
        self.since_ms.store(self.clock.monotonic_ms().max(1), Ordering::SeqCst);
        let result = call();
        self.since_ms.store(0, Ordering::SeqCst);
        result
    }

    fn is_overdue(&self, limit: Duration) -> bool {
        let since = self.since_ms.load(Ordering::SeqCst);
        since > 0 && u128::from(self.clock.monotonic_ms().saturating_sub(since)) > limit.as_millis()
    }

    /// Gives up the place in the group. Leaving is a rebalance, which somebody has to hear of.
    fn leave(&self) {
        let Some(consumer) = self.leave.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        consumer.unsubscribe();
        for _ in 0..10 {
            // What is read here is read again by whoever gets the partition: nothing of it is committed.
            let _ = consumer.poll(LOOK);
        }
    }
}

/// Runs `work` on a thread until the shutdown, again and again when it fails, with a pause between; and on another one when
/// it does not come back from a call.
pub(crate) fn run(
    name: String,
    shutdown: Shutdown,
    work: impl Fn(&Shutdown, &Watch) -> Result<(), Failed> + Send + Sync + 'static,
) -> std::io::Result<JoinHandle<()>> {
    watch_over(name, shutdown, OVERDUE, Arc::new(work))
}

/// [`run`], with another limit for calls.
pub(crate) fn watch_over<W>(
    name: String,
    shutdown: Shutdown,
    limit: Duration,
    work: Arc<W>,
) -> std::io::Result<JoinHandle<()>>
where
    W: Fn(&Shutdown, &Watch) -> Result<(), Failed> + Send + Sync + 'static,
{
    std::thread::Builder::new().name(format!("{name}-watch")).spawn(move || {
        while !shutdown.is_stopped() {
            let (watch, life) = (Arc::new(Watch::new()), Shutdown::new());
            let lived = live(name.clone(), life.clone(), Arc::clone(&watch), Arc::clone(&work));
            let Ok(lived) = lived else {
                std::thread::sleep(LOOK);
                continue;
            };
            while !lived.is_finished() && !watch.is_overdue(limit) {
                if shutdown.is_stopped() {
                    life.stop();
                }
                std::thread::sleep(LOOK);
            }
            life.stop();
            if lived.is_finished() {
                // A panic has been reported by the thread itself.
                let _ = lived.join();
            } else {
                tracing::warn!(instance = name, "a call did not come back; another instance takes the place");
                watch.leave();
            }
        }
    })
}

fn live<W>(name: String, life: Shutdown, watch: Arc<Watch>, work: Arc<W>) -> std::io::Result<JoinHandle<()>>
where
    W: Fn(&Shutdown, &Watch) -> Result<(), Failed> + Send + Sync + 'static,
{
    std::thread::Builder::new().name(name.clone()).spawn(move || {
        while !life.is_stopped() {
            if let Err(error) = work(&life, &watch) {
                tracing::info!(instance = name, %error, "beginning anew");
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
    fn a_consumer_that_was_not_told_where_to_begin_asks_again() {
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
            assert!(Instant::now() < until, "the partition is not read");
        };
        assert_eq!(read.as_deref(), Some(b"found".as_slice()));
    }

    #[test]
    fn an_instance_that_does_not_come_back_is_replaced_and_not_waited_for() {
        let (shutdown, lives) = (Shutdown::new(), Arc::new(AtomicU64::new(0)));
        let (hang, hung) = sync_channel::<()>(0);
        let (hung, began) = (Mutex::new(hung), sync_channel(1));
        let work = {
            let (lives, began) = (Arc::clone(&lives), began.0);
            move |life: &Shutdown, watch: &Watch| {
                if lives.fetch_add(1, Ordering::SeqCst) == 0 {
                    // Until the end of the test.
                    let _ = watch.during(|| hung.lock().unwrap().recv());
                    assert!(life.is_stopped(), "it knows that it was replaced");
                    return Ok(());
                }
                watch.during(|| began.send(())).unwrap();
                while !life.is_stopped() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
        };
        let limit = Duration::from_millis(50);
        let watched = watch_over("test".to_owned(), shutdown.clone(), limit, Arc::new(work)).unwrap();
        began.1.recv_timeout(Duration::from_secs(60)).expect("nobody took its place");
        shutdown.stop();
        watched.join().unwrap();
        assert_eq!(lives.load(Ordering::SeqCst), 2);
        drop(hang);
    }
}
