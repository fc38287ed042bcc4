//! What applying the log changes, and the state machine that applies it.
//!
//! Lock order: watches, then state, then lease clock, then flights. No lock is held across an await, and none but the
//! state's while a command is applied.
//!
//! Invariant: whoever proposed a batch from this node hears of it here, when it is applied *here*: an answer never
//! runs ahead of the state that the same node reads.
//!
//! A batch leaves this node for one term at a time. When an entry of a later term is applied and the batch has not
//! been, it never will be, because terms do not fall along the log: it may be sent again. So a change of leader costs a
//! command time and nothing else. Its outcome is unknown only when no leader commits anything in time, or when a
//! snapshot takes the place of the entries it may be among.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;

use moim_base::clock::Clock;
use moim_raft::{SnapshotWriter, StateMachine};
use tokio::sync::{Notify, oneshot};

use super::answers::{Bundle, Waiter};
use super::entry::{Batch, BatchId};
use super::error::CoordError;
use super::leases::Timekeeper;
use super::watches::Watches;
use crate::reply::Reply;
use crate::request::{Command, Op};
use crate::shelf::Shelf;
use crate::snapshot::Restorer;
use crate::state::State;

/// Bytes of a snapshot between two looks at the lock.
const SNAPSHOT_CHUNK: usize = 64 << 10;
/// What each idle step gives back of forgotten history.
const RECLAIM_STEP: usize = 1_024;

/// Told that a batch will never be applied; dropped when there is nothing more to tell.
pub(super) type Verdict = oneshot::Receiver<NeverApplied>;

/// A batch was sent for a term that is over, and was not applied.
#[derive(Debug)]
pub(super) struct NeverApplied;

/// A batch of this node that is on its way through the log.
pub(super) struct Flight {
    pub(super) waiters: Vec<Waiter<Reply>>,
    pub(super) deadline_ms: u64,
    /// The term for which it may be in a log, and who waits to hear that it is in none.
    ///
    /// Invariant: `None` while nobody can have taken it.
    sent: Option<(u64, oneshot::Sender<NeverApplied>)>,
}

impl Flight {
    pub(super) fn new(waiters: Vec<Waiter<Reply>>, deadline_ms: u64) -> Self {
        Self { waiters, deadline_ms, sent: None }
    }
}

/// What becomes of a batch that is about to be sent.
pub(super) enum Takeoff {
    /// Send it, and listen.
    Go(Verdict),
    /// The term is over already.
    TooLate,
    /// Its waiters have been answered.
    Gone,
}

/// See the top of the file.
pub(super) struct Shared {
    state: RwLock<State>,
    watches: Mutex<Watches>,
    leases: Mutex<Timekeeper>,
    flights: Mutex<Flights>,
    pub(super) nonce: u64,
    pub(super) clock: Arc<dyn Clock>,
    /// The last entry applied, those of Raft itself included.
    applied: AtomicU64,
    /// Bytes applied since the last snapshot.
    pub(super) unsnapped: AtomicU64,
    /// What the keys take, for the quota.
    size: AtomicU64,
    /// Wakes whoever waits for `applied`.
    pub(super) progress: Notify,
    /// Wakes the one who tells the watchers.
    pub(super) news: Notify,
    /// Wakes the one who ends leases.
    pub(super) lease_news: Notify,
    /// Wakes the one who gives back memory.
    pub(super) forgotten: Notify,
}

impl Shared {
    pub(super) fn new(clock: Arc<dyn Clock>, timekeeper: Timekeeper, shelf: Option<Shelf>) -> Self {
        let state = State::with_shelf(shelf);
        let watches = Watches::new(&state);
        Self {
            state: RwLock::new(state),
            watches: Mutex::new(watches),
            leases: Mutex::new(timekeeper),
            flights: Mutex::default(),
            nonce: fastrand::u64(..),
            clock,
            applied: AtomicU64::new(0),
            unsnapped: AtomicU64::new(0),
            size: AtomicU64::new(0),
            progress: Notify::new(),
            news: Notify::new(),
            lease_news: Notify::new(),
            forgotten: Notify::new(),
        }
    }

    pub(super) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn watches(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn leases(&self) -> MutexGuard<'_, Timekeeper> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn flights(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns when the entry at `index` is applied here.
    pub(super) async fn wait_applied(&self, index: u64) {
        loop {
            let notified = self.progress.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.applied() >= index {
                return;
            }
            notified.await;
        }
    }

    /// Gives back a little of what compaction forgot; true when there is more.
    pub(super) fn reclaim(&self) -> bool {
        let more = self.state_mut().reclaim(RECLAIM_STEP);
        self.note_size();
        more
    }

    fn note_size(&self) {
        self.size.store(self.state().size_bytes() as u64, Ordering::Relaxed);
    }

    /// Notes that a batch is about to be sent for a term.
    pub(super) fn take_off(&self, number: u64, term: u64) -> Takeoff {
        let mut flights = self.flights();
        if flights.term > term {
            return Takeoff::TooLate;
        }
        let Some(flight) = flights.by_number.get_mut(&number) else { return Takeoff::Gone };
        let (judge, verdict) = oneshot::channel();
        flight.sent = Some((term, judge));
        Takeoff::Go(verdict)
    }

    /// Notes that nobody took a batch.
    pub(super) fn call_back(&self, number: u64) {
        if let Some(flight) = self.flights().by_number.get_mut(&number) {
            flight.sent = None;
        }
    }

    /// Answers the waiters of a batch.
    pub(super) fn land(&self, number: u64, outcome: &CoordError) {
        let flight = self.flights().by_number.remove(&number);
        let mut bundle = Bundle::default();
        for waiter in flight.into_iter().flat_map(|flight| flight.waiters) {
            bundle.answer(waiter, Err(outcome.clone()));
        }
    }
}

impl Shared {
    /// Takes back every batch.
    pub(super) fn land_all(&self, outcome: &CoordError) {
        let numbers: Vec<u64> = self.flights().by_number.keys().copied().collect();
        for number in numbers {
            self.land(number, outcome);
        }
    }
}

/// The batches of this node that are on their way.
#[derive(Default)]
pub(super) struct Flights {
    /// In order: what is told to many is told in the same order in every run of the simulator.
    pub(super) by_number: BTreeMap<u64, Flight>,
    /// The term of the last entry applied.
    term: u64,
}

impl Flights {
    /// An entry of `term` was applied: batches sent for an earlier one are either applied or dead.
    fn on_applied(&mut self, term: u64) {
        if term <= self.term {
            return;
        }
        self.term = term;
        for flight in self.by_number.values_mut() {
            if let Some((_, judge)) = flight.sent.take_if(|sent| sent.0 < term) {
                let _ = judge.send(NeverApplied);
            }
        }
    }

    /// The batches that may be anywhere.
    fn sent(&self) -> Vec<u64> {
        self.by_number.iter().filter(|(_, flight)| flight.sent.is_some()).map(|(number, _)| *number).collect()
    }
}

/// The state machine of the group.
pub(super) struct Machine {
    pub(super) shared: Arc<Shared>,
}

impl Machine {
    /// The waiters of a batch, if it is this node's.
    fn waiters(&self, id: BatchId) -> Vec<Waiter<Reply>> {
        if id.nonce != self.shared.nonce {
            return Vec::new();
        }
        self.shared.flights().by_number.remove(&id.number).map(|flight| flight.waiters).unwrap_or_default()
    }

    /// What the leader's clock must know of a command that was applied.
    fn keep_time(&self, now_ms: u64, told: &Told, reply: &Reply) {
        let mut leases = self.shared.leases();
        match (told, reply) {
            (Told::Granted, Reply::LeaseGranted { id, ttl_ms, .. }) => {
                leases.on_granted(*id, *ttl_ms, now_ms)
            }
            (Told::Revoked(id), Reply::LeaseRevoked { .. }) => leases.on_revoked(*id),
            (Told::Noted(remaining), Reply::Done { .. }) => leases.on_checkpoint(remaining),
            _ => return,
        }
        drop(leases);
        self.shared.lease_news.notify_one();
    }
}

/// What of a command others than the state want to know.
enum Told {
    Nothing,
    Granted,
    Revoked(crate::LeaseId),
    Noted(Vec<(crate::LeaseId, i64)>),
    Forgotten,
}

impl Told {
    fn of(command: &Command) -> Self {
        match &command.op {
            Op::LeaseGrant { .. } => Self::Granted,
            Op::LeaseRevoke { id } => Self::Revoked(*id),
            Op::LeaseCheckpoint { remaining } => Self::Noted(remaining.clone()),
            Op::Compact { .. } | Op::AutoCompact { .. } => Self::Forgotten,
            Op::Put(_) | Op::Delete(_) | Op::Txn(_) | Op::AlarmOn(_) | Op::AlarmOff(_) | Op::Nothing => {
                Self::Nothing
            }
        }
    }
}

impl StateMachine for Machine {
    fn apply(&mut self, index: u64, entry: &Bytes) -> Bytes {
        // Every node must make the same of an entry, and none can make anything of this one: going on would be a
        // wrong answer on some of them.
        let mut batch = Batch::decode(entry.clone()).expect("the log holds batches that this version reads");
        let waiters = self.waiters(batch.id);
        let mut replies = Vec::with_capacity(waiters.len());
        let now_ms = self.shared.clock.monotonic_ms();
        {
            let mut state = self.shared.state_mut();
            assert!(index > state.applied_index(), "entry {index} is applied once");
            while let Some(command) = batch.next() {
                let command = command.expect("the log holds commands that this version reads");
                let told = Told::of(&command);
                let reply = state.apply(index, command);
                match &told {
                    Told::Nothing => {}
                    Told::Forgotten => self.shared.forgotten.notify_one(),
                    told => self.keep_time(now_ms, told, &reply),
                }
                if !waiters.is_empty() {
                    replies.push(reply);
                }
            }
            self.shared.size.store(state.size_bytes() as u64, Ordering::Relaxed);
        }
        self.shared.unsnapped.fetch_add(entry.len() as u64, Ordering::Relaxed);
        let mut bundle = Bundle::default();
        for (waiter, reply) in waiters.into_iter().zip(replies) {
            let answer = match reply {
                Reply::Error(error) => Err(CoordError::Refused(error)),
                reply => Ok(reply),
            };
            bundle.answer(waiter, answer);
        }
        Bytes::new()
    }

    fn on_applied(&mut self, index: u64, term: u64) {
        self.shared.applied.store(index, Ordering::Release);
        self.shared.flights().on_applied(term);
        self.shared.progress.notify_waiters();
        self.shared.news.notify_one();
    }

    fn snapshot(&mut self) -> SnapshotWriter {
        self.shared.unsnapped.store(0, Ordering::Relaxed);
        let shared = Arc::clone(&self.shared);
        let mut cursor = shared.state().begin_snapshot(SNAPSHOT_CHUNK);
        Box::new(move |out| {
            loop {
                let chunk = cursor.next_chunk(&shared.state()).map_err(io::Error::other)?;
                match chunk {
                    Some(chunk) => out.write_all(&chunk)?,
                    None => return Ok(()),
                }
            }
        })
    }

    fn restore(&mut self, content: &mut dyn Read) -> io::Result<()> {
        let bad = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let shelf = self.shared.state().user.shelf().cloned();
        let mut restorer = Restorer::with_shelf(shelf);
        let mut buffer = vec![0; SNAPSHOT_CHUNK];
        loop {
            let read = content.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            restorer.push(&buffer[..read]).map_err(bad)?;
        }
        let restored = restorer.finish().map_err(bad)?;
        let mut watches = self.shared.watches();
        let old = {
            let mut state = self.shared.state_mut();
            std::mem::replace(&mut *state, restored)
        };
        watches.on_restored(&self.shared.state());
        drop(watches);
        self.shared.note_size();
        // Batches of this node may be among what the snapshot stands for, and it does not say.
        let sent = self.shared.flights().sent();
        sent.into_iter().for_each(|number| self.shared.land(number, &CoordError::Timeout));
        // Giving back a large state takes a while: nobody should wait for it.
        drop(old);
        Ok(())
    }
}
