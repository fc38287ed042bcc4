//! Locates the stage at which a message was lost or duplicated: follows one client's sequence numbers, or one text,
//! through the topics. [`locate`] and [`locate_text`] judge, [`trace`] and [`trace_text`] read.

use std::collections::{BTreeMap, BTreeSet};

use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use serde::Serialize;

use crate::queue::{self, CLIENT_MESSAGE, DEAD_LETTER, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::CountedFor;
use crate::verify::unread::scan;
use crate::verify::{ClientCounts, WrongMessage};

/// The stage at which a message was lost or duplicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// The message never reached the store.
    Gateway,
    /// The message reached the store but not the topic.
    Relay,
    /// The message stands in the topic before its predecessor, and nowhere else.
    Order,
    /// The message is in the topic and was not counted, or was counted more than once.
    Counter,
    /// The message was counted and not forwarded, or was forwarded twice.
    Transaction,
    /// The message was forwarded and not counted by its text, or was counted more than once.
    Aggregator,
}

/// The first wrong message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The client that sent it.
    pub client: String,
    /// Its sequence number.
    pub sn: u64,
    /// The stage at which it was lost or duplicated.
    pub stage: Stage,
    /// Description of the fault.
    pub detail: String,
}

/// The records of one client in the topics.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Sequence numbers in their order in `client_message`, with partition and offset.
    pub received: Vec<(u64, i32, i64)>,
    /// Partitions and offsets of the forwarded or dead-lettered messages.
    pub passed_on: BTreeMap<u64, Vec<(i32, i64)>>,
}

/// A record of `message_aggregation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The client that sent it.
    pub client: String,
    /// Its sequence number.
    pub sn: u64,
    /// Its partition and offset.
    pub at: (i32, i64),
}

/// The first unprocessed message of a client, and the stage that lost it. None if all are processed.
pub fn locate(client: &str, counts: &ClientCounts, seen: &Seen) -> Option<Finding> {
    let (mut next, mut at) = (1, None);
    for (sn, partition, offset) in &seen.received {
        if *sn == next {
            next += 1;
            at = Some((*partition, *offset));
        }
    }
    let finding = |sn, stage, detail: String| Some(Finding { client: client.to_owned(), sn, stage, detail });
    // The topic holds everything below `next` in order, for the counter to read.
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
    let done = counts.counted + counts.dead_lettered;
    if done != counts.last {
        let detail = format!("the last message counted is {}, the counter has counted {done}", counts.last);
        return finding(counts.last, Stage::Counter, detail);
    }
    let missing = (1..=counts.last.min(counts.sent)).find(|sn| !seen.passed_on.contains_key(sn));
    if let Some(sn) = missing {
        let detail = format!("it was counted, {MESSAGE_AGGREGATION} does not have it");
        return finding(sn, Stage::Transaction, detail);
    }
    let twice = seen.passed_on.iter().find(|(_, places)| places.len() > 1);
    twice.and_then(|(sn, places)| {
        finding(
            *sn,
            Stage::Transaction,
            format!("it was passed on more than once: {}", list_positions(places)),
        )
    })
}

/// For a text with a wrong count: the message that its aggregator has missed or counted twice. None if the count
/// equals the number of forwarded messages.
///
/// `senders` are the messages with this text that were counted for their clients.
pub fn locate_text(
    wrong: &WrongMessage,
    senders: &[(String, u64)],
    passed: &[Passed],
    counted: &CountedFor,
) -> Option<Finding> {
    let distinct: BTreeSet<_> = passed.iter().map(|record| (&record.client, record.sn)).collect();
    let (count, sent) = (wrong.count, distinct.len() as u64);
    let known = |record: &&Passed| {
        let (partition, offset) = record.at;
        counted.at.get(&partition).is_some_and(|at| offset <= *at)
            || counted.by.get(&record.client).is_some_and(|last| record.sn <= *last)
    };
    let of = |(client, sn): &(String, u64)| distinct.contains(&(client, *sn));
    if let Some((client, sn)) = senders.iter().find(|sender| !of(sender)) {
        let detail = format!(
            "it was counted for its client, {MESSAGE_AGGREGATION} does not have its text ({})",
            wrong.hash
        );
        return Some(Finding { client: client.clone(), sn: *sn, stage: Stage::Transaction, detail });
    }
    let record = match count.cmp(&sent) {
        std::cmp::Ordering::Equal => return None,
        // The first one that the store has not counted.
        std::cmp::Ordering::Less => passed.iter().find(|record| !known(record)).or(passed.first()),
        std::cmp::Ordering::Greater => passed.iter().rfind(known).or(passed.last()),
    }?;
    let detail = format!(
        "its text ({}) was passed on {sent} times and counted {count} times; it stands at {}",
        wrong.hash,
        list_positions(&[record.at])
    );
    Some(Finding { client: record.client.clone(), sn: record.sn, stage: Stage::Aggregator, detail })
}

fn list_positions(places: &[(i32, i64)]) -> String {
    let one = |(partition, offset): &(i32, i64)| format!("partition {partition} offset {offset}");
    places.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Reads the records of one client from the topics. Blocks.
pub fn trace(options: &QueueOptions, client: &str) -> Result<Seen, KafkaError> {
    let mut seen = Seen::default();
    scan(options, CLIENT_MESSAGE, &BTreeMap::new(), |message| {
        if let Some((_, sn)) = queue::origin(message).filter(|(name, _)| *name == client) {
            seen.received.push((sn, message.partition(), message.offset()));
        }
    })?;
    for topic in [MESSAGE_AGGREGATION, DEAD_LETTER] {
        scan(options, topic, &BTreeMap::new(), |message| {
            if let Some((_, sn)) = queue::origin(message).filter(|(name, _)| *name == client) {
                seen.passed_on.entry(sn).or_default().push((message.partition(), message.offset()));
            }
        })?;
    }
    Ok(seen)
}

/// Reads the forwarded records of a text. Blocks.
pub fn trace_text(options: &QueueOptions, hash: &str) -> Result<Vec<Passed>, KafkaError> {
    let mut passed = Vec::new();
    scan(options, MESSAGE_AGGREGATION, &BTreeMap::new(), |message| {
        if message.key() == Some(hash.as_bytes())
            && let Some((client, sn)) = queue::origin(message)
        {
            let at = (message.partition(), message.offset());
            passed.push(Passed { client: client.to_owned(), sn, at });
        }
    })?;
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sent: u64, acked: u64, last: u64) -> ClientCounts {
        ClientCounts { sent, acked, relayed: acked, last, counted: last, ..ClientCounts::default() }
    }

    fn seen(received: &[u64], passed_on: &[u64]) -> Seen {
        let received = received.iter().enumerate().map(|(at, sn)| (*sn, 0, at as i64)).collect();
        let mut seen = Seen { received, passed_on: BTreeMap::new() };
        passed_on.iter().enumerate().for_each(|(at, sn)| {
            seen.passed_on.entry(*sn).or_default().push((0, at as i64));
        });
        seen
    }

    #[test]
    fn each_loss_is_located_at_its_stage() {
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
        // Duplicates.
        check(counts(3, 3, 3), seen(&[1, 2, 3], &[1, 2, 2, 3]), Some((2, Stage::Transaction)));
        let twice = ClientCounts { counted: 4, ..counts(3, 3, 3) };
        check(twice, seen(&[1, 2, 3], &[1, 2, 3]), Some((3, Stage::Counter)));
        let less = ClientCounts { counted: 2, ..counts(3, 3, 3) };
        check(less, seen(&[1, 2, 3], &[1, 2, 3]), Some((3, Stage::Counter)));
        let dead = ClientCounts { counted: 2, dead_lettered: 1, ..counts(3, 3, 3) };
        check(dead, seen(&[1, 2, 3], &[1, 2, 3]), None);
    }

    #[test]
    fn wrong_text_count_is_located_at_its_record() {
        let passed = |records: &[(&str, u64)]| -> Vec<Passed> {
            let one = |(at, (client, sn)): (usize, &(&str, u64))| Passed {
                client: (*client).into(),
                sn: *sn,
                at: (1, at as i64),
            };
            records.iter().enumerate().map(one).collect()
        };
        let check =
            |count, records: &[(&str, u64)], counted: CountedFor, expected: Option<(&str, u64, &str)>| {
                let wrong = WrongMessage { hash: "h".into(), text: None, count, expected: 2 };
                let found = locate_text(&wrong, &[], &passed(records), &counted);
                let list_positions =
                    found.as_ref().map(|f| (f.client.as_str(), f.sn, f.detail.rsplit(' ').next().unwrap()));
                assert_eq!(list_positions, expected, "{found:?}");
                assert!(found.is_none_or(|found| found.stage == Stage::Aggregator));
            };
        let at = |offset| CountedFor { at: [(1, offset)].into(), ..CountedFor::default() };
        let by = |clients: &[&str]| CountedFor {
            by: clients.iter().map(|client| ((*client).to_owned(), 1)).collect(),
            ..CountedFor::default()
        };
        for both in [at(1), by(&["a", "b"])] {
            check(2, &[("a", 1), ("b", 1)], both.clone(), None);
            check(2, &[("a", 1), ("b", 1), ("b", 1)], both.clone(), None);
            check(3, &[("a", 1), ("b", 1)], both, Some(("b", 1, "1")));
        }
        for one in [at(0), by(&["a"])] {
            check(1, &[("a", 1), ("b", 1)], one, Some(("b", 1, "1")));
        }
        // A message that was counted and never forwarded is itself the finding.
        let wrong = WrongMessage { hash: "h".into(), text: None, count: 1, expected: 2 };
        let senders = [("a".to_owned(), 1), ("b".to_owned(), 7)];
        let found = locate_text(&wrong, &senders, &passed(&[("a", 1)]), &at(0)).unwrap();
        assert_eq!((found.client.as_str(), found.sn, found.stage), ("b", 7, Stage::Transaction));
    }
}
