//! Leadership: at most one node does something, and everybody it writes to can tell an old leader from a new one.
//!
//! One interface, three ways to come to it:
//!
//! | way | leads | token |
//! |---|---|---|
//! | [`CasElection`] | whoever created the key `cluster:leader/{name}` under its lease | the key's create revision |
//! | `groups::RaftElection` (feature `raft`) | the leader of the application's Raft group | the term |
//! | `kafka` (feature `kafka`) | the owner of the partition | the version of its assignment record |
//!
//! What a leader must do: look at [`Leadership::is_valid`] before each use, and pass the token to whatever it writes
//! to. The first makes two leaders at a time unlikely also when a process was paused; only the second, checked at the
//! resource, makes them impossible. Writes to the store itself are fenced by [`Leadership::fence`].

mod cas;

use std::sync::Arc;

use tokio::sync::watch;

pub use self::cas::{CasElection, ElectionOptions};
use crate::repository::{BoxFuture, Compare, RepositoryError, Txn};
use crate::session::SessionEnd;

/// Why there is no leadership.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElectionError {
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// The process stops.
    #[error("the election has ended: the process stops")]
    Stopped,
}

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaderInfo {
    /// The node.
    pub node_id: String,
    /// The fencing token of its leadership.
    pub fencing_token: i64,
}

/// Changes of leadership, as far as this node can see.
#[derive(Clone, Debug)]
pub struct LeaderChanges {
    pub(crate) receiver: watch::Receiver<Option<LeaderInfo>>,
}

impl LeaderChanges {
    /// Who leads, as last seen.
    pub fn current(&self) -> Option<LeaderInfo> {
        self.receiver.borrow().clone()
    }

    /// Returns when somebody else leads, or nobody; `None` when nobody watches any more. Cancel-safe.
    pub async fn changed(&mut self) -> Option<Option<LeaderInfo>> {
        self.receiver.changed().await.ok()?;
        Some(self.receiver.borrow_and_update().clone())
    }
}

/// A way to elect one of several nodes.
pub trait LeaderElection: Send + Sync {
    /// Waits until this node leads. Dropping the future gives up.
    fn campaign(&self) -> BoxFuture<'_, Result<Leadership, ElectionError>>;

    /// Watches who leads. Needs no candidacy.
    fn observe(&self) -> LeaderChanges;
}

/// What a leadership stands on.
pub(crate) trait Standing: Send + Sync {
    fn is_valid(&self) -> bool;
    fn lost(&self) -> BoxFuture<'_, SessionEnd>;
    fn resign(&self) -> BoxFuture<'_, Result<(), ElectionError>>;
    fn fence(&self) -> Compare;
}

/// This node leads, for as long as [`is_valid`](Self::is_valid) says so. Dropping it resigns.
pub struct Leadership {
    pub(crate) name: Arc<str>,
    pub(crate) fencing_token: i64,
    pub(crate) standing: Arc<dyn Standing>,
}

impl Leadership {
    /// What is led.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Larger than that of every leadership before. Whoever is written to refuses one smaller than it has seen.
    pub fn fencing_token(&self) -> i64 {
        self.fencing_token
    }

    /// Whether this node leads at this moment. Asks the clock, so it is right also after a pause.
    pub fn is_valid(&self) -> bool {
        self.standing.is_valid()
    }

    /// Returns when the leadership ends, with the reason. Cancel-safe.
    pub async fn lost(&self) -> SessionEnd {
        self.standing.lost().await
    }

    /// Gives the leadership back at once.
    pub async fn resign(self) -> Result<(), ElectionError> {
        self.standing.resign().await
    }

    /// The condition that makes a transaction on the store fail once somebody else leads.
    pub fn fence(&self) -> Compare {
        self.standing.fence()
    }

    /// A transaction that happens only while this leadership lasts.
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
