//! The offsets of one group: committed, being written, and pending in a transaction.
//!
//! A plain commit is `writing` until its batch is durable, then `committed`. A commit inside a transaction is a
//! `TxnBatch` from the request of its write until the marker of its producer. Invariant: of two commits for one
//! partition the later one in the log wins, whatever the order in which they become visible; `Committed::seq` is that
//! order. A reload of the log gives the same result.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::api::{FetchedGroup, FetchedOffset, FetchedTopic, OffsetFetch, PersistToken, TxnProducer};
use super::codes::ErrorCode;
use super::records::OffsetValue;

/// A partition of a topic.
pub(super) type TopicPartition = (Arc<str>, i32);

/// An offset with its position in the log order.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Committed {
    pub(super) value: OffsetValue,
    pub(super) seq: u64,
}

/// The offsets of one write of an open transaction.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct TxnBatch {
    pub(super) write: PersistToken,
    pub(super) durable: bool,
    /// Set if the marker was applied before the write was reported durable.
    pub(super) decided: Option<bool>,
    pub(super) offsets: Vec<(TopicPartition, OffsetValue)>,
}

/// All offsets of a group; see the module comment.
#[derive(Default, Debug)]
pub(super) struct Offsets {
    committed: BTreeMap<Arc<str>, BTreeMap<i32, Committed>>,
    writing: BTreeMap<PersistToken, Vec<(TopicPartition, OffsetValue)>>,
    txns: BTreeMap<i64, Vec<TxnBatch>>,
}

impl Offsets {
    /// True if no offset is committed, being written or pending in a transaction.
    pub(super) fn is_empty(&self) -> bool {
        self.committed.is_empty() && self.writing.is_empty() && self.txns.is_empty()
    }

    #[cfg(test)]
    fn iter(&self) -> impl Iterator<Item = (&Arc<str>, i32, &Committed)> {
        self.committed.iter().flat_map(|(topic, partitions)| {
            partitions.iter().map(move |(partition, committed)| (topic, *partition, committed))
        })
    }

    /// Holds the offsets of a write until it is durable.
    pub(super) fn begin(&mut self, write: PersistToken, offsets: Vec<(TopicPartition, OffsetValue)>) {
        self.writing.insert(write, offsets);
    }

    pub(super) fn on_durable(&mut self, write: PersistToken) {
        for (key, value) in self.writing.remove(&write).unwrap_or_default() {
            self.put(key, Committed { value, seq: write.0 });
        }
    }

    pub(super) fn on_failed(&mut self, write: PersistToken) {
        self.writing.remove(&write);
    }

    /// Makes an offset visible unless a later one already is.
    pub(super) fn put(&mut self, (topic, partition): TopicPartition, new: Committed) {
        let partitions = self.committed.entry(topic).or_default();
        match partitions.get(&partition) {
            Some(old) if old.seq > new.seq => {}
            _ => {
                partitions.insert(partition, new);
            }
        }
    }

    pub(super) fn begin_txn(&mut self, producer: TxnProducer, batch: TxnBatch) {
        self.txns.entry(producer.id).or_default().push(batch);
    }

    /// The write of a transactional batch completed. Returns true if the producer still has an open batch here.
    pub(super) fn on_txn_written(&mut self, producer_id: i64, write: PersistToken, ok: bool) -> bool {
        let Some(batches) = self.txns.get_mut(&producer_id) else { return false };
        if let Some(at) = batches.iter().position(|batch| batch.write == write) {
            batches[at].durable = true;
            if !ok || batches[at].decided.is_some() {
                let batch = batches.remove(at);
                if ok && batch.decided == Some(true) {
                    self.materialise(batch);
                }
            }
        }
        self.forget_if_closed(producer_id)
    }

    /// The producer's transaction ended; the marker follows the writes below `before` in the log. Returns true if the
    /// producer still has an open batch here.
    pub(super) fn on_marker(&mut self, producer_id: i64, before: PersistToken, commit: bool) -> bool {
        let Some(batches) = self.txns.remove(&producer_id) else { return false };
        let mut open = Vec::new();
        for mut batch in batches {
            if batch.write >= before {
                // A batch of a later transaction.
                open.push(batch);
            } else if !batch.durable {
                batch.decided.get_or_insert(commit);
                open.push(batch);
            } else if commit {
                self.materialise(batch);
            }
        }
        self.txns.insert(producer_id, open);
        self.forget_if_closed(producer_id)
    }

    fn forget_if_closed(&mut self, producer_id: i64) -> bool {
        let open = self.txns.get(&producer_id).is_some_and(|batches| !batches.is_empty());
        if !open {
            self.txns.remove(&producer_id);
        }
        open
    }

    fn materialise(&mut self, batch: TxnBatch) {
        for (key, value) in batch.offsets {
            self.put(key, Committed { value, seq: batch.write.0 });
        }
    }

    fn is_unstable(&self, topic: &str, partition: i32) -> bool {
        let touches =
            |batch: &TxnBatch| batch.offsets.iter().any(|((t, p), _)| *p == partition && t.as_ref() == topic);
        self.txns.values().flatten().any(touches)
    }

    /// Answers OffsetFetch.
    pub(super) fn fetch(&self, request: &OffsetFetch) -> FetchedGroup {
        let topics = match &request.topics {
            None => {
                let all = |(topic, partitions): (&Arc<str>, &BTreeMap<i32, Committed>)| FetchedTopic {
                    topic: topic.clone(),
                    partitions: partitions
                        .keys()
                        .map(|p| self.fetch_one(topic, *p, request.require_stable))
                        .collect(),
                };
                self.committed.iter().map(all).collect()
            }
            Some(topics) => {
                let named = |(topic, partitions): &(Arc<str>, Vec<i32>)| FetchedTopic {
                    topic: topic.clone(),
                    partitions: partitions
                        .iter()
                        .map(|p| self.fetch_one(topic, *p, request.require_stable))
                        .collect(),
                };
                topics.iter().map(named).collect()
            }
        };
        FetchedGroup { group: request.group.clone(), error: ErrorCode::None, topics }
    }

    fn fetch_one(&self, topic: &str, partition: i32, require_stable: bool) -> FetchedOffset {
        let none =
            |error| FetchedOffset { partition, offset: -1, leader_epoch: -1, metadata: String::new(), error };
        if require_stable && self.is_unstable(topic, partition) {
            return none(ErrorCode::UnstableOffsetCommit);
        }
        match self.committed.get(topic).and_then(|partitions| partitions.get(&partition)) {
            None => none(ErrorCode::None),
            Some(Committed { value, .. }) => FetchedOffset {
                partition,
                offset: value.offset,
                leader_epoch: value.leader_epoch,
                metadata: value.metadata.clone(),
                error: ErrorCode::None,
            },
        }
    }

    /// The partitions that `gone` selects among the visible offsets and those being written, which a tombstone
    /// written now would follow in the log.
    pub(super) fn keys(
        &self,
        mut gone: impl FnMut(&str, i32, Option<&Committed>) -> bool,
    ) -> Vec<TopicPartition> {
        let mut keys = Vec::new();
        for (topic, partitions) in &self.committed {
            let picked = partitions.iter().filter(|(partition, old)| gone(topic, **partition, Some(old)));
            keys.extend(picked.map(|(partition, _)| (topic.clone(), *partition)));
        }
        let writing = self.writing.values().flatten().map(|(key, _)| key);
        let picked: Vec<_> =
            writing.filter(|(topic, partition)| gone(topic, *partition, None)).cloned().collect();
        keys.extend(picked);
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Tombstones are durable: earlier offsets in the log are deleted. Pending transactional offsets stay: the log
    /// cannot take them back.
    pub(super) fn on_tombstones(&mut self, keys: &[TopicPartition], write: PersistToken) {
        for (topic, partition) in keys {
            let old = self.committed.get(topic).and_then(|partitions| partitions.get(partition));
            if old.is_some_and(|old| old.seq < write.0) {
                self.on_tombstone(topic, *partition);
            }
        }
    }

    /// Applies a tombstone from the log.
    pub(super) fn on_tombstone(&mut self, topic: &str, partition: i32) {
        if let Some(partitions) = self.committed.get_mut(topic) {
            partitions.remove(&partition);
            if partitions.is_empty() {
                self.committed.remove(topic);
            }
        }
    }

    /// The producers with an open transaction here.
    pub(super) fn open_producers(&self) -> impl Iterator<Item = i64> {
        self.txns.keys().copied()
    }

    /// The state that a reload must reproduce: visible and pending offsets.
    #[cfg(test)]
    pub(super) fn image(&self) -> String {
        use std::fmt::Write;
        let mut out = String::new();
        for (topic, partition, committed) in self.iter() {
            let _ = writeln!(out, "  {topic}/{partition} {:?}", committed.value);
        }
        for (producer, batches) in &self.txns {
            for (key, value) in batches.iter().flat_map(|batch| &batch.offsets) {
                let _ = writeln!(out, "  open {producer} {key:?} {value:?}");
            }
        }
        out
    }
}
