//! Keys, transactions, locks and watches of the coordination core: one linearizable history that every watcher saw.

#[path = "../etcd/faults/clients.rs"]
mod clients;
#[path = "../etcd/faults/locks.rs"]
mod locks;
#[path = "../etcd/faults/watchers.rs"]
mod watchers;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use moim_history::{Locks, Recorder, check};
use moim_interop::cluster::Cluster;

use crate::support::{connect, revision};

const WRITERS: usize = 4;
const LOCKERS: usize = 2;
/// Pause between two operations of a writer.
const PAUSE: Duration = Duration::from_millis(25);

struct World {
    endpoints: Vec<String>,
    recorder: Recorder,
    locks: Locks,
    /// The register that the lock guards: the highest fencing token it has seen.
    register: Mutex<i64>,
    round: AtomicUsize,
    stop: AtomicBool,
    done: AtomicUsize,
}

impl World {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

/// The running clients.
pub(super) struct Load {
    world: Arc<World>,
    clients: JoinHandle<Vec<watchers::Events>>,
}

impl Load {
    pub(super) fn start(cluster: &Cluster, seed: u64) -> Self {
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
        let clients = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(run(&shared, seed))
        });
        Self { world, clients }
    }

    /// Switches to new keys, which keeps the linearizability check short.
    pub(super) fn begin(&self, round: u64) {
        self.world.round.store(round as usize, Ordering::SeqCst);
    }

    pub(super) fn finish(self, cluster: &Cluster) {
        self.world.stop.store(true, Ordering::SeqCst);
        let histories = self.clients.join().unwrap();
        let history = self.world.recorder.history();
        check(&history).unwrap_or_else(|why| panic!("coordination: {why}\n{}", cluster.log_tails()));
        let locks = &self.world.locks;
        locks.check().unwrap_or_else(|why| panic!("coordination: {why}\n{}", cluster.log_tails()));
        watchers::check(&histories, &history);
        println!(
            "coordination: {} operations are linearizable, {} holds of the lock, {} events at each watcher",
            history.entries.len(),
            locks.holds().len(),
            histories[0].len()
        );
    }
}

async fn run(world: &Arc<World>, seed: u64) -> Vec<watchers::Events> {
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..WRITERS {
        tasks.spawn(clients::run(Arc::clone(world), client, seed));
    }
    for client in 0..LOCKERS {
        tasks.spawn(locks::run(Arc::clone(world), client, seed));
    }
    let watching: Vec<_> =
        (0..world.endpoints.len()).map(|node| tokio::spawn(watchers::run(Arc::clone(world), node))).collect();
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    clients::read_everything(world).await;
    let mut client = connect(&world.endpoints).await;
    let last = revision(client.put("the end", "", None).await.unwrap().header());
    let mut histories = Vec::new();
    for watcher in watching {
        let history = tokio::time::timeout(Duration::from_secs(60), watcher).await;
        let history = history.expect("watchers catch up").unwrap();
        assert!(history.last().is_some_and(|event| event.revision == last));
        histories.push(history);
    }
    histories
}
