//! The event loops and the listeners.
//!
//! An event loop is a thread with its own runtime; a connection stays on one loop. Every shard has a listener: an
//! address is one replica of one shard, as in a Redis Cluster. The first loop accepts, distributes the connections
//! round-robin, and runs the shard tasks.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use moim_base::rest::{aligned, rest};
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::connection;
use crate::shard::{Shard, keyspace_hash};
use crate::shard_task;
use crate::shared::{Shared, lock};

/// The stack of threads that run scripts: nested values are converted by recursion, a thousand deep, which needs most
/// in a test build. Only used pages take memory.
const STACK: usize = 16 << 20;

/// The heartbeat interval of an event loop.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

/// How many accepted connections and tasks may be queued for one loop.
const BACKLOG: usize = 1024;

enum Job {
    Serve(StdStream, SocketAddr, Arc<Shard>),
    Task(&'static str, Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// The running event loops.
pub struct Server {
    shared: Arc<Shared>,
    loops: Vec<mpsc::Sender<Job>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    shutdown: Shutdown,
    turn: Arc<AtomicUsize>,
    /// The last heartbeat of each loop, on the monotonic clock.
    heartbeats: Arc<[AtomicU64]>,
    /// The task scope of a server without event loops of its own.
    inline_scope: Option<Scope>,
}

impl Server {
    /// Starts the event loops.
    pub fn start(shared: Arc<Shared>, loops: usize, shutdown: Shutdown) -> io::Result<Self> {
        let _ = shared.this.set(Arc::downgrade(&shared));
        let (mut senders, mut threads) = (Vec::new(), Vec::new());
        let started = shared.clock.monotonic_ms();
        let heartbeats: Arc<[AtomicU64]> = (0..loops.max(1)).map(|_| AtomicU64::new(started)).collect();
        for index in 0..loops.max(1) {
            let (sender, receiver) = mpsc::channel(BACKLOG);
            let (shared, shutdown, heartbeats) =
                (Arc::clone(&shared), shutdown.clone(), Arc::clone(&heartbeats));
            let thread = std::thread::Builder::new()
                .name(format!("slots-{index}"))
                .stack_size(STACK)
                .spawn(move || run_loop(&shared, index, receiver, &shutdown, heartbeats))?;
            senders.push(sender);
            threads.push(thread);
        }
        let (threads, turn) = (Mutex::new(threads), Arc::default());
        Ok(Self { shared, loops: senders, threads, shutdown, turn, heartbeats, inline_scope: None })
    }

    /// A server whose one event loop is the current runtime. There are no listeners; connections are given to
    /// [`Server::adopt`]. For several stores on one thread.
    pub fn on_current_runtime(shared: Arc<Shared>, scope: Scope) -> Self {
        let _ = shared.this.set(Arc::downgrade(&shared));
        let shutdown = scope.shutdown().clone();
        let (loops, threads, turn) = (Vec::new(), Mutex::default(), Arc::default());
        Self { shared, loops, threads, shutdown, turn, heartbeats: Arc::default(), inline_scope: Some(scope) }
    }

    /// True for a server on the current runtime, which has no listeners.
    pub fn is_on_current_runtime(&self) -> bool {
        self.inline_scope.is_some()
    }

    /// Serves a connection that no listener accepted; only on the current runtime.
    pub fn adopt(&self, shard: &Arc<Shard>, socket: Box<dyn Socket>) {
        let Some(scope) = &self.inline_scope else { return };
        let (shared, shard) = (Arc::clone(&self.shared), Arc::clone(shard));
        shared.connections.fetch_add(1, Ordering::AcqRel);
        scope.spawn("slots-client", async move {
            connection::serve(Arc::clone(&shared), shard, socket, String::new(), String::new(), 0).await;
            shared.connections.fetch_sub(1, Ordering::AcqRel);
        });
    }

    /// The number of event loops.
    pub fn loops(&self) -> usize {
        self.loops.len().max(1)
    }

    /// The time since the last heartbeat of each loop.
    pub(crate) fn silent_ms(&self, now_ms: u64) -> Vec<u64> {
        self.heartbeats
            .iter()
            .map(|heartbeat| now_ms.saturating_sub(heartbeat.load(Ordering::Relaxed)))
            .collect()
    }

    /// The state that all shards and clients share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Starts the tasks of a shard: replay, role changes, expiry, commit wake-ups, keyspace hash checks.
    pub fn run_shard(&self, shard: &Arc<Shard>) -> io::Result<()> {
        for index in 0..self.loops() {
            let shard = Arc::clone(shard);
            self.spawn(index, "slots-wakes", async move {
                let removed = shard.removed.clone();
                tokio::select! {
                    biased;
                    () = removed.stopped() => {}
                    () = shard.wake_waiters(index) => {}
                }
            })?;
        }
        self.spawn(0, "slots-check", keyspace_hash::run(Arc::clone(&self.shared), Arc::clone(shard)))?;
        let (deferring, removed) = (Arc::clone(shard), shard.removed.clone());
        self.spawn(0, "slots-deferred", async move {
            tokio::select! {
                biased;
                () = removed.stopped() => {}
                () = deferring.send_deferred() => {}
            }
        })?;
        self.spawn(0, "slots-shard-task", shard_task::run(Arc::clone(&self.shared), Arc::clone(shard)))
    }

    /// Binds a listener address.
    pub fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
        moim_base::socket::listen(address)
    }

    /// Serves a shard on a listener.
    pub fn listen(&self, shard: &Arc<Shard>, listener: std::net::TcpListener) -> io::Result<()> {
        let (loops, shared, shard) = (self.loops.clone(), Arc::clone(&self.shared), Arc::clone(shard));
        let (turn, shutdown) = (Arc::clone(&self.turn), self.shutdown.clone());
        self.spawn(0, "slots-accept", async move {
            match TcpListener::from_std(listener) {
                Ok(listener) => {
                    let removed = shard.removed.clone();
                    tokio::select! {
                        () = shutdown.stopped() => {}
                        () = removed.stopped() => {}
                        () = accept(shared, shard, listener, loops, turn) => {}
                    }
                }
                Err(error) => tracing::error!(%error, "shard listener failed"),
            }
        })
    }

    fn spawn(
        &self,
        index: usize,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        if let Some(scope) = &self.inline_scope {
            scope.spawn(name, task);
            return Ok(());
        }
        let sent = self.loops[index].try_send(Job::Task(name, Box::pin(task)));
        sent.map_err(|error| io::Error::other(error.to_string()))
    }

    /// Closes all connections and joins the event loops; give the shutdown signal first.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("event loop panicked");
            }
        }
    }
}

/// Records heartbeats of an event loop.
async fn heartbeat(shared: Arc<Shared>, index: usize, heartbeats: Arc<[AtomicU64]>) {
    loop {
        if let Some(heartbeat) = heartbeats.get(index) {
            heartbeat.store(shared.clock.monotonic_ms(), Ordering::Relaxed);
        }
        rest(HEARTBEAT_INTERVAL).await;
    }
}

fn run_loop(
    shared: &Arc<Shared>,
    index: usize,
    mut jobs: mpsc::Receiver<Job>,
    shutdown: &Shutdown,
    heartbeats: Arc<[AtomicU64]>,
) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().thread_stack_size(STACK).event_interval(31).max_blocking_threads(4).on_thread_park(
        {
            let shared = Arc::clone(shared);
            move || shared.rest(None)
        },
    );
    let runtime = match aligned(&mut builder) {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "event loop failed to start");
            shutdown.stop();
            return;
        }
    };
    runtime.block_on(async {
        let scope = Scope::new(shutdown.clone());
        scope.spawn("slots-heartbeat", heartbeat(Arc::clone(shared), index, heartbeats));
        loop {
            tokio::select! {
                () = shutdown.stopped() => break,
                job = jobs.recv() => match job {
                    None => break,
                    Some(Job::Task(name, task)) => {
                        scope.spawn(name, task);
                    }
                    Some(Job::Serve(stream, peer, shard)) => adopt(shared, &scope, index, stream, peer, shard),
                },
            }
        }
        for client in shared.clients().values() {
            client.mailbox.kill();
        }
        let deadline = tokio::time::Instant::now() + Duration::from_secs(2);
        while shared.connections.load(Ordering::Acquire) > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
    shared.rest(None);
}

fn adopt(
    shared: &Arc<Shared>,
    scope: &Scope,
    index: usize,
    stream: StdStream,
    peer: SocketAddr,
    shard: Arc<Shard>,
) {
    if shared.withdrawn.load(Ordering::Acquire) {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        return;
    }
    let stream = match TcpStream::from_std(stream) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(%peer, %error, "connection not served");
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            return;
        }
    };
    let _ = stream.set_nodelay(true);
    let local = stream.local_addr().map_or_else(|_| String::new(), |address| address.to_string());
    let shared = Arc::clone(shared);
    scope.spawn("slots-client", async move {
        connection::serve(Arc::clone(&shared), shard, Box::new(stream), peer.to_string(), local, index).await;
        shared.connections.fetch_sub(1, Ordering::AcqRel);
    });
}

async fn accept(
    shared: Arc<Shared>,
    shard: Arc<Shard>,
    listener: TcpListener,
    loops: Vec<mpsc::Sender<Job>>,
    turn: Arc<AtomicUsize>,
) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Most likely no free file descriptor: the pause gives clients time to close some.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let most = usize::try_from(shared.settings.number("maxclients")).unwrap_or(usize::MAX);
        if shared.connections.load(Ordering::Acquire) >= most {
            shared.stats.refused.inc();
            let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
            continue;
        }
        shared.connections.fetch_add(1, Ordering::AcqRel);
        let index = turn.fetch_add(1, Ordering::Relaxed) % loops.len();
        let dealt = match stream.into_std() {
            Ok(stream) => loops[index].send(Job::Serve(stream, peer, Arc::clone(&shard))).await.is_ok(),
            Err(_) => false,
        };
        if !dealt {
            shared.connections.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
