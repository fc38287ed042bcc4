//! The connection of an etcd client: opened on demand, closed on ping timeout, and failed over to the next
//! server.
//!
//! One task, the connector, owns the connections. Invariants: at most one connection is offered at a time;
//! while a call or a watch is open, pings detect a silent server, so that no call and no watch hangs on it;
//! between two attempts at the same server there is a growing pause with jitter, so that many clients do not
//! reconnect at once.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::client::{Connection, SendRequest};
use moim_base::task::Scope;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::error::EtcdError;

/// Server addresses and timeouts of an etcd client.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// `HOST:PORT` of each server, tried in this order.
    pub endpoints: Vec<String>,
    /// Timeout of one connection attempt.
    pub connect_timeout: Duration,
    /// Timeout of a call, all attempts together.
    pub call_timeout: Duration,
    /// Ping interval while calls or watches are open. An etcd closes connections that ping more often than
    /// every five seconds.
    pub ping_interval: Duration,
    /// Ping timeout.
    pub ping_timeout: Duration,
}

impl EtcdOptions {
    /// Defaults, for servers at these addresses (`HOST:PORT`, optionally with `http://` or `etcd://`).
    pub fn new<I: IntoIterator<Item = S>, S: AsRef<str>>(endpoints: I) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(|endpoint| plain(endpoint.as_ref()).to_owned()).collect(),
            connect_timeout: Duration::from_secs(2),
            call_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_millis(5_500),
            ping_timeout: Duration::from_secs(3),
        }
    }
}

/// The address without scheme and trailing slash.
fn plain(endpoint: &str) -> &str {
    let address = endpoint.trim();
    let address = address.strip_prefix("http://").or(address.strip_prefix("etcd://")).unwrap_or(address);
    address.trim_end_matches('/')
}

/// How long an abandoned connection may complete its calls.
const DRAIN: Duration = Duration::from_secs(60);
/// Maximum number of draining connections.
const MAX_DRAINING: usize = 8;
/// Maximum pause between two rounds over all servers.
const MAX_PAUSE_MS: u64 = 1_000;
/// Flow-control window of a stream.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// An established connection.
#[derive(Clone)]
pub(crate) struct Link {
    pub(super) sender: SendRequest<Bytes>,
    /// Identifies the connection, for [`Channel::leave`].
    pub(super) generation: u64,
    /// `HOST:PORT`.
    pub(super) endpoint: Arc<str>,
    /// Number of calls in progress.
    calls: Arc<AtomicUsize>,
}

impl Link {
    /// Counts a call for as long as the guard lives.
    pub(super) fn count(&self) -> CallGuard {
        self.calls.fetch_add(1, Ordering::Relaxed);
        CallGuard(self.calls.clone())
    }
}

/// Guard of a call in progress: pings run while one exists.
pub(super) struct CallGuard(Arc<AtomicUsize>);

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone)]
enum State {
    Up(Link),
    Down {
        /// Number of failed rounds over all servers since the start.
        rounds: u64,
        /// The last failure.
        why: Arc<str>,
    },
}

enum ConnectorRequest {
    /// Connect to a server.
    Connect,
    /// Fail over from the server of this connection.
    Leave(u64),
}

/// A connection to any of the servers. Cheap to clone; the connections close with the last clone.
#[derive(Clone)]
pub struct Channel {
    state: watch::Receiver<State>,
    requests: mpsc::Sender<ConnectorRequest>,
    options: Arc<EtcdOptions>,
}

impl Channel {
    /// A channel whose connections live on the current runtime, under this scope. It connects on demand.
    pub fn new(options: EtcdOptions, scope: &Scope) -> Self {
        let options = Arc::new(options);
        let (publish, state) = watch::channel(State::Down { rounds: 0, why: "not connected yet".into() });
        let (requests, inbox) = mpsc::channel(16);
        let connector = Connector {
            options: options.clone(),
            publish,
            inbox,
            draining: FuturesUnordered::new(),
            next: 0,
            generation: 0,
            rounds: 0,
        };
        scope.spawn("etcd connector", connector.run());
        Self { state, requests, options }
    }

    /// Server addresses and timeouts.
    pub fn options(&self) -> &EtcdOptions {
        &self.options
    }

    /// Returns a connection, waiting for one until the deadline. With `impatient`, one failed round over all
    /// servers is an error.
    pub(crate) async fn link(&self, deadline: Instant, impatient: bool) -> Result<Link, EtcdError> {
        let mut state = self.state.clone();
        let mut first_round = None;
        loop {
            let why = match state.borrow_and_update().clone() {
                State::Up(link) => return Ok(link),
                State::Down { rounds, why } => {
                    if impatient && rounds > *first_round.get_or_insert(rounds) {
                        return Err(EtcdError::Unreachable(why.to_string()));
                    }
                    why
                }
            };
            // A full queue already holds a connect request.
            let _ = self.requests.try_send(ConnectorRequest::Connect);
            match timeout_at(deadline, state.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(EtcdError::Unreachable("etcd client is closed".to_owned())),
                Err(_) => return Err(EtcdError::Unreachable(why.to_string())),
            }
        }
    }

    /// Fails over from the server of this connection: new calls go to the next server, calls in progress may
    /// complete. With a single server there is no failover; when it is silent, the ping timeout closes its
    /// connection.
    pub(crate) fn leave(&self, link: &Link) {
        if self.options.endpoints.len() > 1 {
            let _ = self.requests.try_send(ConnectorRequest::Leave(link.generation));
        }
    }
}

type Live = Connection<TcpStream, Bytes>;
type Draining = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Reason for the end of a connection.
enum End {
    /// Connection error or ping timeout.
    Broken(String),
    /// A caller requested failover.
    Left,
    /// All handles are dropped.
    Unused,
}

struct Connector {
    options: Arc<EtcdOptions>,
    publish: watch::Sender<State>,
    inbox: mpsc::Receiver<ConnectorRequest>,
    draining: FuturesUnordered<Draining>,
    /// Index of the server to try next.
    next: usize,
    generation: u64,
    rounds: u64,
}

impl Connector {
    async fn run(mut self) {
        // Consecutive failures, over all servers.
        let mut failures: usize = 0;
        loop {
            if failures == 0 && !self.wait_for_request().await {
                return;
            }
            let endpoint = self.endpoint();
            let connecting = timeout(self.options.connect_timeout, connect(&endpoint));
            let why = match connecting.await.unwrap_or_else(|_| Err("connect timeout".to_owned())) {
                Ok((sender, connection)) => {
                    failures = 0;
                    self.generation += 1;
                    let calls = Arc::new(AtomicUsize::new(0));
                    let (generation, endpoint) = (self.generation, endpoint.clone());
                    let link = Link { sender, generation, endpoint, calls: calls.clone() };
                    self.publish.send_replace(State::Up(link));
                    match self.drive(connection, &calls).await {
                        End::Unused => return,
                        End::Left => "failover requested".to_owned(),
                        End::Broken(why) => why,
                    }
                }
                Err(why) => {
                    failures += 1;
                    why
                }
            };
            self.next += 1;
            let round_is_over = failures > 0 && failures.is_multiple_of(self.options.endpoints.len().max(1));
            self.rounds += u64::from(round_is_over);
            let why = format!("{endpoint}: {why}").into();
            self.publish.send_replace(State::Down { rounds: self.rounds, why });
            if round_is_over && !self.pause(failures).await {
                return;
            }
        }
    }

    fn endpoint(&self) -> Arc<str> {
        let count = self.options.endpoints.len().max(1);
        self.options.endpoints.get(self.next % count).map_or_else(|| "".into(), |one| one.as_str().into())
    }

    /// Returns true when a connection is requested, and false when all handles are dropped.
    async fn wait_for_request(&mut self) -> bool {
        loop {
            tokio::select! {
                wish = self.inbox.recv() => match wish {
                    Some(ConnectorRequest::Connect) => return true,
                    // Refers to a closed connection.
                    Some(ConnectorRequest::Leave(_)) => {}
                    None => return false,
                },
                Some(()) = self.draining.next(), if !self.draining.is_empty() => {}
            }
        }
    }

    /// Pauses after a failed round; false when all handles are dropped.
    async fn pause(&mut self, failures: usize) -> bool {
        let rounds = u32::try_from(failures / self.options.endpoints.len().max(1)).unwrap_or(u32::MAX);
        let longest = 25u64.saturating_mul(1 << rounds.min(10)).min(MAX_PAUSE_MS);
        let pause = Duration::from_millis(fastrand::u64(longest / 2..=longest));
        let until = Instant::now() + pause;
        loop {
            tokio::select! {
                wish = self.inbox.recv() => if wish.is_none() { return false },
                Some(()) = self.draining.next(), if !self.draining.is_empty() => {}
                () = tokio::time::sleep_until(until) => return true,
            }
        }
    }

    /// Drives a connection until it closes, fails over, or its ping times out.
    async fn drive(&mut self, mut connection: Live, calls: &AtomicUsize) -> End {
        let mut pings = connection.ping_pong();
        let (interval, patience) = (self.options.ping_interval, self.options.ping_timeout);
        let mut next_ping = Instant::now() + interval;
        let mut waiting_for_pong = false;
        loop {
            let pong = async {
                match &mut pings {
                    Some(pings) if waiting_for_pong => {
                        std::future::poll_fn(|context| pings.poll_pong(context)).await
                    }
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                ended = Pin::new(&mut connection) => {
                    return End::Broken(ended.err().map_or_else(|| "closed".to_owned(), |error| error.to_string()));
                }
                // A broken connection is detected above.
                _ = pong => waiting_for_pong = false,
                () = tokio::time::sleep_until(next_ping) => {
                    if waiting_for_pong {
                        return End::Broken("ping timeout".to_owned());
                    }
                    next_ping = Instant::now() + interval;
                    // Ping only with open calls: servers penalize pings on idle connections.
                    if calls.load(Ordering::Relaxed) > 0
                        && let Some(pings) = &mut pings
                        && pings.send_ping(h2::Ping::opaque()).is_ok()
                    {
                        waiting_for_pong = true;
                        next_ping = Instant::now() + patience;
                    }
                }
                wish = self.inbox.recv() => match wish {
                    Some(ConnectorRequest::Leave(generation)) if generation == self.generation => {
                        self.drain(connection);
                        return End::Left;
                    }
                    Some(ConnectorRequest::Leave(_) | ConnectorRequest::Connect) => {}
                    None => return End::Unused,
                },
                Some(()) = self.draining.next(), if !self.draining.is_empty() => {}
            }
        }
    }

    /// Lets the calls of an abandoned connection complete, up to [`DRAIN`].
    fn drain(&mut self, connection: Live) {
        if self.draining.len() < MAX_DRAINING {
            self.draining.push(Box::pin(async move {
                // When the connection closes, its calls get the error.
                let _ = timeout(DRAIN, connection).await;
            }));
        }
    }
}

async fn connect(endpoint: &str) -> Result<(SendRequest<Bytes>, Live), String> {
    let stream = TcpStream::connect(endpoint).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    h2::client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_push(false)
        .handshake(stream)
        .await
        .map_err(|error| error.to_string())
}
