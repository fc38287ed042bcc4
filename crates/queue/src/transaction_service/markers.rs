//! Transaction markers of decided transactions: appended locally, or sent to the leaders of their partitions.
//!
//! Markers for partitions that this node leads are appended under the coordinator's lock, as soon as they are
//! decided. The others are sent, in one request per broker. A marker that is not acknowledged is sent again as a new
//! attempt; the partition rejects an attempt that arrives after a newer one ([`crate::partition::TxnMarker`]).
//!
//! Only a topic that the state repository no longer has needs no marker. That this node does not know the topic is no
//! proof: its metadata view may be behind.

use std::sync::Arc;

use hashbrown::HashMap;

use moim_base::BrokerId;
use moim_wire_kafka::ErrorCode;

use super::{Completion, CoordinatorRef, TransactionService, remote};
use crate::broker::Broker;
use crate::brokers::LiveBroker;
use crate::partition::{Ack, Call, TxnMarker};
use crate::topics::OFFSETS_TOPIC;
use crate::transactions::{MarkersToken, TopicPartition, WriteMarkers};

/// A marker for a partition that this node does not lead.
pub(super) struct RemoteMarker {
    coordinator_ref: CoordinatorRef,
    token: MarkersToken,
    pub(super) at: TopicPartition,
    pub(super) marker: TxnMarker,
    /// The leader epoch of the partition that it is sent to.
    pub(super) leader_epoch: i32,
}

impl TransactionService {
    pub(super) fn write_markers(
        &self,
        broker: &Broker,
        coordinator_ref: CoordinatorRef,
        markers: &WriteMarkers,
    ) {
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
                    self.remote.push(RemoteMarker { coordinator_ref, token, at, marker, leader_epoch: -1 });
                    continue;
                }
                let (done, report) = (self.done.clone(), at.clone());
                let on_committed =
                    move |result| done.push(Completion::Marker(coordinator_ref, token, report, result));
                append_marker(broker, &at, marker, None, Box::new(on_committed));
            }
        }
    }

    /// Sends markers to the leaders of their partitions, in one request per broker.
    pub(super) fn send_remote(&self, broker: &Broker, markers: Vec<RemoteMarker>) {
        let mut by_leader: HashMap<BrokerId, (LiveBroker, Vec<RemoteMarker>)> = HashMap::new();
        for mut remote in markers {
            let TopicPartition { topic, partition } = &remote.at;
            let known = broker.topics.get(topic).filter(|topic| topic.has(*partition));
            let leader = known.as_ref().and_then(|topic| broker.leader_hint(topic, *partition));
            match leader {
                Some((leader, epoch)) => {
                    remote.leader_epoch = epoch;
                    by_leader.entry(leader.id).or_insert_with(|| (leader, Vec::new())).1.push(remote);
                }
                None if known.is_some() => self.report_remote(remote, Err(ErrorCode::LeaderNotAvailable)),
                None => self.confirm_deleted(broker, remote),
            }
        }
        for (leader, markers) in by_leader.into_values() {
            let (peers, done) = (Arc::clone(&broker.peers), self.done.clone());
            broker.scope.spawn("markers", async move {
                let results = remote::write_markers(&peers, &leader, &markers).await;
                for (remote, result) in markers.into_iter().zip(results) {
                    let result = match result {
                        // The next attempt finds out whether the topic was deleted.
                        Err(ErrorCode::UnknownTopicOrPartition) => Err(ErrorCode::LeaderNotAvailable),
                        result => result,
                    };
                    done.push(Completion::Marker(remote.coordinator_ref, remote.token, remote.at, result));
                }
            });
        }
    }

    /// This node does not know the partition: checks in the state repository whether it was deleted.
    fn confirm_deleted(&self, broker: &Broker, remote: RemoteMarker) {
        let (topics, done) = (Arc::clone(&broker.topics), self.done.clone());
        broker.scope.spawn("markers", async move {
            let result = match topics.is_deleted(&remote.at.topic, remote.at.partition).await {
                Ok(true) => Ok(()),
                // The view will catch up, or the next attempt checks again.
                Ok(false) | Err(_) => Err(ErrorCode::LeaderNotAvailable),
            };
            done.push(Completion::Marker(remote.coordinator_ref, remote.token, remote.at, result));
        });
    }

    fn report_remote(&self, remote: RemoteMarker, result: Result<(), ErrorCode>) {
        self.done.push(Completion::Marker(remote.coordinator_ref, remote.token, remote.at, result));
    }
}

/// Appends a marker to a partition that this node leads, at once; `done` is called when it is committed, or certainly
/// is not. With `leader_epoch`, only under that leader epoch.
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
            tracing::debug!(
                topic = %at.topic, partition = at.partition, reason = ?refused,
                "transaction marker refused"
            );
            done(Err(refused.code));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestBroker, wait};

    #[test]
    fn marker_for_unknown_topic_completes_only_if_the_topic_is_deleted() {
        let fixture = TestBroker::new();
        let remote = |topic: &str, index: i32| RemoteMarker {
            coordinator_ref: (0, 1),
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
        // Created by another broker; this one has not applied it.
        fixture.topic_elsewhere("unseen", 1);
        let service = &fixture.broker.transactions;
        let outcome = |remote: RemoteMarker| {
            wait(async {
                service.send_remote(&fixture.broker, vec![remote]);
                let Some(Completion::Marker(.., result)) = service.done.take().await.pop() else {
                    panic!("no marker outcome")
                };
                result
            })
        };
        assert_eq!(
            outcome(remote("unseen", 0)),
            Err(ErrorCode::LeaderNotAvailable),
            "the partition needs its marker"
        );
        assert_eq!(outcome(remote("unseen", 1)), Ok(()), "a partition of a deleted topic of the same name");
        assert_eq!(outcome(remote("deleted", 0)), Ok(()));
    }
}
