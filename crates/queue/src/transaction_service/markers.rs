//! Markers of decided transactions: appended here, or sent to the leaders of their partitions.
//!
//! Markers for partitions that this node leads are appended under the coordinator's lock, as soon as they are decided. The
//! others are sent, each broker's in one request. A marker that is not acknowledged is sent again as a new attempt; the
//! partition refuses an attempt that arrives behind a newer one ([`crate::partition::TxnMarker`]).
//!
//! Only a topic that the state repository no longer has needs no marker. That this node does not know the topic is no
//! proof: its view may be behind.

use std::sync::Arc;

use hashbrown::HashMap;

use moim_base::BrokerId;
use moim_wire_kafka::ErrorCode;

use super::{Done, TransactionService, Whose, far};
use crate::broker::Broker;
use crate::brokers::LiveBroker;
use crate::partition::{Ack, Call, TxnMarker};
use crate::topics::OFFSETS_TOPIC;
use crate::transactions::{MarkersToken, TopicPartition, WriteMarkers};

/// A marker for a partition that this node does not lead.
pub(super) struct FarMarker {
    whose: Whose,
    token: MarkersToken,
    pub(super) at: TopicPartition,
    pub(super) marker: TxnMarker,
    /// The leadership of the partition that it is sent to.
    pub(super) leader_epoch: i32,
}

impl TransactionService {
    pub(super) fn write_markers(&self, broker: &Broker, whose: Whose, markers: &WriteMarkers) {
        let token = markers.token;
        let marker = TxnMarker {
            producer_id: markers.producer_id,
            producer_epoch: markers.producer_epoch,
            commit: markers.commit,
            coordinator_epoch: markers.coordinator_epoch,
            epoch_per_transaction: markers.epoch_per_transaction,
            attempt: Some(token.0),
        };
        for (topic, indexes) in &markers.partitions {
            for &index in indexes {
                let at = TopicPartition::new(Arc::clone(topic), index);
                if broker.topics.partition(topic, index).is_err() {
                    self.far.push(FarMarker { whose, token, at, marker, leader_epoch: -1 });
                    continue;
                }
                let (done, report) = (self.done.clone(), at.clone());
                let told = move |result| done.push(Done::Marker(whose, token, report, result));
                append_marker(broker, &at, marker, None, Box::new(told));
            }
        }
    }

    /// Sends markers to the leaders of their partitions, each broker's in one request.
    pub(super) fn send_far(&self, broker: &Broker, markers: Vec<FarMarker>) {
        let mut by_leader: HashMap<BrokerId, (LiveBroker, Vec<FarMarker>)> = HashMap::new();
        for mut far in markers {
            let TopicPartition { topic, partition } = &far.at;
            let known = broker.topics.get(topic).filter(|topic| topic.has(*partition));
            let leader = known.as_ref().and_then(|topic| broker.hint(topic, *partition));
            match leader {
                Some((leader, epoch)) => {
                    far.leader_epoch = epoch;
                    by_leader.entry(leader.id).or_insert_with(|| (leader, Vec::new())).1.push(far);
                }
                None if known.is_some() => self.report_far(far, Err(ErrorCode::LeaderNotAvailable)),
                None => self.confirm_deleted(broker, far),
            }
        }
        for (leader, markers) in by_leader.into_values() {
            let (peers, done) = (Arc::clone(&broker.peers), self.done.clone());
            broker.scope.spawn("markers", async move {
                let results = far::write_markers(&peers, &leader, &markers).await;
                for (far, result) in markers.into_iter().zip(results) {
                    let result = match result {
                        // The next attempt finds out whether the topic was deleted.
                        Err(ErrorCode::UnknownTopicOrPartition) => Err(ErrorCode::LeaderNotAvailable),
                        result => result,
                    };
                    done.push(Done::Marker(far.whose, far.token, far.at, result));
                }
            });
        }
    }

    /// This node does not know the partition: asks the state repository whether it was deleted.
    fn confirm_deleted(&self, broker: &Broker, far: FarMarker) {
        let (topics, done) = (Arc::clone(&broker.topics), self.done.clone());
        broker.scope.spawn("markers", async move {
            let result = match topics.is_deleted(&far.at.topic, far.at.partition).await {
                Ok(true) => Ok(()),
                // Known soon, or asked again.
                Ok(false) | Err(_) => Err(ErrorCode::LeaderNotAvailable),
            };
            done.push(Done::Marker(far.whose, far.token, far.at, result));
        });
    }

    fn report_far(&self, far: FarMarker, result: Result<(), ErrorCode>) {
        self.done.push(Done::Marker(far.whose, far.token, far.at, result));
    }
}

/// Appends a marker to a partition that this node leads, at once; `done` is called when it is committed, or certainly is
/// not. `leader_epoch`: only in this leadership.
pub(crate) fn append_marker(
    broker: &Broker,
    at: &TopicPartition,
    marker: TxnMarker,
    leader_epoch: Option<i32>,
    done: Call,
) {
    let partition = match broker.topics.partition(&at.topic, at.partition) {
        Ok(partition) => partition,
        Err(code) => return done(Err(code)),
    };
    if *at.topic == *OFFSETS_TOPIC {
        return broker.groups.write_marker(broker, at.partition, marker, leader_epoch, done);
    }
    match partition.append_marker(marker, broker.clock.wall_ms(), leader_epoch) {
        Ok(appended) => partition.when_committed(&appended, Ack::Call(done)),
        Err(refused) => {
            tracing::debug!(topic = %at.topic, partition = at.partition, reason = ?refused, "transaction marker refused");
            done(Err(refused.code));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Still, wait};

    #[test]
    fn a_marker_for_a_topic_that_the_view_lacks_is_done_only_when_the_topic_is_deleted() {
        let still = Still::new();
        let far = |topic: &str, index: i32| FarMarker {
            whose: (0, 1),
            token: MarkersToken(1),
            at: TopicPartition::new(topic, index),
            marker: TxnMarker {
                producer_id: 7,
                producer_epoch: 0,
                commit: true,
                coordinator_epoch: 0,
                epoch_per_transaction: false,
                attempt: Some(1),
            },
            leader_epoch: -1,
        };
        // Made by another broker; this one has not heard of it.
        still.topic_elsewhere("unseen", 1);
        let service = &still.broker.transactions;
        let outcome = |far: FarMarker| {
            wait(async {
                service.send_far(&still.broker, vec![far]);
                let Some(Done::Marker(.., result)) = service.done.take().await.pop() else {
                    panic!("no outcome")
                };
                result
            })
        };
        assert_eq!(outcome(far("unseen", 0)), Err(ErrorCode::LeaderNotAvailable), "it needs its marker");
        assert_eq!(outcome(far("unseen", 1)), Ok(()), "of a topic of the same name that had more partitions");
        assert_eq!(outcome(far("deleted", 0)), Ok(()));
    }
}
