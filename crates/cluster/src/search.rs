//! Schedule search for two leaders, two owners and lost hand-offs, over seeds: nodes on one store, with
//! unreachable stores, lost replies, and paused processes, on simulated time.
//!
//! `MOIM_SEARCH_SEEDS=5000 cargo test -p moim-cluster search` runs more seeds. A seed gives the same run
//! every time: one thread, its own clock, one random source, and the library's services poll ready branches
//! in a fixed order (`biased`). It is here and not in `sim`, which runs nodes over their wire protocols: the
//! bugs it must find are injected inside of this crate, and the observed state, local belief in leadership
//! and ownership, is not on any wire.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::{Scope, Shutdown};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::assignment::{
    AssignmentLeader, AssignmentWorker, HandedOver, Handoff, HandoffOptions, HandoffStore, LeaderOptions,
    Owned, PartitionHandler, PartitionSpec,
};
use crate::context::Context;
use crate::fault_injection::{self, Bug};
use crate::leadership::{CasElection, ElectionOptions, LeaderElection as _, Leadership};
use crate::membership::{HeartbeatOptions, MemberStatus, Membership, Monitor, NodeInfo};
use crate::memory::MemoryRepository;
use crate::repository::{BoxFuture, StateRepository};
use crate::scenario::{Faults, Flaky};

const NODES: usize = 3;
const PARTITIONS: usize = 4;
const TTL: Duration = Duration::from_millis(400);
/// Duration of a run, in simulated time.
const RUN: Duration = Duration::from_secs(12);

/// Simulated time of a run.
struct RunClock(Instant);

impl Clock for RunClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000
    }

    fn monotonic_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Acknowledged work, by partition.
#[derive(Default)]
struct Ledger {
    acknowledged: Mutex<BTreeMap<String, u64>>,
    wrong: Mutex<Option<String>>,
    /// Checksum of all observations.
    trace: Mutex<u32>,
}

impl Ledger {
    fn fail(&self, what: String) {
        self.wrong.lock().unwrap().get_or_insert(what);
    }
}

/// The partitions of one node.
struct Work {
    ledger: Arc<Ledger>,
    owned: Mutex<BTreeMap<String, (Owned, u64)>>,
}

impl PartitionHandler for Work {
    fn on_assigned(&self, owned: Owned, handed_over: Option<HandedOver>) -> BoxFuture<'_, ()> {
        let count = handed_over.map_or(0, |state| u64::try_from(state.last_offset).unwrap_or(0));
        let known = self.ledger.acknowledged.lock().unwrap().get(owned.partition()).copied().unwrap_or(0);
        if count < known {
            let partition = owned.partition();
            self.ledger
                .fail(format!("lost hand-off: {partition} begins at {count}, {known} was acknowledged"));
        }
        self.owned.lock().unwrap().insert(owned.partition().to_owned(), (owned, count));
        Box::pin(async {})
    }

    fn on_revoked<'a>(&'a self, partition: &'a str) -> BoxFuture<'a, HandedOver> {
        let count = self.owned.lock().unwrap().remove(partition).map_or(0, |(_, count)| count);
        Box::pin(async move { state(count) })
    }

    fn on_lost(&self, partition: &str) {
        self.owned.lock().unwrap().remove(partition);
    }
}

fn state(count: u64) -> HandedOver {
    let handoff = Handoff { checkpoint: count.to_string().into(), ..Handoff::default() };
    HandedOver { handoff, last_offset: i64::try_from(count).unwrap() }
}

/// A node: its store connection, its leadership and its partitions.
struct Node {
    flaky: Arc<Flaky>,
    work: Arc<Work>,
    leadership: Rc<RefCell<Option<Leadership>>>,
    is_frozen: Rc<RefCell<bool>>,
}

async fn live(context: Context, node: Rc<Node>, specs: watch::Receiver<Vec<PartitionSpec>>) {
    let beats = HeartbeatOptions { interval: TTL / 8, timeout: TTL / 2 };
    let options = || ElectionOptions { ttl: TTL, ..ElectionOptions::default() };
    let leader = LeaderOptions { settle: Duration::from_millis(5), ..LeaderOptions::default() };
    let leader = AssignmentLeader::new(&context, "g", specs, leader);
    context.scope.spawn("leader", leader.run(Arc::new(CasElection::new(&context, "g", options()))));
    let campaign = async {
        loop {
            let Ok(won) = CasElection::new(&context, "jobs", options()).campaign().await else { return };
            *node.leadership.borrow_mut() = Some(won);
            while node.leadership.borrow().as_ref().is_some_and(Leadership::is_valid) {
                tokio::time::sleep(Duration::from_millis(7)).await;
                if fastrand::u8(..) < 3 {
                    break;
                }
            }
            node.leadership.borrow_mut().take();
        }
    };
    let own = async {
        loop {
            let info = NodeInfo { id: context.node_id.to_string(), ..NodeInfo::default() };
            let Ok(membership) = Membership::join(&context, info, &beats).await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let handoffs = HandoffStore::new(context.repository.clone(), HandoffOptions::default());
            let worker = AssignmentWorker::start(&context, &membership, "g", handoffs, node.work.clone());
            membership.lost().await;
            drop(worker);
        }
    };
    let work = async {
        loop {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(5..40))).await;
            let mut steps = Vec::new();
            for (owned, count) in node.work.owned.lock().unwrap().values_mut() {
                if owned.is_valid() && !*node.is_frozen.borrow() {
                    *count += 1;
                    steps.push((owned.clone(), *count));
                }
            }
            for (owned, count) in steps {
                if owned.checkpoint(&state(count)).await.is_ok() {
                    let mut acknowledged = node.work.ledger.acknowledged.lock().unwrap();
                    let known = acknowledged.entry(owned.partition().to_owned()).or_default();
                    *known = count.max(*known);
                }
            }
        }
    };
    tokio::join!(campaign, own, work);
}

/// Checks the invariants at this moment.
fn check_invariants(nodes: &[Rc<Node>], ledger: &Ledger, at: Duration) {
    {
        let leads = |node: &Rc<Node>| node.leadership.borrow().as_ref().map(Leadership::fencing_token);
        let owns = |node: &Rc<Node>| {
            let owned = node.work.owned.lock().unwrap();
            owned
                .iter()
                .map(|(id, (owned, count))| (id.clone(), owned.fencing_token(), *count))
                .collect::<Vec<_>>()
        };
        let seen: Vec<_> = nodes.iter().map(|node| (leads(node), owns(node))).collect();
        let mut trace = ledger.trace.lock().unwrap();
        *trace = crc32c::crc32c_append(*trace, format!("{at:?} {seen:?}").as_bytes());
    }
    let awake = || nodes.iter().filter(|node| !*node.is_frozen.borrow());
    let leaders = awake().filter(|node| node.leadership.borrow().as_ref().is_some_and(Leadership::is_valid));
    if leaders.count() > 1 {
        ledger.fail("two leaders".to_owned());
    }
    let mut owners: BTreeMap<String, usize> = BTreeMap::new();
    for node in awake() {
        for (partition, (owned, _)) in node.work.owned.lock().unwrap().iter() {
            *owners.entry(partition.clone()).or_default() += usize::from(owned.is_valid());
        }
    }
    if let Some((partition, _)) = owners.iter().find(|(_, count)| **count > 1) {
        ledger.fail(format!("two owners of {partition}"));
    }
}

/// The nodes of a run, on one store.
struct World {
    nodes: Vec<Rc<Node>>,
    ledger: Arc<Ledger>,
    scope: Scope,
    began: Instant,
    _partitions: watch::Sender<Vec<PartitionSpec>>,
}

impl World {
    fn start() -> Self {
        let scope = Scope::new(Shutdown::new());
        let clock: Arc<dyn Clock> = Arc::new(RunClock(Instant::now()));
        let store: Arc<dyn StateRepository> = MemoryRepository::started(Arc::clone(&clock), &scope);
        let ledger = Arc::new(Ledger::default());
        let spec = |at| PartitionSpec { id: format!("p{at}"), ..PartitionSpec::default() };
        let (sender, partitions) = watch::channel((0..PARTITIONS).map(spec).collect::<Vec<_>>());
        let mut nodes = Vec::new();
        for at in 0..NODES {
            let flaky = Flaky::new(Arc::clone(&store));
            let mut context = Context::new(format!("n{at}"), flaky.clone(), &scope);
            context.clock = Arc::clone(&clock);
            let work = Arc::new(Work { ledger: ledger.clone(), owned: Mutex::default() });
            let node = Node { flaky, work, leadership: Rc::default(), is_frozen: Rc::default() };
            let node = Rc::new(node);
            tokio::task::spawn_local(live(context, node.clone(), partitions.clone()));
            nodes.push(node);
        }
        Self { nodes, ledger, scope, began: Instant::now(), _partitions: sender }
    }

    fn check_invariants(&self) {
        check_invariants(&self.nodes, &self.ledger, self.began.elapsed());
    }

    fn is_wrong(&self) -> bool {
        self.ledger.wrong.lock().unwrap().is_some()
    }

    /// Number of partitions with an owner.
    fn owned(&self) -> usize {
        let owned = |node: &Rc<Node>| {
            node.work.owned.lock().unwrap().values().filter(|(owned, _)| owned.is_valid()).count()
        };
        self.nodes.iter().map(owned).sum()
    }

    fn end(self) -> Result<(u64, u32), String> {
        self.scope.shutdown().stop();
        let wrong = self.ledger.wrong.lock().unwrap().clone();
        let done = self.ledger.acknowledged.lock().unwrap().values().sum();
        match wrong {
            Some(wrong) => Err(wrong),
            None => Ok((done, *self.ledger.trace.lock().unwrap())),
        }
    }
}

/// Runs on simulated time, from one random source.
fn on_simulated_time<T>(seed: u64, future: impl Future<Output = T>) -> T {
    fastrand::seed(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

/// One run: the violated invariant, or the amount of work and the checksum of the trace.
fn run(seed: u64) -> Result<(u64, u32), String> {
    on_simulated_time(seed, async {
        let world = World::start();
        while world.began.elapsed() < RUN && !world.is_wrong() {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(20..150))).await;
            let node = &world.nodes[fastrand::usize(..world.nodes.len())];
            let faults = match fastrand::u8(0..10) {
                0 => Faults { unreachable: true, ..Faults::default() },
                1 => Faults { loses_renewal_replies: true, ..Faults::default() },
                2 | 3 => Faults { lost_percent: fastrand::u8(5..40), ..Faults::default() },
                4 => Faults { frozen: true, ..Faults::default() },
                5 => Faults { delay_ms: fastrand::u64(50..600), ..Faults::default() },
                // Some replies arrive immediately; an earlier request may arrive after a lease expiry.
                6 | 7 => Faults { jitter_ms: fastrand::u64(100..500), ..Faults::default() },
                _ => Faults::default(),
            };
            *node.is_frozen.borrow_mut() = faults.frozen;
            node.flaky.set(faults);
            // Check every few milliseconds in between.
            for _ in 0..fastrand::usize(1..30) {
                tokio::time::sleep(Duration::from_millis(3)).await;
                world.check_invariants();
            }
        }
        world.end()
    })
}

fn seeds(default: u64) -> u64 {
    std::env::var("MOIM_SEARCH_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_seed_finds_two_leaders_two_owners_or_a_lost_hand_off() {
    let mut done = 0;
    for seed in 0..seeds(40) {
        done += run(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}")).0;
    }
    assert!(done > 300, "the runs do work: {done}");
}

#[test]
fn every_injected_bug_is_found() {
    for bug in [Bug::FromReply, Bug::LongLease, Bug::TakeFromLiveOwner, Bug::NoHandoff] {
        fault_injection::inject(Some(bug));
        let found = (0..200).find_map(|seed| run(seed).err().map(|wrong| (seed, wrong)));
        fault_injection::inject(None);
        let (seed, wrong) = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        eprintln!("{bug:?} is found by seed {seed}: {wrong}");
    }
}

#[test]
fn seed_is_deterministic() {
    let mut traces = std::collections::BTreeSet::new();
    for seed in 0..3 {
        let first = run(seed);
        assert_eq!(run(seed), first, "seed {seed}");
        traces.insert(first.unwrap().1);
    }
    assert_eq!(traces.len(), 3, "different seeds give different traces");
}

#[test]
fn store_outage_of_a_minute_stops_all_nodes_and_they_recover() {
    on_simulated_time(1, async {
        let world = World::start();
        let until = async |what: &str, is_so: &dyn Fn() -> bool| {
            for _ in 0..10_000 {
                if is_so() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(3)).await;
                world.check_invariants();
            }
            panic!("timeout waiting for: {what}");
        };
        until("all partitions are owned", &|| world.owned() == PARTITIONS).await;
        world.nodes.iter().for_each(|node| node.flaky.set(Faults { unreachable: true, ..Faults::default() }));
        until("no partition is owned", &|| world.owned() == 0).await;
        let leads = |node: &Rc<Node>| node.leadership.borrow().as_ref().is_some_and(Leadership::is_valid);
        for _ in 0..3_000 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            world.check_invariants();
            assert_eq!(world.owned(), 0, "nothing is owned without the store");
            assert!(!world.nodes.iter().any(leads), "no node is leader");
        }
        world.nodes.iter().for_each(|node| node.flaky.set(Faults::default()));
        until("all partitions are owned again", &|| world.owned() == PARTITIONS).await;
        until("a leader is elected again", &|| world.nodes.iter().any(leads)).await;
        world.end().unwrap();
    });
}

#[test]
fn killed_member_is_detected_within_two_seconds_by_default() {
    on_simulated_time(2, async {
        let scope = Scope::new(Shutdown::new());
        let clock: Arc<dyn Clock> = Arc::new(RunClock(Instant::now()));
        let store: Arc<dyn StateRepository> = MemoryRepository::started(Arc::clone(&clock), &scope);
        let flaky = Flaky::new(Arc::clone(&store));
        let node = |id: &str, store: Arc<dyn StateRepository>| {
            Context::new(id, store, &scope).with_clock(Arc::clone(&clock))
        };
        let defaults = HeartbeatOptions::default();
        let monitor = Monitor::start(&node("o", Arc::clone(&store)), &defaults).await.unwrap();
        let info = NodeInfo { id: "a".to_owned(), ..NodeInfo::default() };
        let _member = Membership::join(&node("a", flaky.clone()), info, &defaults).await.unwrap();
        let seen = async |status: MemberStatus| {
            while !monitor.view().iter().any(|one| one.info.id == "a" && one.status == status) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        seen(MemberStatus::Up).await;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..1_000))).await;
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        let killed = Instant::now();
        seen(MemberStatus::Down).await;
        // Simulated time, which no other process can slow down.
        assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
        scope.shutdown().stop();
    });
}
