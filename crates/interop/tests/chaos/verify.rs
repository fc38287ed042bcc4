//! Verification at the end of a run: compares the topics with the acknowledged records.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::load::{Written, client};
use super::{COPY, ORIGINAL, PARTITIONS};

const PATIENCE: Duration = Duration::from_secs(30);

/// All committed records of a topic, by partition: offset and number, in order.
fn read(brokers: &str, topic: &str) -> BTreeMap<i32, Vec<(i64, u64)>> {
    let consumer: BaseConsumer = client(brokers)
        .set("group.id", "verifier")
        .set("isolation.level", "read_committed")
        .set("enable.partition.eof", "true")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&all).unwrap();
    let mut found: BTreeMap<i32, Vec<(i64, u64)>> = BTreeMap::new();
    let mut ended = BTreeSet::new();
    let mut progress = Instant::now();
    while ended.len() < PARTITIONS as usize {
        assert!(progress.elapsed() < PATIENCE, "{topic} cannot be read to its end: {ended:?}");
        match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(message)) => {
                progress = Instant::now();
                let text = std::str::from_utf8(message.payload().unwrap()).unwrap();
                found.entry(message.partition()).or_default().push((message.offset(), text.parse().unwrap()));
            }
            Some(Err(rdkafka::error::KafkaError::PartitionEOF(partition))) => drop(ended.insert(partition)),
            Some(Err(error)) => println!("reading {topic}: {error}"),
            None => {}
        }
    }
    found
}

/// Number of source records that the copier has committed; also 0 if the group coordinator does not answer.
pub(super) fn copied(brokers: &str) -> i64 {
    let consumer: BaseConsumer = client(brokers).set("group.id", "copier").create().unwrap();
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition(ORIGINAL, partition);
    }
    let Ok(committed) = consumer.committed_offsets(all, PATIENCE) else { return 0 };
    committed.elements().iter().filter_map(|one| one.offset().to_raw()).map(|offset| offset.max(0)).sum()
}

/// Number of source records that the copier has not committed.
pub(super) fn lag(brokers: &str) -> i64 {
    let consumer: BaseConsumer = client(brokers).set("group.id", "copier").create().unwrap();
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition(ORIGINAL, partition);
    }
    let Ok(committed) = consumer.committed_offsets(all, PATIENCE) else { return i64::MAX };
    let mut lag = 0;
    for partition in 0..PARTITIONS {
        let Ok((_, end)) = consumer.fetch_watermarks(ORIGINAL, partition, PATIENCE) else { return i64::MAX };
        let done = committed.find_partition(ORIGINAL, partition).and_then(|one| one.offset().to_raw());
        lag += end - done.unwrap_or(0).max(0);
    }
    lag
}

/// Duplicates in a partition, and records after a later one; with their offsets, to look them up in the logs of the
/// nodes.
fn find_misplaced(topic: &str, partition: i32, records: &[(i64, u64)]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut first_at = BTreeMap::new();
    let mut newest: Option<(i64, u64)> = None;
    for &(offset, number) in records {
        if let Some(first) = first_at.get(&number) {
            wrong.push(format!("{topic} {partition}: {number} is doubled, at {first} and at {offset}"));
            continue;
        }
        first_at.insert(number, offset);
        match newest {
            Some((at, newer)) if newer > number => {
                wrong
                    .push(format!("{topic} {partition}: {number} at {offset} stands behind {newer} at {at}"));
            }
            _ => newest = Some((offset, number)),
        }
    }
    wrong
}

#[test]
fn duplicates_and_reordering_are_distinguished() {
    let check = |records: &[(i64, u64)], expected: &[&str]| {
        let found = find_misplaced("t", 3, records);
        assert_eq!(found, expected);
    };
    check(&[(0, 1), (1, 2), (4, 5)], &[]);
    check(
        &[(0, 1), (1, 2), (2, 1), (3, 2)],
        &["t 3: 1 is doubled, at 0 and at 2", "t 3: 2 is doubled, at 1 and at 3"],
    );
    check(&[(0, 2), (1, 1), (2, 3)], &["t 3: 1 at 1 stands behind 2 at 0"]);
}

/// Compares; panics with the differences.
pub(super) fn check(brokers: &str, written: &Written, cluster: &Cluster) {
    let mut wrong = Vec::new();
    wrong.extend(written.fatal.iter().map(|error| format!("the writer could not go on: {error}")));
    let original = read(brokers, ORIGINAL);
    let mut places = BTreeMap::new();
    for (partition, records) in &original {
        wrong.extend(find_misplaced("the original", *partition, records));
        places.extend(records.iter().map(|(offset, number)| ((*partition, *number), *offset)));
    }
    for (id, offset) in &written.acked {
        match places.get(id) {
            None => wrong.push(format!("lost: {id:?}, acknowledged at {offset}")),
            // A duplicate of an old batch is acknowledged without its offset.
            Some(found) if found != offset && *offset >= 0 => {
                wrong.push(format!("moved: {id:?} from {offset} to {found}"));
            }
            Some(_) => {}
        }
    }
    let maybe: BTreeSet<&(i32, u64)> = written.unknown.iter().collect();
    let unasked = places.keys().filter(|id| !written.acked.contains_key(id) && !maybe.contains(id));
    wrong.extend(unasked.map(|id| format!("no client sent {id:?}")));
    let copy = read(brokers, COPY);
    let numbers = |records: Option<&Vec<(i64, u64)>>| -> Vec<u64> {
        records.into_iter().flatten().map(|(_, number)| *number).collect()
    };
    for (partition, records) in &copy {
        wrong.extend(find_misplaced("the copy", *partition, records));
    }
    for partition in 0..PARTITIONS {
        let (from, to) = (numbers(original.get(&partition)), numbers(copy.get(&partition)));
        if from != to {
            let at = from.iter().zip(&to).position(|(a, b)| a != b).unwrap_or(from.len().min(to.len()));
            wrong.push(format!(
                "the copy of {partition} differs at {at} ({} and {} records): {:?} {:?}",
                from.len(),
                to.len(),
                from.get(at),
                to.get(at)
            ));
        }
    }
    let found = wrong.len();
    wrong.truncate(20);
    assert!(wrong.is_empty(), "{found} things are wrong: {wrong:#?}\n{}", cluster.log_tails());
    let (acked, copied, hung) = (written.acked.len(), places.len(), written.copier_hung);
    println!("verified: {acked} acknowledged, {copied} copied once each; copiers that hung: {hung}");
}
