//! Group administration and expiry: list, describe, delete, expire.

use std::sync::Arc;

use super::api::{
    DescribedGroup, Effect, FetchedGroup, ListFilter, ListedGroup, OffsetDelete, OffsetDeleteResponse,
    OffsetFetch, PersistToken, Response, State, Token, TopicErrors,
};
use super::codes::{self, ErrorCode};
use super::group::{CONSUMER, Group, Phase};
use super::offsets::{Committed, Offsets};
use super::outbox::{DeleteBatch, OnWritten, Outbox};
use super::{CLASSIC, Groups};

impl Groups {
    /// OffsetFetch for one group. An unknown group has no offsets, which is no error.
    pub fn offset_fetch(&self, request: &OffsetFetch) -> FetchedGroup {
        match self.groups.get(&request.group) {
            Some(group) => group.offsets.fetch(request),
            None => Offsets::default().fetch(request),
        }
    }

    /// DescribeGroups for one group.
    pub fn describe(&self, group: &Arc<str>) -> DescribedGroup {
        match self.groups.get(group) {
            Some(group) => group.describe(),
            None => DescribedGroup {
                error: ErrorCode::GroupIdNotFound,
                group: group.clone(),
                state: State::Dead,
                protocol_type: Arc::default(),
                protocol: Arc::default(),
                members: Vec::new(),
            },
        }
    }

    /// ListGroups, ordered by name.
    pub fn list(&self, filter: &ListFilter) -> Vec<ListedGroup> {
        let passes = |wanted: &[String], name: &str| {
            wanted.is_empty() || wanted.iter().any(|text| text.eq_ignore_ascii_case(name))
        };
        if !passes(&filter.types, CLASSIC) {
            return Vec::new();
        }
        let picked = self.groups.values().filter(|group| passes(&filter.states, group.state().name()));
        let mut listed: Vec<_> = picked.map(Group::list).collect();
        listed.sort_unstable_by(|a, b| a.group.cmp(&b.group));
        listed
    }

    /// DeleteGroups. The response waits until the tombstones are in the log.
    pub fn delete_groups(&mut self, now_ms: u64, token: Token, names: Vec<Arc<str>>) -> Vec<Effect> {
        self.begin(now_ms);
        let mut batch = DeleteBatch { results: Vec::with_capacity(names.len()), in_flight: 0 };
        for (index, name) in names.into_iter().enumerate() {
            let error = match self.groups.get(&name).map(|group| &group.phase) {
                None => ErrorCode::GroupIdNotFound,
                Some(Phase::Empty) => {
                    batch.in_flight += usize::from(self.delete_group(token, index, &name));
                    ErrorCode::None
                }
                Some(_) => ErrorCode::NonEmptyGroup,
            };
            batch.results.push((name, error));
        }
        if batch.in_flight == 0 {
            self.out.reply(token, Response::DeleteGroups(batch.results));
        } else {
            self.out.deletes.insert(token, batch);
        }
        self.finish()
    }

    /// Returns true if there is something in the log to delete.
    fn delete_group(&mut self, token: Token, index: usize, name: &Arc<str>) -> bool {
        let Some(group) = self.groups.get(name) else { return false };
        let (keys, generation) = (group.offsets.keys(|_, _, _| true), group.generation);
        let tombstones = Outbox::tombstones(name, &keys, generation > 0);
        if tombstones.is_empty() {
            self.forget(name);
            return false;
        }
        let then = OnWritten::DeleteGroup { token, index, keys, generation };
        self.out.persist(name, tombstones, None, then);
        true
    }

    /// The write of a group's tombstones completed. Records after them in the log stay.
    pub(super) fn on_group_deleted(
        &mut self,
        name: &Arc<str>,
        write: PersistToken,
        then: OnWritten,
        result: Result<(), ErrorCode>,
    ) {
        let OnWritten::DeleteGroup { token, index, keys, generation } = then else { return };
        if let (Some(group), Ok(())) = (self.groups.get_mut(name), result) {
            group.offsets.on_tombstones(&keys, write);
            if group.phase == Phase::Empty && group.generation == generation {
                self.forget(name);
            }
        }
        let Some(batch) = self.out.deletes.get_mut(&token) else { return };
        batch.in_flight -= 1;
        if let Err(error) = result {
            batch.results[index].1 = codes::of_group_write(error);
        }
        if batch.in_flight == 0
            && let Some(batch) = self.out.deletes.remove(&token)
        {
            self.out.reply(token, Response::DeleteGroups(batch.results));
        }
    }

    /// Removes an empty group, but keeps state that the log still has: offsets after its tombstones, pending
    /// transactional offsets, and member ids that were issued and not used yet.
    fn forget(&mut self, name: &Arc<str>) {
        let Some(old) = self.take(name) else { return };
        if !old.offsets.is_empty() || !old.pending.is_empty() {
            let mut heir = Group::new(name.clone(), self.out.wall_ms());
            heir.offsets = old.offsets;
            heir.pending = old.pending;
            self.groups.insert(name.clone(), heir);
            self.reindex(name);
        }
    }

    /// OffsetDelete. The response waits until the tombstones are in the log.
    pub fn offset_delete(&mut self, now_ms: u64, token: Token, request: OffsetDelete) -> Vec<Effect> {
        self.begin(now_ms);
        let Some(group) = self.groups.get_mut(&request.group) else {
            return self.refuse_offset_delete(token, ErrorCode::GroupIdNotFound);
        };
        let empty = group.phase == Phase::Empty;
        if !empty && group.protocol_type.as_deref() != Some(CONSUMER) {
            return self.refuse_offset_delete(token, ErrorCode::NonEmptyGroup);
        }
        let mut response = Vec::with_capacity(request.topics.len());
        let mut wanted = std::collections::BTreeSet::new();
        for (topic, partitions) in request.topics {
            let free = empty || !group.is_subscribed(&topic);
            let error = if free { ErrorCode::None } else { ErrorCode::GroupSubscribedToTopic };
            if free {
                wanted.extend(partitions.iter().map(|partition| (topic.clone(), *partition)));
            }
            let partitions = partitions.into_iter().map(|partition| (partition, error)).collect();
            response.push(TopicErrors { topic, partitions });
        }
        let keys = group.offsets.keys(|topic, partition, _| wanted.contains(&(Arc::from(topic), partition)));
        if keys.is_empty() {
            let response = OffsetDeleteResponse { error: ErrorCode::None, topics: response };
            self.out.reply(token, Response::OffsetDelete(response));
        } else {
            let tombstones = Outbox::tombstones(&request.group, &keys, false);
            let then = OnWritten::Tombstones { keys, asked: Some((token, response)) };
            self.out.persist(&request.group, tombstones, None, then);
        }
        self.finish()
    }

    fn refuse_offset_delete(&mut self, token: Token, error: ErrorCode) -> Vec<Effect> {
        let response = OffsetDeleteResponse { error, topics: Vec::new() };
        self.out.reply(token, Response::OffsetDelete(response));
        self.finish()
    }

    /// Deletes the offsets of a deleted topic in every group.
    pub fn on_topic_deleted(&mut self, now_ms: u64, topic: &str) -> Vec<Effect> {
        self.begin(now_ms);
        for name in self.sorted_names() {
            self.tombstone_offsets(&name, |t, _, _| t == topic);
        }
        self.finish()
    }

    /// Deletes expired offsets, and groups without any state.
    pub(super) fn sweep(&mut self) {
        let wall = self.out.wall_ms();
        let retention = self.out.config.offset_retention_ms;
        for name in self.sorted_names() {
            let Some(group) = self.groups.get(&name) else { continue };
            if let Some(rule) = ExpiryRule::of(group) {
                self.tombstone_offsets(&name, |topic, _, committed| {
                    committed.is_some_and(|committed| rule.is_expired(topic, committed, wall, retention))
                });
            }
            let spent = |group: &Group| {
                group.phase == Phase::Empty && group.pending.is_empty() && group.offsets.is_empty()
            };
            if self.groups.get(&name).is_some_and(spent)
                && let Some(group) = self.take(&name)
            {
                tracing::info!(group = %name, "group expired");
                if group.generation > 0 {
                    let tombstones = Outbox::tombstones(&name, &[], true);
                    self.out.persist(&name, tombstones, None, OnWritten::Nothing);
                }
            }
        }
    }

    /// Writes tombstones of offsets without a waiting request. If the write is lost, the offsets stay, and a later
    /// sweep finds them again.
    fn tombstone_offsets(
        &mut self,
        name: &Arc<str>,
        gone: impl FnMut(&str, i32, Option<&Committed>) -> bool,
    ) {
        let Some(group) = self.groups.get(name) else { return };
        let keys = group.offsets.keys(gone);
        if !keys.is_empty() {
            let tombstones = Outbox::tombstones(name, &keys, false);
            self.out.persist(name, tombstones, None, OnWritten::Tombstones { keys, asked: None });
        }
    }

    /// Ordered by name, so that the same input always gives the same effects.
    fn sorted_names(&self) -> Vec<Arc<str>> {
        let mut names: Vec<_> = self.groups.keys().cloned().collect();
        names.sort_unstable();
        names
    }
}

/// When the retention of an offset starts.
enum ExpiryRule {
    /// When the group lost its last member, or at a later commit.
    SinceEmpty(i64),
    /// At the commit, for topics the group no longer subscribes to.
    Unsubscribed(std::collections::BTreeSet<Arc<str>>),
    /// At the commit: the group never had members.
    SinceCommit,
}

impl ExpiryRule {
    /// `None` for a group that rebalances or whose subscriptions cannot be parsed: nothing expires.
    fn of(group: &Group) -> Option<Self> {
        match (&group.protocol_type, &group.phase) {
            (None, Phase::Empty) => Some(Self::SinceCommit),
            (Some(_), Phase::Empty) => Some(Self::SinceEmpty(group.state_timestamp_ms)),
            (Some(_), Phase::Stable) => group.subscribed.clone().map(Self::Unsubscribed),
            _ => None,
        }
    }

    fn is_expired(&self, topic: &str, committed: &Committed, wall_ms: i64, retention_ms: i64) -> bool {
        let value = &committed.value;
        let since = match self {
            Self::SinceEmpty(empty) => value.commit_timestamp_ms.max(*empty),
            Self::Unsubscribed(topics) if topics.contains(topic) => return false,
            Self::Unsubscribed(_) | Self::SinceCommit => value.commit_timestamp_ms,
        };
        match value.expire_timestamp_ms {
            Some(expire) => wall_ms >= expire,
            None => wall_ms.saturating_sub(since) >= retention_ms,
        }
    }
}
