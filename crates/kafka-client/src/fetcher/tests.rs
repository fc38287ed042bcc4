//! Delivery of the records of one partition of a fetch response, and the position after it.

use moim_wire_kafka::Records;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::fetch::AbortedTransaction;
use moim_wire_kafka::records::{BatchBuilder, control_batch};

use super::*;

fn batch(base_offset: i64, values: &[&str], producer: Option<i64>) -> Bytes {
    let mut builder = BatchBuilder::new(Compression::None).base_offset(base_offset);
    if let Some(id) = producer {
        builder = builder.producer(id, 0, 0).transactional(true);
    }
    for value in values {
        builder.push(0, None, Some(value.as_bytes()), &[]);
    }
    builder.build()
}

fn marker(kind: ControlKind, producer: i64, offset: i64) -> Bytes {
    control_batch(kind, producer, 0, 0, 0, offset, 0)
}

fn read(
    batches: &[Bytes],
    aborted: &[(i64, i64)],
    from: i64,
    end: Option<i64>,
    isolation: Isolation,
) -> (String, i64) {
    let data = PartitionData {
        records: Some(Records::Bytes(Bytes::from(batches.concat()))),
        aborted_transactions: Some(
            aborted
                .iter()
                .map(|(producer_id, first_offset)| AbortedTransaction {
                    producer_id: *producer_id,
                    first_offset: *first_offset,
                })
                .collect(),
        ),
        ..Default::default()
    };
    let key = TopicPartition { topic: "t".into(), partition: 0 };
    let mut position = Position { next: from, end, leader: None };
    let mut seen = String::new();
    let mut sink = |_: &KString, _: i32, record: &Record| {
        seen.push_str(std::str::from_utf8(record.value.as_ref().unwrap()).unwrap());
        Ok::<_, Error>(ControlFlow::Continue(()))
    };
    assert!(deliver(&key, &mut position, &data, isolation, &mut sink).unwrap().is_continue());
    (seen, position.next)
}

#[test]
fn a_fetch_inside_a_batch_skips_records_before_the_position() {
    let batches = [batch(10, &["a", "b", "c"], None), batch(13, &["d"], None)];
    assert_eq!(read(&batches, &[], 11, None, Isolation::ReadCommitted), ("bcd".into(), 14));
    assert_eq!(read(&batches, &[], 10, Some(12), Isolation::ReadCommitted).0, "ab");
}

#[test]
fn a_partial_batch_at_the_end_waits_for_the_next_fetch() {
    let second = batch(1, &["b"], None);
    let batches = [batch(0, &["a"], None), second.slice(..second.len() - 1)];
    assert_eq!(read(&batches, &[], 0, None, Isolation::ReadCommitted), ("a".into(), 1));
}

#[test]
fn aborted_transactions_are_filtered_and_the_position_advances_past_them() {
    let batches = [
        batch(0, &["a"], Some(7)),
        batch(1, &["b"], Some(8)),
        marker(ControlKind::Abort, 7, 2),
        batch(3, &["c"], Some(7)),
        marker(ControlKind::Commit, 8, 4),
        marker(ControlKind::Commit, 7, 5),
    ];
    assert_eq!(read(&batches, &[(7, 0)], 0, None, Isolation::ReadCommitted), ("bc".into(), 6));
    assert_eq!(read(&batches, &[(7, 0)], 0, None, Isolation::ReadUncommitted), ("abc".into(), 6));
}

#[test]
fn a_sink_that_breaks_leaves_the_position_after_its_last_record() {
    let data = PartitionData {
        records: Some(Records::Bytes(batch(0, &["a", "b", "c"], None))),
        ..Default::default()
    };
    let key = TopicPartition { topic: "t".into(), partition: 0 };
    let mut position = Position { next: 0, end: None, leader: None };
    let mut left = 2;
    let mut sink = |_: &KString, _: i32, _: &Record| {
        left -= 1;
        Ok::<_, Error>(if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    assert!(deliver(&key, &mut position, &data, Isolation::ReadCommitted, &mut sink).unwrap().is_break());
    assert_eq!(position.next, 2);
}

#[test]
fn a_batch_with_a_wrong_checksum_is_an_error_and_is_not_delivered() {
    let mut bytes = batch(0, &["a"], None).to_vec();
    // The value itself: everything else still parses.
    let value = bytes.len() - 2;
    assert_eq!(bytes[value], b'a');
    bytes[value] = b'b';
    let data = PartitionData { records: Some(Records::Bytes(bytes.into())), ..Default::default() };
    let key = TopicPartition { topic: "t".into(), partition: 0 };
    let mut position = Position { next: 0, end: None, leader: None };
    let mut sink = |_: &KString, _: i32, _: &Record| -> Result<ControlFlow<()>> { panic!("shown") };
    assert!(deliver(&key, &mut position, &data, Isolation::ReadCommitted, &mut sink).is_err());
}
