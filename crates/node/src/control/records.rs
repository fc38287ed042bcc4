//! Node records of the cluster, and every change of them: founding, admission, announcement, replacement, removal.
//!
//! | key | value |
//! |---|---|
//! | `/moim/nodes/<id>`, `/moim/members/<id>` | [`moim_state::nodes`] |
//! | [`NEXT_VOTER`] | next free voter id; it only grows |
//! | [`GONE`]`<voter>` | its node was removed or replaced; the group leader removes it from the group |
//! | [`LEAVING`]`<voter>` | removed by an etcd client: it loses its vote at once, its node is drained and removed |
//! | [`MARKS`]`<node>` | durable Raft index of this node's data directory ([`super::marks`]) |
//! | [`ROLLBACKS`]`<node>` | this node's data directory was restored from an older copy, or is damaged: the reason |
//! | [`FEATURE_LEVEL`] | the feature level of the cluster |
//!
//! Invariants: a voter id is allocated in the same transaction that records its data directory. Other nodes change the
//! record of a data directory in one way only: they remove or replace it, for good. So a node that reads a counter past
//! its voter id and no record of its data directory was removed, however stale that read is.

use bytes::Bytes;
use moim_coord::{Coordinator, RangeRequest};
use moim_state::nodes::{NodeOrder, NodeRecord, ORDERS, node_key, order_key};
use moim_state::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};
use serde::{Deserialize, Serialize};

use crate::data_dir::Founder;
use crate::formation::Card;

/// Next free voter id.
pub(crate) const NEXT_VOTER: &str = "/moim/voters/next";
/// Voters whose nodes were removed or replaced.
pub(crate) const GONE: &str = "/moim/voters/gone/";
/// Voters that lose their vote and whose nodes are drained; written by the coordination core.
pub(crate) const LEAVING: &str = "/moim/voters/leaving/";
/// Durability marks, by node id.
const MARKS: &str = "/moim/marks/";
/// Nodes whose data directory was rolled back, by node id, with the last reason.
pub(crate) const ROLLBACKS: &str = "/moim/rollbacks/";
/// Prefix of a reason under [`ROLLBACKS`] if the data directory was damaged, not rolled back.
pub(crate) const DAMAGED: &str = "damaged: ";
/// Feature level of the cluster.
pub(crate) const FEATURE_LEVEL: &str = "/moim/cluster/feature_level";
/// Newest feature level that this build supports.
pub(crate) const SUPPORTED_LEVEL: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Level {
    level: u32,
}

/// Durability mark of a node's data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Voter id of the data directory.
    pub(crate) voter: u64,
    /// Index of the last Raft entry that is committed and on stable storage there.
    pub(crate) index: u64,
}

impl Mark {
    pub(crate) fn to_bytes(self) -> Bytes {
        serde_json::to_vec(&self).expect("numbers serialize").into()
    }
}

/// Key of a node's durability mark.
pub(crate) fn mark_key(node_id: i32) -> String {
    format!("{MARKS}{node_id}")
}

/// Durability mark of a node in this node's local state.
pub(crate) fn mark_of(coordinator: &Coordinator, node_id: i32) -> Option<Mark> {
    let found = coordinator.read(|state| state.range(&RangeRequest::key(mark_key(node_id))).ok());
    serde_json::from_slice(&found?.kvs.first()?.value).ok()
}

/// Reason why a node record was not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The repository failed or timed out. Retryable if the repository error is.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// Compare-and-swap conflict with a concurrent change. Retryable.
    #[error("the record was changed concurrently; try again")]
    Conflict,
    /// The cluster has no record of this node.
    #[error("the cluster has no node {0}")]
    NoSuchNode(i32),
    /// The removal would leave the cluster without nodes.
    #[error("node {0} is the last node of the cluster")]
    LastNode(i32),
    /// The node runs with the data directory of its record.
    #[error("node {0} is running; stop it first")]
    Running(i32),
    /// The node still holds replicas.
    #[error("node {0} still holds {1} partitions")]
    HasReplicas(i32, usize),
    /// The node's record names another data directory.
    #[error("node {0} is recorded with another data directory")]
    OtherDirectory(i32),
}

/// Decodes a decimal number.
fn number(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// Decodes the value of [`NEXT_VOTER`].
pub(crate) fn next_voter(value: &[u8]) -> Result<u64, RepositoryError> {
    number(value).ok_or_else(|| RepositoryError::Damaged(format!("{NEXT_VOTER} is not a number")))
}

/// Decodes the value of [`FEATURE_LEVEL`].
pub(crate) fn feature_level(value: &[u8]) -> Result<u32, RepositoryError> {
    let damaged = |error| RepositoryError::Damaged(format!("{FEATURE_LEVEL}: {error}"));
    serde_json::from_slice::<Level>(value).map(|level| level.level).map_err(damaged)
}

fn level_bytes(level: u32) -> Bytes {
    serde_json::to_vec(&Level { level }).expect("numbers serialize").into()
}

/// Key under [`GONE`].
fn gone_key(voter: u64) -> String {
    format!("{GONE}{voter}")
}

/// Writes the founding records of a cluster. Every founder tries; one succeeds.
pub(crate) async fn found_cluster(
    repository: &dyn StateRepository,
    founders: &[Founder],
) -> Result<(), RecordError> {
    if repository.get(NEXT_VOTER).await?.is_some() {
        return Ok(());
    }
    let mut txn = Txn::new()
        .when(Compare::Absent(NEXT_VOTER.to_owned()))
        .put(NEXT_VOTER, (founders.len() + 1).to_string())
        .put(FEATURE_LEVEL, level_bytes(SUPPORTED_LEVEL));
    for (founder, voter) in founders.iter().zip(1..) {
        let record = NodeRecord {
            node_id: founder.node_id,
            voter,
            directory_id: founder.directory_id.clone(),
            peer: founder.peer.clone(),
            ..NodeRecord::default()
        };
        txn = txn.put(node_key(founder.node_id), record.to_bytes());
    }
    // On a conflict another founder was faster.
    repository.txn(txn).await?;
    Ok(())
}

/// The entry and the decoded record of a node.
pub(crate) async fn get(
    repository: &dyn StateRepository,
    node_id: i32,
) -> Result<Option<(Entry, NodeRecord)>, RecordError> {
    let Some(entry) = repository.get(&node_key(node_id)).await? else { return Ok(None) };
    let record = NodeRecord::from_bytes(&entry.value)?;
    Ok(Some((entry, record)))
}

/// Publishes a node's own record, if its data directory and voter id are those of the current record.
pub(crate) async fn publish(
    repository: &dyn StateRepository,
    record: &NodeRecord,
) -> Result<(), RecordError> {
    let (entry, known) =
        get(repository, record.node_id).await?.ok_or(RecordError::NoSuchNode(record.node_id))?;
    if known.directory_id != record.directory_id || known.voter != record.voter {
        return Err(RecordError::OtherDirectory(record.node_id));
    }
    if known == *record {
        return Ok(());
    }
    let txn = Txn::new()
        .when(Compare::ModRevision(entry.key.clone(), entry.mod_revision))
        .put(entry.key, record.to_bytes());
    done(repository.txn(txn).await?)
}

/// Admits a data directory under a new voter id. `known` is the current record of the node, if it has one to replace.
pub(crate) async fn admit(
    repository: &dyn StateRepository,
    card: &Card,
    known: Option<(Entry, NodeRecord)>,
) -> Result<NodeRecord, RecordError> {
    let next = repository.get(NEXT_VOTER).await?.ok_or(RecordError::Conflict)?;
    let voter = next_voter(&next.value)?;
    let key = node_key(card.node_id);
    let (unchanged, before) = match known {
        Some((entry, record)) => (Compare::ModRevision(key.clone(), entry.mod_revision), record.incarnation),
        None => (Compare::Absent(key.clone()), 0),
    };
    let record = NodeRecord {
        node_id: card.node_id,
        voter,
        // A wall clock may go back; an incarnation must not.
        incarnation: card.incarnation.max(before + 1),
        directory_id: card.directory_id.clone(),
        peer: card.peer.clone(),
        zone: card.zone.clone(),
        version: card.version.clone(),
        feature_level: card.feature_level,
        ..NodeRecord::default()
    };
    let txn = Txn::new()
        .when(unchanged)
        .when(Compare::ModRevision(next.key.clone(), next.mod_revision))
        .put(next.key, (voter + 1).to_string())
        .put(key, record.to_bytes());
    done(repository.txn(txn).await?)?;
    Ok(record)
}

/// Removes a node from the cluster.
pub(crate) async fn remove(repository: &dyn StateRepository, node_id: i32) -> Result<(), RecordError> {
    let (_, nodes) = moim_state::nodes::nodes(repository).await?;
    let (entry, record) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    if nodes.len() == 1 {
        return Err(RecordError::LastNode(node_id));
    }
    let txn = retire(&entry, &record)
        .delete(entry.key.clone())
        .delete(order_key(node_id))
        .delete(mark_key(node_id))
        .delete(format!("{ROLLBACKS}{node_id}"));
    done(repository.txn(txn).await?)
}

/// Sets the order of a node (`None` deletes it). Rejected for the last node without an order.
pub(crate) async fn set_order(
    repository: &dyn StateRepository,
    node_id: i32,
    order: Option<NodeOrder>,
) -> Result<(), RecordError> {
    let (entry, _) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    let txn = Txn::new().when(Compare::CreateRevision(entry.key, entry.create_revision));
    let Some(order) = order else {
        return done(repository.txn(txn.delete(order_key(node_id))).await?);
    };
    let (_, nodes) = moim_state::nodes::nodes(repository).await?;
    let (_, orders) = repository.list(ORDERS).await?;
    let free = |node: &NodeRecord| {
        node.node_id != node_id && !orders.iter().any(|entry| entry.key == order_key(node.node_id))
    };
    if !nodes.iter().any(free) {
        return Err(RecordError::LastNode(node_id));
    }
    done(repository.txn(txn.put(order_key(node_id), order.as_str())).await?)
}

/// Retires a node's data directory and keeps its node id for a replacement. Idempotent.
pub(crate) async fn replace(repository: &dyn StateRepository, node_id: i32) -> Result<(), RecordError> {
    let (entry, record) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    if record.voter == 0 {
        return Ok(());
    }
    let open = NodeRecord { voter: 0, directory_id: String::new(), ..record.clone() };
    let txn = retire(&entry, &record).put(entry.key.clone(), open.to_bytes());
    done(repository.txn(txn).await?)
}

/// Like [`replace`], for a node that reported its own data directory as rolled back or damaged.
pub(crate) async fn replace_rolled_back(
    repository: &dyn StateRepository,
    node_id: i32,
    why: &str,
) -> Result<(), RecordError> {
    let (entry, record) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    let open = NodeRecord { voter: 0, directory_id: String::new(), ..record.clone() };
    let txn = retire(&entry, &record)
        .put(entry.key.clone(), open.to_bytes())
        .put(format!("{ROLLBACKS}{node_id}"), why.to_owned());
    done(repository.txn(txn).await?)
}

/// The operations of a transaction that retire the voter of a data directory.
fn retire(entry: &Entry, record: &NodeRecord) -> Txn {
    let txn = Txn::new().when(Compare::ModRevision(entry.key.clone(), entry.mod_revision));
    if record.voter == 0 {
        return txn;
    }
    let leaving = format!("{LEAVING}{}", record.voter);
    txn.put(gone_key(record.voter), record.node_id.to_string()).delete(leaving)
}

/// Decodes a key under [`LEAVING`].
pub(crate) fn leaving_voter(key: &str) -> Option<u64> {
    key.strip_prefix(LEAVING)?.parse().ok()
}

/// Decodes a key under [`GONE`].
pub(crate) fn gone_voter(key: &str) -> Option<u64> {
    key.strip_prefix(GONE)?.parse().ok()
}

/// Deletes the record of a removed voter, after it has left the coordination group.
pub(crate) async fn delete_gone_voter(
    repository: &dyn StateRepository,
    voter: u64,
) -> Result<(), RecordError> {
    repository.txn(Txn::new().delete(gone_key(voter))).await?;
    Ok(())
}

/// Raises the feature level of the cluster.
pub(crate) async fn raise_level(
    repository: &dyn StateRepository,
    from: u32,
    to: u32,
) -> Result<(), RecordError> {
    let txn = Txn::new()
        .when(Compare::Value(FEATURE_LEVEL.to_owned(), level_bytes(from)))
        .put(FEATURE_LEVEL, level_bytes(to));
    done(repository.txn(txn).await?)
}

fn done(outcome: TxnOutcome) -> Result<(), RecordError> {
    match outcome {
        TxnOutcome::Done { .. } => Ok(()),
        TxnOutcome::Conflict { .. } => Err(RecordError::Conflict),
    }
}

#[cfg(test)]
mod tests;
