//! Transaction checks under the partition's lock: before a transactional append, and before a marker.
//!
//! A transactional batch joins the transaction that is open here in its producer epoch, or opens one. To open one it
//! needs a [`VerificationGuard`]: taken before the coordinator is asked whether the transaction includes the
//! partition, and compared with the partition's state at the append. The coordinator cannot be asked under the
//! partition's lock; a marker appended between the response and the append invalidates the guard, so that no batch
//! opens a transaction without an end (a hanging transaction).
//!
//! Markers of one producer are appended in the order in which its coordinators sent them. A coordinator resends a
//! marker that was not acknowledged in time, and the next transaction begins after the resent one; if the first one
//! is handled later, it must not end that transaction. The producer epoch cannot tell them apart (transaction version
//! 1 keeps it), so each marker carries its coordinator epoch, the number of the attempt and the leader epoch it was
//! sent to.

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader, ControlKind};

use super::{Appended, Partition, Ready, Refused, State};
use crate::loops::lock;

/// Binds the transaction coordinator's verification to one batch and to the partition's state before the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VerificationGuard {
    leader_epoch: Option<i32>,
    producer_id: i64,
    producer_epoch: i16,
    base_sequence: i32,
    /// The last offset of the producer here: a marker or a batch moves it.
    last_offset: Option<i64>,
    /// The epoch of the coordinator that verified; -1 before.
    coordinator_epoch: i32,
}

impl VerificationGuard {
    /// Marks the guard as verified by the coordinator of this epoch.
    pub(crate) fn verified(self, coordinator_epoch: i32) -> Self {
        Self { coordinator_epoch, ..self }
    }

    /// The producer id and epoch of the batch.
    pub(crate) fn producer(&self) -> (i64, i16) {
        (self.producer_id, self.producer_epoch)
    }

    /// True if the batch may open a transaction.
    fn permits(&self, leader_epoch: i32, batch: &BatchHeader, state: &State) -> bool {
        let id = batch.producer_id;
        // A coordinator that does not know yet that it was replaced may verify a transaction that its successor has
        // ended.
        let replaced = state.producers.coordinator_epoch(id).is_some_and(|by| by > self.coordinator_epoch);
        let batch = (id, batch.producer_epoch, batch.base_sequence);
        self.leader_epoch == Some(leader_epoch)
            && batch == (self.producer_id, self.producer_epoch, self.base_sequence)
            && self.last_offset == state.producers.last_offset(id)
            && !replaced
    }
}

/// A transaction marker for one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TxnMarker {
    pub(crate) producer_id: i64,
    pub(crate) producer_epoch: i16,
    pub(crate) commit: bool,
    pub(crate) coordinator_epoch: i32,
    /// True if every transaction of the producer has its own epoch (transaction version 2).
    pub(crate) epoch_per_transaction: bool,
    /// The attempt number, which grows with every marker a coordinator sends; `None` from an admin tool.
    pub(crate) attempt: Option<u64>,
}

impl TxnMarker {
    fn batch(&self, wall_ms: i64) -> bytes::Bytes {
        let kind = if self.commit { ControlKind::Commit } else { ControlKind::Abort };
        let Self { producer_id, producer_epoch, coordinator_epoch, .. } = *self;
        records::control_batch(kind, producer_id, producer_epoch, coordinator_epoch, wall_ms, 0, 0)
    }
}

/// By producer, the newest marker handled since this node started: coordinator epoch and attempt.
#[derive(Debug, Default)]
pub(super) struct MarkerAttempts {
    newest: HashMap<i64, (i32, u64)>,
}

impl MarkerAttempts {
    fn is_late(&self, marker: &TxnMarker) -> bool {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::LateMarker) {
            return false;
        }
        let attempt = marker.attempt.map(|attempt| (marker.coordinator_epoch, attempt));
        let newest = self.newest.get(&marker.producer_id);
        attempt.zip(newest).is_some_and(|(attempt, newest)| attempt <= *newest)
    }

    fn on_append(&mut self, marker: &TxnMarker) {
        if let Some(attempt) = marker.attempt {
            self.newest.insert(marker.producer_id, (marker.coordinator_epoch, attempt));
        }
    }

    /// Drops producers that the partition has expired.
    pub(super) fn retain(&mut self, known: impl Fn(i64) -> bool) {
        self.newest.retain(|producer, _| known(*producer));
    }
}

impl State {
    /// Checks that a transactional batch belongs to an open transaction, or may open one.
    pub(super) fn check_transaction(
        &self,
        leader_epoch: i32,
        batch: &BatchHeader,
        guard: Option<&VerificationGuard>,
    ) -> Result<(), Refused> {
        let open = self.producers.has_open_transaction(batch.producer_id, batch.producer_epoch);
        if open || guard.is_some_and(|guard| guard.permits(leader_epoch, batch, self)) {
            return Ok(());
        }
        // Retriable: the next attempt is verified, and rejected for good if the transaction has ended.
        Err(Refused::new(
            ErrorCode::NotEnoughReplicas,
            "The transaction is not verified for this partition, or ended meanwhile; try again.",
        ))
    }

    pub(super) fn check_marker(&self, marker: &TxnMarker) -> Result<(), Refused> {
        if self.attempts.is_late(marker) {
            // A newer attempt was handled, so its sender no longer waits for this one.
            return Err(Refused::new(
                ErrorCode::RequestTimedOut,
                "A newer marker of the producer was handled.",
            ));
        }
        let epoch = self.producers.open_epoch(marker.producer_id);
        if marker.epoch_per_transaction && epoch.is_some_and(|open| marker.producer_epoch <= open) {
            return Err(Refused::new(
                ErrorCode::InvalidProducerEpoch,
                "The marker does not have a newer epoch than the open transaction.",
            ));
        }
        Ok(())
    }

    pub(super) fn on_marker(&mut self, marker: &TxnMarker) {
        self.attempts.on_append(marker);
    }
}

impl Partition {
    /// True if a producer has a transaction open here in this epoch: then its coordinator knows this partition.
    pub(crate) fn has_open_transaction(&self, producer_id: i64, producer_epoch: i16) -> bool {
        lock(&self.state).producers.has_open_transaction(producer_id, producer_epoch)
    }

    /// Takes a guard before the coordinator is asked about a batch; `None` if its transaction is open here.
    pub(crate) fn begin_verification(
        &self,
        (producer_id, producer_epoch): (i64, i16),
        base_sequence: i32,
    ) -> Option<VerificationGuard> {
        let state = lock(&self.state);
        if state.producers.has_open_transaction(producer_id, producer_epoch) {
            return None;
        }
        Some(VerificationGuard {
            leader_epoch: state.leading,
            producer_id,
            producer_epoch,
            base_sequence,
            last_offset: state.producers.last_offset(producer_id),
            coordinator_epoch: -1,
        })
    }

    /// Appends a marker, if it is the newest of its producer. With `leader_epoch`, only under that leader epoch.
    pub(crate) fn append_marker(
        &self,
        marker: TxnMarker,
        now_ms: i64,
        leader_epoch: Option<i32>,
    ) -> Result<Appended, Refused> {
        let batch = marker.batch(now_ms);
        let header = BatchHeader::parse(&batch).ok_or(ErrorCode::CorruptMessage)?;
        self.append(Ready { leader_epoch, marker: Some(marker), ..Ready::new(batch, header, now_ms) })
    }
}
