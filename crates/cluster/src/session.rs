//! A session: a lease with automatic renewal, and the exact deadline of its validity.
//!
//! Every key of a live process (a member record, a leader key, a lock, a registration) is attached to the
//! lease of a [`Session`].
//!
//! Invariants:
//! - The deadline counts from the *sending* of a renewal, on a clock that includes suspended time; the store
//!   counts from its arrival. With the safety margin the session ends before the store expires the lease.
//! - [`Session::is_valid`] checks the clock, not a task: after a pause of the whole process the first check
//!   is false, before any timer has fired.
//! - A session that has ended never becomes valid again.
//! - A session becomes invalid before its lease is revoked, never after: the revocation lets another holder
//!   in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moim_base::Clock;
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::context::Context;
use crate::fault_injection::{self, Bug};
use crate::repository::{LeaseId, RepositoryError, StateRepository};

/// Used fraction of the lease TTL: the rest covers clock drift and the time between a check and the action
/// after it.
const SAFETY_FACTOR: f64 = 0.85;
/// Clock check interval of a waiting task: timers do not run while the machine is suspended.
const CLOCK_CHECK: Duration = Duration::from_millis(250);

/// Reason for the end of a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The lease was not renewed in time: the store was unavailable, or this process was paused.
    #[error("the lease was not renewed in time")]
    Expired,
    /// The store reports that the lease does not exist.
    #[error("the store has ended the lease")]
    Revoked,
    /// The key of the session was deleted or replaced.
    #[error("{0}")]
    Taken(String),
    /// The owner closed the session.
    #[error("closed")]
    Closed,
}

struct Shared {
    store: Arc<dyn StateRepository>,
    clock: Arc<dyn Clock>,
    lease: LeaseId,
    ttl: Duration,
    /// Deadline on the clock, in nanoseconds. Invariant: only grows.
    usable_until: AtomicU64,
    /// Set by [`Session::retire`]. Invariant: never cleared.
    is_retired: AtomicBool,
    end: watch::Sender<Option<SessionEnd>>,
}

/// A lease with automatic renewal. Dropping the last handle ends it.
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
    _owner: Arc<Owner>,
}

/// Ends the session when the last handle is dropped.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end(SessionEnd::Closed);
    }
}

impl Session {
    /// Grants a lease of `ttl` and renews it in a task of the context's scope.
    pub async fn open(context: &Context, ttl: Duration) -> Result<Self, RepositoryError> {
        let sent = context.clock.monotonic_ns();
        let lease = context.repository.grant(ttl).await?;
        let sent =
            if fault_injection::is_injected(Bug::FromReply) { context.clock.monotonic_ns() } else { sent };
        let shared = Arc::new(Shared {
            store: Arc::clone(&context.repository),
            clock: Arc::clone(&context.clock),
            lease: lease.id,
            ttl: lease.ttl,
            usable_until: AtomicU64::new(usable_until(sent, lease.ttl)),
            is_retired: AtomicBool::new(false),
            end: watch::channel(None).0,
        });
        let (kept, stop) = (Arc::clone(&shared), context.scope.shutdown().clone());
        context.scope.spawn("cluster session", async move {
            tokio::select! {
                biased;
                () = kept.keep() => {}
                () = stop.stopped() => kept.end(SessionEnd::Closed),
            }
            if kept.end.borrow().as_ref() == Some(&SessionEnd::Closed) {
                // So that other contenders need not wait for the expiry. Without a reply the lease expires.
                let _ = tokio::time::timeout(kept.ttl, kept.store.revoke(kept.lease)).await;
            }
        });
        let owner = Arc::new(Owner(Arc::clone(&shared)));
        Ok(Self { shared, _owner: owner })
    }

    /// The lease id.
    pub fn lease(&self) -> LeaseId {
        self.shared.lease
    }

    /// TTL of the lease without renewal.
    pub fn ttl(&self) -> Duration {
        self.shared.ttl
    }

    /// True while the session is valid. Check before each use.
    pub fn is_valid(&self) -> bool {
        self.shared.is_valid()
    }

    /// Remaining validity without another renewal.
    pub fn time_left(&self) -> Duration {
        if self.shared.end.borrow().is_some() { Duration::ZERO } else { self.shared.time_left() }
    }

    /// The reason of the end, if the session has ended.
    pub fn ended(&self) -> Option<SessionEnd> {
        match self.shared.end.borrow().clone() {
            None if !self.is_valid() => Some(SessionEnd::Expired),
            end => end,
        }
    }

    /// Returns when the session ends. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.shared.lost().await
    }

    /// An observer of this session that does not keep it alive.
    pub(crate) fn watcher(&self) -> SessionWatch {
        SessionWatch(Arc::clone(&self.shared))
    }

    /// Ends the session because its key is deleted or replaced.
    pub(crate) fn end(&self, why: SessionEnd) {
        self.shared.end(why);
    }

    /// Invalidates the session without revoking its lease: for an owner that still has a last record to
    /// write under it.
    pub(crate) fn retire(&self) {
        self.shared.is_retired.store(true, Ordering::SeqCst);
    }

    /// Ends the session, then revokes its lease at the store, and waits for the reply.
    pub async fn close(&self) -> Result<(), RepositoryError> {
        // The session's task revokes the lease, too; a second revocation gets LeaseNotFound.
        self.shared.end(SessionEnd::Closed);
        match self.shared.store.revoke(self.shared.lease).await {
            Err(RepositoryError::LeaseNotFound(_)) => Ok(()),
            done => done,
        }
    }
}

/// Observes the end of a session without keeping it alive.
#[derive(Clone)]
pub(crate) struct SessionWatch(Arc<Shared>);

impl SessionWatch {
    pub(crate) async fn lost(&self) -> SessionEnd {
        self.0.lost().await
    }

    pub(crate) fn end(&self, why: SessionEnd) {
        self.0.end(why);
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.0.is_valid()
    }
}

fn usable_until(sent_ns: u64, ttl: Duration) -> u64 {
    let ttl = if fault_injection::is_injected(Bug::LongLease) { ttl * 2 } else { ttl };
    sent_ns.saturating_add(u64::try_from(ttl.mul_f64(SAFETY_FACTOR).as_nanos()).unwrap_or(u64::MAX))
}

impl Shared {
    fn is_valid(&self) -> bool {
        self.end.borrow().is_none() && !self.is_retired.load(Ordering::SeqCst) && !self.time_left().is_zero()
    }

    fn time_left(&self) -> Duration {
        let until = self.usable_until.load(Ordering::SeqCst);
        Duration::from_nanos(until.saturating_sub(self.clock.monotonic_ns()))
    }

    fn end(&self, why: SessionEnd) {
        self.end.send_if_modified(|end| {
            let is_first = end.is_none();
            if is_first {
                *end = Some(why);
            }
            is_first
        });
    }

    async fn lost(&self) -> SessionEnd {
        let mut end = self.end.subscribe();
        loop {
            if let Some(why) = end.borrow_and_update().clone() {
                return why;
            }
            let left = self.time_left();
            if left.is_zero() {
                self.end(SessionEnd::Expired);
                continue;
            }
            // The sender is in `self`; it outlives this wait.
            let _ = tokio::time::timeout(left.min(CLOCK_CHECK), end.changed()).await;
        }
    }

    /// Renews until the session ends.
    async fn keep(&self) {
        tokio::select! {
            biased;
            _ = self.lost() => {}
            () = self.renew() => {}
        }
    }

    async fn renew(&self) {
        let mut backoff = Backoff::new(self.ttl / 50, self.ttl / 6);
        let mut pause = self.ttl / 3;
        loop {
            tokio::time::sleep(pause).await;
            let sent = self.clock.monotonic_ns();
            // A hanging renewal must not block the next attempt, which may use another server.
            let renewed = tokio::time::timeout(self.ttl / 3, self.store.keep_alive(self.lease)).await;
            let sent =
                if fault_injection::is_injected(Bug::FromReply) { self.clock.monotonic_ns() } else { sent };
            pause = match renewed {
                Ok(Ok(ttl)) => {
                    // A late renewal does not revive the session: callers may have observed its end.
                    if !self.is_valid() {
                        return self.end(SessionEnd::Expired);
                    }
                    self.usable_until.fetch_max(usable_until(sent, ttl), Ordering::SeqCst);
                    backoff.reset();
                    self.ttl / 3
                }
                Ok(Err(RepositoryError::LeaseNotFound(_))) => return self.end(SessionEnd::Revoked),
                Ok(Err(error)) => {
                    tracing::debug!(%error, lease = %self.lease, "lease renewal failed");
                    backoff.next_pause()
                }
                Err(_) => backoff.next_pause(),
            };
        }
    }
}

#[cfg(test)]
mod tests;
