//! Proposals for partition record changes on their way to the repository, and record reads.
//!
//! Concurrent proposals (a member died: every leader shrinks its in-sync set) share as few transactions as possible.
//! A transaction without an answer may still take effect: its outcome is unknown, never a failure.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use moim_state::{RepositoryError, TxnOutcome};
use tokio::sync::Semaphore;

use super::{Replicated, Shared};
use crate::controller::batch::{Batch, Conflict, pack};
use crate::keys;
use crate::leader::Outcome;
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{PartitionId, Versioned};

/// The maximum number of transactions, and of reads, in flight.
const UNDER_WAY: usize = 8;
/// A transaction without an answer for this long has an unknown outcome.
const TIMEOUT: Duration = Duration::from_secs(4);

type Proposers = HashMap<PartitionId, (Arc<Replicated>, u64)>;

pub(super) fn start(shared: &Arc<Shared>) {
    shared.spawn("replica-proposals", proposals(Arc::clone(shared)));
    shared.spawn("replica-refreshes", refreshes(Arc::clone(shared)));
}

async fn proposals(shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(UNDER_WAY));
    loop {
        let mut proposers = Proposers::new();
        let mut changes = Vec::new();
        let mut again = Vec::new();
        for (replica, proposal) in shared.proposals.take().await {
            // Two proposals of one partition belong to two leaderships: each gets its own transaction.
            if proposers.contains_key(&replica.id()) {
                again.push((replica, proposal));
                continue;
            }
            proposers.insert(replica.id(), (replica, proposal.id));
            changes.push(proposal.change);
        }
        shared.proposals.extend(again);
        for batch in pack(changes, None) {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let of_batch =
                batch.changes.iter().filter_map(|change| proposers.remove_entry(&change.partition));
            let of_batch: Proposers = of_batch.collect();
            let this = Arc::clone(&shared);
            shared.spawn("replica-proposal", async move {
                make(&this, batch, of_batch).await;
                drop(place);
            });
        }
    }
}

/// Writes a batch, as much of it as possible.
async fn make(shared: &Shared, batch: Batch, proposers: Proposers) {
    let tell = |changes: &[Change], outcome: Outcome| {
        for change in changes {
            if let Some((replica, id)) = proposers.get(&change.partition) {
                replica.on_outcome(*id, outcome);
            }
        }
    };
    let mut next = Some(batch);
    while let Some(batch) = next.take() {
        let log_end_calls = tokio::time::timeout(TIMEOUT, shared.repository.txn(batch.txn())).await;
        match log_end_calls {
            Ok(Ok(TxnOutcome::Done { revision })) => tell(&batch.changes, Outcome::Done { revision }),
            Ok(Ok(TxnOutcome::Conflict { current, .. })) => match batch.on_conflict(&current) {
                Conflict::Deposed => unreachable!("a leader's own change has no controller's term"),
                Conflict::Retry { rest, failed } => {
                    tell(&failed, Outcome::Conflict);
                    next = rest;
                }
            },
            Ok(Err(error)) => {
                tracing::debug!(%error, "in-sync set change failed");
                tell(&batch.changes, outcome_of(&error));
            }
            Err(_) => tell(&batch.changes, Outcome::Unknown),
        }
    }
}

fn outcome_of(error: &RepositoryError) -> Outcome {
    match error {
        RepositoryError::Unavailable(_) | RepositoryError::Invalid(_) | RepositoryError::LeaseNotFound(_) => {
            Outcome::Refused
        }
        // Also any error variant added later: its outcome is unknown.
        _ => Outcome::Unknown,
    }
}

async fn refreshes(shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(UNDER_WAY));
    loop {
        let mut replicas = shared.refreshes.take().await;
        replicas.sort_by_key(|replica| replica.id());
        replicas.dedup_by_key(|replica| replica.id());
        for replica in replicas {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let this = Arc::clone(&shared);
            shared.spawn("replica-refresh", async move {
                refresh(&this, &replica).await;
                drop(place);
            });
        }
    }
}

/// Reads a record. A failed read is repeated by the replica that still needs it; the watch reports a deleted record.
async fn refresh(shared: &Shared, replica: &Arc<Replicated>) {
    let key = keys::partition(replica.id());
    let read = tokio::time::timeout(TIMEOUT, shared.repository.get(&key)).await;
    let Ok(Ok(Some(entry))) = read else { return };
    match PartitionState::decode(&entry.value) {
        Ok(value) => replica.on_record(Versioned { revision: entry.mod_revision, value }),
        Err(error) => {
            tracing::error!(partition = %replica.id(), %error, "undecodable partition record ignored")
        }
    }
}
