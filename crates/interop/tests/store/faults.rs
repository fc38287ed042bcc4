//! One fault after the other, each healed before the next. They hit primaries: no other node can lose a write.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::World;
use super::subject::Subject;

/// Time limit for a healed cluster to serve all clients again.
const HEAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Consecutive operations that prove that it serves.
const SERVED_OPERATIONS: usize = 100;

/// A fault of a node.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The node is killed and restarted.
    Kill,
    /// The node is stopped for a while and resumed.
    Pause,
    /// Isolated from the other nodes in both directions; clients reach it.
    Isolate { reset: bool },
}

/// Runs the rounds; the load ends with the last one.
pub(super) fn run(world: &World, mut subject: Subject, rounds: u64, seed: u64) -> Subject {
    struct Stop<'a>(&'a World);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.stop.store(true, Ordering::SeqCst); // even when this thread panics
        }
    }
    let stop = Stop(world);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kinds = Vec::new();
    for round in 1..=rounds {
        world.round.store(usize::try_from(round).unwrap(), Ordering::SeqCst);
        await_service(world, &format!("seed {seed}, before round {round}"), &subject);
        std::thread::sleep(Duration::from_millis(random.u64(..300)));
        if kinds.is_empty() {
            kinds = vec![Fault::Kill, Fault::Pause, Fault::Isolate { reset: random.bool() }];
            random.shuffle(&mut kinds);
        }
        let fault = kinds.pop().expect("there are kinds");
        // Shorter than the failure detection, or long enough for a failover.
        let lasting = Duration::from_millis(random.u64(50..3500));
        let node = subject.any_primary(&mut random);
        eprintln!("round {round}: node {} {fault:?}, {lasting:?}", node + 1);
        strike(&mut subject, node, fault, lasting);
    }
    await_service(world, &format!("seed {seed}, at the end"), &subject);
    drop(stop);
    subject
}

fn strike(subject: &mut Subject, node: usize, fault: Fault, lasting: Duration) {
    match fault {
        Fault::Kill => {
            subject.kill(node);
            std::thread::sleep(lasting);
            subject.restart(node);
        }
        Fault::Pause => {
            subject.pause(node);
            std::thread::sleep(lasting);
            subject.resume(node);
        }
        Fault::Isolate { reset } => {
            subject.isolate(node);
            std::thread::sleep(lasting);
            subject.heal(reset);
        }
    }
}

/// Waits until clients get replies again.
fn await_service(world: &World, when: &str, subject: &Subject) {
    let wanted = world.done.load(Ordering::SeqCst) + SERVED_OPERATIONS;
    let deadline = Instant::now() + HEAL_TIMEOUT;
    while world.done.load(Ordering::SeqCst) < wanted {
        let late = Instant::now() > deadline;
        assert!(!late, "{when}: no client is served\n{}", subject.log_tails());
        assert!(!world.is_over(), "{when}: the load ended");
        std::thread::sleep(Duration::from_millis(20));
    }
}
