//! Where partitions are: the records of the state repository as this broker has read them.
//!
//! One key per partition (`/moim/partitions/<topic id>/<n>`, see [`keys`]) says who holds it and who leads it. This is the
//! only truth about leadership; what it means for the copy on this node is decided by the replica driver. A node makes
//! the first record of a partition whose topic it makes; every later change is a leader's or the controller's.

use moim_base::{BrokerId, TopicId};
use moim_replica::{InSync, PartitionId, PartitionState, Versioned, keys};

/// The name of a partition in replication.
pub(crate) fn id(topic: TopicId, index: i32) -> PartitionId {
    PartitionId { topic, index: index.unsigned_abs() }
}

/// The key of a partition's record.
pub(crate) fn key(topic: TopicId, index: i32) -> String {
    keys::partition(id(topic, index))
}

/// Which partition a key belongs to; shards of the store are not the queue's.
pub(crate) fn parse_key(key: &str) -> Option<(TopicId, i32)> {
    let id = keys::parse_partition(key).filter(|id| id.topic != keys::SHARDS)?;
    Some((id.topic, i32::try_from(id.index).ok()?))
}

/// Who holds a partition and who leads it, as far as this node has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    record: Option<PartitionState>,
    /// The mod revision of the record; 0 while there is none.
    pub(crate) revision: i64,
}

impl Place {
    /// What a record says that was written at `revision`.
    pub(crate) fn new(record: PartitionState, revision: i64) -> Self {
        Self { record: Some(record), revision }
    }

    /// Reads a record found at `revision`.
    pub(crate) fn decode(value: &[u8], revision: i64) -> Option<Self> {
        PartitionState::decode(value).ok().map(|record| Self::new(record, revision))
    }

    /// Whether a record was read.
    pub(crate) fn is_known(&self) -> bool {
        self.revision > 0
    }

    /// The record, if one was read.
    pub(crate) fn record(&self) -> Option<&PartitionState> {
        self.record.as_ref()
    }

    /// The record as the replica driver wants it.
    pub(crate) fn versioned(&self) -> Option<Versioned<PartitionState>> {
        Some(Versioned { revision: self.revision, value: self.record.clone()? })
    }

    /// Nobody while no replica may lead.
    pub(crate) fn leader(&self) -> Option<BrokerId> {
        self.record.as_ref()?.leader
    }

    /// Counts leaderships; -1 while nothing is known.
    pub(crate) fn leader_epoch(&self) -> i32 {
        self.record.as_ref().map_or(-1, |record| record.leader_epoch.0)
    }

    /// Whether a node has the only copy.
    pub(crate) fn is_only_on(&self, node: BrokerId) -> bool {
        self.record.as_ref().is_some_and(|record| record.replicas == [node])
    }

    /// Whether a node has a copy or is getting one.
    pub(crate) fn is_on(&self, node: BrokerId) -> bool {
        self.record.as_ref().is_some_and(|record| record.replicas.contains(&node))
    }

    /// The replicas, the preferred leader first.
    pub(crate) fn replicas(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| &record.replicas).map(|node| node.0).collect()
    }

    /// Those that a commit waits for.
    pub(crate) fn in_sync(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| numbers(&record.isr)).collect()
    }

    /// Those that left the in-sync set with everything that is committed.
    pub(crate) fn eligible(&self) -> Vec<i32> {
        self.record.iter().flat_map(|record| numbers(&record.eligible)).collect()
    }

    /// Those that had it and may have lost some in a crash.
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
    fn a_record_tells_where_the_partition_is() {
        let record =
            PartitionState::new(vec![(2, 7, 9).into(), (1, 8, 9).into()], 2, moim_replica::Durability::Fsync);
        let place = Place::decode(&record.encode(), 9).unwrap();
        assert_eq!((place.revision, place.leader(), place.leader_epoch()), (9, Some(BrokerId(2)), 0));
        assert_eq!((place.replicas(), place.in_sync()), (vec![2, 1], vec![2, 1]));
        assert!(place.is_on(BrokerId(1)) && !place.is_on(BrokerId(4)));
        assert_eq!(Place::default().leader(), None);
    }

    #[test]
    fn keys_name_partitions() {
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
