//! What the backends of one process share: the state, its leases and its watchers around a log.
//!
//! A change is decided, logged, applied and acknowledged, in this order, and acknowledged only when the log is
//! durable past it. The state runs ahead of the disk, so that changes that wait together share one sync; in
//! return every answer, a read's and a conflict's too, waits until all that the state knew when it was made is
//! durable. On an idle store that is no wait at all.
//!
//! Locks: `core` may be held while the log takes an append; the log's notification therefore never takes it
//! (it goes to the feed). Nothing holds a lock across an await.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::Clock;
use tokio::sync::Notify;

use crate::repository::{
    BoxFuture, Entry, Lease, LeaseId, Op, RepositoryError, StateRepository, Txn, TxnOutcome, Watch,
};

mod feed;
mod leases;
pub mod record;
pub mod state;

use feed::Feed;
use leases::Deadlines;
use state::{Record, State};

/// How long an answer waits for the disk before its outcome counts as unknown.
const DURABLE_WAIT_MS: u64 = 30_000;
/// How often a waiting answer looks for itself, in case nobody calls [`Engine::on_durable`].
const DURABLE_POLL: Duration = Duration::from_millis(5);
/// The shortest lease: below this a busy machine would lose leases it keeps alive.
const MIN_TTL: Duration = Duration::from_millis(100);
/// The longest lease; as in etcd, longer ones are refused.
const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);

/// Where decisions are kept. Positions only grow; the log is durable up to `durable_end`.
pub trait Log: Send + Sync + 'static {
    /// Takes a record. On an error nothing was taken.
    fn append(&self, record: &Record) -> Result<(), RepositoryError>;
    /// Told after each record was applied: the moment for a snapshot. Called in log order.
    fn on_applied(&self, state: &State);
    /// The position after the last record taken.
    fn end(&self) -> i64;
    /// The position up to which records survive a crash.
    fn durable_end(&self) -> i64;
    /// Called without locks held, now and then: the moment to drop what a durable snapshot replaces.
    fn maybe_trim(&self);
}

/// A repository around a log.
pub struct Engine<L> {
    core: Mutex<Core>,
    feed: Feed,
    log: L,
    clock: Arc<dyn Clock>,
    durable: Notify,
}

struct Core {
    state: State,
    deadlines: Deadlines,
}

impl<L: Log> Engine<L> {
    /// A repository that goes on from `state`. Its leases start with their whole time.
    pub(crate) fn with(state: State, log: L, clock: Arc<dyn Clock>) -> Self {
        let mut deadlines = Deadlines::default();
        let now_ms = clock.monotonic_ms();
        for (id, ttl_ms) in state.leases() {
            deadlines.on_grant(id, ttl_ms, now_ms);
        }
        let feed = Feed::new(state.revision());
        Self { core: Mutex::new(Core { state, deadlines }), feed, log, clock, durable: Notify::new() }
    }

    /// Ends the leases whose time is over and shows watchers what has become durable. Call it a few times a second:
    /// nothing else watches the clock.
    pub fn tick(&self) -> Result<(), RepositoryError> {
        let now_ms = self.clock.monotonic_ms();
        let due = self.lock().deadlines.due(now_ms);
        for id in due {
            let mut core = self.lock();
            if core.deadlines.is_alive(id, now_ms) {
                continue; // kept alive since we looked
            }
            match core.state.decide_revoke(id) {
                Ok(record) => {
                    self.commit(&mut core, &record)?;
                }
                Err(_) => core.deadlines.on_revoke(id), // somebody else revoked it
            }
        }
        self.publish();
        Ok(())
    }

    /// The log is durable up to `durable_end`: publishes what waited for it. For the disk's notification: takes
    /// no lock that is held during an append, never blocks, and may be called from any thread.
    pub fn on_durable(&self, durable_end: i64) {
        self.feed.publish(durable_end);
        self.durable.notify_waiters();
    }

    /// Where the records are kept.
    #[cfg(test)]
    pub(crate) fn log(&self) -> &L {
        &self.log
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs and applies one decision made on this very state. Returns the log position to wait for.
    fn commit(&self, core: &mut Core, record: &Record) -> Result<i64, RepositoryError> {
        self.log.append(record)?;
        let position = self.log.end();
        let events = core.state.apply(record).expect("a record decided on this very state applies to it");
        match record {
            Record::Grant { id, ttl_ms } => core.deadlines.on_grant(*id, *ttl_ms, self.clock.monotonic_ms()),
            Record::Revoke { id } => core.deadlines.on_revoke(*id),
            Record::Change { .. } => {}
        }
        self.feed.push(position, events);
        self.log.on_applied(&core.state);
        Ok(position)
    }

    /// Publishes what is durable already: the notification may have come before the events were pushed.
    fn publish(&self) {
        self.feed.publish(self.log.durable_end());
    }

    /// Waits until the log is durable up to `position`.
    async fn settle(&self, position: i64) -> Result<(), RepositoryError> {
        if self.log.durable_end() < position {
            let start_ms = self.clock.monotonic_ms();
            loop {
                let notified = self.durable.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.log.durable_end() >= position {
                    break;
                }
                if self.clock.monotonic_ms().saturating_sub(start_ms) >= DURABLE_WAIT_MS {
                    return Err(RepositoryError::Unknown);
                }
                // Either way the loop looks for itself.
                let _ = tokio::time::timeout(DURABLE_POLL, notified).await;
            }
        }
        self.publish();
        self.log.maybe_trim();
        Ok(())
    }

    /// Reads under the lock; the answer may leave once all that the state knew is durable.
    async fn read<T>(&self, look: impl FnOnce(&State) -> T) -> Result<T, RepositoryError> {
        let (answer, position) = {
            let core = self.lock();
            (look(&core.state), self.log.end())
        };
        self.settle(position).await?;
        Ok(answer)
    }

    fn decide_txn(&self, txn: Txn) -> Result<(TxnOutcome, i64), RepositoryError> {
        let mut core = self.lock();
        let now_ms = self.clock.monotonic_ms();
        for op in &txn.ops {
            // A lease whose time is over is gone, whether or not its end was noticed yet.
            if let Op::Put { lease: Some(id), .. } = op
                && !core.deadlines.is_alive(*id, now_ms)
            {
                return Err(RepositoryError::LeaseNotFound(*id));
            }
        }
        let (record, outcome) = core.state.decide_txn(txn)?;
        if let Some(record) = record {
            self.commit(&mut core, &record)?;
        }
        // A conflict reveals what it found, so it waits like a change does.
        Ok((outcome, self.log.end()))
    }
}

impl<L: Log> StateRepository for Engine<L> {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(self.read(move |state| state.get(key).cloned()))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(self.read(move |state| (state.revision(), state.list(prefix).cloned().collect())))
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            let (outcome, position) = self.decide_txn(txn)?;
            self.settle(position).await?;
            Ok(outcome)
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            if ttl > MAX_TTL {
                return Err(RepositoryError::Invalid("the lease is too long".to_owned()));
            }
            let ttl = ttl.max(MIN_TTL);
            let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
            let (id, position) = {
                let mut core = self.lock();
                let (id, record) = core.state.decide_grant(ttl_ms);
                (id, self.commit(&mut core, &record)?)
            };
            self.settle(position).await?;
            Ok(Lease { id, ttl: Duration::from_millis(ttl_ms) })
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            let now_ms = self.clock.monotonic_ms();
            let ttl_ms = self.lock().deadlines.keep_alive(lease, now_ms);
            ttl_ms.map(Duration::from_millis).ok_or(RepositoryError::LeaseNotFound(lease))
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            let position = {
                let mut core = self.lock();
                let record = core.state.decide_revoke(lease)?;
                self.commit(&mut core, &record)?
            };
            self.settle(position).await
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            self.publish();
            Ok(self.feed.watch(prefix, from_revision))
        })
    }
}
