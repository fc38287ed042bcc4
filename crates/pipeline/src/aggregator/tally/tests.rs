//! Aggregators read a topic with duplicates, in batches of any size, stop at any point, and re-read concurrently:
//! every client and sequence number must count once.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::FutureExt;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::store::tests::{now, store};

const NAMES: [&str; 3] = ["a", "b", "c"];
const TEXTS: [&str; 4] = ["t0", "t1", "t2", "t3"];

/// A partition's log: a client's sequence numbers rise, with gaps (those messages are in other partitions), and some
/// are duplicates.
fn log(partition: i32, steps: &[(usize, u64, usize, bool)]) -> Vec<Record<'static>> {
    let (mut last, mut records) = (BTreeMap::<&str, (u64, usize)>::new(), Vec::new());
    for (offset, (client, step, text, again)) in steps.iter().enumerate() {
        let client = NAMES[*client];
        let (sn, text) = match last.get(client) {
            Some((sn, text)) if *again => (*sn, *text),
            before => (before.map_or(0, |(sn, _)| *sn) + step, *text),
        };
        last.insert(client, (sn, text));
        let (hash, offset) = (TEXTS[text], offset as u64 * 2);
        records.push(Record { partition, offset, client, sn, hash, text: hash.as_bytes() });
    }
    records
}

/// Expected count of each text, without duplicates.
fn expected<'a>(logs: impl Iterator<Item = &'a Record<'a>>) -> BTreeMap<&'a str, u64> {
    let distinct: BTreeSet<_> =
        logs.map(|record| (record.hash, record.partition, record.client, record.sn)).collect();
    let mut counts = BTreeMap::new();
    distinct.iter().for_each(|(hash, ..)| *counts.entry(*hash).or_default() += 1);
    counts
}

fn counted(store: &Store) -> BTreeMap<&'static str, u64> {
    let count = |hash| (hash, now(store.number_at(&format!("message:{{{hash}}}:count"))));
    TEXTS.iter().map(|hash| count(*hash)).filter(|(_, count)| *count > 0).collect()
}

/// An aggregator that reads a log.
struct Reader {
    at: usize,
    tally: Tally,
}

impl Reader {
    fn new(store: &Store, at: usize) -> Self {
        Self { at, tally: Tally::new(store.clone()) }
    }

    /// Counts up to `until`; false if the store failed.
    fn read(&mut self, records: &[Record<'_>], until: usize) -> bool {
        for _ in 0..10 {
            let batch = &records[self.at.min(until)..until];
            match self.tally.count(batch, &Shutdown::new()).now_or_never().unwrap() {
                Ok(Step::Counted) => {
                    self.at = until;
                    return true;
                }
                Ok(Step::Reread(from)) => {
                    self.at = records.partition_point(|record| record.offset < from[&record.partition]);
                }
                Err(_) => return false,
            }
        }
        panic!("re-reads without end");
    }
}

/// An aggregator that counts all records from the beginning.
fn count_all(store: &Store, records: &[Record<'_>]) {
    assert!(Reader::new(store, 0).read(records, records.len()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_sequence_number_of_a_client_counts_once(
        steps in vec((0usize..3, 1u64..4, 0usize..4, prop::bool::weighted(0.15)), 1..25),
        // The reader, the number of records, and the number of scripts after which it stops.
        reads in vec((0usize..2, 1usize..9, prop::option::weighted(0.4, 0u32..6)), 1..14),
    ) {
        let (store, machine) = store();
        let records = log(0, &steps);
        // The second reader began before the first had committed anything, and is not aware of its replacement.
        let mut readers = [Reader::new(&store, 0), Reader::new(&store, 0)];
        let mut committed = 0;
        for (reader, many, ends) in reads {
            let current = &mut readers[reader];
            let until = records.len().min(current.at + many);
            *machine.scripts_left.lock().unwrap() = ends;
            let done = current.read(&records, until);
            *machine.scripts_left.lock().unwrap() = None;
            match done {
                true => committed = committed.max(until),
                // It restarts at the committed offset, or shortly before.
                false => *current = Reader::new(&store, committed - usize::from(committed > 0)),
            }
        }
        assert!(Reader::new(&store, committed).read(&records, records.len()));
        prop_assert_eq!(counted(&store), expected(records.iter()));
        // All records again, as after a lost commit.
        count_all(&store, &records);
        prop_assert_eq!(counted(&store), expected(records.iter()));
    }

    #[test]
    fn counting_continues_after_the_topic_is_recreated(
        before in vec((0usize..3, 1u64..4, 0usize..4, Just(false)), 1..12),
        after in vec((0usize..3, 1u64..4, 0usize..4, prop::bool::weighted(0.15)), 1..12),
        ends in 0u32..6,
    ) {
        let (store, machine) = store();
        let old = log(0, &before);
        count_all(&store, &old);
        // Sequence numbers continue; offsets start again.
        let mut new = log(0, &after);
        for record in &mut new {
            let last = old.iter().filter(|o| o.client == record.client).map(|o| o.sn).max();
            record.sn += last.unwrap_or(0);
        }
        *machine.scripts_left.lock().unwrap() = Some(ends);
        Reader::new(&store, 0).read(&new, new.len());
        *machine.scripts_left.lock().unwrap() = None;
        count_all(&store, &new);
        prop_assert_eq!(counted(&store), expected(old.iter().chain(&new)));
    }
}

#[test]
fn same_text_in_two_partitions_counts_in_both() {
    let (store, _) = store();
    let records = [log(0, &[(0, 1, 0, false), (1, 1, 0, false)]), log(1, &[(0, 2, 0, false)])].concat();
    count_all(&store, &records);
    count_all(&store, &records[1..]);
    assert_eq!(counted(&store), [("t0", 3)].into());
}

#[test]
fn wiped_store_is_refilled_from_the_beginning() {
    let (store, machine) = store();
    let records = log(0, &[(0, 1, 0, false), (0, 1, 1, false), (1, 1, 1, false)]);
    let mut current = Reader::new(&store, 0);
    assert!(current.read(&records, 2));
    machine.wipe();
    assert!(current.read(&records, records.len()));
    assert_eq!(counted(&store), expected(records.iter()));
}
