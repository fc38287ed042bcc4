//! The controller: places replicas, elects leaders, moves replicas, follows members and topics.
//!
//! Exactly one node runs it, elected elsewhere; every change it makes compares the controller key's create revision
//! ([`Controller::term`]), so one that was replaced changes nothing. It holds a view of members, topics and records that
//! its driver keeps up to date from watches, and is asked to [`decide`](Controller::decide): the answer is a list of
//! changes, each with its conditions. Deciding is a pure function of the view and the time.
//!
//! Work is bounded by what changed: a record is looked at again only when it, its topic, or one of its nodes changed, or
//! a timer that concerns it ran out. A change under way is not made twice; if it fails the record is looked at again.
//!
//! It must never decide before the view is whole: a topic that was not loaded yet looks like one that was deleted.

pub mod batch;
mod creation;
mod moves;
pub mod office;
pub mod placement;
mod plan;
mod records;
pub mod requests;

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

/// The controller's times and limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerTuning {
    /// A member under suspicion for this long is treated as lost. Always safe: epochs fence it.
    pub suspect_ms: u64,
    /// A member leads again what it prefers after it has been back for this long.
    pub return_ms: u64,
    /// At most this many leaderships return per decision.
    pub returns: usize,
    /// At most this many partitions are moved at once on the controller's own account.
    pub moves: usize,
    /// The factor of topics that did not ask for one, once there are enough nodes.
    pub default_factor: usize,
    /// A record whose topic is not there is deleted after this long: a topic with many partitions is written last.
    pub stray_ms: u64,
}

impl Default for ControllerTuning {
    fn default() -> Self {
        Self {
            suspect_ms: 700,
            return_ms: 3_000,
            returns: 500,
            moves: 64,
            default_factor: 3,
            stray_ms: 30_000,
        }
    }
}

/// What an operator wants of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// To serve.
    #[default]
    Serve,
    /// To lead nothing.
    Drain,
    /// To hold nothing.
    Remove,
}

/// A node the cluster knows, alive or not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Which.
    pub id: BrokerId,
    /// The zone it stands in; empty when nobody said.
    pub zone: String,
    /// What is wanted of it.
    pub order: Order,
}

/// A topic as the controller needs it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topic {
    /// Its incarnation.
    pub id: TopicId,
    /// The key of its record.
    pub key: String,
    /// Its name, for people.
    pub name: String,
    /// The create revision of its record.
    pub create_revision: i64,
    /// How many partitions it has.
    pub partitions: u32,
    /// How many replicas were asked for; `None` follows the size of the cluster.
    pub factor: Option<usize>,
    /// The replicas asked for, partition by partition.
    pub assignment: Vec<Vec<BrokerId>>,
    /// `min.insync.replicas`, if it was set.
    pub min_isr: Option<u32>,
    /// What commits wait for when a partition begins. Later changes are the leader's affair.
    pub durability: Durability,
    /// Whether a leader may be elected that lacks committed records.
    pub unclean: bool,
    /// Whether its leaders answer from memory under a serving right, so that taking a leadership away changes the
    /// holder's fence key.
    pub fenced: bool,
}

impl Topic {
    /// The minimum for a partition with this many replicas.
    fn min_isr_for(&self, replicas: usize) -> u32 {
        min_isr_for(self.min_isr, replicas)
    }
}

/// The minimum for a partition with this many replicas: the setting, if there is one, or what loses nothing with one
/// node and stands still with none.
pub fn min_isr_for(setting: Option<u32>, replicas: usize) -> u32 {
    setting.unwrap_or(if replicas >= 3 { 2 } else { 1 }).max(1)
}

/// How far the log of a replica goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LogEnd {
    /// The epoch of its newest record. Comes first: a newer epoch beats a longer log.
    pub epoch: LeaderEpoch,
    /// Where it ends.
    pub end: Offset,
}

/// A node and what is known of its life.
#[derive(Debug)]
struct NodeState {
    node: Node,
    member: Option<Member>,
    alive_since_ms: u64,
    suspect_since_ms: Option<u64>,
    /// Whether the suspicion has lasted long enough.
    suspect: bool,
    /// Whether it says that its disk hangs or is full: it leads only what no other in-sync replica can lead.
    impaired: bool,
    /// Whether preferred leaderships may return to it.
    settled: bool,
    load: Load,
    /// The partitions it has a replica of.
    partitions: BTreeSet<PartitionId>,
}

#[derive(Debug)]
struct PartitionView {
    record: Versioned<PartitionState>,
    /// Whether a change of this very record is under way.
    busy: bool,
}

/// What was decided.
#[derive(Debug, Default)]
pub struct Plan {
    /// Changes to be written, the urgent ones first. See [`batch::pack`].
    pub changes: Vec<Change>,
    /// Replicas whose log end is wanted, for an election among the last known.
    pub asks: Vec<(BrokerId, PartitionId)>,
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
    /// Records to look at.
    dirty: BTreeSet<PartitionId>,
    /// Topics to look at: new, grown, or with partitions whose creation failed.
    dirty_topics: BTreeSet<TopicId>,
    /// Partitions being created.
    creating: BTreeSet<PartitionId>,
    /// Records of topics that were deleted: they go.
    doomed: BTreeSet<PartitionId>,
    /// Topics that records belong to and nobody has heard of, and since when.
    strays: BTreeMap<TopicId, u64>,
    log_ends: HashMap<(PartitionId, BrokerId), (BrokerEpoch, LogEnd)>,
    /// Elections that wait for the ends of logs, and since when.
    electing_ms: BTreeMap<PartitionId, u64>,
    /// Records whose changes let elections go first.
    deferred: BTreeSet<PartitionId>,
    /// Since when changes are deferred.
    deferred_since_ms: Option<u64>,
    /// Whose log end was asked for, of which run, and when it may be asked for again: an answer may be lost, or say nothing
    /// because the node is only starting.
    asked: BTreeMap<(PartitionId, BrokerId), (BrokerEpoch, u64)>,
    moving: usize,
    looks: u64,
    mutants: Mutants,
}

impl Controller {
    /// A controller that knows nothing yet. `term` is the create revision of its key.
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
            doomed: BTreeSet::new(),
            strays: BTreeMap::new(),
            log_ends: HashMap::new(),
            electing_ms: BTreeMap::new(),
            deferred: BTreeSet::new(),
            deferred_since_ms: None,
            asked: BTreeMap::new(),
            moving: 0,
            looks: 0,
            mutants: Mutants::default(),
        }
    }

    /// With a bug.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn planted(mut self, mutants: Mutants) -> Self {
        self.mutants = mutants;
        self
    }

    /// The create revision of the controller key it decides under.
    pub fn term(&self) -> i64 {
        self.term
    }

    /// How many records it has looked at so far: a measure of its work.
    pub fn looks(&self) -> u64 {
        self.looks
    }

    /// How many partitions a node leads; a node that is drained is done at zero.
    pub fn leaderships_of(&self, node: BrokerId) -> usize {
        self.nodes.get(&node).map_or(0, |state| state.load.leads)
    }

    /// How many replicas a node has; a node that is removed is done at zero.
    pub fn replicas_of(&self, node: BrokerId) -> usize {
        self.nodes.get(&node).map_or(0, |state| state.partitions.len())
    }

    /// The record of a partition as the controller has seen it.
    pub fn record(&self, partition: PartitionId) -> Option<&Versioned<PartitionState>> {
        self.partitions.get(&partition).map(|view| &view.record)
    }

    /// A node is known, or something about it changed.
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

    /// A node is no longer one of the cluster: what it holds goes elsewhere.
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

    /// A member's key is gone.
    pub fn on_member_lost(&mut self, node: BrokerId) {
        if let Some(state) = self.nodes.get_mut(&node) {
            state.member = None;
            state.suspect = false;
            state.suspect_since_ms = None;
            self.mark_node(node);
        }
    }

    /// A member is, or is no longer, under suspicion: connections to it broke, its keep-alives are late.
    pub fn on_suspect(&mut self, node: BrokerId, since_ms: Option<u64>) {
        if let Some(state) = self.nodes.get_mut(&node) {
            state.suspect_since_ms = since_ms;
            if since_ms.is_none() && state.suspect {
                state.suspect = false;
                self.mark_node(node);
                // It may take replicas again, and somebody may have been waiting for that.
                self.mark_growable();
            }
        }
    }

    /// A member says that its disk hangs or is full, or that it works again. Others lead what they have in sync; the rest
    /// stays, so that a stall of storage that all nodes share moves nothing.
    pub fn on_impaired(&mut self, node: BrokerId, impaired: bool) {
        if let Some(state) = self.nodes.get_mut(&node)
            && state.impaired != impaired
        {
            state.impaired = impaired;
            self.mark_node(node);
            self.mark_growable();
        }
    }

    /// A topic exists, or something about it changed.
    pub fn on_topic(&mut self, topic: Topic) {
        let id = topic.id;
        for index in 0..topic.partitions {
            let partition = PartitionId { topic: id, index };
            self.dirty.insert(partition);
            self.doomed.remove(&partition);
        }
        self.strays.remove(&id);
        self.topics.insert(id, topic);
        self.dirty_topics.insert(id);
    }

    /// A topic is gone.
    pub fn on_topic_deleted(&mut self, id: TopicId) {
        self.topics.remove(&id);
        self.dirty_topics.remove(&id);
        let first = PartitionId { topic: id, index: 0 };
        let last = PartitionId { topic: id, index: u32::MAX };
        let gone: Vec<PartitionId> =
            self.partitions.keys().copied().filter(|id| (first..=last).contains(id)).collect();
        self.dirty.extend(gone.iter().copied());
        self.doomed.extend(gone);
    }

    /// A record as it is in the repository now; `None` when it was deleted.
    pub fn on_record(&mut self, id: PartitionId, record: Option<Versioned<PartitionState>>) {
        let known = self.partitions.get(&id);
        if let (Some(known), Some(record)) = (known, &record)
            && record.revision <= known.record.revision
        {
            return;
        }
        if let Some(known) = self.partitions.remove(&id) {
            self.count(id, &known.record.value, false);
            // What the logs ended with before a change says nothing for the next election.
            for node in &known.record.value.replicas {
                self.log_ends.remove(&(id, *node));
                self.asked.remove(&(id, *node));
            }
            let before = known.record.value.leader_epoch;
            if record.as_ref().is_none_or(|record| record.value.leader_epoch > before) {
                self.electing_ms.remove(&id);
            }
        }
        self.creating.remove(&id);
        let Some(record) = record else {
            self.dirty.remove(&id);
            self.doomed.remove(&id);
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

    /// How far a replica's log goes, as its present run says.
    pub fn on_log_end(&mut self, partition: PartitionId, node: BrokerId, run: BrokerEpoch, end: LogEnd) {
        // A late answer must not be kept for the next election.
        let leader = self.partitions.get(&partition).map(|view| view.record.value.leader);
        if self.electing_ms.contains_key(&partition) || leader == Some(None) {
            self.log_ends.insert((partition, node), (run, end));
            self.dirty.insert(partition);
        }
    }

    /// A change was not made, or nobody knows: the record is looked at again. If it was made after all, the watch says
    /// so, and what is decided meanwhile fails by its conditions.
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

    /// There may be more nodes than before: topics that follow the size of the cluster may grow, partitions that wait
    /// for a place may find one.
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

    /// Keeps the counts per node in step with a record that comes or goes.
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
