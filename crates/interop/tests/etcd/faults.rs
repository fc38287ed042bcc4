//! Real processes that crash, stop and lose their connections under load: the client-observed history must be
//! linearizable, no acknowledged write is lost, no watcher misses an event, and no two clients rely on the same lock
//! at the same time.
//!
//! `INTEROP_FAULT_ROUNDS` sets the number of rounds (CI: a few; the proof: a hundred), `INTEROP_SEED` repeats the
//! sequence of faults. With `MOIM_TEST_ETCD` naming a binary the same test runs on three nodes of that etcd.

mod clients;
mod injector;
mod isolation;
mod locks;
mod watchers;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_history::{Locks, Recorder, check};
use moim_interop::cluster::{Cluster, RealEtcd};
use moim_interop::{moim_binary, serves_etcd};

use crate::support::{connect, options, revision};

/// Number of key-value clients, lock clients and watchers.
const WRITERS: usize = 6;
const LOCKERS: usize = 3;
/// Pause between two operations of a writer.
const PAUSE: Duration = Duration::ZERO;

/// State shared by the load and the injector.
pub(crate) struct World {
    pub(crate) endpoints: Vec<String>,
    pub(crate) recorder: Recorder,
    pub(crate) locks: Locks,
    /// The register that the lock guards: the highest fencing token it has seen.
    pub(crate) register: Mutex<i64>,
    /// The current round: new keys in every round keep the linearizability check short.
    pub(crate) round: AtomicUsize,
    pub(crate) stop: AtomicBool,
    /// Completed operations, to detect that the cluster serves.
    pub(crate) done: AtomicUsize,
}

impl World {
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn three_nodes_stay_linearizable_under_faults() {
    if !serves_etcd(moim_binary().unwrap()).unwrap() {
        eprintln!("SKIPPED: this moim has no etcd port");
        return;
    }
    let cluster = Cluster::moim(3, &options(), true).unwrap_or_else(|error| panic!("{error:#}"));
    run(cluster, number("INTEROP_FAULT_ROUNDS", 6));
}

/// Validates the test itself: a real etcd passes it.
#[test]
fn real_etcd_passes_the_same_test() {
    match (std::env::var_os("MOIM_TEST_ETCD"), RealEtcd::find()) {
        (Some(_), Some(real @ RealEtcd::Program(_))) => {
            let cluster = Cluster::etcd(&real, 3, true).unwrap_or_else(|error| panic!("{error:#}"));
            run(cluster, number("INTEROP_FAULT_ROUNDS", 6));
        }
        _ => moim_base::require::skip("etcd", "MOIM_TEST_ETCD names no program"),
    }
}

fn run(cluster: Cluster, rounds: u64) {
    let seed = number("INTEROP_SEED", fastrand::u64(..1_000_000));
    eprintln!("INTEROP_SEED={seed} INTEROP_FAULT_ROUNDS={rounds}");
    let world = Arc::new(World {
        endpoints: cluster.endpoints(),
        recorder: Recorder::new(),
        locks: Locks::new(),
        register: Mutex::new(0),
        round: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        done: AtomicUsize::new(0),
    });
    let shared = Arc::clone(&world);
    let injector = std::thread::spawn(move || injector::run(&shared, cluster, rounds, seed));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let histories = runtime.block_on(load(&world, seed));
    let cluster = injector.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let history = world.recorder.history();
    eprintln!(
        "{} operations, {} acknowledged, {} holds of the lock, {} events",
        history.entries.len(),
        world.done.load(Ordering::SeqCst),
        world.locks.holds().len(),
        histories[0].len()
    );
    if let Err(why) = check(&history) {
        panic!("seed {seed}: {why}\n{}", cluster.log_tails());
    }
    if let Err(why) = world.locks.check() {
        panic!("seed {seed}: {why}\n{}", cluster.log_tails());
    }
    watchers::check(&histories, &history);
}

/// Runs all clients until the injector has finished, then reads all keys.
async fn load(world: &Arc<World>, seed: u64) -> Vec<watchers::Events> {
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..WRITERS {
        tasks.spawn(clients::run(Arc::clone(world), client, seed));
    }
    for client in 0..LOCKERS {
        tasks.spawn(locks::run(Arc::clone(world), client, seed));
    }
    let mut watching = Vec::new();
    for node in 0..world.endpoints.len() {
        watching.push(tokio::spawn(watchers::run(Arc::clone(world), node)));
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    clients::read_everything(world).await;
    let mut client = connect(&world.endpoints).await;
    let last = client.put("the end", "", None).await.unwrap();
    let last = revision(last.header());
    let mut histories = Vec::new();
    for watcher in watching {
        let history = tokio::time::timeout(Duration::from_secs(30), watcher).await;
        let history = history.expect("watchers catch up").unwrap();
        assert!(history.last().is_some_and(|event| event.revision == last));
        histories.push(history);
    }
    histories
}
