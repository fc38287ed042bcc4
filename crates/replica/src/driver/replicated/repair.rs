//! Repair of a damaged replica: it is set aside until the damage is in the member record and no partition record
//! counts on it, then reset and fetched again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moim_base::BrokerId;

use super::log::Change;
use super::{Replicated, State};
use crate::message::Answer;
use crate::replica::Replica;
use crate::state::PartitionState;

impl Replicated {
    /// A damaged log takes no more records, and must not count as in sync for having all the rest: the leader learns
    /// that no replica follows here. Once no partition record counts on the replica, it is reset and fetched again.
    pub(super) fn set_aside_damaged(self: &Arc<Self>, state: &mut State, leader: BrokerId, fetch: u64) {
        // On the same connection as this replica's earlier messages, and after them.
        self.shared.outbound(leader).forget(self.id);
        // The member record must list the damage first: an in-sync set may come to name this run because of reports
        // from before the damage was found, and only the member record keeps the empty replica from being elected
        // then.
        let is_registered = self.damage_registered.load(Ordering::Acquire) && self.journal.is_repairable();
        let is_counted_on = !is_registered
            || state.record.as_ref().is_none_or(|record| {
                let PartitionState { isr, eligible, last_known, .. } = &record.value;
                let mut members = isr.iter().chain(eligible).chain(last_known);
                isr.is_empty() || members.any(|member| member.node == self.shared.node)
            });
        let now_ms = self.shared.now_ms();
        let Some(follower) = state.replica.as_mut().and_then(Replica::follower) else { return };
        if follower.on_damaged(fetch, is_counted_on, now_ms) {
            tracing::warn!(partition = %self.id, %leader, "damaged replica reset; fetching from leader");
            self.repairing.store(true, Ordering::Release);
            self.damage_registered.store(false, Ordering::Release);
            self.shared.repairs.fetch_add(1, Ordering::AcqRel);
            self.change(state, Change::Repair);
        }
    }

    /// Damage was found in the journal.
    pub(in crate::driver) fn on_damage_found(self: &Arc<Self>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, _| {
            if let Some(follower) = replica.follower() {
                follower.on_damage_found(now_ms);
            }
        });
    }

    /// The member record lists the replica as damaged, and will until it is repaired.
    pub(in crate::driver) fn on_damage_registered(&self) {
        if self.journal.is_damaged() {
            self.damage_registered.store(true, Ordering::Release);
        }
    }

    /// True if it was damaged and reset, and does not have every committed record yet.
    pub fn is_repairing(&self) -> bool {
        self.repairing.load(Ordering::Acquire)
    }

    /// A reset replica is repaired when it has every committed record.
    pub(super) fn maybe_end_repair(&self, answer: &Answer) {
        if let Answer::Records { high_watermark, .. } = answer
            && self.journal.end() >= high_watermark.0
            && self.repairing.swap(false, Ordering::AcqRel)
        {
            tracing::info!(partition = %self.id, end = self.journal.end(), "damaged replica repaired");
            self.shared.repairs.fetch_add(1, Ordering::AcqRel);
        }
    }
}
