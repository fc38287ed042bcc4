//! Registers and counters of the store: the client-observed history must be linearizable.

#[path = "../store/load.rs"]
#[allow(dead_code)] // the faults of that suite use the rest
mod load;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use moim_history::{Counters, Recorder, check};
use moim_interop::cluster::Cluster;

/// Pause between two operations of a client.
const PAUSE_MS: std::ops::Range<u64> = 20..60;

struct World {
    seeds: Vec<String>,
    registers: Recorder,
    counters: Counters,
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
    clients: JoinHandle<Result<(), String>>,
}

impl Load {
    pub(super) fn start(cluster: &Cluster, seed: u64) -> Self {
        let seeds = (0..3).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect();
        let world = Arc::new(World {
            seeds,
            registers: Recorder::new(),
            counters: Counters::new(),
            round: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            done: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&world);
        let clients = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(load::run(&shared, seed))
        });
        Self { world, clients }
    }

    /// Switches to new keys, which keeps the linearizability check short.
    pub(super) fn begin(&self, round: u64) {
        self.world.round.store(round as usize, Ordering::SeqCst);
    }

    pub(super) fn finish(self, cluster: &Cluster) {
        self.world.stop.store(true, Ordering::SeqCst);
        let ended = self.clients.join().unwrap();
        ended.unwrap_or_else(|why| panic!("store: {why}\n{}", cluster.log_tails()));
        let history = self.world.registers.history();
        check(&history).unwrap_or_else(|why| panic!("store: {why}\n{}", cluster.log_tails()));
        let counters = &self.world.counters;
        counters.check().unwrap_or_else(|why| panic!("store: {why}\n{}", cluster.log_tails()));
        println!(
            "store: {} operations on registers are linearizable, {} increments counted once",
            history.entries.len(),
            counters.acknowledged()
        );
    }
}
