//! Hosts, network and time, on one thread, from one seed.
//!
//! Every [`Host`] has its own disk and, while it is up, one process: a tokio runtime with a paused clock that only
//! the world advances. [`World::step`] advances all hosts by one [`TICK_MS`], in an order drawn from the seed. A
//! message takes at least one tick, so nothing inside a tick depends on the order in which the hosts run, except
//! through the order of messages, which the seed decides.
//!
//! A run is repeatable because of: one thread, paused clocks, one seeded generator for the world and one (`fastrand`'s
//! own) for the processes, and offloaded work that stays on this thread. A process must not read the machine's clock,
//! start threads, select at random among ready futures, or iterate over a map with random order where the order is
//! observable.

mod clock;
mod host;
mod network;
mod task;
mod trace;

use std::time::Duration;

pub use self::clock::HostClock;
pub use self::host::{Host, Process};
pub use self::network::{Link, LinkQuality, Network};
pub use self::task::Task;
pub use self::trace::Trace;

/// Resolution of simulated time.
pub const TICK_MS: u64 = 2;

/// The hosts, the network and the time of one simulation.
pub struct World {
    /// Generator for decisions of the world; the processes draw from this thread's `fastrand`.
    pub random: fastrand::Rng,
    /// The network between the hosts.
    pub network: Network,
    /// The trace of the run.
    pub trace: Trace,
    hosts: Vec<Host>,
    now_ms: u64,
}

/// Duration of offloaded work: mostly none, sometimes that of a slow disk.
fn offload_delay() -> Duration {
    let ms = match fastrand::u32(0..100) {
        0..60 => 0,
        60..97 => fastrand::u64(1..4),
        _ => fastrand::u64(10..120),
    };
    Duration::from_millis(ms)
}

impl World {
    /// An empty world. Takes over this thread's random generator and its offloaded work.
    pub fn new(seed: u64) -> Self {
        fastrand::seed(seed);
        moim_base::task::offload_inline(Some(offload_delay));
        let mut random = fastrand::Rng::with_seed(seed ^ 0x6d6f_696d);
        let trace = Trace::new();
        let network = Network::new(random.fork(), trace.clone());
        Self { random, network, trace, hosts: Vec::new(), now_ms: 0 }
    }

    /// Adds a host that is off; returns its number.
    pub fn add_host(&mut self) -> usize {
        let number = self.hosts.len();
        self.hosts.push(Host::new(number, self.network.clone(), self.trace.clone()));
        self.network.add_host();
        number
    }

    /// The host with this number.
    pub fn host(&mut self, number: usize) -> &mut Host {
        &mut self.hosts[number]
    }

    /// Number of hosts.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// True if there are no hosts.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Simulated milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Advances every host by one tick.
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

    /// Steps until `done` returns true or the timeout passes; returns whether it did.
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
        // Dropping a process runs its code, so offloading is reset only afterwards.
        self.hosts.clear();
        moim_base::task::offload_inline(None);
    }
}
