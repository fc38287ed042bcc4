//! Watch streams: what a node owes to whoever watches through it.
//!
//! One hub for all watchers of the node. A task (`tell_watchers`) looks at what was applied and puts the watchers it
//! concerns into the mailboxes of their streams; a stream reads its batch from history when its owner asks for it. So
//! the thread that applies pays for one wake-up, whatever the number of watchers, and a slow stream holds a mark per
//! watcher and no events.
//!
//! A stream never goes back and never skips: positions survive a change of leader and a snapshot from another node,
//! because they are revisions. What compaction overtook is told as [`WatchItem::Canceled`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::{HashMap, HashSet};
use tokio::sync::Notify;

use super::shared::Shared;
use crate::error::Error;
use crate::range::SpaceId;
use crate::state::State;
use crate::watch::{Batch, EventBatch, WatchHub, WatchRequest, WatcherId};

/// About how many bytes of events one item carries.
const BATCH_BYTES: usize = 128 << 10;

/// The hub, and whose each watcher is.
pub(super) struct Watches {
    hub: WatchHub,
    owners: HashMap<WatcherId, Arc<Mailbox>>,
}

/// What waits for a stream.
#[derive(Default)]
struct Mailbox {
    letters: Mutex<Letters>,
    wake: Notify,
}

#[derive(Default)]
struct Letters {
    /// Watchers with something to read.
    ready: VecDeque<WatcherId>,
    /// Invariant: those in `ready`, each of which is there once: a stream that nobody reads does not grow.
    queued: HashSet<WatcherId>,
    /// Watchers that are to be told how far they are, each once.
    progress: Vec<(WatcherId, i64)>,
    /// Whether the whole stream wants to know.
    asked: bool,
    closed: bool,
}

impl Letters {
    fn push(&mut self, id: WatcherId) {
        if self.queued.insert(id) {
            self.ready.push_back(id);
        }
    }

    fn pop(&mut self) -> Option<WatcherId> {
        let id = self.ready.pop_front()?;
        self.queued.remove(&id);
        Some(id)
    }
}

impl Mailbox {
    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watches {
    pub(super) fn new(state: &State) -> Self {
        Self { hub: WatchHub::new(state), owners: HashMap::new() }
    }

    /// Tells the streams what the state has that they have not heard of.
    pub(super) fn on_applied(&mut self, state: &State) {
        self.hub.on_applied(state);
        self.deliver();
    }

    pub(super) fn on_restored(&mut self, state: &State) {
        self.hub.on_restored(state);
        self.deliver();
    }

    /// Tells those that want it how far they are.
    pub(super) fn on_progress_time(&mut self, state: &State) {
        for (id, revision) in self.hub.progress_due(state) {
            let Some(owner) = self.owners.get(&id) else { continue };
            let mut letters = owner.letters();
            // One that still waits to be told hears the newer number.
            letters.progress.retain(|(other, _)| *other != id);
            letters.progress.push((id, revision));
            drop(letters);
            owner.wake.notify_one();
        }
    }

    fn deliver(&mut self) {
        for id in self.hub.take_ready() {
            if let Some(owner) = self.owners.get(&id) {
                owner.letters().push(id);
                owner.wake.notify_one();
            }
        }
    }

    /// Ends every stream.
    pub(super) fn close(&mut self) {
        for owner in self.owners.values() {
            owner.letters().closed = true;
            owner.wake.notify_one();
        }
    }
}

/// What a stream has to say next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WatchItem {
    /// Changes for one watcher.
    Events {
        /// Whose.
        watcher: WatcherId,
        /// Which.
        batch: EventBatch,
    },
    /// A watcher is gone: what it needs was forgotten.
    Canceled {
        /// Which.
        watcher: WatcherId,
        /// The first revision that can be watched.
        compact_revision: i64,
    },
    /// Everything up to here has been told.
    Progress {
        /// To one watcher that had asked for it at its creation; `None`: to all of the stream, which asked now.
        watcher: Option<WatcherId>,
        /// Up to where.
        revision: i64,
    },
}

/// The watchers of one client's stream. Dropping it ends them.
pub struct WatchStream {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    watchers: HashSet<WatcherId>,
}

impl WatchStream {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, mailbox: Arc::default(), watchers: HashSet::new() }
    }

    /// Starts a watch; answers who it is and the revision of its space. Everything the stream says of it comes
    /// later.
    pub fn create(&mut self, request: WatchRequest) -> Result<(WatcherId, i64), Error> {
        let mut watches = self.shared.watches();
        let state = self.shared.state();
        let space = SpaceId::of(&request.key);
        let id = watches.hub.create(&state, request)?;
        watches.owners.insert(id, Arc::clone(&self.mailbox));
        self.watchers.insert(id);
        watches.deliver();
        Ok((id, state.revision(space)))
    }

    /// Ends a watch; false when there was none.
    pub fn cancel(&mut self, id: WatcherId) -> bool {
        if !self.watchers.remove(&id) {
            return false;
        }
        let mut watches = self.shared.watches();
        watches.owners.remove(&id);
        watches.hub.cancel(id)
    }

    /// Asks for [`WatchItem::Progress`] of the whole stream: it comes when every watcher has been told everything.
    pub fn request_progress(&mut self) {
        self.mailbox.letters().asked = true;
        self.mailbox.wake.notify_one();
    }

    /// What comes next; `None` when the node stops. Cancel-safe.
    pub async fn next(&mut self) -> Option<WatchItem> {
        loop {
            let ready = {
                let mut letters = self.mailbox.letters();
                if letters.closed {
                    return None;
                }
                letters.pop()
            };
            match ready {
                Some(id) => match self.read(id) {
                    Read::Item(item) => return Some(item),
                    Read::Nothing => {}
                    Read::Later => tokio::task::yield_now().await,
                },
                None => match self.progress() {
                    Some(item) => return Some(item),
                    None => self.mailbox.wake.notified().await,
                },
            }
        }
    }

    /// How much waits for whoever reads this stream: marks, never events.
    #[cfg(test)]
    pub(super) fn backlog(&self) -> usize {
        self.mailbox.letters().ready.len()
    }

    fn read(&mut self, id: WatcherId) -> Read {
        let mut watches = self.shared.watches();
        let batch = watches.hub.next_batch(&self.shared.state(), id, BATCH_BYTES);
        match batch {
            Some(Batch::Events(batch)) => {
                if batch.more {
                    self.mailbox.letters().push(id);
                }
                Read::Item(WatchItem::Events { watcher: id, batch })
            }
            Some(Batch::Compacted { compact_revision }) => {
                watches.owners.remove(&id);
                self.watchers.remove(&id);
                Read::Item(WatchItem::Canceled { watcher: id, compact_revision })
            }
            Some(Batch::Yield) => {
                self.mailbox.letters().push(id);
                Read::Later
            }
            Some(Batch::Idle) | None => Read::Nothing,
        }
    }

    /// What there is to tell when no event is due.
    fn progress(&mut self) -> Option<WatchItem> {
        if let Some((watcher, revision)) = self.mailbox.letters().progress.pop() {
            return Some(WatchItem::Progress { watcher: Some(watcher), revision });
        }
        if !self.mailbox.letters().asked {
            return None;
        }
        let mut watches = self.shared.watches();
        let state = self.shared.state();
        // What was applied and not told yet comes first; then this is asked again.
        watches.on_applied(&state);
        let mut letters = self.mailbox.letters();
        if !letters.ready.is_empty() {
            return None;
        }
        letters.asked = false;
        let ids: Vec<WatcherId> = self.watchers.iter().copied().collect();
        let revision = watches.hub.progress(&state, &ids)?;
        Some(WatchItem::Progress { watcher: None, revision })
    }
}

enum Read {
    Item(WatchItem),
    Nothing,
    Later,
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        let mut watches = self.shared.watches();
        for id in self.watchers.drain() {
            watches.owners.remove(&id);
            watches.hub.cancel(id);
        }
    }
}
