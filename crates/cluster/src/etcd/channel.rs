//! Connections to one of several servers: made when somebody needs one, given up when it is silent, and
//! moved to the next server when this one cannot help.
//!
//! One task, the connector, owns the connections. Invariants: at most one is offered at a time; a silent
//! server is noticed while anybody waits for it, by pings, so that no call and no watch hangs on it; between
//! two tries of the same server there is a pause that grows, with jitter, so that many clients do not come
//! back as one.

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

/// How a client finds and keeps its servers.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// `HOST:PORT` of each server, tried in this order.
    pub endpoints: Vec<String>,
    /// How long one try to connect may take.
    pub connect_timeout: Duration,
    /// How long a call may take, all tries together.
    pub call_timeout: Duration,
    /// While calls or watches are open, how often a silent server is asked whether it is there. An etcd
    /// closes connections that ask more often than every five seconds.
    pub ping_interval: Duration,
    /// How long it may take to say so.
    pub ping_timeout: Duration,
}

impl EtcdOptions {
    /// Defaults, for servers at these addresses (`HOST:PORT`, or with `http://` or `etcd://` before it).
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

/// The address without scheme and slash.
fn plain(endpoint: &str) -> &str {
    let address = endpoint.trim();
    let address = address.strip_prefix("http://").or(address.strip_prefix("etcd://")).unwrap_or(address);
    address.trim_end_matches('/')
}

/// How long a server that is left may go on with the calls it has.
const DRAIN: Duration = Duration::from_secs(60);
/// How many servers may be on their way out.
const MAX_DRAINING: usize = 8;
/// The longest pause between two rounds over all servers.
const MAX_PAUSE_MS: u64 = 1_000;
/// Room for what a server may send before the caller has read it.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;

/// A connection that can be used.
#[derive(Clone)]
pub(crate) struct Link {
    pub(super) sender: SendRequest<Bytes>,
    /// Tells connections apart, for [`Channel::leave`].
    pub(super) generation: u64,
    /// `HOST:PORT`.
    pub(super) endpoint: Arc<str>,
    /// Calls under way.
    calls: Arc<AtomicUsize>,
}

impl Link {
    /// Counts a call for as long as the result lives.
    pub(super) fn count(&self) -> Counted {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Counted(self.calls.clone())
    }
}

/// A call under way: its server is asked whether it is there.
pub(super) struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone)]
enum State {
    Up(Link),
    Down {
        /// How many rounds over all servers have failed since the start.
        rounds: u64,
        /// The last failure.
        why: Arc<str>,
    },
}

enum Wish {
    /// A connection.
    Connect,
    /// Another server than the one of this connection.
    Leave(u64),
}

/// A way to whichever server answers. Cheap to clone; the connections end with the last clone.
#[derive(Clone)]
pub struct Channel {
    state: watch::Receiver<State>,
    wishes: mpsc::Sender<Wish>,
    options: Arc<EtcdOptions>,
}

impl Channel {
    /// A channel whose connections live on the current runtime, under this scope. Nothing is connected yet.
    pub fn new(options: EtcdOptions, scope: &Scope) -> Self {
        let options = Arc::new(options);
        let (publish, state) = watch::channel(State::Down { rounds: 0, why: "not connected yet".into() });
        let (wishes, inbox) = mpsc::channel(16);
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
        Self { state, wishes, options }
    }

    /// How it finds and keeps its servers.
    pub fn options(&self) -> &EtcdOptions {
        &self.options
    }

    /// A connection, waiting for one until the deadline. With `impatient` one round over all servers is
    /// enough to give up.
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
            // Full means that the wish is known.
            let _ = self.wishes.try_send(Wish::Connect);
            match timeout_at(deadline, state.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(EtcdError::Unreachable("the client is closed".to_owned())),
                Err(_) => return Err(EtcdError::Unreachable(why.to_string())),
            }
        }
    }

    /// The server of this connection cannot help: calls from now on go to the next one, calls under way may
    /// go on. The only server is not left; when it is silent, its connection ends by itself.
    pub(crate) fn leave(&self, link: &Link) {
        if self.options.endpoints.len() > 1 {
            let _ = self.wishes.try_send(Wish::Leave(link.generation));
        }
    }
}

type Live = Connection<TcpStream, Bytes>;
type Draining = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How a connection came to its end.
enum End {
    /// It broke, or was silent.
    Broken(String),
    /// Somebody asked for another server.
    Left,
    /// Nobody has a handle any more.
    Unused,
}

struct Connector {
    options: Arc<EtcdOptions>,
    publish: watch::Sender<State>,
    inbox: mpsc::Receiver<Wish>,
    draining: FuturesUnordered<Draining>,
    /// The server to try next.
    next: usize,
    generation: u64,
    rounds: u64,
}

impl Connector {
    async fn run(mut self) {
        // In a row, over all servers.
        let mut failures: usize = 0;
        loop {
            if failures == 0 && !self.wait_for_wish().await {
                return;
            }
            let endpoint = self.endpoint();
            let connecting = timeout(self.options.connect_timeout, connect(&endpoint));
            let why = match connecting.await.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
                Ok((sender, connection)) => {
                    failures = 0;
                    self.generation += 1;
                    let calls = Arc::new(AtomicUsize::new(0));
                    let (generation, endpoint) = (self.generation, endpoint.clone());
                    let link = Link { sender, generation, endpoint, calls: calls.clone() };
                    self.publish.send_replace(State::Up(link));
                    match self.keep(connection, &calls).await {
                        End::Unused => return,
                        End::Left => "another server was asked for".to_owned(),
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

    /// Returns when a connection is wanted, or false when nobody can want one any more.
    async fn wait_for_wish(&mut self) -> bool {
        loop {
            tokio::select! {
                wish = self.inbox.recv() => match wish {
                    Some(Wish::Connect) => return true,
                    // Of a connection that is gone.
                    Some(Wish::Leave(_)) => {}
                    None => return false,
                },
                Some(()) = self.draining.next(), if !self.draining.is_empty() => {}
            }
        }
    }

    /// Lets time pass after a failed round; false when nobody waits any more.
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

    /// Drives a connection until it ends, is left, or is silent.
    async fn keep(&mut self, mut connection: Live, calls: &AtomicUsize) -> End {
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
                // A broken connection shows above.
                _ = pong => waiting_for_pong = false,
                () = tokio::time::sleep_until(next_ping) => {
                    if waiting_for_pong {
                        return End::Broken("the server is silent".to_owned());
                    }
                    next_ping = Instant::now() + interval;
                    // Asking without need is what servers punish.
                    if calls.load(Ordering::Relaxed) > 0
                        && let Some(pings) = &mut pings
                        && pings.send_ping(h2::Ping::opaque()).is_ok()
                    {
                        waiting_for_pong = true;
                        next_ping = Instant::now() + patience;
                    }
                }
                wish = self.inbox.recv() => match wish {
                    Some(Wish::Leave(generation)) if generation == self.generation => {
                        self.drain(connection);
                        return End::Left;
                    }
                    Some(Wish::Leave(_) | Wish::Connect) => {}
                    None => return End::Unused,
                },
                Some(()) = self.draining.next(), if !self.draining.is_empty() => {}
            }
        }
    }

    /// Lets the calls of a connection go on for a while.
    fn drain(&mut self, connection: Live) {
        if self.draining.len() < MAX_DRAINING {
            self.draining.push(Box::pin(async move {
                // However it ends, its calls are told.
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
