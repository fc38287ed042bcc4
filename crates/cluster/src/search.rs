//! A search for two leaders, two owners and lost hand-offs, over seeds: nodes on one store, with stores that are away, answers
//! that get lost, and processes that are paused; on a clock that runs as fast as the work is done.
//!
//! `MOIM_SEARCH_SEEDS=5000 cargo test -p moim-cluster search` looks at more of them.

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
use crate::leadership::{CasElection, ElectionOptions, LeaderElection as _, Leadership};
use crate::membership::{HeartbeatOptions, Membership, NodeInfo};
use crate::memory::MemoryRepository;
use crate::planted::{self, Bug};
use crate::repository::{BoxFuture, StateRepository};
use crate::scenario::{Flaky, Mood};

const NODES: usize = 3;
const PARTITIONS: usize = 4;
const TTL: Duration = Duration::from_millis(400);
/// How long a run lasts, in its own time.
const RUN: Duration = Duration::from_secs(12);

/// The time of a run.
struct RunClock(Instant);

impl Clock for RunClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000
    }

    fn monotonic_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What was acknowledged, by partition.
#[derive(Default)]
struct Ledger {
    acknowledged: Mutex<BTreeMap<String, u64>>,
    wrong: Mutex<Option<String>>,
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

/// A node: its way to the store, what it leads and owns.
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

/// What is wrong with this moment.
fn look(nodes: &[Rc<Node>], ledger: &Ledger) {
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

/// One run. What went wrong, if anything did; and how much was done.
fn run(seed: u64) -> Result<u64, String> {
    fastrand::seed(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        let scope = Scope::new(Shutdown::new());
        let clock: Arc<dyn Clock> = Arc::new(RunClock(Instant::now()));
        let store: Arc<dyn StateRepository> = MemoryRepository::started(Arc::clone(&clock), &scope);
        let ledger = Arc::new(Ledger::default());
        let spec = |at| PartitionSpec { id: format!("p{at}"), ..PartitionSpec::default() };
        let (_specs, partitions) = watch::channel((0..PARTITIONS).map(spec).collect::<Vec<_>>());
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
        let end = Instant::now() + RUN;
        while Instant::now() < end && ledger.wrong.lock().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(20..150))).await;
            let node = &nodes[fastrand::usize(..nodes.len())];
            let mood = match fastrand::u8(0..10) {
                0 => Mood { away: true, ..Mood::default() },
                1 => Mood { deaf: true, ..Mood::default() },
                2 | 3 => Mood { lossy: fastrand::u8(5..40), ..Mood::default() },
                4 => Mood { frozen: true, ..Mood::default() },
                5 => Mood { slow_ms: fastrand::u64(50..600), ..Mood::default() },
                _ => Mood::default(),
            };
            *node.is_frozen.borrow_mut() = mood.frozen;
            node.flaky.set(mood);
            // Every few milliseconds of the time in between.
            for _ in 0..fastrand::usize(1..30) {
                tokio::time::sleep(Duration::from_millis(3)).await;
                look(&nodes, &ledger);
            }
        }
        scope.shutdown().stop();
        let wrong = ledger.wrong.lock().unwrap().clone();
        let done = ledger.acknowledged.lock().unwrap().values().sum();
        match wrong {
            Some(wrong) => Err(wrong),
            None => Ok(done),
        }
    })
}

fn seeds(default: u64) -> u64 {
    std::env::var("MOIM_SEARCH_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_seed_finds_two_leaders_two_owners_or_a_lost_hand_off() {
    let mut done = 0;
    for seed in 0..seeds(10) {
        done += run(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!(done > 300, "the runs do something: {done}");
}

#[test]
fn every_planted_bug_is_found() {
    // Begun near a seed that finds it: the others only take time.
    let bugs = [(Bug::LongLease, 0), (Bug::FromAnswer, 27), (Bug::TakeFromLiving, 14), (Bug::NoHandoff, 0)];
    for (bug, first) in bugs {
        planted::plant(Some(bug));
        let found = (first..first + 200).find_map(|seed| run(seed).err().map(|wrong| (seed, wrong)));
        planted::plant(None);
        let (seed, wrong) = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        eprintln!("{bug:?} is found by seed {seed}: {wrong}");
    }
}
