//! Batches rejected with a retriable error (disk full, below `min.insync.replicas`), which their producers send
//! again.
//!
//! Requests are pipelined: the batches after a rejected one may arrive when appends succeed again, and then follow a
//! sequence gap that this broker caused. On OUT_OF_ORDER_SEQUENCE_NUMBER librdkafka starts a new epoch, for all
//! partitions, and resends every unacknowledged batch under new sequences: a batch that is already in some log would
//! be duplicated. So the batches after a rejected one get the same error, until that one is appended.
//!
//! Never part of producer state: a hint, which may be lost, and which expires.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::NO_SEQUENCE;

use super::{BatchInfo, ahead};
use crate::loops::lock;

/// Expiry of a rejected batch: a usual client request timeout, in which pipelined batches may still arrive.
const EXPIRY_MS: i64 = 30_000;

/// Maximum number of tracked producers.
const MAX_PRODUCERS: usize = 4_096;

/// By producer, the first rejected batch that is not appended yet.
#[derive(Debug, Default)]
pub(crate) struct RejectedBatches {
    by_producer: HashMap<i64, RejectedBatch>,
}

#[derive(Clone, Copy, Debug)]
struct RejectedBatch {
    epoch: i16,
    base_sequence: i32,
    code: ErrorCode,
    lapses_ms: i64,
}

impl RejectedBatch {
    /// True if `batch` comes later in the same epoch.
    fn is_before(&self, batch: &BatchInfo) -> bool {
        let distance = ahead(self.base_sequence, batch.base_sequence);
        self.epoch == batch.producer_epoch && distance > 0 && distance <= i32::MAX / 2
    }
}

impl RejectedBatches {
    /// A batch was rejected.
    pub(crate) fn on_refused(&mut self, now_ms: i64, batch: &BatchInfo, code: ErrorCode) {
        let passing = matches!(
            code,
            ErrorCode::KafkaStorageError
                | ErrorCode::NotEnoughReplicas
                | ErrorCode::NotLeaderOrFollower
                | ErrorCode::UnknownTopicOrPartition
                | ErrorCode::UnknownTopicId
        );
        if !passing || batch.base_sequence == NO_SEQUENCE || self.before(now_ms, batch).is_some() {
            return;
        }
        if self.by_producer.len() >= MAX_PRODUCERS {
            self.by_producer.retain(|_, refused| refused.lapses_ms > now_ms);
        }
        if self.by_producer.len() < MAX_PRODUCERS {
            let (epoch, base_sequence) = (batch.producer_epoch, batch.base_sequence);
            let refused = RejectedBatch { epoch, base_sequence, code, lapses_ms: now_ms + EXPIRY_MS };
            self.by_producer.insert(batch.producer_id, refused);
        }
    }

    /// The error of an earlier rejected batch that is not appended yet.
    pub(crate) fn before(&self, now_ms: i64, batch: &BatchInfo) -> Option<ErrorCode> {
        let refused = self.by_producer.get(&batch.producer_id)?;
        (refused.is_before(batch) && refused.lapses_ms > now_ms).then_some(refused.code)
    }

    /// A batch is in the log.
    pub(crate) fn on_appended(&mut self, batch: &BatchInfo) {
        let is_it = |refused: &RejectedBatch| {
            refused.epoch != batch.producer_epoch || refused.base_sequence == batch.base_sequence
        };
        if self.by_producer.get(&batch.producer_id).is_some_and(is_it) {
            self.by_producer.remove(&batch.producer_id);
        }
    }
}

/// Batches that arrived before this node had a replica of their partition: a new topic, or a replica that was just
/// moved here. They are kept for the replica, so that later batches of the producer are not taken for its first.
#[derive(Default)]
pub(crate) struct EarlyBatches {
    /// Rarely true; every append checks it first.
    any: AtomicBool,
    batches: Mutex<VecDeque<EarlyBatch>>,
}

struct EarlyBatch {
    topic: String,
    index: i32,
    batch: BatchInfo,
    code: ErrorCode,
    at_ms: i64,
}

impl EarlyBatches {
    /// A batch found no replica.
    pub(crate) fn on_refused(
        &self,
        now_ms: i64,
        (topic, index): (&str, i32),
        batch: BatchInfo,
        code: ErrorCode,
    ) {
        if batch.base_sequence == NO_SEQUENCE {
            return;
        }
        let mut batches = lock(&self.batches);
        while batches.front().is_some_and(|early| early.at_ms + EXPIRY_MS <= now_ms) {
            batches.pop_front();
        }
        if batches.len() < MAX_PRODUCERS {
            batches.push_back(EarlyBatch { topic: topic.to_owned(), index, batch, code, at_ms: now_ms });
            self.any.store(true, Ordering::Release);
        }
    }

    /// Passes the early batches of this partition, in arrival order, to its replica.
    pub(crate) fn hand_over(&self, topic: &str, index: i32, mut to: impl FnMut(i64, &BatchInfo, ErrorCode)) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut batches = lock(&self.batches);
        batches.retain(|early| {
            let is_its = early.index == index && early.topic == topic;
            if is_its {
                to(early.at_ms, &early.batch, early.code);
            }
            !is_its
        });
        self.any.store(!batches.is_empty(), Ordering::Release);
    }
}
