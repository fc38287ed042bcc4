//! Unprocessed records of the topics: records after the offsets committed by counters and aggregators, and the dead
//! letters. With them the verifier distinguishes a message in flight from a lost one.
//!
//! Counters and aggregators count before they commit: everything before a committed offset was counted before that
//! offset was read here. So nothing before it is in flight, provided that the offsets are the same before and after
//! the store was read ([`Unread::is_settled_since`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::hash_of;

const CALL: Duration = Duration::from_secs(10);

/// Committed offsets, by topic and partition.
pub type Committed = BTreeMap<(&'static str, i32), i64>;

/// The unprocessed records of the topics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Committed offsets of counters and aggregators.
    pub committed: Committed,
    /// Messages after the counters' committed offsets: client, sequence number, text hash.
    pub clients: Vec<(String, u64, String)>,
    /// Messages after the aggregators' committed offsets, by text hash.
    pub texts: BTreeMap<String, u64>,
    /// Dead-lettered messages that cannot be processed, by client.
    pub dead: BTreeMap<String, BTreeSet<u64>>,
    /// Dead-lettered messages whose predecessor is missing, by client.
    pub parked: BTreeMap<String, BTreeSet<u64>>,
    /// Lines from the topic, for clients whose lines the store does not have.
    pub lines: BTreeMap<String, BTreeMap<u64, String>>,
}

impl Unread {
    /// True if no offset has been committed since then.
    pub fn is_settled_since(&self, before: &Committed) -> bool {
        self.committed == *before
    }
}

/// Committed offsets of counters and aggregators. Blocks.
pub fn committed(options: &QueueOptions) -> Result<Committed, KafkaError> {
    let mut all = Committed::new();
    for (topic, role) in [(CLIENT_MESSAGE, "counter"), (MESSAGE_AGGREGATION, "aggregator")] {
        let consumer: BaseConsumer = options.consumer(role).create()?;
        let mut partitions = TopicPartitionList::new();
        for partition in 0..queue::partitions(consumer.client(), topic)? {
            partitions.add_partition(topic, partition);
        }
        let found = consumer.committed_offsets(partitions, CALL)?;
        for at in found.elements() {
            let offset = if let Offset::Offset(offset) = at.offset() { offset } else { 0 };
            all.insert((topic, at.partition()), offset);
        }
    }
    Ok(all)
}

/// Reads the unprocessed records, and from the beginning those of the clients in `unknown`. Blocks.
pub fn unread(options: &QueueOptions, unknown: &BTreeSet<String>) -> Result<Unread, KafkaError> {
    let committed = committed(options)?;
    let mut unread = Unread { committed, ..Unread::default() };
    let from = |topic, at: &Committed| -> BTreeMap<i32, i64> {
        at.iter().filter(|((of, _), _)| *of == topic).map(|((_, partition), at)| (*partition, *at)).collect()
    };
    let behind = from(CLIENT_MESSAGE, &unread.committed);
    let begin = if unknown.is_empty() { behind.clone() } else { BTreeMap::new() };
    scan(options, CLIENT_MESSAGE, &begin, |message| {
        let Some((client, sn)) = queue::origin(message) else { return };
        let text = hash_of(message.payload().unwrap_or_default());
        if unknown.contains(client) {
            unread.lines.entry(client.to_owned()).or_default().insert(sn, text.clone());
        }
        if behind.get(&message.partition()).is_none_or(|at| message.offset() >= *at) {
            unread.clients.push((client.to_owned(), sn, text));
        }
    })?;
    let behind = from(MESSAGE_AGGREGATION, &unread.committed);
    scan(options, MESSAGE_AGGREGATION, &behind, |message| {
        *unread.texts.entry(hash_of(message.payload().unwrap_or_default())).or_default() += 1;
    })?;
    scan(options, DEAD_LETTER, &BTreeMap::new(), |message| {
        let Some((client, sn)) = queue::origin(message) else { return };
        let is_parked = why(message).is_some_and(|why| why.contains("is missing"));
        let set = if is_parked { &mut unread.parked } else { &mut unread.dead };
        set.entry(client.to_owned()).or_default().insert(sn);
    })?;
    Ok(unread)
}

fn why<'a>(message: &'a BorrowedMessage<'_>) -> Option<&'a str> {
    let header = message.headers()?.iter().find(|header| header.key == "why")?;
    std::str::from_utf8(header.value?).ok()
}

/// Visits every committed record of a topic from these offsets on, partition by partition in order; unnamed
/// partitions from their beginning.
pub(super) fn scan(
    options: &QueueOptions,
    topic: &str,
    from: &BTreeMap<i32, i64>,
    mut show: impl FnMut(&BorrowedMessage<'_>),
) -> Result<(), KafkaError> {
    let mut config = options.consumer("trace");
    config.set("enable.partition.eof", "true");
    let consumer: BaseConsumer = config.create()?;
    let count = queue::partitions(consumer.client(), topic)?;
    let mut partitions = TopicPartitionList::new();
    for partition in 0..count {
        let offset = from.get(&partition).map_or(Offset::Beginning, |offset| Offset::Offset(*offset));
        partitions.add_partition_offset(topic, partition, offset)?;
    }
    consumer.assign(&partitions)?;
    let mut left = count;
    while left > 0 {
        match consumer.poll(CALL) {
            Some(Ok(message)) => show(&message),
            Some(Err(KafkaError::PartitionEOF(_))) => left -= 1,
            Some(Err(error)) => return Err(error),
            None => return Err(KafkaError::Canceled),
        }
    }
    Ok(())
}
