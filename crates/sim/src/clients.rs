//! Who uses the cluster: clients that run on their own machine and ask a random node each time.
//!
//! A client's patience is shorter than the cluster's: when it ends, or the node dies, the outcome of what it asked is
//! unknown. What the core calls an error other than a timeout is taken at its word: it did not happen.

mod keys;
mod leases;
mod locks;
mod watches;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moim_coord::{CoordError, Coordinator};
use moim_history::{Locks, Recorder};
use tokio::sync::oneshot;

pub(crate) use self::keys::read_every_key;
pub(crate) use self::watches::Watched;
use crate::cluster::Shared;
use crate::world::{Task, World};

/// What clients have in common.
pub(crate) struct Crowd {
    pub(crate) shared: Arc<Shared>,
    pub(crate) keys: Recorder,
    pub(crate) locks: Locks,
    pub(crate) watched: Watched,
    /// How many operations were answered.
    pub(crate) answered: AtomicU64,
    /// How many leases and locks were had.
    pub(crate) leases: AtomicU64,
    stop: AtomicBool,
    next: AtomicU64,
}

impl Crowd {
    pub(crate) fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            keys: Recorder::new(),
            locks: Locks::new(),
            watched: Watched::default(),
            answered: AtomicU64::new(0),
            leases: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            next: AtomicU64::new(0),
        })
    }

    /// Starts everybody on a machine of their own.
    pub(crate) fn start(self: &Arc<Self>, world: &mut World, host: usize, keys: u64) -> Vec<Task<()>> {
        let mut tasks = Vec::new();
        let machine = world.host(host);
        for client in 0..keys {
            tasks.extend(machine.spawn(keys::client(Arc::clone(self), client)));
        }
        for client in 0..2 {
            tasks.extend(machine.spawn(leases::client(Arc::clone(self), 100 + client)));
        }
        for client in 0..3 {
            tasks.extend(machine.spawn(locks::client(Arc::clone(self), 200 + client)));
        }
        for client in 0..2 {
            tasks.extend(machine.spawn(watches::client(Arc::clone(self), client)));
        }
        tasks
    }

    /// Tells everybody to end what they do.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A number that nobody had before.
    fn unique(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Asks a random node; `None` when no answer came in time.
    async fn ask<T, F>(&self, patience: Duration, work: impl FnOnce(Coordinator) -> F) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let Some(node) = self.shared.any_node() else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            return None;
        };
        let (_line, hung_up) = self.shared.connect(&node);
        let (answer, answered) = oneshot::channel();
        let work = work(node.coordinator);
        node.handle.spawn(async move {
            let _ = answer.send(work.await);
        });
        tokio::select! {
            biased;
            answered = answered => answered.ok(),
            _ = hung_up => None,
            () = tokio::time::sleep(patience) => None,
        }
    }
}

/// How long a client waits for an answer.
fn patience() -> Duration {
    Duration::from_millis(fastrand::u64(400..3_500))
}

async fn nap(ms: std::ops::Range<u64>) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(ms))).await;
}

/// Whether an error leaves open what happened.
fn is_unknown(error: &CoordError) -> bool {
    error.is_unknown()
}
