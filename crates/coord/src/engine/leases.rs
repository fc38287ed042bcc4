//! Leases on a running node: the leader keeps the time, everybody else asks it.
//!
//! Renewals of many clients share one confirmation of the leadership. What the leader's clock decides (ends, notes of
//! what is left) is proposed for the leader's own term only and never forwarded: a clock that stood still while
//! another led must not end a lease that the other has renewed.
//!
//! Invariant: `Timekeeper::term` is set exactly while the clock holds every lease of the state.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::rest::rest_end;
use moim_raft::{Leadership, ServiceError, ServiceId, TransportError};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Inner;
use super::answers::{Bundle, Counter, Waiter};
use super::entry::{BatchId, Draft};
use super::error::CoordError;
use super::peer::{PeerReply, PeerRequest};
use crate::auto_compact::AutoCompactor;
use crate::error::Error;
use crate::lease::LeaseId;
use crate::lease_clock::{LeaseClock, LeaseClockConfig, Renewal};
use crate::request::{Command, Op, Origin};
use crate::state::State;

/// Leases whose note one command takes back.
const RESETS: usize = 1_000;
/// Ends proposed together.
const ENDS: usize = 512;
/// Renewals that may wait.
const RENEWALS: usize = 65_536;
/// Before a leader that was not ready is asked again.
const PAUSE: Duration = Duration::from_millis(20);
/// Longest sleep of the timekeeper.
const NAP: Duration = Duration::from_secs(1);

/// What came of a renewal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kept {
    /// It has its whole time again.
    For { ttl_ms: i64 },
    /// Its end is on its way.
    Ending,
    /// There is no such lease.
    Unknown,
    /// It is a node's, and a client asked.
    Denied,
}

/// A lease as a client sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseInfo {
    /// How long it was granted for; 0 when there is no such lease.
    pub granted_ms: i64,
    /// What it has left; -1 when there is no such lease.
    pub remaining_ms: i64,
    /// The keys that go with it, if asked for.
    pub keys: Vec<bytes::Bytes>,
}

/// The leader's clock, or a follower's that stands still.
pub(super) struct Timekeeper {
    clock: LeaseClock,
    term: Option<u64>,
}

impl Timekeeper {
    pub(super) fn new(config: LeaseClockConfig) -> Self {
        Self { clock: LeaseClock::new(config), term: None }
    }

    pub(super) fn on_granted(&mut self, id: LeaseId, ttl_ms: i64, now_ms: u64) {
        if self.term.is_some() {
            self.clock.on_granted(id, ttl_ms, now_ms);
        }
    }

    pub(super) fn on_revoked(&mut self, id: LeaseId) {
        if self.term.is_some() {
            self.clock.on_revoked(id);
        }
    }

    pub(super) fn on_checkpoint(&mut self, remaining: &[(LeaseId, i64)]) {
        if self.term.is_some() {
            self.clock.on_checkpoint(remaining);
        }
    }

    fn become_leader(&mut self, term: u64, state: &State, now_ms: u64, election_ms: u64) {
        #[cfg(feature = "planted")]
        let now_ms = match moim_raft::planted::is_on(moim_raft::planted::Bug::LeaseEarly) {
            true => now_ms.saturating_sub(2_000),
            false => now_ms,
        };
        self.clock.on_become_leader(state, now_ms, election_ms);
        self.term = Some(term);
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn is_overdue(&self, now_ms: u64) -> bool {
        self.clock.next_deadline_ms().is_some_and(|at| at <= now_ms)
    }

    fn lose_leadership(&mut self) {
        self.clock.on_lose_leadership();
        self.term = None;
    }
}

type Renewing = ((Origin, LeaseId), Waiter<Kept>);

/// Renewals that wait for the next round.
#[derive(Default)]
pub(super) struct Renewals {
    waiting: Mutex<Vec<Renewing>>,
    wake: Notify,
}

impl Renewals {
    fn take(&self) -> Vec<Renewing> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Inner {
    /// Gives a lease its whole time again; answers it in milliseconds, 0 when there is no such lease.
    pub(super) async fn keep_alive(
        &self,
        origin: Origin,
        id: LeaseId,
        through: Option<&Arc<Counter>>,
    ) -> Result<i64, CoordError> {
        let (renewing, done) = Waiter::new(through);
        {
            let mut waiting = self.renewals.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // Under the lock: the task that answers takes it once more when it ends.
            if self.shutdown.is_stopped() {
                return Err(CoordError::Stopped);
            }
            if waiting.len() >= RENEWALS {
                return Err(CoordError::TooManyRequests);
            }
            waiting.push(((origin, id), renewing));
        }
        self.renewals.wake.notify_one();
        match done.await.unwrap_or(Err(CoordError::Stopped))? {
            Kept::For { ttl_ms } => Ok(ttl_ms),
            Kept::Unknown => Ok(0),
            Kept::Denied => Err(Error::PermissionDenied.into()),
            Kept::Ending => {
                self.wait_ended(id).await?;
                Ok(0)
            }
        }
    }

    async fn wait_ended(&self, id: LeaseId) -> Result<(), CoordError> {
        let ended = async {
            loop {
                let notified = self.shared.progress.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.shared.state().lease(id).is_none() {
                    return;
                }
                notified.await;
            }
        };
        let patience = Duration::from_millis(self.timeout_ms());
        tokio::time::timeout(patience, ended).await.map_err(|_| CoordError::Timeout)
    }

    /// Carries renewals to the leader, all that wait at a time, until the node stops.
    pub(super) async fn carry_renewals(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                () = self.renewals.wake.notified() => {}
            }
            let (leases, waiters): (Vec<_>, Vec<_>) = self.renewals.take().into_iter().unzip();
            if leases.is_empty() {
                continue;
            }
            let outcome = tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                outcome = self.renew(&leases) => outcome,
            };
            let outcome = match outcome {
                Ok(kept) if kept.len() == leases.len() => Ok(kept),
                Ok(_) => Err(CoordError::Timeout),
                Err(error) => Err(error),
            };
            let mut bundle = Bundle::default();
            for (at, waiter) in waiters.into_iter().enumerate() {
                bundle.answer(waiter, outcome.as_ref().map(|kept| kept[at]).map_err(Clone::clone));
            }
        }
        drop(self.renewals.take());
    }

    async fn renew(&self, leases: &[(Origin, LeaseId)]) -> Result<Vec<Kept>, CoordError> {
        let request = PeerRequest::KeepAlive(leases.to_vec());
        match self.ask_leader(request, || self.keep_alive_here(leases)).await? {
            Asked::Here(kept) => Ok(kept),
            Asked::Peer(PeerReply::Kept(kept)) => Ok(kept),
            Asked::Peer(_) => Err(CoordError::Timeout),
        }
    }

    /// Asks the leader, wherever it is, until it answers or time is over. For what may be repeated.
    pub(super) async fn ask_leader<T, F>(
        &self,
        request: PeerRequest,
        here: impl Fn() -> F,
    ) -> Result<Asked<T>, CoordError>
    where
        F: Future<Output = Result<T, CoordError>>,
    {
        let deadline_ms = self.now_ms() + self.timeout_ms();
        let bytes = request.encode();
        loop {
            let error = match self.group.leader_in_term() {
                None => {
                    self.wait_leader(deadline_ms).await;
                    CoordError::NoLeader
                }
                Some((_, leader)) if leader.id == self.group.voter() => match here().await {
                    Ok(done) => return Ok(Asked::Here(done)),
                    Err(error @ (CoordError::NotLeader | CoordError::Timeout)) => error,
                    Err(error) => return Err(error),
                },
                Some((term, leader)) => {
                    let timeout = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()).max(1));
                    let answer = tokio::select! {
                        answer =
                            self.transport.ask(&leader, ServiceId::COORDINATOR, bytes.clone(), timeout) => answer,
                        // One that has stopped answering does not say so; its successor is asked at once.
                        () = self.wait_term_over(term) => Err(TransportError::TimedOut.into()),
                    };
                    match answer.map(PeerReply::decode) {
                        Ok(Ok(PeerReply::Refused(
                            error @ (CoordError::NotLeader | CoordError::Timeout | CoordError::Stopped),
                        ))) => error,
                        Ok(Ok(PeerReply::Refused(error))) => return Err(error),
                        Ok(Ok(reply)) => return Ok(Asked::Peer(reply)),
                        Ok(Err(_)) | Err(ServiceError::Transport(TransportError::TimedOut)) => {
                            CoordError::Timeout
                        }
                        Err(_) => CoordError::NoLeader,
                    }
                }
            };
            if self.now_ms() >= deadline_ms {
                return Err(if error == CoordError::NotLeader { CoordError::NoLeader } else { error });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Renews on the leader itself, and confirms afterwards that it still leads.
    pub(super) async fn keep_alive_here(
        &self,
        leases: &[(Origin, LeaseId)],
    ) -> Result<Vec<Kept>, CoordError> {
        let mut renewed = self.renew_all(leases)?;
        let index = self.group.read_index().await.map_err(CoordError::of_group)?;
        if renewed.contains(&Some(Renewal::NotFound)) {
            // It may have been granted by an entry that is committed and not applied here yet.
            let patience = Duration::from_millis(self.timeout_ms());
            let applied = tokio::time::timeout(patience, self.shared.wait_applied(index)).await;
            applied.map_err(|_| CoordError::Timeout)?;
            renewed = self.renew_all(leases)?;
        }
        // What the log noted of them no longer holds. Together: whoever renews next waits for this.
        let noted = leases.iter().zip(&renewed).filter_map(|((_, id), renewal)| match renewal {
            Some(Renewal::Renewed { checkpoint: Some(_), .. }) => Some((*id, 0)),
            _ => None,
        });
        let noted: Vec<(LeaseId, i64)> = noted.collect();
        for part in noted.chunks(RESETS) {
            let reset = Command::node(Op::LeaseCheckpoint { remaining: part.to_vec() });
            self.submit(&reset, None).await?;
        }
        let kept = renewed.into_iter().map(|renewal| match renewal {
            Some(Renewal::Renewed { ttl_ms, .. }) => Kept::For { ttl_ms },
            Some(Renewal::Ending) => Kept::Ending,
            Some(Renewal::NotFound) => Kept::Unknown,
            None => Kept::Denied,
        });
        Ok(kept.collect())
    }

    /// `None` is a lease of a node that a client asks for: it would keep a dead node among the living.
    fn renew_all(&self, leases: &[(Origin, LeaseId)]) -> Result<Vec<Option<Renewal>>, CoordError> {
        let now_ms = self.now_ms();
        let state = self.shared.state();
        let mut timekeeper = self.shared.leases();
        if timekeeper.term.is_none() {
            return Err(CoordError::NotLeader);
        }
        let renew = |(origin, id): &(Origin, LeaseId)| {
            let is_nodes = state.lease(*id).is_some_and(|lease| lease.origin == Origin::Node);
            let denied = is_nodes && *origin == Origin::Client;
            (!denied).then(|| timekeeper.clock.renew(*id, now_ms))
        };
        Ok(leases.iter().map(renew).collect())
    }

    /// What leases have left, on the leader itself.
    pub(super) async fn remaining_here(&self, leases: &[LeaseId]) -> Result<Vec<i64>, CoordError> {
        let index = self.group.read_index().await.map_err(CoordError::of_group)?;
        let patience = Duration::from_millis(self.timeout_ms());
        let applied = tokio::time::timeout(patience, self.shared.wait_applied(index)).await;
        applied.map_err(|_| CoordError::Timeout)?;
        let now_ms = self.now_ms();
        let timekeeper = self.shared.leases();
        if timekeeper.term.is_none() {
            return Err(CoordError::NotLeader);
        }
        let left = |id: &LeaseId| timekeeper.clock.remaining_ms(*id, now_ms);
        Ok(leases
            .iter()
            .map(|id| left(id).map_or(-1, |left| i64::try_from(left).unwrap_or(i64::MAX)))
            .collect())
    }

    pub(super) async fn time_to_live(&self, id: LeaseId, with_keys: bool) -> Result<LeaseInfo, CoordError> {
        let leases = [id];
        let request = PeerRequest::Remaining(leases.to_vec());
        let remaining_ms = match self.ask_leader(request, || self.remaining_here(&leases)).await? {
            Asked::Here(left) | Asked::Peer(PeerReply::Remaining(left)) => left.first().copied(),
            Asked::Peer(_) => return Err(CoordError::Timeout),
        };
        // The leader knew the lease: this node has it too once it has caught up.
        self.linearizable(None).await?;
        let state = self.shared.state();
        let gone = LeaseInfo { granted_ms: 0, remaining_ms: -1, keys: Vec::new() };
        let (Some(remaining_ms @ 0..), Some(lease)) = (remaining_ms, state.lease(id)) else {
            return Ok(gone);
        };
        let keys = if with_keys { lease.keys().cloned().collect() } else { Vec::new() };
        Ok(LeaseInfo { granted_ms: lease.ttl_ms, remaining_ms, keys })
    }

    /// Follows the leadership until the node stops: keeps the time while this node leads.
    pub(super) async fn keep_time(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let mut changes = self.group.leader_changes();
        let mut now = changes.current();
        loop {
            self.on_leadership(&now);
            let reign = self.reign(&now);
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                next = changes.changed() => match next {
                    Some(next) => now = next,
                    None => return,
                },
                () = reign => {}
            }
            self.shared.leases().lose_leadership();
        }
    }

    /// What the leader does beside answering. Ends only by being dropped.
    async fn reign(&self, now: &Leadership) {
        if now.leader != Some(self.group.voter()) {
            return std::future::pending().await;
        }
        // Everything committed before this term must be in the state first.
        let index = loop {
            match self.group.read_index().await {
                Ok(index) => break index,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        self.shared.wait_applied(index).await;
        {
            let state = self.shared.state();
            let election_ms = self.options.group.timers.election_max_ms;
            self.shared.leases().become_leader(now.term, &state, self.now_ms(), election_ms);
        }
        let mut compactor = AutoCompactor::new(self.options.compaction_retention_ms);
        loop {
            let now_ms = self.now_ms();
            let mut commands = self.shared.leases().clock.expired(now_ms, ENDS);
            commands.extend(self.shared.leases().clock.checkpoint(now_ms));
            commands.extend(compactor.on_tick(now_ms, &self.shared.state()));
            if !commands.is_empty() {
                self.propose_as_leader(now.term, &commands).await;
                continue;
            }
            let next_ms = self.shared.leases().clock.next_end_ms();
            let nap =
                next_ms.map_or(NAP, |at| Duration::from_millis(at.saturating_sub(now_ms).max(1)).min(NAP));
            // A lease ends at its time; nothing else is in a hurry.
            let until = if nap < NAP { Instant::now() + nap } else { rest_end(NAP) };
            tokio::select! {
                biased;
                () = self.shared.lease_news.notified() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// For this term only, and without waiting: what gets lost is proposed again by the clock.
    async fn propose_as_leader(&self, term: u64, commands: &[Command]) {
        let mut draft = Draft::new();
        for command in commands {
            if let Err(error @ Error::RequestTooLarge) = draft.push(command) {
                tracing::warn!(%error, "a leader's command does not fit into an entry");
            }
        }
        let id = BatchId { nonce: self.shared.nonce, number: self.next_batch() };
        if let Err(error) = self.group.propose_in_term(term, draft.finish(id)).await {
            tracing::debug!(%error, "a leader's proposal was not taken");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Where an answer came from.
pub(super) enum Asked<T> {
    Here(T),
    Peer(PeerReply),
}
