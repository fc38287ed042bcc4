//! A lease kept alive, and the exact moment from which it must not be relied on any more.
//!
//! Everything here that belongs to a living process (a member's record, a leader's key, a lock, a registration) stands
//! under the lease of a [`Session`].
//!
//! Invariants:
//! - Time counts from when a renewal was *sent*, on a clock that runs while the machine sleeps; the store counts
//!   from when it arrived. With the margin on top we stop before the store lets anybody else in.
//! - [`Session::is_valid`] asks the clock, not a task: after a pause of the whole process the first look says no,
//!   before any timer has had its turn.
//! - A session that has ended never comes back.
//! - A session stops being valid before its lease is revoked, never after: the revocation lets another holder in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moim_base::Clock;
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::context::Context;
use crate::planted::{self, Bug};
use crate::repository::{LeaseId, RepositoryError, StateRepository};

/// The part of a lease's time that is used: the rest is for clocks that run at different speeds and for the time
/// between a look and what is done after it.
const USED: f64 = 0.85;
/// A task that waits looks at the clock this often: timers do not run while the machine sleeps.
const LOOK: Duration = Duration::from_millis(250);

/// Why a session ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// It was not renewed in time: the store was away, or this process was paused.
    #[error("the lease was not renewed in time")]
    Expired,
    /// The store says that the lease is gone.
    #[error("the store has ended the lease")]
    Revoked,
    /// What it was for is gone: somebody deleted or replaced the key.
    #[error("{0}")]
    Taken(String),
    /// Its owner closed it.
    #[error("closed")]
    Closed,
}

struct Shared {
    store: Arc<dyn StateRepository>,
    clock: Arc<dyn Clock>,
    lease: LeaseId,
    ttl: Duration,
    /// On the clock, in nanoseconds. Invariant: only grows.
    usable_until: AtomicU64,
    /// Set by [`Session::retire`]. Invariant: never cleared.
    is_retired: AtomicBool,
    end: watch::Sender<Option<SessionEnd>>,
}

/// A lease kept alive in the background. Dropping the last handle ends it.
#[derive(Clone)]
pub struct Session {
    shared: Arc<Shared>,
    _owner: Arc<Owner>,
}

/// Ends the session when nobody has it any more.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end(SessionEnd::Closed);
    }
}

impl Session {
    /// Asks for a lease of `ttl` and keeps it alive in a task of the context's scope.
    pub async fn open(context: &Context, ttl: Duration) -> Result<Self, RepositoryError> {
        let sent = context.clock.monotonic_ns();
        let lease = context.repository.grant(ttl).await?;
        let sent = if planted::is(Bug::FromAnswer) { context.clock.monotonic_ns() } else { sent };
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
                // So that nobody waits for the time to pass. Without an answer it passes.
                let _ = tokio::time::timeout(kept.ttl, kept.store.revoke(kept.lease)).await;
            }
        });
        let owner = Arc::new(Owner(Arc::clone(&shared)));
        Ok(Self { shared, _owner: owner })
    }

    /// The lease.
    pub fn lease(&self) -> LeaseId {
        self.shared.lease
    }

    /// How long the lease lives without renewal.
    pub fn ttl(&self) -> Duration {
        self.shared.ttl
    }

    /// Whether what stands under it may be relied on at this moment. Look before each use.
    pub fn is_valid(&self) -> bool {
        self.shared.is_valid()
    }

    /// How long it may be relied on without another renewal.
    pub fn time_left(&self) -> Duration {
        if self.shared.end.borrow().is_some() { Duration::ZERO } else { self.shared.time_left() }
    }

    /// Why it ended, if it has.
    pub fn ended(&self) -> Option<SessionEnd> {
        match self.shared.end.borrow().clone() {
            None if !self.is_valid() => Some(SessionEnd::Expired),
            end => end,
        }
    }

    /// Returns when it ends. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.shared.lost().await
    }

    /// A watch on this session that does not keep it alive.
    pub(crate) fn watcher(&self) -> SessionWatch {
        SessionWatch(Arc::clone(&self.shared))
    }

    /// What it was for is gone.
    pub(crate) fn end(&self, why: SessionEnd) {
        self.shared.end(why);
    }

    /// Makes the session invalid without ending its lease: for an owner that still has a last record to write under it.
    pub(crate) fn retire(&self) {
        self.shared.is_retired.store(true, Ordering::SeqCst);
    }

    /// Ends the session, then its lease at the store, and waits for the answer.
    pub async fn close(&self) -> Result<(), RepositoryError> {
        // The session's task revokes the lease, too; a second revocation finds it gone.
        self.shared.end(SessionEnd::Closed);
        match self.shared.store.revoke(self.shared.lease).await {
            Err(RepositoryError::LeaseNotFound(_)) => Ok(()),
            done => done,
        }
    }
}

/// Knows when a session ends without keeping it alive.
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
    let ttl = if planted::is(Bug::LongLease) { ttl * 2 } else { ttl };
    sent_ns.saturating_add(u64::try_from(ttl.mul_f64(USED).as_nanos()).unwrap_or(u64::MAX))
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
            // The sender is in `self`; it does not go while we look.
            let _ = tokio::time::timeout(left.min(LOOK), end.changed()).await;
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
            // A renewal that hangs must not keep the next one from being tried elsewhere.
            let renewed = tokio::time::timeout(self.ttl / 3, self.store.keep_alive(self.lease)).await;
            let sent = if planted::is(Bug::FromAnswer) { self.clock.monotonic_ns() } else { sent };
            pause = match renewed {
                Ok(Ok(ttl)) => {
                    // One that was too late revives nothing: the state of those who looked meanwhile is "lost".
                    if !self.is_valid() {
                        return self.end(SessionEnd::Expired);
                    }
                    self.usable_until.fetch_max(usable_until(sent, ttl), Ordering::SeqCst);
                    backoff.reset();
                    self.ttl / 3
                }
                Ok(Err(RepositoryError::LeaseNotFound(_))) => return self.end(SessionEnd::Revoked),
                Ok(Err(error)) => {
                    tracing::debug!(%error, lease = %self.lease, "a lease was not renewed");
                    backoff.next_pause()
                }
                Err(_) => backoff.next_pause(),
            };
        }
    }
}

#[cfg(test)]
mod tests;
