//! What the cluster knows about its nodes, and every change of it: founding, admitting, announcing, removing.
//!
//! | key | says |
//! |---|---|
//! | `/moim/nodes/<id>`, `/moim/members/<id>` | [`moim_cluster::nodes`] |
//! | [`NEXT_VOTER`] | the voter id the next folder gets; it only grows |
//! | [`GONE`]`<voter>` | this voter's node was removed or replaced; the steward takes it out of the group |
//! | [`LEAVING`]`<voter>` | an etcd client removed this voter: it loses its vote at once, its node is emptied and then removed |
//! | [`MARKS`]`<node>` | the last Raft entry this node's folder is known to hold ([`super::marks`]) |
//! | [`ROLLBACKS`]`<node>` | this node's folder was found to be an older copy, and why |
//! | [`FEATURE_LEVEL`] | the cluster format every node can take part in |
//!
//! Invariants: a voter id is given out in the same transaction that writes down for which folder; the record of a
//! folder is changed by others in one way only, that is, for good. So a node that finds a counter past its voter id and
//! no record of its folder knows that it was removed, however old the state it looks at.

use bytes::Bytes;
use moim_cluster::nodes::{NodeOrder, NodeRecord, ORDERS, node_key, order_key};
use moim_cluster::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};
use moim_coord::{Coordinator, RangeRequest};
use serde::{Deserialize, Serialize};

use crate::data_dir::Founder;
use crate::formation::Card;

/// The voter id the next folder gets.
pub(crate) const NEXT_VOTER: &str = "/moim/voters/next";
/// Voters whose nodes are gone.
pub(crate) const GONE: &str = "/moim/voters/gone/";
/// Voters that lost their vote and whose nodes are being emptied; written by the coordination core.
pub(crate) const LEAVING: &str = "/moim/voters/leaving/";
/// How far the folders of nodes are known to be, by node id.
const MARKS: &str = "/moim/marks/";
/// Nodes whose folders were rolled back, by node id: what showed it last.
pub(crate) const ROLLBACKS: &str = "/moim/rollbacks/";
/// What a reason under [`ROLLBACKS`] begins with if the folder was not rolled back but damaged.
pub(crate) const DAMAGED: &str = "damaged: ";
/// The format of the cluster.
pub(crate) const FEATURE_LEVEL: &str = "/moim/cluster/feature_level";
/// The newest format this build can take part in.
pub(crate) const SUPPORTED_LEVEL: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Level {
    level: u32,
}

/// How far a node's folder is known to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// The voter whose folder it is.
    pub(crate) voter: u64,
    /// The last Raft entry that is on stable storage there.
    pub(crate) index: u64,
}

impl Mark {
    pub(crate) fn to_bytes(self) -> Bytes {
        serde_json::to_vec(&self).expect("numbers can be written down").into()
    }
}

/// The key of a node's mark.
pub(crate) fn mark_key(node_id: i32) -> String {
    format!("{MARKS}{node_id}")
}

/// The mark of a node, as this node's state has it.
pub(crate) fn mark_of(coordinator: &Coordinator, node_id: i32) -> Option<Mark> {
    let found = coordinator.read(|state| state.range(&RangeRequest::key(mark_key(node_id))).ok());
    serde_json::from_slice(&found?.kvs.first()?.value).ok()
}

/// Why a record was not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The store did not answer, or not in time. Asking again is right.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// Somebody else changed it at the same time. Asking again is right.
    #[error("somebody else changed it at the same time")]
    Raced,
    /// There is no such node.
    #[error("the cluster has no node {0}")]
    NoSuchNode(i32),
    /// The cluster would be empty.
    #[error("node {0} is the last node of the cluster")]
    LastNode(i32),
    /// The node runs, with the folder the cluster knows.
    #[error("node {0} is running; stop it first")]
    Running(i32),
    /// Partitions are still on it.
    #[error("node {0} still holds {1} partitions")]
    Holds(i32, usize),
    /// The folder is not the one the cluster knows.
    #[error("the cluster knows node {0} with another data folder")]
    OtherFolder(i32),
}

/// A number as it is kept.
fn number(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// The voter id the next folder gets, from the value of [`NEXT_VOTER`].
pub(crate) fn next_voter(value: &[u8]) -> Result<u64, RepositoryError> {
    number(value).ok_or_else(|| RepositoryError::Damaged(format!("{NEXT_VOTER} is not a number")))
}

/// The format of the cluster, from the value of [`FEATURE_LEVEL`].
pub(crate) fn feature_level(value: &[u8]) -> Result<u32, RepositoryError> {
    let damaged = |error| RepositoryError::Damaged(format!("{FEATURE_LEVEL}: {error}"));
    serde_json::from_slice::<Level>(value).map(|level| level.level).map_err(damaged)
}

fn level_bytes(level: u32) -> Bytes {
    serde_json::to_vec(&Level { level }).expect("a number can be written down").into()
}

/// The key that says that a voter's node is gone.
fn gone_key(voter: u64) -> String {
    format!("{GONE}{voter}")
}

/// Writes the first records of a cluster. Every founder tries; one succeeds.
pub(crate) async fn found(repository: &dyn StateRepository, founders: &[Founder]) -> Result<(), RecordError> {
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
    // A conflict means that another founder was quicker.
    repository.txn(txn).await?;
    Ok(())
}

/// The record of a node and its entry.
pub(crate) async fn get(
    repository: &dyn StateRepository,
    node_id: i32,
) -> Result<Option<(Entry, NodeRecord)>, RecordError> {
    let Some(entry) = repository.get(&node_key(node_id)).await? else { return Ok(None) };
    let record = NodeRecord::from_bytes(&entry.value)?;
    Ok(Some((entry, record)))
}

/// Writes down what a node says of itself, if the cluster knows its folder.
pub(crate) async fn publish(
    repository: &dyn StateRepository,
    record: &NodeRecord,
) -> Result<(), RecordError> {
    let (entry, known) =
        get(repository, record.node_id).await?.ok_or(RecordError::NoSuchNode(record.node_id))?;
    if known.directory_id != record.directory_id || known.voter != record.voter {
        return Err(RecordError::OtherFolder(record.node_id));
    }
    if known == *record {
        return Ok(());
    }
    let txn = Txn::new()
        .when(Compare::ModRevision(entry.key.clone(), entry.mod_revision))
        .put(entry.key, record.to_bytes());
    done(repository.txn(txn).await?)
}

/// Gives a folder a voter id, in a place that is free: `known` is what the node's key holds now.
pub(crate) async fn admit(
    repository: &dyn StateRepository,
    card: &Card,
    known: Option<(Entry, NodeRecord)>,
) -> Result<NodeRecord, RecordError> {
    let next = repository.get(NEXT_VOTER).await?.ok_or(RecordError::Raced)?;
    let voter = next_voter(&next.value)?;
    let key = node_key(card.node_id);
    let (place, before) = match known {
        Some((entry, record)) => (Compare::ModRevision(key.clone(), entry.mod_revision), record.incarnation),
        None => (Compare::Absent(key.clone()), 0),
    };
    let record = NodeRecord {
        node_id: card.node_id,
        voter,
        // Wall clocks may go back; incarnations may not.
        incarnation: card.incarnation.max(before + 1),
        directory_id: card.directory_id.clone(),
        peer: card.peer.clone(),
        zone: card.zone.clone(),
        version: card.version.clone(),
        feature_level: card.feature_level,
        ..NodeRecord::default()
    };
    let txn = Txn::new()
        .when(place)
        .when(Compare::ModRevision(next.key.clone(), next.mod_revision))
        .put(next.key, (voter + 1).to_string())
        .put(key, record.to_bytes());
    done(repository.txn(txn).await?)?;
    Ok(record)
}

/// Takes a node out of the cluster.
pub(crate) async fn remove(repository: &dyn StateRepository, node_id: i32) -> Result<(), RecordError> {
    let (_, nodes) = moim_cluster::nodes::nodes(repository).await?;
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

/// Says what is wanted of a node; `None` takes it back. The last node that may lead is not sent away.
pub(crate) async fn order(
    repository: &dyn StateRepository,
    node_id: i32,
    order: Option<NodeOrder>,
) -> Result<(), RecordError> {
    let (entry, _) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    let txn = Txn::new().when(Compare::CreateRevision(entry.key, entry.create_revision));
    let Some(order) = order else {
        return done(repository.txn(txn.delete(order_key(node_id))).await?);
    };
    let (_, nodes) = moim_cluster::nodes::nodes(repository).await?;
    let (_, orders) = repository.list(ORDERS).await?;
    let free = |node: &NodeRecord| {
        node.node_id != node_id && !orders.iter().any(|entry| entry.key == order_key(node.node_id))
    };
    if !nodes.iter().any(free) {
        return Err(RecordError::LastNode(node_id));
    }
    done(repository.txn(txn.put(order_key(node_id), order.as_str())).await?)
}

/// Keeps a node's place for another data folder. Saying it again is fine.
pub(crate) async fn replace(repository: &dyn StateRepository, node_id: i32) -> Result<(), RecordError> {
    let (entry, record) = get(repository, node_id).await?.ok_or(RecordError::NoSuchNode(node_id))?;
    if record.voter == 0 {
        return Ok(());
    }
    let open = NodeRecord { voter: 0, directory_id: String::new(), ..record.clone() };
    let txn = retire(&entry, &record).put(entry.key.clone(), open.to_bytes());
    done(repository.txn(txn).await?)
}

/// The same for a node that says that its folder was rolled back, and why.
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

/// The part of a transaction that ends a folder's time as a member.
fn retire(entry: &Entry, record: &NodeRecord) -> Txn {
    let txn = Txn::new().when(Compare::ModRevision(entry.key.clone(), entry.mod_revision));
    if record.voter == 0 {
        return txn;
    }
    let leaving = format!("{LEAVING}{}", record.voter);
    txn.put(gone_key(record.voter), record.node_id.to_string()).delete(leaving)
}

/// Voters that are to lose their vote, from the entries under [`LEAVING`].
pub(crate) fn leaving_voter(key: &str) -> Option<u64> {
    key.strip_prefix(LEAVING)?.parse().ok()
}

/// Voters whose nodes are gone, from the entries under [`GONE`].
pub(crate) fn gone_voter(key: &str) -> Option<u64> {
    key.strip_prefix(GONE)?.parse().ok()
}

/// Forgets that a voter is gone, once the group has forgotten it.
pub(crate) async fn bury(repository: &dyn StateRepository, voter: u64) -> Result<(), RecordError> {
    repository.txn(Txn::new().delete(gone_key(voter))).await?;
    Ok(())
}

/// Raises the format of the cluster.
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
        TxnOutcome::Conflict { .. } => Err(RecordError::Raced),
    }
}

#[cfg(test)]
mod tests;
