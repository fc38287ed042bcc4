//! Watch streams of the clients of this node.
//!
//! There is one hub for all watchers of the node. The task `notify_watchers` reads the applied changes and marks the
//! affected watchers as ready in their streams; a stream reads its batch from history when its owner asks for it. So
//! apply pays for one wake-up, whatever the number of watchers, and a slow stream holds one mark per watcher and no
//! events.
//!
//! A stream never goes back and never skips: positions survive a leader change and a snapshot from another node,
//! because they are revisions. A watcher overtaken by compaction gets [`WatchItem::Canceled`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::{HashMap, HashSet};
use tokio::sync::Notify;

use super::shared::Shared;
use crate::error::Error;
use crate::range::SpaceId;
use crate::state::State;
use crate::watch::{Batch, EventBatch, WatchHub, WatchRequest, WatcherId};

/// Target size of one item's events in bytes.
const BATCH_BYTES: usize = 128 << 10;

/// The watch hub, and the stream of each watcher.
pub(super) struct Watches {
    hub: WatchHub,
    owners: HashMap<WatcherId, Arc<Mailbox>>,
}

/// Pending notifications of a stream.
#[derive(Default)]
struct Mailbox {
    pending: Mutex<Pending>,
    wake: Notify,
}

#[derive(Default)]
struct Pending {
    /// Watchers with events to read.
    ready: VecDeque<WatcherId>,
    /// Invariant: the watchers in `ready`, each queued once: a stream that is not read does not grow.
    queued: HashSet<WatcherId>,
    /// Watchers with a progress notification due, each once.
    progress: Vec<(WatcherId, i64)>,
    /// True if a progress notification for the whole stream was requested.
    progress_requested: bool,
    closed: bool,
}

impl Pending {
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
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watches {
    pub(super) fn new(state: &State) -> Self {
        Self { hub: WatchHub::new(state), owners: HashMap::new() }
    }

    /// Marks the watchers of changes applied since the last call.
    pub(super) fn on_applied(&mut self, state: &State) {
        self.hub.on_applied(state);
        self.deliver();
    }

    pub(super) fn on_restored(&mut self, state: &State) {
        self.hub.on_restored(state);
        self.deliver();
    }

    /// Queues progress notifications for the watchers that want them.
    pub(super) fn on_progress_time(&mut self, state: &State) {
        for (id, revision) in self.hub.progress_due(state) {
            let Some(owner) = self.owners.get(&id) else { continue };
            let mut pending = owner.pending();
            // A newer revision replaces one that is still queued.
            pending.progress.retain(|(other, _)| *other != id);
            pending.progress.push((id, revision));
            drop(pending);
            owner.wake.notify_one();
        }
    }

    fn deliver(&mut self) {
        for id in self.hub.take_ready() {
            if let Some(owner) = self.owners.get(&id) {
                owner.pending().push(id);
                owner.wake.notify_one();
            }
        }
    }

    /// Closes every stream.
    pub(super) fn close(&mut self) {
        for owner in self.owners.values() {
            owner.pending().closed = true;
            owner.wake.notify_one();
        }
    }
}

/// The next item of a watch stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WatchItem {
    /// Events for one watcher.
    Events {
        /// The watcher the events are for.
        watcher: WatcherId,
        /// The events.
        batch: EventBatch,
    },
    /// The watcher was canceled: the history it needs was compacted.
    Canceled {
        /// The canceled watcher.
        watcher: WatcherId,
        /// The first revision that can be watched.
        compact_revision: i64,
    },
    /// Progress notification: every change up to `revision` has been sent.
    Progress {
        /// The watcher that was created with `progress_notify`; `None` for all watchers of the stream, on request.
        watcher: Option<WatcherId>,
        /// The revision up to which everything was sent.
        revision: i64,
    },
}

/// The watchers of one client's stream. Dropping it cancels them.
pub struct WatchStream {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    watchers: HashSet<WatcherId>,
}

impl WatchStream {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, mailbox: Arc::default(), watchers: HashSet::new() }
    }

    /// Creates a watcher; returns its id and the revision of its key space. Its items follow on the stream.
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

    /// Cancels a watcher; false if the stream has none of this id.
    pub fn cancel(&mut self, id: WatcherId) -> bool {
        if !self.watchers.remove(&id) {
            return false;
        }
        let mut watches = self.shared.watches();
        watches.owners.remove(&id);
        watches.hub.cancel(id)
    }

    /// Requests [`WatchItem::Progress`] for the whole stream: it is sent once every watcher has received everything.
    pub fn request_progress(&mut self) {
        self.mailbox.pending().progress_requested = true;
        self.mailbox.wake.notify_one();
    }

    /// The next item; `None` when the node stops. Cancel-safe.
    pub async fn next(&mut self) -> Option<WatchItem> {
        loop {
            let ready = {
                let mut pending = self.mailbox.pending();
                if pending.closed {
                    return None;
                }
                pending.pop()
            };
            match ready {
                Some(id) => match self.read(id) {
                    ReadOutcome::Item(item) => return Some(item),
                    ReadOutcome::Empty => {}
                    ReadOutcome::Yield => tokio::task::yield_now().await,
                },
                None => match self.progress() {
                    Some(item) => return Some(item),
                    None => self.mailbox.wake.notified().await,
                },
            }
        }
    }

    /// Number of ready marks of an unread stream: marks, never events.
    #[cfg(test)]
    pub(super) fn backlog(&self) -> usize {
        self.mailbox.pending().ready.len()
    }

    fn read(&mut self, id: WatcherId) -> ReadOutcome {
        let mut watches = self.shared.watches();
        let batch = watches.hub.next_batch(&self.shared.state(), id, BATCH_BYTES);
        match batch {
            Some(Batch::Events(batch)) => {
                if batch.more {
                    self.mailbox.pending().push(id);
                }
                ReadOutcome::Item(WatchItem::Events { watcher: id, batch })
            }
            Some(Batch::Compacted { compact_revision }) => {
                watches.owners.remove(&id);
                self.watchers.remove(&id);
                ReadOutcome::Item(WatchItem::Canceled { watcher: id, compact_revision })
            }
            Some(Batch::Yield) => {
                self.mailbox.pending().push(id);
                ReadOutcome::Yield
            }
            Some(Batch::Idle) | None => ReadOutcome::Empty,
        }
    }

    /// The progress notification to send when no event is due.
    fn progress(&mut self) -> Option<WatchItem> {
        if let Some((watcher, revision)) = self.mailbox.pending().progress.pop() {
            return Some(WatchItem::Progress { watcher: Some(watcher), revision });
        }
        if !self.mailbox.pending().progress_requested {
            return None;
        }
        let mut watches = self.shared.watches();
        let state = self.shared.state();
        // Changes applied and not sent yet come first; then progress is checked again.
        watches.on_applied(&state);
        let mut pending = self.mailbox.pending();
        if !pending.ready.is_empty() {
            return None;
        }
        pending.progress_requested = false;
        let ids: Vec<WatcherId> = self.watchers.iter().copied().collect();
        let revision = watches.hub.progress(&state, &ids)?;
        Some(WatchItem::Progress { watcher: None, revision })
    }
}

enum ReadOutcome {
    Item(WatchItem),
    Empty,
    Yield,
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
