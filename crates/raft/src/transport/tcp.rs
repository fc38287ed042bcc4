//! The peer protocol: one TCP connection per peer for all groups, framed, checksummed, bounded.
//!
//! A dialler sends its identity and its intended peer, and proves its membership ([`hello`]); a peer of another
//! cluster or another format, and one without the proof, is refused before it can send anything else. After that,
//! frames: length, kind, call number, group, CRC32C of the payload, payload. Requests and replies of many groups are
//! interleaved; a reply carries its request's number. The listening side never calls.
//!
//! Bounds: a frame is at most [`MAX_FRAME`]; a connection has at most [`CALLS`] group requests and as many service
//! requests in flight in either direction; further callers wait for a slot within their own timeout. A broken
//! connection fails every call in flight on it, and the next call reconnects. So does a connection on which
//! [`GIVE_UP`] consecutive calls got no answer: a dead machine sends no reset. The limits on open connections, and
//! why strangers cannot take those of members, are in [`lanes`].

mod hello;
mod lanes;
mod visit;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_base::task::Scope;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::hello::{Guest, Hello, Standing};
pub use self::hello::{LocalPeer, PeerId};
use self::lanes::{Lanes, Place};
pub use self::visit::visit;
use super::service::{self, ServiceId};
use super::{BoxFuture, Router, Transport, TransportError};
use crate::types::{GroupId, Member, VoterId};

const HEAD: usize = 25;
const REQUEST: u8 = 0;
const REPLY: u8 = 1;
/// The maximum payload: the largest entry, a batch of others before it, and their headers.
const MAX_FRAME: usize = 8 << 20;
/// Payloads up to this size are copied behind their head, and as many frames behind each other: one packet, one
/// system call. Also the read size.
const COPY: usize = 16 << 10;
/// The maximum number of requests in flight per connection.
const CALLS: usize = 64;
/// The number of consecutive unanswered calls after which a connection is closed.
const GIVE_UP: u32 = 20;

struct Frame {
    kind: u8,
    call: u64,
    group: GroupId,
    payload: Bytes,
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn put_head(out: &mut BytesMut, frame: &Frame) -> io::Result<()> {
    out.put_u32_le(u32::try_from(frame.payload.len()).map_err(|_| bad("a frame is too long"))?);
    out.put_u8(frame.kind);
    out.put_u64_le(frame.call);
    out.put_u64_le(frame.group.0);
    out.put_u32_le(crc32c::crc32c(&frame.payload));
    Ok(())
}

/// Sends frames until the channel closes. Frames that are queued together leave in one write.
async fn write_frames(
    out: &mut (impl AsyncWrite + Unpin),
    frames: &mut mpsc::Receiver<Frame>,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    while let Some(first) = frames.recv().await {
        let mut next = Some(first);
        while let Some(frame) = next {
            put_head(&mut buffer, &frame)?;
            if frame.payload.len() <= COPY {
                buffer.put_slice(&frame.payload);
            } else {
                out.write_all_buf(&mut buffer.split().chain(frame.payload)).await?;
            }
            next = if buffer.len() < COPY { frames.try_recv().ok() } else { None };
        }
        if !buffer.is_empty() {
            out.write_all_buf(&mut buffer).await?;
        }
    }
    Ok(())
}

/// Sends one frame.
async fn write_frame(out: &mut (impl AsyncWrite + Unpin), frame: &Frame) -> io::Result<()> {
    let mut head = BytesMut::with_capacity(HEAD);
    put_head(&mut head, frame)?;
    out.write_all_buf(&mut head.chain(&frame.payload[..])).await
}

async fn read_frame(input: &mut (impl AsyncRead + Unpin), limit: usize) -> io::Result<Frame> {
    let mut head = [0; HEAD];
    input.read_exact(&mut head).await?;
    let mut head = &head[..];
    let len = usize::try_from(head.get_u32_le()).map_err(|_| bad("a frame is too long"))?;
    let (kind, call, group) = (head.get_u8(), head.get_u64_le(), GroupId(head.get_u64_le()));
    if len > limit {
        return Err(bad("a frame is too long"));
    }
    // Memory grows with received bytes, not with the announced length.
    let mut payload = Vec::with_capacity(len.min(64 << 10));
    input.take(len as u64).read_to_end(&mut payload).await?;
    if payload.len() != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if crc32c::crc32c(&payload) != head.get_u32_le() {
        return Err(bad("a frame is damaged"));
    }
    Ok(Frame { kind, call, group, payload: payload.into() })
}

/// The members that listen on one port: of any number of clusters, each with its own router, and one router for
/// visitors. Cheap to clone.
///
/// A process that is a member of several clusters (an application's groups are clusters of their own) has one port
/// for all of them: the dialler's hello names the cluster.
#[derive(Clone, Default)]
pub struct Doors {
    visitors: Router,
    members: Arc<RwLock<Vec<(LocalPeer, Router)>>>,
}

impl Doors {
    /// Without members; visitors are served by this router.
    pub fn new(visitors: Router) -> Self {
        Self { visitors, members: Arc::default() }
    }

    /// Adds `local` as a member that is reached here.
    pub fn open(&self, local: LocalPeer, router: Router) {
        self.members.write().unwrap_or_else(PoisonError::into_inner).push((local, router));
    }

    /// Removes a member.
    pub fn close(&self, id: PeerId) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let is_it = |local: &LocalPeer| {
            local.id().is_some_and(|other| (other.cluster, other.voter) == (id.cluster, id.voter))
        };
        members.retain(|(local, _)| !is_it(local));
    }

    /// The member of this cluster, and its router.
    fn find(&self, cluster: u128) -> (Option<PeerId>, Router) {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let found = members.iter().find(|(local, _)| local.id().is_some_and(|id| id.cluster == cluster));
        match (found, members.as_slice()) {
            (Some((local, router)), _) => (local.id(), router.clone()),
            // With only one member its identity is sent, so that the dialler can report the mismatch.
            (None, [(only, _)]) => (only.id(), self.visitors.clone()),
            (None, _) => (None, self.visitors.clone()),
        }
    }
}

/// Accepts peers and dispatches their requests to the router, until the scope's shutdown.
pub struct TcpServer {
    address: SocketAddr,
}

impl TcpServer {
    /// Listens on `address` for members of `local`'s cluster, and for visitors.
    pub async fn bind(
        address: SocketAddr,
        local: LocalPeer,
        router: Router,
        scope: &Scope,
    ) -> io::Result<Self> {
        let doors = Doors::new(router.clone());
        doors.open(local, router);
        Self::bind_shared(address, doors, scope).await
    }

    /// Listens on `address` for every member behind these doors.
    pub async fn bind_shared(address: SocketAddr, doors: Doors, scope: &Scope) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let (tasks, shutdown) = (scope.clone(), scope.shutdown().clone());
        let lanes = Arc::new(Lanes::default());
        scope.spawn("raft-accept", async move {
            let complaints = Arc::new(Complaints::default());
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = shutdown.stopped() => return,
                };
                match accepted {
                    Ok((stream, peer)) => {
                        // Here, not in the task: the order of the places is the order of arrival.
                        let place = lanes.lobby.enter();
                        let (doors, scope, lanes) = (doors.clone(), tasks.clone(), Arc::clone(&lanes));
                        let complaints = Arc::clone(&complaints);
                        tasks.spawn("raft-peer", async move {
                            if let Err(error) = take_in(stream, place, &doors, &lanes, &scope).await {
                                complaints.on_ended(peer, &error);
                            }
                        });
                    }
                    Err(error) => {
                        // Most likely out of file descriptors: the loop must not spin on it.
                        tracing::warn!(%error, "a peer could not be taken in");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
            }
        });
        Ok(Self { address })
    }

    /// The listen address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Logs bad connections, at most once per second: a stranger decides how often it connects.
#[derive(Default)]
struct Complaints {
    last: Mutex<Option<Instant>>,
}

impl Complaints {
    const PAUSE: Duration = Duration::from_secs(1);

    /// Ordinary disconnects are not logged as warnings; only protocol violations are.
    fn on_ended(&self, peer: SocketAddr, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::InvalidData => self.log(peer, error),
            _ => tracing::debug!(%peer, %error, "a peer's connection ended"),
        }
    }

    fn log(&self, peer: SocketAddr, why: &dyn std::fmt::Display) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Self::PAUSE) {
            *last = Some(Instant::now());
            tracing::warn!(%peer, %why, "a connection to the peer port was closed");
        }
    }
}

fn evicted() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "too many connections; this one was the oldest")
}

/// Reads a connection's hello and serves it according to what it proved.
async fn take_in(
    mut stream: TcpStream,
    mut place: Place,
    doors: &Doors,
    lanes: &Lanes,
    scope: &Scope,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (guest, router) = tokio::select! {
        biased;
        welcomed = hello::welcome(&mut stream, |cluster| doors.find(cluster)) => welcomed?,
        () = place.evicted() => return Err(evicted()),
    };
    drop(place);
    match guest.standing {
        Standing::Stream => router.take_stream(stream.into_std()?),
        Standing::Member => {
            let Ok(_place) = Arc::clone(&lanes.members).try_acquire_owned() else {
                return Err(bad("too many connections of members"));
            };
            serve(stream, guest, &router, scope).await
        }
        Standing::Visitor => {
            let mut place = lanes.visitors.enter();
            tokio::select! {
                biased;
                served = serve(stream, guest, &router, scope) => served,
                () = place.evicted() => Err(evicted()),
                () = tokio::time::sleep(lanes::VISIT) => Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
}

/// Aborts the reply writer task, however its connection ends.
struct Writer(JoinHandle<()>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves one peer's requests, answered as they complete.
async fn serve(stream: TcpStream, guest: Guest, router: &Router, scope: &Scope) -> io::Result<()> {
    let limit = if guest.standing == Standing::Visitor { visit::MAX_VISIT } else { MAX_FRAME };
    let (input, mut output) = stream.into_split();
    let mut input = BufReader::with_capacity(COPY, input);
    let (replies, mut outbox) = mpsc::channel::<Frame>(2 * CALLS);
    let _writer = Writer(scope.spawn("raft-replies", async move {
        if let Err(error) = write_frames(&mut output, &mut outbox).await {
            tracing::debug!(%error, "a reply could not be sent");
        }
    }));
    let (groups, services) = (Arc::new(Semaphore::new(CALLS)), Arc::new(Semaphore::new(CALLS)));
    let shutdown = scope.shutdown().clone();
    loop {
        let frame = tokio::select! {
            frame = read_frame(&mut input, limit) => frame?,
            () = shutdown.stopped() => return Ok(()),
        };
        if frame.kind != REQUEST {
            return Err(bad("a caller sent a reply"));
        }
        if !visit::is_allowed(guest.standing, frame.group) {
            return Err(bad("a visitor asked for what is the members'"));
        }
        let place = if ServiceId::of_group(frame.group).is_some() {
            let Ok(place) = Arc::clone(&services).try_acquire_owned() else {
                // Waiting here would delay Raft.
                let Frame { call, group, .. } = frame;
                let _ = replies.send(Frame { kind: REPLY, call, group, payload: service::busy() }).await;
                continue;
            };
            place
        } else {
            let Ok(place) = Arc::clone(&groups).acquire_owned().await else { return Ok(()) };
            place
        };
        let (router, replies) = (router.clone(), replies.clone());
        scope.spawn("raft-request", async move {
            let Frame { call, group, payload, .. } = frame;
            let payload = router.handle_from(guest.voter, group, payload).await;
            // The connection may be gone; then so is the caller.
            let _ = replies.send(Frame { kind: REPLY, call, group, payload }).await;
            drop(place);
        });
    }
}

/// The calls in flight on one connection.
#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, oneshot::Sender<Bytes>>,
    /// Calls that timed out since the last reply.
    unanswered: u32,
    /// Why there will be no more replies.
    broken: Option<TransportError>,
}

/// A connection to one peer.
struct Connection {
    outbox: mpsc::Sender<Frame>,
    shared: Arc<Shared>,
    groups: Semaphore,
    services: Semaphore,
}

#[derive(Default)]
struct Shared {
    calls: Mutex<Calls>,
    give_up: Notify,
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_reply(&self, reply: Frame) {
        let mut calls = self.calls();
        calls.unanswered = 0;
        // A caller that is gone has given up.
        if let Some(caller) = calls.waiting.remove(&reply.call) {
            let _ = caller.send(reply.payload);
        }
    }

    /// The waiters learn of it when their sender is dropped.
    fn on_broken(&self, why: TransportError) {
        let mut calls = self.calls();
        calls.broken = Some(why);
        calls.waiting.clear();
    }
}

/// Calls other nodes. Its connections run on the runtime on which it was created, for every caller.
pub struct TcpTransport {
    local: LocalPeer,
    scope: Scope,
    home: Handle,
    /// Keyed by the intended voter, too: another voter at the same address is another peer.
    peers: Mutex<HashMap<Member, Arc<Connection>>>,
    /// Address updates of voters. A group keeps using the address that a member had when it first contacted it.
    moved: RwLock<HashMap<VoterId, String>>,
    next_call: AtomicU64,
}

impl TcpTransport {
    /// A transport for `local`. Connections are made on demand. Needs a tokio runtime.
    pub fn new(local: LocalPeer, scope: Scope) -> Self {
        let home = Handle::current();
        Self {
            local,
            scope,
            home,
            peers: Mutex::default(),
            moved: RwLock::default(),
            next_call: AtomicU64::new(0),
        }
    }

    /// Overrides the address of a voter. If another voter listens there, the hello detects it.
    pub fn set_address(&self, voter: VoterId, address: &str) {
        let mut moved = self.moved.write().unwrap_or_else(PoisonError::into_inner);
        if moved.get(&voter).is_none_or(|known| known != address) {
            moved.insert(voter, address.to_owned());
        }
    }

    fn resolve(&self, to: &Member) -> Member {
        let moved = self.moved.read().unwrap_or_else(PoisonError::into_inner);
        let address = moved.get(&to.id).unwrap_or(&to.address).clone();
        Member { id: to.id, address }
    }

    /// The connection to a peer, possibly still being established.
    fn connection(&self, to: &Member) -> Arc<Connection> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = peers.get(to).filter(|open| open.shared.calls().broken.is_none()) {
            return Arc::clone(open);
        }
        let (outbox, inbox) = mpsc::channel(2 * CALLS);
        let shared = Arc::new(Shared::default());
        let connection = Arc::new(Connection {
            outbox,
            shared: Arc::clone(&shared),
            groups: Semaphore::new(CALLS),
            services: Semaphore::new(CALLS),
        });
        peers.retain(|_, other| other.shared.calls().broken.is_none());
        peers.insert(to.clone(), Arc::clone(&connection));
        let (local, to, shutdown) = (self.local.id(), to.clone(), self.scope.shutdown().clone());
        let _home = self.home.enter();
        self.scope.spawn("raft-connection", async move {
            let ended = tokio::select! {
                ended = run(&to, local, inbox, &shared) => ended,
                () = shared.give_up.notified() => TransportError::Broken(format!("{}: no answers", to.address)),
                () = shutdown.stopped() => TransportError::Broken("this node stops".to_owned()),
            };
            tracing::debug!(error = %ended, "a connection to a peer ended");
            shared.on_broken(ended);
        });
        connection
    }

    async fn exchange(&self, to: &Member, group: GroupId, payload: Bytes) -> Result<Bytes, TransportError> {
        let to = &self.resolve(to);
        let connection = self.connection(to);
        let shared = &connection.shared;
        let broken = || shared.calls().broken.clone().unwrap_or(TransportError::Broken(to.address.clone()));
        let is_service = ServiceId::of_group(group).is_some();
        let places = if is_service { &connection.services } else { &connection.groups };
        let _place = places.acquire().await.map_err(|_| broken())?;
        let call = self.next_call.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = oneshot::channel();
        {
            let mut calls = shared.calls();
            if let Some(why) = &calls.broken {
                return Err(why.clone());
            }
            calls.waiting.insert(call, sender);
        }
        let _under_way = UnderWay { shared, call };
        let frame = Frame { kind: REQUEST, call, group, payload };
        connection.outbox.send(frame).await.map_err(|_| broken())?;
        reply.await.map_err(|_| broken())
    }
}

/// Connects and carries frames both ways until one direction fails.
async fn run(
    to: &Member,
    local: Option<PeerId>,
    mut inbox: mpsc::Receiver<Frame>,
    shared: &Shared,
) -> TransportError {
    let address = to.address.as_str();
    let Some(local) = local else {
        return TransportError::Unreachable(format!("{address}: this node has not joined a cluster"));
    };
    let connect = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        hello::greet(&mut stream, Hello::to_member(local, to.id), local.secret).await?;
        Ok::<_, io::Error>(stream)
    };
    let connected = tokio::time::timeout(hello::HELLO_TIMEOUT, connect).await;
    let stream = match connected.unwrap_or(Err(io::ErrorKind::TimedOut.into())) {
        Ok(stream) => stream,
        Err(error) => return TransportError::Unreachable(format!("{address}: {error}")),
    };
    let (input, mut output) = stream.into_split();
    let mut input = BufReader::with_capacity(COPY, input);
    let send = write_frames(&mut output, &mut inbox);
    let receive = async {
        loop {
            let reply = read_frame(&mut input, MAX_FRAME).await?;
            if reply.kind != REPLY {
                return Err(bad("the listening side called"));
            }
            shared.on_reply(reply);
        }
    };
    let ended: io::Result<()> = tokio::select! {
        ended = send => ended,
        ended = receive => ended,
    };
    let why = ended.err().map_or("closed".to_owned(), |error| error.to_string());
    TransportError::Broken(format!("{address}: {why}"))
}

/// A raw stream to a member's stream handler ([`Router::serve_streams`]).
pub async fn open_stream(local: &LocalPeer, to: &Member) -> io::Result<TcpStream> {
    let local = local.id().ok_or_else(|| io::Error::other("this node has not joined a cluster"))?;
    let connect = async {
        let mut stream = TcpStream::connect(&to.address).await?;
        stream.set_nodelay(true)?;
        hello::greet(&mut stream, Hello::to_stream(local, to.id), local.secret).await?;
        Ok(stream)
    };
    tokio::time::timeout(hello::HELLO_TIMEOUT, connect).await.unwrap_or(Err(io::ErrorKind::TimedOut.into()))
}

/// Removes a call from the list, however its future ends.
struct UnderWay<'a> {
    shared: &'a Shared,
    call: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut calls = self.shared.calls();
        if calls.waiting.remove(&self.call).is_some() {
            calls.unanswered += 1;
            if calls.unanswered >= GIVE_UP {
                self.shared.give_up.notify_one();
            }
        }
    }
}

impl Transport for TcpTransport {
    fn call<'a>(
        &'a self,
        to: &'a Member,
        group: GroupId,
        request: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Bytes, TransportError>> {
        Box::pin(async move {
            if request.len() > MAX_FRAME {
                return Err(TransportError::Broken("a request is too long".to_owned()));
            }
            let exchange = self.exchange(to, group, request);
            tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(TransportError::TimedOut))
        })
    }
}

#[cfg(test)]
mod tests;
