//! A damaged copy: it stands aside until the cluster knows and no record counts on it, begins anew and is fetched again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moim_base::BrokerId;

use super::log::Change;
use super::{Replicated, State};
use crate::message::Answer;
use crate::replica::Replica;
use crate::state::PartitionState;

impl Replicated {
    /// A log with damage in it takes nothing more, and is not to count as in sync for having everything else: the leader
    /// hears that no replica follows here. Once no record counts on the copy it begins anew and is fetched again.
    pub(super) fn hold_off(self: &Arc<Self>, state: &mut State, leader: BrokerId, fetch: u64) {
        // On the same connection as what this copy has said before, and behind it.
        self.shared.outbound(leader).forget(self.id);
        // The cluster must know first: an in-sync set may come to name this run for what it said before the damage was found,
        // and only the member record keeps the empty copy from being elected then.
        let is_told = self.damage_told.load(Ordering::Acquire) && self.journal.is_repairable();
        let is_counted_on = !is_told
            || state.record.as_ref().is_none_or(|record| {
                let PartitionState { isr, eligible, last_known, .. } = &record.value;
                let mut members = isr.iter().chain(eligible).chain(last_known);
                isr.is_empty() || members.any(|member| member.node == self.shared.node)
            });
        let now_ms = self.shared.now_ms();
        let Some(follower) = state.replica.as_mut().and_then(Replica::follower) else { return };
        if follower.on_damaged(fetch, is_counted_on, now_ms) {
            tracing::warn!(partition = %self.id, %leader, "damaged replica begins anew; it is fetched again");
            self.repairing.store(true, Ordering::Release);
            self.damage_told.store(false, Ordering::Release);
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

    /// The member record says that the copy is damaged, and will until it is repaired.
    pub(in crate::driver) fn on_damage_told(&self) {
        if self.journal.is_damaged() {
            self.damage_told.store(true, Ordering::Release);
        }
    }

    /// Whether it was damaged, began anew and does not have everything that is committed yet.
    pub fn is_repairing(&self) -> bool {
        self.repairing.load(Ordering::Acquire)
    }

    /// A copy that began anew is whole when it has everything that is committed.
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
