//! Leadership: at most one leader at a time, with fencing tokens that distinguish an old leader from a new
//! one.
//!
//! One interface, three implementations:
//!
//! | implementation | leader | token |
//! |---|---|---|
//! | [`CasElection`] | the creator of the key `cluster:leader/{name}` under its lease | the key's create revision |
//! | `groups::RaftElection` (feature `raft`) | the leader of the application's Raft group | the term |
//! | `kafka` (feature `kafka`) | the owner of the partition | the version of its assignment record |
//!
//! A leader must check [`Leadership::is_valid`] before each use, and pass the token to every resource it
//! writes to. The check makes two concurrent leaders unlikely also after a process pause; only the token,
//! checked at the resource, makes them impossible. Writes to the store itself are fenced by
//! [`Leadership::fence`].

mod cas;

use std::sync::Arc;

use tokio::sync::watch;

pub use self::cas::{CasElection, ElectionOptions};
use crate::repository::{BoxFuture, Compare, RepositoryError, Txn};
use crate::session::SessionEnd;

/// A failed election.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElectionError {
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// The process stops.
    #[error("the election has ended: the process stops")]
    Stopped,
}

/// The current leader.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaderInfo {
    /// Node id of the leader.
    pub node_id: String,
    /// Fencing token of its leadership.
    pub fencing_token: i64,
}

/// Leader changes as observed by this node.
#[derive(Clone, Debug)]
pub struct LeaderChanges {
    pub(crate) receiver: watch::Receiver<Option<LeaderInfo>>,
}

impl LeaderChanges {
    /// The last observed leader.
    pub fn current(&self) -> Option<LeaderInfo> {
        self.receiver.borrow().clone()
    }

    /// Returns when the leader changed, or there is none; `None` when the observer has ended. Cancel-safe.
    pub async fn changed(&mut self) -> Option<Option<LeaderInfo>> {
        self.receiver.changed().await.ok()?;
        Some(self.receiver.borrow_and_update().clone())
    }
}

/// An election among several nodes.
pub trait LeaderElection: Send + Sync {
    /// Waits until this node is the leader. Dropping the future cancels the campaign.
    fn campaign(&self) -> BoxFuture<'_, Result<Leadership, ElectionError>>;

    /// Observes the leader. Needs no candidacy.
    fn observe(&self) -> LeaderChanges;
}

/// The mechanism behind a leadership.
pub(crate) trait Standing: Send + Sync {
    fn is_valid(&self) -> bool;
    fn lost(&self) -> BoxFuture<'_, SessionEnd>;
    fn resign(&self) -> BoxFuture<'_, Result<(), ElectionError>>;
    fn fence(&self) -> Compare;
}

/// A leadership of this node, valid while [`is_valid`](Self::is_valid) is true. Dropping it resigns.
pub struct Leadership {
    pub(crate) name: Arc<str>,
    pub(crate) fencing_token: i64,
    pub(crate) standing: Arc<dyn Standing>,
}

impl Leadership {
    /// Name of the election.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fencing token, larger than that of every previous leadership. A resource must reject a token smaller
    /// than one it has seen.
    pub fn fencing_token(&self) -> i64 {
        self.fencing_token
    }

    /// True while this node is the leader. Checks the clock, so it is correct also after a process pause.
    pub fn is_valid(&self) -> bool {
        self.standing.is_valid()
    }

    /// Returns when the leadership is lost, with the reason. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.standing.lost().await
    }

    /// Resigns the leadership immediately.
    pub async fn resign(self) -> Result<(), ElectionError> {
        self.standing.resign().await
    }

    /// The comparison that makes a transaction on the store fail once the leader has changed.
    pub fn fence(&self) -> Compare {
        self.standing.fence()
    }

    /// Adds [`fence`](Self::fence) to a transaction.
    pub fn fenced(&self, txn: Txn) -> Txn {
        txn.when(self.fence())
    }
}

impl std::fmt::Debug for Leadership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leadership({}, {})", self.name, self.fencing_token)
    }
}

#[cfg(test)]
mod tests;
