//! The watch feed: holds events until they are durable, then delivers them to the watchers.
//!
//! Invariants: events are published in revision order, each once, none before it is durable; a watcher gets
//! every event of its prefix or a [`WatchGap`]. The disk's durability notification takes the lock in here,
//! so it is never held during a wait.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_core::Stream;
use tokio::sync::mpsc;

use crate::repository::{Event, Watch, WatchGap};

/// Maximum number of events in the history, for watches from a past revision.
const HISTORY_EVENTS: usize = 8_192;
/// Maximum bytes of keys and values in the history.
const HISTORY_BYTES: usize = 8 << 20;
/// Maximum lag of a watcher in events; beyond it the watcher must list again.
const WATCH_BUFFER: usize = 1_024;

/// The events of a repository.
pub(crate) struct Feed {
    inner: Mutex<Inner>,
}

struct Inner {
    /// Decided and not yet durable: the log position that makes them durable, and the events.
    waiting: VecDeque<(i64, Vec<Event>)>,
    /// Published events, oldest first.
    history: VecDeque<Event>,
    history_bytes: usize,
    /// Invariant: `history` holds every event at and after this revision that was published.
    oldest: i64,
    watchers: Vec<Watcher>,
}

struct Watcher {
    prefix: String,
    from_revision: i64,
    events: mpsc::Sender<Event>,
    lagged: Arc<AtomicI64>,
}

impl Feed {
    /// A feed for a store at `revision`, with an empty history.
    pub(crate) fn new(revision: i64) -> Self {
        let inner = Inner {
            waiting: VecDeque::new(),
            history: VecDeque::new(),
            history_bytes: 0,
            oldest: revision + 1,
            watchers: Vec::new(),
        };
        Self { inner: Mutex::new(inner) }
    }

    /// Queues events that become durable with the log position `position`.
    pub(crate) fn push(&self, position: i64, events: Vec<Event>) {
        if !events.is_empty() {
            self.lock().waiting.push_back((position, events));
        }
    }

    /// Publishes the events that are durable up to `durable_end`.
    pub(crate) fn publish(&self, durable_end: i64) {
        let mut inner = self.lock();
        while inner.waiting.front().is_some_and(|(position, _)| *position <= durable_end) {
            let Some((_, events)) = inner.waiting.pop_front() else { return };
            for event in events {
                inner.deliver(&event);
                inner.remember(event);
            }
        }
    }

    /// A watch from a revision on; 0 means events published from now on.
    pub(crate) fn watch(&self, prefix: &str, from_revision: i64) -> Watch {
        let (sender, events) = mpsc::channel(WATCH_BUFFER);
        let lagged = Arc::new(AtomicI64::new(0));
        let mut subscription = Subscription {
            backlog: VecDeque::new(),
            events: Some(events),
            lagged: Arc::clone(&lagged),
            gap: None,
        };
        let mut inner = self.lock();
        if from_revision != 0 && from_revision < inner.oldest {
            subscription.gap = Some(WatchGap::Compacted { oldest: inner.oldest });
            subscription.events = None;
            return Watch::new(subscription);
        }
        if from_revision != 0 {
            let matching =
                |event: &&Event| event.revision() >= from_revision && event.key().starts_with(prefix);
            subscription.backlog = inner.history.iter().filter(matching).cloned().collect();
        }
        inner.watchers.retain(|watcher| !watcher.events.is_closed());
        inner.watchers.push(Watcher { prefix: prefix.to_owned(), from_revision, events: sender, lagged });
        Watch::new(subscription)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Delivers an event to its watchers. A closed watcher, or one with a full buffer, is removed.
    fn deliver(&mut self, event: &Event) {
        self.watchers.retain(|watcher| {
            if event.revision() < watcher.from_revision || !event.key().starts_with(&watcher.prefix) {
                return true;
            }
            match watcher.events.try_send(event.clone()) {
                Ok(()) => true,
                Err(mpsc::error::TrySendError::Closed(_)) => false,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    watcher.lagged.store(event.revision(), Ordering::Release);
                    false
                }
            }
        });
    }

    fn remember(&mut self, event: Event) {
        self.history_bytes += weight(&event);
        self.history.push_back(event);
        while self.history.len() > HISTORY_EVENTS || self.history_bytes > HISTORY_BYTES {
            let Some(forgotten) = self.history.pop_front() else { break };
            self.history_bytes -= weight(&forgotten);
            self.oldest = forgotten.revision() + 1;
        }
    }
}

fn weight(event: &Event) -> usize {
    let value = match event {
        Event::Put(entry) => entry.value.len(),
        Event::Delete { .. } => 0,
    };
    event.key().len() + value
}

/// The receiving end of a watch: history first, then new events.
struct Subscription {
    backlog: VecDeque<Event>,
    events: Option<mpsc::Receiver<Event>>,
    lagged: Arc<AtomicI64>,
    gap: Option<WatchGap>,
}

impl Stream for Subscription {
    type Item = Result<Event, WatchGap>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(event) = self.backlog.pop_front() {
            return Poll::Ready(Some(Ok(event)));
        }
        if let Some(gap) = self.gap.take() {
            return Poll::Ready(Some(Err(gap)));
        }
        let Some(events) = self.events.as_mut() else { return Poll::Ready(None) };
        match events.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(event)) => Poll::Ready(Some(Ok(event))),
            Poll::Ready(None) => {
                self.events = None;
                match self.lagged.load(Ordering::Acquire) {
                    0 => Poll::Ready(None),
                    revision => Poll::Ready(Some(Err(WatchGap::Lagged { revision }))),
                }
            }
        }
    }
}
