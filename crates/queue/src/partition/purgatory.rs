//! The purgatory of a partition: delayed produces that wait for the high watermark or for the leader's own disk, and
//! delayed fetches that wait for data.
//!
//! Completions are collected under the partition's lock as [`Notifications`] and delivered after it is released,
//! because a callback may take the lock again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI16, AtomicI32, Ordering};

use hashbrown::HashMap;

use moim_base::Offset;
use moim_replica::Waiting;
use moim_wire_kafka::ErrorCode;

use crate::loops::{Loops, Wake};

/// The outcome of a partition that is still pending; no protocol error has this number.
const OPEN: i16 = i16::MIN;

/// What to complete when the records are committed, or can no longer be.
pub(crate) enum Ack {
    /// A produce request, and the index of this partition in it.
    Produce(Arc<DelayedProduce>, usize),
    Call(Call),
}

/// Gets the outcome of a write. An error means that the outcome will not be known here, not that the write is lost.
pub(crate) type Call = Box<dyn FnOnce(Result<(), ErrorCode>) + Send>;

/// A delayed produce: a request that waits for one or more partitions.
pub(crate) struct DelayedProduce {
    remaining: AtomicI32,
    /// Outcomes by partition, in request order.
    outcomes: Box<[AtomicI16]>,
    wake: Arc<Wake>,
}

impl DelayedProduce {
    /// Starts with one hold, so that it cannot complete while the request is still being appended.
    pub(crate) fn new(wake: Arc<Wake>, partitions: usize) -> Arc<Self> {
        let outcomes = (0..partitions).map(|_| AtomicI16::new(0)).collect();
        Arc::new(Self { remaining: AtomicI32::new(1), outcomes, wake })
    }

    pub(super) fn hold(&self, at: usize) {
        self.outcomes[at].store(OPEN, Ordering::Release);
        self.remaining.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn note(&self, at: usize, outcome: Result<(), ErrorCode>) {
        self.outcomes[at].store(outcome.err().map_or(0, |code| code as i16), Ordering::Release);
    }

    /// Releases one hold; true if it was the last.
    pub(crate) fn release(&self) -> bool {
        self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// True if every partition has an outcome.
    pub(crate) fn is_done(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == 0
    }

    /// The outcome of each partition, in request order; a pending one has timed out.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = ErrorCode> {
        self.outcomes.iter().map(|outcome| match outcome.load(Ordering::Acquire) {
            OPEN => ErrorCode::RequestTimedOut,
            code => ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownServerError),
        })
    }
}

struct FetchWatcher {
    wanted: i64,
    stable_only: bool,
    wake: Arc<Wake>,
}

/// All delayed requests of one partition.
#[derive(Default)]
pub(super) struct Purgatory {
    /// Acknowledgements that wait for the high watermark (`acks=all`).
    committed: Waiting<Ack>,
    /// Acknowledgements that wait for this node's own disk (`acks=1`).
    stored: Waiting<Ack>,
    /// Delayed fetches by connection: one fetch of a connection waits at a time.
    fetchers: HashMap<u64, FetchWatcher>,
}

impl Purgatory {
    pub(super) fn wait_committed(&mut self, end: i64, ack: Ack) {
        hold(&ack);
        self.committed.push(Offset(end), ack);
    }

    pub(super) fn wait_stored(&mut self, end: i64, ack: Ack) {
        hold(&ack);
        self.stored.push(Offset(end), ack);
    }

    pub(super) fn wait_for_data(&mut self, wanted: i64, stable_only: bool, wake: &Arc<Wake>) {
        self.fetchers.insert(wake.connection, FetchWatcher { wanted, stable_only, wake: Arc::clone(wake) });
    }

    pub(super) fn stop_waiting(&mut self, connection: u64) {
        self.fetchers.remove(&connection);
    }

    /// True if no acknowledgement waits for this node's own disk.
    pub(super) fn is_disk_idle(&self) -> bool {
        self.stored.is_empty()
    }

    pub(super) fn on_stored(&mut self, end: i64, notifications: &mut Notifications) {
        notifications.extend(self.stored.committed(Offset(end)), Ok(()));
    }

    pub(super) fn on_committed(
        &mut self,
        high_watermark: i64,
        stable: i64,
        notifications: &mut Notifications,
    ) {
        notifications.extend(self.committed.committed(Offset(high_watermark)), Ok(()));
        if !self.fetchers.is_empty() {
            self.fetchers.retain(|_, w| {
                let ready = w.wanted < if w.stable_only { stable } else { high_watermark };
                if ready {
                    notifications.wakes.push(Arc::clone(&w.wake));
                }
                !ready
            });
        }
    }

    /// The in-sync set is below `min.insync.replicas`: client produces fail at once. The broker's own writes keep
    /// waiting: they are in the log and will be committed, unless this node loses leadership, and then their
    /// coordinator is unloaded too.
    pub(super) fn on_under_min_isr(&mut self, notifications: &mut Notifications) {
        let (clients, own): (Vec<_>, Vec<_>) =
            self.committed.drain().partition(|(_, ack)| matches!(ack, Ack::Produce(..)));
        let code = ErrorCode::NotEnoughReplicasAfterAppend;
        notifications.extend(clients.into_iter().map(|(_, ack)| ack), Err(code));
        for (end, ack) in own {
            self.committed.push(end, ack);
        }
    }

    /// No more commits on this replica: writers fail with `code`, fetches are woken to check again.
    pub(super) fn fail_all(&mut self, code: ErrorCode, notifications: &mut Notifications) {
        notifications.extend(self.committed.fail(), Err(code));
        notifications.extend(self.stored.fail(), Err(code));
        self.wake_fetchers(notifications);
    }

    pub(super) fn wake_fetchers(&mut self, notifications: &mut Notifications) {
        notifications.wakes.extend(self.fetchers.drain().map(|(_, w)| w.wake));
    }
}

fn hold(ack: &Ack) {
    if let Ack::Produce(pending, at) = ack {
        pending.hold(*at);
    }
}

/// Completions to deliver once the partition's lock is released.
#[derive(Default)]
#[must_use]
pub(super) struct Notifications {
    wakes: Vec<Arc<Wake>>,
    calls: Vec<(Call, Result<(), ErrorCode>)>,
}

impl Notifications {
    fn extend(&mut self, acks: impl Iterator<Item = Ack>, outcome: Result<(), ErrorCode>) {
        for ack in acks {
            match ack {
                Ack::Produce(pending, at) => {
                    pending.note(at, outcome);
                    if pending.release() {
                        self.wakes.push(Arc::clone(&pending.wake));
                    }
                }
                Ack::Call(call) => self.calls.push((call, outcome)),
            }
        }
    }

    pub(super) fn deliver(mut self, loops: &Loops) {
        loops.wake(&mut self.wakes);
        for (call, outcome) in self.calls {
            call(outcome);
        }
    }
}
