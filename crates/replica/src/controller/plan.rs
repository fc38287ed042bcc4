//! The decision function: from the view to changes.
//!
//! One record is decided in a fixed order, and everything goes into one change: the members' entries, the minimum,
//! reassignment, and last the leader, because only then are the candidates known.

use std::collections::BTreeMap;

use moim_base::{BrokerId, TopicId};

use super::placement::{PlacementNode, PlacementNodes};
use super::{Controller, NodeState, Order, PartitionView, Plan, Topic};
use crate::restart::{Member, Verdict, judge};
use crate::state::{InSync, PartitionState};
use crate::transition::{Change, Draft};
use crate::types::{BrokerEpoch, PartitionId, Versioned};

/// The interval between requests for the same log end.
const LOG_END_RETRY_MS: u64 = 200;

/// The time that an election waits for in-sync replicas that do not report their log end. Most of them are suspected,
/// or dead, much earlier, and then do not count.
const ELECTION_WAIT_MS: u64 = 3_000;

/// The time that other changes are deferred behind elections that wait for log ends.
const ELECTIONS_FIRST_MS: u64 = 100;

/// The outcome of the leader decision.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaderDecision {
    /// Nothing more is wanted.
    Decided,
    /// More is wanted than the budget allows.
    OverBudget,
    /// The candidates must report their log ends first.
    WaitsForLogEnds,
}

/// The order of changes: clients wait for a leader first, then for an in-sync set without dead members.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    Leaderless,
    Members,
    Rest,
}

impl Controller {
    /// Everything that must be done now. The changes count as in flight until a newer record or
    /// [`Controller::on_failed`] arrives.
    pub fn decide(&mut self, now_ms: u64) -> Plan {
        let mut plan = Plan::default();
        let mut ranked = Vec::new();
        self.expire_timers(now_ms, &mut plan);
        self.expire_log_end_requests(now_ms);
        let mut placement_nodes = self.placement_nodes();
        for id in std::mem::take(&mut self.dirty_topics) {
            self.create_missing(id, &mut placement_nodes, &mut ranked);
        }
        let mut budget = Budget {
            returns: self.tuning.returns,
            moves: self.tuning.moves.saturating_sub(self.moving),
            leads: self.nodes.iter().map(|(id, node)| (*id, node.load.leads)).collect(),
        };
        let (mut later, mut waiting) = (Vec::new(), Vec::new());
        let mut elections_since_ms = None;
        for id in std::mem::take(&mut self.dirty) {
            if self.partitions.get(&id).is_none_or(|view| view.busy) {
                continue;
            }
            if self.is_orphan(id, now_ms, &mut plan) {
                waiting.push(id);
                continue;
            }
            self.records_examined += 1;
            let log_end_requests = plan.log_end_requests.len();
            let (decided, again) =
                match self.decide_one(id, now_ms, &mut placement_nodes, &mut budget, &mut plan) {
                    Some(decided) => {
                        // An election whose write fails does not wait again.
                        if !decided.0.as_ref().is_some_and(|(_, change)| self.elects(change)) {
                            self.electing_ms.remove(&id);
                        }
                        decided
                    }
                    None => {
                        let since_ms = *self.electing_ms.entry(id).or_insert(now_ms);
                        plan.wake_at(since_ms + ELECTION_WAIT_MS);
                        if self.is_unled(id) {
                            elections_since_ms = elections_since_ms.max(Some(since_ms));
                        }
                        (None, false)
                    }
                };
            self.pace_log_end_requests(log_end_requests, now_ms, &mut plan);
            if again {
                later.push(id);
            }
            if let Some((urgency, change)) = decided {
                if let Some(view) = self.partitions.get_mut(&id) {
                    view.busy = true;
                }
                ranked.push((urgency, change));
            }
        }
        if !later.is_empty() {
            plan.wake_at(now_ms + 200);
            self.dirty.extend(later);
        }
        self.dirty.extend(waiting);
        let is_fresh = |since_ms: u64| now_ms < since_ms + ELECTIONS_FIRST_MS;
        if elections_since_ms.is_some_and(is_fresh) && self.deferred_since_ms.is_none_or(is_fresh) {
            self.deferred_since_ms.get_or_insert(now_ms);
            self.defer(&mut ranked);
            plan.wake_at(now_ms + ELECTIONS_FIRST_MS);
        } else {
            self.deferred_since_ms = None;
        }
        // Stable sort: within a rank the partition order is kept, so that neighbours share transactions.
        ranked.sort_by_key(|(urgency, _)| *urgency);
        plan.changes = ranked.into_iter().map(|(_, change)| change).collect();
        plan
    }

    /// True if a change begins a leader epoch.
    fn elects(&self, change: &Change) -> bool {
        let before = self.partitions.get(&change.partition).map(|view| view.record.value.leader_epoch);
        change.next.as_ref().map(|next| next.leader_epoch) > before
    }

    /// True if clients of a partition wait for an election. One that completes a reassignment has a leader meanwhile.
    fn is_unled(&self, id: PartitionId) -> bool {
        let leader = self.partitions.get(&id).and_then(|view| view.record.value.leader);
        leader.is_none_or(|leader| self.trusted(leader).is_none())
    }

    /// Elections wait for a round of log end answers. Clients wait for elections, so all other changes are deferred.
    fn defer(&mut self, ranked: &mut Vec<(Urgency, Change)>) {
        ranked.retain(|(urgency, change)| {
            let goes = *urgency == Urgency::Leaderless;
            if !goes && let Some(view) = self.partitions.get_mut(&change.partition) {
                view.busy = false;
                self.deferred.insert(change.partition);
            }
            goes
        });
    }

    /// True if the record belongs to a topic whose record may be about to appear.
    fn is_orphan(&mut self, id: PartitionId, now_ms: u64, plan: &mut Plan) -> bool {
        if self.topics.contains_key(&id.topic) || self.deleting.contains(&id) {
            return false;
        }
        let due_ms = *self.orphans.entry(id.topic).or_insert(now_ms) + self.tuning.orphan_ms;
        if now_ms < due_ms {
            plan.wake_at(due_ms);
        }
        now_ms < due_ms
    }

    /// Timers: suspicions that have lasted, members that have been back for long enough.
    fn expire_timers(&mut self, now_ms: u64, plan: &mut Plan) {
        let mut touched = Vec::new();
        // A controller that suspects half of the cluster is more likely isolated itself.
        let alive = self.nodes.values().filter(|node| node.member.is_some()).count();
        let suspected =
            |node: &&NodeState| node.member.is_some() && (node.suspect || node.suspect_since_ms.is_some());
        let believes = self.nodes.values().filter(suspected).count() * 2 < alive;
        for (id, node) in &mut self.nodes {
            if node.member.is_none() {
                continue;
            }
            if let Some(since_ms) = node.suspect_since_ms.filter(|_| !node.suspect && believes) {
                let due_ms = since_ms + self.tuning.suspect_ms;
                if now_ms >= due_ms {
                    node.suspect = true;
                    touched.push(*id);
                } else {
                    plan.wake_at(due_ms);
                }
            }
            if !node.settled {
                let due_ms = node.alive_since_ms + self.tuning.return_ms;
                if now_ms >= due_ms {
                    node.settled = true;
                    touched.push(*id);
                } else {
                    plan.wake_at(due_ms);
                }
            }
        }
        for id in touched {
            self.mark_node(id);
        }
    }

    /// Drops log end requests that were answered, or will not be: an election that still needs the answer asks again.
    fn expire_log_end_requests(&mut self, now_ms: u64) {
        let Self { requested_log_ends, dirty, electing_ms, deferred, deferred_since_ms, .. } = self;
        let is_over = |since_ms: &u64, wait_ms: u64| now_ms >= since_ms + wait_ms;
        dirty.extend(
            electing_ms.iter().filter(|(_, since)| is_over(since, ELECTION_WAIT_MS)).map(|(id, _)| *id),
        );
        let has_deferred = deferred_since_ms.is_some_and(|since_ms| is_over(&since_ms, ELECTIONS_FIRST_MS));
        if has_deferred || electing_ms.values().all(|since| is_over(since, ELECTIONS_FIRST_MS)) {
            dirty.append(deferred);
        }
        requested_log_ends.retain(|(id, _), (_, due_ms)| {
            let waits = now_ms < *due_ms;
            if !waits {
                dirty.insert(*id);
            }
            waits
        });
    }

    /// From index `from` on, keeps the requests that were not sent just now. Without this, a node that answers at
    /// once without a log end would be asked without a pause.
    fn pace_log_end_requests(&mut self, from: usize, now_ms: u64, plan: &mut Plan) {
        for (node, id) in plan.log_end_requests.split_off(from) {
            let run = self.trusted(node).map_or(BrokerEpoch(0), |member| member.epoch);
            let requested_log_ends = self
                .requested_log_ends
                .get(&(id, node))
                .filter(|(requested_log_ends, _)| *requested_log_ends == run);
            let due_ms = requested_log_ends.map_or(now_ms + LOG_END_RETRY_MS, |(_, due_ms)| *due_ms);
            if requested_log_ends.is_none() {
                self.requested_log_ends.insert((id, node), (run, due_ms));
                plan.log_end_requests.push((node, id));
            }
            plan.wake_at(due_ms);
        }
    }

    /// Creates records for partitions of a topic that have none.
    fn create_missing(
        &mut self,
        id: TopicId,
        placement_nodes: &mut PlacementNodes,
        ranked: &mut Vec<(Urgency, Change)>,
    ) {
        let Some(topic) = self.topics.get(&id) else { return };
        for index in 0..topic.partitions {
            let partition = PartitionId { topic: id, index };
            if self.partitions.contains_key(&partition) || self.creating.contains(&partition) {
                continue;
            }
            self.records_examined += 1;
            let wanted = topic.factor.unwrap_or(self.tuning.default_factor).max(1);
            let replicas = match topic.assignment.get(index as usize) {
                Some(requested_log_ends) => requested_log_ends.clone(),
                None => placement_nodes.place(&[], wanted),
            };
            let alive: Vec<InSync> =
                replicas.iter().filter_map(|node| self.alive(*node)).map(Member::in_sync).collect();
            if alive.is_empty() {
                continue; // looked at again when a member comes
            }
            let min_isr = topic.min_isr_for(replicas.len());
            let mut state = PartitionState::new(alive, min_isr, topic.durability);
            state.replicas = replicas;
            let change = Change::create(partition, state, Some((topic.key.clone(), topic.create_revision)));
            self.creating.insert(partition);
            ranked.push((Urgency::Leaderless, change));
        }
    }

    /// Decides one record. Also returns whether it must be examined again for lack of budget. `None` while an
    /// election waits.
    fn decide_one(
        &self,
        id: PartitionId,
        now_ms: u64,
        placement_nodes: &mut PlacementNodes,
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> Option<(Option<(Urgency, Change)>, bool)> {
        let Some(view) = self.partitions.get(&id) else { return Some((None, false)) };
        let Some(topic) = self.topics.get(&id.topic) else {
            return Some((Some((Urgency::Rest, Change::delete(id, view.record.revision))), false));
        };
        let leaderless = |state: &PartitionState| state.leader.is_none();
        let mut draft = Draft::new(&view.record);
        self.judge_members(id, &view.record, &mut draft);
        let members_changed = draft.state().isr != view.record.value.isr;
        if draft.state().is_moving() {
            let min_isr = topic.min_isr_for(draft.state().target().len());
            // A leader outside the target hands over in the same change.
            draft.finish_move(min_isr);
        }
        if !draft.state().is_moving() {
            draft.set_min_isr(topic.min_isr_for(draft.state().replicas.len()));
        }
        let was_leaderless = leaderless(draft.state());
        let mut again = self.maybe_move(topic, &mut draft, placement_nodes, budget);
        match self.maybe_elect(id, now_ms, topic, &mut draft, budget, plan) {
            LeaderDecision::Decided => {}
            LeaderDecision::OverBudget => again = true,
            // One change for everything, once the leader is known.
            LeaderDecision::WaitsForLogEnds => return None,
        }
        let urgency = match (was_leaderless, members_changed) {
            (true, _) => Urgency::Leaderless,
            (false, true) => Urgency::Members,
            (false, false) => Urgency::Rest,
        };
        let change = draft.finish(id).map(|mut change| {
            change.fence = change.fence.filter(|_| topic.fenced);
            (urgency, change)
        });
        Some((change, again))
    }

    /// Removes dead members from the in-sync set, and judges members that returned in a new run.
    fn judge_members(&self, id: PartitionId, record: &Versioned<PartitionState>, draft: &mut Draft) {
        let state = &record.value;
        let anybody = state.isr.iter().any(|entry| self.trusted(entry.node).is_some());
        // A leader that answers detects its followers itself. Otherwise the controller would remove a node that only
        // the controller cannot reach, and the leader would add it back, again and again.
        let led = state.leader.is_some_and(|leader| self.trusted(leader).is_some());
        for entry in &state.isr {
            let alive = self.alive(entry.node);
            match self.trusted(entry.node).or_else(|| alive.filter(|_| led || !anybody)) {
                Some(member) => self.judge_one(id, entry, member, draft),
                // Dead, or suspected while another replica can continue.
                None => draft.lose(entry.node),
            }
        }
        for entry in state.eligible.iter().chain(&state.last_known) {
            if let Some(member) = self.alive(entry.node) {
                self.judge_one(id, entry, member, draft);
            }
        }
    }

    fn judge_one(&self, id: PartitionId, entry: &InSync, member: &Member, draft: &mut Draft) {
        let durability = draft.state().durability;
        // The only replica that counts, even damaged, is better than none: it takes no appends, and is readable
        // around the damage. Without it no replica could ever be elected.
        let state = draft.state();
        let mut others = state.isr.iter().chain(&state.eligible).chain(&state.last_known);
        let only = member.is_damaged(id) && others.all(|other| other.node == entry.node);
        let as_if_whole = only.then(|| Member { damaged: Vec::new(), ..member.clone() });
        match judge(entry, as_if_whole.as_ref().unwrap_or(member), id, durability, self.mutants) {
            Verdict::Current => {}
            Verdict::Kept => draft.restamp(member.in_sync()),
            Verdict::Doubtful => draft.distrust(member.in_sync()),
            Verdict::Lost => draft.forget(entry.node),
        }
    }

    /// Changes the leader if needed.
    fn maybe_elect(
        &self,
        id: PartitionId,
        now_ms: u64,
        topic: &Topic,
        draft: &mut Draft,
        budget: &mut Budget,
        plan: &mut Plan,
    ) -> LeaderDecision {
        let state = draft.state();
        let serves = |node: &BrokerId| self.order(*node) == Order::Serve && !self.is_impaired(*node);
        let in_sync = |node: &BrokerId| state.in_sync(*node).is_some();
        let mut ready: Vec<BrokerId> = state.replicas.iter().copied().filter(in_sync).collect();
        // A suspected node leads only if no other node can.
        if ready.iter().any(|node| self.trusted(*node).is_some()) {
            ready.retain(|node| self.trusted(*node).is_some());
        }
        let serving = ready.iter().copied().filter(serves);
        match state.leader {
            Some(leader) if serves(&leader) => {
                let preferred = state.replicas[0];
                let settled = self.nodes.get(&preferred).is_some_and(|node| node.settled);
                if preferred == leader || !ready.contains(&preferred) || !serves(&preferred) || !settled {
                    return LeaderDecision::Decided;
                }
                if budget.returns == 0 {
                    return LeaderDecision::OverBudget;
                }
                budget.returns -= 1;
                budget.elect(preferred, draft);
            }
            Some(leader) => {
                if let Some(best) = budget.least_busy(serving) {
                    budget.elect(best, draft);
                    // Its disk would also delay the next leader. Afterwards the leader decides whom it waits for.
                    let state = draft.state();
                    if self.is_impaired(leader) && state.isr.len() > state.effective_min() {
                        draft.lose(leader);
                    }
                }
            }
            None => {
                let serving: Vec<BrokerId> = serving.collect();
                // A node about to be drained may lead for a moment; a node with a hanging disk only if no other can.
                let sound = |node: &BrokerId| !self.is_impaired(*node);
                let candidates: Vec<BrokerId> = ready.iter().copied().filter(sound).collect();
                let candidates = if candidates.is_empty() { ready } else { candidates };
                let has_waited =
                    self.electing_ms.get(&id).is_some_and(|since_ms| now_ms >= since_ms + ELECTION_WAIT_MS);
                if candidates.is_empty() {
                    return self.elect_out_of_sync(id, has_waited, topic, draft, plan);
                }
                let Some(longest_logs) = self.longest_logs(id, candidates, has_waited, plan) else {
                    return LeaderDecision::WaitsForLogEnds;
                };
                let preferred = longest_logs.iter().copied().filter(|node| serving.contains(node));
                if let Some(best) = budget.least_busy(preferred).or(longest_logs.first().copied()) {
                    budget.elect(best, draft);
                }
            }
        }
        LeaderDecision::Decided
    }

    /// The candidates with the longest logs; `None` while the log ends are unknown. All candidates are in sync and
    /// should have every committed record. But a replica that lost its last group of writes on disk, or whose
    /// directory was restored from a backup that is seconds old, cannot detect the loss itself: the other logs show
    /// it.
    fn longest_logs(
        &self,
        id: PartitionId,
        candidates: Vec<BrokerId>,
        has_waited: bool,
        plan: &mut Plan,
    ) -> Option<Vec<BrokerId>> {
        if candidates.len() < 2 {
            return Some(candidates);
        }
        let (mut longest_logs, mut furthest, mut is_missing) = (Vec::new(), None, false);
        for node in &candidates {
            let run = self.alive(*node).map(|member| member.epoch);
            match self.log_ends.get(&(id, *node)) {
                Some((of, end)) if Some(*of) == run => {
                    if Some(*end) > furthest {
                        furthest = Some(*end);
                        longest_logs.clear();
                    }
                    if Some(*end) == furthest {
                        longest_logs.push(*node);
                    }
                }
                _ => {
                    is_missing = true;
                    plan.log_end_requests.push((*node, id));
                }
            }
        }
        if is_missing && !has_waited {
            return None;
        }
        Some(if longest_logs.is_empty() { candidates } else { longest_logs })
    }

    /// The in-sync set is empty: elects an eligible replica, or the best of the last-known ones, or any replica if
    /// unclean election is enabled.
    fn elect_out_of_sync(
        &self,
        id: PartitionId,
        has_waited: bool,
        topic: &Topic,
        draft: &mut Draft,
        plan: &mut Plan,
    ) -> LeaderDecision {
        let replicas = draft.state().replicas.clone();
        let eligible: Vec<InSync> = draft.candidates().copied().collect();
        let current = |node: &BrokerId| {
            let entry = eligible.iter().find(|entry| entry.node == *node);
            let member = self.trusted(*node);
            entry.zip(member).is_some_and(|(entry, member)| entry.epoch == member.epoch)
        };
        let candidates: Vec<BrokerId> = replicas.iter().copied().filter(|node| current(node)).collect();
        if !candidates.is_empty() {
            // All of them may be about to return, and one may have a longer log than the first ones.
            let is_candidate_missing = candidates.len() < eligible.len() && !has_waited;
            match self.longest_logs(id, candidates, has_waited, plan).filter(|_| !is_candidate_missing) {
                Some(longest_logs) => draft.elect(longest_logs[0]),
                None => return LeaderDecision::WaitsForLogEnds,
            };
            return LeaderDecision::Decided;
        }
        if eligible.is_empty() && self.elect_last_known(id, draft, plan) {
            return LeaderDecision::Decided;
        }
        if topic.unclean {
            let usable = |node: &BrokerId| self.trusted(*node).filter(|member| !member.is_damaged(id));
            let mut order: Vec<BrokerId> = draft.last_known().map(|entry| entry.node).collect();
            order.extend(replicas);
            if let Some(member) = order.iter().find_map(usable) {
                draft.elect_out_of_sync(member.in_sync(), true);
            }
        }
        LeaderDecision::Decided
    }

    /// No replica is known to have every committed record. Once all last-known replicas are back, the longest log has
    /// the most.
    fn elect_last_known(&self, id: PartitionId, draft: &mut Draft, plan: &mut Plan) -> bool {
        let members: Option<Vec<&Member>> =
            draft.last_known().map(|entry| self.trusted(entry.node)).collect();
        let Some(members) = members.filter(|members| !members.is_empty()) else { return false };
        let mut best = None;
        let mut missing = false;
        for member in members {
            match self.log_ends.get(&(id, member.node)) {
                Some((run, end)) if *run == member.epoch => best = best.max(Some((*end, member.node))),
                _ => {
                    missing = true;
                    plan.log_end_requests.push((member.node, id));
                }
            }
        }
        let Some((_, node)) = best.filter(|_| !missing) else { return false };
        let Some(member) = self.trusted(node) else { return false };
        draft.elect_out_of_sync(member.in_sync(), false);
        true
    }

    pub(super) fn placement_nodes(&self) -> PlacementNodes {
        let usable = self.nodes.values().filter(|node| node.is_usable());
        let node_entry = |node: &NodeState| PlacementNode {
            node: node.node.id,
            zone: node.node.zone.clone(),
            load: node.load,
        };
        PlacementNodes::new(usable.map(node_entry).collect(), self.partitions.len() + self.creating.len())
    }

    pub(super) fn wanted_factor(&self) -> usize {
        let usable = self.nodes.values().filter(|node| node.is_usable()).count();
        self.tuning.default_factor.min(usable).max(1)
    }

    pub(super) fn order(&self, node: BrokerId) -> Order {
        self.nodes.get(&node).map_or(Order::Serve, |state| state.node.order)
    }

    fn is_impaired(&self, node: BrokerId) -> bool {
        self.nodes.get(&node).is_some_and(|state| state.impaired)
    }

    /// A member whose key exists.
    pub(super) fn alive(&self, node: BrokerId) -> Option<&Member> {
        self.nodes.get(&node)?.member.as_ref()
    }

    /// A member whose key exists and that is not suspected.
    fn trusted(&self, node: BrokerId) -> Option<&Member> {
        self.nodes.get(&node).filter(|state| !state.suspect)?.member.as_ref()
    }

    pub(super) fn view(&self, id: PartitionId) -> Option<(&Topic, &PartitionView)> {
        self.topics.get(&id.topic).zip(self.partitions.get(&id))
    }
}

/// The limits on what one decision starts on its own initiative.
pub(super) struct Budget {
    pub(super) returns: usize,
    pub(super) moves: usize,
    /// The leaderships of every node, including those added by this decision: the leaderships of a lost node are
    /// spread evenly.
    leads: BTreeMap<BrokerId, usize>,
}

impl Budget {
    fn least_busy(&self, nodes: impl Iterator<Item = BrokerId>) -> Option<BrokerId> {
        nodes.min_by_key(|node| self.leads.get(node))
    }

    fn elect(&mut self, node: BrokerId, draft: &mut Draft) {
        if draft.elect(node) {
            *self.leads.entry(node).or_default() += 1;
        }
    }
}

impl NodeState {
    /// True if new replicas may be placed on it.
    fn is_usable(&self) -> bool {
        self.member.is_some() && !self.suspect && !self.impaired && self.node.order == Order::Serve
    }
}

impl Plan {
    fn wake_at(&mut self, at_ms: u64) {
        self.wake_ms = Some(self.wake_ms.map_or(at_ms, |known| known.min(at_ms)));
    }
}
