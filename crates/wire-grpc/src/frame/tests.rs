//! Frames in pieces of any size, golden bytes, and input that is wrong.

use proptest::prelude::*;

use super::*;
use crate::etcd::{KeyValue, PutRequest, RangeResponse, TxnRequest, WatchRequest};

fn frame_of(flag: u8, length: u32, body: &[u8]) -> Bytes {
    let mut frame = vec![flag];
    frame.extend(length.to_be_bytes());
    frame.extend(body);
    frame.into()
}

#[test]
fn what_is_wrong_is_said_before_the_message_is_whole() {
    let cases = [
        (frame_of(1, 3, b"abc"), Err(FrameError::Compressed)),
        (frame_of(7, 3, b"abc"), Err(FrameError::Flag(7))),
        (frame_of(0, 11, b""), Err(FrameError::TooLarge { length: 11, max: 10 })),
        (frame_of(0, u32::MAX, b""), Err(FrameError::TooLarge { length: u32::MAX as usize, max: 10 })),
        (frame_of(0, 10, b"123456789"), Ok(None)),
        (frame_of(0, 10, b"1234567890"), Ok(Some(Bytes::from_static(b"1234567890")))),
        (frame_of(0, 0, b""), Ok(Some(Bytes::new()))),
    ];
    for (bytes, expected) in cases {
        let mut reader = FrameReader::new(10);
        reader.push(bytes.clone());
        assert_eq!(reader.next_frame(), expected, "{bytes:?}");
    }
}

#[test]
fn a_body_that_ends_inside_a_message_is_noticed() {
    let mut reader = FrameReader::new(10);
    assert_eq!(reader.finish(), Ok(()));
    reader.push(frame_of(0, 4, b"ab"));
    assert_eq!(reader.next_frame(), Ok(None));
    assert_eq!(reader.finish(), Err(FrameError::Truncated));
    reader.push(Bytes::from_static(b"cd"));
    assert_eq!(reader.next_frame(), Ok(Some(Bytes::from_static(b"abcd"))));
    assert_eq!(reader.finish(), Ok(()));
}

#[test]
fn a_message_within_a_piece_is_not_copied() {
    let piece = frame_of(0, 4, b"abcd");
    let mut reader = FrameReader::new(10);
    reader.push(piece.clone());
    let message = reader.next_frame().unwrap().unwrap();
    assert_eq!(message.as_ptr(), piece[PREFIX_BYTES..].as_ptr());
}

/// The bytes of a put as the reference implementation writes them.
#[test]
fn golden_bytes_of_a_put() {
    let put = PutRequest {
        key: Bytes::from_static(b"foo"),
        value: Bytes::from_static(b"bar"),
        lease: 300,
        prev_kv: true,
        ..PutRequest::default()
    };
    let expected = b"\x00\x00\x00\x00\x0f\x0a\x03foo\x12\x03bar\x18\xac\x02\x20\x01";
    assert_eq!(encode_frame(&put), &expected[..]);
    assert_eq!(decode::<PutRequest>(Bytes::from_static(&expected[5..])), Ok(put));
}

#[test]
fn golden_bytes_of_a_range_response() {
    let kv = KeyValue {
        key: Bytes::from_static(b"k"),
        create_revision: 2,
        mod_revision: 3,
        version: 2,
        value: Bytes::from_static(b"v"),
        lease: -1,
    };
    let response = RangeResponse { header: None, kvs: vec![kv], more: true, count: 2 };
    let expected = b"\x12\x17\x0a\x01k\x10\x02\x18\x03\x20\x02\x2a\x01v\
        \x30\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x18\x01\x20\x02";
    assert_eq!(response.encode_to_vec(), expected);
}

#[test]
fn nesting_has_a_bound() {
    // Each level is a transaction whose success branch is one step, which is the transaction of the level below.
    let mut bytes = Vec::new();
    for _ in 0..400 {
        let mut step = vec![0x22];
        prost::encoding::encode_varint(bytes.len() as u64, &mut step);
        step.extend(&bytes);
        let mut txn = vec![0x12];
        prost::encoding::encode_varint(step.len() as u64, &mut txn);
        txn.extend(step);
        bytes = txn;
    }
    assert!(decode::<TxnRequest>(bytes.into()).is_err());
}

proptest! {
    #[test]
    fn pieces_of_any_size_give_the_same_messages(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
        cuts in prop::collection::vec(1usize..80, 1..20),
    ) {
        let mut body = Vec::new();
        for message in &messages {
            body.extend(frame_of(0, message.len() as u32, message));
        }
        let mut reader = FrameReader::new(300);
        let mut found = Vec::new();
        let mut rest = Bytes::from(body);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            reader.push(rest.split_to((*cut).min(rest.len())));
            while let Some(message) = reader.next_frame().unwrap() {
                found.push(message.to_vec());
            }
        }
        prop_assert_eq!(found, messages);
        prop_assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let bytes = Bytes::from(bytes);
        let _ = decode::<TxnRequest>(bytes.clone());
        let _ = decode::<WatchRequest>(bytes.clone());
        let _ = decode::<RangeResponse>(bytes.clone());
        let mut reader = FrameReader::new(200);
        reader.push(bytes);
        while let Ok(Some(_)) = reader.next_frame() {}
    }

    #[test]
    fn what_is_encoded_is_decoded(
        key in prop::collection::vec(any::<u8>(), 0..40),
        value in prop::collection::vec(any::<u8>(), 0..40),
        lease in any::<i64>(),
        flags in any::<[bool; 3]>(),
    ) {
        let [prev_kv, ignore_value, ignore_lease] = flags;
        let put = PutRequest { key: key.into(), value: value.into(), lease, prev_kv, ignore_value, ignore_lease };
        let mut reader = FrameReader::new(1000);
        reader.push(encode_frame(&put));
        let frame = reader.next_frame().unwrap().unwrap();
        prop_assert_eq!(decode::<PutRequest>(frame).unwrap(), put);
    }
}
