//! What the counter and the aggregator share: a consumer on a thread of its own that gathers batches and knows when
//! partitions have changed hands.
//!
//! The Kafka client's transactional calls block, so each instance has its thread; the store is asked through the
//! runtime's handle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::{ClientConfig, ClientContext};
use tokio::time::Instant;

use moim_base::task::Shutdown;

use crate::store::StoreError;

/// How long an idle consumer waits for the next message before it looks at anything else.
const POLL: Duration = Duration::from_millis(50);
/// At most so many bytes of messages are taken at once, however many messages may be: a megabyte is a message, too.
const BYTES: usize = 16 << 20;
const CALL: Duration = Duration::from_secs(10);

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
    pub(crate) consumer: BaseConsumer<Hands>,
    changes: Arc<AtomicU64>,
    seen: Cell<u64>,
}

impl Source {
    pub(crate) fn subscribe(config: &ClientConfig, topic: &str) -> Result<Self, KafkaError> {
        let hands = Hands::default();
        let changes = Arc::clone(&hands.changes);
        let consumer: BaseConsumer<Hands> = config.create_with_context(hands)?;
        consumer.subscribe(&[topic])?;
        Ok(Self { consumer, changes, seen: Cell::new(0) })
    }

    /// Whether partitions have changed hands since this was last asked.
    pub(crate) fn has_changed(&self) -> bool {
        let now = self.changes.load(Ordering::SeqCst);
        self.seen.replace(now) != now
    }

    /// Up to `at_most` messages; fewer as soon as none is waiting. They stay where the client has put them.
    pub(crate) fn gather(&self, at_most: usize, shutdown: &Shutdown) -> Vec<BorrowedMessage<'_>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < at_most && bytes < BYTES && !shutdown.is_stopped() {
            let wait = if batch.is_empty() { POLL } else { Duration::ZERO };
            match self.consumer.poll(wait) {
                Some(Ok(message)) => {
                    bytes += message.payload_len();
                    batch.push(message);
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "a consumer of the pipeline");
                    break;
                }
                None => break,
            }
        }
        batch
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
    let next: BTreeMap<i32, i64> = batch.iter().map(|m| (m.partition(), m.offset() + 1)).collect();
    let mut list = TopicPartitionList::with_capacity(next.len());
    for (partition, offset) in next {
        list.add_partition_offset(topic, partition, Offset::Offset(offset))?;
    }
    Ok(list)
}

/// Runs `work` on a thread until the shutdown, again and again when it fails, with a pause between.
pub(crate) fn run(
    name: String,
    shutdown: Shutdown,
    mut work: impl FnMut(&Shutdown) -> Result<(), Failed> + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name.clone()).spawn(move || {
        while !shutdown.is_stopped() {
            if let Err(error) = work(&shutdown) {
                tracing::info!(instance = name, %error, "beginning anew");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    })
}
