//! Leases on a running node: the leader keeps the deadlines, other nodes forward keepalives to it.
//!
//! Keepalives of many clients share one leadership confirmation. Decisions of the leader's clock (lease expiry, lease
//! checkpoints) are proposed for the leader's own term only and never forwarded: a clock that was paused while another
//! node led must not expire a lease that the other leader has renewed.
//!
//! Invariant: `TermLeaseClock::term` is set exactly while the clock holds every lease of the state.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::rest::rest_end;
use moim_raft::{Leadership, ServiceError, ServiceId, TransportError};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Inner;
use super::entry::{BatchBuilder, BatchId};
use super::error::CoordError;
use super::peer::{PeerReply, PeerRequest};
use super::replies::{ReplyBatch, ReplyQueue, Waiter};
use crate::auto_compact::AutoCompactor;
use crate::error::Error;
use crate::lease::LeaseId;
use crate::lease_clock::{LeaseClock, LeaseClockConfig, Renewal};
use crate::request::{Command, Op, Origin};
use crate::state::State;

/// Maximum number of leases whose checkpoint one command resets.
const MAX_CHECKPOINT_RESETS: usize = 1_000;
/// Maximum number of lease expiries proposed together.
const MAX_EXPIRIES: usize = 512;
/// Maximum number of waiting keepalives.
const MAX_RENEWALS: usize = 65_536;
/// Delay before a leader that was not ready is asked again.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Longest sleep of the lease clock task.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Outcome of a lease keepalive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeepAliveOutcome {
    /// The lease has its full TTL again.
    Renewed { ttl_ms: i64 },
    /// The revocation of the lease has been proposed.
    Expiring,
    /// The lease does not exist.
    NotFound,
    /// The lease belongs to a node, and a client tried to renew it.
    Denied,
}

/// A lease as reported by `LeaseTimeToLive`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseInfo {
    /// The granted TTL; 0 if the lease does not exist.
    pub granted_ms: i64,
    /// The remaining TTL; -1 if the lease does not exist.
    pub remaining_ms: i64,
    /// The keys attached to the lease, if requested.
    pub keys: Vec<bytes::Bytes>,
}

/// The leader's lease clock with its term; stopped on a follower.
pub(super) struct TermLeaseClock {
    clock: LeaseClock,
    term: Option<u64>,
}

impl TermLeaseClock {
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

type Renewing = ((Origin, LeaseId), Waiter<KeepAliveOutcome>);

/// Keepalives that wait for the next round.
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
    /// Renews a lease to its full TTL; returns it in milliseconds, or 0 if the lease does not exist.
    pub(super) async fn keep_alive(
        &self,
        origin: Origin,
        id: LeaseId,
        reply_queue: Option<&Arc<ReplyQueue>>,
    ) -> Result<i64, CoordError> {
        let (renewing, done) = Waiter::new(reply_queue);
        {
            let mut waiting = self.renewals.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // Checked under the lock: the round task takes the lock once more when it ends.
            if self.shutdown.is_stopped() {
                return Err(CoordError::Stopped);
            }
            if waiting.len() >= MAX_RENEWALS {
                return Err(CoordError::TooManyRequests);
            }
            waiting.push(((origin, id), renewing));
        }
        self.renewals.wake.notify_one();
        match done.await.unwrap_or(Err(CoordError::Stopped))? {
            KeepAliveOutcome::Renewed { ttl_ms } => Ok(ttl_ms),
            KeepAliveOutcome::NotFound => Ok(0),
            KeepAliveOutcome::Denied => Err(Error::PermissionDenied.into()),
            KeepAliveOutcome::Expiring => {
                self.wait_revoked(id).await?;
                Ok(0)
            }
        }
    }

    async fn wait_revoked(&self, id: LeaseId) -> Result<(), CoordError> {
        let revoked = async {
            loop {
                let notified = self.shared.applied_advanced.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.shared.state().lease(id).is_none() {
                    return;
                }
                notified.await;
            }
        };
        let timeout = Duration::from_millis(self.timeout_ms());
        tokio::time::timeout(timeout, revoked).await.map_err(|_| CoordError::Timeout)
    }

    /// Sends keepalives to the leader, all waiting ones in a round, until the node stops.
    pub(super) async fn run_renewals(self: Arc<Self>) {
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
                Ok(outcomes) if outcomes.len() == leases.len() => Ok(outcomes),
                Ok(_) => Err(CoordError::Timeout),
                Err(error) => Err(error),
            };
            let mut replies = ReplyBatch::default();
            for (at, waiter) in waiters.into_iter().enumerate() {
                replies.push(waiter, outcome.as_ref().map(|outcomes| outcomes[at]).map_err(Clone::clone));
            }
        }
        drop(self.renewals.take());
    }

    async fn renew(&self, leases: &[(Origin, LeaseId)]) -> Result<Vec<KeepAliveOutcome>, CoordError> {
        let request = PeerRequest::KeepAlive(leases.to_vec());
        match self.ask_leader(request, || self.keep_alive_on_leader(leases)).await? {
            LeaderReply::Local(outcomes) => Ok(outcomes),
            LeaderReply::Peer(PeerReply::KeepAlive(outcomes)) => Ok(outcomes),
            LeaderReply::Peer(_) => Err(CoordError::Timeout),
        }
    }

    /// Asks the current leader until it replies or the request times out. Only for requests that may be repeated.
    pub(super) async fn ask_leader<T, F>(
        &self,
        request: PeerRequest,
        on_leader: impl Fn() -> F,
    ) -> Result<LeaderReply<T>, CoordError>
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
                Some((_, leader)) if leader.id == self.group.voter() => match on_leader().await {
                    Ok(done) => return Ok(LeaderReply::Local(done)),
                    Err(error @ (CoordError::NotLeader | CoordError::Timeout)) => error,
                    Err(error) => return Err(error),
                },
                Some((term, leader)) => {
                    let timeout = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()).max(1));
                    let reply = tokio::select! {
                        reply =
                            self.transport.ask(&leader, ServiceId::COORDINATOR, bytes.clone(), timeout) => reply,
                        // A leader that stopped replying gives no notice: its successor is asked at once.
                        () = self.wait_term_over(term) => Err(TransportError::TimedOut.into()),
                    };
                    match reply.map(PeerReply::decode) {
                        Ok(Ok(PeerReply::Refused(
                            error @ (CoordError::NotLeader | CoordError::Timeout | CoordError::Stopped),
                        ))) => error,
                        Ok(Ok(PeerReply::Refused(error))) => return Err(error),
                        Ok(Ok(reply)) => return Ok(LeaderReply::Peer(reply)),
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
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Renews leases on the leader itself, and confirms leadership afterwards.
    pub(super) async fn keep_alive_on_leader(
        &self,
        leases: &[(Origin, LeaseId)],
    ) -> Result<Vec<KeepAliveOutcome>, CoordError> {
        let mut renewed = self.renew_all(leases)?;
        let index = self.group.read_index().await.map_err(CoordError::of_group)?;
        if renewed.contains(&Some(Renewal::NotFound)) {
            // The lease may have been granted by an entry that is committed and not applied here yet.
            let timeout = Duration::from_millis(self.timeout_ms());
            let applied = tokio::time::timeout(timeout, self.shared.wait_applied(index)).await;
            applied.map_err(|_| CoordError::Timeout)?;
            renewed = self.renew_all(leases)?;
        }
        // The checkpointed remaining TTLs are obsolete. They are reset together, because the next renewal waits for
        // this.
        let checkpointed = leases.iter().zip(&renewed).filter_map(|((_, id), renewal)| match renewal {
            Some(Renewal::Renewed { checkpoint: Some(_), .. }) => Some((*id, 0)),
            _ => None,
        });
        let checkpointed: Vec<(LeaseId, i64)> = checkpointed.collect();
        for part in checkpointed.chunks(MAX_CHECKPOINT_RESETS) {
            let reset = Command::node(Op::LeaseCheckpoint { remaining: part.to_vec() });
            self.submit(&reset, None).await?;
        }
        let outcomes = renewed.into_iter().map(|renewal| match renewal {
            Some(Renewal::Renewed { ttl_ms, .. }) => KeepAliveOutcome::Renewed { ttl_ms },
            Some(Renewal::Expiring) => KeepAliveOutcome::Expiring,
            Some(Renewal::NotFound) => KeepAliveOutcome::NotFound,
            None => KeepAliveOutcome::Denied,
        });
        Ok(outcomes.collect())
    }

    /// `None` is a node's lease requested by a client: renewing it would keep a dead node registered.
    fn renew_all(&self, leases: &[(Origin, LeaseId)]) -> Result<Vec<Option<Renewal>>, CoordError> {
        let now_ms = self.now_ms();
        let state = self.shared.state();
        let mut lease_clock = self.shared.leases();
        if lease_clock.term.is_none() {
            return Err(CoordError::NotLeader);
        }
        let renew = |(origin, id): &(Origin, LeaseId)| {
            let is_node_lease = state.lease(*id).is_some_and(|lease| lease.origin == Origin::Node);
            let denied = is_node_lease && *origin == Origin::Client;
            (!denied).then(|| lease_clock.clock.renew(*id, now_ms))
        };
        Ok(leases.iter().map(renew).collect())
    }

    /// Remaining TTLs, on the leader itself.
    pub(super) async fn remaining_on_leader(&self, leases: &[LeaseId]) -> Result<Vec<i64>, CoordError> {
        let index = self.group.read_index().await.map_err(CoordError::of_group)?;
        let timeout = Duration::from_millis(self.timeout_ms());
        let applied = tokio::time::timeout(timeout, self.shared.wait_applied(index)).await;
        applied.map_err(|_| CoordError::Timeout)?;
        let now_ms = self.now_ms();
        let lease_clock = self.shared.leases();
        if lease_clock.term.is_none() {
            return Err(CoordError::NotLeader);
        }
        let left = |id: &LeaseId| lease_clock.clock.remaining_ms(*id, now_ms);
        Ok(leases
            .iter()
            .map(|id| left(id).map_or(-1, |left| i64::try_from(left).unwrap_or(i64::MAX)))
            .collect())
    }

    pub(super) async fn time_to_live(&self, id: LeaseId, with_keys: bool) -> Result<LeaseInfo, CoordError> {
        let leases = [id];
        let request = PeerRequest::Remaining(leases.to_vec());
        let remaining_ms = match self.ask_leader(request, || self.remaining_on_leader(&leases)).await? {
            LeaderReply::Local(left) | LeaderReply::Peer(PeerReply::Remaining(left)) => left.first().copied(),
            LeaderReply::Peer(_) => return Err(CoordError::Timeout),
        };
        // The leader knew the lease: this node has it too once it has caught up.
        self.linearizable(None).await?;
        let state = self.shared.state();
        let not_found = LeaseInfo { granted_ms: 0, remaining_ms: -1, keys: Vec::new() };
        let (Some(remaining_ms @ 0..), Some(lease)) = (remaining_ms, state.lease(id)) else {
            return Ok(not_found);
        };
        let keys = if with_keys { lease.keys().cloned().collect() } else { Vec::new() };
        Ok(LeaseInfo { granted_ms: lease.ttl_ms, remaining_ms, keys })
    }

    /// Follows leadership until the node stops: runs the lease clock while this node leads.
    pub(super) async fn run_lease_clock(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let mut changes = self.group.leader_changes();
        let mut now = changes.current();
        loop {
            self.on_leadership(&now);
            let duties = self.run_as_leader(&now);
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                next = changes.changed() => match next {
                    Some(next) => now = next,
                    None => return,
                },
                () = duties => {}
            }
            self.shared.leases().lose_leadership();
        }
    }

    /// The leader's duties beside requests: lease expiry, lease checkpoints, compaction. Ends only by being dropped.
    async fn run_as_leader(&self, now: &Leadership) {
        if now.leader != Some(self.group.voter()) {
            return std::future::pending().await;
        }
        // Entries committed in earlier terms must be applied first.
        let index = loop {
            match self.group.read_index().await {
                Ok(index) => break index,
                Err(_) => tokio::time::sleep(RETRY_DELAY).await,
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
            let mut commands = self.shared.leases().clock.expired(now_ms, MAX_EXPIRIES);
            commands.extend(self.shared.leases().clock.checkpoint(now_ms));
            commands.extend(compactor.on_tick(now_ms, &self.shared.state()));
            if !commands.is_empty() {
                self.propose_as_leader(now.term, &commands).await;
                continue;
            }
            let next_ms = self.shared.leases().clock.next_expiry_ms();
            let sleep = next_ms.map_or(MAX_SLEEP, |at| {
                Duration::from_millis(at.saturating_sub(now_ms).max(1)).min(MAX_SLEEP)
            });
            // A lease expires on time; other work can wait for a common wake-up.
            let until = if sleep < MAX_SLEEP { Instant::now() + sleep } else { rest_end(MAX_SLEEP) };
            tokio::select! {
                biased;
                () = self.shared.lease_changed.notified() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// Proposes for this term only and does not retry: the clock proposes lost commands again.
    async fn propose_as_leader(&self, term: u64, commands: &[Command]) {
        let mut builder = BatchBuilder::new();
        for command in commands {
            if let Err(error @ Error::RequestTooLarge) = builder.push(command) {
                tracing::warn!(%error, "leader command exceeds the request size limit");
            }
        }
        let id = BatchId { nonce: self.shared.nonce, number: self.next_batch() };
        if let Err(error) = self.group.propose_in_term(term, builder.finish(id)).await {
            tracing::debug!(%error, "leader proposal not accepted");
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

/// Where a reply of the leader came from.
pub(super) enum LeaderReply<T> {
    Local(T),
    Peer(PeerReply),
}
