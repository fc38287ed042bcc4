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
//! Nothing is remembered from one batch to the next: the store may have been wiped meanwhile.

use std::collections::{BTreeMap, HashMap};

use futures_util::StreamExt;
use futures_util::future::try_join_all;

use moim_base::task::Shutdown;

use crate::consume::patiently;
use crate::store::{Placed, ReadTo, Store, StoreError, Text};

/// Scripts under way at a time.
const AT_ONCE: usize = 256;

/// A message that was counted for its client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record<'a> {
    pub(super) partition: i32,
    pub(super) offset: u64,
    pub(super) client: &'a str,
    pub(super) sn: u64,
    pub(super) hash: &'a str,
    pub(super) text: &'a [u8],
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
    fn place(&mut self, record: &Record<'a>) -> Option<u64> {
        let last = self.last.entry(record.client).or_default();
        if record.sn <= *last {
            return None;
        }
        *last = record.sn;
        if record.offset + self.to.shift < self.to.next {
            tracing::warn!(
                partition = record.partition,
                offset = record.offset,
                "the topic of counted messages was made anew"
            );
            self.to.shift = self.to.next - record.offset;
        }
        let place = record.offset + self.to.shift;
        self.to.next = place + 1;
        Some(place)
    }
}

/// Counts a batch; each partition's records stand in their order.
pub(super) async fn count(
    store: &Store,
    records: &[Record<'_>],
    shutdown: &Shutdown,
) -> Result<(), StoreError> {
    let mut readings = look_up(store, records, shutdown).await?;
    let mut texts: HashMap<(i32, &str), (Text<'_>, Vec<Placed<'_>>)> = HashMap::new();
    for record in records {
        let Some(place) = readings.get_mut(&record.partition).and_then(|reading| reading.place(record))
        else {
            continue;
        };
        let Record { partition, client, sn, hash, text, .. } = *record;
        let (_, messages) = texts
            .entry((partition, hash))
            .or_insert_with(|| (Text { hash, text, partition }, Vec::with_capacity(1)));
        messages.push(Placed { client, sn, place });
    }
    let steps = texts.values().map(|(text, messages)| async move {
        patiently(shutdown, || store.aggregate(*text, messages)).await
    });
    let mut done = futures_util::stream::iter(steps).buffer_unordered(AT_ONCE);
    while let Some(step) = done.next().await {
        step?;
    }
    let notes = readings.iter().map(|(partition, reading)| async move {
        let last: Vec<(&str, u64)> = reading.last.iter().map(|(client, sn)| (*client, *sn)).collect();
        patiently(shutdown, || store.note_read(*partition, reading.to, &last)).await
    });
    try_join_all(notes).await.map(drop)
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
