//! Clients of the coordination core: they run on their own host and send each request to a random node.
//!
//! The timeout of a client is shorter than the cluster's: when it expires, or the node crashes, the outcome of the
//! request is unknown. An error of the core other than a timeout means that the request had no effect.

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

/// State shared by all clients.
pub(crate) struct ClientPool {
    pub(crate) shared: Arc<Shared>,
    pub(crate) keys: Recorder,
    pub(crate) locks: Locks,
    pub(crate) watched: Watched,
    /// Operations with a known outcome.
    pub(crate) answered: AtomicU64,
    /// Leases granted, those of locks included.
    pub(crate) leases: AtomicU64,
    stop: AtomicBool,
    next: AtomicU64,
}

impl ClientPool {
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

    /// Starts all clients on `host`.
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

    /// Stops all clients but the watchers.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A number that is unique in this run.
    fn unique(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a request to a random node; `None` without a reply in time.
    async fn request<T, F>(&self, timeout: Duration, work: impl FnOnce(Coordinator) -> F) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let Some(node) = self.shared.any_node() else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            return None;
        };
        let (_connection, disconnected) = self.shared.connect(&node);
        let (sender, reply) = oneshot::channel();
        let work = work(node.coordinator);
        node.handle.spawn(async move {
            let _ = sender.send(work.await);
        });
        tokio::select! {
            biased;
            reply = reply => reply.ok(),
            _ = disconnected => None,
            () = tokio::time::sleep(timeout) => None,
        }
    }
}

/// Random request timeout of a client.
fn request_timeout() -> Duration {
    Duration::from_millis(fastrand::u64(400..3_500))
}

async fn random_sleep(ms: std::ops::Range<u64>) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(ms))).await;
}

/// True if the outcome of a request with this error is unknown.
fn is_unknown(error: &CoordError) -> bool {
    error.is_unknown()
}
