//! The state shared by the service's tasks, and the Raft state machine that applies entries to it.
//!
//! Lock order: watches, state, lease clock, pending proposals. No lock is held across an await, and only the state lock
//! is held while a command is applied.
//!
//! Invariant: a proposal of this node is answered when it is applied on *this* node: a reply is never ahead of the
//! state that the same node reads.
//!
//! A batch is proposed for one term at a time. When an entry of a later term is applied and the batch has not been, it
//! never will be, because terms do not decrease along the log: the batch may be proposed again. A leader change
//! therefore only delays a command. Its outcome is unknown only when no leader commits anything in time, or when a
//! snapshot replaces the entries it may be among.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;

use moim_base::clock::Clock;
use moim_raft::{SnapshotWriter, StateMachine};
use tokio::sync::{Notify, oneshot};

use super::entry::{Batch, BatchId};
use super::error::CoordError;
use super::leases::TermLeaseClock;
use super::replies::{ReplyBatch, Waiter};
use super::watches::Watches;
use crate::reply::Reply;
use crate::request::{Command, Op};
use crate::snapshot::Restorer;
use crate::spill::SpillFile;
use crate::state::State;

/// Bytes of a snapshot written between two acquisitions of the state lock.
const SNAPSHOT_CHUNK: usize = 64 << 10;
/// Changes reclaimed from compacted history in each idle step.
const RECLAIM_STEP: usize = 1_024;

/// Receives [`NeverApplied`] when a batch can no longer be applied; closed without it when the batch was answered.
pub(super) type NeverAppliedReceiver = oneshot::Receiver<NeverApplied>;

/// The batch was proposed in a term that has ended, and it was not applied.
#[derive(Debug)]
pub(super) struct NeverApplied;

/// A batch of this node that was or will be proposed and is not answered yet.
pub(super) struct PendingProposal {
    pub(super) waiters: Vec<Waiter<Reply>>,
    pub(super) deadline_ms: u64,
    /// The term in which the batch may be in a log, and the sender that reports it is in no log.
    ///
    /// Invariant: `None` while no leader can have accepted the batch.
    sent: Option<(u64, oneshot::Sender<NeverApplied>)>,
}

impl PendingProposal {
    pub(super) fn new(waiters: Vec<Waiter<Reply>>, deadline_ms: u64) -> Self {
        Self { waiters, deadline_ms, sent: None }
    }
}

/// Result of marking a batch as sent.
pub(super) enum SendDecision {
    /// Send the batch and wait for the receiver.
    Send(NeverAppliedReceiver),
    /// An entry of a later term has been applied.
    TermPassed,
    /// The waiters of the batch have been answered.
    AlreadyAnswered,
}

/// See the module comment.
pub(super) struct Shared {
    state: RwLock<State>,
    watches: Mutex<Watches>,
    leases: Mutex<TermLeaseClock>,
    proposals: Mutex<PendingProposals>,
    pub(super) nonce: u64,
    pub(super) clock: Arc<dyn Clock>,
    /// Index of the last applied entry, including Raft's own entries.
    applied: AtomicU64,
    /// Bytes applied since the last snapshot.
    pub(super) bytes_since_snapshot: AtomicU64,
    /// Bytes of keys and history, for the quota check.
    size: AtomicU64,
    /// Wakes tasks that wait for `applied` to advance.
    pub(super) applied_advanced: Notify,
    /// Wakes the task that notifies watchers.
    pub(super) watch_wake: Notify,
    /// Wakes the task that runs the lease clock.
    pub(super) lease_changed: Notify,
    /// Wakes the task that reclaims compacted history.
    pub(super) compacted: Notify,
}

impl Shared {
    pub(super) fn new(clock: Arc<dyn Clock>, lease_clock: TermLeaseClock, spill: Option<SpillFile>) -> Self {
        let state = State::with_spill(spill);
        let watches = Watches::new(&state);
        Self {
            state: RwLock::new(state),
            watches: Mutex::new(watches),
            leases: Mutex::new(lease_clock),
            proposals: Mutex::default(),
            nonce: fastrand::u64(..),
            clock,
            applied: AtomicU64::new(0),
            bytes_since_snapshot: AtomicU64::new(0),
            size: AtomicU64::new(0),
            applied_advanced: Notify::new(),
            watch_wake: Notify::new(),
            lease_changed: Notify::new(),
            compacted: Notify::new(),
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

    pub(super) fn leases(&self) -> MutexGuard<'_, TermLeaseClock> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn proposals(&self) -> MutexGuard<'_, PendingProposals> {
        self.proposals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Waits until the entry at `index` is applied on this node.
    pub(super) async fn wait_applied(&self, index: u64) {
        loop {
            let notified = self.applied_advanced.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.applied() >= index {
                return;
            }
            notified.await;
        }
    }

    /// Reclaims some compacted history; true if more is left.
    pub(super) fn reclaim(&self) -> bool {
        let more = self.state_mut().reclaim(RECLAIM_STEP);
        self.update_size();
        more
    }

    fn update_size(&self) {
        self.size.store(self.state().size_bytes() as u64, Ordering::Relaxed);
    }

    /// Records that a batch is about to be sent in a term.
    pub(super) fn mark_sent(&self, number: u64, term: u64) -> SendDecision {
        let mut proposals = self.proposals();
        if proposals.term > term {
            return SendDecision::TermPassed;
        }
        let Some(proposal) = proposals.by_number.get_mut(&number) else {
            return SendDecision::AlreadyAnswered;
        };
        let (sender, receiver) = oneshot::channel();
        proposal.sent = Some((term, sender));
        SendDecision::Send(receiver)
    }

    /// Records that no leader accepted a batch.
    pub(super) fn mark_not_sent(&self, number: u64) {
        if let Some(proposal) = self.proposals().by_number.get_mut(&number) {
            proposal.sent = None;
        }
    }

    /// Fails the waiters of a batch.
    pub(super) fn fail_proposal(&self, number: u64, outcome: &CoordError) {
        let proposal = self.proposals().by_number.remove(&number);
        let mut replies_out = ReplyBatch::default();
        for waiter in proposal.into_iter().flat_map(|proposal| proposal.waiters) {
            replies_out.push(waiter, Err(outcome.clone()));
        }
    }
}

impl Shared {
    /// Fails every pending batch.
    pub(super) fn fail_all_proposals(&self, outcome: &CoordError) {
        let numbers: Vec<u64> = self.proposals().by_number.keys().copied().collect();
        for number in numbers {
            self.fail_proposal(number, outcome);
        }
    }
}

/// The pending batches of this node.
#[derive(Default)]
pub(super) struct PendingProposals {
    /// Ordered, so that waiters are notified in the same order in every run of the simulator.
    pub(super) by_number: BTreeMap<u64, PendingProposal>,
    /// The term of the last entry applied.
    term: u64,
}

impl PendingProposals {
    /// On an applied entry of `term`: batches sent in an earlier term are either applied or never will be.
    fn on_applied(&mut self, term: u64) {
        if term <= self.term {
            return;
        }
        self.term = term;
        for proposal in self.by_number.values_mut() {
            if let Some((_, sender)) = proposal.sent.take_if(|sent| sent.0 < term) {
                let _ = sender.send(NeverApplied);
            }
        }
    }

    /// The batches that a leader may have accepted.
    fn sent(&self) -> Vec<u64> {
        self.by_number
            .iter()
            .filter(|(_, proposal)| proposal.sent.is_some())
            .map(|(number, _)| *number)
            .collect()
    }
}

/// The state machine of the Raft group.
pub(super) struct Machine {
    pub(super) shared: Arc<Shared>,
}

impl Machine {
    /// Removes and returns the waiters of a batch, if this node proposed it.
    fn waiters(&self, id: BatchId) -> Vec<Waiter<Reply>> {
        if id.nonce != self.shared.nonce {
            return Vec::new();
        }
        self.shared
            .proposals()
            .by_number
            .remove(&id.number)
            .map(|proposal| proposal.waiters)
            .unwrap_or_default()
    }

    /// Forwards an applied lease command to the leader's lease clock.
    fn update_lease_clock(&self, now_ms: u64, effect: &AppliedEffect, reply: &Reply) {
        let mut leases = self.shared.leases();
        match (effect, reply) {
            (AppliedEffect::LeaseGranted, Reply::LeaseGranted { id, ttl_ms, .. }) => {
                leases.on_granted(*id, *ttl_ms, now_ms)
            }
            (AppliedEffect::LeaseRevoked(id), Reply::LeaseRevoked { .. }) => leases.on_revoked(*id),
            (AppliedEffect::LeaseCheckpointed(remaining), Reply::Done { .. }) => {
                leases.on_checkpoint(remaining)
            }
            _ => return,
        }
        drop(leases);
        self.shared.lease_changed.notify_one();
    }
}

/// The effect of a command outside the state: lease clock or reclamation.
enum AppliedEffect {
    Other,
    LeaseGranted,
    LeaseRevoked(crate::LeaseId),
    LeaseCheckpointed(Vec<(crate::LeaseId, i64)>),
    Compacted,
}

impl AppliedEffect {
    fn of(command: &Command) -> Self {
        match &command.op {
            Op::LeaseGrant { .. } => Self::LeaseGranted,
            Op::LeaseRevoke { id } => Self::LeaseRevoked(*id),
            Op::LeaseCheckpoint { remaining } => Self::LeaseCheckpointed(remaining.clone()),
            Op::Compact { .. } | Op::AutoCompact { .. } => Self::Compacted,
            Op::Put(_) | Op::Delete(_) | Op::Txn(_) | Op::AlarmOn(_) | Op::AlarmOff(_) | Op::Nothing => {
                Self::Other
            }
        }
    }
}

impl StateMachine for Machine {
    fn apply(&mut self, index: u64, entry: &Bytes) -> Bytes {
        // Every node must apply an entry identically, and this entry cannot be applied at all: continuing would make
        // replicas diverge.
        let mut batch = Batch::decode(entry.clone()).expect("a Raft entry is a decodable batch");
        let waiters = self.waiters(batch.id);
        let mut replies = Vec::with_capacity(waiters.len());
        let now_ms = self.shared.clock.monotonic_ms();
        {
            let mut state = self.shared.state_mut();
            assert!(index > state.applied_index(), "entry {index} applied twice");
            while let Some(command) = batch.next() {
                let command = command.expect("a Raft entry holds decodable commands");
                let effect = AppliedEffect::of(&command);
                let reply = state.apply(index, command);
                match &effect {
                    AppliedEffect::Other => {}
                    AppliedEffect::Compacted => self.shared.compacted.notify_one(),
                    effect => self.update_lease_clock(now_ms, effect, &reply),
                }
                if !waiters.is_empty() {
                    replies.push(reply);
                }
            }
            self.shared.size.store(state.size_bytes() as u64, Ordering::Relaxed);
        }
        self.shared.bytes_since_snapshot.fetch_add(entry.len() as u64, Ordering::Relaxed);
        let mut replies_out = ReplyBatch::default();
        for (waiter, reply) in waiters.into_iter().zip(replies) {
            let reply = match reply {
                Reply::Error(error) => Err(CoordError::Refused(error)),
                reply => Ok(reply),
            };
            replies_out.push(waiter, reply);
        }
        Bytes::new()
    }

    fn on_applied(&mut self, index: u64, term: u64) {
        self.shared.applied.store(index, Ordering::Release);
        self.shared.proposals().on_applied(term);
        self.shared.applied_advanced.notify_waiters();
        self.shared.watch_wake.notify_one();
    }

    fn snapshot(&mut self) -> SnapshotWriter {
        self.shared.bytes_since_snapshot.store(0, Ordering::Relaxed);
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
        let spill = self.shared.state().user.spill().cloned();
        let mut restorer = Restorer::with_spill(spill);
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
        self.shared.update_size();
        // Pending batches may be among the entries the snapshot replaces: their outcome is unknown.
        let sent = self.shared.proposals().sent();
        sent.into_iter().for_each(|number| self.shared.fail_proposal(number, &CoordError::Timeout));
        // Freeing a large state takes time: do it after the locks are released.
        drop(old);
        Ok(())
    }
}
