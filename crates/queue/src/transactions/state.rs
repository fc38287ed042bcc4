//! The durable image of one transactional id, and the transitions between images.
//!
//! Pure values: a transition returns the next image and changes nothing; the coordinator adopts it when it is
//! durable. Invariant: `partitions` is empty unless the state is Ongoing or Prepare*, and never holds more after
//! Ongoing than Ongoing held.

use std::collections::BTreeSet;
use std::sync::Arc;

use moim_wire_kafka::ErrorCode;

use super::api::TopicPartition;

/// No producer id, no epoch.
pub(super) const NONE: i16 = -1;
/// The last epoch a client ever gets; the one above it is reserved for fencing.
pub const LAST_EPOCH: i16 = i16::MAX - 1;

/// The state of a transaction, with Kafka's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(i8)]
pub enum State {
    /// No transaction since the producer was initialised.
    Empty = 0,
    /// Partitions were added.
    Ongoing = 1,
    /// Commit is decided; markers are being written.
    PrepareCommit = 2,
    /// Abort is decided; markers are being written.
    PrepareAbort = 3,
    /// The last transaction was committed.
    CompleteCommit = 4,
    /// The last transaction was aborted.
    CompleteAbort = 5,
    /// The id has expired and its tombstone is being written.
    Dead = 6,
    /// The producer is being fenced. Never written: the fence and the abort are one record.
    PrepareEpochFence = 7,
}

impl State {
    /// All states.
    pub const ALL: [Self; 8] = [
        Self::Empty,
        Self::Ongoing,
        Self::PrepareCommit,
        Self::PrepareAbort,
        Self::CompleteCommit,
        Self::CompleteAbort,
        Self::Dead,
        Self::PrepareEpochFence,
    ];

    /// Kafka's name of the state.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::Ongoing => "Ongoing",
            Self::PrepareCommit => "PrepareCommit",
            Self::PrepareAbort => "PrepareAbort",
            Self::CompleteCommit => "CompleteCommit",
            Self::CompleteAbort => "CompleteAbort",
            Self::Dead => "Dead",
            Self::PrepareEpochFence => "PrepareEpochFence",
        }
    }

    /// True if a transaction has begun and not ended.
    pub fn is_running(self) -> bool {
        matches!(self, Self::Ongoing | Self::PrepareCommit | Self::PrepareAbort | Self::PrepareEpochFence)
    }

    /// True if the decision is made and markers are being written.
    pub(super) fn is_preparing(self) -> bool {
        matches!(self, Self::PrepareCommit | Self::PrepareAbort)
    }
}

/// The image of one transactional id in `__transaction_state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// The current producer id.
    pub producer_id: i64,
    /// The previous producer id, replaced because its epochs were exhausted; or -1.
    pub previous_id: i64,
    /// The current producer epoch, which fences all lower ones; -1 before the first InitProducerId is durable.
    pub epoch: i16,
    /// The epoch before the last bump that the producer itself requested, or -1. Lets it retry the request when the
    /// response was lost; any other bump clears it.
    pub last_epoch: i16,
    /// The producer id that takes over when the markers are written, because the epochs of this one are exhausted; or
    /// -1.
    pub next_id: i64,
    /// True if the open transaction, or the last one, ends under a newer epoch than its records (transaction version
    /// 2).
    pub epoch_per_transaction: bool,
    /// The transaction timeout.
    pub timeout_ms: i32,
    /// The transaction state.
    pub state: State,
    /// The partitions of the transaction.
    pub partitions: BTreeSet<TopicPartition>,
    /// Wall time at which the first partition was added, or -1.
    pub start_ms: i64,
    /// Wall time of the last change.
    pub updated_ms: i64,
}

/// A producer's claim to a transaction: its producer id and epoch.
pub(super) type Claim = (i64, i16);

impl Transaction {
    /// The image of an unused transactional id.
    pub(super) fn new(producer_id: i64, timeout_ms: i32, wall_ms: i64) -> Self {
        Self {
            producer_id,
            previous_id: -1,
            epoch: NONE,
            last_epoch: NONE,
            next_id: -1,
            epoch_per_transaction: false,
            timeout_ms,
            state: State::Empty,
            partitions: BTreeSet::new(),
            start_ms: -1,
            updated_ms: wall_ms,
        }
    }

    /// Checks the producer id and epoch of a client.
    pub(super) fn check_claim(&self, (producer_id, epoch): Claim) -> Result<(), ErrorCode> {
        if self.next_id != -1 && (producer_id, epoch) == (self.next_id, 0) {
            // It continues under the producer id it got with the end of the transaction whose markers are being
            // written.
            Err(ErrorCode::ConcurrentTransactions)
        } else if self.producer_id != producer_id {
            Err(ErrorCode::InvalidProducerIdMapping)
        } else if self.epoch != epoch {
            Err(ErrorCode::ProducerFenced)
        } else {
            Ok(())
        }
    }

    /// True if a client retries the end of a transaction that has its own epoch: it has the previous epoch.
    pub(super) fn is_repeated_end(&self, (producer_id, epoch): Claim) -> bool {
        let bumped = producer_id == self.producer_id && epoch.checked_add(1) == Some(self.epoch);
        let exhausted = producer_id == self.previous_id && epoch == LAST_EPOCH && self.epoch == 0;
        self.epoch_per_transaction && epoch >= 0 && (bumped || exhausted)
    }

    /// The producer id and epoch of the next transaction.
    pub(super) fn successor(&self) -> Claim {
        if self.next_id == -1 { (self.producer_id, self.epoch) } else { (self.next_id, 0) }
    }

    /// Checks whether a client that requests a new epoch, and sends its current one, may get it.
    fn check_current(&self, current: Option<Claim>) -> Result<(), ErrorCode> {
        let Some((producer_id, epoch)) = current else { return Ok(()) };
        let fits = self.epoch == NONE
            || (producer_id == self.producer_id && epoch == self.epoch)
            // The response to its last bump was lost, perhaps one that exhausted the epochs of the old id.
            || (self.last_epoch != NONE
                && epoch == self.last_epoch
                && (producer_id == self.producer_id || producer_id == self.previous_id));
        if fits { Ok(()) } else { Err(ErrorCode::ProducerFenced) }
    }

    /// A new epoch for a producer that starts, or that recovers after an error.
    pub(super) fn init(
        &self,
        timeout_ms: i32,
        current: Option<Claim>,
        fresh_id: i64,
        wall_ms: i64,
    ) -> Result<Self, ErrorCode> {
        self.check_current(current)?;
        let mut next = Self {
            timeout_ms,
            state: State::Empty,
            partitions: BTreeSet::new(),
            start_ms: -1,
            updated_ms: wall_ms,
            ..self.clone()
        };
        let repeated = self.epoch != NONE && current.is_some_and(|c| c != (self.producer_id, self.epoch));
        if repeated && self.epoch <= LAST_EPOCH {
            return Ok(next); // The epoch was bumped already.
        }
        next.last_epoch = current.map_or(NONE, |(_, epoch)| epoch);
        if self.epoch == NONE {
            next.last_epoch = NONE;
        }
        if self.epoch >= LAST_EPOCH {
            next.previous_id = self.producer_id;
            next.producer_id = fresh_id;
            next.epoch = 0;
        } else {
            next.epoch = self.epoch + 1;
        }
        Ok(next)
    }

    /// Checks whether a client that requests a new epoch may abort the open transaction.
    pub(super) fn check_fence(&self, current: Option<Claim>) -> Result<(), ErrorCode> {
        // A zombie must not abort the transaction of the producer that replaced it.
        let zombie = current.is_some_and(|c| c != (self.producer_id, self.epoch));
        if zombie { Err(ErrorCode::ProducerFenced) } else { Ok(()) }
    }

    /// Fences the producer and aborts its transaction, in one step. With `by_itself` the producer itself requested
    /// it, so it may retry with its current epoch.
    pub(super) fn fence(&self, by_itself: bool, wall_ms: i64) -> Self {
        let mut next = self.end(false, wall_ms);
        next.epoch = self.epoch.saturating_add(1);
        next.last_epoch = if by_itself { self.epoch } else { NONE };
        next
    }

    /// Begins or continues a transaction.
    pub(super) fn add(
        &self,
        partitions: Vec<TopicPartition>,
        epoch_per_transaction: bool,
        wall_ms: i64,
    ) -> Self {
        let mut next = self.clone();
        next.partitions.extend(partitions);
        if self.state != State::Ongoing {
            next.start_ms = wall_ms;
            next.epoch_per_transaction = false;
        }
        next.epoch_per_transaction |= epoch_per_transaction;
        next.state = State::Ongoing;
        next.updated_ms = wall_ms;
        next
    }

    /// Decides the transaction.
    pub(super) fn end(&self, commit: bool, wall_ms: i64) -> Self {
        let state = if commit { State::PrepareCommit } else { State::PrepareAbort };
        Self { state, updated_ms: wall_ms, ..self.clone() }
    }

    /// Decides the transaction of a producer that gets a new epoch with every transaction (transaction version 2).
    /// `fresh_id` is for one whose epochs are exhausted.
    pub(super) fn end_with_new_epoch(&self, commit: bool, fresh_id: i64, wall_ms: i64) -> Self {
        let mut next = self.end(commit, wall_ms);
        next.epoch_per_transaction = true;
        next.last_epoch = self.epoch;
        // The epoch above the last one is for markers only.
        next.epoch = self.epoch.saturating_add(1);
        if self.epoch >= LAST_EPOCH {
            next.next_id = fresh_id;
        }
        next
    }

    /// The markers are on every partition.
    pub(super) fn complete(&self, wall_ms: i64) -> Self {
        let commit = self.state == State::PrepareCommit;
        let state = if commit { State::CompleteCommit } else { State::CompleteAbort };
        let mut next = Self { state, partitions: BTreeSet::new(), updated_ms: wall_ms, ..self.clone() };
        if self.next_id != -1 {
            next.previous_id = self.producer_id;
            (next.producer_id, next.epoch) = self.successor();
            next.next_id = -1;
        }
        next
    }
}

/// Groups partitions by topic, as in requests and records.
pub(super) fn by_topic<'a>(
    partitions: impl IntoIterator<Item = &'a TopicPartition>,
) -> Vec<(Arc<str>, Vec<i32>)> {
    let mut topics: Vec<(Arc<str>, Vec<i32>)> = Vec::new();
    for p in partitions {
        match topics.last_mut() {
            Some((topic, list)) if *topic == p.topic => list.push(p.partition),
            _ => topics.push((p.topic.clone(), vec![p.partition])),
        }
    }
    topics
}
