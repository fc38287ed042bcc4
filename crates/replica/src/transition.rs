//! The legal changes of a partition record, and the comparisons that each write must make.
//!
//! A [`Draft`] starts from a record that was read, takes one or more steps, and ends as a [`Change`]: the next record
//! and its conditions. No partition record is written that was not produced here.
//!
//! # Why the eligible set is safe
//! *Claim:* a replica in `eligible` has every record below any high watermark a leader ever announced. The high
//! watermark moves only over offsets that the whole maximal in-sync set of the leader has, and only while the leader's
//! record has `effective_min` members in sync. Let `E` be eligible in record *n*; it left the in-sync set with some
//! record *j+1*, and every record since has had too few in sync (otherwise [`Draft::finish`] would have emptied the
//! set). A leader that acts on record *k* is either at *k > j*: it may not move its high watermark at all; or at
//! *k ≤ j*: then `E` is in its in-sync set, because only the leader itself adds a node between *k* and *j*, and it
//! would know; so nothing commits without `E`. Minimum and durability are part of the record for this reason: if
//! leader and controller took them from elsewhere, one could still commit under a minimum by which the other no longer
//! counts. A change that lowers the minimum empties the eligible set in the same write where it must.
//!
//! *Limit:* this holds for what replicas keep. One that may have lost data leaves the set by [`Draft::distrust`] or
//! [`Draft::forget`], decided by the restart rules, before anybody may elect it: an election compares the create
//! revision of the elected member's key, so a restarted node is never elected on the strength of its former run.

use moim_base::{BrokerId, LeaderEpoch};

use crate::state::{InSync, PartitionState};
use crate::types::{BrokerEpoch, Durability, PartitionId, Versioned};

/// What the partition's key must be for a change to happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// It does not exist.
    Absent,
    /// It was last changed at this revision.
    Revision(i64),
}

/// A change of one record and its conditions. The controller's writes also compare its own key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The partition whose record changes.
    pub partition: PartitionId,
    /// The required state of the partition's key.
    pub expected: Expected,
    /// The next record; `None` deletes it.
    pub next: Option<PartitionState>,
    /// Members whose key must have this create revision: they are alive, in exactly this run.
    pub members: Vec<(BrokerId, BrokerEpoch)>,
    /// The topic key that must still have this create revision.
    pub topic: Option<(String, i64)>,
    /// The node whose fence key changes in the same write: it loses a leadership, and may be answering from memory
    /// (see [`crate::fence`]).
    pub fence: Option<BrokerId>,
}

impl Change {
    /// The first record of a partition. Every replica is in sync: all logs are empty.
    pub fn create(partition: PartitionId, state: PartitionState, topic: Option<(String, i64)>) -> Self {
        state.check().expect("a new partition record is valid");
        let members = state.isr.iter().map(|member| (member.node, member.epoch)).collect();
        Self { partition, expected: Expected::Absent, next: Some(state), members, topic, fence: None }
    }

    /// Deletes the record.
    pub fn delete(partition: PartitionId, revision: i64) -> Self {
        Self {
            partition,
            expected: Expected::Revision(revision),
            next: None,
            members: Vec::new(),
            topic: None,
            fence: None,
        }
    }
}

impl PartitionState {
    /// The record of a new partition: the first replica leads, in leader epoch 0.
    pub fn new(isr: Vec<InSync>, min_isr: u32, durability: Durability) -> Self {
        Self {
            replicas: isr.iter().map(|member| member.node).collect(),
            adding: Vec::new(),
            removing: Vec::new(),
            leader: isr.first().map(|member| member.node),
            isr,
            eligible: Vec::new(),
            last_known: Vec::new(),
            leader_epoch: LeaderEpoch(0),
            min_isr: min_isr.max(1),
            durability,
            unclean: None,
            released: None,
            wanted: None,
            version: 0,
        }
    }
}

/// A record under construction.
#[derive(Clone, Debug)]
pub struct Draft {
    before: PartitionState,
    revision: i64,
    next: PartitionState,
    /// The replicas that have every committed record, in sync or not: in sync or eligible before, and still trusted.
    pool: Vec<InSync>,
    distrusted: Vec<InSync>,
    members: Vec<(BrokerId, BrokerEpoch)>,
    touched: bool,
}

impl Draft {
    /// Starts from a record as it was read.
    pub fn new(current: &Versioned<PartitionState>) -> Self {
        let before = current.value.clone();
        let pool = before.isr.iter().chain(&before.eligible).copied().collect();
        let next = before.clone();
        Self {
            before,
            revision: current.revision,
            next,
            pool,
            distrusted: Vec::new(),
            members: Vec::new(),
            touched: false,
        }
    }

    /// The present draft. The eligible and last-known sets are computed only at the end.
    pub fn state(&self) -> &PartitionState {
        &self.next
    }

    /// The replicas outside the in-sync set that could be elected when it is empty.
    pub fn candidates(&self) -> impl Iterator<Item = &InSync> {
        self.pool.iter().filter(|member| {
            self.next.in_sync(member.node).is_none() && self.next.replicas.contains(&member.node)
        })
    }

    /// The present last-known replicas.
    pub fn last_known(&self) -> impl Iterator<Item = &InSync> {
        self.next.last_known.iter().chain(&self.distrusted)
    }

    /// Removes a node from the in-sync set: dead, or too slow. It may still be eligible. A leader that is removed no
    /// longer leads.
    pub fn lose(&mut self, node: BrokerId) {
        self.next.isr.retain(|member| member.node != node);
        if self.next.leader == Some(node) {
            self.next.leader = None;
        }
    }

    /// Adds a node to the in-sync set: the leader found that it has caught up, in this run.
    pub fn join(&mut self, member: InSync) {
        match self.next.isr.iter_mut().find(|known| known.node == member.node) {
            Some(known) => *known = member,
            None => self.next.isr.push(member),
        }
        self.pool.retain(|known| known.node != member.node);
        self.pool.push(member);
        self.compare_member(member);
    }

    /// A node is back in a new run with all its data: its entries now name the new run. Leadership is not carried
    /// over, because a new run starts a new leader epoch before its first append.
    pub fn restamp(&mut self, member: InSync) {
        if self.next.leader == Some(member.node) {
            self.next.leader = None;
        }
        for known in self.next.isr.iter_mut().chain(&mut self.pool) {
            if known.node == member.node {
                *known = member;
            }
        }
        self.compare_member(member);
    }

    /// A node is back and may have lost written data: it leaves the in-sync and eligible sets, and is kept as last
    /// known in case no better replica is left.
    pub fn distrust(&mut self, member: InSync) {
        self.forget(member.node);
        self.distrusted.push(member);
        self.compare_member(member);
    }

    /// A node has no data of this partition, or no data that can be trusted.
    pub fn forget(&mut self, node: BrokerId) {
        self.lose(node);
        self.pool.retain(|member| member.node != node);
        self.next.last_known.retain(|member| member.node != node);
        self.distrusted.retain(|member| member.node != node);
    }

    /// Elects a member of the in-sync set or, if that is empty, an eligible replica. Returns whether it could.
    pub fn elect(&mut self, node: BrokerId) -> bool {
        let member = match self.next.in_sync(node) {
            Some(member) => *member,
            None if self.next.isr.is_empty() => {
                let Some(member) = self.candidates().find(|member| member.node == node).copied() else {
                    return false;
                };
                self.next.isr.push(member);
                member
            }
            None => return false,
        };
        self.lead(member);
        true
    }

    /// Elects a node that may lack committed records. `recorded` states whether this is recorded as an unclean
    /// election (electing the longest log of the last-known replicas is not: under `replicated` that is the
    /// guarantee).
    pub fn elect_out_of_sync(&mut self, member: InSync, recorded: bool) {
        self.next.isr = vec![member];
        // No other log can be compared with this one any more.
        self.pool = vec![member];
        self.next.last_known.clear();
        self.distrusted.clear();
        self.lead(member);
        if recorded {
            self.next.unclean = Some(self.next.leader_epoch);
        }
    }

    fn lead(&mut self, member: InSync) {
        self.next.leader = Some(member.node);
        self.next.leader_epoch = LeaderEpoch(self.before.leader_epoch.0 + 1);
        self.compare_member(member);
    }

    /// Starts a reassignment to `target`, or changes the target of the one in progress. Returns whether it could: an
    /// in-sync replica must stay. From then on the wanted replication factor is that of the target.
    pub fn begin_move(&mut self, target: &[BrokerId]) -> bool {
        let settled = self.next.settled();
        let mut replicas = target.to_vec();
        replicas.extend(settled.iter().copied().filter(|node| !target.contains(node)));
        if target.is_empty() || !self.keeps_in_sync_replica(&replicas) {
            return false;
        }
        self.next.adding = target.iter().copied().filter(|node| !settled.contains(node)).collect();
        self.next.removing = settled.iter().copied().filter(|node| !target.contains(node)).collect();
        self.next.wanted = None;
        self.keep_only(replicas);
        true
    }

    /// Starts a reassignment to `target` although the partition should have `wanted` replicas: it gets them when
    /// possible.
    pub fn begin_short_move(&mut self, target: &[BrokerId], wanted: usize) {
        if self.begin_move(target) && target.len() < wanted {
            self.next.wanted = u32::try_from(wanted).ok();
        }
    }

    /// Completes a reassignment whose target is entirely in sync; `min_isr` is the value for the new replica count.
    /// Returns whether it could.
    pub fn finish_move(&mut self, min_isr: u32) -> bool {
        let target = self.next.target();
        if !target.iter().all(|node| self.next.in_sync(*node).is_some()) {
            return false;
        }
        self.next.adding.clear();
        self.next.removing.clear();
        self.keep_only(target);
        self.next.min_isr = min_isr.max(1);
        true
    }

    /// Cancels a reassignment. Returns whether it could: one of the original replicas must be in sync.
    pub fn cancel_move(&mut self) -> bool {
        let settled = self.next.settled();
        if !self.keeps_in_sync_replica(&settled) {
            return false;
        }
        self.next.adding.clear();
        self.next.removing.clear();
        self.keep_only(settled);
        true
    }

    /// The leader releases its leadership, after its last answer: its successor need not wait.
    pub fn release(&mut self) {
        self.next.leader = None;
        self.next.released = Some(self.before.leader_epoch);
    }

    /// Changes the minimum in-sync replicas.
    pub fn set_min_isr(&mut self, min_isr: u32) {
        self.next.min_isr = min_isr.max(1);
    }

    /// Changes the durability of commits. Only the leader may, when every committed record is on stable storage of
    /// the whole in-sync set or no longer needs to be.
    pub fn set_durability(&mut self, durability: Durability) {
        self.next.durability = durability;
    }

    /// Forces a write even if nothing changes: any proposal on the same revision that may still be in flight can then
    /// no longer take effect.
    pub fn touch(&mut self) {
        self.touched = true;
    }

    fn keeps_in_sync_replica(&self, replicas: &[BrokerId]) -> bool {
        self.next.isr.is_empty() || self.next.isr.iter().any(|member| replicas.contains(&member.node))
    }

    fn keep_only(&mut self, replicas: Vec<BrokerId>) {
        self.next.isr.retain(|member| replicas.contains(&member.node));
        if self.next.leader.is_some_and(|leader| !replicas.contains(&leader)) {
            self.next.leader = None;
        }
        self.next.replicas = replicas;
    }

    fn compare_member(&mut self, member: InSync) {
        let compare_member = (member.node, member.epoch);
        if !self.members.contains(&compare_member) {
            self.members.push(compare_member);
        }
    }

    /// Computes the eligible and last-known sets. `None` if nothing would change.
    pub fn finish(mut self, partition: PartitionId) -> Option<Change> {
        let candidates: Vec<InSync> = self.candidates().copied().collect();
        let mut next = self.next;
        let enough = next.isr.len() >= next.effective_min();
        next.eligible = if enough { Vec::new() } else { candidates };
        // With a leader and enough in-sync replicas the partition makes progress: no last-known replica will be
        // waited for.
        if enough && next.leader.is_some() {
            next.last_known.clear();
        } else {
            let trusted = |node| next.in_sync(node).is_some() || next.eligible(node).is_some();
            let mut last_known = self.distrusted;
            last_known.extend(next.last_known.iter().copied());
            let mut kept: Vec<InSync> = Vec::new();
            for member in last_known {
                let named = kept.iter().any(|known| known.node == member.node);
                if !named && !trusted(member.node) && next.replicas.contains(&member.node) {
                    kept.push(member);
                }
            }
            next.last_known = kept;
        }
        if next == self.before && !self.touched {
            return None;
        }
        // A removed replica may return with an empty log. A new leader epoch fences its earlier messages.
        let removes = self.before.replicas.iter().any(|node| !next.replicas.contains(node));
        if removes && next.leader_epoch == self.before.leader_epoch {
            next.leader_epoch = LeaderEpoch(self.before.leader_epoch.0 + 1);
        }
        next.version = self.before.version + 1;
        next.check().expect("a legal change of a valid record is valid");
        assert!(next.leader_epoch >= self.before.leader_epoch, "leader epochs only grow");
        self.members.retain(|(node, _)| next.replicas.contains(node));
        let released = next.released == Some(self.before.leader_epoch);
        let fence = self.before.leader.filter(|leader| next.leader != Some(*leader) && !released);
        Some(Change {
            partition,
            expected: Expected::Revision(self.revision),
            next: Some(next),
            members: self.members,
            topic: None,
            fence,
        })
    }
}

#[cfg(test)]
mod tests;
