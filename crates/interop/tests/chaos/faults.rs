//! The faults, and how each is healed.

use std::time::Duration;

use moim_interop::cluster::{Cluster, http_post};

use super::disk::SmallDisk;

/// A fault, from injection to healing.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// SIGKILL, and a restart after a while.
    Kill { node: usize, away_ms: u64 },
    /// SIGKILL of two nodes: no quorum for a while.
    KillTwo { spared: usize, away_ms: u64 },
    /// SIGKILL of all nodes.
    KillAll,
    /// SIGSTOP and SIGCONT, shorter or longer than a lease.
    Pause { node: usize, away_ms: u64 },
    /// Isolated from the other nodes in both directions; clients reach it.
    Isolate { node: usize, away_ms: u64 },
    /// One direction between two nodes is cut.
    CutOneWay { from: usize, to: usize, away_ms: u64 },
    /// SIGTERM and restart, one node after the other.
    RollingRestart,
    /// A disk is full for a while.
    DiskFull { away_ms: u64 },
    /// SIGKILL, and the data directory is lost.
    Wipe { node: usize },
}

impl Fault {
    /// A schedule of faults: every kind in turn, in an order derived from the seed.
    pub(super) fn schedule(rng: &mut fastrand::Rng, rounds: usize, can_fill: bool) -> Vec<Self> {
        let mut faults = Vec::new();
        while faults.len() < rounds {
            let mut kinds: Vec<u32> = (0..9).filter(|kind| *kind != 7 || can_fill).collect();
            rng.shuffle(&mut kinds);
            faults.extend(kinds.into_iter().map(|kind| Self::of(kind, rng)));
        }
        faults.truncate(rounds);
        faults
    }

    fn of(kind: u32, rng: &mut fastrand::Rng) -> Self {
        let (node, away_ms) = (rng.usize(0..3), rng.u64(100..4_500));
        match kind {
            0 => Self::Kill { node, away_ms },
            1 => Self::KillTwo { spared: node, away_ms: away_ms / 2 },
            2 => Self::KillAll,
            3 => Self::Pause { node, away_ms },
            4 => Self::Isolate { node, away_ms },
            5 => Self::CutOneWay { from: node, to: (node + rng.usize(1..3)) % 3, away_ms },
            6 => Self::RollingRestart,
            7 => Self::DiskFull { away_ms: 1_000 + away_ms },
            _ => Self::Wipe { node },
        }
    }

    /// Injects the fault, and heals it.
    pub(super) fn strike(&self, cluster: &mut Cluster, disk: Option<&SmallDisk>, rng: &mut fastrand::Rng) {
        let away = |ms: &u64| std::thread::sleep(Duration::from_millis(*ms));
        match self {
            Self::Kill { node, away_ms } => {
                cluster.kill(*node).unwrap();
                away(away_ms);
                cluster.restart(*node).unwrap();
            }
            Self::KillTwo { spared, away_ms } => {
                let victims: Vec<usize> = (0..3).filter(|node| node != spared).collect();
                victims.iter().for_each(|node| cluster.kill(*node).unwrap());
                away(away_ms);
                cluster.restart_all(&victims).unwrap();
            }
            Self::KillAll => {
                (0..3).for_each(|node| cluster.kill(node).unwrap());
                cluster.restart_all(&[0, 1, 2]).unwrap();
            }
            Self::Pause { node, away_ms } => {
                cluster.pause(*node).unwrap();
                away(away_ms);
                cluster.resume(*node).unwrap();
            }
            Self::Isolate { node, away_ms } => {
                cluster.net().unwrap().isolate(*node);
                away(away_ms);
                cluster.net().unwrap().heal(rng.bool());
            }
            Self::CutOneWay { from, to, away_ms } => {
                cluster.net().unwrap().cut(*from, *to);
                away(away_ms);
                cluster.net().unwrap().heal(rng.bool());
            }
            Self::RollingRestart => {
                for node in 0..3 {
                    cluster.terminate(node).unwrap();
                    cluster.restart(node).unwrap();
                }
            }
            Self::DiskFull { away_ms } => {
                let disk = disk.unwrap();
                disk.fill();
                away(away_ms);
                disk.free();
                // A failed write may have stopped the process.
                if !cluster.is_running(2) {
                    cluster.restart(2).unwrap();
                }
            }
            Self::Wipe { node } => wipe(cluster, *node),
        }
    }
}

/// The data directory is lost: the node is replaced and comes back empty.
fn wipe(cluster: &mut Cluster, node: usize) {
    cluster.kill(node).unwrap();
    std::fs::remove_dir_all(cluster.server(node).unwrap().data()).unwrap();
    let admin = cluster.server((node + 1) % 3).unwrap().admin().to_owned();
    let path = format!("/api/v1/cluster/nodes/{}/replace", node + 1);
    let replaced = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        http_post(&admin, &path).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
    });
    assert!(replaced, "node {} was not given up", node + 1);
    cluster.restart(node).unwrap();
}
