//! What goes wrong, and how it is put right.

use std::time::Duration;

use moim_interop::cluster::{Cluster, http_post};

use super::disk::SmallDisk;

/// A fault, from its beginning to its end.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// kill -9, and a start after a while.
    Kill { node: usize, away_ms: u64 },
    /// kill -9 of two: no quorum for a while.
    KillTwo { spared: usize, away_ms: u64 },
    /// kill -9 of all.
    KillAll,
    /// SIGSTOP and SIGCONT, shorter or longer than a lease.
    Pause { node: usize, away_ms: u64 },
    /// Nobody reaches it and it reaches nobody; clients do.
    Isolate { node: usize, away_ms: u64 },
    /// One way between two nodes is cut.
    CutOneWay { from: usize, to: usize, away_ms: u64 },
    /// SIGTERM and start, one node after the other.
    RollingRestart,
    /// A disk takes nothing for a while.
    DiskFull { away_ms: u64 },
    /// kill -9, and the data folder is lost.
    Wipe { node: usize },
}

impl Fault {
    /// This many faults: every kind in turn, in an order of the seed's.
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

    /// Lets it happen, and ends it.
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
                // What could not be written may have ended the process.
                if !cluster.is_running(2) {
                    cluster.restart(2).unwrap();
                }
            }
            Self::Wipe { node } => wipe(cluster, *node),
        }
    }
}

/// The folder is lost; the cluster is told so, and the node comes back empty.
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
