//! Offset lookup: by timestamp, log start and log end, and committed offsets.

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::topic_partition_list::Offset;

use super::support::*;

fn at(address: &str, topic: &str, time_ms: i64) -> Offset {
    let consumer: BaseConsumer = client(address, &[("group.id", "unused")]).create().unwrap();
    let found = consumer.offsets_for_times(partition(topic, 0, Offset::Offset(time_ms)), PATIENCE).unwrap();
    found.elements()[0].offset()
}

#[test]
fn timestamp_lookup_returns_the_first_record_at_or_after_it() {
    let server = server();
    for codec in ["none", "gzip"] {
        let topic = topic(server.kafka(), "time", 1, &[]);
        let times = [1_000, 2_000, 2_000, 5_000, 3_000, 6_000];
        let timed =
            |ms: i64| Sample { timestamp: Some(1_700_000_000_000 + ms), ..Sample::value(format!("{ms}")) };
        let mut sender = Sender::new(server.kafka(), &[("compression.type", codec), ("linger.ms", "20")]);
        sender.deliver(&topic, 0, &times[..3].iter().map(|ms| timed(*ms)).collect::<Vec<_>>());
        sender.deliver(&topic, 0, &times[3..].iter().map(|ms| timed(*ms)).collect::<Vec<_>>());
        let cases = [
            (0, Offset::Offset(0)),
            (1_000, Offset::Offset(0)),
            (1_001, Offset::Offset(1)),
            (2_000, Offset::Offset(1)),
            (2_500, Offset::Offset(3)),
            (5_000, Offset::Offset(3)),
            (5_001, Offset::Offset(5)),
            (6_001, Offset::End),
        ];
        for (ms, expected) in cases {
            assert_eq!(at(server.kafka(), &topic, 1_700_000_000_000 + ms), expected, "{codec} at {ms}");
        }
    }
}

#[test]
fn timestamp_lookup_in_an_empty_partition() {
    let server = server();
    let topic = topic(server.kafka(), "empty", 1, &[]);
    assert_eq!(at(server.kafka(), &topic, 1), Offset::End);
    assert_eq!(watermarks(server.kafka(), &topic, 0), (0, 0));
}

#[test]
fn reading_starts_at_earliest_or_latest() {
    let server = server();
    let topic = topic(server.kafka(), "ends", 1, &[]);
    deliver(server.kafka(), &topic, &["a", "b", "c"]);
    let tail = reader(server.kafka(), &topic, &[(0, Offset::OffsetTail(1))], &[]);
    assert_eq!(next(&tail, PATIENCE).map(|seen| seen.text()), Some("c".to_owned()));
    let end = reader(server.kafka(), &topic, &[(0, Offset::End)], &[("enable.partition.eof", "true")]);
    // The end is known once the reader gets the end-of-partition event.
    moim_interop::until(PATIENCE, "the end", || match end.poll(std::time::Duration::from_millis(100)) {
        Some(Err(rdkafka::error::KafkaError::PartitionEOF(0))) => Some(()),
        Some(Ok(message)) => panic!("read {:?}", Seen::of(&message)),
        _ => None,
    });
    deliver(server.kafka(), &topic, &["d"]);
    assert_eq!(next(&end, PATIENCE).map(|seen| seen.text()), Some("d".to_owned()));
}

#[test]
fn offset_out_of_range_is_an_error_or_a_reset() {
    let server = server();
    let topic = topic(server.kafka(), "range", 1, &[]);
    deliver(server.kafka(), &topic, &["a", "b"]);
    let strict =
        reader(server.kafka(), &topic, &[(0, Offset::Offset(99))], &[("auto.offset.reset", "error")]);
    let error = moim_interop::until(PATIENCE, "an error", || {
        strict
            .poll(std::time::Duration::from_millis(100))
            .and_then(Result::err)
            .filter(|error| !is_transient(error))
    });
    assert!(
        matches!(
            error.rdkafka_error_code(),
            Some(RDKafkaErrorCode::OffsetOutOfRange | RDKafkaErrorCode::AutoOffsetReset)
        ),
        "{error}"
    );
    let lenient =
        reader(server.kafka(), &topic, &[(0, Offset::Offset(99))], &[("auto.offset.reset", "earliest")]);
    assert_eq!(next(&lenient, PATIENCE).map(|seen| seen.text()), Some("a".to_owned()));
}

#[test]
fn offset_commit_keeps_its_metadata() {
    let server = server();
    let topic = topic(server.kafka(), "commit", 2, &[]);
    let group = unique("group");
    assert_eq!(committed(server.kafka(), &group, &topic, 0), None);
    let consumer: BaseConsumer = client(server.kafka(), &[("group.id", &group)]).create().unwrap();
    let list = partition(&topic, 0, Offset::Offset(42));
    list.find_partition(&topic, 0).unwrap().set_metadata("라벨 and text");
    consumer.commit(&list, CommitMode::Sync).unwrap();
    let mut asked = partition(&topic, 0, Offset::Invalid);
    asked.add_partition(&topic, 1);
    let answer = consumer.committed_offsets(asked, PATIENCE).unwrap();
    let elements = answer.elements();
    assert_eq!((elements[0].offset(), elements[0].metadata()), (Offset::Offset(42), "라벨 and text"));
    assert_eq!(elements[1].offset(), Offset::Invalid);
    consumer.commit(&partition(&topic, 0, Offset::Offset(7)), CommitMode::Sync).unwrap();
    assert_eq!(committed(server.kafka(), &group, &topic, 0), Some(7), "a commit may go back");
}

#[test]
fn offset_commits_survive_a_crash() {
    let Some(mut server) = own_server() else { return };
    let topic = topic(server.kafka(), "crash-commit", 1, &[]);
    for i in 0..5 {
        let group = format!("group-{i}");
        let consumer: BaseConsumer = client(server.kafka(), &[("group.id", &group)]).create().unwrap();
        for offset in 0..=i {
            consumer.commit(&partition(&topic, 0, Offset::Offset(offset)), CommitMode::Sync).unwrap();
        }
    }
    server.kill().unwrap();
    server.restart().unwrap();
    for i in 0..5 {
        assert_eq!(committed(server.kafka(), &format!("group-{i}"), &topic, 0), Some(i));
    }
}
