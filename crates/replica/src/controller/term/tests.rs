//! A controller term over an in-memory repository.

use std::future::Future;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use moim_base::{ManualClock, SystemClock};
use moim_state::nodes::{LiveMember, MemberRecord, NodeOrder, member_key, node_key, order_key};
use moim_state::{MemoryRepository, Txn};

use super::*;
use crate::controller::Maker;
use crate::state::InSync;
use crate::transition::Draft;
use crate::types::Durability;

const TOPIC: TopicId = TopicId(9);

#[derive(Default)]
struct StubPeers {
    suspects: Mutex<Vec<(BrokerId, u64)>>,
    ends: Mutex<HashMap<(BrokerId, PartitionId), LogEnd>>,
    runs: Mutex<HashMap<BrokerId, BrokerEpoch>>,
    /// The number of log end requests.
    log_end_requests: AtomicUsize,
}

impl Peers for StubPeers {
    fn suspects(&self) -> Vec<(BrokerId, u64)> {
        self.suspects.lock().unwrap().clone()
    }

    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>> {
        let log_end_requests = self.log_end_requests.fetch_add(1, Ordering::Relaxed);
        assert!(log_end_requests < 1_000, "log end requested without a pause");
        let known = self.ends.lock().unwrap();
        let ends = partitions.iter().filter_map(|id| known.get(&(node, *id)).map(|end| (*id, *end)));
        let run = self.runs.lock().unwrap().get(&node).copied();
        let answer = run.map(|run| LogEnds { run, ends: ends.collect() });
        Box::pin(future::ready(answer))
    }
}

struct Fixture {
    repository: Arc<MemoryRepository>,
    peers: Arc<StubPeers>,
    clock: Arc<dyn Clock>,
}

impl Fixture {
    async fn new(nodes: i32) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let repository = Arc::new(MemoryRepository::new(Arc::new(ManualClock::at(0))));
        let fixture = Self { repository, peers: Arc::default(), clock };
        for node in 1..=nodes {
            let record = NodeRecord { node_id: node, voter: node as u64, ..NodeRecord::default() };
            fixture.put(&node_key(node), record.to_bytes()).await;
            fixture.start(node).await;
        }
        fixture
    }

    async fn put(&self, key: &str, value: impl Into<Bytes>) -> i64 {
        match self.repository.txn(Txn::new().put(key, value)).await.unwrap() {
            TxnOutcome::Done { revision } => revision,
            TxnOutcome::Conflict { .. } => panic!("nothing was compared"),
        }
    }

    async fn start(&self, node: i32) {
        let record = MemberRecord { node_id: node, voter: node as u64, ..MemberRecord::default() };
        let run = self.put(&member_key(node), record.to_bytes()).await;
        self.peers.runs.lock().unwrap().insert(BrokerId(node), BrokerEpoch(run));
    }

    async fn kill(&self, node: i32) {
        self.repository.txn(Txn::new().delete(member_key(node))).await.unwrap();
    }

    async fn topic(&self, partitions: u32, durability: &str) {
        let text = format!(
            r#"{{"id":"{TOPIC}","partitions":{partitions},"replication_factor":1,"factor_asked":false,
            "configs":{{"durability":"{durability}"}}}}"#
        );
        self.put(&keys::topic("orders"), text).await;
    }

    async fn acquire_controller_key(&self) -> i64 {
        self.repository.txn(Txn::new().delete(keys::CONTROLLER)).await.unwrap();
        self.put(keys::CONTROLLER, "{}").await
    }

    fn parts(&self) -> ControllerTermParts {
        ControllerTermParts {
            repository: self.repository.clone(),
            clock: self.clock.clone(),
            peers: self.peers.clone(),
            tuning: ControllerTuning::default(),
            settings: Settings::new(),
        }
    }

    async fn records(&self) -> Vec<(PartitionId, Versioned<PartitionState>)> {
        let (_, entries) = self.repository.list(keys::PARTITIONS).await.unwrap();
        let read = |entry: &Entry| {
            let id = keys::parse_partition(&entry.key).unwrap();
            (
                id,
                Versioned {
                    revision: entry.mod_revision,
                    value: PartitionState::decode(&entry.value).unwrap(),
                },
            )
        };
        entries.iter().map(read).collect()
    }

    /// The leaders' part: every running replica catches up.
    async fn catch_up(&self) {
        let (_, members) = moim_state::nodes::members(self.repository.as_ref()).await.unwrap();
        let run = |live: &LiveMember| crate::Member::from_live(live).in_sync();
        let members: Vec<InSync> = members.iter().map(run).collect();
        let mut changes = Vec::new();
        for (id, record) in self.records().await {
            let mut draft = Draft::new(&record);
            let absent = |member: &&InSync| {
                record.value.replicas.contains(&member.node) && record.value.in_sync(member.node).is_none()
            };
            members.iter().filter(absent).for_each(|member| draft.join(*member));
            changes.extend(draft.finish(id).filter(|_| record.value.leader.is_some()));
        }
        for batch in pack(changes, None) {
            self.repository.txn(batch.txn()).await.unwrap();
        }
    }

    async fn until(&self, what: &str, holds: impl Fn(&PartitionState) -> bool) {
        let settled = async {
            loop {
                let records = self.records().await;
                if !records.is_empty() && records.iter().all(|(_, record)| holds(&record.value)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let patience = tokio::time::timeout(Duration::from_secs(20), settled).await;
        if patience.is_err() {
            panic!("{what}: {:?}", self.records().await.first());
        }
    }
}

/// Runs a test beside a controller of `term`.
async fn with<T>(parts: &ControllerTermParts, term: i64, test: impl Future<Output = T>) -> T {
    tokio::select! {
        () = serve(parts, term) => panic!("controller deposed"),
        done = test => done,
    }
}

fn block_on(future: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future);
}

#[test]
fn controller_creates_partitions_elects_leaders_and_restores_preferred_leaders() {
    block_on(async {
        let fixture = Fixture::new(3).await;
        fixture.topic(6, "fsync").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        with(&parts, term, async {
            fixture.until("created", |state| state.isr.len() == 3).await;
            fixture.kill(2).await;
            fixture
                .until("elected", |state| {
                    state.leader.is_some_and(|leader| leader != BrokerId(2)) && state.isr.len() == 2
                })
                .await;
            fixture.start(2).await;
            fixture.catch_up().await;
            fixture
                .until("preferred leaders return", |state| state.leader == state.replicas.first().copied())
                .await;
        })
        .await;
    });
}

#[test]
fn suspected_node_loses_leaderships_before_lease_expiry() {
    block_on(async {
        let fixture = Fixture::new(3).await;
        fixture.topic(6, "fsync").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        with(&parts, term, async {
            fixture.until("created", |state| state.isr.len() == 3).await;
            fixture.peers.suspects.lock().unwrap().push((BrokerId(3), fixture.clock.monotonic_ms()));
            fixture.until("moved", |state| state.leader.is_some_and(|leader| leader != BrokerId(3))).await;
        })
        .await;
    });
}

#[test]
fn deposed_controller_stops_without_a_write() {
    block_on(async {
        let fixture = Fixture::new(3).await;
        fixture.topic(6, "fsync").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        with(&parts, term, fixture.until("created", |state| state.isr.len() == 3)).await;
        let before = fixture.records().await;
        fixture.acquire_controller_key().await;
        fixture.kill(2).await;
        let served = tokio::time::timeout(Duration::from_secs(20), serve(&parts, term)).await;
        assert!(served.is_ok(), "controller still runs");
        assert_eq!(fixture.records().await, before);
    });
}

#[test]
fn drain_moves_leaderships_and_growth_raises_the_replication_factor() {
    block_on(async {
        let fixture = Fixture::new(1).await;
        fixture.topic(6, "fsync").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        with(&parts, term, async {
            fixture.until("created", |state| state.isr.len() == 1).await;
            for node in [2, 3] {
                let record = NodeRecord { node_id: node, voter: node as u64, ..NodeRecord::default() };
                fixture.put(&node_key(node), record.to_bytes()).await;
                fixture.start(node).await;
            }
            fixture.until("grows", |state| state.replicas.len() >= 2).await;
            for _ in 0..3 {
                fixture.catch_up().await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            fixture.catch_up().await;
            fixture
                .until("grown", |state| state.replicas.len() == 3 && state.min_isr == 2 && !state.is_moving())
                .await;
            fixture.put(&order_key(1), NodeOrder::Drain.as_str()).await;
            fixture.until("drained", |state| state.leader.is_some_and(|leader| leader != BrokerId(1))).await;
        })
        .await;
    });
}

#[test]
fn longest_log_of_last_known_replicas_is_elected() {
    block_on(async {
        let fixture = Fixture::new(2).await;
        fixture.topic(1, "replicated").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        let id = PartitionId { topic: TOPIC, index: 0 };
        with(&parts, term, async {
            fixture.until("created", |state| state.isr.len() == 2).await;
            fixture.kill(1).await;
            fixture.kill(2).await;
            fixture.until("no leader", |state| state.leader.is_none()).await;
            let mut ends = fixture.peers.ends.lock().unwrap().clone();
            for (node, end) in [(1, 10), (2, 20)] {
                let end = LogEnd { epoch: moim_base::LeaderEpoch(0), end: moim_base::Offset(end) };
                ends.insert((BrokerId(node), id), end);
            }
            *fixture.peers.ends.lock().unwrap() = ends;
            fixture.start(1).await;
            fixture.start(2).await;
            fixture
                .until("elected", |state| state.leader == Some(BrokerId(2)) && state.unclean.is_none())
                .await;
        })
        .await;
    });
}

#[test]
fn log_end_request_without_an_answer_is_retried_after_a_pause() {
    block_on(async {
        let fixture = Fixture::new(1).await;
        fixture.topic(1, "replicated").await;
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        let id = PartitionId { topic: TOPIC, index: 0 };
        with(&parts, term, async {
            fixture.until("created", |state| state.leader.is_some()).await;
            fixture.kill(1).await;
            fixture.until("no leader", |state| state.leader.is_none()).await;
            let before = fixture.peers.runs.lock().unwrap().clone();
            fixture.start(1).await;
            let present = fixture.peers.runs.lock().unwrap()[&BrokerId(1)];
            // It answers at once: for the former run, then without the partition, then with its log end.
            *fixture.peers.runs.lock().unwrap() = before;
            let end = LogEnd { epoch: moim_base::LeaderEpoch(0), end: moim_base::Offset(7) };
            fixture.peers.ends.lock().unwrap().insert((BrokerId(1), id), end);
            let asked = async |times| {
                while fixture.peers.log_end_requests.load(Ordering::Relaxed) < times {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            asked(2).await;
            fixture.peers.ends.lock().unwrap().clear();
            fixture.peers.runs.lock().unwrap().insert(BrokerId(1), present);
            asked(4).await;
            assert_eq!(fixture.records().await[0].1.value.leader, None);
            fixture.peers.ends.lock().unwrap().insert((BrokerId(1), id), end);
            fixture.until("elected", |state| state.leader == Some(BrokerId(1))).await;
        })
        .await;
    });
}

/// The CPU time of this thread: the load of other processes does not count.
fn spent_ms() -> i64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    spent.tv_sec * 1_000 + spent.tv_nsec / 1_000_000
}

/// Also prints (`--nocapture`) the time a new controller needs with many partitions.
#[test]
fn new_controller_elects_leaders_of_ten_thousand_partitions() {
    block_on(async {
        let fixture = Fixture::new(3).await;
        let nodes: Vec<_> = (1..=3).map(|node_id| NodeRecord { node_id, ..NodeRecord::default() }).collect();
        let (_, members) = moim_state::nodes::members(fixture.repository.as_ref()).await.unwrap();
        let mut maker = Maker::new(&nodes, &members, &BTreeMap::new());
        let changes = (0..10_000).filter_map(|index| {
            let replicas = maker.place(3);
            maker.create(PartitionId { topic: TOPIC, index }, replicas, None, Durability::Fsync)
        });
        for batch in pack(changes.collect(), None) {
            assert!(matches!(fixture.repository.txn(batch.txn()).await.unwrap(), TxnOutcome::Done { .. }));
        }
        fixture.topic(10_000, "fsync").await;
        fixture.kill(2).await;
        let began_ms = spent_ms();
        let (parts, term) = (fixture.parts(), fixture.acquire_controller_key().await);
        let healed = |state: &PartitionState| state.leader.is_some() && state.in_sync(BrokerId(2)).is_none();
        with(&parts, term, fixture.until("led again", healed)).await;
        println!("10,000 partitions led again after {} ms of computing", spent_ms() - began_ms);
    });
}
