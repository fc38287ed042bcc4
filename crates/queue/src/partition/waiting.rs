//! Who waits for a partition: produces for a commit or for the leader's own disk, fetches for data.
//!
//! Whom to tell is collected under the partition's lock as [`Told`] and told after it is released: what is called may
//! want the lock again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI16, AtomicI32, Ordering};

use hashbrown::HashMap;

use moim_base::Offset;
use moim_replica::Waiting;
use moim_wire_kafka::ErrorCode;

use crate::loops::{Loops, Wake};

/// The outcome of a partition that has none yet; no error of the protocol has this number.
const OPEN: i16 = i16::MIN;

/// What to do when the records are committed, or can no longer be.
pub(crate) enum Ack {
    /// A produce, and which of its partitions this is.
    Produce(Arc<PendingAcks>, usize),
    Call(Call),
}

/// Told how a write ended. An error says that nobody will hear of it here any more, not that it is lost.
pub(crate) type Call = Box<dyn FnOnce(Result<(), ErrorCode>) + Send>;

/// A produce request that waits for one or more partitions.
pub(crate) struct PendingAcks {
    remaining: AtomicI32,
    /// By partition, in the order of the request.
    outcomes: Box<[AtomicI16]>,
    wake: Arc<Wake>,
}

impl PendingAcks {
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

    /// Gives up one hold; true when it was the last.
    pub(crate) fn release(&self) -> bool {
        self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether every partition has answered.
    pub(crate) fn is_done(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == 0
    }

    /// How each partition ended, in the order of the request; one that has not is out of time.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = ErrorCode> {
        self.outcomes.iter().map(|outcome| match outcome.load(Ordering::Acquire) {
            OPEN => ErrorCode::RequestTimedOut,
            code => ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownServerError),
        })
    }
}

struct FetchWaiter {
    wanted: i64,
    stable_only: bool,
    wake: Arc<Wake>,
}

/// Everybody who waits for one partition.
#[derive(Default)]
pub(super) struct Waiters {
    /// For the high watermark.
    committed: Waiting<Ack>,
    /// For this node's own disk: `acks=1`.
    stored: Waiting<Ack>,
    /// By connection: one fetch of a connection waits at a time.
    fetchers: HashMap<u64, FetchWaiter>,
}

impl Waiters {
    pub(super) fn wait_committed(&mut self, end: i64, ack: Ack) {
        hold(&ack);
        self.committed.push(Offset(end), ack);
    }

    pub(super) fn wait_stored(&mut self, end: i64, ack: Ack) {
        hold(&ack);
        self.stored.push(Offset(end), ack);
    }

    pub(super) fn wait_for_data(&mut self, wanted: i64, stable_only: bool, wake: &Arc<Wake>) {
        self.fetchers.insert(wake.connection, FetchWaiter { wanted, stable_only, wake: Arc::clone(wake) });
    }

    pub(super) fn stop_waiting(&mut self, connection: u64) {
        self.fetchers.remove(&connection);
    }

    /// Nobody waits for this node's own disk.
    pub(super) fn none_for_disk(&self) -> bool {
        self.stored.is_empty()
    }

    pub(super) fn on_stored(&mut self, end: i64, told: &mut Told) {
        told.extend(self.stored.committed(Offset(end)), Ok(()));
    }

    pub(super) fn on_committed(&mut self, high_watermark: i64, stable: i64, told: &mut Told) {
        told.extend(self.committed.committed(Offset(high_watermark)), Ok(()));
        if !self.fetchers.is_empty() {
            self.fetchers.retain(|_, w| {
                let ready = w.wanted < if w.stable_only { stable } else { high_watermark };
                if ready {
                    told.wakes.push(Arc::clone(&w.wake));
                }
                !ready
            });
        }
    }

    /// Too few are in sync. Clients are told at once. The broker's own writes go on waiting: they are in the log and
    /// will be committed, unless this node stops leading, and then their coordinator ends too.
    pub(super) fn on_under_min_isr(&mut self, told: &mut Told) {
        let (clients, own): (Vec<_>, Vec<_>) =
            self.committed.drain().partition(|(_, ack)| matches!(ack, Ack::Produce(..)));
        let code = ErrorCode::NotEnoughReplicasAfterAppend;
        told.extend(clients.into_iter().map(|(_, ack)| ack), Err(code));
        for (end, ack) in own {
            self.committed.push(end, ack);
        }
    }

    /// Nothing more is committed here: whoever wrote is told `code`, whoever reads looks again.
    pub(super) fn fail_all(&mut self, code: ErrorCode, told: &mut Told) {
        told.extend(self.committed.fail(), Err(code));
        told.extend(self.stored.fail(), Err(code));
        self.wake_fetchers(told);
    }

    pub(super) fn wake_fetchers(&mut self, told: &mut Told) {
        told.wakes.extend(self.fetchers.drain().map(|(_, w)| w.wake));
    }
}

fn hold(ack: &Ack) {
    if let Ack::Produce(pending, at) = ack {
        pending.hold(*at);
    }
}

/// Whom to tell once the partition's lock is released.
#[derive(Default)]
#[must_use]
pub(super) struct Told {
    wakes: Vec<Arc<Wake>>,
    calls: Vec<(Call, Result<(), ErrorCode>)>,
}

impl Told {
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

    pub(super) fn tell(mut self, loops: &Loops) {
        loops.wake(&mut self.wakes);
        for (call, outcome) in self.calls {
            call(outcome);
        }
    }
}
