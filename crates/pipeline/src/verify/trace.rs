//! Where a message went wrong: follows one client's sequence numbers through the topics and says at which stage the
//! first of them is missing. [`locate`] judges, [`trace`] reads.

use std::collections::BTreeSet;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use serde::Serialize;

use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::verify::ClientCounts;

const CALL: Duration = Duration::from_secs(10);

/// Between which two places a message was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// It never reached the store.
    Gateway,
    /// It reached the store and not the topic.
    Relay,
    /// It stands in the topic before the message it should follow, and nowhere else.
    Order,
    /// It stands in the topic and was not counted.
    Counter,
    /// It was counted and not passed on.
    Transaction,
    /// It was passed on and not counted by its text.
    Aggregator,
}

/// The first message that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Whose.
    pub client: String,
    /// Which.
    pub sn: u64,
    /// Where it went wrong.
    pub stage: Stage,
    /// In words.
    pub detail: String,
}

/// What the topics hold of one client.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Sequence numbers in the order they stand in `client_message`, with partition and offset.
    pub received: Vec<(u64, i32, i64)>,
    /// Those that were passed on or set aside.
    pub passed_on: BTreeSet<u64>,
}

/// The first message of a client that is not through, and the stage that lost it. None when all are.
pub fn locate(client: &str, counts: &ClientCounts, seen: &Seen) -> Option<Finding> {
    let (mut next, mut at) = (1, None);
    for (sn, partition, offset) in &seen.received {
        if *sn == next {
            next += 1;
            at = Some((*partition, *offset));
        }
    }
    let finding = |sn, stage, detail: String| Some(Finding { client: client.to_owned(), sn, stage, detail });
    // The topic gives the counter everything below `next`.
    if next <= counts.sent && counts.last < next {
        if let Some((_, partition, offset)) = seen.received.iter().find(|(sn, ..)| *sn == next) {
            let before = at.map_or_else(|| "nothing".to_owned(), |(_, offset)| format!("offset {offset}"));
            let detail = format!(
                "it stands in partition {partition} at offset {offset} only, before {} ({before}), which it must follow",
                next - 1
            );
            return finding(next, Stage::Order, detail);
        }
        return if counts.acked < next {
            finding(next, Stage::Gateway, format!("the store has messages up to {} only", counts.acked))
        } else {
            let detail = format!("the store acknowledged up to {}, the topic does not have it", counts.acked);
            finding(next, Stage::Relay, detail)
        };
    }
    if counts.last + 1 < next {
        let detail =
            format!("the topic has messages up to {}, the counter stands at {}", next - 1, counts.last);
        return finding(counts.last + 1, Stage::Counter, detail);
    }
    let missing = (1..=counts.last.min(counts.sent)).find(|sn| !seen.passed_on.contains(sn));
    match missing {
        Some(sn) => {
            finding(sn, Stage::Transaction, format!("it was counted, {MESSAGE_AGGREGATION} does not have it"))
        }
        None => None,
    }
}

/// Reads what the topics hold of one client. Blocks.
pub fn trace(options: &QueueOptions, client: &str) -> Result<Seen, KafkaError> {
    let mut seen = Seen::default();
    scan(options, CLIENT_MESSAGE, |message| {
        if let Some((_, sn)) = queue::origin(message).filter(|(name, _)| name == client) {
            seen.received.push((sn, message.partition(), message.offset()));
        }
    })?;
    for topic in [MESSAGE_AGGREGATION, DEAD_LETTER] {
        scan(options, topic, |message| {
            if let Some((_, sn)) = queue::origin(message).filter(|(name, _)| name == client) {
                seen.passed_on.insert(sn);
            }
        })?;
    }
    Ok(seen)
}

/// Shows every committed record of a topic, partition by partition in order.
fn scan(
    options: &QueueOptions,
    topic: &str,
    mut show: impl FnMut(&rdkafka::message::BorrowedMessage<'_>),
) -> Result<(), KafkaError> {
    let mut config = options.consumer("trace");
    config.set("enable.partition.eof", "true");
    let consumer: BaseConsumer = config.create()?;
    let metadata = consumer.fetch_metadata(Some(topic), CALL)?;
    let mut partitions = TopicPartitionList::new();
    let mut left = 0;
    for partition in metadata.topics().iter().flat_map(|topic| topic.partitions()) {
        partitions.add_partition_offset(topic, partition.id(), Offset::Beginning)?;
        left += 1;
    }
    consumer.assign(&partitions)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sent: u64, acked: u64, last: u64) -> ClientCounts {
        ClientCounts { sent, acked, relayed: acked, last, counted: last, dead_lettered: 0 }
    }

    fn seen(received: &[u64], passed_on: &[u64]) -> Seen {
        let received = received.iter().enumerate().map(|(at, sn)| (*sn, 0, at as i64)).collect();
        Seen { received, passed_on: passed_on.iter().copied().collect() }
    }

    #[test]
    fn each_loss_is_found_where_it_happened() {
        let check = |counts: ClientCounts, seen: Seen, expected: Option<(u64, Stage)>| {
            let found = locate("c", &counts, &seen).map(|finding| (finding.sn, finding.stage));
            assert_eq!(found, expected, "{counts:?} {seen:?}");
        };
        check(counts(3, 3, 3), seen(&[1, 2, 3], &[1, 2, 3]), None);
        check(counts(3, 3, 3), seen(&[1, 2, 1, 2, 3], &[1, 2, 3]), None);
        check(counts(3, 2, 2), seen(&[1, 2], &[1, 2]), Some((3, Stage::Gateway)));
        check(counts(3, 3, 1), seen(&[1, 3], &[1]), Some((2, Stage::Relay)));
        check(counts(3, 3, 2), seen(&[1, 3, 2], &[1, 2]), Some((3, Stage::Order)));
        check(counts(3, 3, 1), seen(&[1, 2, 3], &[1]), Some((2, Stage::Counter)));
        check(counts(3, 3, 3), seen(&[1, 2, 3], &[1, 3]), Some((2, Stage::Transaction)));
    }
}
