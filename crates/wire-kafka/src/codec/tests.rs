//! Primitive types, bounds, tagged fields, gaps.

use bytes::Bytes;

use super::*;
use crate::messages::{FetchResponse, FetchableTopicResponse, MetadataRequest, PartitionData, fetch};
use crate::{KString, Uuid};

fn decoder(bytes: &'static [u8], flexible: bool) -> Decoder {
    let mut d = Decoder::new(Bytes::from_static(bytes));
    d.set_flexible(flexible);
    d
}

#[test]
fn varints_take_up_to_five_bytes() {
    let check = |value: u32, bytes: &[u8]| {
        let mut e = Encoder::new();
        e.uvarint(value);
        assert_eq!(e.finish().0, bytes);
        assert_eq!(Decoder::new(Bytes::copy_from_slice(bytes)).uvarint(), Ok(value));
    };
    check(0, &[0]);
    check(127, &[0x7f]);
    check(128, &[0x80, 0x01]);
    check(300, &[0xac, 0x02]);
    check(u32::MAX, &[0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert_eq!(decoder(&[0xff, 0xff, 0xff, 0xff, 0x1f], true).uvarint(), Err(DecodeError::BadVarint));
    assert_eq!(decoder(&[0x80, 0x80, 0x80, 0x80, 0x80, 0], true).uvarint(), Err(DecodeError::BadVarint));
    assert_eq!(decoder(&[0x80], true).uvarint(), Err(DecodeError::Truncated { missing: 1 }));
}

#[test]
fn strings_are_compact_or_classic() {
    assert_eq!(decoder(b"\x00\x03abc", false).nullable_string(), Ok(Some("abc".into())));
    assert_eq!(decoder(b"\x04abc", true).nullable_string(), Ok(Some("abc".into())));
    assert_eq!(decoder(b"\xff\xff", false).nullable_string(), Ok(None));
    assert_eq!(decoder(b"\x00", true).nullable_string(), Ok(None));
    assert_eq!(decoder(b"\xff\xfe", false).nullable_string(), Err(DecodeError::BadLength(-2)));
    assert_eq!(decoder(b"\x00\x03ab", false).nullable_string(), Err(DecodeError::Truncated { missing: 1 }));
    assert_eq!(decoder(b"\x02\xff", true).nullable_string(), Err(DecodeError::NotUtf8));
    assert_eq!(KString::read(&mut decoder(b"\x00", true), 0), Err(DecodeError::UnexpectedNull));
}

#[test]
fn a_string_longer_than_a_short_can_say_is_refused_both_ways() {
    let long = KString::from("x".repeat(MAX_STRING + 1));
    for flexible in [false, true] {
        let mut e = Encoder::new();
        e.set_flexible(flexible);
        assert_eq!(e.nullable_string(Some(&long)), Err(EncodeError::TooLong(MAX_STRING + 1)));
    }
    let mut wire = Encoder::new();
    wire.set_flexible(true);
    wire.nullable_bytes(Some(long.as_bytes())).unwrap();
    let mut d = Decoder::new(wire.finish().0.freeze());
    d.set_flexible(true);
    assert_eq!(d.nullable_string(), Err(DecodeError::BadLength(MAX_STRING as i64 + 1)));
}

#[test]
fn an_array_cannot_promise_more_elements_than_bytes_are_left() {
    let check = |count: i32, left: usize, expected: Result<usize, DecodeError>| {
        let mut wire = count.to_be_bytes().to_vec();
        wire.resize(4 + left, 0);
        let read = Vec::<Uuid>::read(&mut Decoder::new(wire.into()), 0).map(|ids| ids.len());
        assert_eq!(read, expected, "{count} elements in {left} bytes");
    };
    check(0, 0, Ok(0));
    check(2, 32, Ok(2));
    check(2, 31, Err(DecodeError::BadLength(2)));
    check(i32::MAX, 1000, Err(DecodeError::BadLength(i32::MAX.into())));
    check(-1, 1000, Err(DecodeError::UnexpectedNull));
    check(-2, 1000, Err(DecodeError::BadLength(-2)));
}

#[test]
fn memory_reserved_for_an_array_stays_within_the_bytes_left() {
    type Large = [u8; 200];
    assert_eq!(field::first_capacity::<Large>(1_000_000, 1_000_000), 5_000);
    assert_eq!(field::first_capacity::<Large>(3, 1_000_000), 3);
    assert_eq!(field::first_capacity::<Large>(1_000, 0), 8);
    assert_eq!(field::first_capacity::<()>(5, 1_000), 5);
}

#[test]
fn unknown_tagged_fields_are_stepped_over() {
    let mut d = decoder(&[2, 5, 3, 0xaa, 0xbb, 0xcc, 9, 0, 0x7f], true);
    d.skip_tagged_fields().unwrap();
    assert_eq!(d.i8(), Ok(0x7f));
    let mut d = decoder(&[1, 5, 3, 0xaa, 0xbb], true);
    assert_eq!(d.skip_tagged_fields(), Err(DecodeError::Truncated { missing: 1 }));
    let mut d = decoder(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0], true);
    assert_eq!(d.skip_tagged_fields(), Err(DecodeError::Truncated { missing: 1 }));
}

#[test]
fn a_tagged_field_has_exactly_its_announced_size() {
    let read = |size: u8| {
        let bytes = Bytes::copy_from_slice(&[1, 7, size, 0, 0, 0, 1, 0xff]);
        let mut value = 0;
        Decoder::new(bytes).tagged_fields(|d, tag| {
            assert_eq!(tag, 7);
            value = d.i32()?;
            Ok(true)
        })?;
        Ok(value)
    };
    assert_eq!(read(4), Ok(1));
    assert_eq!(read(3), Err(DecodeError::BadTagSize(7)));
    assert_eq!(read(5), Err(DecodeError::BadTagSize(7)));
}

#[test]
fn the_size_of_a_tagged_field_may_take_two_bytes() {
    let long = KString::from("x".repeat(300));
    let mut e = Encoder::new();
    e.set_flexible(true);
    e.tagged_field(0, |e| e.nullable_string(Some(&long))).unwrap();
    let (buf, _) = e.finish();
    // Tag 0, size 302, length 300 + 1, text.
    assert_eq!(buf[..5], [0x00, 0xae, 0x02, 0xad, 0x02]);
    assert_eq!(buf[5..], *long.as_bytes());
}

#[test]
fn a_gap_is_where_the_records_would_be() {
    let fetched = |records: &[Records]| FetchResponse {
        responses: vec![FetchableTopicResponse {
            partitions: records
                .iter()
                .map(|records| PartitionData { records: Some(records.clone()), ..Default::default() })
                .collect(),
            ..Default::default()
        }],
        node_endpoints: vec![Default::default()],
        ..Default::default()
    };
    let batches = [Bytes::from(vec![1; 70]), Bytes::from(vec![2; 300])];
    for version in [11, 16] {
        let whole: Vec<Records> = batches.iter().cloned().map(Records::Bytes).collect();
        let holes: Vec<Records> = batches.iter().map(|batch| Records::Gap(batch.len())).collect();
        let encode = |records: &[Records]| {
            let mut response = fetched(records);
            if version < 16 {
                response.node_endpoints.clear();
            }
            let mut e = Encoder::with_buf(b"before".as_slice().into());
            response.encode(&mut e, version).unwrap();
            e
        };
        let (expected, no_gaps) = encode(&whole).finish();
        assert_eq!(no_gaps, []);
        let e = encode(&holes);
        assert_eq!(e.gap_bytes(), 370);
        let (buf, gaps) = e.finish();
        let mut filled = Vec::new();
        let mut from = 0;
        for (gap, batch) in gaps.iter().zip(&batches) {
            assert_eq!(gap.len, batch.len());
            filled.extend_from_slice(&buf[from..gap.at]);
            filled.extend_from_slice(batch);
            from = gap.at;
        }
        filled.extend_from_slice(&buf[from..]);
        assert_eq!(filled, expected);
    }
}

#[test]
fn records_and_strings_are_slices_of_the_frame() {
    let mut wire = Encoder::new();
    let response = FetchResponse {
        responses: vec![FetchableTopicResponse {
            topic: "orders".into(),
            partitions: vec![PartitionData {
                records: Some(Records::Bytes(Bytes::from_static(b"batch"))),
                ..Default::default()
            }],
            ..Default::default()
        }],
        ..Default::default()
    };
    response.encode(&mut wire, 12).unwrap();
    let frame = wire.finish().0.freeze();
    let inside = frame.as_ptr_range();
    let read = FetchResponse::decode(&mut Decoder::new(frame.clone()), 12).unwrap();
    let topic = &read.responses[0];
    let records = topic.partitions[0].records.as_ref().and_then(Records::bytes).unwrap();
    assert!(inside.contains(&topic.topic.as_bytes().as_ptr()));
    assert!(inside.contains(&records.as_ptr()));
}

#[test]
fn a_field_the_version_lacks_is_an_error_unless_ignorable() {
    let encode = |response: &FetchResponse, version| response.encode(&mut Encoder::new(), version);
    let ignorable = FetchResponse { error_code: 3, ..Default::default() };
    assert_eq!(encode(&ignorable, 4), Ok(()));
    let no_such_field =
        |field, version| Err(EncodeError::NoSuchField { message: "FetchResponse", field, version });
    let session = FetchResponse { session_id: 3, ..Default::default() };
    assert_eq!(encode(&session, 6), no_such_field("session_id", 6));
    assert_eq!(encode(&session, 7), Ok(()));
    let tagged = FetchResponse { node_endpoints: vec![Default::default()], ..Default::default() };
    assert_eq!(encode(&tagged, 15), no_such_field("node_endpoints", 15));
    assert_eq!(encode(&tagged, 16), Ok(()));
}

#[test]
fn null_is_refused_where_the_version_has_none() {
    let all_topics = MetadataRequest { topics: None, ..Default::default() };
    let refused = EncodeError::NotNullable { message: "MetadataRequest", field: "topics", version: 0 };
    assert_eq!(all_topics.encode(&mut Encoder::new(), 0), Err(refused));
    assert_eq!(all_topics.encode(&mut Encoder::new(), 1), Ok(()));
    let null = Bytes::from_static(&[0xff; 4]);
    let read = |version| MetadataRequest::decode(&mut Decoder::new(null.clone()), version);
    assert_eq!(read(0), Err(DecodeError::UnexpectedNull));
    assert_eq!(read(1), Ok(all_topics));
}

#[test]
fn absent_fields_decode_to_the_defaults_of_the_protocol() {
    let partition = PartitionData::default();
    assert_eq!(partition.preferred_read_replica, -1);
    assert_eq!(partition.diverging_epoch, fetch::EpochEndOffset { epoch: -1, end_offset: -1 });
    let old = Bytes::from_static(&[0; 8]);
    let response = FetchResponse::decode(&mut Decoder::new(old), 4).unwrap();
    assert_eq!(response, FetchResponse::default());
}
