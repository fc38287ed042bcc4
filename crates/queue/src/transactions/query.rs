//! Read-only requests: verify, describe, list.

use moim_wire_kafka::ErrorCode;

use super::Coordinator;
use super::api::{Description, ListFilter, Listed, TopicPartition};
use super::state::{State, by_topic};

impl Coordinator {
    /// Verifies that an open transaction of this producer includes the partition. Called before its first append
    /// there: clients of transaction version 1 produce without the partition leader knowing that the partition was
    /// added, and a late batch would otherwise open a hanging transaction.
    ///
    /// The result holds at the time of the call; the caller appends only if no marker of this producer was appended
    /// between the call and the append.
    pub fn verify(
        &self,
        transactional_id: &str,
        producer_id: i64,
        producer_epoch: i16,
        topic: &str,
        partition: i32,
    ) -> Result<(), ErrorCode> {
        if self.loading {
            return Err(ErrorCode::CoordinatorLoadInProgress);
        }
        let entry = self.entries.get(transactional_id).ok_or(ErrorCode::InvalidProducerIdMapping)?;
        entry.txn.check_claim((producer_id, producer_epoch))?;
        // A decision that is being written counts as made.
        if entry.txn.state.is_preparing() || entry.is_ending() {
            return Err(ErrorCode::ConcurrentTransactions);
        }
        let covered = entry.txn.state == State::Ongoing
            && entry.txn.partitions.contains(&TopicPartition::new(topic, partition));
        if covered { Ok(()) } else { Err(ErrorCode::TransactionAbortable) }
    }

    /// Describes one transaction.
    pub fn describe(&self, transactional_id: &str) -> Result<Description, ErrorCode> {
        if self.loading {
            return Err(ErrorCode::CoordinatorLoadInProgress);
        }
        if transactional_id.is_empty() {
            return Err(ErrorCode::InvalidRequest);
        }
        let known = self.entries.get(transactional_id).filter(|e| e.is_visible());
        let txn = &known.ok_or(ErrorCode::TransactionalIdNotFound)?.txn;
        Ok(Description {
            state: txn.state.name(),
            producer_id: txn.producer_id,
            producer_epoch: txn.epoch,
            timeout_ms: txn.timeout_ms,
            start_ms: txn.start_ms,
            partitions: by_topic(&txn.partitions),
        })
    }

    /// The transactions that match, by id, and the unknown state names of the filter.
    pub fn list(&self, now_ms: u64, filter: &ListFilter) -> Result<(Vec<Listed>, Vec<String>), ErrorCode> {
        if self.loading {
            return Err(ErrorCode::CoordinatorLoadInProgress);
        }
        let known = |name: &String| State::ALL.iter().any(|s| s.name() == name);
        let unknown: Vec<_> = filter.states.iter().filter(|s| !known(s)).cloned().collect();
        let wall_ms = self.wall_ms(now_ms);
        let longer = |min: i64, start_ms: i64| wall_ms.saturating_sub(start_ms) > min;
        let mut all: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, e)| e.is_visible())
            .map(|(id, e)| (id, &e.txn))
            .filter(|(_, t)| filter.states.is_empty() || filter.states.iter().any(|s| s == t.state.name()))
            .filter(|(_, t)| filter.producer_ids.is_empty() || filter.producer_ids.contains(&t.producer_id))
            .filter(|(_, t)| match filter.min_duration_ms {
                Some(min) if min >= 0 => t.state.is_running() && longer(min, t.start_ms),
                _ => true,
            })
            .map(|(id, t)| Listed {
                transactional_id: id.clone(),
                producer_id: t.producer_id,
                state: t.state.name(),
            })
            .collect();
        all.sort_by(|a, b| a.transactional_id.cmp(&b.transactional_id));
        Ok((all, unknown))
    }
}

/// The Produce or TxnOffsetCommit error if [`Coordinator::verify`] failed. Older clients get a retriable code they
/// know where a retry helps, and none of the codes made for newer ones.
pub fn verification_error(error: ErrorCode, knows_abortable: bool) -> ErrorCode {
    match error {
        ErrorCode::ProducerFenced => ErrorCode::InvalidProducerEpoch,
        ErrorCode::TransactionAbortable if !knows_abortable => ErrorCode::InvalidTxnState,
        ErrorCode::ConcurrentTransactions
        | ErrorCode::CoordinatorLoadInProgress
        | ErrorCode::CoordinatorNotAvailable
        | ErrorCode::NetworkException
        | ErrorCode::OperationNotAttempted
        | ErrorCode::RequestTimedOut
        | ErrorCode::NotCoordinator => ErrorCode::NotEnoughReplicas,
        other => other,
    }
}
