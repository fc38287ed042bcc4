//! The controller: replica placement, leader election, reassignment, from members and topics.
//!
//! Exactly one node runs it, elected elsewhere. Every change it makes compares the create revision of the controller
//! key ([`Controller::term`]), so a deposed controller changes nothing. It holds a view of members, topics and
//! partition records, which its driver updates from watches. [`decide`](Controller::decide) returns a list of
//! changes, each with its conditions. Deciding is a pure function of the view and the time.
//!
//! Work is bounded by what changed: a record is examined again only when the record, its topic or one of its nodes
//! changed, or a timer for it expired. A change in flight is not made twice; if it fails, the record is examined
//! again.
//!
//! It must never decide before the view is complete: a topic that is not loaded yet looks like a deleted one.

pub mod batch;
mod creation;
mod moves;

pub mod placement;
mod plan;
mod records;
pub mod requests;
pub mod term;

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;
use moim_base::{BrokerId, LeaderEpoch, Offset, TopicId};

pub use self::creation::Maker;
pub use self::moves::MoveError;
use self::placement::Load;
pub use self::records::Settings;
use crate::mutant::Mutants;
use crate::restart::Member;
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{BrokerEpoch, Durability, PartitionId, Versioned};

/// The controller's timeouts and limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerTuning {
    /// A member that is suspected for this long is treated as lost. Always safe: epochs fence it.
    pub suspect_ms: u64,
    /// A member regains its preferred leaderships after it has been back for this long. Clients have to have reconnected by
    /// then: librdkafka waits for up to 12.5 s (`reconnect.backoff.max.ms` and its jitter) before it tries a broker again
    /// that was down, and does not produce to the partitions that this broker leads meanwhile.
    pub return_ms: u64,
    /// The maximum number of preferred leaderships that return per decision.
    pub returns: usize,
    /// The maximum number of concurrent reassignments that the controller starts itself.
    pub moves: usize,
    /// The replication factor of topics without an explicit one, once there are enough nodes.
    pub default_factor: usize,
    /// A record without a topic is deleted after this long: the record of a topic with many partitions is written
    /// last.
    pub orphan_ms: u64,
}

impl Default for ControllerTuning {
    fn default() -> Self {
        Self {
            suspect_ms: 700,
            return_ms: 13_000,
            returns: 500,
            moves: 64,
            default_factor: 3,
            orphan_ms: 30_000,
        }
    }
}

/// The operator's order for a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// Serve normally.
    #[default]
    Serve,
    /// Lead nothing.
    Drain,
    /// Hold no replica.
    Remove,
}

/// A registered node, alive or not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The node id.
    pub id: BrokerId,
    /// The zone (rack) of the node; empty if not configured.
    pub zone: String,
    /// The operator's order.
    pub order: Order,
}

/// The controller's view of a topic.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topic {
    /// Its incarnation.
    pub id: TopicId,
    /// The key of its record.
    pub key: String,
    /// Its name, for logs.
    pub name: String,
    /// The create revision of its record.
    pub create_revision: i64,
    /// The partition count.
    pub partitions: u32,
    /// The explicit replication factor; `None` follows the cluster size.
    pub factor: Option<usize>,
    /// The requested replica assignment, per partition.
    pub assignment: Vec<Vec<BrokerId>>,
    /// `min.insync.replicas`, if set.
    pub min_isr: Option<u32>,
    /// The initial durability of a partition. The leader applies later changes.
    pub durability: Durability,
    /// True if unclean leader election is enabled.
    pub unclean: bool,
    /// True if its leaders answer from memory under a serving right, so that an election must also change the former
    /// leader's fence key.
    pub fenced: bool,
}

impl Topic {
    /// The minimum in-sync replicas for a partition with this many replicas.
    fn min_isr_for(&self, replicas: usize) -> u32 {
        min_isr_for(self.min_isr, replicas)
    }
}

/// The minimum in-sync replicas for a partition with this many replicas: the setting, if there is one; otherwise 2
/// for three or more replicas and 1 for fewer, so that one lost node neither loses records nor stops commits.
pub fn min_isr_for(setting: Option<u32>, replicas: usize) -> u32 {
    setting.unwrap_or(if replicas >= 3 { 2 } else { 1 }).max(1)
}

/// The log end of a replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LogEnd {
    /// The epoch of its newest record. Compared first: a newer epoch beats a longer log.
    pub epoch: LeaderEpoch,
    /// Its log end offset.
    pub end: Offset,
}

/// A node and its liveness.
#[derive(Debug)]
struct NodeState {
    node: Node,
    member: Option<Member>,
    alive_since_ms: u64,
    suspect_since_ms: Option<u64>,
    /// True once the suspicion has lasted for `suspect_ms`.
    suspect: bool,
    /// True if it reports that its disk hangs or is full: it leads only where no other in-sync replica can lead.
    impaired: bool,
    /// True if preferred leaderships may return to it.
    settled: bool,
    load: Load,
    /// The partitions that have a replica on it.
    partitions: BTreeSet<PartitionId>,
}

#[derive(Debug)]
struct PartitionView {
    record: Versioned<PartitionState>,
    /// True while a change of this record is in flight.
    busy: bool,
}

/// The result of a decision.
#[derive(Debug, Default)]
pub struct Plan {
    /// The changes to write, the urgent ones first. See [`batch::pack`].
    pub changes: Vec<Change>,
    /// The replicas whose log end is needed for an election.
    pub log_end_requests: Vec<(BrokerId, PartitionId)>,
    /// When to decide again even if nothing happens.
    pub wake_ms: Option<u64>,
}

/// The controller.
#[derive(Debug)]
pub struct Controller {
    term: i64,
    tuning: ControllerTuning,
    nodes: BTreeMap<BrokerId, NodeState>,
    topics: HashMap<TopicId, Topic>,
    partitions: HashMap<PartitionId, PartitionView>,
    /// Records to examine.
    dirty: BTreeSet<PartitionId>,
    /// Topics to examine: new, grown, or with partitions whose creation failed.
    dirty_topics: BTreeSet<TopicId>,
    /// Partitions whose creation is in flight.
    creating: BTreeSet<PartitionId>,
    /// Partition records of deleted topics, to be deleted.
    deleting: BTreeSet<PartitionId>,
    /// Topics that have partition records but no topic record, and since when.
    orphans: BTreeMap<TopicId, u64>,
    log_ends: HashMap<(PartitionId, BrokerId), (BrokerEpoch, LogEnd)>,
    /// Elections that wait for log ends, and since when.
    electing_ms: BTreeMap<PartitionId, u64>,
    /// Records whose changes are deferred behind elections.
    deferred: BTreeSet<PartitionId>,
    /// Since when changes are deferred.
    deferred_since_ms: Option<u64>,
    /// Requested log ends: the run that was asked, and the earliest time of the next request. An answer may be lost,
    /// or be empty because the node is still starting.
    requested_log_ends: BTreeMap<(PartitionId, BrokerId), (BrokerEpoch, u64)>,
    moving: usize,
    records_examined: u64,
    mutants: Mutants,
}

impl Controller {
    /// A controller with an empty view. `term` is the create revision of its key.
    pub fn new(term: i64, tuning: ControllerTuning) -> Self {
        Self {
            term,
            tuning,
            nodes: BTreeMap::new(),
            topics: HashMap::new(),
            partitions: HashMap::new(),
            dirty: BTreeSet::new(),
            dirty_topics: BTreeSet::new(),
            creating: BTreeSet::new(),
            deleting: BTreeSet::new(),
            orphans: BTreeMap::new(),
            log_ends: HashMap::new(),
            electing_ms: BTreeMap::new(),
            deferred: BTreeSet::new(),
            deferred_since_ms: None,
            requested_log_ends: BTreeMap::new(),
            moving: 0,
            records_examined: 0,
            mutants: Mutants::default(),
        }
    }

    /// Plants a bug.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn planted(mut self, mutants: Mutants) -> Self {
        self.mutants = mutants;
        self
    }

    /// The create revision of the controller key under which it decides.
    pub fn term(&self) -> i64 {
        self.term
    }

    /// The number of records examined so far: a measure of its work.
    pub fn records_examined(&self) -> u64 {
        self.records_examined
    }

    /// The number of partitions that a node leads; a drain is complete at zero.
    pub fn leaderships_of(&self, node: BrokerId) -> usize {
        self.nodes.get(&node).map_or(0, |state| state.load.leads)
    }

    /// The number of replicas on a node; a removal is complete at zero.
    pub fn replicas_of(&self, node: BrokerId) -> usize {
        self.nodes.get(&node).map_or(0, |state| state.partitions.len())
    }

    /// A partition record as the controller has seen it.
    pub fn record(&self, partition: PartitionId) -> Option<&Versioned<PartitionState>> {
        self.partitions.get(&partition).map(|view| &view.record)
    }

    /// A node was registered or changed.
    pub fn on_node(&mut self, node: Node) {
        let id = node.id;
        let before = self.nodes.get(&id).map(|state| state.node.order);
        let state = self.node(id);
        state.node = node;
        if before != Some(state.node.order) {
            self.mark_node(id);
            self.mark_growable();
        }
    }

    /// A node left the cluster: its replicas move to other nodes.
    pub fn on_node_gone(&mut self, id: BrokerId) {
        if let Some(state) = self.nodes.get_mut(&id) {
            if state.partitions.is_empty() && state.member.is_none() {
                self.nodes.remove(&id);
                return;
            }
            state.node.order = Order::Remove;
            self.mark_node(id);
        }
    }

    /// A member is alive, in this run.
    pub fn on_member(&mut self, member: Member, now_ms: u64) {
        let id = member.node;
        let state = self.node(id);
        if state.member.as_ref() == Some(&member) {
            return;
        }
        if state.member.as_ref().is_none_or(|known| known.epoch != member.epoch) {
            state.alive_since_ms = now_ms;
            state.settled = false;
            state.suspect = false;
            state.suspect_since_ms = None;
        }
        state.member = Some(member);
        self.mark_node(id);
        self.mark_growable();
    }

    /// The member key was deleted.
    pub fn on_member_lost(&mut self, node: BrokerId) {
        if let Some(state) = self.nodes.get_mut(&node) {
            state.member = None;
            state.suspect = false;
            state.suspect_since_ms = None;
            self.mark_node(node);
        }
    }

    /// A member is, or is no longer, suspected: connections to it broke, or its keep-alives are late.
    pub fn on_suspect(&mut self, node: BrokerId, since_ms: Option<u64>) {
        if let Some(state) = self.nodes.get_mut(&node) {
            state.suspect_since_ms = since_ms;
            if since_ms.is_none() && state.suspect {
                state.suspect = false;
                self.mark_node(node);
                // It may take replicas again, and a partition may have been waiting for that.
                self.mark_growable();
            }
        }
    }

    /// A member reports that its disk hangs or is full, or works again. Other in-sync replicas take over its
    /// leaderships; the rest stays, so that a stall of storage that all nodes share moves nothing.
    pub fn on_impaired(&mut self, node: BrokerId, impaired: bool) {
        if let Some(state) = self.nodes.get_mut(&node)
            && state.impaired != impaired
        {
            state.impaired = impaired;
            self.mark_node(node);
            self.mark_growable();
        }
    }

    /// A topic was created or changed.
    pub fn on_topic(&mut self, topic: Topic) {
        let id = topic.id;
        for index in 0..topic.partitions {
            let partition = PartitionId { topic: id, index };
            self.dirty.insert(partition);
            self.deleting.remove(&partition);
        }
        self.orphans.remove(&id);
        self.topics.insert(id, topic);
        self.dirty_topics.insert(id);
    }

    /// A topic was deleted.
    pub fn on_topic_deleted(&mut self, id: TopicId) {
        self.topics.remove(&id);
        self.dirty_topics.remove(&id);
        let first = PartitionId { topic: id, index: 0 };
        let last = PartitionId { topic: id, index: u32::MAX };
        let gone: Vec<PartitionId> =
            self.partitions.keys().copied().filter(|id| (first..=last).contains(id)).collect();
        self.dirty.extend(gone.iter().copied());
        self.deleting.extend(gone);
    }

    /// The current partition record; `None` if it was deleted.
    pub fn on_record(&mut self, id: PartitionId, record: Option<Versioned<PartitionState>>) {
        let known = self.partitions.get(&id);
        if let (Some(known), Some(record)) = (known, &record)
            && record.revision <= known.record.revision
        {
            return;
        }
        if let Some(known) = self.partitions.remove(&id) {
            self.count(id, &known.record.value, false);
            // Log ends from before a change are not valid for the next election.
            for node in &known.record.value.replicas {
                self.log_ends.remove(&(id, *node));
                self.requested_log_ends.remove(&(id, *node));
            }
            let before = known.record.value.leader_epoch;
            if record.as_ref().is_none_or(|record| record.value.leader_epoch > before) {
                self.electing_ms.remove(&id);
            }
        }
        self.creating.remove(&id);
        let Some(record) = record else {
            self.dirty.remove(&id);
            self.deleting.remove(&id);
            self.electing_ms.remove(&id);
            if self.topics.contains_key(&id.topic) {
                self.dirty_topics.insert(id.topic);
            }
            return;
        };
        self.count(id, &record.value, true);
        self.partitions.insert(id, PartitionView { record, busy: false });
        self.dirty.insert(id);
    }

    /// The log end of a replica, as reported by its present run.
    pub fn on_log_end(&mut self, partition: PartitionId, node: BrokerId, run: BrokerEpoch, end: LogEnd) {
        // A late answer must not be kept for the next election.
        let leader = self.partitions.get(&partition).map(|view| view.record.value.leader);
        if self.electing_ms.contains_key(&partition) || leader == Some(None) {
            self.log_ends.insert((partition, node), (run, end));
            self.dirty.insert(partition);
        }
    }

    /// A change failed, or its outcome is unknown: the record is examined again. If the change did happen, the watch
    /// reports it, and any change decided in the meantime fails its comparison.
    pub fn on_failed(&mut self, partition: PartitionId) {
        if let Some(view) = self.partitions.get_mut(&partition) {
            view.busy = false;
            self.dirty.insert(partition);
        }
        if self.creating.remove(&partition) {
            self.dirty_topics.insert(partition.topic);
        }
    }

    fn node(&mut self, id: BrokerId) -> &mut NodeState {
        self.nodes.entry(id).or_insert_with(|| NodeState {
            node: Node { id, zone: String::new(), order: Order::Serve },
            member: None,
            alive_since_ms: 0,
            suspect_since_ms: None,
            suspect: false,
            impaired: false,
            settled: false,
            load: Load::default(),
            partitions: BTreeSet::new(),
        })
    }

    fn mark_node(&mut self, node: BrokerId) {
        if let Some(state) = self.nodes.get(&node) {
            self.dirty.extend(state.partitions.iter().copied());
        }
    }

    /// There may be more nodes than before: topics that follow the cluster size may grow, and partitions that wait
    /// for a node may get one.
    fn mark_growable(&mut self) {
        let wanted = self.wanted_factor();
        for topic in self.topics.values() {
            let of_topic = if topic.factor.is_none() { wanted } else { 0 };
            for index in 0..topic.partitions {
                let id = PartitionId { topic: topic.id, index };
                let short = self.partitions.get(&id).is_none_or(|view| {
                    let state = &view.record.value;
                    state.replicas.len() < of_topic.max(state.wanted.map_or(0, |wanted| wanted as usize))
                });
                if short {
                    self.dirty.insert(id);
                }
            }
        }
        self.dirty_topics.extend(self.topics.keys().copied());
    }

    /// Keeps the per-node counts consistent with an added or removed record.
    fn count(&mut self, id: PartitionId, state: &PartitionState, comes: bool) {
        let preferred = state.replicas.first().copied();
        if state.is_moving() {
            self.moving = if comes { self.moving + 1 } else { self.moving - 1 };
        }
        for replica in &state.replicas {
            let node = self.node(*replica);
            if comes {
                node.partitions.insert(id);
                node.load.replicas += 1;
                node.load.preferred += usize::from(preferred == Some(*replica));
                node.load.leads += usize::from(state.leader == Some(*replica));
            } else {
                node.partitions.remove(&id);
                node.load.replicas -= 1;
                node.load.preferred -= usize::from(preferred == Some(*replica));
                node.load.leads -= usize::from(state.leader == Some(*replica));
            }
        }
    }
}

#[cfg(test)]
mod tests;
