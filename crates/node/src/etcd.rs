//! The etcd port: its own listener and thread, so that its clients starve neither Raft nor the queue.
//!
//! The port is bound first, so that the node record has its address; it serves once the coordination core does. The
//! runtime of the thread runs from the start, because the core wakes watchers there.

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

/// Timeout of calls in progress at shutdown.
const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// The etcd port and its thread.
pub(crate) struct Etcd {
    /// Listener address.
    pub(crate) address: SocketAddr,
    /// The runtime of its thread.
    pub(crate) runtime: Handle,
    /// Triggered when the thread fails.
    pub(crate) failed: Shutdown,
    core: Option<oneshot::Sender<Coordinator>>,
    thread: std::thread::JoinHandle<()>,
}

impl Etcd {
    /// Binds the port and starts its thread. Memory held for clients is charged to `memory`.
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

    /// Starts to serve.
    pub(crate) fn serve(&mut self, coordinator: Coordinator) {
        if let Some(core) = self.core.take() {
            // Fails only if the thread has ended; `failed` is triggered then.
            let _ = core.send(coordinator);
        }
    }

    /// Ends the calls in progress and the thread. Blocks.
    pub(crate) fn stop(self) {
        self.failed.stop();
        if self.thread.join().is_err() {
            tracing::error!("etcd thread panicked");
        }
    }
}

fn run(runtime: Runtime, server: EtcdServer, ready: oneshot::Receiver<Coordinator>, shutdown: &Shutdown) {
    runtime.block_on(async {
        let coordinator = tokio::select! {
            coordinator = ready => coordinator,
            () = shutdown.stopped() => return,
        };
        // The sender is dropped only with the node.
        let Ok(coordinator) = coordinator else { return };
        match server.serve(coordinator, &Scope::new(shutdown.clone())) {
            Ok(serving) => serving.ended().await,
            Err(error) => {
                tracing::error!(%error, "etcd port failed");
                shutdown.stop();
            }
        }
    });
    runtime.shutdown_timeout(GRACE_PERIOD);
}
