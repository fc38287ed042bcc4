//! The group coordinator of one partition: a pure state machine that takes requests, time and the outcome of writes,
//! and returns responses and writes.
//!
//! It owns membership, generations and committed offsets of its groups. It never touches a clock, a socket or a log:
//! time is an input (`now_ms`, monotonic), a response is `Effect::Reply`, a write is `Effect::Persist` and its
//! outcome comes back through [`Groups::on_persisted`].
//!
//! Invariants: every token is answered exactly once; a response that promises durability (an offset commit, an
//! assignment, a deletion) comes after its write; writes of one group reach the log in the order of their effects,
//! and that order alone decides which of two commits wins. The same inputs give the same effects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;

mod admin;
mod api;
mod codes;
mod commit;
mod group;
mod join;
mod leave;
mod loader;
mod offsets;
mod outbox;
mod rebalance;
pub mod records;
mod subscription;
mod sync;
#[cfg(test)]
mod tests;

pub use api::*;
pub use codes::ErrorCode;
pub use loader::Loader;

use group::Group;
use join::{not_synced, refused};
use outbox::{MemberIds, OnWritten, Outbox, Write};

/// The group type; only classic groups are supported.
pub const CLASSIC: &str = "classic";

/// Configuration of the group coordinator.
#[derive(Clone, Debug)]
pub struct Config {
    /// `group.min.session.timeout.ms`
    pub min_session_timeout_ms: i32,
    /// `group.max.session.timeout.ms`
    pub max_session_timeout_ms: i32,
    /// `group.initial.rebalance.delay.ms`
    pub initial_rebalance_delay_ms: u64,
    /// `group.max.size`
    pub max_group_size: usize,
    /// `offset.metadata.max.bytes`
    pub max_offset_metadata: usize,
    /// `offsets.retention.minutes`
    pub offset_retention_ms: i64,
    /// `offsets.retention.check.interval.ms`
    pub sweep_interval_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            min_session_timeout_ms: 6_000,
            max_session_timeout_ms: 1_800_000,
            initial_rebalance_delay_ms: 3_000,
            max_group_size: i32::MAX as usize,
            max_offset_metadata: 4_096,
            offset_retention_ms: 7 * 24 * 3_600_000,
            sweep_interval_ms: 600_000,
        }
    }
}

/// All groups of one coordinator.
pub struct Groups {
    groups: HashMap<Arc<str>, Group>,
    /// Invariant: holds `(wake, name)` exactly for the groups that have a `wake`. A wake may come too early (a
    /// heartbeat moves a deadline without touching this index), never too late.
    deadlines: BTreeSet<(u64, Arc<str>)>,
    /// The groups that hold pending offsets of a producer's open transaction.
    txns: BTreeMap<i64, BTreeSet<Arc<str>>>,
    next_sweep: Option<u64>,
    out: Outbox,
}

impl Groups {
    /// A coordinator without groups. `seed` must be fresh for every process: member ids are derived from it.
    pub fn new(config: Config, seed: u128) -> Self {
        let out = Outbox {
            config,
            now: 0,
            wall_minus_now_ms: 0,
            effects: Vec::new(),
            writes: HashMap::new(),
            deletes: HashMap::new(),
            last_write: 0,
            ids: MemberIds::new(seed),
        };
        Self {
            groups: HashMap::new(),
            deadlines: BTreeSet::new(),
            txns: BTreeMap::new(),
            next_sweep: None,
            out,
        }
    }

    /// Sets the wall time of `now_ms`. Records carry wall time; deadlines never do.
    pub fn set_wall_ms(&mut self, now_ms: u64, wall_ms: i64) {
        self.out.wall_minus_now_ms = wall_ms.saturating_sub_unsigned(now_ms);
    }

    /// Adds the groups of a partition that was loaded.
    pub fn install(&mut self, now_ms: u64, loader: Loader) {
        self.begin(now_ms);
        let (seq, groups) = loader.into_groups(now_ms);
        self.out.last_write = self.out.last_write.max(seq);
        for group in groups {
            let name = group.name.clone();
            for producer in group.offsets.open_producers() {
                self.txns.entry(producer).or_default().insert(name.clone());
            }
            let replaced = self.groups.insert(name.clone(), group);
            assert!(replaced.is_none(), "group {name} was served before its partition was loaded");
            self.reindex(&name);
        }
        self.maybe_schedule_sweep();
    }

    /// Handles any request, as data. The methods below are the same without the wrapping.
    pub fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        let reply = |token, response| vec![Effect::Reply(token, response)];
        match input {
            Input::Join(token, join) => self.join(now_ms, token, join),
            Input::Sync(token, sync) => self.sync(now_ms, token, sync),
            Input::Heartbeat(token, Heartbeat { group, generation, member_id, instance_id }) => {
                let error = self.heartbeat(now_ms, &group, generation, &member_id, instance_id.as_deref());
                reply(token, Response::Heartbeat(error))
            }
            Input::Leave(token, leave) => self.leave(now_ms, token, leave),
            Input::OffsetCommit(token, commit) => self.offset_commit(now_ms, token, commit),
            Input::TxnOffsetCommit(token, commit) => self.txn_offset_commit(now_ms, token, commit),
            Input::OffsetFetch(token, groups) => {
                let fetched = groups.iter().map(|request| self.offset_fetch(request)).collect();
                reply(token, Response::OffsetFetch(fetched))
            }
            Input::OffsetDelete(token, request) => self.offset_delete(now_ms, token, request),
            Input::DeleteGroups(token, names) => self.delete_groups(now_ms, token, names),
            Input::DescribeGroups(token, names) => {
                let described = names.iter().map(|name| self.describe(name)).collect();
                reply(token, Response::DescribeGroups(described))
            }
            Input::ListGroups(token, filter) => reply(token, Response::ListGroups(self.list(&filter))),
            Input::Persisted(write, result) => self.on_persisted(now_ms, write, result),
            Input::TxnMarker { producer, commit } => {
                let before = self.begin_txn_marker();
                self.on_txn_marker(producer.id, before, commit);
                Vec::new()
            }
            Input::TopicDeleted(topic) => self.on_topic_deleted(now_ms, &topic),
            Input::Tick => self.tick(now_ms),
        }
    }

    /// JoinGroup. The response may come with any later effect.
    pub fn join(&mut self, now_ms: u64, token: Token, join: Join) -> Vec<Effect> {
        self.begin(now_ms);
        let error = self.check_join(&join);
        if error != ErrorCode::None {
            self.out.reply(token, Response::Join(refused(&join.member_id, error)));
            return self.finish();
        }
        let name = join.group.clone();
        if join.member_id.is_empty() {
            self.ensure(&name);
        }
        if let Some(group) = self.groups.get_mut(&name) {
            group.join(&mut self.out, token, join);
        } else {
            self.out.reply(token, Response::Join(refused(&join.member_id, ErrorCode::UnknownMemberId)));
        }
        self.reindex(&name);
        self.finish()
    }

    fn check_join(&self, join: &Join) -> ErrorCode {
        let fits = |text: &str| text.len() <= records::MAX_STR;
        let names = join.protocols.iter().all(|protocol| fits(&protocol.name));
        let instance = join.instance_id.as_deref().unwrap_or_default();
        let sessions = self.out.config.min_session_timeout_ms..=self.out.config.max_session_timeout_ms;
        if join.group.is_empty() || !fits(&join.group) {
            ErrorCode::InvalidGroupId
        } else if !sessions.contains(&join.session_timeout_ms) {
            ErrorCode::InvalidSessionTimeout
        } else if !names || !fits(instance) || !fits(&join.protocol_type) || !fits(&join.client_id) {
            ErrorCode::InvalidRequest
        } else if join.protocol_type.is_empty() || join.protocols.is_empty() {
            // No protocol could be selected, so no group is created.
            ErrorCode::InconsistentGroupProtocol
        } else {
            ErrorCode::None
        }
    }

    /// SyncGroup. The response may come with any later effect.
    pub fn sync(&mut self, now_ms: u64, token: Token, sync: Sync) -> Vec<Effect> {
        self.begin(now_ms);
        let name = sync.group.clone();
        if name.is_empty() {
            self.out.reply(token, Response::Sync(not_synced(ErrorCode::InvalidGroupId)));
        } else if let Some(group) = self.groups.get_mut(&name) {
            group.sync(&mut self.out, token, sync);
        } else {
            self.out.reply(token, Response::Sync(not_synced(ErrorCode::UnknownMemberId)));
        }
        self.reindex(&name);
        self.finish()
    }

    /// Heartbeat. Hot path: no allocation, and no index is touched.
    pub fn heartbeat(
        &mut self,
        now_ms: u64,
        group: &str,
        generation: i32,
        member_id: &str,
        instance_id: Option<&str>,
    ) -> ErrorCode {
        self.begin(now_ms);
        match self.groups.get_mut(group) {
            Some(group) => group.heartbeat(self.out.now, generation, member_id, instance_id),
            None if group.is_empty() => ErrorCode::InvalidGroupId,
            None => ErrorCode::UnknownMemberId,
        }
    }

    /// LeaveGroup. The response does not wait for the log: a member that reappears after a lost write expires.
    pub fn leave(&mut self, now_ms: u64, token: Token, leave: Leave) -> Vec<Effect> {
        self.begin(now_ms);
        let name = leave.group.clone();
        let response = if name.is_empty() {
            LeaveResponse { error: ErrorCode::InvalidGroupId, members: Vec::new() }
        } else if let Some(group) = self.groups.get_mut(&name) {
            LeaveResponse { error: ErrorCode::None, members: group.leave(&mut self.out, leave) }
        } else {
            let unknown = |member| (member, ErrorCode::UnknownMemberId);
            let members = leave.members.into_iter().map(unknown).collect();
            LeaveResponse { error: ErrorCode::None, members }
        };
        self.out.reply(token, Response::Leave(response));
        self.reindex(&name);
        self.finish()
    }

    /// OffsetCommit. The response waits until the offsets are in the log.
    pub fn offset_commit(&mut self, now_ms: u64, token: Token, commit: OffsetCommit) -> Vec<Effect> {
        self.begin(now_ms);
        let name = commit.group.clone();
        self.maybe_ensure(&name, commit.generation);
        match self.groups.get_mut(&name) {
            Some(group) => group.commit(&mut self.out, token, commit),
            None => self.refuse_commit(token, &name, &commit.topics),
        }
        self.finish()
    }

    /// TxnOffsetCommit. The response waits until the offsets are in the log; they become visible with the producer's
    /// commit marker.
    pub fn txn_offset_commit(&mut self, now_ms: u64, token: Token, commit: TxnOffsetCommit) -> Vec<Effect> {
        self.begin(now_ms);
        let name = commit.group.clone();
        let producer = commit.producer.id;
        self.maybe_ensure(&name, commit.generation);
        match self.groups.get_mut(&name) {
            Some(group) => {
                if group.txn_commit(&mut self.out, token, commit) {
                    self.txns.entry(producer).or_default().insert(name);
                }
            }
            None => self.refuse_commit(token, &name, &commit.topics),
        }
        self.finish()
    }

    /// Creates the group for a client without membership, which needs none before its first commit.
    fn maybe_ensure(&mut self, name: &Arc<str>, generation: i32) {
        if generation < 0 && name.len() <= records::MAX_STR {
            self.ensure(name);
        }
    }

    /// Rejects a commit to an unknown group: its name is invalid, or the generation is of a deleted group.
    fn refuse_commit(&mut self, token: Token, name: &str, topics: &[CommitTopic]) {
        let too_long = name.len() > records::MAX_STR;
        let error = if too_long { ErrorCode::InvalidGroupId } else { ErrorCode::IllegalGeneration };
        self.out.reply(token, Response::OffsetCommit(commit::all(topics, error)));
    }

    /// A marker was appended after all writes requested so far. Returns its position among the writes, for
    /// [`Groups::on_txn_marker`].
    pub fn begin_txn_marker(&mut self) -> PersistToken {
        let token = self.out.next_write();
        self.out.last_write = token.0;
        token
    }

    /// A marker is committed. It decides the pending offsets of its producer that precede it in the log, under any
    /// epoch: the transaction of a fenced producer ends under a newer one. May be called before the outcome of those
    /// writes is known.
    pub fn on_txn_marker(&mut self, producer_id: i64, before: PersistToken, commit: bool) {
        self.on_txn_marker_in(producer_id, before, commit, |_| true);
    }

    /// As [`Groups::on_txn_marker`], for the partition whose groups `in_partition` selects.
    pub fn on_txn_marker_in(
        &mut self,
        producer_id: i64,
        before: PersistToken,
        commit: bool,
        in_partition: impl Fn(&str) -> bool,
    ) {
        let Some(names) = self.txns.get_mut(&producer_id) else { return };
        names.retain(|name| {
            let offsets = self.groups.get_mut(name).map(|group| &mut group.offsets);
            !in_partition(name) || offsets.is_some_and(|o| o.on_marker(producer_id, before, commit))
        });
        if names.is_empty() {
            self.txns.remove(&producer_id);
        }
    }

    /// A write completed: it is durable, or it failed with this error.
    pub fn on_persisted(
        &mut self,
        now_ms: u64,
        write: PersistToken,
        result: Result<(), ErrorCode>,
    ) -> Vec<Effect> {
        self.begin(now_ms);
        let Some(Write { group: name, then }) = self.out.writes.remove(&write) else {
            return self.finish();
        };
        match then {
            OnWritten::Nothing => {
                if let Err(error) = result {
                    tracing::warn!(group = %name, ?error, "group write failed; a restart will load older state");
                }
            }
            OnWritten::DeleteGroup { .. } => self.on_group_deleted(&name, write, then, result),
            OnWritten::StaticJoin { token, response } => {
                let response = match result {
                    Ok(()) => response,
                    Err(error) => refused(&Arc::default(), codes::of_group_write(error)),
                };
                self.out.reply(token, Response::Join(response));
            }
            OnWritten::Assignment { assignments } => {
                if let Some(group) = self.groups.get_mut(&name) {
                    group.on_assignment_written(&mut self.out, write, assignments, result);
                }
                self.reindex(&name);
            }
            OnWritten::Commit { .. } | OnWritten::TxnCommit { .. } | OnWritten::Tombstones { .. } => {
                self.on_offsets_written(&name, write, then, result);
            }
        }
        self.finish()
    }

    fn on_offsets_written(
        &mut self,
        name: &Arc<str>,
        write: PersistToken,
        then: OnWritten,
        result: Result<(), ErrorCode>,
    ) {
        let answer = |response| match result {
            Ok(()) => response,
            Err(error) => commit::failed(response, codes::of_offset_write(error)),
        };
        let offsets = self.groups.get_mut(name).map(|group| &mut group.offsets);
        match then {
            OnWritten::Commit { token, response } => {
                match (offsets, result) {
                    (Some(offsets), Ok(())) => offsets.on_durable(write),
                    (Some(offsets), Err(_)) => offsets.on_failed(write),
                    (None, _) => {}
                }
                self.out.reply(token, Response::OffsetCommit(answer(response)));
            }
            OnWritten::TxnCommit { token, response, producer_id } => {
                let still_open =
                    offsets.is_some_and(|o| o.on_txn_written(producer_id, write, result.is_ok()));
                if !still_open && let Some(names) = self.txns.get_mut(&producer_id) {
                    names.remove(name);
                    if names.is_empty() {
                        self.txns.remove(&producer_id);
                    }
                }
                self.out.reply(token, Response::OffsetCommit(answer(response)));
            }
            OnWritten::Tombstones { keys, asked } => {
                if let (Some(offsets), Ok(())) = (offsets, result) {
                    offsets.on_tombstones(&keys, write);
                }
                if let Some((token, response)) = asked {
                    let response = OffsetDeleteResponse { error: ErrorCode::None, topics: answer(response) };
                    self.out.reply(token, Response::OffsetDelete(response));
                }
            }
            OnWritten::Nothing
            | OnWritten::Assignment { .. }
            | OnWritten::StaticJoin { .. }
            | OnWritten::DeleteGroup { .. } => {}
        }
    }

    /// The time at which [`Groups::tick`] has work. May be early, never late.
    pub fn next_deadline(&self) -> Option<u64> {
        let group = self.deadlines.first().map(|(at, _)| *at);
        [group, self.next_sweep].into_iter().flatten().min()
    }

    /// Advances time: sessions expire, rebalances time out, expired offsets are deleted.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Effect> {
        self.begin(now_ms);
        while let Some((at, name)) = self.deadlines.first().cloned() {
            if at > self.out.now {
                break;
            }
            self.deadlines.pop_first();
            if let Some(group) = self.groups.get_mut(&name) {
                group.wake = None;
                group.on_timer(&mut self.out);
                let next = group.next_deadline();
                assert!(next.is_none_or(|at| at > self.out.now), "timer of {name} did not move");
            }
            self.reindex(&name);
        }
        if self.next_sweep.is_some_and(|at| at <= self.out.now) {
            self.sweep();
            self.next_sweep = None;
            self.maybe_schedule_sweep();
        }
        self.finish()
    }

    /// Unloads the groups that `leaving` selects, because another node coordinates them now or this one stops.
    /// Waiting requests get NOT_COORDINATOR.
    pub fn unload(&mut self, now_ms: u64, leaving: impl Fn(&str) -> bool) -> Vec<Effect> {
        self.begin(now_ms);
        let error = ErrorCode::NotCoordinator;
        let mut names: Vec<_> = self.groups.keys().filter(|name| leaving(name)).cloned().collect();
        names.sort_unstable();
        for name in names {
            let Some(group) = self.take(&name) else { continue };
            for (id, member) in group.members {
                if let Some(token) = member.awaiting_join {
                    self.out.reply(token, Response::Join(refused(&id, error)));
                }
                if let Some(token) = member.awaiting_sync {
                    self.out.reply(token, Response::Sync(not_synced(error)));
                }
            }
        }
        self.txns.retain(|_, names| {
            names.retain(|name| !leaving(name));
            !names.is_empty()
        });
        self.abandon_writes(leaving);
        self.finish()
    }

    /// Answers the requests that wait for a write of an unloaded group: they have to retry with the next coordinator,
    /// which finds in its log whether the write got there.
    fn abandon_writes(&mut self, leaving: impl Fn(&str) -> bool) {
        let error = ErrorCode::NotCoordinator;
        let mut tokens: Vec<_> =
            self.out.writes.iter().filter(|(_, w)| leaving(&w.group)).map(|(t, _)| *t).collect();
        tokens.sort_unstable();
        for write in tokens {
            let Some(Write { group, then }) = self.out.writes.remove(&write) else { continue };
            match then {
                OnWritten::Nothing
                | OnWritten::Assignment { .. }
                | OnWritten::Tombstones { asked: None, .. } => {}
                OnWritten::StaticJoin { token, .. } => {
                    self.out.reply(token, Response::Join(refused(&Arc::default(), error)));
                }
                OnWritten::Commit { token, response } | OnWritten::TxnCommit { token, response, .. } => {
                    self.out.reply(token, Response::OffsetCommit(commit::failed(response, error)));
                }
                OnWritten::Tombstones { asked: Some((token, response)), .. } => {
                    let topics = commit::failed(response, error);
                    let response = OffsetDeleteResponse { error: ErrorCode::None, topics };
                    self.out.reply(token, Response::OffsetDelete(response));
                }
                OnWritten::DeleteGroup { .. } => self.on_group_deleted(&group, write, then, Err(error)),
            }
        }
    }

    /// Number of groups.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// True if there are no groups.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The state that a reload of the log must reproduce, for groups that do not rebalance.
    #[cfg(test)]
    fn image(&self) -> String {
        let mut names: Vec<_> = self.groups.keys().collect();
        names.sort_unstable();
        names.into_iter().map(|name| self.groups[name].image()).collect()
    }

    fn begin(&mut self, now_ms: u64) {
        self.out.now = self.out.now.max(now_ms);
    }

    fn finish(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.out.effects)
    }

    fn ensure(&mut self, name: &Arc<str>) {
        if !self.groups.contains_key(name) {
            self.groups.insert(name.clone(), Group::new(name.clone(), self.out.wall_ms()));
            self.maybe_schedule_sweep();
        }
    }

    fn maybe_schedule_sweep(&mut self) {
        if self.next_sweep.is_none() && !self.groups.is_empty() {
            self.next_sweep = Some(self.out.now + self.out.config.sweep_interval_ms.max(1));
        }
    }

    /// Removes the group and its deadline.
    fn take(&mut self, name: &Arc<str>) -> Option<Group> {
        let mut group = self.groups.remove(name)?;
        if let Some(at) = group.wake.take() {
            self.deadlines.remove(&(at, name.clone()));
        }
        Some(group)
    }

    /// Indexes the group by its next deadline. Every change of a group ends here, except a heartbeat or a commit,
    /// which only postpone deadlines.
    fn reindex(&mut self, name: &Arc<str>) {
        let Some(group) = self.groups.get_mut(name) else { return };
        let next = group.next_deadline();
        if group.wake == next {
            return;
        }
        if let Some(at) = group.wake {
            self.deadlines.remove(&(at, name.clone()));
        }
        group.wake = next;
        if let Some(at) = next {
            self.deadlines.insert((at, name.clone()));
        }
    }
}

/// The partition of `__consumer_offsets` that holds a group: Java's `hashCode` of its name, as every client and tool
/// computes it.
pub fn partition_for(group_id: &str, partitions: i32) -> i32 {
    let hash =
        group_id.encode_utf16().fold(0i32, |hash, unit| hash.wrapping_mul(31).wrapping_add(i32::from(unit)));
    hash.checked_abs().unwrap_or(0) % partitions.max(1)
}
