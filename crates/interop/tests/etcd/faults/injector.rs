//! The fault injector: one fault after the other, each healed before the next.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;

use super::World;

/// Time limit for a healed cluster to serve all clients again.
const HEAL_TIMEOUT: Duration = Duration::from_secs(30);

/// A fault.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The node is killed and restarted.
    Kill,
    /// The node is stopped for a while and resumed.
    Pause,
    /// The node is isolated from all others.
    Isolate { reset: bool },
    /// The node receives from the others but cannot send to them; or the other way round.
    OneWay { inbound: bool },
    /// Two of three nodes are killed at once.
    KillTwo,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => f.write_str("is killed"),
            Self::Pause => f.write_str("is paused"),
            Self::Isolate { reset } => write!(f, "is cut off (reset {reset})"),
            Self::OneWay { inbound } => {
                write!(f, "{}", if *inbound { "receives nothing" } else { "sends nothing" })
            }
            Self::KillTwo => f.write_str("and the next are killed"),
        }
    }
}

/// Runs the rounds; the load ends with the last one.
pub(super) fn run(world: &World, mut cluster: Cluster, rounds: u64, seed: u64) -> Cluster {
    struct Stop<'a>(&'a World);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop.store(true, Ordering::SeqCst); // even when this thread panics
        }
    }
    let stop = Stop(world);
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 1..=rounds {
        world.round.store(usize::try_from(round).unwrap(), Ordering::SeqCst);
        await_service(world, &format!("seed {seed}, before round {round}"), &cluster);
        std::thread::sleep(Duration::from_millis(random.u64(100..600)));
        let node = random.usize(..cluster.len());
        let fault = match random.u8(..10) {
            0..4 => Fault::Kill,
            4..6 => Fault::Pause,
            6..8 => Fault::Isolate { reset: random.bool() },
            8 => Fault::OneWay { inbound: random.bool() },
            _ => Fault::KillTwo,
        };
        let lasting = Duration::from_millis(random.u64(200..3500));
        eprintln!("round {round}: node {} {fault}, {lasting:?}", node + 1);
        strike(&mut cluster, node, fault, lasting);
    }
    await_service(world, &format!("seed {seed}, at the end"), &cluster);
    drop(stop);
    cluster
}

fn strike(cluster: &mut Cluster, node: usize, fault: Fault, lasting: Duration) {
    let nodes = cluster.len();
    match fault {
        Fault::Kill => {
            cluster.kill(node).unwrap();
            std::thread::sleep(lasting);
            cluster.restart(node).unwrap_or_else(|error| panic!("node {}: {error:#}", node + 1));
        }
        Fault::KillTwo => {
            let other = (node + 1) % nodes;
            cluster.kill(node).unwrap();
            cluster.kill(other).unwrap();
            std::thread::sleep(lasting);
            // One of the two restores the quorum; the other one follows.
            for node in [node, other] {
                cluster.restart(node).unwrap_or_else(|error| panic!("node {}: {error:#}", node + 1));
            }
        }
        Fault::Pause => {
            cluster.pause(node).unwrap();
            std::thread::sleep(lasting);
            cluster.resume(node).unwrap();
        }
        Fault::Isolate { reset } => {
            let net = cluster.net().expect("a network that can be cut");
            net.isolate(node);
            std::thread::sleep(lasting);
            net.heal(reset);
        }
        Fault::OneWay { inbound } => {
            let net = cluster.net().expect("a network that can be cut");
            for other in (0..nodes).filter(|other| *other != node) {
                if inbound { net.cut(other, node) } else { net.cut(node, other) }
            }
            std::thread::sleep(lasting);
            net.heal(false);
        }
    }
}

/// Waits until clients get responses again.
fn await_service(world: &World, when: &str, cluster: &Cluster) {
    let wanted = world.done.load(Ordering::SeqCst) + 50;
    let deadline = Instant::now() + HEAL_TIMEOUT;
    while world.done.load(Ordering::SeqCst) < wanted {
        assert!(Instant::now() < deadline, "{when}: no client is served\n{}", cluster.log_tails());
        std::thread::sleep(Duration::from_millis(20));
    }
}
