//! Transactions: atomic, also across crashes, and a fenced producer cannot write under its transactional id.

use std::time::Duration;

use moim_interop::until;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::Producer;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::support::*;

const COMMITTED: [(&str, &str); 1] = [("isolation.level", "read_committed")];
const UNCOMMITTED: [(&str, &str); 1] = [("isolation.level", "read_uncommitted")];

fn transactional(address: &str, id: &str, settings: &[(&str, &str)]) -> Sender {
    let mut all = vec![("transactional.id", id)];
    all.extend(settings);
    let sender = Sender::new(address, &all);
    sender.inner.init_transactions(PATIENCE).unwrap();
    sender
}

fn write(sender: &mut Sender, topic: &str, partition: i32, texts: &[&str]) {
    let samples: Vec<Sample> = texts.iter().map(|text| Sample::value(*text)).collect();
    sender.deliver(topic, partition, &samples);
}

fn transaction_code(error: KafkaError) -> RDKafkaErrorCode {
    match error {
        KafkaError::Transaction(error) => error.code(),
        other => panic!("not a transaction's error: {other}"),
    }
}

#[test]
fn committed_records_are_visible_and_aborted_ones_are_not() {
    let server = server();
    let topic = topic(server.kafka(), "txn", 1, &[]);
    let mut sender = transactional(server.kafka(), &unique("txn"), &[]);
    for (text, commit) in [("one", true), ("two", false), ("three", true), ("four", false)] {
        sender.inner.begin_transaction().unwrap();
        write(&mut sender, &topic, 0, &[text, text]);
        if commit {
            sender.inner.commit_transaction(PATIENCE).unwrap();
        } else {
            sender.inner.abort_transaction(PATIENCE).unwrap();
        }
    }
    assert_eq!(values(server.kafka(), &topic, &COMMITTED), ["one", "one", "three", "three"]);
    let all = values(server.kafka(), &topic, &UNCOMMITTED);
    assert_eq!(all, ["one", "one", "two", "two", "three", "three", "four", "four"]);
    // Each transaction is followed by its marker, which takes an offset and is never returned.
    assert_eq!(watermarks(server.kafka(), &topic, 0), (0, 12));
}

#[test]
fn open_transaction_blocks_read_committed_consumers() {
    let server = server();
    let topic = topic(server.kafka(), "open", 1, &[]);
    let mut sender = transactional(server.kafka(), &unique("open"), &[]);
    deliver(server.kafka(), &topic, &["before"]);
    sender.inner.begin_transaction().unwrap();
    write(&mut sender, &topic, 0, &["inside"]);
    deliver(server.kafka(), &topic, &["after"]);
    let careful = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &COMMITTED);
    let hasty = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &UNCOMMITTED);
    let texts = |seen: Vec<Seen>| seen.iter().map(Seen::text).collect::<Vec<_>>();
    assert_eq!(texts(take(&hasty, 3)), ["before", "inside", "after"]);
    assert_eq!(texts(take(&careful, 1)), ["before"]);
    assert_eq!(next(&careful, Duration::from_millis(700)), None, "the open transaction is not to be seen");
    sender.inner.commit_transaction(PATIENCE).unwrap();
    assert_eq!(texts(take(&careful, 2)), ["inside", "after"]);
}

#[test]
fn transactions_of_two_producers_interleave() {
    let server = server();
    let topic = topic(server.kafka(), "interleave", 1, &[]);
    let mut one = transactional(server.kafka(), &unique("one"), &[]);
    let mut two = transactional(server.kafka(), &unique("two"), &[]);
    one.inner.begin_transaction().unwrap();
    two.inner.begin_transaction().unwrap();
    write(&mut one, &topic, 0, &["1a"]);
    write(&mut two, &topic, 0, &["2a"]);
    write(&mut one, &topic, 0, &["1b"]);
    two.inner.abort_transaction(PATIENCE).unwrap();
    two.inner.begin_transaction().unwrap();
    write(&mut two, &topic, 0, &["2b"]);
    one.inner.commit_transaction(PATIENCE).unwrap();
    two.inner.commit_transaction(PATIENCE).unwrap();
    assert_eq!(values(server.kafka(), &topic, &COMMITTED), ["1a", "1b", "2b"]);
}

#[test]
fn a_transaction_spans_partitions_and_topics() {
    let server = server();
    let topics = [topic(server.kafka(), "span", 3, &[]), topic(server.kafka(), "span", 3, &[])];
    let mut sender = transactional(server.kafka(), &unique("span"), &[]);
    for (round, commit) in [(0, false), (1, true)] {
        sender.inner.begin_transaction().unwrap();
        for topic in &topics {
            for partition in 0..3 {
                write(&mut sender, topic, partition, &[&format!("{round}")]);
            }
        }
        if commit {
            sender.inner.commit_transaction(PATIENCE).unwrap();
        } else {
            sender.inner.abort_transaction(PATIENCE).unwrap();
        }
    }
    for topic in &topics {
        let texts: Vec<String> =
            read_all(server.kafka(), topic, 3, &COMMITTED).iter().map(Seen::text).collect();
        assert_eq!(texts, ["1", "1", "1"]);
    }
}

/// Consumes, produces and commits its offsets in one transaction; after an abort neither is visible.
#[test]
fn offsets_commit_with_their_transaction() {
    let server = server();
    let (input, output) = (topic(server.kafka(), "in", 1, &[]), topic(server.kafka(), "out", 1, &[]));
    let group = unique("eos");
    deliver(server.kafka(), &input, &["a", "b", "c", "d"]);
    let settings =
        [("group.id", group.as_str()), ("auto.offset.reset", "earliest"), ("enable.auto.commit", "false")];
    let consumer: BaseConsumer = client(server.kafka(), &settings).create().unwrap();
    consumer.subscribe(&[&input]).unwrap();
    let mut sender = transactional(server.kafka(), &unique("eos"), &[]);
    let seen = take(&consumer, 4);
    for (until, commit) in [(2, false), (2, true), (4, false)] {
        sender.inner.begin_transaction().unwrap();
        for seen in &seen[..until] {
            write(&mut sender, &output, 0, &[&format!("{}!", seen.text())]);
        }
        let next = i64::try_from(until).unwrap();
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(&input, 0, Offset::Offset(next)).unwrap();
        let member = consumer.group_metadata().unwrap();
        sender.inner.send_offsets_to_transaction(&offsets, &member, PATIENCE).unwrap();
        if commit {
            sender.inner.commit_transaction(PATIENCE).unwrap();
            assert_eq!(committed(server.kafka(), &group, &input, 0), Some(2));
        } else {
            sender.inner.abort_transaction(PATIENCE).unwrap();
        }
    }
    assert_eq!(committed(server.kafka(), &group, &input, 0), Some(2));
    assert_eq!(values(server.kafka(), &output, &COMMITTED), ["a!", "b!"]);
}

#[test]
fn new_producer_epoch_fences_the_old_producer() {
    let server = server();
    let topic = topic(server.kafka(), "fence", 1, &[]);
    let id = unique("fence");
    let mut old = transactional(server.kafka(), &id, &[]);
    old.inner.begin_transaction().unwrap();
    write(&mut old, &topic, 0, &["of the old"]);
    let mut new = transactional(server.kafka(), &id, &[]);
    new.inner.begin_transaction().unwrap();
    write(&mut new, &topic, 0, &["of the new"]);
    new.inner.commit_transaction(PATIENCE).unwrap();
    let code = transaction_code(old.inner.commit_transaction(PATIENCE).unwrap_err());
    assert!(
        matches!(
            code,
            RDKafkaErrorCode::Fenced
                | RDKafkaErrorCode::ProducerFenced
                | RDKafkaErrorCode::InvalidProducerEpoch
        ),
        "{code:?}"
    );
    assert_eq!(values(server.kafka(), &topic, &COMMITTED), ["of the new"]);
}

#[test]
fn transaction_timeout_aborts_an_abandoned_transaction() {
    let server = server();
    let topic = topic(server.kafka(), "timeout", 1, &[]);
    let settings = [("transaction.timeout.ms", "1000"), ("message.timeout.ms", "1000")];
    let mut sender = transactional(server.kafka(), &unique("timeout"), &settings);
    sender.inner.begin_transaction().unwrap();
    write(&mut sender, &topic, 0, &["forgotten"]);
    deliver(server.kafka(), &topic, &["after"]);
    let careful = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &COMMITTED);
    let seen = next(&careful, PATIENCE).expect("the timeout to end the transaction");
    assert_eq!(seen.text(), "after");
    let code = transaction_code(sender.inner.commit_transaction(PATIENCE).unwrap_err());
    assert!(
        matches!(
            code,
            RDKafkaErrorCode::Fenced
                | RDKafkaErrorCode::ProducerFenced
                | RDKafkaErrorCode::InvalidProducerEpoch
                | RDKafkaErrorCode::InvalidTransactionalState
        ),
        "{code:?}"
    );
}

#[test]
fn excessive_transaction_timeout_is_refused() {
    let server = server();
    let settings = [("transactional.id", "absurd"), ("transaction.timeout.ms", "2000000000")];
    let sender = Sender::new(server.kafka(), &settings);
    let code = transaction_code(sender.inner.init_transactions(PATIENCE).unwrap_err());
    assert_eq!(code, RDKafkaErrorCode::InvalidTransactionTimeout);
}

#[test]
fn empty_transaction_commits() {
    let server = server();
    let sender = transactional(server.kafka(), &unique("empty"), &[]);
    for _ in 0..3 {
        sender.inner.begin_transaction().unwrap();
        sender.inner.commit_transaction(PATIENCE).unwrap();
        sender.inner.begin_transaction().unwrap();
        sender.inner.abort_transaction(PATIENCE).unwrap();
    }
}

#[test]
fn transactions_stay_atomic_across_a_server_crash() {
    let Some(mut server) = own_server() else { return };
    let address = server.kafka().to_owned();
    let topic = topic(&address, "crash", 2, &[]);
    let mut sender = transactional(&address, "survivor", &[("transaction.timeout.ms", "60000")]);
    sender.inner.begin_transaction().unwrap();
    write(&mut sender, &topic, 0, &["done"]);
    write(&mut sender, &topic, 1, &["done"]);
    sender.inner.commit_transaction(PATIENCE).unwrap();
    sender.inner.begin_transaction().unwrap();
    write(&mut sender, &topic, 0, &["before the crash"]);
    server.kill().unwrap();
    server.restart().unwrap();
    // The open transaction is still open after the restart, and continues.
    write(&mut sender, &topic, 1, &["after the crash"]);
    sender.inner.commit_transaction(PATIENCE).unwrap();
    let mut texts: Vec<(i32, String)> =
        read_all(&address, &topic, 2, &COMMITTED).iter().map(|seen| (seen.partition, seen.text())).collect();
    texts.sort();
    let expected = [(0, "before the crash"), (0, "done"), (1, "after the crash"), (1, "done")];
    assert_eq!(texts, expected.map(|(partition, text)| (partition, text.to_owned())));
}

#[test]
fn new_producer_aborts_the_transaction_of_its_crashed_predecessor() {
    let Some(mut server) = own_server() else { return };
    let address = server.kafka().to_owned();
    let topic = topic(&address, "successor", 1, &[]);
    let mut first = transactional(&address, "worker", &[]);
    first.inner.begin_transaction().unwrap();
    write(&mut first, &topic, 0, &["lost with its producer"]);
    std::mem::forget(first); // no clean close: as if its process had crashed
    server.kill().unwrap();
    server.restart().unwrap();
    let mut second = transactional(&address, "worker", &[]);
    second.inner.begin_transaction().unwrap();
    write(&mut second, &topic, 0, &["kept"]);
    second.inner.commit_transaction(PATIENCE).unwrap();
    let texts = until(PATIENCE, "the successor's record", || {
        Some(values(&address, &topic, &COMMITTED)).filter(|texts| !texts.is_empty())
    });
    assert_eq!(texts, ["kept"]);
}
