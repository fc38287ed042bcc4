//! Who watches which keys, and how far each watcher has been told.
//!
//! There are no queues. A watcher is a position in history: [`WatchHub::on_applied`] marks the watchers that
//! a change concerns, and [`WatchHub::next_batch`] reads what is due from the state's own history. A slow
//! watcher costs a mark, whatever it misses; if compaction overtakes it, it is told so and ends.
//!
//! What a watcher gets, put together, is every change of its keys from its start on, in order, each once, and
//! all changes of a revision together. `next_batch` bounds its work, so that one watcher far behind in a
//! history that is not about it does not hold up the rest.
//!
//! Invariant: a watcher that is not marked has no change of its keys at `next` or later in the history the
//! hub has seen. A clean watcher's `next` may therefore be old; it stands for "from here on nothing".

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

/// How many changes of others a batch reads past before it lets somebody else go first.
const SCAN_PER_BATCH: usize = 16_384;
/// What an event costs beside keys and values, about.
const EVENT_OVERHEAD_BYTES: usize = 48;

/// A watcher of this hub. Ids that clients see are the server's: they are per stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatcherId(pub u64);

/// What to watch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WatchRequest {
    /// The first key; empty is the very first.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`](crate::RangeRequest::range_end).
    pub range_end: Bytes,
    /// The first revision to hear of; 0 is the next one.
    pub start_revision: i64,
    /// Tell what the key held before.
    pub prev_kv: bool,
    /// Do not tell of puts.
    pub no_put: bool,
    /// Do not tell of deletions.
    pub no_delete: bool,
    /// Tell from time to time how far it is when there is nothing else to tell.
    pub progress_notify: bool,
    /// The changes of one revision may come in several pieces.
    pub fragment: bool,
}

/// One change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// Whether the key is gone; then `kv` has its key and the revision alone.
    pub is_delete: bool,
    /// What it is now.
    pub kv: KeyValue,
    /// What it was, if asked for and not forgotten.
    pub prev_kv: Option<KeyValue>,
}

/// Events to be sent as one message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EventBatch {
    /// The revision of the space.
    pub revision: i64,
    /// Whole revisions, in order; never empty.
    pub events: Vec<Event>,
    /// Whether the next batch goes on with the last revision of this one.
    pub fragment: bool,
    /// Whether more is due: ask again.
    pub more: bool,
}

/// What is due to a watcher.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Batch {
    /// Nothing: it has heard everything.
    Idle,
    /// Nothing found yet, and more to read: ask again after the others had their turn.
    Yield,
    /// Changes.
    Events(EventBatch),
    /// What it needs was forgotten. The watcher is gone.
    Compacted {
        /// The first revision that can be watched.
        compact_revision: i64,
    },
}

#[derive(Debug)]
struct Watcher {
    range: KeyRange,
    space: SpaceId,
    /// The first revision of which it has not heard everything.
    next: i64,
    /// The first change of `next` that was not sent, when a revision comes in pieces. A number within the
    /// revision, not a position: it outlives the history of one node.
    partial: Option<u32>,
    /// Whether there may be something due.
    is_marked: bool,
    is_ready: bool,
    has_news: bool,
    prev_kv: bool,
    no_put: bool,
    no_delete: bool,
    progress_notify: bool,
    fragment: bool,
}

/// How far the hub has seen a space.
#[derive(Clone, Copy, Debug)]
struct Seen {
    position: u64,
    revision: i64,
}

/// See the top of the file.
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
    /// Nobody watches yet.
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

    /// Starts a watch. A start that was forgotten is told by the first batch, after the watch was created, as
    /// etcd does it.
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
            has_news: false,
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

    /// Ends a watch; false when it had ended already.
    pub fn cancel(&mut self, id: WatcherId) -> bool {
        let Some(watcher) = self.watchers.remove(&id) else { return false };
        self.index(watcher.space).remove(&watcher.range, id);
        true
    }

    /// How many watchers there are.
    pub fn len(&self) -> usize {
        self.watchers.len()
    }

    /// Whether nobody watches.
    pub fn is_empty(&self) -> bool {
        self.watchers.is_empty()
    }

    /// Marks the watchers that the changes since the last call concern. Call it after each
    /// [`State::apply`], or after a run of them.
    pub fn on_applied(&mut self, state: &State) {
        for id in [SpaceId::User, SpaceId::System] {
            let space = state.space(id);
            let mut concerned = Vec::new();
            let Seen { position, revision } = self.seen[slot(id)];
            if position < space.log().first() {
                self.mark_all(id, revision + 1); // changes came and went unseen
            }
            for at in position.max(space.log().first())..space.log().next() {
                let change = space.log().get(at);
                concerned.clear();
                self.index(id).find(&change.key, &mut concerned);
                for watcher in &concerned {
                    self.mark(*watcher, change.version.revision);
                }
            }
            self.seen[slot(id)] = Seen { position: space.log().next(), revision: space.revision() };
        }
    }

    /// Makes every watcher of a space read history from `revision` on, or from where it is.
    fn mark_all(&mut self, space: SpaceId, revision: i64) {
        let of_space = self.watchers.iter().filter(|(_, watcher)| watcher.space == space);
        let mut due: Vec<_> = of_space.map(|(id, watcher)| (*id, watcher.next.max(revision))).collect();
        due.sort_unstable();
        for (id, next) in due {
            self.mark(id, next);
        }
    }

    /// The state was replaced by a snapshot of a later one: every watcher reads on from where it is.
    pub fn on_restored(&mut self, state: &State) {
        for space in [SpaceId::User, SpaceId::System] {
            let heard = self.seen[slot(space)].revision;
            if state.revision(space) > heard {
                self.mark_all(space, heard + 1);
            }
        }
        self.seen = seen(state);
    }

    /// The watchers that were marked since the last call.
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

    /// There is a change at `revision` for this watcher, unless it starts later.
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

    /// What is due to a watcher: whole revisions of up to about `max_bytes`, and at least one. `None` when
    /// there is no such watcher.
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
        watcher.has_news = true;
        let (events, fragment) = (read.events, watcher.partial.is_some());
        Some(Batch::Events(EventBatch { revision: space.revision(), events, fragment, more }))
    }

    /// The revision up to which all of these watchers have heard everything: what a progress request of
    /// their stream is answered with. `None` when one is behind, or when they watch both spaces, which have
    /// no revision in common.
    pub fn progress(&self, state: &State, ids: &[WatcherId]) -> Option<i64> {
        let watchers = || ids.iter().filter_map(|id| self.watchers.get(id));
        let space = watchers().next().map_or(SpaceId::User, |first| first.space);
        let revision = state.space(space).revision();
        let seen = self.seen[slot(space)].revision == revision;
        (seen && watchers().all(|watcher| !watcher.is_marked && watcher.space == space)).then_some(revision)
    }

    /// The watchers that asked for progress, are in sync and had no event since the last call, with the
    /// revision to tell them.
    pub fn progress_due(&mut self, state: &State) -> Vec<(WatcherId, i64)> {
        let mut due = Vec::new();
        for (id, watcher) in &mut self.watchers {
            let had_news = std::mem::take(&mut watcher.has_news);
            let seen = self.seen[slot(watcher.space)].revision;
            if watcher.progress_notify
                && !watcher.is_marked
                && !had_news
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

/// Reads from the watcher's position on and moves it: past the end, or to where this batch stops.
fn read_history(space: &Space, watcher: &mut Watcher, max_bytes: usize) -> Reading {
    let log = space.log();
    let start = log.position_of(watcher.next) + u64::from(watcher.partial.take().unwrap_or(0));
    // A single key knows its own changes; nothing else has to be read.
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
    // A start that is still to come stays: a snapshot may bring this node on, and not as far.
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
