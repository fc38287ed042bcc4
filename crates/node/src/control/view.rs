//! What this node's own state says about the cluster: quick, never waits for a quorum, may be a little old.

use moim_base::BrokerId;
use moim_cluster::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeRecord};
use moim_coord::{Coordinator, KeyValue, RangeRequest, State};
use moim_replica::{PartitionId, PartitionState, keys};

use super::records::{self, FEATURE_LEVEL, GONE, NEXT_VOTER};

/// The cluster's records as this node has them.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Every node, by number.
    pub(crate) nodes: Vec<NodeRecord>,
    /// Those that run.
    pub(crate) members: Vec<LiveMember>,
    /// Voters whose nodes were removed or replaced, and which the group may still have.
    pub(crate) gone: Vec<u64>,
    /// The voter id the next folder gets; `None` before the cluster's first records.
    pub(crate) next_voter: Option<u64>,
    /// The format of the cluster.
    pub(crate) feature_level: Option<u32>,
}

impl View {
    /// What the node's state says now.
    pub(crate) fn of(coordinator: &Coordinator) -> Self {
        coordinator.read(Self::from_state)
    }

    fn from_state(state: &State) -> Self {
        // Records that cannot be read are as good as absent here; whoever changes one is told.
        let mut nodes: Vec<_> =
            under(state, NODES).iter().filter_map(|kv| NodeRecord::from_bytes(&kv.value).ok()).collect();
        nodes.sort_by_key(|node| node.node_id);
        let live = |kv: &KeyValue| {
            let record = MemberRecord::from_bytes(&kv.value).ok()?;
            Some(LiveMember { record, broker_epoch: kv.create_revision })
        };
        let key_of = |kv: &KeyValue| std::str::from_utf8(&kv.key).ok().and_then(records::gone_voter);
        let one = |key: &'static str| {
            let reply = state.range(&RangeRequest::key(key)).ok()?;
            reply.kvs.into_iter().next().map(|kv| kv.value)
        };
        Self {
            nodes,
            members: under(state, MEMBERS).iter().filter_map(live).collect(),
            gone: under(state, GONE).iter().filter_map(key_of).collect(),
            next_voter: one(NEXT_VOTER).and_then(|value| records::next_voter(&value).ok()),
            feature_level: one(FEATURE_LEVEL).and_then(|value| records::feature_level(&value).ok()),
        }
    }

    /// A node's record.
    pub(crate) fn node(&self, node_id: i32) -> Option<&NodeRecord> {
        self.nodes.iter().find(|node| node.node_id == node_id)
    }

    /// Whether this life of a node renews its lease.
    pub(crate) fn is_running(&self, node: &NodeRecord) -> bool {
        self.members
            .iter()
            .any(|member| member.record.node_id == node.node_id && member.record.voter == node.voter)
    }

    /// Whether a folder that once had this place was taken out of the cluster, for good.
    pub(crate) fn is_out(&self, node_id: i32, voter: u64, directory_id: &str) -> bool {
        let known =
            self.node(node_id).is_some_and(|node| node.voter == voter && node.directory_id == directory_id);
        !known && self.next_voter.is_some_and(|next| voter < next)
    }
}

/// The partitions as this node's state has them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Partitions {
    /// Of the queue and of the store. Records that cannot be read are left out.
    pub(crate) records: Vec<(PartitionId, PartitionState)>,
}

impl Partitions {
    /// What the node's state says now. Reading thousands of records takes milliseconds: the state is let go first.
    pub(crate) fn of(coordinator: &Coordinator) -> Self {
        let kvs = coordinator.read(|state| under(state, keys::PARTITIONS));
        let read = |kv: &KeyValue| {
            let id = keys::parse_partition(std::str::from_utf8(&kv.key).ok()?)?;
            Some((id, PartitionState::decode(&kv.value).ok()?))
        };
        Self { records: kvs.iter().filter_map(read).collect() }
    }

    /// How many partitions a node leads that somebody else could.
    pub(crate) fn movable(&self, node: i32) -> usize {
        let node = BrokerId(node);
        self.records.iter().filter(|(_, state)| state.leader == Some(node) && state.isr.len() > 1).count()
    }
}

/// Every key that begins with `prefix`, which must end in a slash.
fn under(state: &State, prefix: &'static str) -> Vec<KeyValue> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    state.range(&RangeRequest::between(prefix, end)).map(|reply| reply.kvs).unwrap_or_default()
}
