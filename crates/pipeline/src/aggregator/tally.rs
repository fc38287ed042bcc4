//! Counting of a batch of messages by their text in the store: each client and sequence number counts once for its
//! text.
//!
//! Two rules ensure this, whatever is re-read and whichever aggregators read concurrently. First, a client's messages
//! stand in a partition in the order of their sequence numbers: a message whose number is not above all numbers read
//! before is a duplicate, and skipped. Second, a text counts only messages after the last position it has counted
//! (see [`crate::store::Text`]): this covers messages that an aggregator had counted, but not recorded as read, when
//! it stopped.
//!
//! A position is the offset, as long as the topic is not recreated. In a recreated topic offsets start at 0 again: it
//! is detected by a message with a new number before the position read so far, and from there on a position is the
//! offset plus a shift.
//!
//! A store with asynchronous replication loses writes in a failover, each shard on its own. An aggregator remembers
//! what it has written, and re-reads what the store has lost: from the position recorded in the store, if that went
//! back; from the beginning of the partition, if a text's count went back (a *rebuild*). During a rebuild, duplicates
//! are detected by what was read since the beginning, and every position counts once because a text knows its last
//! one. A rebuild in progress is recorded in the store, so that another aggregator completes it.
//!
//! The memory only ever causes re-reading: a store that was wiped meanwhile is filled from the beginning.

use std::collections::{BTreeMap, HashMap};

use futures_util::StreamExt;
use futures_util::future::try_join_all;

use moim_base::task::Shutdown;

use crate::consume::retry_while_unavailable;
use crate::store::{Aggregated, PositionedMessage, ReadTo, Store, StoreError, Text};

/// Concurrent script calls.
const AT_ONCE: usize = 256;
/// Number of texts to remember; beyond it, all are forgotten.
const REMEMBERED: usize = 1_000_000;
/// Number of remembered texts that one idle check compares with the store.
const IDLE_CHECK_TEXTS: usize = 10_000;

/// A message that was counted for its client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) partition: i32,
    pub(crate) offset: u64,
    pub(crate) client: &'a str,
    pub(crate) sn: u64,
    pub(crate) hash: &'a str,
    pub(crate) text: &'a [u8],
}

/// What the aggregator does with a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Commit the offsets.
    Counted,
    /// Re-read these partitions from these offsets, and the others from the beginning of the batch.
    Reread(BTreeMap<i32, u64>),
}

/// State of a partition while a batch is counted.
#[derive(Debug, Default)]
struct Reading<'a> {
    to: ReadTo,
    /// The last sequence number of each client of the batch.
    last: HashMap<&'a str, u64>,
}

impl<'a> Reading<'a> {
    /// The position of a message; none for a duplicate.
    fn position(&mut self, record: &Record<'a>, rebuild: Option<&mut Rebuild>) -> Option<u64> {
        let last = self.last.entry(record.client).or_default();
        if let Some(rebuild) = rebuild {
            if record.offset + self.to.shift < rebuild.until {
                return rebuild.is_new(record).then_some(record.offset + self.to.shift);
            }
            // The store may have lost writes since the rebuild began.
            *last = rebuild.last.get(record.client).copied().unwrap_or(0).max(*last);
        }
        if record.sn <= *last {
            return None;
        }
        *last = record.sn;
        if record.offset + self.to.shift < self.to.next {
            tracing::warn!(
                partition = record.partition,
                offset = record.offset,
                "topic message_aggregation was recreated; offsets start again"
            );
            self.to.shift = self.to.next - record.offset;
        }
        let position = record.offset + self.to.shift;
        self.to.next = position + 1;
        Some(position)
    }
}

/// A rebuild: a partition is re-read from its beginning.
#[derive(Debug)]
struct Rebuild {
    /// Position at which the rebuild ends.
    until: u64,
    last: HashMap<String, u64>,
}

impl Rebuild {
    fn is_new(&mut self, record: &Record<'_>) -> bool {
        let last = self.last.entry(record.client.to_owned()).or_default();
        let is_new = record.sn > *last;
        *last = record.sn.max(*last);
        is_new
    }
}

/// An aggregator's memory of a partition.
#[derive(Debug, Default)]
struct Memory {
    /// The position up to which it was read; none before the first read from the store.
    next: Option<u64>,
    /// The last counted position of each text.
    texts: BTreeMap<String, u64>,
    rebuild: Option<Rebuild>,
}

/// Counts batches in the store.
pub(crate) struct Tally {
    store: Store,
    partitions: BTreeMap<i32, Memory>,
    /// The text after which the next idle check starts.
    cursor: (i32, String),
}

impl Tally {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, partitions: BTreeMap::new(), cursor: (0, String::new()) }
    }

    /// A rebalance has changed the assignment.
    pub(crate) fn on_rebalance(&mut self) {
        self.partitions.clear();
    }

    /// Counts a batch; the records of each partition are in offset order.
    pub(crate) async fn count(
        &mut self,
        records: &[Record<'_>],
        shutdown: &Shutdown,
    ) -> Result<Step, StoreError> {
        let mut readings = load_readings(&self.store, records, shutdown).await?;
        let rereads = self.find_lost_positions(records, &readings);
        if !rereads.is_empty() {
            return Ok(Step::Reread(rereads));
        }
        let mut texts: HashMap<(i32, &str), (Text<'_>, Vec<PositionedMessage<'_>>)> = HashMap::new();
        for record in records {
            let rebuild =
                self.partitions.get_mut(&record.partition).and_then(|memory| memory.rebuild.as_mut());
            let reading = readings.get_mut(&record.partition);
            let Some(position) = reading.and_then(|reading| reading.position(record, rebuild)) else {
                continue;
            };
            let Record { partition, client, sn, hash, text, .. } = *record;
            let (_, messages) = texts
                .entry((partition, hash))
                .or_insert_with(|| (Text { hash, text, partition, counted_to: None }, Vec::with_capacity(1)));
            messages.push(PositionedMessage { client, sn, position });
        }
        let behind = self.count_texts(texts, shutdown).await?;
        if !behind.is_empty() {
            return self.rebuild(behind.into_iter().collect(), shutdown).await;
        }
        let store = &self.store;
        let notes = readings.iter().map(|(partition, reading)| async move {
            let last: Vec<(&str, u64)> = reading.last.iter().map(|(client, sn)| (*client, *sn)).collect();
            retry_while_unavailable(shutdown, || store.record_read(*partition, reading.to, &last)).await
        });
        try_join_all(notes).await?;
        self.on_recorded(records, &readings, shutdown).await?;
        Ok(Step::Counted)
    }

    /// Counts texts; returns the partitions of texts for which the store has lost counts.
    async fn count_texts<'a>(
        &mut self,
        texts: HashMap<(i32, &'a str), (Text<'a>, Vec<PositionedMessage<'a>>)>,
        shutdown: &Shutdown,
    ) -> Result<Vec<i32>, StoreError> {
        let (store, partitions) = (&self.store, &self.partitions);
        let steps = texts.into_values().map(|(text, messages)| async move {
            let memory = partitions.get(&text.partition);
            let counted_to = memory.and_then(|memory| memory.texts.get(text.hash)).copied();
            let text = Text { counted_to, ..text };
            let done = retry_while_unavailable(shutdown, || store.aggregate(text, &messages)).await?;
            Ok::<_, StoreError>((text, messages.last().map_or(0, |message| message.position), done))
        });
        let mut done = futures_util::stream::iter(steps).buffer_unordered(AT_ONCE);
        let (mut behind, mut written) = (Vec::new(), Vec::new());
        while let Some(step) = done.next().await {
            match step? {
                (text, position, Aggregated::Counted) => written.push((text, position)),
                (text, _, Aggregated::Behind) => behind.push(text.partition),
            }
        }
        drop(done);
        if self.partitions.values().map(|memory| memory.texts.len()).sum::<usize>() > REMEMBERED {
            self.partitions.values_mut().for_each(|memory| memory.texts.clear());
        }
        for (text, position) in written {
            let texts = &mut self.partitions.entry(text.partition).or_default().texts;
            let at = texts.entry(text.hash.to_owned()).or_default();
            *at = position.max(*at);
        }
        Ok(behind)
    }

    /// Compares the read positions with the store's; returns the offsets to re-read from.
    fn find_lost_positions(
        &mut self,
        records: &[Record<'_>],
        readings: &BTreeMap<i32, Reading<'_>>,
    ) -> BTreeMap<i32, u64> {
        let mut rereads = BTreeMap::new();
        for (partition, reading) in readings {
            let memory = self.partitions.entry(*partition).or_default();
            let ReadTo { shift, next, rebuild } = reading.to;
            if rebuild > 0 && memory.rebuild.is_none() {
                // Another aggregator has begun the rebuild and did not complete it.
                memory.rebuild = Some(Rebuild { until: rebuild, last: HashMap::new() });
                memory.next = Some(next);
                rereads.insert(*partition, 0);
                continue;
            }
            if memory.rebuild.is_some() {
                continue;
            }
            let first = records.iter().find(|record| record.partition == *partition);
            let first = first.map_or(0, |record| record.offset + shift);
            let is_back = memory.next.is_none_or(|known| known > next) && next < first;
            if memory.next.is_some_and(|known| known > next) {
                tracing::warn!(
                    partition,
                    position = next,
                    "read position went back in the store; partition re-read"
                );
            }
            memory.next = Some(next);
            if is_back {
                rereads.insert(*partition, next.saturating_sub(shift));
            }
        }
        rereads
    }

    /// Begins the rebuild of partitions.
    async fn rebuild(&mut self, partitions: Vec<i32>, shutdown: &Shutdown) -> Result<Step, StoreError> {
        let mut rereads = BTreeMap::new();
        for partition in partitions {
            let memory = self.partitions.entry(partition).or_default();
            let until = memory.next.unwrap_or(0);
            tracing::warn!(partition, until, "text counts went back in the store; partition rebuild");
            retry_while_unavailable(shutdown, || self.store.record_rebuild(partition, until)).await?;
            memory.rebuild = Some(Rebuild { until, last: HashMap::new() });
            memory.texts.clear();
            rereads.insert(partition, 0);
        }
        Ok(Step::Reread(rereads))
    }

    /// The store has recorded the read positions of a batch.
    async fn on_recorded(
        &mut self,
        records: &[Record<'_>],
        readings: &BTreeMap<i32, Reading<'_>>,
        shutdown: &Shutdown,
    ) -> Result<(), StoreError> {
        for (partition, reading) in readings {
            let memory = self.partitions.entry(*partition).or_default();
            memory.next = Some(reading.to.next);
            let last = records.iter().rfind(|record| record.partition == *partition);
            let read = last.map_or(0, |record| record.offset + reading.to.shift + 1);
            let Some(rebuild) = memory.rebuild.take_if(|rebuild| read >= rebuild.until) else { continue };
            // The store may have lost writes meanwhile.
            let next = reading.to.next.max(rebuild.until);
            let last: Vec<(&str, u64)> =
                rebuild.last.iter().map(|(client, sn)| (client.as_str(), *sn)).collect();
            let to = ReadTo { next, ..reading.to };
            retry_while_unavailable(shutdown, || self.store.record_read(*partition, to, &last)).await?;
            retry_while_unavailable(shutdown, || self.store.record_rebuild(*partition, 0)).await?;
            memory.next = Some(next);
        }
        Ok(())
    }

    /// Idle check: compares some of the counted texts with the store, and rebuilds the partitions of texts whose
    /// counts went back. Completes a rebuild that another aggregator has begun.
    pub(crate) async fn idle_check(
        &mut self,
        assigned: &[i32],
        shutdown: &Shutdown,
    ) -> Result<Step, StoreError> {
        for partition in assigned {
            let (to, _) = retry_while_unavailable(shutdown, || self.store.read_to(*partition, &[])).await?;
            let memory = self.partitions.entry(*partition).or_default();
            if to.rebuild > 0 && memory.rebuild.is_none() {
                memory.rebuild = Some(Rebuild { until: to.rebuild, last: HashMap::new() });
                memory.next = Some(memory.next.map_or(to.next, |next| next.max(to.next)));
                return Ok(Step::Reread([(*partition, 0)].into()));
            }
        }
        let cursor = std::mem::take(&mut self.cursor);
        let remembered = self.partitions.iter().filter(|(_, memory)| memory.rebuild.is_none());
        let after = remembered.flat_map(|(partition, memory)| {
            memory.texts.iter().map(|(hash, position)| (*partition, hash.clone(), *position))
        });
        let some: Vec<_> =
            after.filter(|(p, h, _)| (*p, h) > (cursor.0, &cursor.1)).take(IDLE_CHECK_TEXTS).collect();
        if let Some((partition, hash, _)) = some.last().filter(|_| some.len() == IDLE_CHECK_TEXTS) {
            self.cursor = (*partition, hash.clone());
        }
        let store = &self.store;
        let looks = some.into_iter().map(|(partition, hash, position)| async move {
            let at = retry_while_unavailable(shutdown, || store.text_counted_to(&hash, partition)).await?;
            Ok::<_, StoreError>(at.is_none_or(|at| at < position).then_some(partition))
        });
        let mut looks = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
        let mut behind = std::collections::BTreeSet::new();
        while let Some(look) = looks.next().await {
            behind.extend(look?);
        }
        drop(looks);
        if behind.is_empty() {
            return Ok(Step::Counted);
        }
        self.rebuild(behind.into_iter().collect(), shutdown).await
    }
}

/// Reads the store's state of the partitions and clients of a batch.
async fn load_readings<'a>(
    store: &Store,
    records: &[Record<'a>],
    shutdown: &Shutdown,
) -> Result<BTreeMap<i32, Reading<'a>>, StoreError> {
    let mut readings: BTreeMap<i32, Reading<'a>> = BTreeMap::new();
    for record in records {
        readings.entry(record.partition).or_default().last.insert(record.client, 0);
    }
    let lookups = readings.iter_mut().map(|(partition, reading)| async move {
        let clients: Vec<&str> = reading.last.keys().copied().collect();
        let (to, last) = retry_while_unavailable(shutdown, || store.read_to(*partition, &clients)).await?;
        reading.to = to;
        reading.last = clients.into_iter().zip(last).collect();
        Ok::<(), StoreError>(())
    });
    try_join_all(lookups).await?;
    Ok(readings)
}

#[cfg(test)]
mod tests;
