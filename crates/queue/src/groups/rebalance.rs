//! The rebalance: from one generation to the next.
//!
//! ```text
//! Empty ──join──► Preparing ──all joined, or timeout────► Completing ──assignment durable──► Stable
//!   ▲                 │  ▲                                     │                                │
//!   └──no members─────┘  └──── join, leave, expiry, timeout ───┴────────────────────────────────┘
//! ```
//! Invariants: a generation contains exactly the members that got its JoinGroup response, plus static members that
//! have not rejoined and whose session has not expired. Removing a member while a rebalance prepares checks again
//! whether all remaining members have joined; otherwise the rebalance would wait for a removed member.

use std::sync::Arc;

use bytes::Bytes;

use super::api::{PersistToken, Response};
use super::codes::{self, ErrorCode};
use super::group::{Group, InitialDelay, Member, Phase};
use super::join::{not_synced, refused};
use super::outbox::{OnWritten, Outbox};
use super::records;

impl Group {
    fn enter(&mut self, out: &Outbox, phase: Phase) {
        self.phase = phase;
        self.state_timestamp_ms = out.wall_ms();
    }

    /// Starts a rebalance unless one is being prepared already.
    pub(super) fn maybe_prepare_rebalance(&mut self, out: &mut Outbox, reason: &str) {
        let initial = match self.phase {
            Phase::Preparing { .. } => return,
            Phase::Empty => out.config.initial_rebalance_delay_ms,
            Phase::Completing | Phase::Stable => 0,
        };
        tracing::info!(group = %self.name, generation = self.generation, reason, "rebalance started");
        if self.phase == Phase::Completing {
            self.cancel_sync(out, ErrorCode::RebalanceInProgress);
        }
        self.syncing = None;
        self.sync_deadline = None;
        for member in self.members.values_mut() {
            member.pending_sync = false;
        }
        let phase = if initial > 0 {
            let remaining_ms = self.rebalance_timeout_ms().saturating_sub(initial);
            let initial_delay = InitialDelay { remaining_ms, extend: false };
            Phase::Preparing { deadline: out.now + initial, initial: Some(initial_delay) }
        } else {
            self.wait_for_joins(out)
        };
        self.enter(out, phase);
        self.maybe_complete_join(out);
    }

    /// At least a millisecond, so that time passes between two attempts.
    fn wait_for_joins(&self, out: &Outbox) -> Phase {
        Phase::Preparing { deadline: out.now + self.rebalance_timeout_ms().max(1), initial: None }
    }

    /// Sends the members that wait for an assignment back to rejoin, without an assignment.
    fn cancel_sync(&mut self, out: &mut Outbox, error: ErrorCode) {
        for member in self.members.values_mut() {
            member.assignment = Bytes::new();
            if let Some(token) = member.awaiting_sync.take() {
                out.reply(token, Response::Sync(not_synced(error)));
                member.touch(out.now);
            }
        }
    }

    /// Completes the rebalance if all members have joined. An initial delay always runs to its end.
    pub(super) fn maybe_complete_join(&mut self, out: &mut Outbox) {
        let waiting = matches!(self.phase, Phase::Preparing { initial: None, .. });
        let all_joined = || self.members.values().all(|member| member.awaiting_join.is_some());
        if waiting && self.pending.is_empty() && all_joined() {
            self.complete_join(out);
        }
    }

    /// Starts the next generation with the joined members, and static members that have not rejoined yet.
    fn complete_join(&mut self, out: &mut Outbox) {
        let absent = |m: &Member| m.awaiting_join.is_none() && m.instance_id.is_none();
        let gone: Vec<_> = self.members.iter().filter(|(_, m)| absent(m)).map(|(id, _)| id.clone()).collect();
        for id in gone {
            tracing::info!(group = %self.name, member = %id, "member removed: rebalance timeout");
            self.take_member(&id);
        }
        if !self.members.is_empty() && !self.elect_joined_leader() {
            // Only silent static members are left: their sessions decide.
            self.phase = self.wait_for_joins(out);
            return;
        }
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        if self.members.is_empty() {
            self.become_empty(out);
        } else {
            self.become_completing(out);
        }
    }

    fn become_empty(&mut self, out: &mut Outbox) {
        self.protocol = None;
        self.leader = None;
        self.subscribed = None;
        self.enter(out, Phase::Empty);
        let record =
            (records::group_key(&self.name), Some(records::group_value(&self.value(|_, _| Bytes::new()))));
        out.persist(&self.name, vec![record], None, OnWritten::Nothing);
    }

    fn become_completing(&mut self, out: &mut Outbox) {
        self.protocol = self.select_protocol();
        self.subscribed = self.read_subscriptions();
        self.enter(out, Phase::Completing);
        self.sync_deadline = Some(out.now + self.rebalance_timeout_ms().max(1));
        for member in self.members.values_mut() {
            member.is_new = false;
            member.pending_sync = true;
        }
        let ids: Vec<_> = self.members.keys().cloned().collect();
        for id in ids {
            let response = self.joined(&id);
            let Some(member) = self.members.get_mut(&id) else { continue };
            if let Some(token) = member.awaiting_join.take() {
                member.touch(out.now);
                out.reply(token, Response::Join(response));
            }
        }
        tracing::info!(
            group = %self.name, generation = self.generation, members = self.members.len(),
            "generation started"
        );
    }

    /// The leader stays if it has joined, otherwise the oldest joined member leads; false if no member has joined.
    fn elect_joined_leader(&mut self) -> bool {
        let joined = |m: &Member| m.awaiting_join.is_some();
        if self.leader.as_ref().and_then(|id| self.members.get(id)).is_some_and(joined) {
            return true;
        }
        let oldest = self.members.iter().filter(|(_, m)| joined(m)).min_by_key(|(_, m)| m.joined);
        let Some((id, _)) = oldest else { return false };
        self.leader = Some(id.clone());
        true
    }

    /// Removes a member and does nothing else.
    pub(super) fn take_member(&mut self, id: &str) -> Option<Member> {
        let member = self.members.remove(id)?;
        if let Some(instance) = &member.instance_id {
            self.instances.remove(instance);
        }
        if self.is_leader(id) {
            self.leader = self.oldest_member();
        }
        Some(member)
    }

    /// Removes a member that left, expired or was removed: answers its pending requests and starts a rebalance.
    pub(super) fn remove_member(&mut self, out: &mut Outbox, id: &str, reason: &str) {
        let Some(mut member) = self.take_member(id) else { return };
        tracing::info!(group = %self.name, member = id, reason, "member removed");
        // A client that is still connected learns that it has to join as a new member.
        if let Some(token) = member.awaiting_join.take() {
            out.reply(token, Response::Join(refused(&Arc::default(), ErrorCode::UnknownMemberId)));
        }
        if let Some(token) = member.awaiting_sync.take() {
            out.reply(token, Response::Sync(not_synced(ErrorCode::UnknownMemberId)));
        }
        match self.phase {
            Phase::Empty => {}
            Phase::Preparing { .. } => self.maybe_complete_join(out),
            Phase::Completing | Phase::Stable => self.maybe_prepare_rebalance(out, reason),
        }
    }

    /// The write of an assignment completed. A write of an older generation, or an older one of this, has no effect.
    pub(super) fn on_assignment_written(
        &mut self,
        out: &mut Outbox,
        write: PersistToken,
        assignments: Vec<(Arc<str>, Bytes)>,
        result: Result<(), ErrorCode>,
    ) {
        if self.phase != Phase::Completing || self.syncing != Some(write) {
            return;
        }
        self.syncing = None;
        if let Err(error) = result {
            tracing::warn!(group = %self.name, ?error, "group assignment write failed");
            self.cancel_sync(out, codes::of_group_write(error));
            return self.maybe_prepare_rebalance(out, "assignment write failed");
        }
        for (id, assignment) in assignments {
            if let Some(member) = self.members.get_mut(&id) {
                member.assignment = assignment;
            }
        }
        self.enter(out, Phase::Stable);
        let ids: Vec<_> = self.members.keys().cloned().collect();
        for id in ids {
            let Some(response) = self.members.get(&id).map(|member| self.synced(member)) else { continue };
            let Some(member) = self.members.get_mut(&id) else { continue };
            if let Some(token) = member.awaiting_sync.take() {
                member.touch(out.now);
                out.reply(token, Response::Sync(response));
            }
        }
    }

    /// Handles due deadlines.
    pub(super) fn on_timer(&mut self, out: &mut Outbox) {
        let now = out.now;
        self.pending.retain(|_, lapses| *lapses > now);
        let is_late = |m: &Member| m.expiry().is_some_and(|at| at <= now);
        let late: Vec<_> =
            self.members.iter().filter(|(_, m)| is_late(m)).map(|(id, _)| id.clone()).collect();
        for id in late {
            // An earlier removal of this round may have answered its request and renewed its session.
            if self.members.get(&id).is_some_and(is_late) {
                self.remove_member(out, &id, "session expired");
            }
        }
        if self.sync_deadline.is_some_and(|at| at <= now) {
            self.sync_deadline = None;
            let lazy = self.members.iter().filter(|(_, m)| m.pending_sync).map(|(id, _)| id.clone());
            for id in lazy.collect::<Vec<_>>() {
                self.remove_member(out, &id, "no SyncGroup before the rebalance timeout");
            }
        }
        self.on_join_timer(out);
        self.maybe_complete_join(out);
    }

    fn on_join_timer(&mut self, out: &mut Outbox) {
        let pause = out.config.initial_rebalance_delay_ms;
        let Phase::Preparing { deadline, initial } = &mut self.phase else { return };
        if *deadline > out.now {
            return;
        }
        match initial {
            Some(delay) if delay.extend && delay.remaining_ms > 0 => {
                let more = pause.min(delay.remaining_ms);
                delay.remaining_ms -= more;
                delay.extend = false;
                *deadline = out.now + more;
            }
            _ => self.complete_join(out),
        }
    }
}
