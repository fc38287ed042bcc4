//! Log compaction: the newest record of each key stays, older ones are removed, and offsets do not change.

use std::collections::BTreeMap;

use moim_interop::until;
use rdkafka::error::RDKafkaErrorCode;

use super::support::*;

/// The smallest segments and delays, so that compaction starts at once.
const EAGER: [(&str, &str); 6] = [
    ("cleanup.policy", "compact"),
    ("segment.bytes", "1048576"),
    ("segment.ms", "100"),
    ("min.cleanable.dirty.ratio", "0.01"),
    ("delete.retention.ms", "100"),
    ("min.compaction.lag.ms", "0"),
];

/// Writes values for ten keys repeatedly, enough to fill several segments.
fn fill(address: &str, topic: &str, rounds: usize) {
    let mut sender = Sender::new(address, &[("linger.ms", "1"), ("batch.num.messages", "20")]);
    for round in 0..rounds {
        for key in 0..10 {
            let value = format!("{round:04} {}", "x".repeat(5_000));
            sender.send(topic, Some(0), &Sample::keyed(format!("key {key}"), value));
        }
    }
    assert!(sender.reports().iter().all(Result::is_ok));
}

/// One more record, so that the last full segment is no longer the active one.
fn roll_active_segment(address: &str, topic: &str) {
    Sender::new(address, &[]).deliver(topic, 0, &[Sample::keyed("nudge", "x")]);
}

#[test]
fn compaction_keeps_only_the_newest_record_of_a_key() {
    let server = server();
    let topic = topic(server.kafka(), "compact", 1, &EAGER);
    fill(server.kafka(), &topic, 100);
    let end = watermarks(server.kafka(), &topic, 0).1;
    let seen = until(2 * PATIENCE, "compaction", || {
        roll_active_segment(server.kafka(), &topic);
        let seen = read_all(server.kafka(), &topic, 1, &[("check.crcs", "true")]);
        let old = seen.iter().filter(|seen| seen.offset < end).count();
        (old <= 20).then_some(seen)
    });
    let mut newest: BTreeMap<String, (i64, String)> = BTreeMap::new();
    for seen in &seen {
        let key = String::from_utf8(seen.sample.key.clone().unwrap()).unwrap();
        newest.insert(key, (seen.offset, seen.text()[..4.min(seen.text().len())].to_owned()));
    }
    for key in 0..10 {
        let (offset, text) = &newest[&format!("key {key}")];
        assert_eq!(
            (*offset, text.as_str()),
            (end - 10 + key, "0099"),
            "key {key} keeps its newest, at its offset"
        );
    }
    assert!(seen.windows(2).all(|pair| pair[0].offset < pair[1].offset));
    assert_eq!(watermarks(server.kafka(), &topic, 0).0, 0, "compaction does not move the start");
}

#[test]
fn tombstone_deletes_its_key() {
    let server = server();
    let topic = topic(server.kafka(), "tombstone", 1, &EAGER);
    fill(server.kafka(), &topic, 30);
    let gone = Sample { key: Some(b"key 3".to_vec()), value: None, ..Sample::default() };
    Sender::new(server.kafka(), &[]).deliver(&topic, 0, &[gone]);
    fill_other(server.kafka(), &topic);
    until(2 * PATIENCE, "the key and its tombstone to go", || {
        roll_active_segment(server.kafka(), &topic);
        let seen = read_all(server.kafka(), &topic, 1, &[]);
        let left = seen.iter().filter(|seen| seen.sample.key.as_deref() == Some(b"key 3")).count();
        (left == 0 && seen.len() < 60).then_some(())
    });
    let seen = read_all(server.kafka(), &topic, 1, &[]);
    assert!(seen.iter().any(|seen| seen.sample.key.as_deref() == Some(b"key 4")), "the others stay");
}

/// More segments after the tombstone, with other keys.
fn fill_other(address: &str, topic: &str) {
    let mut sender = Sender::new(address, &[]);
    for i in 0..300 {
        sender.send(topic, Some(0), &Sample::keyed(format!("other {}", i % 3), "y".repeat(5_000)));
    }
    assert!(sender.reports().iter().all(Result::is_ok));
}

#[test]
fn record_without_a_key_is_refused_by_a_compacted_topic() {
    let server = server();
    let topic = topic(server.kafka(), "keyless", 1, &[("cleanup.policy", "compact")]);
    let mut sender = Sender::new(server.kafka(), &[]);
    sender.send(&topic, Some(0), &Sample::value("no key"));
    assert_eq!(sender.reports(), [Err(RDKafkaErrorCode::InvalidRecord)]);
    sender.send(&topic, Some(0), &Sample::keyed("k", "v"));
    assert_eq!(sender.reports()[1], Ok((0, 0)));
}
