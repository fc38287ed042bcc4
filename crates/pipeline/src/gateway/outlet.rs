//! The way into the queue: the producer that all relays of a gateway share, and a new one when it has failed for good.
//!
//! An idempotent producer that cannot know any more what the queue has refuses everything from then on. What it had under
//! way is reported as failed, so the relays send it again, in a new round, through the next one: nothing has to be carried
//! over.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};

use tokio::time::Instant;

use crate::gateway::Faults;
use crate::gateway::relaying::{Context, Ticket};
use crate::queue::{self, CLIENT_MESSAGE};

/// What became of a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The producer has it and will report.
    Taken,
    /// Not now; again in a moment.
    Later,
}

/// Between looks whether a producer that has failed is still in use, and how many there are at the most.
const LET_GO_LOOK: Duration = Duration::from_millis(10);
const LET_GO_LOOKS: u32 = 3_000;

type Shared = Arc<ThreadedProducer<Context>>;

/// The number of partitions is asked for again after so long.
const PARTITIONS_KEPT: Duration = Duration::from_secs(10);

/// The producer of the moment.
pub(super) struct Outlet {
    config: ClientConfig,
    faults: Faults,
    producer: Mutex<Shared>,
    /// How many partitions the topic had, and when.
    partitions: Mutex<Option<(i32, Instant)>>,
}

impl Outlet {
    pub(super) fn open(config: ClientConfig, faults: Faults) -> Result<Self, KafkaError> {
        let producer = Mutex::new(make(&config, faults)?);
        Ok(Self { config, faults, producer, partitions: Mutex::default() })
    }

    /// How many partitions the topic of clients' messages has. Blocks.
    pub(super) fn partitions(&self) -> Result<i32, KafkaError> {
        // Clients that connect together wait for one answer.
        let mut known = self.partitions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((count, _)) = known.filter(|(_, at)| at.elapsed() < PARTITIONS_KEPT) {
            return Ok(count);
        }
        let producer = Arc::clone(&self.producer.lock().unwrap_or_else(PoisonError::into_inner));
        let count = queue::partitions(producer.client(), CLIENT_MESSAGE)?;
        *known = Some((count, Instant::now()));
        Ok(count)
    }

    /// The producer, for as many records as there are now.
    pub(super) fn open_now(&self) -> Opened<'_> {
        let producer = Arc::clone(&self.producer.lock().unwrap_or_else(PoisonError::into_inner));
        Opened { outlet: self, producer }
    }

    /// A new one in the place of `failed`, unless somebody was faster.
    fn replace(&self, failed: Shared, why: &str) {
        let mut current = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&current, &failed) {
            return;
        }
        match make(&self.config, self.faults) {
            Ok(new) => {
                tracing::warn!(why, "the producer has failed for good; going on with a new one");
                let old = std::mem::replace(&mut *current, new);
                drop(current);
                // Its end takes a while: what it has is reported first. So nobody else may be the last to let go of it.
                let ending = std::thread::Builder::new().name("gateway-producer-end".to_owned());
                let ended = ending.spawn(move || {
                    for _ in 0..LET_GO_LOOKS {
                        if Arc::strong_count(&old) <= 2 {
                            break;
                        }
                        std::thread::sleep(LET_GO_LOOK);
                    }
                    drop((old, failed));
                });
                if let Err(error) = ended {
                    tracing::debug!(%error, "the old producer ended in its caller");
                }
            }
            Err(error) => tracing::warn!(%error, "the producer has failed for good, and there is no new one"),
        }
    }
}

/// A producer that takes records.
pub(super) struct Opened<'a> {
    outlet: &'a Outlet,
    producer: Shared,
}

impl Opened<'_> {
    /// Hands a record to the producer.
    pub(super) fn send(&self, record: BaseRecord<'_, [u8], [u8], Box<Ticket>>) -> Sent {
        match self.producer.send(record) {
            Ok(()) => Sent::Taken,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => Sent::Later,
            Err((error, _)) => {
                match self.producer.client().fatal_error() {
                    Some((_, why)) => self.outlet.replace(Arc::clone(&self.producer), &why),
                    None => tracing::warn!(%error, "the producer refuses; trying again"),
                }
                Sent::Later
            }
        }
    }
}

fn make(config: &ClientConfig, faults: Faults) -> Result<Shared, KafkaError> {
    config.create_with_context(Context::new(faults)).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdkafka::mocking::MockCluster;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::gateway::relaying::Inbox;
    use crate::queue::QueueOptions;
    use crate::relay::Reported;

    fn send(outlet: &Outlet, inbox: &Arc<Inbox>, sn: u64) {
        let record = || {
            BaseRecord::with_opaque_to(CLIENT_MESSAGE, Box::new(Ticket::new(inbox, 0, sn)))
                .key(&b"c"[..])
                .payload(&b"x"[..])
        };
        let mut tries = 0;
        while outlet.open_now().send(record()) != Sent::Taken {
            tries += 1;
            assert!(tries < 1_000, "no producer takes it");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn report(inbox: &Inbox) -> Reported {
        for _ in 0..6_000 {
            if let Some((_, _, what)) = inbox.take().pop() {
                return what;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("no report");
    }

    #[test]
    fn a_producer_that_has_failed_for_good_is_replaced() {
        let cluster = MockCluster::new(1).unwrap();
        let options = QueueOptions {
            brokers: cluster.bootstrap_servers(),
            partitions: 1,
            factor: None,
            name: "test".to_owned(),
        };
        let config = options.idempotent("gateway", Duration::from_secs(30));
        let outlet = Outlet::open(config, Faults::default()).unwrap();
        let inbox = Arc::new(Inbox::default());
        send(&outlet, &inbox, 1);
        assert_eq!(report(&inbox), Reported::Delivered);
        let broken = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER;
        cluster.request_errors(RDKafkaApiKey::Produce, &[broken]);
        send(&outlet, &inbox, 2);
        assert_eq!(report(&inbox), Reported::Failed);
        send(&outlet, &inbox, 2);
        assert_eq!(report(&inbox), Reported::Delivered);
    }
}
