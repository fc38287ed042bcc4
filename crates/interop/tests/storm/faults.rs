//! The faults, and how each is healed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moim_interop::cluster::{Cluster, http_get, http_post};
use moim_interop::moim_binary;

use super::clock::Clocks;
use super::disk::Disk;
use super::{await_whole, files};

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// SIGKILL, and a restart after a while.
    Kill,
    /// SIGKILL of all nodes.
    KillAll,
    /// SIGSTOP and SIGCONT.
    Pause,
    /// SIGTERM and restart, one node after the other.
    Restart,
    /// Isolated from the other nodes in both directions; clients reach it.
    Isolate,
    /// Isolated in one direction: it receives nothing from the other nodes, or sends nothing to them.
    Deaf,
    /// Its disk hangs: every write blocks.
    HungDisk,
    /// Its disk is a hundred times slower.
    SlowDisk,
    /// Its disk is full.
    FullDisk,
    /// A bit flips in one of its files while it is stopped.
    BitFlip,
    /// Its data directory is restored from an older copy.
    Rollback,
    /// A copy of its data directory is started elsewhere while it runs.
    Clone,
    /// Its wall clock steps by up to a day forwards or most of an hour back, and is corrected.
    ClockStep,
    /// Its data directory is lost and the node is replaced.
    Wipe,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Kill,
        Self::KillAll,
        Self::Pause,
        Self::Restart,
        Self::Isolate,
        Self::Deaf,
        Self::HungDisk,
        Self::SlowDisk,
        Self::FullDisk,
        Self::BitFlip,
        Self::Rollback,
        Self::Clone,
        Self::ClockStep,
        Self::Wipe,
    ];

    /// An endless schedule of every kind in turn, in an order derived from the seed. Bit flips occur twice as often
    /// as the others: there are more kinds of files than of faults.
    pub(super) fn schedule(
        seed: u64,
        disks: bool,
        clocks: bool,
        only: Option<String>,
    ) -> impl Iterator<Item = Self> {
        let mut rng = fastrand::Rng::with_seed(seed);
        let possible = move |kind: &Self| match kind {
            Self::HungDisk | Self::SlowDisk | Self::FullDisk => disks,
            Self::ClockStep => clocks,
            _ => true,
        };
        let wanted = move |kind: &Self| only.as_ref().is_none_or(|only| only.contains(&format!("{kind:?}")));
        std::iter::repeat_with(move || {
            let mut kinds: Vec<Self> =
                Self::ALL.into_iter().chain([Self::BitFlip]).filter(&possible).collect();
            kinds.retain(&wanted);
            assert!(!kinds.is_empty(), "no such fault");
            rng.shuffle(&mut kinds);
            kinds
        })
        .flatten()
    }

    /// The aim for the longest client stall, if there is one.
    pub(super) fn aim(self) -> Option<Duration> {
        match self {
            Self::HungDisk | Self::SlowDisk | Self::FullDisk => Some(Duration::from_secs(3)),
            Self::Deaf => Some(Duration::from_secs(6)),
            _ => None,
        }
    }
}

/// An injected fault.
pub(super) struct Strike {
    pub(super) what: String,
    pub(super) victim: usize,
}

/// Injects faults, and heals them.
pub(super) struct Faults<'a> {
    disks: &'a [Disk],
    clocks: Option<&'a Clocks>,
    rng: fastrand::Rng,
}

fn sleep(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

impl<'a> Faults<'a> {
    pub(super) fn new(disks: &'a [Disk], clocks: Option<&'a Clocks>, seed: u64) -> Self {
        Self { disks, clocks, rng: fastrand::Rng::with_seed(seed ^ 0x5707) }
    }

    pub(super) fn strike(&mut self, kind: Kind, cluster: &mut Cluster) -> Strike {
        // Half of all faults hit the leader of the coordination group.
        let victim = if self.rng.bool() { leader(cluster) } else { self.rng.usize(..3) };
        let away_ms = self.rng.u64(200..5_000);
        let said = match kind {
            Kind::Kill => {
                cluster.kill(victim).unwrap();
                sleep(away_ms);
                cluster.restart(victim).unwrap();
                format!("for {away_ms} ms")
            }
            Kind::KillAll => {
                (0..3).for_each(|node| cluster.kill(node).unwrap());
                cluster.restart_all(&[0, 1, 2]).unwrap();
                String::new()
            }
            Kind::Pause => {
                cluster.pause(victim).unwrap();
                sleep(away_ms);
                cluster.resume(victim).unwrap();
                format!("for {away_ms} ms")
            }
            Kind::Restart => {
                for node in 0..3 {
                    cluster.terminate(node).unwrap();
                    cluster.restart(node).unwrap();
                }
                String::new()
            }
            Kind::Isolate => {
                cluster.net().unwrap().isolate(victim);
                sleep(away_ms);
                cluster.net().unwrap().heal(self.rng.bool());
                format!("for {away_ms} ms")
            }
            Kind::Deaf => self.isolate_one_way(cluster, victim),
            Kind::HungDisk => {
                let frozen = self.disks[victim].freeze();
                sleep(4_000 + away_ms);
                drop(frozen);
                format!("for {} ms", 4_000 + away_ms)
            }
            Kind::SlowDisk => self.slow_down(victim, 3_000 + away_ms),
            Kind::FullDisk => {
                self.disks[victim].fill();
                sleep(3_000 + away_ms);
                self.disks[victim].free();
                restart_if_exited(cluster, victim);
                format!("for {} ms", 3_000 + away_ms)
            }
            Kind::BitFlip => self.flip(cluster, victim),
            Kind::Rollback => self.roll_back(cluster, victim),
            Kind::Clone => clone(cluster, victim),
            Kind::ClockStep => self.step_clock(cluster, victim),
            Kind::Wipe => {
                cluster.kill(victim).unwrap();
                replace(cluster, victim);
                String::new()
            }
        };
        Strike { what: format!("{kind:?} of node {} {said}", victim + 1), victim }
    }

    fn isolate_one_way(&mut self, cluster: &Cluster, victim: usize) -> String {
        let net = cluster.net().unwrap();
        let inbound = self.rng.bool();
        for other in (0..3).filter(|node| *node != victim) {
            if inbound { net.cut(other, victim) } else { net.cut(victim, other) }
        }
        sleep(9_000);
        net.heal(self.rng.bool());
        if inbound { "that hears no node".to_owned() } else { "that no node hears".to_owned() }
    }

    /// A disk that hangs most of the time: a write that takes a fraction of a millisecond takes about fifty.
    fn slow_down(&self, victim: usize, for_ms: u64) -> String {
        let until = Instant::now() + Duration::from_millis(for_ms);
        while Instant::now() < until {
            let frozen = self.disks[victim].freeze();
            sleep(50);
            drop(frozen);
            sleep(2);
        }
        format!("for {for_ms} ms")
    }

    fn flip(&mut self, cluster: &mut Cluster, victim: usize) -> String {
        let graceful = self.rng.bool();
        if graceful {
            cluster.terminate(victim).unwrap()
        } else {
            cluster.kill(victim).unwrap()
        }
        let data = cluster.server(victim).unwrap().data();
        let kinds: Vec<_> = files::kinds(&data).into_iter().collect();
        let (kind, paths) = &kinds[self.rng.usize(..kinds.len())];
        let path = &paths[self.rng.usize(..paths.len())];
        let at = files::flip(path, &mut self.rng);
        let what = format!("at {at} of {kind} ({})", path.strip_prefix(&data).unwrap().display());
        if cluster.restart(victim).is_err() {
            replace_damaged(cluster, victim, &what);
            return format!("{what}: refused and replaced");
        }
        what
    }

    fn roll_back(&mut self, cluster: &mut Cluster, victim: usize) -> String {
        let data = cluster.server(victim).unwrap().data();
        let older = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        cluster.terminate(victim).unwrap();
        files::copy(&data, &older.path().join("data"));
        cluster.restart(victim).unwrap();
        await_whole(cluster, "a restart before a rollback");
        // These writes are in the replicas, but not in the copy.
        sleep(1_500);
        let all = self.rng.bool();
        let stopped: Vec<usize> = if all { vec![0, 1, 2] } else { vec![victim] };
        stopped.iter().for_each(|node| cluster.kill(*node).unwrap());
        std::fs::remove_dir_all(&data).unwrap();
        files::copy(&older.path().join("data"), &data);
        cluster.restart_all(&stopped).unwrap();
        await_whole(cluster, "a rollback");
        assert!(files::remove_aside(&data), "a rollback went unnoticed\n{}", super::logs(cluster));
        if all { "after kill -9 of all".to_owned() } else { "alone".to_owned() }
    }

    fn step_clock(&mut self, cluster: &mut Cluster, victim: usize) -> String {
        let clocks = self.clocks.unwrap();
        // A broker whose clock is an hour or more behind rejects records as coming from the future
        // (INVALID_TIMESTAMP), as Kafka does.
        let seconds = *self.rng.choice(&[60, 3_600, 86_400, -60, -600, -3_000]).unwrap();
        clocks.step(victim, seconds);
        sleep(3_000);
        let restarts = self.rng.bool();
        if restarts {
            // The node leads and serves with the wrong time from its start.
            cluster.kill(victim).unwrap();
            cluster.restart(victim).unwrap();
            sleep(2_000);
        }
        clocks.step(victim, 0);
        format!("by {seconds} s{}", if restarts { ", through a restart" } else { "" })
    }
}

/// The index of the node that leads the coordination group.
fn leader(cluster: &Cluster) -> usize {
    let report = http_get(cluster.server(0).unwrap().admin(), "/api/v1/cluster").unwrap_or_default();
    let number = report.split("\"leader\":").nth(1).and_then(|rest| rest.split(',').next());
    number.and_then(|text| text.parse::<usize>().ok()).map_or(0, |node| (node - 1) % 3)
}

/// Restarts a node that exited because a write failed.
fn restart_if_exited(cluster: &mut Cluster, node: usize) {
    if !cluster.is_running(node) {
        cluster.restart(node).unwrap();
    }
}

/// Handles a node that exited without a fault injection. That is correct only if it found damage it cannot repair and
/// named the remedy, which is then applied.
pub(super) fn replace_damaged(cluster: &mut Cluster, node: usize, after: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while cluster.is_running(node) {
        assert!(
            Instant::now() < deadline,
            "{after}: node {} neither serves nor ends\n{}",
            node + 1,
            super::logs(cluster)
        );
        sleep(20);
    }
    let log = cluster.server(node).unwrap().log_tail();
    assert!(log.contains("moim cluster replace"), "{after}: node {} ended without a remedy\n{log}", node + 1);
    replace(cluster, node);
}

/// The data directory of a stopped node is lost: the node is replaced and comes back empty.
fn replace(cluster: &mut Cluster, node: usize) {
    std::fs::remove_dir_all(cluster.server(node).unwrap().data()).unwrap();
    let admin = cluster.server((node + 1) % 3).unwrap().admin().to_owned();
    let path = format!("/api/v1/cluster/nodes/{}/replace", node + 1);
    let replaced = (0..200).any(|_| {
        sleep(50);
        http_post(&admin, &path).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
    });
    assert!(replaced, "node {} was not given up", node + 1);
    cluster.restart(node).unwrap();
}

/// Starts a copy of a running node's directory elsewhere: it must exit, and change nothing.
fn clone(cluster: &Cluster, victim: usize) -> String {
    let data = cluster.server(victim).unwrap().data();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    files::copy(&data, &folder.path().join("data"));
    let any = [
        "--kafka-port",
        "--admin-port",
        "--etcd-port",
        "--peer-port",
        "--redis-port",
        "--redis-replica-ports",
    ];
    let mut clone = Command::new(moim_binary().unwrap())
        .args(["serve", "--node-id", &(victim + 1).to_string(), "--data"])
        .arg(folder.path().join("data"))
        .args(any.iter().flat_map(|port| [port, "0"]))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
        .spawn()
        .unwrap();
    cluster.net().unwrap().exclude_process(clone.id());
    let deadline = Instant::now() + Duration::from_secs(40);
    let status = loop {
        if let Some(status) = clone.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            clone.kill().unwrap();
            clone.wait().unwrap();
            let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
            panic!("a clone of node {} went on running\n{log}\n{}", victim + 1, super::logs(cluster));
        }
        sleep(20);
    };
    assert!(!status.success(), "a clone of node {} ended as if all were well", victim + 1);
    format!("ended with {status}")
}
