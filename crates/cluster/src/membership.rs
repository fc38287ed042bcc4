//! Cluster membership: the members and their status.
//!
//! A member writes its record `cluster:nodes/{id}` under a lease of twice the heartbeat timeout and rewrites
//! it with every heartbeat. Every observer derives the status from its *own* clock and the time at which it
//! last saw a change: wall clocks of different nodes are never compared.
//!
//! ```text
//!            heartbeat                       heartbeat
//!        ┌────────────────┐            ┌──────────────────┐
//!        ▼    silent for  │            ▼                  │
//!       UP ───────────────▶ SUSPECT ── DOWN (silent for twice the timeout, or its lease expired)
//!        └── leave ──▶ LEFT
//! ```
//!
//! The status is for monitoring and alerts only. Ownership never moves because of it: it moves when a lease
//! has expired at the store, or by a decision of Kafka or Raft.
//!
//! Two processes with one id: the later process waits until the lease of the record has expired at the
//! store, and is rejected when the record changes meanwhile or its lease is still renewed. The earlier
//! process stops by its own clock before its lease expires, so two processes are never valid under one id.

mod view;

use std::collections::BTreeMap;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use self::view::{MemberEvent, MemberStatus, MemberStream, MemberView, Monitor};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::keys;
use crate::metrics::seconds;
use crate::repository::{Compare, Entry, RepositoryError, Txn, TxnOutcome};
use crate::session::{Session, SessionEnd};

/// Description of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeInfo {
    /// Node id.
    pub id: String,
    /// Host.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Roles.
    pub roles: Vec<String>,
    /// Zone (failure domain).
    pub zone: String,
    /// Region.
    pub region: String,
    /// Software version.
    pub version: String,
    /// Additional metadata.
    pub metadata: BTreeMap<String, String>,
}

/// A member record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeRecord {
    /// Description of the node.
    #[serde(flatten)]
    pub info: NodeInfo,
    /// Status at the time of the write: UP or LEFT.
    pub status: MemberStatus,
    /// Time of the write, by its wall clock. Informational.
    pub last_heartbeat: i64,
    /// Process incarnation: two processes with one id differ in it.
    pub incarnation: u64,
    /// Heartbeat sequence number.
    pub sequence: u64,
}

impl NodeRecord {
    pub(crate) fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain fields serialize to JSON").into()
    }
}

/// Heartbeats of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatOptions {
    /// Interval between two heartbeats.
    pub interval: Duration,
    /// Silence after which a member is suspect; after twice as long it is down.
    pub timeout: Duration,
}

impl Default for HeartbeatOptions {
    fn default() -> Self {
        Self { interval: Duration::from_millis(300), timeout: Duration::from_millis(900) }
    }
}

/// A failed membership join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Another live process has this id.
    #[error("another process is {id} already, at {address}")]
    DuplicateNode {
        /// The id.
        id: String,
        /// Address of the other process.
        address: String,
    },
    /// The id is empty or contains a slash.
    #[error("{0:?} cannot be a node's id")]
    BadId(String),
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// This node's membership. Dropping it stops the heartbeats; [`leave`](Self::leave) leaves gracefully.
pub struct Membership {
    context: Context,
    session: Session,
    created: i64,
    record: NodeRecord,
    beats: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl Membership {
    /// Joins the cluster: the record is written when this returns.
    pub async fn join(
        context: &Context,
        info: NodeInfo,
        options: &HeartbeatOptions,
    ) -> Result<Self, JoinError> {
        if info.id.is_empty() || info.id.contains('/') {
            return Err(JoinError::BadId(info.id));
        }
        let mut record = NodeRecord {
            info,
            status: MemberStatus::Up,
            last_heartbeat: context.clock.wall_ms(),
            incarnation: fastrand::u64(1..),
            sequence: 0,
        };
        let key = keys::node(&record.info.id);
        let mut backoff = Backoff::default();
        let (session, created) = loop {
            let session = Session::open(context, options.timeout * 2).await?;
            record.last_heartbeat = context.clock.wall_ms();
            let txn = Txn::new().when(Compare::Absent(key.clone())).put_leased(
                &key,
                record.to_bytes(),
                session.lease(),
            );
            match context.repository.txn(txn).await {
                Ok(TxnOutcome::Done { revision }) => break (session, revision),
                Ok(TxnOutcome::Conflict { mut current, .. }) => match current.pop().flatten() {
                    Some(found) if found.lease == Some(session.lease()) => {
                        break (session, found.create_revision);
                    }
                    Some(found) => await_expiry(context, &key, found, options.timeout).await?,
                    None => {}
                },
                Err(error) if error.is_retryable() && backoff.failures() < 10 => backoff.pause().await,
                Err(error) => return Err(error.into()),
            }
        };
        let beats = Heartbeats {
            context: context.clone(),
            session: session.clone(),
            created,
            key,
            record: record.clone(),
            interval: options.interval,
        };
        let stop = context.scope.shutdown().clone();
        let beats = context.scope.spawn("cluster heartbeats", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = beats.run() => {}
            }
        });
        Ok(Self { context: context.clone(), session, created, record, beats: Mutex::new(Some(beats)) })
    }

    /// Description of this node.
    pub fn info(&self) -> &NodeInfo {
        &self.record.info
    }

    /// True while this node is a member, by its own clock.
    pub fn is_valid(&self) -> bool {
        self.session.is_valid()
    }

    /// The session of the member record: everything that this node owns ends with it.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Incarnation of this membership; grows with every restart of the node.
    pub fn epoch(&self) -> i64 {
        self.created
    }

    /// The comparison that makes a transaction fail once this membership has ended.
    pub fn fence(&self) -> Compare {
        Compare::CreateRevision(keys::node(&self.record.info.id), self.created)
    }

    /// Returns when this membership has ended. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.session.lost().await
    }

    /// Leaves gracefully: the record is set to LEFT for the watchers, then deleted with its lease.
    pub async fn leave(&self) -> Result<(), RepositoryError> {
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(beats) = beats {
            beats.abort();
            // Ended or aborted: either way there are no more heartbeats.
            let _ = beats.await;
        }
        // A LEFT record may be replaced immediately: from here on this process owns nothing.
        self.session.retire();
        let mut record = self.record.clone();
        record.status = MemberStatus::Left;
        record.last_heartbeat = self.context.clock.wall_ms();
        record.sequence = u64::MAX;
        let key = keys::node(&record.info.id);
        let txn = Txn::new().when(self.fence()).put_leased(key, record.to_bytes(), self.session.lease());
        // A node whose record is deleted has left already.
        let written = self.context.repository.txn(txn).await;
        let closed = self.session.close().await;
        written?;
        closed
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some(beats) = self.beats.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            beats.abort();
        }
    }
}

/// Returns when the record of an earlier process with this id is deleted; fails while that process is alive.
///
/// Only the lease expiry proves that the earlier process has stopped. A LEFT record was written by a process
/// that had stopped before, and a record without a lease never expires: both are deleted.
async fn await_expiry(
    context: &Context,
    key: &str,
    found: Entry,
    timeout: Duration,
) -> Result<(), JoinError> {
    let started = context.clock.monotonic_ns();
    let waited = || Duration::from_nanos(context.clock.monotonic_ns().saturating_sub(started));
    // A new leader of the store extends every lease by its remaining TTL and an election timeout.
    let (lease, patience) = (timeout * 2, (timeout * 4).max(Duration::from_secs(5)));
    let record: Option<NodeRecord> = serde_json::from_slice(&found.value).ok();
    let has_left = record.as_ref().is_some_and(|record| record.status == MemberStatus::Left);
    loop {
        if has_left {
            break;
        }
        tokio::time::sleep(timeout / 10).await;
        let now = match context.repository.get(key).await {
            Ok(now) => now,
            Err(error) if error.is_retryable() && waited() < patience => continue,
            Err(error) => return Err(error.into()),
        };
        let Some(now) = now else { return Ok(()) };
        if now.mod_revision != found.mod_revision || waited() >= patience {
            let info = serde_json::from_slice::<NodeRecord>(&now.value).unwrap_or_default().info;
            let address = format!("{}:{}", info.host, info.port);
            return Err(JoinError::DuplicateNode { id: info.id, address });
        }
        if found.lease.is_none() && waited() >= lease {
            break;
        }
    }
    let txn = Txn::new().when(Compare::ModRevision(key.to_owned(), found.mod_revision)).delete(key);
    match context.repository.txn(txn).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_retryable() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

struct Heartbeats {
    context: Context,
    session: Session,
    created: i64,
    key: String,
    record: NodeRecord,
    interval: Duration,
}

impl Heartbeats {
    async fn run(mut self) {
        let mut backoff = Backoff::new(self.interval / 10, self.interval);
        let mut pause = self.interval;
        loop {
            tokio::select! {
                biased;
                _ = self.session.lost() => return,
                () = tokio::time::sleep(pause) => {}
            }
            self.record.sequence += 1;
            self.record.last_heartbeat = self.context.clock.wall_ms();
            let sent = self.context.clock.monotonic_ns();
            let txn = Txn::new().when(Compare::CreateRevision(self.key.clone(), self.created)).put_leased(
                &self.key,
                self.record.to_bytes(),
                self.session.lease(),
            );
            pause = match self.context.repository.txn(txn).await {
                Ok(TxnOutcome::Done { .. }) => {
                    let took = self.context.clock.monotonic_ns().saturating_sub(sent);
                    self.context.metrics.heartbeat_delay.observe(seconds(took));
                    backoff.reset();
                    self.interval
                }
                Ok(TxnOutcome::Conflict { .. }) => {
                    let why = "another process replaced this node's record".to_owned();
                    return self.session.end(SessionEnd::Taken(why));
                }
                Err(RepositoryError::LeaseNotFound(_)) => return self.session.end(SessionEnd::Revoked),
                Err(error) => {
                    self.context.metrics.heartbeat_failures.inc();
                    tracing::debug!(%error, "heartbeat write failed");
                    backoff.next_pause()
                }
            };
        }
    }
}

#[cfg(test)]
mod tests;
