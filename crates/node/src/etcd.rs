//! The etcd port: a listener and a thread of its own, so that its clients starve neither Raft nor the queue.
//!
//! The port is bound first, so that its address is known to the node's record; it serves once the core does. The
//! thread's runtime turns from the beginning: the core wakes its watchers there.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moim_base::MemoryBudget;
use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use moim_coord::Coordinator;
use moim_coord::api::{EtcdOptions, EtcdServer};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::oneshot;

use crate::config::EtcdConfig;
use crate::exit::{Failure, Outcome};

/// How long calls under way may take to end.
const GRACE: Duration = Duration::from_secs(1);

/// The etcd port and its thread.
pub(crate) struct Etcd {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// The runtime of its thread.
    pub(crate) runtime: Handle,
    /// Given when the thread cannot go on.
    pub(crate) failed: Shutdown,
    core: Option<oneshot::Sender<Coordinator>>,
    thread: std::thread::JoinHandle<()>,
}

impl Etcd {
    /// Binds the port and starts its thread. What clients make it hold is taken from `memory`.
    pub(crate) fn bind(
        address: SocketAddr,
        config: &EtcdConfig,
        metrics: Arc<Metrics>,
        memory: MemoryBudget,
    ) -> Outcome<Self> {
        let options = EtcdOptions {
            max_connections: config.max_connections as usize,
            metrics: Some(metrics),
            memory: Some(memory),
            ..EtcdOptions::default()
        };
        let server = EtcdServer::bind(address, options)
            .map_err(|error| crate::serve::cannot_listen(address, &error, "--etcd-port"))?;
        let cannot = |error: std::io::Error| Failure::error(format!("cannot start the etcd thread: {error}"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
        let (address, handle, shutdown) = (server.local_addr(), runtime.handle().clone(), Shutdown::new());
        let (core, ready) = oneshot::channel();
        let stopping = shutdown.clone();
        let thread = std::thread::Builder::new().name("moim-etcd".to_owned());
        let thread = thread.spawn(move || run(runtime, server, ready, &stopping)).map_err(cannot)?;
        Ok(Self { address, runtime: handle, failed: shutdown, core: Some(core), thread })
    }

    /// Serves from now on.
    pub(crate) fn serve(&mut self, coordinator: Coordinator) {
        if let Some(core) = self.core.take() {
            // Without its thread there is nobody to tell; `failed` says so.
            let _ = core.send(coordinator);
        }
    }

    /// Ends the calls under way and the thread. Blocks.
    pub(crate) fn stop(self) {
        self.failed.stop();
        if self.thread.join().is_err() {
            tracing::error!("the etcd thread panicked");
        }
    }
}

fn run(runtime: Runtime, server: EtcdServer, ready: oneshot::Receiver<Coordinator>, shutdown: &Shutdown) {
    runtime.block_on(async {
        let coordinator = tokio::select! {
            coordinator = ready => coordinator,
            () = shutdown.stopped() => return,
        };
        // The sender goes away only with the node.
        let Ok(coordinator) = coordinator else { return };
        match server.serve(coordinator, &Scope::new(shutdown.clone())) {
            Ok(serving) => serving.ended().await,
            Err(error) => {
                tracing::error!(%error, "the etcd port does not serve");
                shutdown.stop();
            }
        }
    });
    runtime.shutdown_timeout(GRACE);
}
