//! The gateway: takes messages from clients, keeps them in the store before it says so, and relays them to the queue.
//!
//! It has no state of its own that matters: any gateway takes over any client, and clients whose gateway is gone are
//! adopted by another. Who relays for a client is decided by the store (the *attempt*, see [`crate::store`]); one that was
//! replaced notices at its next step.
//!
//! | file | owns |
//! |---|---|
//! | `gateway/outlet.rs` | the producer they share |
//! | `gateway/session.rs` | a connection: who it is, what it sends, what it is told |
//! | `gateway/relaying.rs` | a client's messages on their way into the queue |

mod outlet;
mod relaying;
mod session;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::error::KafkaError;
use tokio::net::TcpListener;

use moim_base::task::{Scope, Shutdown};
use moim_base::{Clock, SystemClock};

use crate::identity::Secret;
use crate::partition;
use crate::progress::Progress;
use crate::queue::QueueOptions;
use crate::store::{Store, StoreError, Taken};
use crate::tls::{ServerTls, TlsError};

use self::outlet::Outlet;
use self::relaying::{Handle, Relaying};

/// How a gateway works.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Where to listen; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Messages a client may have under way that are not acknowledged.
    pub window: u32,
    /// Memory for one client's messages on their way into the queue; above it the client is not read.
    pub client_bytes: usize,
    /// At most so many connections.
    pub max_connections: usize,
    /// A message that the queue does not report on for so long goes out again.
    pub report_timeout: Duration,
    /// Acknowledge what is in the queue, not what is in the store: for stores that can lose what they acknowledged.
    pub ack_after_queue: bool,
    /// Clients that nobody has served for so long are adopted.
    pub adopt_after: Duration,
    /// With what clients are spoken to in secret; none is in the clear.
    pub tls: Option<ServerTls>,
    /// What to do wrong, for tests of what puts it right.
    pub faults: Faults,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            window: 1_024,
            client_bytes: 4 << 20,
            max_connections: 10_000,
            report_timeout: Duration::from_secs(120),
            ack_after_queue: false,
            adopt_after: Duration::from_secs(5),
            tls: None,
            faults: Faults::default(),
        }
    }
}

/// Faults of a gateway, each once per client.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The queue is taken to have failed to store this message.
    pub fail_report_of: Option<u64>,
    /// The report on this message is lost.
    pub lose_report_of: Option<u64>,
    /// Room for messages in the producer; 0 for the usual.
    pub producer_messages: usize,
}

/// Why there is no gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The port.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
    /// The certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The queue's client.
    #[error("cannot make a producer: {0}")]
    Producer(#[from] KafkaError),
}

/// A running gateway.
pub struct Gateway {
    address: SocketAddr,
    shutdown: Shutdown,
}

/// What all connections share.
struct Shared {
    options: GatewayOptions,
    secret: Secret,
    store: Store,
    outlet: Outlet,
    progress: Progress,
    clock: Arc<dyn Clock>,
    scope: Scope,
    /// Who is relayed for here.
    relays: Mutex<HashMap<String, Handle>>,
}

impl Gateway {
    /// Listens and serves until `stop`.
    pub async fn start(
        options: GatewayOptions,
        queue: &QueueOptions,
        store: Store,
        secret: Secret,
        progress: Progress,
    ) -> Result<Self, GatewayError> {
        let cannot = |error| GatewayError::Listen(options.listen, error);
        let listener =
            moim_base::socket::listen(options.listen).and_then(TcpListener::from_std).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let mut config = queue.idempotent("gateway", options.report_timeout);
        if options.faults.producer_messages > 0 {
            config.set("queue.buffering.max.messages", options.faults.producer_messages.to_string());
        }
        let outlet = Outlet::open(config, options.faults)?;
        let shutdown = Shutdown::new();
        let shared = Arc::new(Shared {
            options,
            secret,
            store,
            outlet,
            progress,
            clock: Arc::new(SystemClock::new()),
            scope: Scope::new(shutdown.clone()),
            relays: Mutex::default(),
        });
        shared.scope.spawn("gateway-accept", accept(Arc::clone(&shared), listener));
        shared.scope.spawn("gateway-sweep", sweep(Arc::clone(&shared)));
        Ok(Self { address, shutdown })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it as a crash would: nothing is finished.
    pub fn stop(&self) {
        self.shutdown.stop();
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    let places = Arc::new(tokio::sync::Semaphore::new(shared.options.max_connections));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.scope.shutdown().stopped() => return,
        };
        let Ok((stream, peer)) = accepted else {
            // Out of descriptors, as a rule: it passes.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(%peer, "too many connections");
            continue;
        };
        let shared_too = Arc::clone(&shared);
        shared.scope.spawn("gateway-session", async move {
            let stopped = shared_too.scope.shutdown().clone();
            tokio::select! {
                () = session::run(shared_too, stream, peer) => {}
                () = stopped.stopped() => {}
            }
            drop(place);
        });
    }
}

/// Looks for clients whose messages nobody relays.
async fn sweep(shared: Arc<Shared>) {
    let every = (shared.options.adopt_after / 2).max(Duration::from_millis(100));
    let idle_ms = u64::try_from(shared.options.adopt_after.as_millis()).unwrap_or(u64::MAX);
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = shared.scope.shutdown().stopped() => return,
        }
        let Ok(clients) = shared.store.clients().await else { continue };
        for client in clients {
            if shared.is_relayed(&client) {
                continue;
            }
            match shared.store.adopt(&client, idle_ms).await {
                Ok(Taken::Yes { attempt, acked, stored }) => {
                    tracing::info!(client, acked, stored, "adopting a client's messages");
                    if let Err(error) = shared.relay(&client, attempt, acked, stored).await {
                        tracing::warn!(client, %error, "cannot adopt; trying again");
                    }
                }
                Ok(Taken::Busy | Taken::Stale { .. }) => {}
                Err(error) => tracing::debug!(client, %error, "cannot look after a client"),
            }
        }
    }
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.clock.monotonic_ms()
    }

    fn is_relayed(&self, client: &str) -> bool {
        let relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        relays.get(client).is_some_and(|handle| !handle.has_ended())
    }

    /// The partition of a client's messages: chosen when it is first seen, and kept for the life of its run. With the topic's
    /// number of partitions growing meanwhile, a choice made anew would put messages where they can overtake earlier ones.
    async fn partition_of(self: &Arc<Self>, client: &str) -> Result<i32, StoreError> {
        let shared = Arc::clone(self);
        let partitions = tokio::task::spawn_blocking(move || shared.outlet.partitions()).await;
        let partitions = partitions
            .map_err(|error| StoreError::Unavailable(error.to_string()))?
            .map_err(|error| StoreError::Unavailable(format!("no metadata of the queue: {error}")))?;
        self.store.pin(client, partition::of(client.as_bytes(), partitions), partitions).await
    }

    /// Relays for a client from now on, in place of whoever did here.
    async fn relay(
        self: &Arc<Self>,
        client: &str,
        attempt: u64,
        acked: u64,
        stored: u64,
    ) -> Result<Handle, StoreError> {
        let kept = self.store.kept(client, stored + 1, acked).await?;
        if kept.len() as u64 != acked.saturating_sub(stored) {
            let missing = stored + 1 + kept.len() as u64;
            return Err(StoreError::Strange(format!(
                "message {missing} of {acked} was acknowledged and is gone"
            )));
        }
        let partition = self.partition_of(client).await?;
        let handle = Relaying::start(Arc::clone(self), client, (attempt, partition), stored, kept);
        let mut relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        relays.retain(|_, handle| !handle.has_ended());
        relays.insert(client.to_owned(), handle.clone());
        Ok(handle)
    }
}
