//! The replication thread: the driver of this node's replicas, and its connections to the drivers of other nodes.
//!
//! It has its own runtime: bulk data must not delay Raft's timers on the control thread, and a follower must not wait
//! for the clients of an event loop. Connections use the peer port: after the hello has authenticated both ends as
//! members of one cluster, the driver owns the raw connection.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use moim_base::rest::{aligned, rest};
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, Clock};
use moim_coord::Coordinator;
use moim_raft::{LocalPeer, Member, Router, VoterId, open_stream};
use moim_replica::driver::DriverTuning;
use moim_replica::message::Sender;
use moim_replica::{BrokerEpoch, Dialler, DirectoryId, Driver, DriverParts};
use moim_slots::service::PEER_MAGIC;
use moim_state::BoxFuture;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::control::Control;
use crate::control::view::View;
use crate::data_dir::Identity;
use crate::exit::{Failure, Outcome};

/// Poll interval of the peer addresses in the node records.
const PEER_POLL: Duration = Duration::from_millis(200);

/// Timeout of the first bytes of a connection, which select its protocol.
const PREFIX_TIMEOUT: Duration = Duration::from_secs(5);

/// Acceptor of connections from the stores of other nodes; set once this node's store is recovered.
pub(crate) type StoreStreams = Arc<OnceLock<Box<dyn Fn(std::net::TcpStream) + Send + Sync>>>;

/// The driver and its thread.
pub(crate) struct Replication {
    /// The driver.
    pub(crate) driver: Arc<Driver>,
    /// Opens connections to other nodes.
    pub(crate) dialler: Arc<dyn Dialler>,
    /// Acceptor of store connections.
    pub(crate) store_streams: StoreStreams,
    /// Triggered when the thread fails.
    pub(crate) failed: Shutdown,
    thread: std::thread::JoinHandle<()>,
}

impl Replication {
    /// Starts the thread. No replica leads or follows before the node is registered.
    pub(crate) fn start(
        control: &Control,
        identity: &Identity,
        router: &Router,
        clock: Arc<dyn Clock>,
    ) -> Outcome<Self> {
        let shutdown = Shutdown::new();
        let peers = Arc::new(Peers { local: control.local.clone(), members: Mutex::default() });
        let dialler = Arc::clone(&peers) as Arc<dyn Dialler>;
        let store_streams = StoreStreams::default();
        let for_store = Arc::clone(&store_streams);
        let parts = DriverParts {
            node: BrokerId(identity.node_id),
            repository: Arc::clone(&control.repository),
            dialler: Arc::clone(&dialler),
            clock,
            scope: Scope::new(shutdown.clone()),
            tuning: DriverTuning::default(),
        };
        let local = LocalNode { node: BrokerId(identity.node_id), directory: DirectoryId(identity.voter) };
        let (coordinator, epochs, router) =
            (control.coordinator.clone(), control.broker_epochs(), router.clone());
        let (started, ready) = mpsc::sync_channel(1);
        let failure = |error| Failure::error(format!("cannot start the replication thread: {error}"));
        let thread = std::thread::Builder::new().name("moim-replica".to_owned()).spawn(move || {
            let runtime = match aligned(tokio::runtime::Builder::new_current_thread().enable_all()) {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(error))),
            };
            runtime.block_on(async move {
                let (scope, stop) = (parts.scope.clone(), parts.scope.shutdown().clone());
                let driver = Driver::start(parts);
                accept_streams(&router, &driver, for_store, &scope);
                scope.spawn(
                    "replica-peers",
                    follow_peers(coordinator, Arc::clone(&driver), peers, local.node),
                );
                scope.spawn("replica-runs", follow_broker_epochs(epochs, Arc::clone(&driver), local));
                // The receiver waits below.
                let _ = started.send(Ok(driver));
                stop.stopped().await;
            });
        });
        let thread = thread.map_err(failure)?;
        let driver = ready.recv().map_err(|error| Failure::error(error.to_string()))?.map_err(failure)?;
        Ok(Self { driver, dialler, store_streams, failed: shutdown, thread })
    }

    /// Ends the thread. Blocks.
    pub(crate) fn stop(self) {
        self.failed.stop();
        if self.thread.join().is_err() {
            tracing::error!("replication thread panicked");
        }
    }
}

/// Node id and directory id of this node.
#[derive(Clone, Copy)]
struct LocalNode {
    node: BrokerId,
    directory: DirectoryId,
}

fn accept_streams(router: &Router, driver: &Arc<Driver>, store: StoreStreams, scope: &Scope) {
    let (driver, home, scope) = (Arc::clone(driver), tokio::runtime::Handle::current(), scope.clone());
    router.serve_streams(move |stream| {
        let _home = home.enter();
        let (driver, store) = (Arc::clone(&driver), Arc::clone(&store));
        match TcpStream::from_std(stream) {
            Ok(stream) => {
                scope.spawn("replica-stream", async move {
                    if let Err(error) = dispatch(stream, &driver, &store).await {
                        tracing::debug!(%error, "replication connection dropped");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, "replication connection not accepted"),
        }
    });
}

/// Passes a connection to the store or to the driver, by its first bytes.
async fn dispatch(stream: TcpStream, driver: &Driver, store: &StoreStreams) -> io::Result<()> {
    let is_store = tokio::time::timeout(PREFIX_TIMEOUT, has_store_prefix(&stream)).await;
    if is_store.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
        if let Some(take) = store.get() {
            take(stream.into_std()?);
        }
    } else {
        driver.accept(Box::new(stream));
    }
    Ok(())
}

/// True if the first bytes are [`PEER_MAGIC`]. Peeks: the bytes stay in the socket.
async fn has_store_prefix(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0; PEER_MAGIC.len()];
    loop {
        match stream.peek(&mut first).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len if first[..len] != PEER_MAGIC[..len] => return Ok(false),
            len if len == first.len() => return Ok(true),
            // A part of the prefix arrived.
            _ => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

/// Passes the broker epoch of each registration to the driver.
async fn follow_broker_epochs(
    mut epochs: watch::Receiver<Option<i64>>,
    driver: Arc<Driver>,
    local: LocalNode,
) {
    loop {
        if let Some(run) = *epochs.borrow_and_update() {
            driver.set_run(Sender { node: local.node, epoch: BrokerEpoch(run), directory: local.directory });
        }
        if epochs.changed().await.is_err() {
            return;
        }
    }
}

/// Follows the node records: ids and addresses of the other nodes.
async fn follow_peers(coordinator: Coordinator, driver: Arc<Driver>, peers: Arc<Peers>, local: BrokerId) {
    loop {
        let view = View::of(&coordinator);
        let known = view.nodes.iter().filter(|node| node.voter != 0 && !node.peer.is_empty());
        let others = known.filter(|node| node.node_id != local.0);
        let members: HashMap<BrokerId, Member> = others
            .map(|node| {
                let member = Member { id: VoterId(node.voter), address: node.peer.clone() };
                (BrokerId(node.node_id), member)
            })
            .collect();
        if peers.set(members.clone()) {
            driver.set_peers(&members.into_keys().collect::<Vec<_>>());
        }
        rest(PEER_POLL).await;
    }
}

/// Addresses of the other nodes.
struct Peers {
    local: LocalPeer,
    members: Mutex<HashMap<BrokerId, Member>>,
}

impl Peers {
    /// Replaces the members. Returns true if they changed.
    fn set(&self, members: HashMap<BrokerId, Member>) -> bool {
        let mut known = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let new = *known != members;
        *known = members;
        new
    }

    fn member(&self, node: BrokerId) -> Option<Member> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner).get(&node).cloned()
    }
}

impl Dialler for Peers {
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            let member = self.member(node).ok_or(io::ErrorKind::AddrNotAvailable)?;
            let stream = open_stream(&self.local, &member).await?;
            Ok(Box::new(stream) as Box<dyn Socket>)
        })
    }
}
