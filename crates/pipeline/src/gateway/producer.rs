//! The idempotent producer that all relays of a gateway share, and its replacement after a fatal error.
//!
//! After a fatal error an idempotent producer refuses every record, because it no longer knows which records the
//! queue has. Its in-flight records are reported as failed, so the relays resend them in a new round through the next
//! producer. No state is carried over.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};

use tokio::time::Instant;

use crate::gateway::Faults;
use crate::gateway::relay_task::{DeliveryTag, ReportContext};
use crate::queue::{self, CLIENT_MESSAGE};

/// Outcome of handing a record to the producer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The producer has accepted the record and will report its delivery.
    Accepted,
    /// The producer is full or has failed: retry later.
    Retry,
}

/// Polling interval, and the maximum number of polls, while waiting until a failed producer is no longer in use.
const DRAIN_POLL: Duration = Duration::from_millis(10);
const DRAIN_POLLS: u32 = 3_000;

type ProducerRef = Arc<ThreadedProducer<ReportContext>>;

/// How long a fetched partition count stays valid.
const PARTITION_COUNT_TTL: Duration = Duration::from_secs(10);

/// The current producer.
pub(super) struct SharedProducer {
    config: ClientConfig,
    faults: Faults,
    producer: Mutex<ProducerRef>,
    /// Partition count of the topic, and when it was fetched.
    partitions: Mutex<Option<(i32, Instant)>>,
}

impl SharedProducer {
    pub(super) fn open(config: ClientConfig, faults: Faults) -> Result<Self, KafkaError> {
        let producer = Mutex::new(create(&config, faults)?);
        Ok(Self { config, faults, producer, partitions: Mutex::default() })
    }

    /// Partition count of the topic of client messages. Blocks.
    pub(super) fn partitions(&self) -> Result<i32, KafkaError> {
        // Clients that connect at the same time wait for one metadata request.
        let mut cached = self.partitions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((count, _)) = cached.filter(|(_, at)| at.elapsed() < PARTITION_COUNT_TTL) {
            return Ok(count);
        }
        let producer = Arc::clone(&self.producer.lock().unwrap_or_else(PoisonError::into_inner));
        let count = queue::partitions(producer.client(), CLIENT_MESSAGE)?;
        *cached = Some((count, Instant::now()));
        Ok(count)
    }

    /// The current producer, for one run of records.
    pub(super) fn current(&self) -> ProducerHandle<'_> {
        let producer = Arc::clone(&self.producer.lock().unwrap_or_else(PoisonError::into_inner));
        ProducerHandle { shared: self, producer }
    }

    /// Replaces `failed` with a new producer, unless another relay has already replaced it.
    fn replace(&self, failed: ProducerRef, why: &str) {
        let mut current = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&current, &failed) {
            return;
        }
        match create(&self.config, self.faults) {
            Ok(new) => {
                tracing::warn!(why, "producer fatal error; producer replaced");
                let old = std::mem::replace(&mut *current, new);
                drop(current);
                // Dropping a producer takes a while, because its in-flight records are reported first. So this thread
                // must hold the last reference.
                let ending = std::thread::Builder::new().name("gateway-producer-end".to_owned());
                let ended = ending.spawn(move || {
                    for _ in 0..DRAIN_POLLS {
                        if Arc::strong_count(&old) <= 2 {
                            break;
                        }
                        std::thread::sleep(DRAIN_POLL);
                    }
                    drop((old, failed));
                });
                if let Err(error) = ended {
                    tracing::debug!(%error, "failed producer dropped on its caller's thread");
                }
            }
            Err(error) => tracing::warn!(%error, "producer fatal error; replacement failed"),
        }
    }
}

/// A handle on the current producer.
pub(super) struct ProducerHandle<'a> {
    shared: &'a SharedProducer,
    producer: ProducerRef,
}

impl ProducerHandle<'_> {
    /// Hands a record to the producer.
    pub(super) fn send(&self, record: BaseRecord<'_, [u8], [u8], Box<DeliveryTag>>) -> Sent {
        match self.producer.send(record) {
            Ok(()) => Sent::Accepted,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => Sent::Retry,
            Err((error, _)) => {
                match self.producer.client().fatal_error() {
                    Some((_, why)) => self.shared.replace(Arc::clone(&self.producer), &why),
                    None => tracing::warn!(%error, "producer refused a record; retrying"),
                }
                Sent::Retry
            }
        }
    }
}

fn create(config: &ClientConfig, faults: Faults) -> Result<ProducerRef, KafkaError> {
    config.create_with_context(ReportContext::new(faults)).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdkafka::mocking::MockCluster;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::gateway::relay_task::Inbox;
    use crate::queue::QueueOptions;
    use crate::relay::Delivery;

    fn send(producer: &SharedProducer, inbox: &Arc<Inbox>, sn: u64) {
        let record = || {
            BaseRecord::with_opaque_to(CLIENT_MESSAGE, Box::new(DeliveryTag::new(inbox, 0, sn)))
                .key(&b"c"[..])
                .payload(&b"x"[..])
        };
        let mut tries = 0;
        while producer.current().send(record()) != Sent::Accepted {
            tries += 1;
            assert!(tries < 1_000, "no producer takes it");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn report(inbox: &Inbox) -> Delivery {
        for _ in 0..6_000 {
            if let Some((_, _, what)) = inbox.take().pop() {
                return what;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no delivery report");
    }

    #[test]
    fn producer_with_a_fatal_error_is_replaced() {
        let cluster = MockCluster::new(1).unwrap();
        let options = QueueOptions {
            brokers: cluster.bootstrap_servers(),
            partitions: 1,
            factor: None,
            name: "test".to_owned(),
        };
        let config = options.idempotent("gateway", Duration::from_secs(30));
        let producer = SharedProducer::open(config, Faults::default()).unwrap();
        let inbox = Arc::new(Inbox::default());
        send(&producer, &inbox, 1);
        assert_eq!(report(&inbox), Delivery::Delivered);
        let broken = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER;
        cluster.request_errors(RDKafkaApiKey::Produce, &[broken]);
        send(&producer, &inbox, 2);
        assert_eq!(report(&inbox), Delivery::Failed);
        send(&producer, &inbox, 2);
        assert_eq!(report(&inbox), Delivery::Delivered);
    }
}
