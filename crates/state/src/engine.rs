//! The in-process engine: state, leases and watchers around a log, shared by the in-process backends.
//!
//! A change is decided, logged, applied and acknowledged, in this order, and acknowledged only when the log
//! is durable past it. The state runs ahead of the disk, so that concurrent changes share one fsync (group
//! commit). In return every reply, also of a read or a conflict, waits until the whole state it was computed
//! from is durable. On an idle store there is no wait.
//!
//! Locks: `core` may be held during a log append; the log's durability notification therefore never takes it
//! (it goes to the feed). No lock is held across an await.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::Clock;
use tokio::sync::Notify;

use crate::repository::{
    BoxFuture, Entry, Lease, LeaseId, Op, RepositoryError, StateRepository, Txn, TxnOutcome, Watch,
};

mod feed;
mod leases;
pub mod state;

use feed::Feed;
use leases::Deadlines;
use state::{Record, State};

/// Timeout of a reply's wait for durability; after it the outcome is unknown.
const DURABLE_WAIT_MS: u64 = 30_000;
/// Poll interval of a waiting reply, in case [`Engine::on_durable`] is not called.
const DURABLE_POLL: Duration = Duration::from_millis(5);
/// Minimum lease TTL: below it a busy machine would lose leases that it renews.
const MIN_TTL: Duration = Duration::from_millis(100);
/// Maximum lease TTL; as in etcd, a longer TTL is rejected.
const MAX_TTL: Duration = Duration::from_secs(9_000_000_000);

/// The log of decisions. Positions only grow; the log is durable up to `durable_end`.
pub trait Log: Send + Sync + 'static {
    /// Appends a record. On an error nothing was appended.
    fn append(&self, record: &Record) -> Result<(), RepositoryError>;
    /// Called after each applied record, in log order: the point for a snapshot.
    fn on_applied(&self, state: &State);
    /// Log end: the position after the last appended record.
    fn end(&self) -> i64;
    /// Durable end: records below it survive a crash.
    fn durable_end(&self) -> i64;
    /// Called periodically without locks held: the point to trim records that a durable snapshot replaces.
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
    /// A repository that continues from `state`. Its leases start with their full TTL.
    pub(crate) fn with(state: State, log: L, clock: Arc<dyn Clock>) -> Self {
        let mut deadlines = Deadlines::default();
        let now_ms = clock.monotonic_ms();
        for (id, ttl_ms) in state.leases() {
            deadlines.on_grant(id, ttl_ms, now_ms);
        }
        let feed = Feed::new(state.revision());
        Self { core: Mutex::new(Core { state, deadlines }), feed, log, clock, durable: Notify::new() }
    }

    /// Expires leases and publishes durable events to watchers. Call it a few times per second: nothing else
    /// checks the clock.
    pub fn tick(&self) -> Result<(), RepositoryError> {
        let now_ms = self.clock.monotonic_ms();
        let due = self.lock().deadlines.due(now_ms);
        for id in due {
            let mut core = self.lock();
            if core.deadlines.is_alive(id, now_ms) {
                continue; // renewed since the check
            }
            match core.state.decide_revoke(id) {
                Ok(record) => {
                    self.commit(&mut core, &record)?;
                }
                Err(_) => core.deadlines.on_revoke(id), // already revoked
            }
        }
        self.publish();
        Ok(())
    }

    /// The log is durable up to `durable_end`: publishes the events up to there. For the disk's
    /// notification: takes no lock that is held during an append, never blocks, and may be called from any
    /// thread.
    pub fn on_durable(&self, durable_end: i64) {
        self.feed.publish(durable_end);
        self.durable.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs and applies one decision made on the current state. Returns the log position to wait for.
    fn commit(&self, core: &mut Core, record: &Record) -> Result<i64, RepositoryError> {
        self.log.append(record)?;
        let position = self.log.end();
        let events = core.state.apply(record).expect("a record decided on the current state applies to it");
        match record {
            Record::Grant { id, ttl_ms } => core.deadlines.on_grant(*id, *ttl_ms, self.clock.monotonic_ms()),
            Record::Revoke { id } => core.deadlines.on_revoke(*id),
            Record::Change { .. } => {}
        }
        self.feed.push(position, events);
        self.log.on_applied(&core.state);
        Ok(position)
    }

    /// Publishes events that are already durable: the notification may have come before the events were
    /// pushed.
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
                // On a notification or a timeout, check the durable end again.
                let _ = tokio::time::timeout(DURABLE_POLL, notified).await;
            }
        }
        self.publish();
        self.log.maybe_trim();
        Ok(())
    }

    /// Reads under the lock; the reply is returned once the state it was read from is durable.
    async fn read<T>(&self, query: impl FnOnce(&State) -> T) -> Result<T, RepositoryError> {
        let (answer, position) = {
            let core = self.lock();
            (query(&core.state), self.log.end())
        };
        self.settle(position).await?;
        Ok(answer)
    }

    fn decide_txn(&self, txn: Txn) -> Result<(TxnOutcome, i64), RepositoryError> {
        let mut core = self.lock();
        let now_ms = self.clock.monotonic_ms();
        for op in &txn.ops {
            // A lease past its deadline is expired, also before the next tick revokes it.
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
        // A conflict returns current entries, so it waits for durability like a change.
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
                return Err(RepositoryError::Invalid("lease TTL too large".to_owned()));
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
