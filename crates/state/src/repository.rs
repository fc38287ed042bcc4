//! The state repository: the interface of every store of cluster metadata.
//!
//! Semantics are those of etcd: one revision counter for the whole store, a create and a mod revision per
//! key, transactions that compare several keys and then change several keys at one revision, leases whose
//! expiry deletes their keys, and watches from a revision on. Everything a caller reads is durable: no
//! reply, a conflict included, reveals a change that a crash could revert.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;

/// A boxed future, so that the repository can be a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Maximum number of comparisons, or of changes, in one transaction: etcd's default.
pub const MAX_TXN_OPS: usize = 128;
/// Maximum transaction size in bytes of keys and values: etcd's default.
pub const MAX_TXN_BYTES: usize = 1_572_864;

/// Lease id. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A granted lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Lease id.
    pub id: LeaseId,
    /// TTL without renewal. A backend may grant more than was requested.
    pub ttl: Duration,
}

/// A key-value pair with its revisions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Bytes,
    /// Revision at which the key was created.
    pub create_revision: i64,
    /// Revision of its last change. Never less than the create revision.
    pub mod_revision: i64,
    /// Number of puts since its creation, from 1.
    pub version: i64,
    /// The lease whose expiry deletes the key.
    pub lease: Option<LeaseId>,
}

/// Precondition of a compare-and-swap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key has this mod revision.
    Revision(i64),
    /// No precondition.
    Any,
}

/// Result of a compare-and-swap. Both variants are replies; neither is an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// The change was applied.
    Done {
        /// Revision of the change.
        revision: i64,
    },
    /// The precondition did not hold.
    Conflict {
        /// The current entry.
        current: Option<Entry>,
    },
}

/// A comparison on one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Compare {
    /// The key does not exist.
    Absent(String),
    /// The key exists.
    Present(String),
    /// The key exists and was last changed at this revision.
    ModRevision(String, i64),
    /// The key exists and was created at this revision: it is the same incarnation.
    CreateRevision(String, i64),
    /// The key exists and has exactly this value.
    Value(String, Bytes),
}

impl Compare {
    /// The compared key.
    pub fn key(&self) -> &str {
        match self {
            Self::Absent(key)
            | Self::Present(key)
            | Self::ModRevision(key, _)
            | Self::CreateRevision(key, _)
            | Self::Value(key, _) => key,
        }
    }
}

/// A change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Writes the value. Without a lease the key is detached from its previous lease.
    Put {
        /// The key.
        key: String,
        /// The value.
        value: Bytes,
        /// The lease whose expiry deletes the key.
        lease: Option<LeaseId>,
    },
    /// Deletes the key. Deleting a missing key changes nothing.
    Delete {
        /// The key.
        key: String,
    },
}

impl Op {
    /// The changed key.
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// Changes applied atomically, at one revision, if every comparison holds.
///
/// A key may be changed once per transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Txn {
    /// All comparisons must hold.
    pub compares: Vec<Compare>,
    /// All changes are applied, or none.
    pub ops: Vec<Op>,
}

impl Txn {
    /// A transaction that compares nothing and changes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a comparison.
    #[must_use]
    pub fn when(mut self, compare: Compare) -> Self {
        self.compares.push(compare);
        self
    }

    /// Adds a put without a lease.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.ops.push(Op::Put { key: key.into(), value: value.into(), lease: None });
        self
    }

    /// Adds a put under a lease.
    #[must_use]
    pub fn put_leased(mut self, key: impl Into<String>, value: impl Into<Bytes>, lease: LeaseId) -> Self {
        self.ops.push(Op::Put { key: key.into(), value: value.into(), lease: Some(lease) });
        self
    }

    /// Adds a deletion.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.ops.push(Op::Delete { key: key.into() });
        self
    }
}

/// Result of a transaction. Both variants are replies; neither is an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOutcome {
    /// Every comparison held.
    Done {
        /// The store's revision after the changes; unchanged for a transaction without effect.
        revision: i64,
    },
    /// A comparison did not hold and nothing was changed.
    Conflict {
        /// The store's revision at the comparison.
        revision: i64,
        /// The current entry of each compared key, in the order of the comparisons.
        current: Vec<Option<Entry>>,
    },
}

/// One change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The key was put.
    Put(Entry),
    /// The key was deleted.
    Delete {
        /// The key.
        key: String,
        /// Revision of the deletion.
        revision: i64,
    },
}

impl Event {
    /// The revision of the change.
    pub fn revision(&self) -> i64 {
        match self {
            Self::Put(entry) => entry.mod_revision,
            Self::Delete { revision, .. } => *revision,
        }
    }

    /// The key that changed.
    pub fn key(&self) -> &str {
        match self {
            Self::Put(entry) => &entry.key,
            Self::Delete { key, .. } => key,
        }
    }
}

/// End of a watch with missing events. List again and watch from the revision after the list's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchGap {
    /// The watcher lagged behind its buffer.
    #[error("the watcher fell behind at revision {revision}")]
    Lagged {
        /// The first revision that was not delivered completely.
        revision: i64,
    },
    /// The requested history has been compacted.
    #[error("history before revision {oldest} has been compacted")]
    Compacted {
        /// The oldest revision that can still be watched.
        oldest: i64,
    },
}

/// The events under a prefix, in revision order.
///
/// A gap is an item; after it, and when the repository is closed, the stream ends. Dropping it ends the
/// watch.
pub struct Watch(Pin<Box<dyn Stream<Item = Result<Event, WatchGap>> + Send>>);

impl Watch {
    /// A watch that delivers the items of this stream.
    pub fn new(stream: impl Stream<Item = Result<Event, WatchGap>> + Send + 'static) -> Self {
        Self(Box::pin(stream))
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Event, WatchGap>> {
        std::future::poll_fn(|context| self.0.as_mut().poll_next(context)).await
    }
}

impl Stream for Watch {
    type Item = Result<Event, WatchGap>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(context)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

/// A failed request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    /// The lease was never granted, was revoked, or has expired.
    #[error("lease {0} does not exist")]
    LeaseNotFound(LeaseId),
    /// No backend can carry out the transaction.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// The store rejects changes for now, for example because its disk is full. Nothing was changed.
    #[error("the store takes no changes now: {0}")]
    Unavailable(String),
    /// The outcome of the change is unknown. Read before a retry.
    #[error("no answer in time: the change may or may not happen")]
    Unknown,
    /// The stored data cannot be decoded.
    #[error("the store is damaged: {0}")]
    Damaged(String),
}

impl RepositoryError {
    /// True if the same request may succeed later. After [`RepositoryError::Unknown`] read first.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unavailable(_) | Self::Unknown => true,
            Self::LeaseNotFound(_) | Self::Invalid(_) | Self::Damaged(_) => false,
        }
    }
}

/// A store of keys, leases and watches.
///
/// Reads are linearizable: they see every change that was acknowledged before they started. No method is
/// cancel-safe in the sense of undoing: a change whose future is dropped has an unknown outcome, as after
/// [`RepositoryError::Unknown`]. Reads may be dropped freely.
pub trait StateRepository: Send + Sync + 'static {
    /// The entry of a key.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>>;

    /// All entries with the prefix, in key order, and the revision of the read: a watch from the next
    /// revision misses nothing.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>>;

    /// Compares and changes several keys at one revision.
    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>>;

    /// Grants a lease that expires when it is not renewed for `ttl`.
    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>>;

    /// Renews a lease for its full TTL, and returns the TTL.
    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>>;

    /// Revokes a lease and deletes its keys, at one revision.
    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>>;

    /// The events under `prefix` from `from_revision` on; 0 means events after this call.
    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>>;

    /// Puts (`Some`) or deletes (`None`) one key if the precondition holds.
    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Expect,
        new: Option<Bytes>,
        lease: Option<LeaseId>,
    ) -> BoxFuture<'a, Result<Swap, RepositoryError>> {
        let compares = match expected {
            Expect::Absent => vec![Compare::Absent(key.to_owned())],
            Expect::Revision(revision) => vec![Compare::ModRevision(key.to_owned(), revision)],
            Expect::Any => Vec::new(),
        };
        let op = match new {
            Some(value) => Op::Put { key: key.to_owned(), value, lease },
            None => Op::Delete { key: key.to_owned() },
        };
        let txn = Txn { compares, ops: vec![op] };
        Box::pin(async move {
            Ok(match self.txn(txn).await? {
                TxnOutcome::Done { revision } => Swap::Done { revision },
                TxnOutcome::Conflict { mut current, .. } => {
                    Swap::Conflict { current: current.pop().flatten() }
                }
            })
        })
    }
}

/// The end of the range of all keys that start with `prefix`; for an empty prefix, of all keys.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

/// The first key and the end of the range of all keys that start with `prefix`.
pub fn prefix_range(prefix: &[u8]) -> (Vec<u8>, Vec<u8>) {
    // No key is empty; a single zero byte is the first possible key.
    let start = if prefix.is_empty() { vec![0] } else { prefix.to_vec() };
    (start, prefix_end(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_errors_are_retryable() {
        let cases = [
            (RepositoryError::Unavailable("disk full".into()), true),
            (RepositoryError::Unknown, true),
            (RepositoryError::LeaseNotFound(LeaseId(1)), false),
            (RepositoryError::Invalid("x".into()), false),
            (RepositoryError::Damaged("x".into()), false),
        ];
        for (error, expected) in cases {
            assert_eq!(error.is_retryable(), expected, "{error}");
        }
    }
}
