//! Locks: mutual exclusion, a FIFO queue of waiters, a fencing token for the writes of the holder.
//!
//! Each contender has its own key under `cluster:lock-queue/{name}/`, with its lease; the oldest key holds
//! the lock, and every other contender waits for the deletion of its predecessor, so that a release wakes
//! one waiter. The holder publishes itself at `cluster:locks/{name}`. When the lease of a failed holder
//! expires, both keys are deleted.
//!
//! A lock alone does not exclude a paused holder, which does not know that its lease has expired. Check
//! [`LockGuard::is_valid`] before each use and pass [`LockGuard::fencing_token`] to the resource.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::{self, Backoff};
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::held_key;
use crate::keys;
use crate::metrics::seconds;
use crate::repository::{Compare, Entry, RepositoryError, Txn, TxnOutcome};
use crate::session::{Session, SessionEnd};

/// How long the store may be unavailable while a contender enqueues.
const STORE_TIMEOUT: Duration = Duration::from_secs(3600);

/// A failed lock operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The wait timed out.
    #[error("the lock {0} was not free in time")]
    Timeout(String),
    /// The name is empty.
    #[error("a lock needs a name")]
    NoName,
    /// The lock was lost before its release: another holder may have it.
    #[error("the lock {name} was lost: {reason}")]
    Lost {
        /// Name of the lock.
        name: String,
        /// Reason of the loss.
        reason: SessionEnd,
    },
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// Value of `cluster:locks/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LockRecord {
    /// Node id of the holder.
    pub owner_node_id: String,
    /// Minimum lease deadline, by the holder's wall clock at acquisition. Informational: the lease decides.
    pub lease_until: i64,
    /// Free text of the holder.
    #[serde(default)]
    pub meta: String,
}

/// Options of an acquisition.
#[derive(Clone, Debug)]
pub struct LockOptions {
    /// Lease TTL: how long the lock outlives a failed holder.
    pub ttl: Duration,
    /// Maximum wait; `None` waits without limit, zero tries once.
    pub wait: Option<Duration>,
    /// Free text, published with the holder.
    pub meta: String,
}

impl Default for LockOptions {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(5), wait: None, meta: String::new() }
    }
}

/// The locks of a cluster. Cheap to clone.
#[derive(Clone)]
pub struct Locks {
    context: Context,
}

impl Locks {
    /// Locks in the context's store.
    pub fn new(context: &Context) -> Self {
        Self { context: context.clone() }
    }

    /// Acquires a lock. Dropping the future leaves the queue.
    pub async fn acquire(&self, name: &str, options: LockOptions) -> Result<LockGuard, LockError> {
        if name.is_empty() {
            return Err(LockError::NoName);
        }
        let requested = self.context.clock.monotonic_ns();
        let limit = options.wait.map_or(STORE_TIMEOUT, |wait| wait.max(Duration::from_millis(1)));
        let once = options.wait.is_some_and(|wait| wait.is_zero());
        let contending = self.contend(name, &options, once);
        let guard = if once {
            contending.await?
        } else if options.wait.is_some() {
            let waited = tokio::time::timeout(limit, contending).await;
            waited.unwrap_or_else(|_| Err(LockError::Timeout(name.to_owned())))?
        } else {
            contending.await?
        };
        let waited = self.context.clock.monotonic_ns().saturating_sub(requested);
        self.context.metrics.lock_wait_time.observe(seconds(waited));
        Ok(guard)
    }

    /// The current holder of a lock.
    pub async fn holder(&self, name: &str) -> Result<Option<LockRecord>, RepositoryError> {
        let entry = self.context.repository.get(&keys::lock(name)).await?;
        Ok(entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()))
    }

    /// Number of holders and waiters of a lock.
    pub async fn queue_length(&self, name: &str) -> Result<usize, RepositoryError> {
        Ok(self.context.repository.list(&keys::lock_queue(name)).await?.1.len())
    }

    async fn contend(&self, name: &str, options: &LockOptions, once: bool) -> Result<LockGuard, LockError> {
        let mut backoff = Backoff::default();
        loop {
            let session = match Session::open(&self.context, options.ttl).await {
                Ok(session) => session,
                Err(error) if error.is_retryable() && !once => {
                    backoff.pause().await;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            // A waiter whose lease expired while the store was unavailable enqueues again at the end.
            match self.contend_once(name, options, once, session).await {
                Err(LockError::Lost { .. }) if !once => backoff.pause().await,
                Err(LockError::Store(error)) if error.is_retryable() && !once => backoff.pause().await,
                done => return done,
            }
        }
    }

    async fn contend_once(
        &self,
        name: &str,
        options: &LockOptions,
        once: bool,
        session: Session,
    ) -> Result<LockGuard, LockError> {
        let lost = |reason| LockError::Lost { name: name.to_owned(), reason };
        let queue = keys::lock_queue(name);
        let own = format!("{queue}{}", session.lease());
        let token = self.enqueue(&own, &session).await?;
        let mut waited = false;
        loop {
            let listed = tokio::select! {
                biased;
                end = session.lost() => return Err(lost(end)),
                listed = backoff::read(STORE_TIMEOUT, || self.context.repository.list(&queue)) => listed?.1,
            };
            if !listed.iter().any(|entry| entry.key == own && entry.create_revision == token) {
                return Err(lost(SessionEnd::Taken("the place in the queue was deleted".to_owned())));
            }
            let before = listed.iter().filter(|entry| entry.create_revision < token);
            let Some(before) = before.max_by_key(|entry| entry.create_revision) else { break };
            // Count contention once, with or without a wait.
            if !std::mem::replace(&mut waited, true) {
                self.context.metrics.lock_waits.inc();
            }
            if once {
                let _ = session.close().await;
                return Err(LockError::Timeout(name.to_owned()));
            }
            tokio::select! {
                biased;
                end = session.lost() => return Err(lost(end)),
                () = held_key::wait_until_replaced(&*self.context.repository, &before.key, before.create_revision) => {}
            }
        }
        self.publish_holder(name, options, &own, token, &session).await?;
        Ok(self.guard(name, own, token, session))
    }

    /// Enqueues; returns the create revision of the queue key.
    async fn enqueue(&self, own: &str, session: &Session) -> Result<i64, RepositoryError> {
        let value = self.context.node_id.to_string();
        let mut backoff = Backoff::default();
        loop {
            let txn = Txn::new().when(Compare::Absent(own.to_owned())).put_leased(
                own,
                value.clone(),
                session.lease(),
            );
            match self.context.repository.txn(txn).await {
                Ok(TxnOutcome::Done { revision }) => return Ok(revision),
                // Only this session has this lease: enqueued by an earlier attempt whose reply was lost.
                Ok(TxnOutcome::Conflict { current, .. }) => {
                    if let Some(Some(Entry { create_revision, .. })) = current.first() {
                        return Ok(*create_revision);
                    }
                }
                Err(error) if error.is_retryable() && session.is_valid() => backoff.pause().await,
                Err(error) => return Err(error),
            }
        }
    }

    /// Publishes the holder, if its queue key still is the first.
    async fn publish_holder(
        &self,
        name: &str,
        options: &LockOptions,
        own: &str,
        token: i64,
        session: &Session,
    ) -> Result<(), RepositoryError> {
        let ttl_ms = i64::try_from(session.ttl().as_millis()).unwrap_or(i64::MAX);
        let record = LockRecord {
            owner_node_id: self.context.node_id.to_string(),
            lease_until: self.context.clock.wall_ms().saturating_add(ttl_ms),
            meta: options.meta.clone(),
        };
        let value = serde_json::to_vec(&record).expect("plain fields serialize to JSON");
        let txn = Txn::new().when(Compare::CreateRevision(own.to_owned(), token)).put_leased(
            keys::lock(name),
            value,
            session.lease(),
        );
        // The queue decides; a failure to publish the holder is no reason to release the lock.
        match self.context.repository.txn(txn).await {
            Err(error) if error.is_retryable() => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Ok(()),
        }
    }

    fn guard(&self, name: &str, own: String, token: i64, session: Session) -> LockGuard {
        let (context, lost_name) = (self.context.clone(), name.to_owned());
        held_key::monitor(&self.context, &session, own.clone(), token, move |reason| {
            context.metrics.locks_lost.inc();
            context.events.publish(ClusterEvent::LockLost { name: lost_name, reason: reason.to_owned() });
        });
        self.context.metrics.locks_held.inc();
        LockGuard { name: name.into(), key: own, token, session, context: self.context.clone() }
    }
}

/// A held lock. Dropping it releases the lock without reporting the result.
pub struct LockGuard {
    name: Arc<str>,
    key: String,
    token: i64,
    session: Session,
    context: Context,
}

impl LockGuard {
    /// Name of the lock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fencing token, larger than that of every previous holder. A resource must reject a token smaller than
    /// one it has seen.
    pub fn fencing_token(&self) -> i64 {
        self.token
    }

    /// True while the lock is held. Checks the clock, so it is correct also after a process pause.
    pub fn is_valid(&self) -> bool {
        self.session.is_valid()
    }

    /// Remaining validity without another renewal.
    pub fn time_left(&self) -> Duration {
        self.session.time_left()
    }

    /// Returns when the lock is lost. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.session.lost().await
    }

    /// The comparison that makes a transaction on the store fail once the lock is lost.
    pub fn fence(&self) -> Compare {
        Compare::CreateRevision(self.key.clone(), self.token)
    }

    /// Releases the lock. An error means that the lock was lost before, or may persist until its lease
    /// expires.
    pub async fn release(self) -> Result<(), LockError> {
        match self.session.ended() {
            None => Ok(self.session.close().await?),
            Some(reason) => Err(LockError::Lost { name: self.name.to_string(), reason }),
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.context.metrics.locks_held.dec();
    }
}

impl std::fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LockGuard({}, {})", self.name, self.token)
    }
}

#[cfg(test)]
mod tests;
