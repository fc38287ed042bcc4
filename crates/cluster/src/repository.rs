//! The interface every store of cluster metadata has, whatever keeps it.
//!
//! The meaning is etcd's: one revision counter for the whole store, a create and a mod revision per key,
//! transactions that compare several keys and then change several keys at one revision, leases whose end
//! deletes their keys, and watches from a revision on. What a caller reads is durable: no answer, a conflict
//! included, reveals a change that a crash could take back.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;

/// A future behind a pointer, so that the repository can be a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The largest number of comparisons, or of changes, in one transaction: etcd's default.
pub const MAX_TXN_OPS: usize = 128;
/// The largest transaction in bytes of keys and values: etcd's default.
pub const MAX_TXN_BYTES: usize = 1_572_864;

/// The name of a lease. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId(pub i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A lease as it was granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// How long it lives without being kept alive. A backend may grant more than was asked for.
    pub ttl: Duration,
}

/// A key and what is known about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// What it holds.
    pub value: Bytes,
    /// The revision at which the key appeared.
    pub create_revision: i64,
    /// The revision of its last change. Never less than the create revision.
    pub mod_revision: i64,
    /// How often it was put since it appeared, from 1.
    pub version: i64,
    /// The lease that takes the key away when it ends.
    pub lease: Option<LeaseId>,
}

/// What a compare-and-swap expects to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// No such key.
    Absent,
    /// The key with this mod revision.
    Revision(i64),
    /// Anything, also nothing.
    Any,
}

/// How a compare-and-swap ended. Both ends are answers; neither is an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// It happened, at this revision of the store.
    Done {
        /// The revision after the change.
        revision: i64,
    },
    /// Something else was found.
    Conflict {
        /// What was found.
        current: Option<Entry>,
    },
}

/// A condition on one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Compare {
    /// The key does not exist.
    Absent(String),
    /// The key exists.
    Present(String),
    /// The key exists and was last changed at this revision.
    ModRevision(String, i64),
    /// The key exists and appeared at this revision: it is the same incarnation.
    CreateRevision(String, i64),
    /// The key exists and holds exactly this.
    Value(String, Bytes),
}

impl Compare {
    /// The key it looks at.
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
    /// The key holds this from now on. Without a lease it is let go by the lease it had.
    Put {
        /// The key.
        key: String,
        /// The value.
        value: Bytes,
        /// The lease that will take the key away.
        lease: Option<LeaseId>,
    },
    /// The key is gone. Deleting what is not there changes nothing.
    Delete {
        /// The key.
        key: String,
    },
}

impl Op {
    /// The key it changes.
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// Changes that happen together, at one revision, if every comparison holds.
///
/// A key may be changed once per transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Txn {
    /// All must hold.
    pub compares: Vec<Compare>,
    /// All happen, or none.
    pub ops: Vec<Op>,
}

impl Txn {
    /// A transaction that compares nothing and changes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a condition.
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

/// How a transaction ended. Both ends are answers; neither is an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOutcome {
    /// Every comparison held.
    Done {
        /// The store's revision after the changes; unchanged when nothing was to be done.
        revision: i64,
    },
    /// A comparison did not hold and nothing was changed.
    Conflict {
        /// The store's revision at the comparison.
        revision: i64,
        /// What each comparison found, in the order of the comparisons.
        current: Vec<Option<Entry>>,
    },
}

/// One change of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The key has this entry from now on.
    Put(Entry),
    /// The key is gone.
    Delete {
        /// The key.
        key: String,
        /// The revision at which it went.
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

/// Why a watch ended: changes are missing. List again and watch from the revision after the listing's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchGap {
    /// The watcher was too slow for its buffer.
    #[error("the watcher fell behind at revision {revision}")]
    Lagged {
        /// The first revision that was not delivered whole.
        revision: i64,
    },
    /// The history it asked for is no longer kept.
    #[error("history before revision {oldest} is gone")]
    Compacted {
        /// The oldest revision that can still be watched from.
        oldest: i64,
    },
}

/// The changes under a prefix, in the order of their revisions.
///
/// A gap is an item; after it, and when the repository is gone, the stream ends. Dropping it ends the watch.
pub struct Watch(Pin<Box<dyn Stream<Item = Result<Event, WatchGap>> + Send>>);

impl Watch {
    /// A watch that delivers what this stream does.
    pub fn new(stream: impl Stream<Item = Result<Event, WatchGap>> + Send + 'static) -> Self {
        Self(Box::pin(stream))
    }

    /// The next change. Cancel-safe.
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

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    /// The lease was never granted, was revoked, or has ended.
    #[error("lease {0} does not exist")]
    LeaseNotFound(LeaseId),
    /// The transaction cannot be carried out by any backend.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// The store refuses changes for now, for example because its disk is full. Nothing was changed.
    #[error("the store takes no changes now: {0}")]
    Unavailable(String),
    /// The change may or may not happen. Read before doing it again.
    #[error("no answer in time: the change may or may not happen")]
    Unknown,
    /// What was stored cannot be read.
    #[error("the store is damaged: {0}")]
    Damaged(String),
}

impl RepositoryError {
    /// Whether the same request may succeed later. After [`RepositoryError::Unknown`] read first.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unavailable(_) | Self::Unknown => true,
            Self::LeaseNotFound(_) | Self::Invalid(_) | Self::Damaged(_) => false,
        }
    }
}

/// A store of keys, leases and watches.
///
/// Reads are linearizable: they see every change whose answer was given before they began. No method is
/// cancel-safe in the sense of undoing: a change whose future is dropped may happen or not, as after
/// [`RepositoryError::Unknown`]. Reads may be dropped freely.
pub trait StateRepository: Send + Sync + 'static {
    /// The entry of a key.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>>;

    /// Every entry whose key starts with `prefix`, in key order, and the revision they were read at: a watch
    /// from the revision after it misses nothing.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>>;

    /// Compares and changes several keys at one revision.
    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>>;

    /// A lease that ends when it is not kept alive for `ttl`.
    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>>;

    /// Gives a lease its whole time again, and says how long that is.
    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>>;

    /// Ends a lease and deletes its keys, at one revision.
    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>>;

    /// The changes under `prefix` at `from_revision` and after; 0 means: those after this call.
    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>>;

    /// Puts (`Some`) or deletes (`None`) one key if it is as expected.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_retryable() {
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
