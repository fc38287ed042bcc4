//! Batches that were refused for the moment (no space, too few copies in sync), which their producers send again.
//!
//! Requests are pipelined: those behind a refused one may arrive when batches are taken again, and then stand at a gap
//! that this broker made. Told of a gap, librdkafka begins a new epoch, for all partitions, and sends again under new
//! sequences whatever was not acknowledged: a batch that is in some log already would be there twice. So what comes
//! behind a refused batch is refused with the same error, until that one is there.
//!
//! Never part of producer state: a hint, which may be lost, and which lapses.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::NO_SEQUENCE;

use super::{BatchInfo, ahead};
use crate::loops::lock;

/// For as long as what was sent before the refusal was heard of may arrive: the usual patience of a client.
const LAPSES_MS: i64 = 30_000;

/// Producers beyond this many are not remembered.
const MOST: usize = 4_096;

/// By producer, the first batch that was refused and is not there yet.
#[derive(Debug, Default)]
pub(crate) struct RefusedBatches {
    by_producer: HashMap<i64, RefusedBatch>,
}

#[derive(Clone, Copy, Debug)]
struct RefusedBatch {
    epoch: i16,
    base_sequence: i32,
    code: ErrorCode,
    lapses_ms: i64,
}

impl RefusedBatch {
    /// Whether the batch comes later in the same epoch.
    fn is_before(&self, batch: &BatchInfo) -> bool {
        let distance = ahead(self.base_sequence, batch.base_sequence);
        self.epoch == batch.producer_epoch && distance > 0 && distance <= i32::MAX / 2
    }
}

impl RefusedBatches {
    /// A batch was not appended.
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
        if self.by_producer.len() >= MOST {
            self.by_producer.retain(|_, refused| refused.lapses_ms > now_ms);
        }
        if self.by_producer.len() < MOST {
            let (epoch, base_sequence) = (batch.producer_epoch, batch.base_sequence);
            let refused = RefusedBatch { epoch, base_sequence, code, lapses_ms: now_ms + LAPSES_MS };
            self.by_producer.insert(batch.producer_id, refused);
        }
    }

    /// With what a batch before this one was refused that is not there yet.
    pub(crate) fn before(&self, now_ms: i64, batch: &BatchInfo) -> Option<ErrorCode> {
        let refused = self.by_producer.get(&batch.producer_id)?;
        (refused.is_before(batch) && refused.lapses_ms > now_ms).then_some(refused.code)
    }

    /// A batch is in the log.
    pub(crate) fn on_there(&mut self, batch: &BatchInfo) {
        let is_it = |refused: &RefusedBatch| {
            refused.epoch != batch.producer_epoch || refused.base_sequence == batch.base_sequence
        };
        if self.by_producer.get(&batch.producer_id).is_some_and(is_it) {
            self.by_producer.remove(&batch.producer_id);
        }
    }
}

/// Batches that came before this node had a copy of their partition: a topic just made, a copy just moved here. They are
/// kept for the copy, so that what comes behind them is not taken for the beginning.
#[derive(Default)]
pub(crate) struct TurnedAway {
    /// Hardly ever: whoever appends looks here first.
    any: AtomicBool,
    batches: Mutex<VecDeque<Early>>,
}

struct Early {
    topic: String,
    index: i32,
    batch: BatchInfo,
    code: ErrorCode,
    at_ms: i64,
}

impl TurnedAway {
    /// A batch found no copy.
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
        while batches.front().is_some_and(|early| early.at_ms + LAPSES_MS <= now_ms) {
            batches.pop_front();
        }
        if batches.len() < MOST {
            batches.push_back(Early { topic: topic.to_owned(), index, batch, code, at_ms: now_ms });
            self.any.store(true, Ordering::Release);
        }
    }

    /// What came too early for this partition, in the order of its coming, goes to its copy.
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
