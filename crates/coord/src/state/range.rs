//! Range reads: limit, filters and sort, in etcd's order.
//!
//! The order is visible to clients. `count` is the number of keys before filters and limit. The limit is applied while
//! reading when the order cannot change, so a sort target without a sort order sorts the first `limit` keys. With an
//! explicit order, or with filters, everything is read first.
//!
//! A range may be read in steps while commands are applied ([`RangeReading`]): every step reads the same revision.

use crate::error::Error;
use crate::range::{KeyRange, RangeEnd, SpaceId};
use crate::reply::{KeyValue, RangeReply};
use crate::request::{RangeRequest, SortOrder, SortTarget};
use crate::space::Space;
use crate::space::log::Change;

/// Reads the requested range, including the open group of changes.
pub(crate) fn range(space: &Space, request: &RangeRequest) -> Result<RangeReply, Error> {
    let mut reading = RangeReading::begin(space, request)?;
    reading.step(space, usize::MAX)?;
    Ok(reading.finish())
}

/// A range read in progress.
pub(crate) struct RangeReading<'a> {
    request: &'a RangeRequest,
    keys: KeyRange,
    /// The revision of the key space when the read began (`now`), and the revision that is read (`at`).
    now: i64,
    at: i64,
    /// Maximum number of entries kept while reading.
    take: usize,
    count: usize,
    found: Vec<KeyValue>,
}

impl<'a> RangeReading<'a> {
    pub(crate) fn begin(space: &Space, request: &'a RangeRequest) -> Result<Self, Error> {
        let now = space.view_revision();
        if request.revision > now {
            return Err(Error::FutureRevision);
        }
        let at = if request.revision > 0 { request.revision } else { now };
        let take = if request.count_only { 0 } else { limit_while_reading(request) };
        Ok(Self { request, keys: request.range(), now, at, take, count: 0, found: Vec::new() })
    }

    /// Reads up to `max` more keys; true if there may be others. Fails if the revision was compacted meanwhile.
    pub(crate) fn step(&mut self, space: &Space, max: usize) -> Result<bool, Error> {
        if self.at < space.compact_revision() {
            return Err(Error::Compacted);
        }
        let mut last = None;
        let mut read = 0;
        for change in space.scan(&self.keys, self.at) {
            self.count += 1;
            if self.found.len() < self.take && passes(self.request, change) {
                self.found.push(change.to_kv());
            }
            read += 1;
            if read == max {
                last = Some(change.key.clone());
                break;
            }
        }
        let Some(last) = last.filter(|_| self.keys.end != RangeEnd::Single) else { return Ok(false) };
        // The smallest key after the last one read.
        let mut next = Vec::with_capacity(last.len() + 1);
        next.extend_from_slice(&last);
        next.push(0);
        self.keys.start = next.into();
        Ok(true)
    }

    pub(crate) fn space(&self) -> SpaceId {
        self.keys.space()
    }

    pub(crate) fn finish(self) -> RangeReply {
        let Self { request, mut found, now, count, .. } = self;
        sort(request, &mut found);
        let limit =
            if request.limit > 0 { usize::try_from(request.limit).unwrap_or(usize::MAX) } else { usize::MAX };
        let more = found.len() > limit;
        found.truncate(limit);
        if request.keys_only {
            found.iter_mut().for_each(|kv| kv.value = bytes::Bytes::new());
        }
        RangeReply { revision: now, kvs: found, more, count: count as i64 }
    }
}

/// Checks the revision of a range request.
pub(crate) fn check(space: &Space, request: &RangeRequest) -> Result<(), Error> {
    match request.revision {
        0 => Ok(()),
        revision if revision > space.revision() => Err(Error::FutureRevision),
        revision if revision < space.compact_revision() => Err(Error::Compacted),
        _ => Ok(()),
    }
}

fn limit_while_reading(request: &RangeRequest) -> usize {
    let reorders = match (request.sort_order, request.sort_target) {
        (SortOrder::None, _) | (SortOrder::Ascend, SortTarget::Key) => false,
        (SortOrder::Ascend | SortOrder::Descend, _) => true,
    };
    let filters = [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ];
    if request.limit <= 0 || reorders || filters.iter().any(|bound| *bound != 0) {
        return usize::MAX;
    }
    // One more than the limit tells whether there are more.
    usize::try_from(request.limit).unwrap_or(usize::MAX).saturating_add(1)
}

fn passes(request: &RangeRequest, change: &Change) -> bool {
    let at_least = |found: i64, bound: i64| bound == 0 || found >= bound;
    let at_most = |found: i64, bound: i64| bound == 0 || found <= bound;
    let version = &change.version;
    at_least(version.revision, request.min_mod_revision)
        && at_most(version.revision, request.max_mod_revision)
        && at_least(version.create_revision, request.min_create_revision)
        && at_most(version.create_revision, request.max_create_revision)
}

fn sort(request: &RangeRequest, found: &mut [KeyValue]) {
    match request.sort_target {
        SortTarget::Key => {} // already in key order
        SortTarget::Version => found.sort_by_key(|kv| kv.version),
        SortTarget::Create => found.sort_by_key(|kv| kv.create_revision),
        SortTarget::Mod => found.sort_by_key(|kv| kv.mod_revision),
        SortTarget::Value => found.sort_by(|a, b| a.value.cmp(&b.value)),
    }
    if request.sort_order == SortOrder::Descend {
        found.reverse();
    }
}

#[cfg(test)]
mod tests {
    use crate::request::{Command, DeleteRequest, Op, PutRequest};
    use crate::state::State;

    use super::*;

    fn put(state: &mut State, index: u64, key: String) {
        state.apply(index, Command::client(Op::Put(PutRequest::new(key, index.to_string()))));
    }

    /// Reads in steps of `max` keys, with a change of every key between two steps.
    fn read_in_steps(state: &mut State, request: &RangeRequest, max: usize) -> RangeReply {
        let mut reading = state.begin_range(request).unwrap();
        while state.step_range(&mut reading, max).unwrap() {
            let index = state.applied_index() + 1;
            put(state, index, format!("k{:02}", index % 40));
            state.apply(index + 1, Command::client(Op::Delete(DeleteRequest::key("k07"))));
        }
        reading.finish()
    }

    #[test]
    fn range_read_in_steps_is_at_the_revision_of_the_first_step() {
        let mut state = State::new();
        for index in 1..=60 {
            put(&mut state, index, format!("k{:02}", index % 30));
        }
        let all = || RangeRequest::between("k", "l");
        let requests = [
            RangeRequest::key("k05"),
            all(),
            RangeRequest::between("k03", [0_u8].to_vec()),
            RangeRequest { limit: 7, ..all() },
            RangeRequest { count_only: true, ..all() },
            RangeRequest { keys_only: true, limit: 30, ..all() },
            RangeRequest { limit: 3, sort_order: SortOrder::Descend, ..all() },
            RangeRequest { limit: 3, sort_order: SortOrder::Ascend, sort_target: SortTarget::Mod, ..all() },
            RangeRequest { sort_target: SortTarget::Value, ..all() },
            RangeRequest { min_mod_revision: 40, limit: 4, ..all() },
            RangeRequest { revision: 20, ..all() },
        ];
        for request in requests {
            for max in [1, 2, 7, 29, 30, 31, 1_000] {
                let whole = state.range(&request).unwrap();
                assert_eq!(read_in_steps(&mut state, &request, max), whole, "{request:?} in steps of {max}");
            }
        }
    }

    #[test]
    fn range_read_fails_when_its_revision_is_compacted_meanwhile() {
        let mut state = State::new();
        for index in 1..=10 {
            put(&mut state, index, format!("k{index}"));
        }
        let request = RangeRequest::between("k", "l");
        let mut reading = state.begin_range(&request).unwrap();
        assert_eq!(state.step_range(&mut reading, 3), Ok(true));
        put(&mut state, 11, "k".to_owned());
        state.apply(12, Command::client(Op::Compact { space: SpaceId::User, revision: 12 }));
        assert_eq!(state.step_range(&mut reading, 3), Err(Error::Compacted));
    }
}
