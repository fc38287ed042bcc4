//! Partition ownership transfer with state: graceful hand-off, owner failure, leader change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::*;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::leadership::{CasElection, ElectionOptions};
use crate::membership::{HeartbeatOptions, Membership, NodeInfo};
use crate::repository::{BoxFuture, StateRepository, Txn};
use crate::scenario::{Faults, Flaky, Store, everywhere, in_memory, until};

/// Work of all workers together: each worker counts steps, and the count is the hand-off state.
#[derive(Default)]
struct Ledger {
    /// Partition -> node that works on it.
    working: Mutex<BTreeMap<String, String>>,
    /// Partition -> steps done by all nodes.
    done: Mutex<BTreeMap<String, u64>>,
    tokens: Mutex<BTreeMap<String, i64>>,
}

struct Counter {
    node: String,
    ledger: Arc<Ledger>,
    counts: Mutex<BTreeMap<String, u64>>,
    owned: Mutex<BTreeMap<String, Owned>>,
}

impl Counter {
    fn new(node: &str, ledger: &Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            node: node.to_owned(),
            ledger: ledger.clone(),
            counts: Mutex::default(),
            owned: Mutex::default(),
        })
    }

    /// One step of work on every valid owned partition.
    fn work(&self) {
        let owned: Vec<Owned> = self.owned.lock().unwrap().values().cloned().collect();
        for one in owned.iter().filter(|one| one.is_valid()) {
            let working = self.ledger.working.lock().unwrap();
            assert_eq!(working.get(one.partition()), Some(&self.node), "two owners of {}", one.partition());
            *self.counts.lock().unwrap().get_mut(one.partition()).unwrap() += 1;
            *self.ledger.done.lock().unwrap().entry(one.partition().to_owned()).or_default() += 1;
        }
    }
}

impl PartitionHandler for Counter {
    fn on_assigned(&self, owned: Owned, handed_over: Option<HandedOver>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let count = handed_over.map_or(0, |state| {
                String::from_utf8(state.handoff.checkpoint.to_vec()).unwrap().parse().unwrap()
            });
            let partition = owned.partition().to_owned();
            let before = self.ledger.tokens.lock().unwrap().insert(partition.clone(), owned.fencing_token());
            assert!(before.is_none_or(|before| before < owned.fencing_token()), "tokens grow");
            self.ledger.working.lock().unwrap().insert(partition.clone(), self.node.clone());
            self.counts.lock().unwrap().insert(partition.clone(), count);
            self.owned.lock().unwrap().insert(partition, owned);
        })
    }

    fn on_revoked<'a>(&'a self, partition: &'a str) -> BoxFuture<'a, HandedOver> {
        Box::pin(async move {
            self.owned.lock().unwrap().remove(partition);
            let count = self.counts.lock().unwrap().remove(partition).unwrap();
            let who = self.ledger.working.lock().unwrap().remove(partition);
            assert_eq!(who.as_ref(), Some(&self.node), "this node was the owner until now");
            let handoff = Handoff { checkpoint: count.to_string().into(), ..Handoff::default() };
            HandedOver { handoff, last_offset: i64::try_from(count).unwrap() }
        })
    }

    fn on_lost(&self, partition: &str) {
        self.owned.lock().unwrap().remove(partition);
        self.counts.lock().unwrap().remove(partition);
    }
}

struct Fleet {
    ledger: Arc<Ledger>,
    specs: watch::Sender<Vec<PartitionSpec>>,
    store: Store,
}

struct Worker {
    counter: Arc<Counter>,
    membership: Membership,
    worker: AssignmentWorker,
    flaky: Arc<Flaky>,
    context: Context,
}

impl Fleet {
    fn new(store: Store, partitions: usize) -> Self {
        let spec = |at| PartitionSpec {
            id: format!("p{at}"),
            equipment_ids: vec![format!("press-{at}")],
            ..PartitionSpec::default()
        };
        let specs = watch::channel((0..partitions).map(spec).collect()).0;
        Self { ledger: Arc::default(), specs, store }
    }

    /// A node that owns partitions and campaigns for the assignment leadership.
    async fn start(&self, id: &str) -> Worker {
        let flaky = Flaky::new(self.store.repository.clone());
        let mut context = self.store.node(id);
        context.repository = flaky.clone();
        let info = NodeInfo { id: id.to_owned(), ..NodeInfo::default() };
        let beats = HeartbeatOptions { interval: self.store.ttl / 8, timeout: self.store.ttl / 2 };
        let membership = Membership::join(&context, info, &beats).await.unwrap();
        let counter = Counter::new(id, &self.ledger);
        let handoffs = HandoffStore::new(context.repository.clone(), HandoffOptions::default());
        let worker = AssignmentWorker::start(&context, &membership, "g", handoffs, counter.clone());
        let options = LeaderOptions { settle: Duration::from_millis(5), ..LeaderOptions::default() };
        let leader = AssignmentLeader::new(&context, "g", self.specs.subscribe(), options);
        let ttl = self.store.ttl;
        let election = CasElection::new(&context, "g", ElectionOptions { ttl, ..ElectionOptions::default() });
        context.scope.spawn("leader", leader.run(Arc::new(election)));
        Worker { counter, membership, worker, flaky, context }
    }

    /// Waits until the workers own all partitions, evenly.
    async fn settled(&self, workers: &[&Worker]) {
        let all: BTreeSet<String> = self.specs.borrow().iter().map(|spec| spec.id.clone()).collect();
        until(&format!("{}: partitions are balanced", self.store.name), async || {
            workers.iter().for_each(|worker| worker.counter.work());
            let owned: Vec<_> = workers.iter().map(|worker| worker.worker.owned()).collect();
            let sizes: Vec<usize> = owned.iter().map(BTreeMap::len).collect();
            let union: BTreeSet<String> = owned.into_iter().flat_map(BTreeMap::into_keys).collect();
            let is_even = sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1;
            (union == all && is_even && sizes.iter().sum::<usize>() == all.len()).then_some(())
        })
        .await;
    }
}

#[test]
fn partitions_move_to_a_new_node_with_their_state_and_back_when_it_leaves() {
    everywhere(async |store| {
        let fleet = Fleet::new(store, 9);
        let a = fleet.start("a").await;
        fleet.settled(&[&a]).await;
        (0..50).for_each(|_| a.counter.work());
        let mut events = a.context.events.subscribe();
        let b = fleet.start("b").await;
        fleet.settled(&[&a, &b]).await;
        assert_eq!(b.worker.owned().len(), 4, "fewest moves");
        let revoked = loop {
            match events.next().await.unwrap().unwrap() {
                ClusterEvent::Topology(event) if event.change == TopologyChange::Revoked => break event,
                _ => {}
            }
        };
        assert_eq!(revoked.equipment_ids, [format!("press-{}", &revoked.partition[1..])]);
        let handed: u64 = revoked.workflow_handoff.unwrap().checkpoint.parse().unwrap();
        assert!(handed >= 50);
        (0..20).for_each(|_| {
            a.counter.work();
            b.counter.work();
        });
        b.worker.stop().await;
        b.membership.leave().await.unwrap();
        fleet.settled(&[&a]).await;
        a.counter.work();
        let counts = a.counter.counts.lock().unwrap().clone();
        assert_eq!(counts, *fleet.ledger.done.lock().unwrap(), "no step was lost or done twice");
    });
}

#[test]
fn partitions_of_a_failed_node_resume_from_its_last_checkpoint() {
    everywhere(async |store| {
        let fleet = Fleet::new(store, 6);
        let (a, b) = (fleet.start("a").await, fleet.start("b").await);
        fleet.settled(&[&a, &b]).await;
        let owned: Vec<Owned> = b.counter.owned.lock().unwrap().values().cloned().collect();
        (0..10).for_each(|_| b.counter.work());
        let mut saved = BTreeMap::new();
        for one in &owned {
            let count = b.counter.counts.lock().unwrap()[one.partition()];
            let handoff = Handoff { checkpoint: count.to_string().into(), ..Handoff::default() };
            one.checkpoint(&HandedOver { handoff, last_offset: 9 }).await.unwrap();
            saved.insert(one.partition().to_owned(), count);
        }
        b.counter.work(); // after the checkpoint: lost in the crash
        b.flaky.set(Faults { unreachable: true, ..Faults::default() });
        until("b stops when its lease deadline passes", async || {
            owned.iter().all(|one| !one.is_valid()).then_some(())
        })
        .await;
        fleet.settled(&[&a]).await;
        for (partition, count) in saved {
            let here = a.counter.counts.lock().unwrap()[&partition];
            let done_here = fleet.ledger.done.lock().unwrap()[&partition];
            assert!(here >= count && here < done_here, "{partition}: from {count}, at {here} of {done_here}");
        }
        b.flaky.set(Faults::default());
        let late = owned[0].checkpoint(&HandedOver::default()).await;
        assert!(matches!(late, Err(HandoffError::NotOwner(_))), "{late:?}");
    });
}

#[test]
fn leader_change_during_rebalance_completes_all_transfers() {
    in_memory(async |store| {
        let fleet = Fleet::new(store, 40);
        let a = fleet.start("a").await;
        fleet.settled(&[&a]).await;
        let b = fleet.start("b").await;
        // The leader fails during partition transfers.
        until("first partition has moved", async || (!b.worker.owned().is_empty()).then_some(())).await;
        fleet.store.repository.txn(Txn::new().delete("cluster:leader/g")).await.unwrap();
        let c = fleet.start("c").await;
        fleet.settled(&[&a, &b, &c]).await;
        fleet.specs.send_modify(|specs| specs.truncate(10));
        fleet.specs.send_modify(|specs| {
            specs.push(PartitionSpec { id: "new/one".to_owned(), ..PartitionSpec::default() });
        });
        until("new partition is owned", async || {
            [&a, &b, &c].iter().any(|one| one.worker.owned().contains_key("new/one")).then_some(())
        })
        .await;
    });
}

#[test]
fn missed_heartbeats_do_not_move_ownership() {
    in_memory(async |store| {
        let fleet = Fleet::new(store, 4);
        let (a, b) = (fleet.start("a").await, fleet.start("b").await);
        fleet.settled(&[&a, &b]).await;
        let before = b.worker.owned();
        // Heartbeats are lost, lease renewals arrive: the member is silent, its lease is valid.
        b.flaky.set(Faults { lost_percent: 50, ..Faults::default() });
        tokio::time::sleep(fleet.store.ttl * 3).await;
        assert_eq!(b.worker.owned(), before);
        b.flaky.set(Faults::default());
    });
}

#[test]
fn hand_offs_of_every_size_round_trip() {
    everywhere(async |store| {
        let options = HandoffOptions { max_bytes: 4 << 20, ..HandoffOptions::default() };
        let handoffs = HandoffStore::new(store.repository.clone(), options);
        let mut random = fastrand::Rng::with_seed(3);
        let noise: Vec<u8> = (0..3 << 20).map(|_| random.u8(..)).collect();
        let cases: [(Vec<u8>, &str); 6] = [
            (Vec::new(), "utf8"),
            ("잠금".into(), "utf8"),
            (vec![0xff; 10], "base64"),
            (vec![7; 1 << 20], "lz4"),
            (noise[..2_000_000].to_vec(), "reference"),
            (noise, "reference"),
        ];
        for (body, encoding) in cases {
            let handoff =
                Handoff { checkpoint: body.into(), stage_state: "heating".to_owned(), last_processed_at: 12 };
            let stored = handoffs.save("g", "p", &handoff).await.unwrap();
            assert_eq!(stored.encoding, encoding, "{}", store.name);
            assert_eq!(handoffs.load(&stored).await.unwrap(), handoff);
            handoffs.sweep("g", "p", Some(&stored)).await;
            assert_eq!(handoffs.load(&stored).await.unwrap(), handoff, "the current hand-off is kept");
            let pieces = store.repository.list("cluster:handoffs/g/p/").await.unwrap().1.len();
            assert_eq!(pieces, stored.reference.map_or(0, |reference| reference.pieces));
        }
        let large = Handoff { checkpoint: vec![0; (4 << 20) + 1].into(), ..Handoff::default() };
        assert!(matches!(handoffs.save("g", "p", &large).await, Err(HandoffError::TooLarge { .. })));
    });
}

#[test]
fn damaged_hand_off_is_rejected() {
    in_memory(async |store| {
        let handoffs = HandoffStore::new(store.repository.clone(), HandoffOptions::default());
        let mut random = fastrand::Rng::with_seed(5);
        let noise: Bytes = (0..1 << 20).map(|_| random.u8(..)).collect::<Vec<_>>().into();
        let handoff = Handoff { checkpoint: noise, ..Handoff::default() };
        let stored = handoffs.save("g", "p", &handoff).await.unwrap();
        let key = format!("{}000001", stored.reference.as_ref().unwrap().key);
        let piece = store.repository.get(&key).await.unwrap().unwrap().value;
        let mut flipped = piece.to_vec();
        flipped[100] ^= 1;
        store.repository.txn(Txn::new().put(&key, flipped)).await.unwrap();
        assert!(matches!(handoffs.load(&stored).await, Err(HandoffError::Damaged(_))));
        store.repository.txn(Txn::new().delete(&key)).await.unwrap();
        assert!(matches!(handoffs.load(&stored).await, Err(HandoffError::Damaged(_))));
        for bad in [
            StoredHandoff { encoding: "lz4".into(), checkpoint: "////".into(), ..StoredHandoff::default() },
            StoredHandoff {
                encoding: "lz4".into(),
                checkpoint: "/////w==".into(),
                ..StoredHandoff::default()
            },
            StoredHandoff { encoding: "base64".into(), checkpoint: "!".into(), ..StoredHandoff::default() },
            StoredHandoff { encoding: "reference".into(), ..StoredHandoff::default() },
            StoredHandoff { encoding: "rot13".into(), ..StoredHandoff::default() },
        ] {
            assert!(handoffs.load(&bad).await.is_err(), "{bad:?}");
        }
    });
}

#[test]
fn malformed_record_is_reported_and_replaced() {
    in_memory(async |store| {
        let fleet = Fleet::new(store, 2);
        fleet.store.repository.txn(Txn::new().put("cluster:assignments/g/p0", "[")).await.unwrap();
        let a = fleet.start("a").await;
        fleet.settled(&[&a]).await;
    });
}

#[test]
fn fencing_tokens_grow_across_a_deleted_or_overwritten_record() {
    everywhere(async |store| {
        let fleet = Fleet::new(store, 2);
        let a = fleet.start("a").await;
        fleet.settled(&[&a]).await;
        let token = |worker: &Worker| worker.worker.owned().get("p0").copied();
        let mut last = token(&a).unwrap();
        for damage in
            [Txn::new().delete("cluster:assignments/g/p0"), Txn::new().put("cluster:assignments/g/p0", "[")]
        {
            fleet.store.repository.txn(damage).await.unwrap();
            // The handler asserts the same for every assignment.
            last = until("a larger token", async || token(&a).filter(|token| *token > last)).await;
        }
    });
}

#[test]
fn removed_partition_is_revoked_and_keeps_its_state_when_added_again() {
    everywhere(async |store| {
        let fleet = Fleet::new(store, 4);
        let a = fleet.start("a").await;
        fleet.settled(&[&a]).await;
        (0..10).for_each(|_| a.counter.work());
        let specs = fleet.specs.borrow().clone();
        fleet.specs.send_replace(specs[..2].to_vec());
        fleet.settled(&[&a]).await;
        let record = fleet.store.repository.get("cluster:assignments/g/p3").await.unwrap().unwrap();
        let record = AssignmentRecord::from_bytes(&record.value).unwrap();
        assert_eq!(record.owner_node_id, "", "{}", fleet.store.name);
        assert!(record.workflow_handoff.is_some() && record.is_retired, "{record:?}");
        fleet.specs.send_replace(specs);
        fleet.settled(&[&a]).await;
        a.counter.work();
        let counts = a.counter.counts.lock().unwrap().clone();
        assert_eq!(counts, *fleet.ledger.done.lock().unwrap(), "{}: no step was lost", fleet.store.name);
    });
}

#[test]
fn unreadable_hand_off_blocks_only_its_partition() {
    in_memory(async |store| {
        let fleet = Fleet::new(store, 3);
        let unreadable = AssignmentRecord {
            workflow_handoff: Some(StoredHandoff { encoding: "rot13".into(), ..StoredHandoff::default() }),
            ..AssignmentRecord::new()
        };
        let put = |record: &AssignmentRecord| Txn::new().put("cluster:assignments/g/p0", record.to_bytes());
        fleet.store.repository.txn(put(&unreadable)).await.unwrap();
        let a = fleet.start("a").await;
        let owns = async |count: usize| (a.worker.owned().len() == count).then_some(());
        until("the other partitions are owned", async || owns(2).await).await;
        assert!(!a.worker.owned().contains_key("p0"));
        // Repaired by hand: the owner continues with the current record.
        let entry = fleet.store.repository.get("cluster:assignments/g/p0").await.unwrap().unwrap();
        let mut repaired = AssignmentRecord::from_bytes(&entry.value).unwrap();
        repaired.workflow_handoff = None;
        fleet.store.repository.txn(put(&repaired)).await.unwrap();
        until("the partition is owned", async || owns(3).await).await;
    });
}

/// Compile-time check: `LeaderElection` is object safe.
#[test]
fn leader_election_is_object_safe() {
    in_memory(async |store| {
        let election: Arc<dyn crate::leadership::LeaderElection> =
            Arc::new(CasElection::new(&store.node("a"), "x", ElectionOptions::default()));
        let leadership = election.campaign().await.unwrap();
        assert_eq!(leadership.name(), "x");
        let _: Arc<dyn StateRepository> = store.repository.clone();
    });
}

#[test]
fn hand_off_of_100_mib_is_stored_by_reference_or_compressed() {
    in_memory(async |store| {
        let handoffs = HandoffStore::new(store.repository.clone(), HandoffOptions::default());
        let mut random = fastrand::Rng::with_seed(5);
        // A repetition after 1 MiB is noise to a compressor with a 64 KiB window.
        let noise: Vec<u8> = (0..1 << 20).map(|_| random.u8(..)).collect();
        for (block, encoding, pieces) in [(noise, "reference", 200), (vec![7; 1 << 20], "reference", 1)] {
            let checkpoint: Bytes = block.repeat(100).into();
            let handoff = Handoff { checkpoint, ..Handoff::default() };
            let stored = handoffs.save("g", "p", &handoff).await.unwrap();
            assert_eq!(stored.encoding, encoding);
            let reference = stored.reference.clone().unwrap();
            assert_eq!(reference.bytes, 100 << 20);
            assert!(reference.pieces >= pieces && reference.pieces <= pieces * 2, "{reference:?}");
            assert!(stored.checkpoint.is_empty(), "the record itself stays small");
            assert_eq!(handoffs.load(&stored).await.unwrap(), handoff);
            handoffs.sweep("g", "p", Some(&stored)).await;
            let (_, kept) = store.repository.list("cluster:handoffs/g/p/").await.unwrap();
            assert_eq!(kept.len(), reference.pieces, "chunks of the previous hand-off are deleted");
        }
    });
}

#[test]
fn expired_hand_off_is_not_used_and_without_a_ttl_none_expires() {
    in_memory(async |store| {
        let day = 86_400_000;
        let with = |ttl| HandoffOptions { ttl, ..HandoffOptions::default() };
        let kept = HandoffStore::new(store.repository.clone(), with(None));
        let limited =
            HandoffStore::new(store.repository.clone(), with(Some(Duration::from_secs(86_400 * 14))));
        for (age, is_expired) in [(0, false), (14 * day, false), (14 * day + 1, true), (-day, false)] {
            assert_eq!(limited.is_expired(1_000 * day, 1_000 * day + age), is_expired, "{age}");
            assert!(!kept.is_expired(1_000 * day, 1_000 * day + age));
        }
    });
}
