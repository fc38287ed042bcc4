//! Randomized tests: random requests, failed writes, lost and repeated work, and crashes at every point; then the
//! invariants that must hold in every case.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use moim_wire_kafka::ErrorCode;

use super::super::*;
use super::harness::{Harness, add, add_at, end, end_at, init};

const IDS: [&str; 2] = ["x", "y"];

#[derive(Clone, Debug)]
enum Step {
    Init {
        id: usize,
        claim: Option<usize>,
    },
    Add {
        id: usize,
        claim: usize,
        partition: i32,
    },
    End {
        id: usize,
        claim: usize,
        commit: bool,
    },
    /// As `Add`, of a client that gets an epoch with every transaction and sends no AddPartitionsToTxn.
    AddOwnEpoch {
        id: usize,
        claim: usize,
        partition: i32,
    },
    EndOwnEpoch {
        id: usize,
        claim: usize,
        commit: bool,
    },
    Persist {
        ok: bool,
    },
    Mark {
        which: usize,
        ok: bool,
    },
    Advance {
        ms: u64,
    },
    /// `written`: true if the write in flight had reached the log.
    Crash {
        written: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = 0..IDS.len();
    // Claims are looked up among past responses, the newest first: zombies included.
    let claim = prop_oneof![4 => Just(0usize), 1 => 1..4usize];
    let step = prop_oneof![
        2 => (id.clone(), prop::option::of(claim.clone())).prop_map(|(id, claim)| Step::Init { id, claim }),
        5 => (id.clone(), claim.clone(), 0..4i32)
            .prop_map(|(id, claim, partition)| Step::Add { id, claim, partition }),
        4 => (id.clone(), claim.clone(), any::<bool>())
            .prop_map(|(id, claim, commit)| Step::End { id, claim, commit }),
        3 => (id.clone(), claim.clone(), 0..4i32)
            .prop_map(|(id, claim, partition)| Step::AddOwnEpoch { id, claim, partition }),
        3 => (id, claim, any::<bool>())
            .prop_map(|(id, claim, commit)| Step::EndOwnEpoch { id, claim, commit }),
        12 => prop::bool::weighted(0.9).prop_map(|ok| Step::Persist { ok }),
        8 => (0..8usize, prop::bool::weighted(0.8)).prop_map(|(which, ok)| Step::Mark { which, ok }),
        1 => prop_oneof![Just(1u64), Just(2_000), Just(60_000)].prop_map(|ms| Step::Advance { ms }),
        1 => any::<bool>().prop_map(|written| Step::Crash { written }),
    ];
    prop::collection::vec(step, 1..150)
}

/// Claims that clients of the id ever got, newest last.
type Claims = BTreeMap<&'static str, Vec<(i64, i16)>>;

struct RandomRun {
    w: Harness,
    claims: Claims,
    /// Requests whose response has a claim: the init of an id, the end of a claim.
    inits: BTreeMap<Token, &'static str>,
    /// EndTxn requests of a claim that was already replaced by a newer one.
    zombies: BTreeSet<Token>,
}

impl RandomRun {
    fn claim(&self, id: &'static str, back: usize) -> (i64, i16) {
        let claims = self.claims.get(id).map_or(&[][..], Vec::as_slice);
        claims.iter().rev().nth(back).copied().unwrap_or((1, 0))
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Init { id, claim } => {
                let current = claim.map(|back| self.claim(IDS[id], back));
                let token = self.w.send(init(IDS[id], current));
                self.inits.insert(token, IDS[id]);
            }
            Step::Add { id, claim, partition } => {
                let producer = self.claim(IDS[id], claim);
                self.w.send(add(IDS[id], producer, &[partition]));
            }
            Step::End { id, claim, commit } => {
                let producer = self.claim(IDS[id], claim);
                let token = self.w.send(end(IDS[id], producer, commit));
                if producer != self.claim(IDS[id], 0) {
                    self.zombies.insert(token);
                }
            }
            Step::AddOwnEpoch { id, claim, partition } => {
                let producer = self.claim(IDS[id], claim);
                self.w.send(add_at(5, IDS[id], producer, &[partition]));
            }
            Step::EndOwnEpoch { id, claim, commit } => {
                let producer = self.claim(IDS[id], claim);
                let token = self.w.send(end_at(5, IDS[id], producer, commit));
                // The producer continues under the epoch of the EndTxn response.
                self.inits.insert(token, IDS[id]);
            }
            Step::Persist { ok } => {
                self.w.persist(if ok { Ok(()) } else { Err(ErrorCode::NotEnoughReplicas) });
            }
            Step::Mark { which, ok } => {
                if !self.w.markers.is_empty() {
                    let which = which % self.w.markers.len();
                    self.w.mark(which, if ok { Ok(()) } else { Err(ErrorCode::NotLeaderOrFollower) });
                }
            }
            Step::Advance { ms } => self.w.advance(ms),
            Step::Crash { written } => {
                if written && let Some((_, key, value)) = self.w.writes.pop_front() {
                    self.w.log.push((key, value));
                }
                self.w.restart();
            }
        }
        self.learn();
        self.check_memory();
    }

    fn learn(&mut self) {
        for (token, id) in &self.inits {
            if let Some(Some(reply)) = self.w.answers.get(token)
                && reply.error == ErrorCode::None
            {
                let claim = (reply.producer_id, reply.producer_epoch);
                let claims = self.claims.entry(id).or_default();
                if !claims.contains(&claim) {
                    claims.push(claim);
                }
            }
        }
        self.inits.retain(|t, _| matches!(self.w.answers.get(t), Some(None)));
    }

    /// The state in memory equals the state after a restart, write by write.
    fn check_memory(&self) {
        let mut loaded = Coordinator::new(Config::default(), 7);
        for (key, value) in &self.w.log {
            loaded.replay(key, value.as_deref()).unwrap();
        }
        for id in IDS {
            assert_eq!(loaded.transaction(id), self.w.c.transaction(id), "{id}");
        }
    }
}

/// A decision in the log, from its record to the record of its completion.
struct Decision {
    records: std::ops::Range<usize>,
    commit: bool,
    producer: (i64, i16),
    partitions: BTreeSet<TopicPartition>,
}

/// The decisions of one id; checks every step of its history.
fn decisions(w: &Harness, id: &str) -> Vec<Decision> {
    let mut all: Vec<Decision> = Vec::new();
    let mut before: Option<Transaction> = None;
    for (at, (key, value)) in w.log.iter().enumerate() {
        let (true, Some(value)) = (*key == encode_key(id), value) else { continue };
        let txn = decode_value(value).unwrap();
        if before.as_ref() == Some(&txn) && !txn.state.is_preparing() {
            continue; // the same state, written again for a retry
        }
        let from = before.as_ref().map_or(State::Empty, |t| t.state);
        let legal = match txn.state {
            State::Empty => !from.is_running(),
            State::Ongoing => !from.is_preparing(),
            State::PrepareCommit => from == State::Ongoing,
            State::PrepareAbort => {
                from == State::Ongoing || (txn.epoch_per_transaction && !from.is_preparing())
            }
            State::CompleteCommit => from == State::PrepareCommit,
            State::CompleteAbort => from == State::PrepareAbort,
            State::Dead | State::PrepareEpochFence => false,
        };
        assert!(legal, "{id}: {from:?} -> {:?}", txn.state);
        if let Some(before) = before.filter(|b| b.producer_id == txn.producer_id) {
            assert!(before.epoch <= txn.epoch, "{id}: the epoch decreased");
            let bumped = before.epoch < txn.epoch;
            let by_itself = txn.epoch_per_transaction && txn.last_epoch == before.epoch;
            let commits = bumped && txn.state == State::PrepareCommit;
            assert!(!commits || by_itself, "{id}: only its own producer commits");
            if txn.epoch_per_transaction && txn.state.is_preparing() && !before.state.is_preparing() {
                assert!(bumped, "{id}: every end has a newer epoch than its records");
            }
            if txn.state.is_preparing() {
                assert_eq!(
                    before.partitions, txn.partitions,
                    "{id}: the decision covers the open partitions"
                );
            }
        }
        if txn.state.is_preparing() {
            all.push(Decision {
                records: at + 1..usize::MAX,
                commit: txn.state == State::PrepareCommit,
                producer: (txn.producer_id, txn.epoch),
                partitions: txn.partitions.clone(),
            });
        } else if from.is_preparing() {
            all.last_mut().unwrap().records.end = at + 1;
        }
        before = Some(txn);
    }
    all
}

/// Checks that markers were written between a decision and its completion, for all of its partitions and no others.
fn check_markers(w: &Harness, id: &str) {
    let mut found = 0;
    for decision in decisions(w, id) {
        let mut marked = BTreeSet::new();
        for (at, marker) in &w.written {
            if &*marker.id == id && decision.records.contains(at) {
                assert_eq!((marker.commit, marker.producer), (decision.commit, decision.producer), "{id}");
                marked.insert(marker.at.clone());
                found += 1;
            }
        }
        assert_eq!(marked, decision.partitions, "{id}: markers on exactly its partitions");
    }
    let written = w.written.iter().filter(|(_, m)| &*m.id == id).count();
    assert_eq!(found, written, "{id}: markers outside of any decision");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_transaction_ends_once_and_everywhere(steps in steps()) {
        let mut storm = RandomRun {
            w: Harness::new(),
            claims: Claims::new(),
            inits: BTreeMap::new(),
            zombies: BTreeSet::new(),
        };
        for step in steps {
            storm.step(step);
        }
        let w = &mut storm.w;
        // Time passes without further failures.
        for _ in 0..3 {
            w.settle();
            w.advance(60_000);
        }
        w.settle();
        prop_assert!(w.answers.values().all(Option::is_some), "a request was never answered");
        for id in IDS {
            let state = w.c.transaction(id).map_or(State::Empty, |t| t.state);
            prop_assert!(!state.is_running(), "{} is stuck in {:?}", id, state);
            check_markers(w, id);
        }
        for token in &storm.zombies {
            if let Some(Some(reply)) = w.answers.get(token) {
                prop_assert_ne!(reply.error, ErrorCode::None, "a fenced producer ended a transaction");
            }
        }
    }
}
