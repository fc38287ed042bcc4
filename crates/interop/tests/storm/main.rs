//! The full chaos run: three real nodes under a load on all three protocols, with every fault that once lost or
//! invented data. Bits flip at rest in every kind of file, data directories are rolled back and cloned, disks hang,
//! slow down and fill up, wall clocks step, networks fail in one direction, processes are killed and paused, and
//! hostile clients connect to every port.
//!
//! One verdict over all of it: every acknowledged record is in its partition exactly once and in order, the
//! transactional copy equals the original, registers and counters of the store are linearizable, the history of the
//! coordination core is linearizable and every watcher saw all of it, locks are fenced, keys with a TTL expire when
//! they should, and no partition, key or client stalls for longer than the aim. `cargo xtask chaos --everything
//! --rounds N --seed S` runs more of it, and `MOIM_STORM_ONLY=BitFlip,Rollback` only the named faults.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used, clippy::print_stdout)] // all of it is test; the rounds print their progress

mod clock;
mod coordination;
#[path = "../gray/disk.rs"]
mod disk;
mod expiry;
mod faults;
mod files;
mod hostile;
#[path = "../chaos/load.rs"]
#[allow(dead_code)] // the reassignment test of the other chaos run uses the rest
mod load;
#[path = "../gray/load.rs"]
mod probe;
mod stalls;
mod store;
#[path = "../etcd/support.rs"]
#[allow(dead_code)] // the suite of the etcd API uses the rest
mod support;
#[path = "../chaos/verify.rs"]
#[allow(dead_code)] // the reassignment test of the other chaos run uses the rest
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moim_interop::Options;
use moim_interop::cluster::{Cluster, http_get};

use self::clock::Clocks;
use self::disk::Disk;
use self::expiry::Expiry;
use self::faults::{Faults, Kind};
use self::hostile::Hostile;
use self::load::{Load, topic};
use self::probe::Load as Probe;
use self::stalls::Stalls;

/// The source topic, and the topic it is copied to in transactions.
const ORIGINAL: &str = "original";
const COPY: &str = "copy";
const PARTITIONS: i32 = 6;
/// Pause between two records of a partition: two cores run three nodes and all clients.
const WRITER_PAUSE: Duration = Duration::from_millis(25);
/// Time limit until the cluster is fully replicated after a fault: a disk must have worked for ten seconds, and a
/// lost data directory is re-replicated.
const WHOLE: Duration = Duration::from_secs(90);
/// Size of each node's file system.
const DISK_BYTES: u64 = 1 << 30;
/// Memory limit of a node, whatever its clients do.
const NODE_BYTES: u64 = 3 << 29;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn options() -> Options {
    Options::new()
        .set("kafka.group_initial_rebalance_delay_ms", 0)
        .set("kafka.group_min_session_timeout_ms", 1000)
        .set("kafka.offsets_topic_partitions", 4)
        .set("kafka.transaction_topic_partitions", 4)
        .set("journal.min_free_bytes", 16 << 20)
        .set("journal.commit_file_bytes", 8 << 20)
        .set("node.log_level", std::env::var("INTEROP_LOG").unwrap_or("info".to_owned()))
}

/// A disk for each node that can be frozen and filled, if the machine permits it.
fn disks() -> Vec<Disk> {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mount = |_| Disk::mount(parent, DISK_BYTES).and_then(|disk| disk.check_freeze().map(|()| disk));
    match (0..3).map(mount).collect() {
        Ok(disks) => disks,
        Err(why) => {
            println!("disks neither hang nor fill up in this run: {why}");
            Vec::new()
        }
    }
}

#[test]
fn no_loss_duplicate_reordering_or_stale_read_under_all_faults() {
    let (rounds, seed) = (number("MOIM_STORM_ROUNDS", 4), number("MOIM_STORM_SEED", 1));
    let disks = disks();
    let clocks = Clocks::make(3);
    if clocks.is_none() {
        println!("clocks do not step in this run: no C compiler");
    }
    let mut cluster = Cluster::moim_with(3, true, |node| {
        let mut options = options();
        options.data = disks.get(node).map(|disk| disk.path().join("data"));
        options.env.extend(clocks.iter().flat_map(|clocks| clocks.env(node)));
        options
    })
    .unwrap();
    let mut faults = Faults::new(&disks, clocks.as_ref(), seed);
    await_whole(&mut cluster, "the start");
    let brokers = (0..3).map(|node| cluster.server(node).unwrap().kafka()).collect::<Vec<_>>().join(",");
    topic(&brokers, ORIGINAL, PARTITIONS, -1);
    topic(&brokers, COPY, PARTITIONS, -1);

    let stop = Arc::new(AtomicBool::new(false));
    let load = Load::start(&brokers, &stop);
    let probe = Probe::start(&cluster);
    let store = store::Load::start(&cluster, seed);
    let coordination = coordination::Load::start(&cluster, seed);
    let expiry = Expiry::start(&cluster);
    let hostile = Hostile::start(&cluster, seed);
    let mut stalls = Stalls::default();
    let only = std::env::var("MOIM_STORM_ONLY").ok();
    for (round, kind) in (1..=rounds).zip(Kind::schedule(seed, !disks.is_empty(), clocks.is_some(), only)) {
        store.begin(round);
        coordination.begin(round);
        probe.settle();
        let acked = load.acked();
        let began = Instant::now();
        let strike = faults.strike(kind, &mut cluster);
        let took = await_whole(&mut cluster, &strike.what);
        load.await_progress(acked, &cluster);
        let longest = stalls.note(kind, &probe.stalls(strike.victim));
        let memory = (0..3).map(|node| resident(&cluster, node) >> 20).max().unwrap();
        println!(
            "round {round} ({:.0} s): {}; whole after {:.1} s; stalls {longest}; at most {memory} MiB",
            began.elapsed().as_secs_f64(),
            strike.what,
            took.as_secs_f64()
        );
        assert!(memory << 20 <= NODE_BYTES, "a node takes {memory} MiB\n{}", cluster.log_tails());
    }
    let abused = hostile.finish();
    stop.store(true, Ordering::SeqCst);
    let written = load.finish(&cluster);
    probe.finish();
    let expired = expiry.finish();
    store.finish(&cluster);
    coordination.finish(&cluster);
    verify::check(&brokers, &written, &cluster);
    println!("{expired} keys ended in time; {abused} hostile connections");
    println!("{stalls}");
    stalls.check();
}

/// The tails of all logs without the lines caused by hostile clients.
fn logs(cluster: &Cluster) -> String {
    let noise =
        ["moim_queue::connection", "moim_coord::api", "moim_raft::transport::tcp", "moim_slots::connection"];
    let mut text = String::new();
    for node in 0..3 {
        let log = cluster.server(node).unwrap().log();
        let lines: Vec<&str> = log.lines().filter(|line| !noise.iter().any(|of| line.contains(of))).collect();
        let tail = lines[lines.len().saturating_sub(80)..].join("\n");
        text.push_str(&format!("--- node {}\n{tail}\n", node + 1));
    }
    text
}

/// Resident memory of a node.
fn resident(cluster: &Cluster, node: usize) -> u64 {
    let pid = cluster.server(node).unwrap().pid().unwrap_or_default();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Waits until every node runs, every partition and shard has a leader and all replicas are in sync. A node that
/// exited because of damage on its disk is replaced, as its last log line tells the operator to do.
fn await_whole(cluster: &mut Cluster, after: &str) -> Duration {
    let began = Instant::now();
    loop {
        for node in 0..3 {
            if !cluster.is_running(node) {
                faults::replace_damaged(cluster, node, after);
            }
        }
        let report = |node: usize| {
            let admin = cluster.server(node).unwrap().admin();
            http_get(admin, "/api/v1/cluster").unwrap_or_default()
        };
        let reports: Vec<String> = (0..3).map(report).collect();
        if reports.iter().all(|report| report.contains("\"healthy\":true")) {
            return began.elapsed();
        }
        if began.elapsed() > WHOLE {
            let why: Vec<&str> = reports.iter().map(|report| problems(report)).collect();
            panic!("{after}: not whole after {WHOLE:?}: {why:?}\n{}", logs(cluster));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn problems(report: &str) -> &str {
    let from = report.find("\"problems\":").unwrap_or(0);
    let to = report[from..].find(']').map_or(report.len(), |at| from + at + 1);
    &report[from..to]
}
