//! What this node's own state says about the cluster: quick, never waits for a quorum, may be a little old.

use std::collections::{BTreeMap, BTreeSet};

use moim_base::{BrokerId, TopicId};
use moim_cluster::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeOrder, NodeRecord, ORDERS, node_of};
use moim_coord::{Coordinator, KeyValue, RangeRequest, State};
use moim_replica::controller::ControllerTuning;
use moim_replica::{PartitionId, PartitionState, keys};
use serde::{Deserialize, Serialize};

use super::records::{self, FEATURE_LEVEL, GONE, LEAVING, NEXT_VOTER};

/// The cluster's records as this node has them.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Every node, by number.
    pub(crate) nodes: Vec<NodeRecord>,
    /// Those that run.
    pub(crate) members: Vec<LiveMember>,
    /// Voters whose nodes were removed or replaced, and which the group may still have.
    pub(crate) gone: Vec<u64>,
    /// Voters that lose their vote and whose nodes are emptied.
    pub(crate) leaving: Vec<u64>,
    /// The voter id the next folder gets; `None` before the cluster's first records.
    pub(crate) next_voter: Option<u64>,
    /// The format of the cluster.
    pub(crate) feature_level: Option<u32>,
    /// The node that is the controller.
    pub(crate) controller: Option<i32>,
    /// What is wanted of nodes.
    pub(crate) orders: BTreeMap<i32, NodeOrder>,
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

/// The node that is named by the value of the controller's key.
pub(crate) fn controller_node(value: &[u8]) -> Option<i32> {
    #[derive(Deserialize)]
    struct Holder {
        node_id: i32,
    }
    serde_json::from_slice::<Holder>(value).ok().map(|holder| holder.node_id)
}

/// The partitions as this node's state has them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Partitions {
    /// Of the queue and of the store. Records that cannot be read are left out.
    pub(crate) records: Vec<(PartitionId, PartitionState)>,
    /// Topics that did not ask for a factor.
    growing: BTreeSet<TopicId>,
}

/// Partitions by how they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartitionCounts {
    /// All of them.
    pub(crate) total: usize,
    /// Nobody leads them.
    pub(crate) leaderless: usize,
    /// A replica is not in sync.
    pub(crate) under_replicated: usize,
    /// So few are in sync that `acks=all` is refused.
    pub(crate) under_min_isr: usize,
    /// They shall have more copies than they have: the cluster has grown.
    pub(crate) growing: usize,
    /// Replicas are being moved.
    pub(crate) moving: usize,
}

/// What one node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeLoad {
    /// Partitions it leads.
    pub(crate) leads: usize,
    /// Partitions it has a replica of.
    pub(crate) replicas: usize,
    /// Those of which nobody else has everything.
    pub(crate) only_copies: usize,
}

impl Partitions {
    /// What the node's state says now. Reading thousands of records takes milliseconds: the state is let go first.
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

    /// How they are, with so many nodes to be on.
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

    /// What a node has.
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

    /// Whether a node is the last in-sync replica of a partition.
    pub(crate) fn is_last_in_sync(&self, node: i32) -> bool {
        let node = BrokerId(node);
        self.records.iter().any(|(_, state)| state.isr.len() == 1 && state.in_sync(node).is_some())
    }

    /// How many partitions a node leads that somebody else could.
    pub(crate) fn movable(&self, node: i32) -> usize {
        let node = BrokerId(node);
        self.records.iter().filter(|(_, state)| state.leader == Some(node) && state.isr.len() > 1).count()
    }
}

/// The topic, if nobody asked for its factor.
fn default_factor(value: &[u8]) -> Option<TopicId> {
    #[derive(Deserialize)]
    struct Asked {
        id: String,
        #[serde(default = "asked")]
        factor_asked: bool,
    }
    fn asked() -> bool {
        true
    }
    let topic: Asked = serde_json::from_slice(value).ok()?;
    TopicId::parse(&topic.id).filter(|_| !topic.factor_asked)
}

/// Every key that begins with `prefix`, which must end in a slash.
fn under(state: &State, prefix: &'static str) -> Vec<KeyValue> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    state.range(&RangeRequest::between(prefix, end)).map(|reply| reply.kvs).unwrap_or_default()
}
