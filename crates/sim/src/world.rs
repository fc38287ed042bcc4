//! Machines, wires and time, on one thread, from one seed.
//!
//! Every [`Host`] is a machine with its own disk and, while it is up, one process: a tokio runtime whose clock stands
//! still except when the world lets it run. [`World::step`] moves all of them by one [`TICK_MS`], in an order drawn from
//! the seed. Whatever a process sends takes at least one tick, so nothing that happens inside a tick can depend on the
//! order in which the machines had their turn, except through the order of messages, which the seed decides.
//!
//! What makes a run repeatable: one thread, paused clocks, one seeded generator for the world and one (`fastrand`'s own)
//! for the processes, and work for other threads that stays here. What a process must not do: ask the machine's clock,
//! start threads, select at random among what is ready, or iterate over a map with random order where the order shows.

mod clock;
mod host;
mod network;
mod task;
mod trace;

use std::time::Duration;

pub use self::clock::HostClock;
pub use self::host::{Host, Process};
pub use self::network::{Link, Network, Weather};
pub use self::task::Task;
pub use self::trace::Trace;

/// The grain of time.
pub const TICK_MS: u64 = 2;

/// Everything there is.
pub struct World {
    /// For what the world decides; the processes draw from this thread's `fastrand`.
    pub random: fastrand::Rng,
    /// The wires.
    pub network: Network,
    /// What happened.
    pub trace: Trace,
    hosts: Vec<Host>,
    now_ms: u64,
}

/// How long work that was taken off the event loop takes: mostly nothing, sometimes a slow disk's time.
fn offload_delay() -> Duration {
    let ms = match fastrand::u32(0..100) {
        0..60 => 0,
        60..97 => fastrand::u64(1..4),
        _ => fastrand::u64(10..120),
    };
    Duration::from_millis(ms)
}

impl World {
    /// An empty world. Takes over this thread's generator and what it offloads.
    pub fn new(seed: u64) -> Self {
        fastrand::seed(seed);
        moim_base::task::offload_inline(Some(offload_delay));
        let mut random = fastrand::Rng::with_seed(seed ^ 0x6d6f_696d);
        let trace = Trace::new();
        let network = Network::new(random.fork(), trace.clone());
        Self { random, network, trace, hosts: Vec::new(), now_ms: 0 }
    }

    /// Adds a machine that is switched off; answers its number.
    pub fn add_host(&mut self) -> usize {
        let number = self.hosts.len();
        self.hosts.push(Host::new(number, self.network.clone(), self.trace.clone()));
        self.network.add_host();
        number
    }

    /// A machine.
    pub fn host(&mut self, number: usize) -> &mut Host {
        &mut self.hosts[number]
    }

    /// How many machines there are.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Milliseconds since the world began.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Lets one tick pass everywhere.
    pub fn step(&mut self) {
        self.now_ms += TICK_MS;
        self.trace.set_now(self.now_ms);
        self.network.set_now(self.now_ms);
        let mut order: Vec<usize> = (0..self.hosts.len()).collect();
        self.random.shuffle(&mut order);
        for number in order {
            self.hosts[number].run_until(self.now_ms);
        }
    }

    /// Steps until `done` says so or the time is over; whether it did.
    pub fn step_until(&mut self, timeout_ms: u64, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let deadline_ms = self.now_ms + timeout_ms;
        while self.now_ms < deadline_ms {
            self.step();
            if done(self) {
                return true;
            }
        }
        false
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Before the thread is its own again: dropping a process runs its code.
        self.hosts.clear();
        moim_base::task::offload_inline(None);
    }
}
