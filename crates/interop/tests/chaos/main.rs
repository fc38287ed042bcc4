//! Three real nodes that are killed, paused, isolated, filled up, wiped and restarted while librdkafka produces to
//! them, consumes from them and copies from one topic to another in transactions.
//!
//! Checked: no acknowledged record is lost, moved or duplicated; the copy equals the original, exactly once and in
//! order; after every fault the cluster is fully replicated again within [`whole_within`]. And without a fault
//! (`moves.rs`): every partition is reassigned from node to node, and no client sees an error. `cargo xtask chaos
//! --rounds N --seed S` runs more of it; the same seed gives the same faults, at times that depend on the machine.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used, clippy::print_stdout)] // all of it is test; a long run prints its progress

mod disk;
mod faults;
mod load;
mod moves;
mod verify;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moim_interop::Options;
use moim_interop::cluster::{Cluster, http_get};

use self::disk::SmallDisk;
use self::faults::Fault;
use self::load::{Load, topic};

/// The source topic.
const ORIGINAL: &str = "original";
/// The topic that the source is copied to.
const COPY: &str = "copy";
/// Partition count of both.
const PARTITIONS: i32 = 6;
/// Pause between two records of a partition.
const WRITER_PAUSE: Duration = Duration::from_millis(4);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Serialises the tests: each cluster needs the whole machine.
fn exclusive() -> MutexGuard<'static, ()> {
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time limit until the cluster is fully replicated after a fault.
fn whole_within() -> Duration {
    Duration::from_secs(number("MOIM_CHAOS_WHOLE_S", 10))
}

fn options() -> Options {
    Options::new()
        .set("kafka.group_initial_rebalance_delay_ms", 0)
        .set("kafka.group_min_session_timeout_ms", 1000)
        .set("journal.min_free_bytes", 16 << 20)
        .set("journal.commit_file_bytes", 8 << 20)
        .set("node.log_level", std::env::var("INTEROP_LOG").unwrap_or("info".to_owned()))
}

#[test]
fn acknowledged_records_are_neither_lost_nor_duplicated_under_faults() {
    let _alone = exclusive();
    let (rounds, seed) = (number("MOIM_CHAOS_ROUNDS", 3), number("MOIM_CHAOS_SEED", 1));
    let mut rng = fastrand::Rng::with_seed(seed);
    let small = SmallDisk::mount();
    let mut cluster = Cluster::moim_on(3, &options(), true, |node| match (&small, node) {
        (Some(disk), 2) => Some(disk.path().join("data")),
        _ => None,
    })
    .unwrap();
    await_whole(&mut cluster, "the start", Duration::from_secs(30));
    let brokers = brokers(&cluster);
    topic(&brokers, ORIGINAL, PARTITIONS, -1);
    topic(&brokers, COPY, PARTITIONS, -1);

    let stop = Arc::new(AtomicBool::new(false));
    let load = Load::start(&brokers, &stop);
    let faults = Fault::schedule(&mut rng, rounds as usize, small.is_some());
    for (round, fault) in (1..).zip(&faults) {
        std::thread::sleep(Duration::from_millis(rng.u64(200..1_200)));
        let before = load.acked();
        fault.strike(&mut cluster, small.as_ref(), &mut rng);
        let took = await_whole(&mut cluster, &format!("{fault:?}"), whole_within());
        let acked = load.await_progress(before, &cluster);
        println!("round {round}: {fault:?}; whole after {:.1} s, {acked} acknowledged", took.as_secs_f64());
    }
    stop.store(true, Ordering::SeqCst);
    let written = load.finish(&cluster);
    verify::check(&brokers, &written, &cluster);
}

fn brokers(cluster: &Cluster) -> String {
    let all: Vec<&str> = (0..cluster.len()).map(|node| cluster.server(node).unwrap().kafka()).collect();
    all.join(",")
}

/// Waits until every node runs, every partition has a leader and all replicas are in sync; returns how long it took.
fn await_whole(cluster: &mut Cluster, after: &str, patience: Duration) -> Duration {
    let began = Instant::now();
    loop {
        let report = |node: usize| {
            let admin = cluster.server(node).unwrap().admin();
            http_get(admin, "/api/v1/cluster").unwrap_or_default()
        };
        let reports: Vec<String> = (0..cluster.len()).map(report).collect();
        if reports.iter().all(|report| report.contains("\"healthy\":true")) {
            return began.elapsed();
        }
        if began.elapsed() > patience {
            let why: Vec<&str> = reports.iter().map(|report| problems(report)).collect();
            panic!("{after}: not whole after {patience:?}: {why:?}\n{}", cluster.log_tails());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn problems(report: &str) -> &str {
    let from = report.find("\"problems\":").unwrap_or(0);
    let to = report[from..].find(']').map_or(report.len(), |at| from + at + 1);
    &report[from..to]
}
