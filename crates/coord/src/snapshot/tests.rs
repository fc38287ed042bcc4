//! Streams in pieces of any size, and malformed streams.

use super::*;
use crate::request::{Command, DeleteRequest, Op, PutRequest, RangeRequest};

fn sample(keys: usize) -> State {
    let mut state = State::new();
    let mut index = 0;
    let mut run = |command| {
        index += 1;
        state.apply(index, command);
    };
    let lease = LeaseId(77);
    run(Command::client(Op::LeaseGrant { id: lease, ttl_ms: 5_000 }));
    run(Command::node(Op::LeaseGrant { id: LeaseId(-3), ttl_ms: 500 }));
    run(Command::node(Op::LeaseCheckpoint { remaining: vec![(lease, 3_000)] }));
    run(Command::client(Op::AlarmOn(Alarm { kind: AlarmKind::NoSpace, member: 9 })));
    run(Command::client(Op::AlarmOff(Alarm { kind: AlarmKind::NoSpace, member: 9 })));
    for n in 0..keys {
        let put = PutRequest::new(format!("key/{n}"), vec![n as u8; 100]);
        run(Command::client(Op::Put(PutRequest {
            lease: if n % 3 == 0 { lease } else { LeaseId::NONE },
            ..put
        })));
        run(Command::node(Op::Put(PutRequest::new(format!("/moim/{}", n % 5), "x"))));
    }
    run(Command::client(Op::Delete(DeleteRequest::key("key/1"))));
    run(Command::client(Op::Compact { space: SpaceId::User, revision: keys as i64 / 2 + 2 }));
    run(Command::client(Op::AlarmOn(Alarm { kind: AlarmKind::NoSpace, member: 9 })));
    state
}

fn bytes(state: &State) -> Vec<u8> {
    state.snapshot().flatten().collect()
}

#[test]
fn restored_state_equals_the_original() {
    for keys in [0, 1, 10, 3_000] {
        let state = sample(keys);
        let stream = bytes(&state);
        let restored = State::restore(state.snapshot()).unwrap();
        assert_eq!(bytes(&restored), stream, "{keys} keys");
        assert_eq!(restored.applied_index(), state.applied_index());
        assert_eq!(restored.leases, state.leases);
        assert_eq!(restored.alarms, state.alarms);
        assert_eq!(restored.size_bytes(), state.size_bytes());
        for space in [SpaceId::User, SpaceId::System] {
            assert_eq!(restored.live_keys(space), state.live_keys(space));
            assert_eq!(restored.hash_kv(space, 0), state.hash_kv(space, 0));
        }
        let all = RangeRequest::between("\0", "\0");
        assert_eq!(restored.range(&all), state.range(&all));
    }
    assert!(sample(3_000).snapshot().count() > 3, "a large state comes in pieces");
}

#[test]
fn stream_may_arrive_in_pieces_of_any_size() {
    let stream = bytes(&sample(50));
    for size in [1, 7, 64, 1 << 20] {
        let mut restorer = Restorer::new();
        for piece in stream.chunks(size) {
            restorer.push(piece).unwrap();
        }
        assert_eq!(bytes(&restorer.finish().unwrap()), stream, "pieces of {size}");
    }
}

#[test]
fn truncated_or_overlong_stream_is_refused() {
    let stream = bytes(&sample(20));
    for length in 0..stream.len() {
        let cut = Bytes::copy_from_slice(&stream[..length]);
        assert_eq!(State::restore([cut]).err(), Some(SnapshotError::Incomplete), "cut at {length}");
    }
    let mut longer = stream.clone();
    longer.push(0);
    assert_eq!(State::restore([Bytes::from(longer)]).err(), Some(SnapshotError::Incomplete));
    // Truncated between frames: the end record is missing.
    let chunks: Vec<Bytes> = sample(3_000).snapshot().collect();
    let without_one = chunks.iter().enumerate().filter(|(n, _)| *n != 2).map(|(_, chunk)| chunk.clone());
    assert!(State::restore(without_one).is_err());
}

#[test]
fn any_corrupted_byte_is_detected() {
    let stream = bytes(&sample(20));
    for at in 0..stream.len() {
        let mut damaged = stream.clone();
        damaged[at] ^= 0x10;
        assert!(State::restore([Bytes::from(damaged)]).is_err(), "byte {at}");
    }
}

#[test]
fn wrong_magic_and_format_are_reported() {
    let mut stream = bytes(&sample(1));
    let error = |stream: &[u8]| State::restore([Bytes::copy_from_slice(stream)]).unwrap_err();
    assert_eq!(error(b"a file of something else"), SnapshotError::Magic);
    stream[9] = 2;
    assert_eq!(error(&stream), SnapshotError::Format(2));
    stream[9] = 1;
    stream[10..14].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(error(&stream), SnapshotError::Length(0));
}

/// A stream with valid checksums and inconsistent records is refused.
#[test]
fn inconsistent_records_are_refused() {
    let change = |key: &str, revision, sub, value: Option<&str>| Change {
        key: Bytes::copy_from_slice(key.as_bytes()),
        version: Version {
            value: value.map(|value| Bytes::copy_from_slice(value.as_bytes()).into()),
            create_revision: revision,
            version: 1,
            ..Version::tombstone(revision, sub)
        },
    };
    let leased = |lease| {
        let mut change = change("a", 2, 0, Some("v"));
        change.version.lease = LeaseId(lease);
        change
    };
    let cases = [
        ("fine", vec![(TAG_CHANGE, 0, change("a", 2, 0, Some("v")))], true),
        ("base", vec![(TAG_BASE, 0, change("a", 2, 0, Some("v")))], true),
        ("its lease", vec![(TAG_CHANGE, 0, leased(5))], true),
        ("no such lease", vec![(TAG_CHANGE, 0, leased(6))], false),
        ("wrong space", vec![(TAG_CHANGE, 1, change("a", 2, 0, Some("v")))], false),
        ("future", vec![(TAG_CHANGE, 0, change("a", 9, 0, Some("v")))], false),
        ("deleted base", vec![(TAG_BASE, 0, change("a", 2, 0, None))], false),
        ("late base", vec![(TAG_BASE, 0, change("a", 3, 0, Some("v")))], false),
        ("nothing to delete", vec![(TAG_CHANGE, 0, change("a", 2, 0, None))], false),
        (
            "backwards",
            vec![
                (TAG_CHANGE, 0, change("a", 3, 0, Some("v"))),
                (TAG_CHANGE, 0, change("b", 2, 0, Some("v"))),
            ],
            false,
        ),
        (
            "twice",
            vec![
                (TAG_CHANGE, 0, change("a", 3, 1, Some("v"))),
                (TAG_CHANGE, 0, change("b", 3, 1, Some("v"))),
            ],
            false,
        ),
        (
            "bases out of order",
            vec![(TAG_BASE, 0, change("b", 2, 0, Some("v"))), (TAG_BASE, 0, change("a", 2, 0, Some("v")))],
            false,
        ),
    ];
    for (name, records, expected) in cases {
        let mut counters = State::new();
        counters.user = Space::restored(4, 3, None);
        let lease = Lease { ttl_ms: 1, remaining_ms: 0, origin: Origin::Client, keys: BTreeSet::new() };
        counters.leases.by_id.insert(LeaseId(5), lease);
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_be_bytes());
        frame(&mut out, |out| encode_counters(out, &counters));
        frame(&mut out, |out| {
            for (tag, space, change) in &records {
                out.extend_from_slice(&[*tag, *space]);
                encode_change(out, change);
            }
            out.push(TAG_END);
            put_u64(out, records.len() as u64);
        });
        assert_eq!(State::restore([Bytes::from(out)]).is_ok(), expected, "{name}");
    }
}

/// The bytes of format 1, as written by old nodes.
#[test]
fn format_one_stays_readable() {
    let mut state = State::new();
    state.apply(1, Command::client(Op::LeaseGrant { id: LeaseId(7), ttl_ms: 1_000 }));
    let put = PutRequest { lease: LeaseId(7), ..PutRequest::new("k", "v") };
    state.apply(2, Command::client(Op::Put(put)));
    state.apply(3, Command::node(Op::Put(PutRequest::new("/moim/m", "x"))));
    let hex: String = bytes(&state).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN);
}

const GOLDEN: &str = "4d4f494d434f4f520001\
    0000001f28ecbef2010302ffffffffffffffffff0102ffffffffffffffffff010107e807000000\
    00000020e76d8b77030001016b02000176020107030101072f6d6f696d2f6d020001780201000402";
