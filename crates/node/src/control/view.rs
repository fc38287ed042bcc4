//! The cluster as this node's local state shows it: a fast read without a quorum, so it may be stale.

use std::collections::{BTreeMap, BTreeSet};

use moim_base::{BrokerId, TopicId};
use moim_coord::{Coordinator, KeyValue, RangeRequest, State};
use moim_replica::controller::ControllerTuning;
use moim_replica::{PartitionId, PartitionState, keys};
use moim_state::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeOrder, NodeRecord, ORDERS, node_of};
use serde::{Deserialize, Serialize};

use super::records::{self, FEATURE_LEVEL, GONE, LEAVING, NEXT_VOTER};

/// The cluster's records in this node's local state.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// All nodes, by node id.
    pub(crate) nodes: Vec<NodeRecord>,
    /// Live members: nodes that hold a member lease.
    pub(crate) members: Vec<LiveMember>,
    /// Voters whose nodes were removed or replaced; they may still be in the coordination group.
    pub(crate) gone: Vec<u64>,
    /// Voters that lose their vote and whose nodes are drained.
    pub(crate) leaving: Vec<u64>,
    /// Next free voter id; `None` before the founding records are written.
    pub(crate) next_voter: Option<u64>,
    /// Feature level of the cluster.
    pub(crate) feature_level: Option<u32>,
    /// Node id of the controller.
    pub(crate) controller: Option<i32>,
    /// Operator orders, by node id.
    pub(crate) orders: BTreeMap<i32, NodeOrder>,
}

impl View {
    /// Reads the local state.
    pub(crate) fn of(coordinator: &Coordinator) -> Self {
        coordinator.read(Self::from_state)
    }

    fn from_state(state: &State) -> Self {
        // Undecodable records are skipped here; the operation that changes one gets the error.
        let mut nodes: Vec<_> =
            under(state, NODES).iter().filter_map(|kv| NodeRecord::from_bytes(&kv.value).ok()).collect();
        nodes.sort_by_key(|node| node.node_id);
        let live = |kv: &KeyValue| {
            let record = MemberRecord::from_bytes(&kv.value).ok()?;
            Some(LiveMember { record, broker_epoch: kv.create_revision })
        };
        let gone = |kv: &KeyValue| std::str::from_utf8(&kv.key).ok().and_then(records::gone_voter);
        let leaving = |kv: &KeyValue| std::str::from_utf8(&kv.key).ok().and_then(records::leaving_voter);
        let order = |kv: &KeyValue| {
            let node = node_of(std::str::from_utf8(&kv.key).ok()?, ORDERS)?;
            Some((node, NodeOrder::parse(&kv.value)?))
        };
        let one = |key: &'static str| {
            let reply = state.range(&RangeRequest::key(key)).ok()?;
            reply.kvs.into_iter().next().map(|kv| kv.value)
        };
        Self {
            nodes,
            members: under(state, MEMBERS).iter().filter_map(live).collect(),
            gone: under(state, GONE).iter().filter_map(gone).collect(),
            leaving: under(state, LEAVING).iter().filter_map(leaving).collect(),
            next_voter: one(NEXT_VOTER).and_then(|value| records::next_voter(&value).ok()),
            feature_level: one(FEATURE_LEVEL).and_then(|value| records::feature_level(&value).ok()),
            controller: one(keys::CONTROLLER).and_then(|value| controller_node(&value)),
            orders: under(state, ORDERS).iter().filter_map(order).collect(),
        }
    }

    /// The record of a node.
    pub(crate) fn node(&self, node_id: i32) -> Option<&NodeRecord> {
        self.nodes.iter().find(|node| node.node_id == node_id)
    }

    /// True if the node holds a member lease with the voter id of this record.
    pub(crate) fn is_running(&self, node: &NodeRecord) -> bool {
        self.members
            .iter()
            .any(|member| member.record.node_id == node.node_id && member.record.voter == node.voter)
    }

    /// True if this data directory was admitted once, and was removed or replaced since. Final.
    pub(crate) fn is_out(&self, node_id: i32, voter: u64, directory_id: &str) -> bool {
        let known =
            self.node(node_id).is_some_and(|node| node.voter == voter && node.directory_id == directory_id);
        !known && self.next_voter.is_some_and(|next| voter < next)
    }
}

/// Decodes the node id from the value of the controller key.
pub(crate) fn controller_node(value: &[u8]) -> Option<i32> {
    #[derive(Deserialize)]
    struct Holder {
        node_id: i32,
    }
    serde_json::from_slice::<Holder>(value).ok().map(|holder| holder.node_id)
}

/// The partition records in this node's local state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Partitions {
    /// Partitions of the queue and of the store, without undecodable records.
    pub(crate) records: Vec<(PartitionId, PartitionState)>,
    /// Topics with the default replication factor, which grows with the cluster.
    growing: BTreeSet<TopicId>,
}

/// Partition counts by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionCounts {
    /// All of them.
    pub total: usize,
    /// Partitions without a leader.
    pub leaderless: usize,
    /// A replica is not in sync.
    pub under_replicated: usize,
    /// So few are in sync that `acks=all` is refused.
    pub under_min_isr: usize,
    /// They shall have more copies than they have: the cluster has grown.
    pub growing: usize,
    /// Replicas are being moved.
    pub moving: usize,
}

/// Replica counts of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLoad {
    /// Partitions it leads.
    pub(crate) leads: usize,
    /// Partitions it has a replica of.
    pub(crate) replicas: usize,
    /// Replicas without another in-sync or eligible replica.
    pub(crate) only_copies: usize,
}

impl Partitions {
    /// Reads the local state. Decoding thousands of records takes milliseconds, so it happens after the state lock is
    /// released.
    pub(crate) fn of(coordinator: &Coordinator) -> Self {
        let (kvs, topics) =
            coordinator.read(|state| (under(state, keys::PARTITIONS), under(state, keys::TOPICS)));
        let read = |kv: &KeyValue| {
            let id = keys::parse_partition(std::str::from_utf8(&kv.key).ok()?)?;
            Some((id, PartitionState::decode(&kv.value).ok()?))
        };
        let mut growing: BTreeSet<TopicId> =
            topics.iter().filter_map(|kv| default_factor(&kv.value)).collect();
        growing.insert(keys::SHARDS);
        Self { records: kvs.iter().filter_map(read).collect(), growing }
    }

    /// Counts by state, with this many usable nodes.
    pub(crate) fn counts(&self, nodes: usize) -> PartitionCounts {
        let mut counts = PartitionCounts { total: self.records.len(), ..PartitionCounts::default() };
        let wanted = nodes.min(ControllerTuning::default().default_factor);
        for (id, state) in &self.records {
            let settled = state.settled();
            counts.leaderless += usize::from(state.leader.is_none());
            counts.under_replicated += usize::from(settled.iter().any(|node| state.in_sync(*node).is_none()));
            counts.under_min_isr += usize::from(state.isr.len() < state.effective_min());
            counts.growing += usize::from(self.growing.contains(&id.topic) && settled.len() < wanted);
            counts.moving += usize::from(state.is_moving());
        }
        counts
    }

    /// Replica counts of a node.
    pub(crate) fn load(&self, node: i32) -> NodeLoad {
        let node = BrokerId(node);
        let mut load = NodeLoad::default();
        for (_, state) in self.records.iter().filter(|(_, state)| state.replicas.contains(&node)) {
            load.replicas += 1;
            load.leads += usize::from(state.leader == Some(node));
            let others = state.isr.iter().chain(&state.eligible).filter(|member| member.node != node).count();
            load.only_copies += usize::from(others == 0);
        }
        load
    }

    /// True if the node is the only in-sync replica of a partition.
    pub(crate) fn is_last_in_sync(&self, node: i32) -> bool {
        let node = BrokerId(node);
        self.records.iter().any(|(_, state)| state.isr.len() == 1 && state.in_sync(node).is_some())
    }

    /// Count of the partitions that the node leads and that have another in-sync replica.
    pub(crate) fn movable(&self, node: i32) -> usize {
        let node = BrokerId(node);
        self.records.iter().filter(|(_, state)| state.leader == Some(node) && state.isr.len() > 1).count()
    }
}

/// The topic id, if the topic was created without an explicit replication factor.
fn default_factor(value: &[u8]) -> Option<TopicId> {
    #[derive(Deserialize)]
    struct Factor {
        id: String,
        #[serde(default = "explicit")]
        factor_asked: bool,
    }
    fn explicit() -> bool {
        true
    }
    let topic: Factor = serde_json::from_slice(value).ok()?;
    TopicId::parse(&topic.id).filter(|_| !topic.factor_asked)
}

/// Entries with a key prefix, which must end in a slash.
fn under(state: &State, prefix: &'static str) -> Vec<KeyValue> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    state.range(&RangeRequest::between(prefix, end)).map(|reply| reply.kvs).unwrap_or_default()
}
