//! Changes of records on their way to the repository, and records read again.
//!
//! What leaders want at the same time (a member died: every leader leaves it out) goes in as few transactions as fit. One
//! whose answer does not come may still happen: its outcome is unknown, never a failure.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use moim_cluster::{RepositoryError, TxnOutcome};
use tokio::sync::Semaphore;

use super::{Replicated, Shared};
use crate::controller::batch::{Batch, Conflict, pack};
use crate::keys;
use crate::leader::Outcome;
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{PartitionId, Versioned};

/// Transactions, and reads, under way at a time.
const UNDER_WAY: usize = 8;
/// A transaction without an answer for this long has an unknown outcome.
const TIMEOUT: Duration = Duration::from_secs(4);

type Asking = HashMap<PartitionId, (Arc<Replicated>, u64)>;

pub(super) fn start(shared: &Arc<Shared>) {
    shared.spawn("replica-proposals", proposals(Arc::clone(shared)));
    shared.spawn("replica-refreshes", refreshes(Arc::clone(shared)));
}

async fn proposals(shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(UNDER_WAY));
    loop {
        let mut asking = Asking::new();
        let mut changes = Vec::new();
        let mut again = Vec::new();
        for (copy, proposal) in shared.proposals.take().await {
            // Two of one partition are of two leaderships: each is its own transaction.
            if asking.contains_key(&copy.id()) {
                again.push((copy, proposal));
                continue;
            }
            asking.insert(copy.id(), (copy, proposal.id));
            changes.push(proposal.change);
        }
        shared.proposals.extend(again);
        for batch in pack(changes, None) {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let of_batch = batch.changes.iter().filter_map(|change| asking.remove_entry(&change.partition));
            let of_batch: Asking = of_batch.collect();
            let this = Arc::clone(&shared);
            shared.spawn("replica-proposal", async move {
                make(&this, batch, of_batch).await;
                drop(place);
            });
        }
    }
}

/// Makes a batch, as much of it as can be made.
async fn make(shared: &Shared, batch: Batch, asking: Asking) {
    let tell = |changes: &[Change], outcome: Outcome| {
        for change in changes {
            if let Some((copy, id)) = asking.get(&change.partition) {
                copy.on_outcome(*id, outcome);
            }
        }
    };
    let mut next = Some(batch);
    while let Some(batch) = next.take() {
        let asked = tokio::time::timeout(TIMEOUT, shared.repository.txn(batch.txn())).await;
        match asked {
            Ok(Ok(TxnOutcome::Done { revision })) => tell(&batch.changes, Outcome::Done { revision }),
            Ok(Ok(TxnOutcome::Conflict { current, .. })) => match batch.on_conflict(&current) {
                Conflict::Deposed => unreachable!("a leader's own change has no controller's term"),
                Conflict::Retry { rest, failed } => {
                    tell(&failed, Outcome::Conflict);
                    next = rest;
                }
            },
            Ok(Err(error)) => {
                tracing::debug!(%error, "a change of in-sync sets was not taken");
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
        // And whatever else there may be one day: nothing is known of it.
        _ => Outcome::Unknown,
    }
}

async fn refreshes(shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(UNDER_WAY));
    loop {
        let mut copies = shared.refreshes.take().await;
        copies.sort_by_key(|copy| copy.id());
        copies.dedup_by_key(|copy| copy.id());
        for copy in copies {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let this = Arc::clone(&shared);
            shared.spawn("replica-refresh", async move {
                refresh(&this, &copy).await;
                drop(place);
            });
        }
    }
}

/// Reads a record. What cannot be read now is asked for again by whoever still wants it; that a record is gone is for
/// the watch to say.
async fn refresh(shared: &Shared, copy: &Arc<Replicated>) {
    let key = keys::partition(copy.id());
    let read = tokio::time::timeout(TIMEOUT, shared.repository.get(&key)).await;
    let Ok(Ok(Some(entry))) = read else { return };
    match PartitionState::decode(&entry.value) {
        Ok(value) => copy.on_record(Versioned { revision: entry.mod_revision, value }),
        Err(error) => tracing::error!(partition = %copy.id(), %error, "a record is not acted on"),
    }
}
