//! The event-loop threads: they accept connections and serve them.
//!
//! The first loop accepts and distributes connections round-robin, because a listener shared by several threads wakes
//! them all for one connection.

use std::io;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use moim_base::rest::{aligned, rest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::broker::Broker;
use crate::connection;
use crate::loops::Wake;

/// Heartbeat interval of an event loop.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Maximum number of accepted connections that wait for their loop.
const BACKLOG: usize = 1024;

/// Maximum number of concurrent blocking operations (large compressed batches, DeleteRecords) per loop.
const OFF_LOOP: usize = 2;

/// The running event loops of a broker.
pub struct Server {
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
    broker: Arc<Broker>,
}

impl Server {
    /// Binds the listen address and starts the loops.
    pub fn start(broker: Arc<Broker>) -> io::Result<Self> {
        let listener = moim_base::socket::listen(broker.options.listen)?;
        let address = listener.local_addr()?;
        let _ = broker.address.set(address);
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for _ in 0..broker.loops.count() {
            let (sender, receiver) = mpsc::channel(BACKLOG);
            senders.push(sender);
            receivers.push(receiver);
        }
        let mut listener = Some((listener, senders));
        let mut threads = Vec::new();
        for (index, receiver) in receivers.into_iter().enumerate() {
            let broker = Arc::clone(&broker);
            let listener = listener.take();
            let thread = std::thread::Builder::new()
                .name(format!("loop-{index}"))
                .spawn(move || run_loop(&broker, index, receiver, listener))?;
            threads.push(thread);
        }
        Ok(Self { address, threads, broker })
    }

    /// The bound listen address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until every loop has ended; signal the shutdown first.
    pub fn join(self) {
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("event loop panicked");
            }
        }
        self.broker.close();
    }
}

type Dealer = (std::net::TcpListener, Vec<mpsc::Sender<(StdStream, SocketAddr)>>);

fn run_loop(
    broker: &Arc<Broker>,
    index: usize,
    mut incoming: mpsc::Receiver<(StdStream, SocketAddr)>,
    listener: Option<Dealer>,
) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = match aligned(builder.enable_all().event_interval(31).max_blocking_threads(OFF_LOOP)) {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "event loop start failed");
            broker.shutdown.stop();
            return;
        }
    };
    broker.loops.enter(index);
    runtime.block_on(async {
        let scope = broker.scope.clone();
        scope.spawn("drain", drain(Arc::clone(broker), index));
        scope.spawn("beat", heartbeat(Arc::clone(broker), index));
        if let Some((listener, senders)) = listener {
            scope.spawn("accept", accept(Arc::clone(broker), listener, senders));
        }
        if index == 0 {
            crate::housekeeping::spawn(broker);
        }
        loop {
            tokio::select! {
                () = broker.shutdown.stopped() => break,
                next = incoming.recv() => {
                    let Some((stream, peer)) = next else { break };
                    adopt(broker, index, stream, peer);
                }
            }
        }
        // Let connections send the responses of committed requests; uncommitted requests get no response, which
        // clients treat as a timeout.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
        while broker.connections.load(Ordering::Acquire) > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
}

fn adopt(broker: &Arc<Broker>, index: usize, stream: StdStream, peer: SocketAddr) {
    let stream = match TcpStream::from_std(stream) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(%peer, %error, "connection setup failed");
            broker.connections.fetch_sub(1, Ordering::AcqRel);
            return;
        }
    };
    let _ = stream.set_nodelay(true);
    let wake = Wake::new(index, broker.next_connection.fetch_add(1, Ordering::Relaxed));
    let broker = Arc::clone(broker);
    let scope = broker.scope.clone();
    scope.spawn("connection", async move {
        connection::serve(Arc::clone(&broker), Box::new(stream), wake, peer).await;
        broker.connections.fetch_sub(1, Ordering::AcqRel);
    });
}

/// Handles the mailbox of a loop: durability notifications from the disk thread and wake-ups from other loops.
pub(crate) async fn drain(broker: Arc<Broker>, index: usize) {
    let mut durable = Vec::new();
    loop {
        broker.loops.receive(index, &mut durable).await;
        for partition in broker.topics.by_tags(&durable) {
            partition.on_durable();
        }
        durable.clear();
    }
}

async fn accept(
    broker: Arc<Broker>,
    listener: std::net::TcpListener,
    senders: Vec<mpsc::Sender<(StdStream, SocketAddr)>>,
) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "listener setup failed");
            broker.shutdown.stop();
            return;
        }
    };
    let mut turn = 0;
    loop {
        let accepted = tokio::select! {
            () = broker.shutdown.stopped() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Most likely out of file descriptors: the pause lets other connections close some.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if broker.connections.load(Ordering::Acquire) >= broker.options.max_connections {
            broker.metrics.refused_connections.inc();
            tracing::warn!(
                %peer, limit = broker.options.max_connections,
                "connection refused: connection limit reached"
            );
            continue;
        }
        broker.connections.fetch_add(1, Ordering::AcqRel);
        turn = (turn + 1) % senders.len();
        let dealt = match stream.into_std() {
            Ok(stream) => senders[turn].send((stream, peer)).await.is_ok(),
            Err(_) => false,
        };
        if !dealt {
            broker.connections.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Records the heartbeat of a loop periodically.
async fn heartbeat(broker: Arc<Broker>, index: usize) {
    while !broker.shutdown.is_stopped() {
        broker.loops.heartbeat(index, broker.clock.monotonic_ms());
        rest(HEARTBEAT).await;
    }
}
