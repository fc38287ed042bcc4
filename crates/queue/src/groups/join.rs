//! JoinGroup: admission, member ids, and whether a rebalance is needed.
//!
//! A join that the next generation answers waits: its token is held in the member until the rebalance completes. A
//! token that a second join of the same member replaces is answered at once.

use std::sync::Arc;

use bytes::Bytes;

use super::api::{Join, JoinResponse, Protocol, Response, SyncResponse, Token};
use super::codes::ErrorCode;
use super::group::{Group, InitialDelay, Member, Phase};
use super::outbox::{OnWritten, Outbox};
use super::records;

/// Maximum wait of a new member for its first generation before it is removed as abandoned.
const NEW_MEMBER_TIMEOUT_MS: u64 = 5 * 60 * 1000;

/// Maximum number of issued and unused member ids; more in one group means a client in a retry loop.
const MAX_PENDING_MEMBERS: usize = 10_000;

/// A JoinGroup response with an error.
pub(super) fn refused(member_id: &Arc<str>, error: ErrorCode) -> JoinResponse {
    JoinResponse {
        error,
        generation: -1,
        protocol_type: None,
        protocol: None,
        leader: Arc::default(),
        skip_assignment: false,
        member_id: member_id.clone(),
        members: Vec::new(),
    }
}

/// A SyncGroup response with an error.
pub(super) fn not_synced(error: ErrorCode) -> SyncResponse {
    SyncResponse { error, protocol_type: None, protocol: None, assignment: Bytes::new() }
}

impl Group {
    pub(super) fn join(&mut self, out: &mut Outbox, token: Token, mut join: Join) {
        // Copied: a slice would pin the whole request frame in memory.
        for protocol in &mut join.protocols {
            protocol.metadata = Bytes::copy_from_slice(&protocol.metadata);
        }
        if !self.has_room_for(&join.member_id, out.config.max_group_size) {
            if self.members.contains_key(&join.member_id) {
                self.remove_member(out, &join.member_id, "the group is full");
            }
            out.reply(token, Response::Join(refused(&Arc::default(), ErrorCode::GroupMaxSizeReached)));
        } else if !self.supports(&join.protocol_type, &join.protocols) {
            out.reply(token, Response::Join(refused(&join.member_id, ErrorCode::InconsistentGroupProtocol)));
        } else if join.member_id.is_empty() {
            self.join_new(out, token, join);
        } else {
            self.join_known(out, token, join);
        }
        self.maybe_complete_join(out);
    }

    /// While a rebalance prepares, joined members count instead of all members: when the limit has been lowered, the
    /// last to rejoin are rejected.
    fn has_room_for(&self, member_id: &str, max: usize) -> bool {
        match self.phase {
            Phase::Empty => true,
            Phase::Preparing { .. } => {
                let waits = |member: &Member| member.awaiting_join.is_some();
                self.members.get(member_id).is_some_and(waits)
                    || self.members.values().filter(|member| waits(member)).count() < max
            }
            Phase::Completing | Phase::Stable => {
                self.members.contains_key(member_id) || self.members.len() < max
            }
        }
    }

    fn join_new(&mut self, out: &mut Outbox, token: Token, join: Join) {
        match &join.instance_id {
            Some(instance) => {
                let id = out.ids.next(instance);
                match self.instances.get(instance).cloned() {
                    Some(old) => self.replace_static(out, token, join, &old, id),
                    None => self.add_member(out, token, join, id),
                }
            }
            None => {
                let id = out.ids.next(&join.client_id);
                if !join.require_known_member_id {
                    return self.add_member(out, token, join, id);
                }
                if self.pending.len() >= MAX_PENDING_MEMBERS {
                    let refusal = refused(&Arc::default(), ErrorCode::GroupMaxSizeReached);
                    return out.reply(token, Response::Join(refusal));
                }
                out.reply(token, Response::Join(refused(&id, ErrorCode::MemberIdRequired)));
                self.pending.insert(id, out.now + u64::from(join.session_timeout_ms.unsigned_abs()));
            }
        }
    }

    fn join_known(&mut self, out: &mut Outbox, token: Token, join: Join) {
        if join.instance_id.is_none() && self.pending.remove(&join.member_id).is_some() {
            let id = join.member_id.clone();
            return self.add_member(out, token, join, id);
        }
        let error = self.check_member(&join.member_id, join.instance_id.as_deref());
        if error != ErrorCode::None {
            return out.reply(token, Response::Join(refused(&join.member_id, error)));
        }
        let unchanged = self.members.get(&join.member_id).is_some_and(|m| m.protocols == join.protocols);
        let answer_now = match self.phase {
            Phase::Empty | Phase::Preparing { .. } => false,
            // Its response was lost; its generation has not changed.
            Phase::Completing => unchanged,
            // A leader that rejoins requests a new assignment.
            Phase::Stable => unchanged && !self.is_leader(&join.member_id),
        };
        if answer_now {
            if let Some(member) = self.members.get_mut(&join.member_id) {
                member.touch(out.now);
            }
            return out.reply(token, Response::Join(self.joined(&join.member_id)));
        }
        if let Some(member) = self.members.get_mut(&join.member_id) {
            member.update(&join);
            member.touch(out.now);
            if let Some(stale) = member.awaiting_join.replace(token) {
                let refusal = refused(&join.member_id, ErrorCode::RebalanceInProgress);
                out.reply(stale, Response::Join(refusal));
            }
        }
        self.maybe_prepare_rebalance(out, join.reason.as_deref().unwrap_or("a member joins again"));
    }

    fn add_member(&mut self, out: &mut Outbox, token: Token, join: Join, id: Arc<str>) {
        if let Phase::Preparing { initial: Some(InitialDelay { extend, .. }), .. } = &mut self.phase
            && self.generation == 0
        {
            *extend = true;
        }
        if self.members.is_empty() {
            self.protocol_type = Some(join.protocol_type.clone());
            self.leader = Some(id.clone());
        }
        if let Some(instance) = &join.instance_id {
            self.instances.insert(instance.clone(), id.clone());
        }
        self.joins += 1;
        let mut member = Member {
            instance_id: join.instance_id.clone(),
            client_id: join.client_id.clone(),
            client_host: join.client_host.clone(),
            session_timeout_ms: 0,
            rebalance_timeout_ms: 0,
            protocols: Vec::new(),
            assignment: Bytes::new(),
            awaiting_join: Some(token),
            awaiting_sync: None,
            is_new: true,
            pending_sync: false,
            deadline: out.now + NEW_MEMBER_TIMEOUT_MS,
            joined: self.joins,
        };
        member.update(&join);
        self.members.insert(id, member);
        self.maybe_prepare_rebalance(out, join.reason.as_deref().unwrap_or("a new member joins"));
    }

    /// A static member rejoins without its member id. It keeps its position and its assignment under a new member id;
    /// a client that still uses the old id is fenced.
    fn replace_static(&mut self, out: &mut Outbox, token: Token, join: Join, old: &Arc<str>, id: Arc<str>) {
        let Some(mut member) = self.members.remove(old) else {
            return out.reply(token, Response::Join(refused(&id, ErrorCode::UnknownMemberId)));
        };
        if let Some(stale) = member.awaiting_join.take() {
            out.reply(stale, Response::Join(refused(old, ErrorCode::FencedInstanceId)));
        }
        if let Some(stale) = member.awaiting_sync.take() {
            out.reply(stale, Response::Sync(not_synced(ErrorCode::FencedInstanceId)));
        }
        let was_leader = self.is_leader(old);
        if was_leader {
            self.leader = Some(id.clone());
        }
        if let Some(instance) = &join.instance_id {
            self.instances.insert(instance.clone(), id.clone());
        }
        member.update(&join);
        member.client_id = join.client_id.clone();
        member.client_host = join.client_host.clone();
        member.touch(out.now);
        self.members.insert(id.clone(), member);

        if self.phase == Phase::Stable && self.select_protocol() == self.protocol {
            return self.keep_static(out, token, &join, old, &id, was_leader);
        }
        if let Some(member) = self.members.get_mut(&id) {
            member.awaiting_join = Some(token);
        }
        // In `Completing` the leader may be assigning to the old id: only a new generation helps.
        self.maybe_prepare_rebalance(out, join.reason.as_deref().unwrap_or("a static member changed"));
    }

    /// The generation is kept; only the new member id has to be durable before the member uses it.
    fn keep_static(
        &mut self,
        out: &mut Outbox,
        token: Token,
        join: &Join,
        old: &Arc<str>,
        id: &Arc<str>,
        was_leader: bool,
    ) {
        let mut response = self.joined(id);
        if join.can_skip_assignment {
            response.skip_assignment = was_leader;
        } else {
            // Below version 9 nothing can stop a leader from assigning, so it must not know that it leads: it gets
            // its old id as leader.
            response.members.clear();
            if was_leader {
                response.leader = old.clone();
            }
        }
        let value = self.value(|_, member| member.assignment.clone());
        let record = (records::group_key(&self.name), Some(records::group_value(&value)));
        out.persist(&self.name, vec![record], None, OnWritten::StaticJoin { token, response });
    }
}

impl Member {
    /// Updates the member from a join.
    fn update(&mut self, join: &Join) {
        let session = join.session_timeout_ms.unsigned_abs();
        self.session_timeout_ms = session;
        self.rebalance_timeout_ms = u32::try_from(join.rebalance_timeout_ms).unwrap_or(session);
        self.protocols = join
            .protocols
            .iter()
            .map(|p| Protocol { name: p.name.clone(), metadata: p.metadata.clone() })
            .collect();
    }
}
