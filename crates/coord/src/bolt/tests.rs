//! A state written and read again is equal for clients; a malformed file is refused.

use proptest::prelude::*;

use super::*;
use crate::request::{Command, DeleteRequest, Op, Origin, PutRequest, TxnOp, TxnRequest};
use crate::{LeaseId, RangeRequest, SpaceId, State};

fn file_of(state: &State) -> Vec<u8> {
    let mut cursor = state.begin_bolt();
    let mut file = Vec::new();
    loop {
        match cursor.step(state).unwrap() {
            Step::Measuring => {}
            Step::Chunk(bytes) => file.extend_from_slice(&bytes),
            Step::Done => break,
        }
    }
    assert_eq!(file.len() as u64, cursor.total_bytes());
    file
}

fn apply(state: &mut State, op: Op) {
    let index = state.applied_index() + 1;
    let reply = state.apply(index, Command { origin: Origin::Client, op });
    assert!(!matches!(reply, crate::Reply::Error(_)), "{reply:?}");
}

/// Both states answer every read of every revision alike.
fn assert_same(left: &State, right: &State) {
    let user = SpaceId::User;
    assert_eq!(left.revision(user), right.revision(user));
    assert_eq!(left.compact_revision(user), right.compact_revision(user));
    assert_eq!(left.live_keys(user), right.live_keys(user));
    for revision in left.compact_revision(user).max(1)..=left.revision(user) {
        let everything = RangeRequest { revision, ..RangeRequest::between(&b"\0"[..], &b"\0"[..]) };
        assert_eq!(left.range(&everything), right.range(&everything), "at {revision}");
    }
    let leases = |state: &State| -> Vec<_> {
        state
            .leases()
            .map(|(id, lease)| (id, lease.ttl_ms, lease.keys().cloned().collect::<Vec<_>>()))
            .collect()
    };
    assert_eq!(leases(left), leases(right));
}

#[test]
fn many_changes_need_several_page_levels() {
    let mut state = State::new();
    apply(&mut state, Op::LeaseGrant { id: LeaseId(7), ttl_ms: 60_000 });
    apply(&mut state, Op::LeaseGrant { id: LeaseId(-7), ttl_ms: 61_000 });
    for n in 0..40_000 {
        let lease = if n % 100 == 0 { LeaseId(-7) } else { LeaseId::NONE };
        let put = PutRequest { lease, ..PutRequest::new(format!("key-{}", n % 9_000), vec![b'v'; n % 40]) };
        apply(&mut state, Op::Put(put));
    }
    // Longer than a page, and a transaction of several changes.
    apply(&mut state, Op::Put(PutRequest::new("large", vec![1; 100_000])));
    let ops = ["a", "b", "c"].map(|key| TxnOp::Put(PutRequest::new(key, "1")));
    apply(&mut state, Op::Txn(TxnRequest { success: ops.to_vec(), ..TxnRequest::default() }));
    let read_again = read(&file_of(&state)).unwrap();
    let user = SpaceId::User;
    assert_eq!(read_again.live_keys(user), state.live_keys(user));
    assert_eq!(read_again.hash_kv(user, 0), state.hash_kv(user, 0));
    assert_eq!(read_again.lease(LeaseId(-7)), state.lease(LeaseId(-7)));
}

#[test]
fn system_keys_and_node_leases_are_not_exported() {
    let mut state = State::new();
    let node = |op| Command { origin: Origin::Node, op };
    state.apply(1, node(Op::LeaseGrant { id: LeaseId(3), ttl_ms: 3_000 }));
    state.apply(2, node(Op::Put(PutRequest::new("/moim/nodes/1", "x"))));
    state.apply(3, Command::client(Op::Put(PutRequest::new("k", "v"))));
    let read_again = read(&file_of(&state)).unwrap();
    assert_eq!(read_again.live_keys(SpaceId::System), 0);
    assert_eq!(read_again.leases().count(), 0);
    assert_eq!(read_again.live_keys(SpaceId::User), 1);
}

#[test]
fn empty_state_round_trips() {
    let state = State::new();
    assert_same(&state, &read(&file_of(&state)).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn written_file_reads_back_equal(steps in prop::collection::vec((0..6_u8, 0..8_u8, 0..60_usize), 0..80)) {
        let mut state = State::new();
        for (what, key, size) in steps {
            let key = format!("k{key}");
            let op = match what {
                0..=3 => Op::Put(PutRequest::new(key, vec![b'x'; size])),
                4 => Op::Delete(DeleteRequest::key(key)),
                _ => {
                    let revision = (state.revision(SpaceId::User) - size as i64 / 6).max(1);
                    if revision <= state.compact_revision(SpaceId::User) {
                        continue;
                    }
                    Op::Compact { space: SpaceId::User, revision }
                }
            };
            apply(&mut state, op);
        }
        assert_same(&state, &read(&file_of(&state)).unwrap());
    }

    #[test]
    fn corrupted_file_is_refused_or_unaffected(at in 0..40_960_usize, byte in any::<u8>(), cut in 0..40_960_usize) {
        let mut state = State::new();
        for n in 0..200 {
            apply(&mut state, Op::Put(PutRequest::new(format!("key-{n}"), vec![b'v'; n])));
        }
        let mut file = file_of(&state);
        let at = at % file.len();
        file[at] = byte;
        let _ = read(&file);
        file.truncate(cut);
        let _ = read(&file);
    }
}
