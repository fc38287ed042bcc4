//! One group of the classic protocol: its members, its phase, and the checks that all requests share.
//!
//! The requests are in `join`, `sync`, `leave` and `commit`; the transitions between generations are in `rebalance`.
//! A removed group does not exist, so the protocol's state `Dead` has no phase here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;

use super::api::{
    DescribedGroup, DescribedMember, JoinResponse, JoinedMember, ListedGroup, PersistToken, Protocol, State,
    SyncResponse, Token,
};
use super::codes::ErrorCode;
use super::offsets::Offsets;
use super::records::{GroupValue, MemberValue};
use super::subscription;

/// The protocol type of consumers; only their subscriptions can be parsed.
pub(super) const CONSUMER: &str = "consumer";

/// The phase of a group between two generations.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Phase {
    /// No members.
    Empty,
    /// Waits for the members to join the next generation, until `deadline` at most.
    Preparing { deadline: u64, initial: Option<InitialDelay> },
    /// The members have joined and wait for the leader's assignment.
    Completing,
    /// The assignment is in the log.
    Stable,
}

/// The initial rebalance delay of an empty group, so that consumers that start together are assigned together.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct InitialDelay {
    /// Maximum extension of the delay.
    pub(super) remaining_ms: u64,
    /// True if a member joined during the current delay.
    pub(super) extend: bool,
}

/// A group and its members; see the module comment.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: Arc<str>,
    pub(super) phase: Phase,
    /// Invariant: never decreases while the group exists.
    pub(super) generation: i32,
    pub(super) protocol_type: Option<Arc<str>>,
    pub(super) protocol: Option<Arc<str>>,
    /// Invariant: a member, whenever there are members.
    pub(super) leader: Option<Arc<str>>,
    pub(super) members: BTreeMap<Arc<str>, Member>,
    /// Invariant: maps exactly the static members' instance ids to their member ids.
    pub(super) instances: BTreeMap<Arc<str>, Arc<str>>,
    /// Member ids issued by MEMBER_ID_REQUIRED and not used yet, with their expiry.
    pub(super) pending: BTreeMap<Arc<str>, u64>,
    /// The subscribed topics of this generation; `None` if a subscription cannot be parsed.
    pub(super) subscribed: Option<BTreeSet<Arc<str>>>,
    /// Wall time of the last change of phase.
    pub(super) state_timestamp_ms: i64,
    /// The latest write of an assignment of this generation.
    pub(super) syncing: Option<PersistToken>,
    /// Members that have not sent SyncGroup by then are removed.
    pub(super) sync_deadline: Option<u64>,
    /// Counts joins; the oldest member becomes leader.
    pub(super) joins: u64,
    /// The group's entry in the deadline index. Invariant: never later than the group's next deadline.
    pub(super) wake: Option<u64>,
    pub(super) offsets: Offsets,
}

/// A member.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) instance_id: Option<Arc<str>>,
    pub(super) client_id: Arc<str>,
    pub(super) client_host: Arc<str>,
    pub(super) session_timeout_ms: u32,
    pub(super) rebalance_timeout_ms: u32,
    pub(super) protocols: Vec<Protocol>,
    pub(super) assignment: Bytes,
    pub(super) awaiting_join: Option<Token>,
    pub(super) awaiting_sync: Option<Token>,
    /// True until the response to its first join, so it cannot heartbeat yet.
    pub(super) is_new: bool,
    /// True if the member has joined this generation and not sent SyncGroup yet.
    pub(super) pending_sync: bool,
    /// Session expiry, unless a pending request shows that the member is alive.
    pub(super) deadline: u64,
    /// Position in the order of joining.
    pub(super) joined: u64,
}

impl Member {
    /// Renews the session. The longer timeout of a new member is not shortened.
    pub(super) fn touch(&mut self, now: u64) {
        let session = now + u64::from(self.session_timeout_ms);
        self.deadline = if self.is_new { self.deadline.max(session) } else { session };
    }

    /// The session expiry. A member with a pending request is alive; a new one only for a limited time, since a
    /// client that abandoned its first join and retried leaves an unused member behind.
    pub(super) fn expiry(&self) -> Option<u64> {
        let held = self.awaiting_join.is_some() || self.awaiting_sync.is_some();
        (self.is_new || !held).then_some(self.deadline)
    }

    pub(super) fn supports(&self, protocol: &str) -> bool {
        self.protocols.iter().any(|p| p.name.as_ref() == protocol)
    }

    pub(super) fn metadata(&self, protocol: &str) -> Bytes {
        let found = self.protocols.iter().find(|p| p.name.as_ref() == protocol);
        found.map(|p| p.metadata.clone()).unwrap_or_default()
    }
}

impl Group {
    pub(super) fn new(name: Arc<str>, wall_ms: i64) -> Self {
        Self {
            name,
            phase: Phase::Empty,
            generation: 0,
            protocol_type: None,
            protocol: None,
            leader: None,
            members: BTreeMap::new(),
            instances: BTreeMap::new(),
            pending: BTreeMap::new(),
            subscribed: None,
            state_timestamp_ms: wall_ms,
            syncing: None,
            sync_deadline: None,
            joins: 0,
            wake: None,
            offsets: Offsets::default(),
        }
    }

    pub(super) fn state(&self) -> State {
        match self.phase {
            Phase::Empty => State::Empty,
            Phase::Preparing { .. } => State::PreparingRebalance,
            Phase::Completing => State::CompletingRebalance,
            Phase::Stable => State::Stable,
        }
    }

    pub(super) fn is_leader(&self, member_id: &str) -> bool {
        self.leader.as_deref() == Some(member_id)
    }

    /// Checks that the member exists and still owns its instance id.
    pub(super) fn check_member(&self, member_id: &str, instance_id: Option<&str>) -> ErrorCode {
        if let Some(instance) = instance_id {
            match self.instances.get(instance) {
                None => return ErrorCode::UnknownMemberId,
                Some(owner) if owner.as_ref() != member_id => return ErrorCode::FencedInstanceId,
                Some(_) => {}
            }
        }
        match self.members.contains_key(member_id) {
            true => ErrorCode::None,
            false => ErrorCode::UnknownMemberId,
        }
    }

    /// Hot path: no allocation.
    pub(super) fn heartbeat(
        &mut self,
        now: u64,
        generation: i32,
        member_id: &str,
        instance_id: Option<&str>,
    ) -> ErrorCode {
        let error = self.check_member(member_id, instance_id);
        if error != ErrorCode::None {
            return error;
        }
        if generation != self.generation {
            return ErrorCode::IllegalGeneration;
        }
        if let Some(member) = self.members.get_mut(member_id) {
            member.touch(now);
        }
        match self.phase {
            Phase::Empty => ErrorCode::UnknownMemberId,
            Phase::Preparing { .. } => ErrorCode::RebalanceInProgress,
            // A member may heartbeat as soon as it has joined.
            Phase::Completing | Phase::Stable => ErrorCode::None,
        }
    }

    /// True if a member with these protocols is compatible with the group.
    pub(super) fn supports(&self, protocol_type: &str, protocols: &[Protocol]) -> bool {
        if self.phase == Phase::Empty {
            return !protocol_type.is_empty() && !protocols.is_empty();
        }
        self.protocol_type.as_deref() == Some(protocol_type)
            && protocols.iter().any(|p| self.members.values().all(|member| member.supports(&p.name)))
    }

    /// Each member votes for the first of its protocols that all support; most votes win, and the oldest member's
    /// preference breaks a tie.
    pub(super) fn select_protocol(&self) -> Option<Arc<str>> {
        let first = self.members.values().next()?;
        let everywhere = |p: &&Protocol| self.members.values().all(|member| member.supports(&p.name));
        let common: BTreeSet<&Arc<str>> =
            first.protocols.iter().filter(everywhere).map(|p| &p.name).collect();
        let mut votes: BTreeMap<&Arc<str>, usize> = BTreeMap::new();
        for member in self.members.values() {
            let choice = member.protocols.iter().find(|p| common.contains(&p.name))?;
            *votes.entry(&choice.name).or_default() += 1;
        }
        let most = votes.values().max().copied()?;
        let oldest = self.members.values().min_by_key(|member| member.joined)?;
        let mut preferred = oldest.protocols.iter().map(|p| &p.name);
        preferred.find(|name| votes.get(name) == Some(&most)).cloned()
    }

    /// The topics of all members under the selected protocol, if every subscription can be parsed.
    pub(super) fn read_subscriptions(&self) -> Option<BTreeSet<Arc<str>>> {
        if self.protocol_type.as_deref() != Some(CONSUMER) {
            return None;
        }
        let protocol = self.protocol.as_deref()?;
        let mut all = BTreeSet::new();
        for member in self.members.values() {
            all.append(&mut subscription::topics(&member.metadata(protocol))?);
        }
        Some(all)
    }

    /// Unknown subscriptions count as subscribed to everything.
    pub(super) fn is_subscribed(&self, topic: &str) -> bool {
        self.subscribed.as_ref().is_none_or(|topics| topics.contains(topic))
    }

    pub(super) fn oldest_member(&self) -> Option<Arc<str>> {
        self.members.iter().min_by_key(|(_, member)| member.joined).map(|(id, _)| id.clone())
    }

    /// The maximum rebalance timeout of the members.
    pub(super) fn rebalance_timeout_ms(&self) -> u64 {
        self.members.values().map(|member| u64::from(member.rebalance_timeout_ms)).max().unwrap_or(0)
    }

    /// The response to a member that has joined the current generation.
    pub(super) fn joined(&self, member_id: &Arc<str>) -> JoinResponse {
        JoinResponse {
            error: ErrorCode::None,
            generation: self.generation,
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            leader: self.leader.clone().unwrap_or_default(),
            skip_assignment: false,
            member_id: member_id.clone(),
            members: if self.is_leader(member_id) { self.member_list() } else { Vec::new() },
        }
    }

    fn member_list(&self) -> Vec<JoinedMember> {
        let protocol = self.protocol.as_deref().unwrap_or_default();
        let line = |(id, member): (&Arc<str>, &Member)| JoinedMember {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            metadata: member.metadata(protocol),
        };
        self.members.iter().map(line).collect()
    }

    pub(super) fn synced(&self, member: &Member) -> SyncResponse {
        SyncResponse {
            error: ErrorCode::None,
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            assignment: member.assignment.clone(),
        }
    }

    /// The group's record value, with the assignments that `assignment` returns.
    pub(super) fn value(&self, assignment: impl Fn(&Arc<str>, &Member) -> Bytes) -> GroupValue {
        let protocol = self.protocol.as_deref().unwrap_or_default();
        let line = |(id, member): (&Arc<str>, &Member)| MemberValue {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            client_id: member.client_id.clone(),
            client_host: member.client_host.clone(),
            rebalance_timeout_ms: i32::try_from(member.rebalance_timeout_ms).unwrap_or(i32::MAX),
            session_timeout_ms: i32::try_from(member.session_timeout_ms).unwrap_or(i32::MAX),
            subscription: member.metadata(protocol),
            assignment: assignment(id, member),
        };
        GroupValue {
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            generation: self.generation,
            protocol: self.protocol.clone(),
            leader: self.leader.clone(),
            state_timestamp_ms: self.state_timestamp_ms,
            members: self.members.iter().map(line).collect(),
        }
    }

    /// The next deadline of the group.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        let preparing = match self.phase {
            Phase::Preparing { deadline, .. } => Some(deadline),
            Phase::Empty | Phase::Completing | Phase::Stable => None,
        };
        let members = self.members.values().filter_map(Member::expiry).min();
        let pending = self.pending.values().min().copied();
        [preparing, members, pending, self.sync_deadline].into_iter().flatten().min()
    }

    pub(super) fn describe(&self) -> DescribedGroup {
        let stable = self.phase == Phase::Stable;
        let protocol = self.protocol.as_deref().filter(|_| stable).unwrap_or_default();
        let line = |(id, member): (&Arc<str>, &Member)| DescribedMember {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            client_id: member.client_id.clone(),
            client_host: member.client_host.clone(),
            metadata: if stable { member.metadata(protocol) } else { Bytes::new() },
            assignment: if stable { member.assignment.clone() } else { Bytes::new() },
        };
        DescribedGroup {
            error: ErrorCode::None,
            group: self.name.clone(),
            state: self.state(),
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            protocol: Arc::from(protocol),
            members: self.members.iter().map(line).collect(),
        }
    }

    pub(super) fn list(&self) -> ListedGroup {
        ListedGroup {
            group: self.name.clone(),
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            state: self.state(),
            group_type: super::CLASSIC,
        }
    }

    #[cfg(test)]
    pub(super) fn image(&self) -> String {
        let offsets = self.offsets.image();
        let settled = matches!(self.phase, Phase::Empty | Phase::Stable) && self.generation > 0;
        let mut value = self.value(|_, member| member.assignment.clone());
        if self.phase != Phase::Empty {
            value.state_timestamp_ms = -1;
        }
        match (settled, offsets.is_empty()) {
            (false, true) => String::new(),
            (false, false) => format!("{}\n{offsets}", self.name),
            (true, _) => format!("{} {value:?}\n{offsets}", self.name),
        }
    }
}
