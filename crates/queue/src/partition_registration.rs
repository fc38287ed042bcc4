//! Partition registrations: the records of the state repository, as this broker has read them.
//!
//! One key per partition (`/moim/partitions/<topic id>/<n>`, see [`keys`]) holds its replicas, in-sync set and
//! leader. It is the only source of truth about leadership; the replica driver decides what it means for the replica
//! on this node. The node that creates a topic writes the first record of each partition; every later change is made
//! by the leader or the controller.

use moim_base::{BrokerId, TopicId};
use moim_replica::{InSync, PartitionId, PartitionState, Versioned, keys};

/// The replication id of a partition.
pub(crate) fn id(topic: TopicId, index: i32) -> PartitionId {
    PartitionId { topic, index: index.unsigned_abs() }
}

/// The repository key of a partition's registration.
pub(crate) fn key(topic: TopicId, index: i32) -> String {
    keys::partition(id(topic, index))
}

/// The partition of a key; `None` for shards of the store.
pub(crate) fn parse_key(key: &str) -> Option<(TopicId, i32)> {
    let id = keys::parse_partition(key).filter(|id| id.topic != keys::SHARDS)?;
    Some((id.topic, i32::try_from(id.index).ok()?))
}

/// The replicas, in-sync set and leader of a partition, as far as this node has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionRegistration {
    record: Option<PartitionState>,
    /// The mod revision of the record; 0 without a record.
    pub(crate) revision: i64,
}

impl PartitionRegistration {
    /// A registration that was written at `revision`.
    pub(crate) fn new(record: PartitionState, revision: i64) -> Self {
        Self { record: Some(record), revision }
    }

    /// Decodes a registration read at `revision`.
    pub(crate) fn decode(value: &[u8], revision: i64) -> Option<Self> {
        PartitionState::decode(value).ok().map(|record| Self::new(record, revision))
    }

    /// True if a record was read.
    pub(crate) fn is_known(&self) -> bool {
        self.revision > 0
    }

    /// The record, if one was read.
    pub(crate) fn record(&self) -> Option<&PartitionState> {
        self.record.as_ref()
    }

    /// The record with its revision, for the replica driver.
    pub(crate) fn versioned(&self) -> Option<Versioned<PartitionState>> {
        Some(Versioned { revision: self.revision, value: self.record.clone()? })
    }

    /// The leader; `None` if no replica may lead.
    pub(crate) fn leader(&self) -> Option<BrokerId> {
        self.record.as_ref()?.leader
    }

    /// The leader epoch; -1 without a record.
    pub(crate) fn leader_epoch(&self) -> i32 {
        self.record.as_ref().map_or(-1, |record| record.leader_epoch.0)
    }

    /// True if a node has the only replica.
    pub(crate) fn is_only_on(&self, node: BrokerId) -> bool {
        self.record.as_ref().is_some_and(|record| record.replicas == [node])
    }

    /// True if a node has a replica, or one is being added to it.
    pub(crate) fn is_on(&self, node: BrokerId) -> bool {
        self.record.as_ref().is_some_and(|record| record.replicas.contains(&node))
    }

    /// The replicas, the preferred leader first.
    pub(crate) fn replicas(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| &record.replicas).map(|node| node.0).collect()
    }

    /// The in-sync set.
    pub(crate) fn in_sync(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| numbers(&record.isr)).collect()
    }

    /// The eligible replicas: they left the in-sync set with every committed record.
    pub(crate) fn eligible(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| numbers(&record.eligible)).collect()
    }

    /// The last known in-sync replicas: they may have lost committed records in a crash.
    pub(crate) fn last_known(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| numbers(&record.last_known)).collect()
    }
}

fn numbers(members: &[InSync]) -> impl Iterator<Item = i32> {
    members.iter().map(|member| member.node.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registration_is_decoded_from_its_record() {
        let record =
            PartitionState::new(vec![(2, 7, 9).into(), (1, 8, 9).into()], 2, moim_replica::Durability::Fsync);
        let registration = PartitionRegistration::decode(&record.encode(), 9).unwrap();
        assert_eq!(
            (registration.revision, registration.leader(), registration.leader_epoch()),
            (9, Some(BrokerId(2)), 0)
        );
        assert_eq!((registration.replicas(), registration.in_sync()), (vec![2, 1], vec![2, 1]));
        assert!(registration.is_on(BrokerId(1)) && !registration.is_on(BrokerId(4)));
        assert_eq!(PartitionRegistration::default().leader(), None);
    }

    #[test]
    fn partition_key_round_trips() {
        assert_eq!(parse_key(&key(TopicId(7), 12)), Some((TopicId(7), 12)));
        let shard = keys::partition(PartitionId { topic: keys::SHARDS, index: 0 });
        for bad in [
            "/moim/partitions/x/1",
            "/moim/partitions/00000000000000000000000000000007/-1",
            "/moim/topics/t",
            &shard,
        ] {
            assert_eq!(parse_key(bad), None, "{bad}");
        }
    }
}
