//! Watchers: their key ranges, and the next revision each has to receive.
//!
//! There are no event queues. A watcher is a position in history: [`WatchHub::on_applied`] marks the watchers that a
//! change matches, and [`WatchHub::next_batch`] reads their events from the state's own history. A slow watcher costs
//! one mark, however far it is behind; if compaction overtakes it, it is canceled with the compact revision.
//!
//! A watcher receives every change of its keys from its start revision on, in order, each once, and all changes of a
//! revision together. `next_batch` bounds its work, so that one watcher far behind in a history of other keys does not
//! delay the rest.
//!
//! Invariant: a watcher that is not marked has no change of its keys at `next` or later in the history the hub has
//! seen. The `next` of an unmarked watcher may therefore be old: nothing follows it.

use bytes::Bytes;
use hashbrown::HashMap;

use crate::error::Error;
use crate::range::{KeyRange, RangeEnd, SpaceId};
use crate::reply::KeyValue;
use crate::space::Space;
use crate::space::log::Change;
use crate::state::State;

mod index;

use index::WatchIndex;

/// Changes of other keys that a batch reads before it yields to other watchers.
const SCAN_PER_BATCH: usize = 16_384;
/// Approximate size of an event beside keys and values.
const EVENT_OVERHEAD_BYTES: usize = 48;

/// Id of a watcher in this hub. Watch ids that clients see are per stream and assigned by the server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatcherId(pub u64);

/// A request to create a watcher.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WatchRequest {
    /// The first key of the range; empty is the smallest key.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`](crate::RangeRequest::range_end).
    pub range_end: Bytes,
    /// The first revision to receive; 0 is the next one.
    pub start_revision: i64,
    /// Include the previous key-value in events.
    pub prev_kv: bool,
    /// Filter out put events.
    pub no_put: bool,
    /// Filter out delete events.
    pub no_delete: bool,
    /// Send periodic progress notifications when there are no events.
    pub progress_notify: bool,
    /// Allow the events of one revision to be split over several batches.
    pub fragment: bool,
}

/// A change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// True for a deletion; `kv` then has only the key and the mod revision.
    pub is_delete: bool,
    /// The key-value after the change.
    pub kv: KeyValue,
    /// The key-value before the change, if requested and not compacted.
    pub prev_kv: Option<KeyValue>,
}

/// Events to be sent as one message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventBatch {
    /// The current revision of the key space.
    pub revision: i64,
    /// Whole revisions, in order; never empty.
    pub events: Vec<Event>,
    /// True if the next batch continues the last revision of this one.
    pub fragment: bool,
    /// True if more events are due: ask again.
    pub more: bool,
}

/// Result of [`WatchHub::next_batch`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Batch {
    /// The watcher has received everything.
    Idle,
    /// No event found yet, and more history to read: ask again after other watchers.
    Yield,
    /// Events for the watcher.
    Events(EventBatch),
    /// The history it needs was compacted. The watcher is removed.
    Compacted {
        /// The first revision that can be watched.
        compact_revision: i64,
    },
}

#[derive(Debug)]
struct Watcher {
    range: KeyRange,
    space: SpaceId,
    /// The first revision not completely received.
    next: i64,
    /// The first unsent change of `next`, when a revision is sent in fragments. It is a number within the revision, not
    /// a log position: it stays valid on another node's history.
    partial: Option<u32>,
    /// True if there may be events due.
    is_marked: bool,
    is_ready: bool,
    had_event: bool,
    prev_kv: bool,
    no_put: bool,
    no_delete: bool,
    progress_notify: bool,
    fragment: bool,
}

/// How far the hub has seen a key space.
#[derive(Clone, Copy, Debug)]
struct Seen {
    position: u64,
    revision: i64,
}

/// See the module comment.
#[derive(Debug)]
pub struct WatchHub {
    watchers: HashMap<WatcherId, Watcher>,
    user: WatchIndex,
    system: WatchIndex,
    seen: [Seen; 2],
    next_id: u64,
    ready: Vec<WatcherId>,
}

impl WatchHub {
    /// A hub without watchers.
    pub fn new(state: &State) -> Self {
        Self {
            watchers: HashMap::new(),
            user: WatchIndex::default(),
            system: WatchIndex::default(),
            seen: seen(state),
            next_id: 1,
            ready: Vec::new(),
        }
    }

    /// Creates a watcher. As in etcd, a compacted start revision is reported by the first batch, after the creation.
    pub fn create(&mut self, state: &State, request: WatchRequest) -> Result<WatcherId, Error> {
        self.on_applied(state);
        if request.start_revision < 0 {
            return Err(Error::Compacted);
        }
        let key = if request.key.is_empty() { Bytes::from_static(b"\0") } else { request.key };
        let range = KeyRange::new(key, request.range_end);
        if range.is_empty() {
            return Err(Error::EmptyWatchRange);
        }
        let space = range.space();
        let now = state.space(space).revision();
        let id = WatcherId(self.next_id);
        self.next_id += 1;
        let next = if request.start_revision == 0 { now + 1 } else { request.start_revision };
        let watcher = Watcher {
            range: range.clone(),
            space,
            next,
            partial: None,
            is_marked: false,
            is_ready: false,
            had_event: false,
            prev_kv: request.prev_kv,
            no_put: request.no_put,
            no_delete: request.no_delete,
            progress_notify: request.progress_notify,
            fragment: request.fragment,
        };
        self.watchers.insert(id, watcher);
        self.index(space).insert(&range, id);
        if next <= now {
            self.mark(id, next);
        }
        Ok(id)
    }

    /// Cancels a watcher; false if it does not exist.
    pub fn cancel(&mut self, id: WatcherId) -> bool {
        let Some(watcher) = self.watchers.remove(&id) else { return false };
        self.index(watcher.space).remove(&watcher.range, id);
        true
    }

    /// The number of watchers.
    pub fn len(&self) -> usize {
        self.watchers.len()
    }

    /// True if there are no watchers.
    pub fn is_empty(&self) -> bool {
        self.watchers.is_empty()
    }

    /// Marks the watchers of the changes since the last call. Call it after each [`State::apply`], or after several.
    pub fn on_applied(&mut self, state: &State) {
        for id in [SpaceId::User, SpaceId::System] {
            let space = state.space(id);
            let mut matching = Vec::new();
            let Seen { position, revision } = self.seen[slot(id)];
            if position < space.log().first() {
                self.mark_all(id, revision + 1); // changes were reclaimed unseen
            }
            for at in position.max(space.log().first())..space.log().next() {
                let change = space.log().get(at);
                matching.clear();
                self.index(id).find(&change.key, &mut matching);
                for watcher in &matching {
                    self.mark(*watcher, change.version.revision);
                }
            }
            self.seen[slot(id)] = Seen { position: space.log().next(), revision: space.revision() };
        }
    }

    /// Makes every watcher of a key space read history from `revision` on, or from its own position.
    fn mark_all(&mut self, space: SpaceId, revision: i64) {
        let of_space = self.watchers.iter().filter(|(_, watcher)| watcher.space == space);
        let mut due: Vec<_> = of_space.map(|(id, watcher)| (*id, watcher.next.max(revision))).collect();
        due.sort_unstable();
        for (id, next) in due {
            self.mark(id, next);
        }
    }

    /// On a snapshot restore: every watcher continues from its position in the newer state.
    pub fn on_restored(&mut self, state: &State) {
        for space in [SpaceId::User, SpaceId::System] {
            let seen_revision = self.seen[slot(space)].revision;
            if state.revision(space) > seen_revision {
                self.mark_all(space, seen_revision + 1);
            }
        }
        self.seen = seen(state);
    }

    /// The watchers marked since the last call.
    pub fn take_ready(&mut self) -> Vec<WatcherId> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.retain(|id| match self.watchers.get_mut(id) {
            Some(watcher) => {
                watcher.is_ready = false;
                watcher.is_marked
            }
            None => false,
        });
        ready
    }

    fn index(&mut self, space: SpaceId) -> &mut WatchIndex {
        match space {
            SpaceId::User => &mut self.user,
            SpaceId::System => &mut self.system,
        }
    }

    /// Marks a watcher for a change at `revision`, unless it starts later.
    fn mark(&mut self, id: WatcherId, revision: i64) {
        let Some(watcher) = self.watchers.get_mut(&id) else { return };
        if revision < watcher.next {
            return;
        }
        if !watcher.is_marked {
            watcher.is_marked = true;
            watcher.next = revision;
        }
        if !watcher.is_ready {
            watcher.is_ready = true;
            self.ready.push(id);
        }
    }

    /// The next events of a watcher: whole revisions of up to about `max_bytes`, and at least one. `None` if the
    /// watcher does not exist.
    pub fn next_batch(&mut self, state: &State, id: WatcherId, max_bytes: usize) -> Option<Batch> {
        let watcher = self.watchers.get_mut(&id)?;
        if !watcher.is_marked {
            return Some(Batch::Idle);
        }
        let space = state.space(watcher.space);
        let compact_revision = space.compact_revision();
        if watcher.next < compact_revision {
            self.cancel(id);
            return Some(Batch::Compacted { compact_revision });
        }
        let read = read_history(space, watcher, max_bytes);
        let more = watcher.is_marked;
        if read.events.is_empty() {
            return Some(if more { Batch::Yield } else { Batch::Idle });
        }
        watcher.had_event = true;
        let (events, fragment) = (read.events, watcher.partial.is_some());
        Some(Batch::Events(EventBatch { revision: space.revision(), events, fragment, more }))
    }

    /// The revision up to which all of these watchers have received everything: the reply to a progress request of
    /// their stream. `None` if one is behind, or if they watch both key spaces, which have no common revision.
    pub fn progress(&self, state: &State, ids: &[WatcherId]) -> Option<i64> {
        let watchers = || ids.iter().filter_map(|id| self.watchers.get(id));
        let space = watchers().next().map_or(SpaceId::User, |first| first.space);
        let revision = state.space(space).revision();
        let seen = self.seen[slot(space)].revision == revision;
        (seen && watchers().all(|watcher| !watcher.is_marked && watcher.space == space)).then_some(revision)
    }

    /// The watchers with `progress_notify` that are in sync and had no event since the last call, with the revision to
    /// send.
    pub fn progress_due(&mut self, state: &State) -> Vec<(WatcherId, i64)> {
        let mut due = Vec::new();
        for (id, watcher) in &mut self.watchers {
            let had_event = std::mem::take(&mut watcher.had_event);
            let seen = self.seen[slot(watcher.space)].revision;
            if watcher.progress_notify
                && !watcher.is_marked
                && !had_event
                && seen == state.revision(watcher.space)
            {
                due.push((*id, seen));
            }
        }
        due.sort_unstable();
        due
    }
}

fn slot(space: SpaceId) -> usize {
    match space {
        SpaceId::User => 0,
        SpaceId::System => 1,
    }
}

fn seen(state: &State) -> [Seen; 2] {
    [&state.user, &state.system]
        .map(|space| Seen { position: space.log().next(), revision: space.revision() })
}

/// Events being collected, and where the last revision among them begins.
#[derive(Default)]
struct Reading {
    events: Vec<Event>,
    bytes: usize,
    revision: i64,
    whole: usize,
}

/// Reads from the watcher's position and advances it: to the end, or to where this batch stops.
fn read_history(space: &Space, watcher: &mut Watcher, max_bytes: usize) -> Reading {
    let log = space.log();
    let start = log.position_of(watcher.next) + u64::from(watcher.partial.take().unwrap_or(0));
    // The entry of a single key has the positions of its changes; nothing else is read.
    let positions: Box<dyn Iterator<Item = u64>> = match watcher.range.end {
        RangeEnd::Single => {
            let changes = space.changes_of(&watcher.range.start, watcher.next);
            Box::new(changes.filter(move |at| *at >= start))
        }
        RangeEnd::Before(_) | RangeEnd::Open => Box::new(start..log.next()),
    };
    let mut reading = Reading::default();
    for (scanned, at) in positions.enumerate() {
        let change = log.get(at);
        let revision = change.version.revision;
        if revision != reading.revision {
            if scanned >= SCAN_PER_BATCH {
                watcher.next = revision;
                return reading;
            }
            reading.revision = revision;
            reading.whole = reading.events.len();
        }
        let wanted = if change.is_put() { !watcher.no_put } else { !watcher.no_delete };
        if !wanted || !watcher.range.contains(&change.key) {
            continue;
        }
        let event = event(space, change, watcher.prev_kv);
        reading.bytes += size(&event);
        reading.events.push(event);
        if reading.bytes > max_bytes && reading.events.len() > 1 {
            if reading.whole > 0 {
                reading.events.truncate(reading.whole);
                watcher.next = revision;
                return reading;
            }
            if watcher.fragment {
                reading.events.pop();
                watcher.next = revision;
                watcher.partial = Some(change.version.sub);
                return reading;
            }
        }
    }
    watcher.is_marked = false;
    // A start revision in the future stays: a snapshot may advance this node, but not that far.
    watcher.next = watcher.next.max(space.revision() + 1);
    reading
}

fn event(space: &Space, change: &Change, with_prev: bool) -> Event {
    let version = &change.version;
    let before = version.revision - 1;
    let created = change.is_put() && version.create_revision == version.revision;
    let prev = (with_prev && !created && before >= space.compact_revision())
        .then(|| space.get_at(&change.key, before))
        .flatten();
    Event { is_delete: !change.is_put(), kv: change.to_kv(), prev_kv: prev.map(Change::to_kv) }
}

fn size(event: &Event) -> usize {
    let kv = |kv: &KeyValue| kv.key.len() + kv.value.len() + EVENT_OVERHEAD_BYTES;
    kv(&event.kv) + event.prev_kv.as_ref().map_or(0, kv)
}

#[cfg(test)]
mod tests;
