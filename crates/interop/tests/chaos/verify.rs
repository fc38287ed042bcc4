//! What is there in the end, against what was promised.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::load::{Written, client};
use super::{COPY, ORIGINAL, PARTITIONS};

const PATIENCE: Duration = Duration::from_secs(30);

/// Everything committed in a topic, by partition: offset and number, in order.
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
    let began = Instant::now();
    while ended.len() < PARTITIONS as usize {
        assert!(began.elapsed() < PATIENCE, "{topic} cannot be read to its end: {ended:?}");
        match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(message)) => {
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

/// How many records of the original the copier has not committed.
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

/// Compares; panics with what is wrong.
pub(super) fn check(brokers: &str, written: &Written, cluster: &Cluster) {
    let mut wrong = Vec::new();
    wrong.extend(written.fatal.iter().map(|error| format!("the writer could not go on: {error}")));
    let original = read(brokers, ORIGINAL);
    let mut places = BTreeMap::new();
    for (partition, records) in &original {
        for pair in records.windows(2).filter(|pair| pair[0].1 >= pair[1].1) {
            wrong.push(format!("{partition}: {} stands behind {}", pair[1].1, pair[0].1));
        }
        places.extend(records.iter().map(|(offset, number)| ((*partition, *number), *offset)));
    }
    for (id, offset) in &written.acked {
        match places.get(id) {
            None => wrong.push(format!("lost: {id:?}, acknowledged at {offset}")),
            Some(found) if found != offset => {
                wrong.push(format!("moved: {id:?} from {offset} to {found}"));
            }
            Some(_) => {}
        }
    }
    let maybe: BTreeSet<&(i32, u64)> = written.unknown.iter().collect();
    let unasked = places.keys().filter(|id| !written.acked.contains_key(id) && !maybe.contains(id));
    wrong.extend(unasked.map(|id| format!("nobody was told of {id:?}")));
    let copy = read(brokers, COPY);
    let numbers = |records: Option<&Vec<(i64, u64)>>| -> Vec<u64> {
        records.into_iter().flatten().map(|(_, number)| *number).collect()
    };
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
    wrong.truncate(20);
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", cluster.log_tails());
    println!("verified: {} acknowledged, {} copied once each", written.acked.len(), places.len());
}
