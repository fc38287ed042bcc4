//! Where partitions are: the records of the state repository, and how new ones are dealt out.
//!
//! One key per partition (`/moim/partitions/<topic id>/<n>`, see [`keys`]) says who holds it and who leads it. This is the only truth
//! about leadership: a node leads what a record it has read says it leads. Each partition stands on one node for now;
//! the form of the record is the one replication needs.

use bytes::Bytes;

use moim_base::{BrokerId, LeaderEpoch, TopicId};
use moim_replica::keys;
use moim_replica::{BrokerEpoch, DirectoryId, Durability, InSync, PartitionId, PartitionState};

/// The key of a partition's record.
pub(crate) fn key(topic: TopicId, index: i32) -> String {
    keys::partition(PartitionId { topic, index: index.unsigned_abs() })
}

/// Which partition a key belongs to.
pub(crate) fn parse_key(key: &str) -> Option<(TopicId, i32)> {
    let id = keys::parse_partition(key)?;
    Some((id.topic, i32::try_from(id.index).ok()?))
}

/// Who holds a partition and who leads it, and the revision at which that was so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Nobody while no replica may lead.
    pub(crate) leader: Option<BrokerId>,
    /// Counts leaderships.
    pub(crate) leader_epoch: i32,
    /// The first is the preferred leader.
    pub(crate) replicas: Box<[i32]>,
    pub(crate) in_sync: Box<[i32]>,
    /// The mod revision of the record; 0 while there is none.
    pub(crate) revision: i64,
}

/// A partition whose record is not known (yet).
impl Default for Place {
    fn default() -> Self {
        Self {
            leader: None,
            leader_epoch: -1,
            replicas: Box::default(),
            in_sync: Box::default(),
            revision: 0,
        }
    }
}

impl Place {
    /// A partition on one node.
    pub(crate) fn on(node: BrokerId) -> Self {
        Self {
            leader: Some(node),
            leader_epoch: 0,
            replicas: Box::new([node.0]),
            in_sync: Box::new([node.0]),
            revision: 0,
        }
    }

    /// Whether a record was read.
    pub(crate) fn is_known(&self) -> bool {
        self.revision > 0
    }

    /// Reads a record found at `revision`.
    pub(crate) fn decode(value: &[u8], revision: i64) -> Option<Self> {
        let state = PartitionState::decode(value).ok()?;
        Some(Self {
            leader: state.leader,
            leader_epoch: state.leader_epoch.0,
            replicas: state.replicas.iter().map(|node| node.0).collect(),
            in_sync: state.isr.iter().map(|member| member.node.0).collect(),
            revision,
        })
    }
}

/// The first record of a partition on one node, in this life of the node.
pub(crate) fn record_on(node: BrokerId, broker_epoch: i64) -> Bytes {
    let member = InSync { node, epoch: BrokerEpoch(broker_epoch), directory: DirectoryId(0) };
    Bytes::from(PartitionState::new(vec![member], 1, Durability::Fsync).encode())
}

/// A record with a newer leader epoch and everything else as it was.
pub(crate) fn with_epoch(value: &[u8], leader_epoch: i32) -> Option<Bytes> {
    let mut state = PartitionState::decode(value).ok()?;
    state.leader_epoch = LeaderEpoch(leader_epoch);
    state.version += 1;
    Some(Bytes::from(state.encode()))
}

/// Deals `count` partitions out: each goes to the node that has the fewest, in the order of `nodes` where several have.
/// `load` is how many partitions each of `nodes` has already.
pub(crate) fn spread(nodes: &[BrokerId], load: &[usize], count: usize) -> Vec<BrokerId> {
    assert_eq!(nodes.len(), load.len(), "every node has a load");
    let mut load: Vec<(usize, usize)> = load.iter().enumerate().map(|(at, load)| (*load, at)).collect();
    let mut heap: std::collections::BinaryHeap<_> = load.drain(..).map(std::cmp::Reverse).collect();
    let mut dealt = Vec::with_capacity(count);
    for _ in 0..count {
        let Some(std::cmp::Reverse((load, at))) = heap.pop() else { break };
        dealt.push(nodes[at]);
        heap.push(std::cmp::Reverse((load + 1, at)));
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_tells_where_the_partition_is_and_only_its_epoch_is_changed() {
        let record = record_on(BrokerId(2), 7);
        assert_eq!(Place::decode(&record, 9), Some(Place { revision: 9, ..Place::on(BrokerId(2)) }));
        let bumped = with_epoch(&record, 4).unwrap();
        let (was, now) = (PartitionState::decode(&record).unwrap(), PartitionState::decode(&bumped).unwrap());
        assert_eq!(now, PartitionState { leader_epoch: LeaderEpoch(4), version: was.version + 1, ..was });
    }

    #[test]
    fn keys_name_partitions() {
        assert_eq!(parse_key(&key(TopicId(7), 12)), Some((TopicId(7), 12)));
        for bad in
            ["/moim/partitions/x/1", "/moim/partitions/00000000000000000000000000000007/-1", "/moim/topics/t"]
        {
            assert_eq!(parse_key(bad), None, "{bad}");
        }
    }

    #[test]
    fn partitions_go_where_there_are_fewest() {
        let check = |load: &[usize], count, expected: &[i32]| {
            let nodes: Vec<_> = (1..=load.len() as i32).map(BrokerId).collect();
            let dealt: Vec<_> = spread(&nodes, load, count).iter().map(|node| node.0).collect();
            assert_eq!(dealt, expected, "{load:?}");
        };
        check(&[0, 0, 0], 4, &[1, 2, 3, 1]);
        check(&[5, 0, 1], 4, &[2, 2, 3, 2]);
        check(&[3], 2, &[1, 1]);
        check(&[], 2, &[]);
    }
}
