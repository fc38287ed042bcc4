//! Record and snapshot encoding of the engine's log.
//!
//! Big-endian, length-prefixed, format version first. The bytes come back from a disk or a peer, so the
//! decoder validates everything: a length is compared with the remaining bytes before any allocation, and a
//! record with trailing bytes is rejected. Format 1 is frozen by the golden tests.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::state::{LeaseState, Record, State};
use crate::repository::{Entry, LeaseId, Op, RepositoryError};

const FORMAT: u8 = 1;

const CHANGE: u8 = 1;
const GRANT: u8 = 2;
const REVOKE: u8 = 3;
const SNAPSHOT: u8 = 4;

const PUT: u8 = 1;
const DELETE: u8 = 2;

/// Content of one log entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Logged {
    /// A decision, to be applied to the preceding state.
    Record(Record),
    /// A snapshot of the whole state; preceding entries are obsolete.
    Snapshot(State),
}

/// Encodes a decision.
pub fn encode_record(record: &Record) -> Bytes {
    let mut out = BytesMut::with_capacity(64);
    out.put_u8(FORMAT);
    match record {
        Record::Change { revision, ops } => {
            out.put_u8(CHANGE);
            out.put_i64(*revision);
            put_count(&mut out, ops.len());
            for op in ops {
                put_op(&mut out, op);
            }
        }
        Record::Grant { id, ttl_ms } => {
            out.put_u8(GRANT);
            out.put_i64(id.0);
            out.put_u64(*ttl_ms);
        }
        Record::Revoke { id } => {
            out.put_u8(REVOKE);
            out.put_i64(id.0);
        }
    }
    out.freeze()
}

/// Encodes a snapshot.
pub fn encode_snapshot(state: &State) -> Bytes {
    let mut out = BytesMut::with_capacity(64 + state.entries.len() * 128);
    out.put_u8(FORMAT);
    out.put_u8(SNAPSHOT);
    out.put_i64(state.revision);
    out.put_i64(state.next_lease);
    put_count(&mut out, state.leases.len());
    for (id, lease) in &state.leases {
        out.put_i64(id.0);
        out.put_u64(lease.ttl_ms);
    }
    put_count(&mut out, state.entries.len());
    for entry in state.entries.values() {
        put_bytes(&mut out, entry.key.as_bytes());
        put_bytes(&mut out, &entry.value);
        out.put_i64(entry.create_revision);
        out.put_i64(entry.mod_revision);
        out.put_i64(entry.version);
        put_lease(&mut out, entry.lease);
    }
    out.freeze()
}

/// Decodes the output of one of the encoders.
pub fn decode(mut bytes: Bytes) -> Result<Logged, RepositoryError> {
    let format = get_u8(&mut bytes)?;
    if format != FORMAT {
        return Err(damaged(&format!("format {format} is not known to this version")));
    }
    let logged = match get_u8(&mut bytes)? {
        CHANGE => Logged::Record(get_change(&mut bytes)?),
        GRANT => {
            Logged::Record(Record::Grant { id: LeaseId(get_i64(&mut bytes)?), ttl_ms: get_u64(&mut bytes)? })
        }
        REVOKE => Logged::Record(Record::Revoke { id: LeaseId(get_i64(&mut bytes)?) }),
        SNAPSHOT => Logged::Snapshot(get_state(&mut bytes)?),
        other => return Err(damaged(&format!("unknown kind of record: {other}"))),
    };
    if bytes.has_remaining() {
        return Err(damaged("trailing bytes after a record"));
    }
    Ok(logged)
}

fn put_op(out: &mut BytesMut, op: &Op) {
    match op {
        Op::Put { key, value, lease } => {
            out.put_u8(PUT);
            put_bytes(out, key.as_bytes());
            put_bytes(out, value);
            put_lease(out, *lease);
        }
        Op::Delete { key } => {
            out.put_u8(DELETE);
            put_bytes(out, key.as_bytes());
        }
    }
}

fn put_count(out: &mut BytesMut, count: usize) {
    out.put_u32(u32::try_from(count).expect("a repository holds fewer than 2^32 items"));
}

fn put_bytes(out: &mut BytesMut, bytes: &[u8]) {
    put_count(out, bytes.len());
    out.put_slice(bytes);
}

fn put_lease(out: &mut BytesMut, lease: Option<LeaseId>) {
    out.put_i64(lease.map_or(0, |id| id.0));
}

fn get_change(bytes: &mut Bytes) -> Result<Record, RepositoryError> {
    let revision = get_i64(bytes)?;
    let count = get_u32(bytes)?;
    let mut ops = Vec::new(); // grows with the decoded ops, not with the claimed count
    for _ in 0..count {
        ops.push(match get_u8(bytes)? {
            PUT => Op::Put { key: get_key(bytes)?, value: get_bytes(bytes)?, lease: get_lease(bytes)? },
            DELETE => Op::Delete { key: get_key(bytes)? },
            other => return Err(damaged(&format!("unknown kind of change: {other}"))),
        });
    }
    Ok(Record::Change { revision, ops })
}

fn get_state(bytes: &mut Bytes) -> Result<State, RepositoryError> {
    let revision = get_i64(bytes)?;
    let next_lease = get_i64(bytes)?;
    let mut leases = BTreeMap::new();
    for _ in 0..get_u32(bytes)? {
        let id = LeaseId(get_i64(bytes)?);
        leases.insert(id, LeaseState { ttl_ms: get_u64(bytes)?, keys: BTreeSet::new() });
    }
    let mut entries = BTreeMap::new();
    for _ in 0..get_u32(bytes)? {
        let entry = Entry {
            key: get_key(bytes)?,
            value: get_bytes(bytes)?,
            create_revision: get_i64(bytes)?,
            mod_revision: get_i64(bytes)?,
            version: get_i64(bytes)?,
            lease: get_lease(bytes)?,
        };
        if let Some(id) = entry.lease {
            let lease = leases.get_mut(&id).ok_or_else(|| damaged("a key under an unknown lease"))?;
            lease.keys.insert(entry.key.clone());
        }
        entries.insert(entry.key.clone(), entry);
    }
    Ok(State { revision, next_lease, entries, leases })
}

fn get_u8(bytes: &mut Bytes) -> Result<u8, RepositoryError> {
    bytes.try_get_u8().map_err(|_| truncated())
}

fn get_u32(bytes: &mut Bytes) -> Result<u32, RepositoryError> {
    bytes.try_get_u32().map_err(|_| truncated())
}

fn get_i64(bytes: &mut Bytes) -> Result<i64, RepositoryError> {
    bytes.try_get_i64().map_err(|_| truncated())
}

fn get_u64(bytes: &mut Bytes) -> Result<u64, RepositoryError> {
    bytes.try_get_u64().map_err(|_| truncated())
}

/// Copies, so that one small value does not keep a whole segment's buffer in memory.
fn get_bytes(bytes: &mut Bytes) -> Result<Bytes, RepositoryError> {
    let len = usize::try_from(get_u32(bytes)?).map_err(|_| truncated())?;
    if len > bytes.remaining() {
        return Err(truncated());
    }
    Ok(Bytes::copy_from_slice(&bytes.split_to(len)))
}

fn get_key(bytes: &mut Bytes) -> Result<String, RepositoryError> {
    String::from_utf8(get_bytes(bytes)?.into()).map_err(|_| damaged("a key is not UTF-8"))
}

fn get_lease(bytes: &mut Bytes) -> Result<Option<LeaseId>, RepositoryError> {
    Ok(Some(LeaseId(get_i64(bytes)?)).filter(|id| id.0 != 0))
}

fn truncated() -> RepositoryError {
    damaged("truncated record")
}

fn damaged(message: &str) -> RepositoryError {
    RepositoryError::Damaged(message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository::{Compare, Txn};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn format_1_golden_bytes_are_unchanged() {
        let ops = vec![
            Op::Put { key: "a".into(), value: Bytes::from_static(b"xy"), lease: Some(LeaseId(7)) },
            Op::Delete { key: "b".into() },
        ];
        let cases = [
            (
                Record::Change { revision: 2, ops },
                "010100000000000000020000000201000000016100000002787900000000000000070200000001\
                 62",
            ),
            (Record::Grant { id: LeaseId(7), ttl_ms: 9 }, "010200000000000000070000000000000009"),
            (Record::Revoke { id: LeaseId(7) }, "01030000000000000007"),
        ];
        for (record, golden) in cases {
            let bytes = encode_record(&record);
            assert_eq!(hex(&bytes), golden.replace(' ', ""), "{record:?}");
            assert_eq!(decode(bytes).unwrap(), Logged::Record(record));
        }
        assert_eq!(
            hex(&encode_snapshot(&State::default())),
            "0104000000000000000100000000000000010000000000000000",
            "an empty state"
        );
    }

    #[test]
    fn record_truncated_at_any_length_is_rejected() {
        let ops = vec![Op::Put { key: "key".into(), value: Bytes::from_static(b"value"), lease: None }];
        let bytes = encode_record(&Record::Change { revision: 2, ops });
        for end in 0..bytes.len() {
            assert!(decode(bytes.slice(..end)).is_err(), "truncated at {end}");
        }
        let mut longer = BytesMut::from(&bytes[..]);
        longer.put_u8(0);
        assert!(decode(longer.freeze()).is_err());
        assert!(decode(Bytes::from_static(b"\x02\x03\0\0\0\0\0\0\0\x07")).is_err(), "a newer format");
        assert!(
            decode(Bytes::from_static(b"\x01\x01\0\0\0\0\0\0\0\x02\xff\xff\xff\xff")).is_err(),
            "an absurd count"
        );
    }

    /// Drives a state with random requests; every intermediate state must be rebuilt from its log and from
    /// its snapshot.
    #[test]
    fn replay_and_snapshot_give_the_same_state() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut state, mut log) = (State::default(), Vec::new());
            for _ in 0..200 {
                let Some(record) = random_record(&mut random, &state) else { continue };
                state.apply(&record).unwrap();
                log.push(encode_record(&record));
            }
            let mut replayed = State::default();
            for bytes in log {
                let Logged::Record(record) = decode(bytes).unwrap() else { panic!("not a record") };
                replayed.apply(&record).unwrap();
            }
            assert_eq!(replayed, state, "seed {seed}");
            assert_eq!(decode(encode_snapshot(&state)).unwrap(), Logged::Snapshot(state), "seed {seed}");
        }
    }

    fn random_record(random: &mut fastrand::Rng, state: &State) -> Option<Record> {
        let lease = random.choice(state.leases().map(|(id, _)| id).collect::<Vec<_>>());
        let key = format!("k{}", random.u8(..8));
        let txn = match random.u8(..10) {
            0 => return Some(state.decide_grant(random.u64(1..9)).1),
            1 => return state.decide_revoke(lease?).ok(),
            2 => Txn::new().delete(key),
            3..6 => Txn::new().put_leased(key, vec![random.u8(..)], lease?),
            6 => Txn::new().when(Compare::Absent(key.clone())).put(key, "new").delete("k0x"),
            _ => Txn::new().put(key, vec![random.u8(..)]),
        };
        state.decide_txn(txn).ok()?.0
    }
}
