//! The gateway: accepts messages from clients, persists them in the store before it acknowledges them, and relays
//! them to the queue.
//!
//! A gateway is stateless: any gateway takes over any client, and the clients of a failed gateway are adopted by
//! another. The store decides which gateway relays for a client (the *attempt*, see [`crate::store`]); a fenced
//! gateway notices at its next store call.
//!
//! | file | owns |
//! |---|---|
//! | `gateway/producer.rs` | the shared producer |
//! | `gateway/session.rs` | a connection: authentication, messages, acknowledgements |
//! | `gateway/relay_task.rs` | the relay of one client's messages to the queue |

mod producer;
mod relay_task;
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
use crate::store::{Store, StoreError, TakeOver};
use crate::tls::{ServerTls, TlsError};

use self::producer::SharedProducer;
use self::relay_task::{RelayHandle, RelayTask};

/// Settings of a gateway.
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Listen address; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Maximum number of unacknowledged messages per client.
    pub window: u32,
    /// Memory limit for one client's messages on their way to the queue; above it the client is not read.
    pub client_bytes: usize,
    /// Maximum number of connections.
    pub max_connections: usize,
    /// A message without a delivery report for this long is resent.
    pub report_timeout: Duration,
    /// Acknowledge messages once they are in the queue instead of the store: for stores that can lose acknowledged
    /// writes.
    pub ack_after_queue: bool,
    /// Clients that no gateway has served for this long are adopted.
    pub adopt_after: Duration,
    /// TLS of client connections; plain text if none.
    pub tls: Option<ServerTls>,
    /// Injected faults, for tests of the recovery.
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

/// Injected faults of a gateway, each once per client.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The delivery report of this message is turned into a failure.
    pub fail_report_of: Option<u64>,
    /// The delivery report of this message is dropped.
    pub lose_report_of: Option<u64>,
    /// Message capacity of the producer; 0 for the default.
    pub producer_messages: usize,
}

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The listen address cannot be bound.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
    /// The TLS certificate or key is unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The Kafka producer cannot be created.
    #[error("cannot create a Kafka producer: {0}")]
    Producer(#[from] KafkaError),
}

/// A running gateway.
pub struct Gateway {
    address: SocketAddr,
    shutdown: Shutdown,
}

/// State shared by all connections.
struct Shared {
    options: GatewayOptions,
    secret: Secret,
    store: Store,
    producer: SharedProducer,
    progress: Progress,
    clock: Arc<dyn Clock>,
    scope: Scope,
    /// Relay tasks of this gateway, by client.
    relays: Mutex<HashMap<String, RelayHandle>>,
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
        let producer = SharedProducer::open(config, options.faults)?;
        let shutdown = Shutdown::new();
        let shared = Arc::new(Shared {
            options,
            secret,
            store,
            producer,
            progress,
            clock: Arc::new(SystemClock::new()),
            scope: Scope::new(shutdown.clone()),
            relays: Mutex::default(),
        });
        shared.scope.spawn("gateway-accept", accept(Arc::clone(&shared), listener));
        shared.scope.spawn("gateway-sweep", sweep(Arc::clone(&shared)));
        Ok(Self { address, shutdown })
    }

    /// The address that clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the gateway as a crash would: work in flight is not finished.
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
    let permits = Arc::new(tokio::sync::Semaphore::new(shared.options.max_connections));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.scope.shutdown().stopped() => return,
        };
        let Ok((stream, peer)) = accepted else {
            // Usually out of file descriptors, which is transient.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            tracing::warn!(%peer, "connection refused: max_connections reached");
            continue;
        };
        let shared_too = Arc::clone(&shared);
        shared.scope.spawn("gateway-session", async move {
            let stopped = shared_too.scope.shutdown().clone();
            tokio::select! {
                () = session::run(shared_too, stream, peer) => {}
                () = stopped.stopped() => {}
            }
            drop(permit);
        });
    }
}

/// Adopts clients whose messages no gateway relays.
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
                Ok(TakeOver::Granted { attempt, acked, stored }) => {
                    tracing::info!(client, acked, stored, "client adopted");
                    if let Err(error) = shared.relay(&client, attempt, acked, stored).await {
                        tracing::warn!(client, %error, "client adoption failed; retrying");
                    }
                }
                Ok(TakeOver::Busy | TakeOver::Stale { .. }) => {}
                Err(error) => tracing::debug!(client, %error, "client adoption check failed"),
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

    /// The partition of a client's messages: chosen at first contact and kept for the rest of the run. If it were
    /// recomputed after the topic's partition count grew, messages could overtake earlier ones in another partition.
    async fn partition_of(self: &Arc<Self>, client: &str) -> Result<i32, StoreError> {
        let shared = Arc::clone(self);
        let partitions = tokio::task::spawn_blocking(move || shared.producer.partitions()).await;
        let partitions = partitions
            .map_err(|error| StoreError::Unavailable(error.to_string()))?
            .map_err(|error| StoreError::Unavailable(format!("topic metadata fetch failed: {error}")))?;
        self.store.pin(client, partition::of(client.as_bytes(), partitions), partitions).await
    }

    /// Starts the relay of a client and replaces an earlier relay of the client in this gateway.
    async fn relay(
        self: &Arc<Self>,
        client: &str,
        attempt: u64,
        acked: u64,
        stored: u64,
    ) -> Result<RelayHandle, StoreError> {
        let kept = self.store.load_messages(client, stored + 1, acked).await?;
        if kept.len() as u64 != acked.saturating_sub(stored) {
            let missing = stored + 1 + kept.len() as u64;
            return Err(StoreError::UnexpectedReply(format!(
                "message {missing} of {acked} was acknowledged and is gone"
            )));
        }
        let partition = self.partition_of(client).await?;
        let handle = RelayTask::start(Arc::clone(self), client, (attempt, partition), stored, kept);
        let mut relays = self.relays.lock().unwrap_or_else(PoisonError::into_inner);
        relays.retain(|_, handle| !handle.has_ended());
        relays.insert(client.to_owned(), handle.clone());
        Ok(handle)
    }
}
