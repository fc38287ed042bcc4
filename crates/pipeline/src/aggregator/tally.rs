//! A batch of counted messages on its way into the store: each client and sequence number counts once for its text.
//!
//! Two rules make it so, whatever is read again and whoever else reads. A client's messages stand in a partition in the order
//! of their numbers: one whose number is not above all that were read before it is a repeat, and left aside. And a text counts
//! only what stands behind the last place it has counted (see [`crate::store::Text`]): that holds for what an aggregator had
//! counted, and not noted as read, when it ended.
//!
//! A place is the offset, as long as there is one topic. Where the topic was made anew, offsets begin again: a message with a
//! new number before the place that was read to can be nothing else, and from there on places are offsets and a shift.
//!
//! A store that replicates asynchronously goes back in a failover, each shard on its own. What an aggregator has written it
//! remembers, and reads again where the store has less: from the place that the store knows, when that went back; from the
//! beginning of the partition, when it was a text's count (a *rebuild*). During a rebuild a repeat is known by what was read
//! since the beginning, and every place counts once because a text knows its last one. That a rebuild is under way is kept in the
//! store, so that another aggregator ends it.
//!
//! What is remembered only ever leads to reading again: a store that was wiped meanwhile is read into from the beginning.

use std::collections::{BTreeMap, HashMap};

use futures_util::StreamExt;
use futures_util::future::try_join_all;

use moim_base::task::Shutdown;

use crate::consume::patiently;
use crate::store::{Aggregated, Placed, ReadTo, Store, StoreError, Text};

/// Scripts under way at a time.
const AT_ONCE: usize = 256;
/// Texts that are remembered; with more, all are forgotten.
const REMEMBERED: usize = 1_000_000;
/// Texts that are looked at again in one go while nothing else is to do.
const LOOKED_AT: usize = 10_000;

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

/// What to do with a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Commit its offsets.
    Counted,
    /// Read these partitions again from these offsets, and the others from the beginning of the batch.
    Reread(BTreeMap<i32, u64>),
}

/// What is known of a partition.
#[derive(Debug, Default)]
struct Reading<'a> {
    to: ReadTo,
    /// The last number of each client of the batch.
    last: HashMap<&'a str, u64>,
}

impl<'a> Reading<'a> {
    /// The place of a message; none for a repeat.
    fn place(&mut self, record: &Record<'a>, rebuild: Option<&mut Rebuild>) -> Option<u64> {
        let last = self.last.entry(record.client).or_default();
        if let Some(rebuild) = rebuild {
            if record.offset + self.to.shift < rebuild.until {
                return rebuild.is_new(record).then_some(record.offset + self.to.shift);
            }
            // The store may have gone back since the rebuild began.
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
                "topic message_aggregation was recreated; offsets begin again"
            );
            self.to.shift = self.to.next - record.offset;
        }
        let place = record.offset + self.to.shift;
        self.to.next = place + 1;
        Some(place)
    }
}

/// A partition that is read from its beginning.
#[derive(Debug)]
struct Rebuild {
    /// Up to this place.
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

/// What an aggregator remembers of a partition.
#[derive(Debug, Default)]
struct Memory {
    /// The place up to which it was read; none before the store was asked.
    next: Option<u64>,
    /// The last place that each text was counted up to.
    texts: BTreeMap<String, u64>,
    rebuild: Option<Rebuild>,
}

/// The side of the store.
pub(crate) struct Tally {
    store: Store,
    partitions: BTreeMap<i32, Memory>,
    /// The text after which the next look at remembered ones begins.
    cursor: (i32, String),
}

impl Tally {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, partitions: BTreeMap::new(), cursor: (0, String::new()) }
    }

    /// Partitions have changed hands.
    pub(crate) fn on_change(&mut self) {
        self.partitions.clear();
    }

    /// Counts a batch; each partition's records stand in their order.
    pub(crate) async fn count(
        &mut self,
        records: &[Record<'_>],
        shutdown: &Shutdown,
    ) -> Result<Step, StoreError> {
        let mut readings = look_up(&self.store, records, shutdown).await?;
        let rereads = self.went_back(records, &readings);
        if !rereads.is_empty() {
            return Ok(Step::Reread(rereads));
        }
        let mut texts: HashMap<(i32, &str), (Text<'_>, Vec<Placed<'_>>)> = HashMap::new();
        for record in records {
            let rebuild =
                self.partitions.get_mut(&record.partition).and_then(|memory| memory.rebuild.as_mut());
            let reading = readings.get_mut(&record.partition);
            let Some(place) = reading.and_then(|reading| reading.place(record, rebuild)) else { continue };
            let Record { partition, client, sn, hash, text, .. } = *record;
            let (_, messages) = texts
                .entry((partition, hash))
                .or_insert_with(|| (Text { hash, text, partition, counted_to: None }, Vec::with_capacity(1)));
            messages.push(Placed { client, sn, place });
        }
        let behind = self.count_texts(texts, shutdown).await?;
        if !behind.is_empty() {
            return self.rebuild(behind.into_iter().collect(), shutdown).await;
        }
        let store = &self.store;
        let notes = readings.iter().map(|(partition, reading)| async move {
            let last: Vec<(&str, u64)> = reading.last.iter().map(|(client, sn)| (*client, *sn)).collect();
            patiently(shutdown, || store.note_read(*partition, reading.to, &last)).await
        });
        try_join_all(notes).await?;
        self.on_noted(records, &readings, shutdown).await?;
        Ok(Step::Counted)
    }

    /// Counts texts; answers the partitions of those that the store knows less of than was written.
    async fn count_texts<'a>(
        &mut self,
        texts: HashMap<(i32, &'a str), (Text<'a>, Vec<Placed<'a>>)>,
        shutdown: &Shutdown,
    ) -> Result<Vec<i32>, StoreError> {
        let (store, partitions) = (&self.store, &self.partitions);
        let steps = texts.into_values().map(|(text, messages)| async move {
            let memory = partitions.get(&text.partition);
            let counted_to = memory.and_then(|memory| memory.texts.get(text.hash)).copied();
            let text = Text { counted_to, ..text };
            let done = patiently(shutdown, || store.aggregate(text, &messages)).await?;
            Ok::<_, StoreError>((text, messages.last().map_or(0, |message| message.place), done))
        });
        let mut done = futures_util::stream::iter(steps).buffer_unordered(AT_ONCE);
        let (mut behind, mut written) = (Vec::new(), Vec::new());
        while let Some(step) = done.next().await {
            match step? {
                (text, place, Aggregated::Counted) => written.push((text, place)),
                (text, _, Aggregated::Behind) => behind.push(text.partition),
            }
        }
        drop(done);
        if self.partitions.values().map(|memory| memory.texts.len()).sum::<usize>() > REMEMBERED {
            self.partitions.values_mut().for_each(|memory| memory.texts.clear());
        }
        for (text, place) in written {
            let texts = &mut self.partitions.entry(text.partition).or_default().texts;
            let at = texts.entry(text.hash.to_owned()).or_default();
            *at = place.max(*at);
        }
        Ok(behind)
    }

    /// Where the store knows of less than was read: what to read again.
    fn went_back(
        &mut self,
        records: &[Record<'_>],
        readings: &BTreeMap<i32, Reading<'_>>,
    ) -> BTreeMap<i32, u64> {
        let mut rereads = BTreeMap::new();
        for (partition, reading) in readings {
            let memory = self.partitions.entry(*partition).or_default();
            let ReadTo { shift, next, rebuild } = reading.to;
            if rebuild > 0 && memory.rebuild.is_none() {
                // Another aggregator has begun it, and did not end it.
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
                    place = next,
                    "read position went back in the store; reading again"
                );
            }
            memory.next = Some(next);
            if is_back {
                rereads.insert(*partition, next.saturating_sub(shift));
            }
        }
        rereads
    }

    /// Begins to read partitions from their beginning.
    async fn rebuild(&mut self, partitions: Vec<i32>, shutdown: &Shutdown) -> Result<Step, StoreError> {
        let mut rereads = BTreeMap::new();
        for partition in partitions {
            let memory = self.partitions.entry(partition).or_default();
            let until = memory.next.unwrap_or(0);
            tracing::warn!(
                partition,
                until,
                "text counts went back in the store; counting the partition again"
            );
            patiently(shutdown, || self.store.note_rebuild(partition, until)).await?;
            memory.rebuild = Some(Rebuild { until, last: HashMap::new() });
            memory.texts.clear();
            rereads.insert(partition, 0);
        }
        Ok(Step::Reread(rereads))
    }

    /// The store knows up to where a batch was read.
    async fn on_noted(
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
            // The store may have gone back meanwhile.
            let next = reading.to.next.max(rebuild.until);
            let last: Vec<(&str, u64)> =
                rebuild.last.iter().map(|(client, sn)| (client.as_str(), *sn)).collect();
            let to = ReadTo { next, ..reading.to };
            patiently(shutdown, || self.store.note_read(*partition, to, &last)).await?;
            patiently(shutdown, || self.store.note_rebuild(*partition, 0)).await?;
            memory.next = Some(next);
        }
        Ok(())
    }

    /// Looks at some of the texts that were counted, while nothing else is to do: those whose counts went back are counted again.
    /// A rebuild that another aggregator has begun is ended.
    pub(crate) async fn look_back(
        &mut self,
        assigned: &[i32],
        shutdown: &Shutdown,
    ) -> Result<Step, StoreError> {
        for partition in assigned {
            let (to, _) = patiently(shutdown, || self.store.read_to(*partition, &[])).await?;
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
            memory.texts.iter().map(|(hash, place)| (*partition, hash.clone(), *place))
        });
        let some: Vec<_> =
            after.filter(|(p, h, _)| (*p, h) > (cursor.0, &cursor.1)).take(LOOKED_AT).collect();
        if let Some((partition, hash, _)) = some.last().filter(|_| some.len() == LOOKED_AT) {
            self.cursor = (*partition, hash.clone());
        }
        let store = &self.store;
        let looks = some.into_iter().map(|(partition, hash, place)| async move {
            let at = patiently(shutdown, || store.text_counted_to(&hash, partition)).await?;
            Ok::<_, StoreError>(at.is_none_or(|at| at < place).then_some(partition))
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

/// What the store knows of the partitions and clients of a batch.
async fn look_up<'a>(
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
        let (to, last) = patiently(shutdown, || store.read_to(*partition, &clients)).await?;
        reading.to = to;
        reading.last = clients.into_iter().zip(last).collect();
        Ok::<(), StoreError>(())
    });
    try_join_all(lookups).await?;
    Ok(readings)
}

#[cfg(test)]
mod tests;
