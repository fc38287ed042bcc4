//! Record encodings against golden values, written out by hand from Kafka's message definitions.

use super::*;

#[test]
fn offset_key_and_value_are_kafkas_bytes() {
    let key = offset_key("g", "topic", 7);
    assert_eq!(&key[..], b"\0\x01\0\x01g\0\x05topic\0\0\0\x07");
    let value = OffsetValue {
        offset: 0x0102,
        leader_epoch: 5,
        metadata: "note".into(),
        commit_timestamp_ms: 0x0a0b,
        expire_timestamp_ms: None,
    };
    let bytes = offset_value(&value);
    assert_eq!(&bytes[..], b"\0\x03\0\0\0\0\0\0\x01\x02\0\0\0\x05\0\x04note\0\0\0\0\0\0\x0a\x0b");
    assert_eq!(read_offset_value(bytes), Ok(value.clone()));

    let expiring = OffsetValue { leader_epoch: -1, expire_timestamp_ms: Some(0x0c), ..value };
    let bytes = offset_value(&expiring);
    assert_eq!(&bytes[..], b"\0\x01\0\0\0\0\0\0\x01\x02\0\x04note\0\0\0\0\0\0\x0a\x0b\0\0\0\0\0\0\0\x0c");
    assert_eq!(read_offset_value(bytes), Ok(expiring));
}

#[test]
fn all_key_versions_are_decoded_and_unknown_ones_detected() {
    let offset = Key::Offset { group: "g".into(), topic: "t".into(), partition: 3 };
    assert_eq!(read_key(Bytes::from_static(b"\0\0\0\x01g\0\x01t\0\0\0\x03")), Ok(offset.clone()));
    assert_eq!(read_key(offset_key("g", "t", 3)), Ok(offset));
    assert_eq!(read_key(group_key("g")), Ok(Key::Group { group: "g".into() }));
    assert_eq!(read_key(Bytes::from_static(b"\0\x03\0\x01g")), Ok(Key::Unknown(3)));
}

#[test]
fn old_offset_values_are_read() {
    let v0 = b"\0\0\0\0\0\0\0\0\0\x09\0\x01m\0\0\0\0\0\0\0\x01";
    let v2 = b"\0\x02\0\0\0\0\0\0\0\x09\0\x01m\0\0\0\0\0\0\0\x01";
    let expected = OffsetValue {
        offset: 9,
        leader_epoch: -1,
        metadata: "m".into(),
        commit_timestamp_ms: 1,
        expire_timestamp_ms: None,
    };
    assert_eq!(read_offset_value(Bytes::from_static(v0)), Ok(expected.clone()));
    assert_eq!(read_offset_value(Bytes::from_static(v2)), Ok(expected));
    assert_eq!(read_offset_value(Bytes::from_static(b"\0\x09")), Err(RecordError::ValueVersion(9)));
}

fn a_group() -> GroupValue {
    GroupValue {
        protocol_type: "consumer".into(),
        generation: 2,
        protocol: Some("range".into()),
        leader: Some("m".into()),
        state_timestamp_ms: 4,
        members: vec![MemberValue {
            member_id: "m".into(),
            instance_id: None,
            client_id: "c".into(),
            client_host: "/h".into(),
            rebalance_timeout_ms: 6,
            session_timeout_ms: 5,
            subscription: Bytes::from_static(b"s"),
            assignment: Bytes::from_static(b"as"),
        }],
    }
}

#[test]
fn group_value_is_kafkas_bytes() {
    let bytes = group_value(&a_group());
    let golden: &[u8] = b"\0\x03\0\x08consumer\0\0\0\x02\0\x05range\0\x01m\0\0\0\0\0\0\0\x04\
        \0\0\0\x01\0\x01m\xff\xff\0\x01c\0\x02/h\0\0\0\x06\0\0\0\x05\0\0\0\x01s\0\0\0\x02as";
    assert_eq!(&bytes[..], golden);
    assert_eq!(read_group_value(bytes), Ok(a_group()));
}

#[test]
fn truncated_records_and_invalid_lengths_are_rejected() {
    let whole = group_value(&a_group());
    for cut in 0..whole.len() {
        assert_eq!(read_group_value(whole.slice(..cut)), Err(RecordError::Short), "cut at {cut}");
    }
    let endless = Bytes::from_static(b"\0\x03\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0\x7f\xff\xff\xff");
    assert_eq!(read_group_value(endless), Err(RecordError::Short));
    assert_eq!(read_key(Bytes::from_static(b"\0\x02\xff\xff")), Err(RecordError::Malformed));
    assert_eq!(read_key(Bytes::from_static(b"\0\x02\0\x01\xff")), Err(RecordError::Malformed));
}
