//! The state machine against a simple model: a list of full copies of the store, one for each revision.
//!
//! Any sequence of commands must give the model's replies. In addition, the same sequence elsewhere gives the same
//! checksums, and a state that went through a snapshot at any point continues as if it had not.

use std::collections::BTreeMap;

use bytes::Bytes;
use moim_coord::{
    Command, Compare, CompareResult, CompareTarget, DeleteReply, DeleteRequest, Error, KeyRange, KeyValue,
    LeaseId, Op, PutReply, PutRequest, RangeReply, RangeRequest, Reply, SortOrder, SortTarget, SpaceId,
    State, TxnOp, TxnOpReply, TxnReply, TxnRequest,
};
use proptest::prelude::*;

type Store = BTreeMap<Bytes, KeyValue>;

#[derive(Clone)]
struct Model {
    /// The store at each revision from 1 on.
    at: Vec<Store>,
    compacted: i64,
    leases: BTreeMap<LeaseId, i64>,
}

impl Model {
    fn new() -> Self {
        Self { at: vec![Store::new()], compacted: -1, leases: BTreeMap::new() }
    }

    fn revision(&self) -> i64 {
        self.at.len() as i64
    }

    fn now(&self) -> &Store {
        self.at.last().expect("revision 1 is always there")
    }

    fn apply(&mut self, op: &Op) -> Reply {
        let mut open = Open { store: self.now().clone(), revision: self.revision(), changed: false };
        let reply = match op {
            Op::Put(put) => self.check_put(put).map(|()| Reply::Put(open.put(put))),
            Op::Delete(delete) => Ok(Reply::Delete(open.delete(delete))),
            Op::Txn(txn) => self.txn(&mut open, txn),
            Op::Compact { revision, .. } => self.compact(*revision),
            Op::LeaseGrant { id, ttl_ms } => {
                if self.leases.contains_key(id) {
                    Err(Error::LeaseExists)
                } else {
                    self.leases.insert(*id, *ttl_ms);
                    Ok(Reply::LeaseGranted { revision: self.revision(), id: *id, ttl_ms: *ttl_ms })
                }
            }
            Op::LeaseRevoke { id } => match self.leases.remove(id) {
                None => Err(Error::LeaseNotFound),
                Some(_) => {
                    let before = open.store.len();
                    open.store.retain(|_, kv| kv.lease != *id);
                    open.changed = open.store.len() < before;
                    Ok(Reply::LeaseRevoked { revision: open.view() })
                }
            },
            other => panic!("not in the model: {other:?}"),
        };
        if open.changed {
            assert!(reply.is_ok());
            self.at.push(open.store);
        }
        reply.unwrap_or_else(Reply::Error)
    }

    fn compact(&mut self, revision: i64) -> Result<Reply, Error> {
        if revision <= self.compacted {
            return Err(Error::Compacted);
        }
        if revision > self.revision() {
            return Err(Error::FutureRevision);
        }
        self.compacted = revision;
        Ok(Reply::Compacted { revision: self.revision() })
    }

    fn check_put(&self, put: &PutRequest) -> Result<(), Error> {
        if put.lease != LeaseId::NONE && !self.leases.contains_key(&put.lease) {
            return Err(Error::LeaseNotFound);
        }
        if (put.ignore_value || put.ignore_lease) && !self.now().contains_key(&put.key) {
            return Err(Error::KeyNotFound);
        }
        Ok(())
    }

    fn txn(&self, open: &mut Open, txn: &TxnRequest) -> Result<Reply, Error> {
        txn.check()?;
        self.check_txn(txn)?;
        let mut reply = self.run_txn(open, txn);
        reply.revision = open.view();
        Ok(Reply::Txn(reply))
    }

    fn branch<'a>(&self, txn: &'a TxnRequest) -> (bool, &'a [TxnOp]) {
        let holds = txn.compares.iter().all(|compare| self.holds(compare));
        (holds, if holds { &txn.success } else { &txn.failure })
    }

    /// The operations of the chosen branches, nested ones at their position.
    fn chosen<'a>(&self, txn: &'a TxnRequest) -> Vec<&'a TxnOp> {
        let steps = self.branch(txn).1.iter();
        let flat = steps.flat_map(|op| match op {
            TxnOp::Txn(inner) => self.chosen(inner),
            TxnOp::Put(_) | TxnOp::Range(_) | TxnOp::Delete(_) => vec![op],
        });
        flat.collect()
    }

    /// As in etcd: every put, then every range.
    fn check_txn(&self, txn: &TxnRequest) -> Result<(), Error> {
        let steps = self.chosen(txn);
        for op in &steps {
            if let TxnOp::Put(put) = op {
                self.check_put(put)?;
            }
        }
        for op in &steps {
            match op {
                TxnOp::Range(range) if range.revision > self.revision() => return Err(Error::FutureRevision),
                TxnOp::Range(range) if range.revision != 0 && range.revision < self.compacted => {
                    return Err(Error::Compacted);
                }
                TxnOp::Range(_) | TxnOp::Put(_) | TxnOp::Delete(_) | TxnOp::Txn(_) => {}
            }
        }
        Ok(())
    }

    fn run_txn(&self, open: &mut Open, txn: &TxnRequest) -> TxnReply {
        let (succeeded, ops) = self.branch(txn);
        let responses = ops.iter().map(|op| match op {
            TxnOp::Range(range) => TxnOpReply::Range(self.range_in(open, range).expect("checked")),
            TxnOp::Put(put) => TxnOpReply::Put(open.put(put)),
            TxnOp::Delete(delete) => TxnOpReply::Delete(open.delete(delete)),
            TxnOp::Txn(inner) => TxnOpReply::Txn(self.run_txn(open, inner)),
        });
        TxnReply { revision: 0, succeeded, responses: responses.collect() }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let range = KeyRange::new(compare.key.clone(), compare.range_end.clone());
        let found: Vec<&KeyValue> = self.now().values().filter(|kv| range.contains(&kv.key)).collect();
        let absent = KeyValue::default();
        let check = |kv: &KeyValue| {
            let order = match &compare.target {
                CompareTarget::Version(n) => kv.version.cmp(n),
                CompareTarget::Create(n) => kv.create_revision.cmp(n),
                CompareTarget::Mod(n) => kv.mod_revision.cmp(n),
                CompareTarget::Lease(n) => kv.lease.cmp(n),
                CompareTarget::Value(value) => kv.value.cmp(value),
            };
            match compare.result {
                CompareResult::Equal => order.is_eq(),
                CompareResult::NotEqual => order.is_ne(),
                CompareResult::Greater => order.is_gt(),
                CompareResult::Less => order.is_lt(),
            }
        };
        if found.is_empty() {
            return !matches!(compare.target, CompareTarget::Value(_)) && check(&absent);
        }
        found.into_iter().all(check)
    }

    fn range(&self, request: &RangeRequest) -> Result<RangeReply, Error> {
        self.range_in(&Open { store: self.now().clone(), revision: self.revision(), changed: false }, request)
    }

    fn range_in(&self, open: &Open, request: &RangeRequest) -> Result<RangeReply, Error> {
        if request.revision > open.view() {
            return Err(Error::FutureRevision);
        }
        if request.revision > 0 && request.revision < self.compacted {
            return Err(Error::Compacted);
        }
        let store = match request.revision {
            0 => &open.store,
            revision => &self.at[revision as usize - 1],
        };
        let range = request.range();
        let mut kvs: Vec<KeyValue> = store.values().filter(|kv| range.contains(&kv.key)).cloned().collect();
        let count = kvs.len() as i64;
        if request.count_only {
            kvs.clear();
        }
        match request.sort_target {
            SortTarget::Key => {}
            SortTarget::Version => kvs.sort_by_key(|kv| kv.version),
            SortTarget::Create => kvs.sort_by_key(|kv| kv.create_revision),
            SortTarget::Mod => kvs.sort_by_key(|kv| kv.mod_revision),
            SortTarget::Value => kvs.sort_by_key(|kv| kv.value.clone()),
        }
        if request.sort_order == SortOrder::Descend {
            kvs.reverse();
        }
        kvs.retain(|kv| request.min_mod_revision == 0 || kv.mod_revision >= request.min_mod_revision);
        kvs.retain(|kv| {
            request.max_create_revision == 0 || kv.create_revision <= request.max_create_revision
        });
        let limit = if request.limit > 0 { request.limit as usize } else { usize::MAX };
        let more = kvs.len() > limit;
        kvs.truncate(limit);
        if request.keys_only {
            kvs.iter_mut().for_each(|kv| kv.value = Bytes::new());
        }
        Ok(RangeReply { revision: open.view(), kvs, more, count })
    }
}

/// An open revision.
struct Open {
    store: Store,
    revision: i64,
    changed: bool,
}

impl Open {
    fn view(&self) -> i64 {
        self.revision + i64::from(self.changed)
    }

    fn put(&mut self, put: &PutRequest) -> PutReply {
        self.changed = true;
        let prev = self.store.get(&put.key).cloned();
        let old = prev.clone().unwrap_or_default();
        let kv = KeyValue {
            key: put.key.clone(),
            value: if put.ignore_value { old.value } else { put.value.clone() },
            create_revision: if prev.is_some() { old.create_revision } else { self.revision + 1 },
            mod_revision: self.revision + 1,
            version: old.version + 1,
            lease: if put.ignore_lease { old.lease } else { put.lease },
        };
        self.store.insert(put.key.clone(), kv);
        PutReply { revision: self.view(), prev_kv: prev.filter(|_| put.prev_kv) }
    }

    fn delete(&mut self, delete: &DeleteRequest) -> DeleteReply {
        let range = delete.range();
        let gone: Vec<KeyValue> = self.store.values().filter(|kv| range.contains(&kv.key)).cloned().collect();
        self.store.retain(|key, _| !range.contains(key));
        self.changed |= !gone.is_empty();
        let deleted = gone.len() as i64;
        DeleteReply {
            revision: self.view(),
            deleted,
            prev_kvs: if delete.prev_kv { gone } else { Vec::new() },
        }
    }
}

fn key() -> impl Strategy<Value = Bytes> {
    (0..5_u8).prop_map(|n| Bytes::from(vec![b'a' + n]))
}

fn range_end() -> impl Strategy<Value = Bytes> {
    prop_oneof![3 => Just(Bytes::new()), 2 => key(), 1 => Just(Bytes::from_static(b"\0"))]
}

fn lease() -> impl Strategy<Value = LeaseId> {
    prop_oneof![3 => Just(LeaseId::NONE), 2 => (1..4_i64).prop_map(LeaseId)]
}

fn put() -> impl Strategy<Value = PutRequest> {
    (key(), 0..4_u8, lease(), any::<bool>(), 0..10_u8).prop_map(|(key, value, lease, prev_kv, keep)| {
        let (ignore_value, ignore_lease) = (keep == 0, keep == 1);
        let value = if ignore_value { Bytes::new() } else { Bytes::from(vec![b'0' + value]) };
        let lease = if ignore_lease { LeaseId::NONE } else { lease };
        PutRequest { key, value, lease, prev_kv, ignore_value, ignore_lease }
    })
}

fn delete() -> impl Strategy<Value = DeleteRequest> {
    (key(), range_end(), any::<bool>()).prop_map(|(key, range_end, prev_kv)| DeleteRequest {
        key,
        range_end,
        prev_kv,
    })
}

fn range() -> impl Strategy<Value = RangeRequest> {
    let numbers = (0..4_i64, prop_oneof![2 => Just(0_i64), 1 => 1..30_i64], 0..12_i64, 0..12_i64);
    let flags = (any::<bool>(), any::<bool>(), 0..5_usize, any::<bool>());
    (key(), range_end(), numbers, flags).prop_map(
        |(key, range_end, numbers, (keys_only, count_only, target, down))| {
            let (limit, revision, min_mod_revision, max_create_revision) = numbers;
            use SortTarget::{Create, Key, Mod, Value, Version};
            RangeRequest {
                key,
                range_end,
                limit,
                revision,
                sort_order: if down { SortOrder::Descend } else { SortOrder::Ascend },
                sort_target: [Key, Version, Create, Mod, Value][target],
                keys_only,
                count_only,
                min_mod_revision: min_mod_revision.saturating_sub(6).max(0),
                max_create_revision: max_create_revision.saturating_sub(6).max(0),
                ..RangeRequest::default()
            }
        },
    )
}

fn compare() -> impl Strategy<Value = Compare> {
    use CompareResult::{Equal, Greater, Less, NotEqual};
    (key(), range_end(), 0..5_u8, 0..10_i64, 0..4_usize).prop_map(|(key, range_end, target, n, result)| {
        Compare {
            key,
            range_end,
            target: match target {
                0 => CompareTarget::Version(n % 3),
                1 => CompareTarget::Create(n),
                2 => CompareTarget::Mod(n),
                3 => CompareTarget::Lease(LeaseId(n % 3)),
                _ => CompareTarget::Value(Bytes::from(vec![b'0' + (n % 4) as u8])),
            },
            result: [Equal, Greater, Less, NotEqual][result],
        }
    })
}

fn txn() -> impl Strategy<Value = TxnRequest> {
    let leaf = prop_oneof![
        put().prop_map(TxnOp::Put),
        delete().prop_map(TxnOp::Delete),
        range().prop_map(TxnOp::Range),
    ];
    let op = leaf.prop_recursive(2, 8, 3, |inner| {
        let ops = || proptest::collection::vec(inner.clone(), 0..3);
        (proptest::collection::vec(compare(), 0..2), ops(), ops())
            .prop_map(|(compares, success, failure)| TxnOp::Txn(TxnRequest { compares, success, failure }))
    });
    let ops = || proptest::collection::vec(op.clone(), 0..4);
    (proptest::collection::vec(compare(), 0..3), ops(), ops())
        .prop_map(|(compares, success, failure)| TxnRequest { compares, success, failure })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => put().prop_map(Op::Put),
        2 => delete().prop_map(Op::Delete),
        6 => txn().prop_map(Op::Txn),
        1 => (0..30_i64).prop_map(|revision| Op::Compact { space: SpaceId::User, revision }),
        2 => (1..4_i64).prop_map(|id| Op::LeaseGrant { id: LeaseId(id), ttl_ms: 2_000 }),
        1 => (1..4_i64).prop_map(|id| Op::LeaseRevoke { id: LeaseId(id) }),
    ]
}

fn bytes(state: &State) -> Vec<u8> {
    state.snapshot().flatten().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn state_replies_like_the_model(
        ops in proptest::collection::vec(op(), 1..50),
        reads in proptest::collection::vec(range(), 8),
    ) {
        let mut state = State::new();
        let mut model = Model::new();
        for (index, op) in ops.iter().enumerate() {
            let expected = model.apply(op);
            let reply = state.apply(index as u64 + 1, Command::client(op.clone()));
            prop_assert_eq!(&reply, &expected, "step {} of {:?}", index, op);
            prop_assert_eq!(state.revision(SpaceId::User), model.revision());
            prop_assert_eq!(state.live_keys(SpaceId::User), model.now().len());
            for read in &reads {
                prop_assert_eq!(state.range(read), model.range(read), "{:?} after step {}", read, index);
            }
            for (id, lease) in state.leases() {
                let held: Vec<&Bytes> = lease.keys().collect();
                let named: Vec<&Bytes> = model.now().values().filter(|kv| kv.lease == id).map(|kv| &kv.key).collect();
                prop_assert_eq!(held, named);
            }
        }
    }

    #[test]
    fn same_log_gives_the_same_state_with_and_without_snapshots(
        ops in proptest::collection::vec(op(), 1..40),
    ) {
        let (mut one, mut other, mut idle) = (State::new(), State::new(), State::new());
        for (index, op) in ops.iter().enumerate() {
            let index = index as u64 + 1;
            let command = Command::client(op.clone());
            // One state is restored at every point and its commands are encoded and decoded; one has its history
            // reclaimed early.
            one = State::restore(one.snapshot()).unwrap();
            let entry = command.to_entry().unwrap();
            let replies = [
                one.apply(index, Command::decode(entry).unwrap()),
                other.apply(index, command.clone()),
                idle.apply(index, command),
            ];
            idle.reclaim(usize::MAX);
            prop_assert_eq!(&replies[0], &replies[1]);
            prop_assert_eq!(&replies[0], &replies[2]);
            prop_assert_eq!(bytes(&one), bytes(&other));
            let compacted = other.compact_revision(SpaceId::User).max(1);
            for revision in compacted..=other.revision(SpaceId::User) {
                let hash = other.hash_kv(SpaceId::User, revision).unwrap();
                prop_assert_eq!(one.hash_kv(SpaceId::User, revision), Ok(hash));
                prop_assert_eq!(idle.hash_kv(SpaceId::User, revision), Ok(hash));
            }
        }
    }

    #[test]
    fn snapshot_taken_between_commands_is_of_its_begin(
        before in proptest::collection::vec(op(), 1..30),
        during in proptest::collection::vec(op(), 1..30),
        chunk_bytes in 1..80_usize,
    ) {
        let mut state = State::new();
        let mut index = 0;
        let mut run = |state: &mut State, op: Op| {
            index += 1;
            state.apply(index, Command::client(op));
        };
        before.into_iter().for_each(|op| run(&mut state, op));
        let expected = bytes(&state);
        let mut cursor = state.begin_snapshot(chunk_bytes);
        prop_assert_eq!(cursor.applied_index(), state.applied_index());
        let mut chunks = Vec::new();
        for op in during {
            chunks.extend(cursor.next_chunk(&state).unwrap());
            run(&mut state, op);
            state.reclaim(usize::MAX);
        }
        chunks.extend(std::iter::from_fn(|| cursor.next_chunk(&state).unwrap()));
        prop_assert!(cursor.next_chunk(&State::new()).is_err(), "another state has another history");
        drop(cursor);
        prop_assert_eq!(bytes(&State::restore(chunks).unwrap()), expected);
        state.reclaim(usize::MAX);
        prop_assert!(!state.reclaim(0), "history is reclaimed once the snapshot is done");
    }
}
