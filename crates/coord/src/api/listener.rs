//! The etcd port: takes connections and finds out what they speak.

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

/// What every HTTP/2 connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Enough of the first bytes to tell what is spoken.
const SNIFF_BYTES: usize = 4;
/// How long a client may take for its first bytes.
const SNIFF_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait when no connection can be taken, for want of file descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// When the kernel asks whether a silent client is still there, how often, and how many times.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// How the etcd port is set up.
#[derive(Clone)]
pub struct EtcdOptions {
    /// Connections at a time; more are closed when they come in.
    pub max_connections: usize,
    /// What `/metrics` shows on this port.
    pub metrics: Option<Arc<Metrics>>,
    /// The node's memory budget; one of its own without.
    pub memory: Option<MemoryBudget>,
    /// How long a client may take nothing of an answer that waits for it, or need for a message that it has begun.
    pub stall: Duration,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self { max_connections: 16_384, metrics: None, memory: None, stall: Duration::from_secs(30) }
    }
}

/// The etcd port, bound. Its address is known before there is anything to serve.
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

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Starts to serve, in tasks of `scope` on the current runtime, until the scope's signal to stop. Then calls have a
    /// moment to end: wait for [`Serving::ended`] before the runtime goes.
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
        let watching = Arc::clone(&api);
        scope.spawn("etcd-quorum", async move {
            tokio::select! {
                () = watching.scope.shutdown().stopped() => {}
                () = watching.quorum.watch_over(&watching.coordinator) => {}
            }
        });
        let (alive, ended) = mpsc::channel(1);
        scope.spawn("etcd-listener", accept(api, listener, self.options.max_connections, alive));
        Ok(Serving { ended })
    }
}

/// A port that is served.
pub struct Serving {
    /// Closed when the listener and every connection are gone. Nothing is ever sent.
    ended: mpsc::Receiver<()>,
}

impl Serving {
    /// Returns when the listener and every connection have ended, which takes a few seconds at most after the signal
    /// to stop.
    pub async fn ended(mut self) {
        let _ = self.ended.recv().await;
    }
}

/// A place among the connections, given back when it is dropped.
struct Place {
    open: Arc<AtomicUsize>,
    _alive: mpsc::Sender<()>,
}

impl Drop for Place {
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
                tracing::warn!(%error, "etcd port: no connection could be taken");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if open.fetch_add(1, Ordering::Relaxed) >= max_connections {
            open.fetch_sub(1, Ordering::Relaxed);
            api.counters.refused_connections.inc();
            tracing::warn!(%peer, max_connections, "etcd port: too many connections, one was closed");
            continue;
        }
        let place = Place { open: Arc::clone(&open), _alive: alive.clone() };
        let api = Arc::clone(&api);
        let scope = api.scope.clone();
        scope.spawn("etcd-connection", async move {
            let counters = Arc::clone(&api);
            let _counted = Counted::new(&counters.counters.connections);
            let _place = place;
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
            tracing::info!(%peer, first = %shown, "etcd port: neither HTTP/2 nor HTTP/1.1, closed");
        }
        Ok(Err(error)) => tracing::debug!(%peer, %error, "etcd port: a client went away"),
        Err(_) => tracing::debug!(%peer, "etcd port: a client said nothing"),
    }
}

/// Small answers go out at once, and a client whose machine has gone is noticed.
fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}
