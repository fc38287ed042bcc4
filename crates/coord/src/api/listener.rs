//! The etcd port: accepts connections and detects their protocol.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use moim_base::MemoryBudget;
use moim_base::metrics::Metrics;
use moim_base::task::Scope;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::memory::Budget;
use super::metrics::{Counted, EtcdMetrics};
use super::quorum::Quorum;
use super::{Api, connection, http1};
use crate::engine::Coordinator;

/// The HTTP/2 connection preface.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes that are enough to detect the protocol.
const SNIFF_BYTES: usize = 4;
/// Timeout of a client's first bytes.
const SNIFF_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed accept, for example without free file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// TCP keepalive: idle time before the first probe, probe interval, number of probes.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Settings of the etcd port.
#[derive(Clone)]
pub struct EtcdOptions {
    /// Maximum number of connections; further ones are closed on accept.
    pub max_connections: usize,
    /// The metrics that `/metrics` renders on this port.
    pub metrics: Option<Arc<Metrics>>,
    /// The node's memory budget; `None` creates a separate one.
    pub memory: Option<MemoryBudget>,
    /// How long a client may take nothing of a pending response, or need to complete a request message.
    pub stall: Duration,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self { max_connections: 16_384, metrics: None, memory: None, stall: Duration::from_secs(30) }
    }
}

/// The bound etcd port. Its address is known before it serves.
pub struct EtcdServer {
    listener: StdListener,
    address: SocketAddr,
    options: EtcdOptions,
}

impl EtcdServer {
    /// Binds the port; 0 picks a free one.
    pub fn bind(address: SocketAddr, options: EtcdOptions) -> io::Result<Self> {
        let listener = moim_base::socket::listen(address)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, options })
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves in tasks of `scope` on the current runtime, until the scope is stopped. Then open calls have a moment to
    /// end: wait for [`Serving::ended`] before the runtime is dropped.
    pub fn serve(self, coordinator: Coordinator, scope: &Scope) -> io::Result<Serving> {
        let listener = TcpListener::from_std(self.listener)?;
        let api = Arc::new(Api {
            coordinator: coordinator.for_many_callers(scope),
            budget: Arc::new(Budget::new(self.options.memory.as_ref(), self.options.stall)),
            quorum: Quorum::new(),
            scope: scope.clone(),
            counters: EtcdMetrics::register(self.options.metrics.as_deref()),
            metrics: self.options.metrics,
        });
        let monitor = Arc::clone(&api);
        scope.spawn("etcd-quorum", async move {
            tokio::select! {
                () = monitor.scope.shutdown().stopped() => {}
                () = monitor.quorum.run(&monitor.coordinator) => {}
            }
        });
        let (alive, ended) = mpsc::channel(1);
        scope.spawn("etcd-listener", accept(api, listener, self.options.max_connections, alive));
        Ok(Serving { ended })
    }
}

/// A served port.
pub struct Serving {
    /// Closed when the listener and every connection have ended. Nothing is ever sent.
    ended: mpsc::Receiver<()>,
}

impl Serving {
    /// Waits until the listener and every connection have ended, which takes a few seconds at most after the stop
    /// signal.
    pub async fn ended(mut self) {
        let _ = self.ended.recv().await;
    }
}

/// One of the allowed connections, released on drop.
struct ConnectionSlot {
    open: Arc<AtomicUsize>,
    _alive: mpsc::Sender<()>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn accept(api: Arc<Api>, listener: TcpListener, max_connections: usize, alive: mpsc::Sender<()>) {
    let open = Arc::new(AtomicUsize::new(0));
    let shutdown = api.scope.shutdown().clone();
    loop {
        let accepted = tokio::select! {
            () = shutdown.stopped() => return,
            accepted = listener.accept() => accepted,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "etcd port: accept failed");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        if open.fetch_add(1, Ordering::Relaxed) >= max_connections {
            open.fetch_sub(1, Ordering::Relaxed);
            api.counters.refused_connections.inc();
            tracing::warn!(%peer, max_connections, "etcd port: connection refused over the limit");
            continue;
        }
        let slot = ConnectionSlot { open: Arc::clone(&open), _alive: alive.clone() };
        let api = Arc::clone(&api);
        let scope = api.scope.clone();
        scope.spawn("etcd-connection", async move {
            let counters = Arc::clone(&api);
            let _counted = Counted::new(&counters.counters.connections);
            let _slot = slot;
            serve(api, socket, peer).await;
        });
    }
}

async fn serve(api: Arc<Api>, mut socket: TcpStream, peer: SocketAddr) {
    if let Err(error) = prepare(&socket) {
        tracing::debug!(%peer, %error, "etcd port: socket options");
    }
    let shutdown = api.scope.shutdown().clone();
    let mut first = BytesMut::new();
    let sniff = async {
        while first.len() < SNIFF_BYTES {
            if socket.read_buf(&mut first).await? == 0 {
                break;
            }
        }
        io::Result::Ok(())
    };
    let sniffed = tokio::select! {
        () = shutdown.stopped() => return,
        sniffed = tokio::time::timeout(SNIFF_TIMEOUT, sniff) => sniffed,
    };
    match sniffed {
        Ok(Ok(())) if first.is_empty() => {}
        Ok(Ok(())) if PREFACE.starts_with(&first[..first.len().min(SNIFF_BYTES)]) => {
            connection::serve(api, first, socket, peer, shutdown).await;
        }
        Ok(Ok(())) if http1::is_http1(&first) => http1::serve(&api, socket, first, peer).await,
        Ok(Ok(())) => {
            api.counters.bad_connections.inc();
            let shown = first.escape_ascii().take(64).map(char::from).collect::<String>();
            tracing::info!(%peer, first = %shown, "etcd port: connection closed: neither HTTP/2 nor HTTP/1.1");
        }
        Ok(Err(error)) => tracing::debug!(%peer, %error, "etcd port: connection lost before the first bytes"),
        Err(_) => tracing::debug!(%peer, "etcd port: first bytes timed out"),
    }
}

/// Disables Nagle's algorithm, so small responses go out at once, and enables TCP keepalive to detect dead clients.
fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}
