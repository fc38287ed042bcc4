//! Reading a range: limits, filters and sorting, in the order in which etcd does them.
//!
//! The order shows. `count` is of the keys, before filters and limit. A limit is applied while reading when
//! nothing says that the order will change, so with a sort target but no sort order it is the first keys that
//! are taken and then sorted. With an explicit order, or with filters, everything is read first.

use crate::error::Error;
use crate::reply::{KeyValue, RangeReply};
use crate::request::{RangeRequest, SortOrder, SortTarget};
use crate::space::Space;
use crate::space::log::Change;

/// Reads what the request asks for, the open group of changes included.
pub(crate) fn range(space: &Space, request: &RangeRequest) -> Result<RangeReply, Error> {
    let now = space.view_revision();
    if request.revision > now {
        return Err(Error::FutureRevision);
    }
    let at = if request.revision > 0 { request.revision } else { now };
    if at < space.compact_revision() {
        return Err(Error::Compacted);
    }
    let keys = request.range();
    if request.count_only {
        let count = space.scan(&keys, at).count() as i64;
        return Ok(RangeReply { revision: now, kvs: Vec::new(), more: false, count });
    }
    let take = limit_while_reading(request);
    let mut count = 0;
    let mut found: Vec<&Change> = Vec::new();
    for change in space.scan(&keys, at) {
        if count < take {
            found.push(change);
        }
        count += 1;
    }
    found.retain(|change| passes(request, change));
    sort(request, &mut found);
    let limit =
        if request.limit > 0 { usize::try_from(request.limit).unwrap_or(usize::MAX) } else { usize::MAX };
    let more = found.len() > limit;
    found.truncate(limit);
    let kvs = found.into_iter().map(|change| answer(request, change)).collect();
    Ok(RangeReply { revision: now, kvs, more, count: count as i64 })
}

/// Checks what reading would refuse.
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
    // One more than asked for tells whether there is more.
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

fn sort(request: &RangeRequest, found: &mut [&Change]) {
    match request.sort_target {
        SortTarget::Key => {} // as read
        SortTarget::Version => found.sort_by_key(|change| change.version.version),
        SortTarget::Create => found.sort_by_key(|change| change.version.create_revision),
        SortTarget::Mod => found.sort_by_key(|change| change.version.revision),
        SortTarget::Value => found.sort_by(|a, b| a.version.value.cmp(&b.version.value)),
    }
    if request.sort_order == SortOrder::Descend {
        found.reverse();
    }
}

fn answer(request: &RangeRequest, change: &Change) -> KeyValue {
    let mut kv = change.to_kv();
    if request.keys_only {
        kv.value = bytes::Bytes::new();
    }
    kv
}
