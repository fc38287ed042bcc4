//! Gray disk failures on real nodes: a disk hangs (`fsfreeze`) or is full, on the leader of the coordination group
//! and on a follower, under a load on all three protocols. Each node leads some partitions and shards and follows
//! others, so each fault affects a leader and a follower at the same time.
//!
//! Checked: the longest client stall; no acknowledged write is lost; the node reports not ready and the cluster not
//! healthy; the node recovers without intervention.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used, clippy::print_stdout)] // all of it is test; the measured times are printed

mod disk;
mod load;
mod nospace;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use moim_interop::Options;
use moim_interop::cluster::{Cluster, http_get};
use moim_interop::net::Net;

use self::disk::Disk;
use self::load::Load;

/// Duration of a fault: longer than any stall may be.
const FAULT: Duration = Duration::from_secs(9);
/// Maximum stall. The aim is 3 s on an otherwise idle machine.
const STALL: Duration = Duration::from_secs(5);
/// Maximum stall for a node that is isolated in one direction and cannot resign: the aim is 6 s.
const DEAF_STALL: Duration = Duration::from_secs(8);
/// Time limit for the node's recovery: a disk must have worked for ten seconds, and a busy machine syncs slowly.
const BACK: Duration = Duration::from_secs(90);

fn options() -> Options {
    Options::new()
        .set("journal.min_free_bytes", 16 << 20)
        .set("journal.commit_file_bytes", 8 << 20)
        .set("node.log_level", std::env::var("INTEROP_LOG").unwrap_or("info".to_owned()))
}

fn report(cluster: &Cluster, node: usize) -> String {
    http_get(cluster.server(node).unwrap().admin(), "/api/v1/cluster").unwrap_or_default()
}

/// The index of the node that leads the coordination group.
fn leader(cluster: &Cluster) -> usize {
    let report = report(cluster, 0);
    let from = report.find("\"leader\":").unwrap() + "\"leader\":".len();
    report[from..].split(',').next().unwrap().parse::<usize>().unwrap() - 1
}

/// Polls a node's admin endpoint until a condition holds.
fn await_answer(cluster: &Cluster, what: &str, patience: Duration, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        let late = began.elapsed() > patience;
        assert!(!late, "{what}: not within {patience:?}\n{}", cluster.log_tails());
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn await_whole(cluster: &Cluster, what: &str) -> Duration {
    let began = Instant::now();
    let whole = || (0..3).all(|node| report(cluster, node).contains("\"healthy\":true"));
    await_answer(cluster, what, BACK, whole);
    began.elapsed()
}

/// A fault and its expected effects.
struct Fault<'a> {
    what: &'a str,
    victim: usize,
    lasts: Duration,
    /// Maximum stall.
    stall: Duration,
    /// How another node's report describes it.
    seen_as: &'a str,
}

impl Fault<'_> {
    fn of_disk(what: &str, victim: usize) -> Fault<'_> {
        Fault { what, victim, lasts: FAULT, stall: STALL, seen_as: "disk" }
    }

    fn of_network(what: &str, victim: usize) -> Fault<'_> {
        Fault { what, victim, lasts: 2 * DEAF_STALL, stall: DEAF_STALL, seen_as: "is down" }
    }
}

/// One fault, from a healthy cluster to a healthy cluster.
fn strike<G>(cluster: &Cluster, load: &Load, fault: &Fault<'_>, begin: impl FnOnce() -> G) {
    let Fault { what, victim, lasts, stall: bound, seen_as } = *fault;
    load.settle();
    let fault = begin();
    let began = Instant::now();
    let witness = (victim + 1) % 3;
    let is_seen = || {
        let ready = http_get(cluster.server(victim).unwrap().admin(), "/readyz").unwrap_or_default();
        let seen = report(cluster, witness);
        !ready.starts_with("HTTP/1.1 200") && seen.contains("\"healthy\":false") && seen.contains(seen_as)
    };
    await_answer(cluster, &format!("{what}: seen"), lasts, is_seen);
    std::thread::sleep(lasts.saturating_sub(began.elapsed()));
    let stalls = load.stalls(victim);
    drop(fault);
    let back = await_whole(cluster, what);
    let longest = |layer: &str| {
        let of_layer = stalls.iter().filter(|(name, _)| name.starts_with(layer));
        of_layer.map(|(_, stall)| stall.as_millis()).max().unwrap_or(0)
    };
    let (queue, store, core) = (longest("queue"), longest("store"), longest("core"));
    println!(
        "{what} (node {}): stalls queue {queue} ms, store {store} ms, core {core} ms; back after {:.1} s",
        victim + 1,
        back.as_secs_f64()
    );
    let late: BTreeMap<_, _> = stalls.iter().filter(|(_, stall)| **stall > bound).collect();
    assert!(late.is_empty(), "{what}: stalled for too long: {late:?}\n{}", cluster.log_tails());
}

#[test]
fn node_with_a_hung_or_full_disk_causes_no_long_stall_and_recovers() {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut disks = Vec::new();
    for _ in 0..3 {
        match Disk::mount(parent, 320 << 20).and_then(|disk| disk.check_freeze().map(|()| disk)) {
            Ok(disk) => disks.push(disk),
            Err(why) => return moim_base::require::skip("mount", &format!("no disk can be frozen ({why})")),
        }
    }
    let cluster =
        Cluster::moim_on(3, &options(), false, |node| Some(disks[node].path().join("data"))).unwrap();
    await_whole(&cluster, "the start");
    let load = Load::start(&cluster);
    let victim = (leader(&cluster) + 1) % 3;
    let fault = Fault::of_disk("hung disk, not the leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || disks[victim].freeze());
    let victim = leader(&cluster);
    let fault = Fault::of_disk("hung disk, leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || disks[victim].freeze());
    let victim = leader(&cluster);
    let fault = Fault::of_disk("full disk, leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || {
        disks[victim].fill();
        Filled(&disks[victim])
    });
    load.finish();
}

#[test]
fn one_way_isolated_node_causes_no_long_stall() {
    let cluster = Cluster::moim(3, &options(), true).unwrap();
    await_whole(&cluster, "the start");
    let load = Load::start(&cluster);
    let net = cluster.net().unwrap();
    let others = |victim: usize| (0..3).filter(move |node| *node != victim);
    let victim = leader(&cluster);
    let fault = Fault::of_network("hears no node, leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || {
        others(victim).for_each(|other| net.cut(other, victim));
        Cut(net)
    });
    let victim = (leader(&cluster) + 1) % 3;
    let fault = Fault::of_network("hears no node, not the leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || {
        others(victim).for_each(|other| net.cut(other, victim));
        Cut(net)
    });
    let victim = leader(&cluster);
    let fault = Fault::of_network("is heard by no node, leader of the coordination group", victim);
    strike(&cluster, &load, &fault, || {
        others(victim).for_each(|other| net.cut(victim, other));
        Cut(net)
    });
    load.finish();
}

/// Heals the network when dropped.
struct Cut<'a>(&'a Net);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.0.heal(true);
    }
}

/// Frees its disk when dropped.
struct Filled<'a>(&'a Disk);

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        self.0.free();
    }
}
