//! A node of the queue on a simulated host: the shipped driver and broker, and the parts of a node that they need.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::Scope;
use moim_journal::DurableSink;
use moim_queue::{Broker, BrokerOptions, BrokerParts, Reach};
use moim_replica::driver::Driver;
use moim_state::BoxFuture;
use tokio::runtime::Handle;

use super::Shared;
use crate::testbed::{KAFKA_PORT, Node, NodeParts, broker, host_named, name};
use crate::world::Process;

/// A broker, and the task scope of its connections.
#[derive(Clone)]
pub(super) struct BrokerHandle {
    broker: Arc<Broker>,
    scope: Scope,
}

/// Opens a stream to the broker of a host; returns the client's end.
pub(super) fn connect(shared: &Shared, from: usize, to: usize) -> io::Result<Box<dyn Socket>> {
    let node = shared.node(to).ok_or(io::ErrorKind::ConnectionRefused)?;
    let (mine, theirs) = shared.links.stream(from, to);
    let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(from).unwrap_or(0)));
    let service = node.service;
    let _context = node.handle.enter();
    service.scope.spawn("sim-connection", async move { service.broker.serve(theirs, peer).await });
    Ok(mine)
}

/// Connects brokers to each other.
struct PeerBrokers {
    shared: Arc<Shared>,
    from: usize,
}

impl Reach for PeerBrokers {
    fn reach(&self, host: String, _: u16) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
            let to = host_named(&host).ok_or(io::ErrorKind::NotFound)?;
            if self.shared.links.is_cut(self.from, to) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            connect(&self.shared, self.from, to)
        })
    }
}

/// Passes durability notifications of followed replicas to the driver, and of led replicas to the broker.
struct Sink {
    driver: Arc<Driver>,
    broker: Arc<dyn DurableSink>,
}

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        let led = self.driver.on_durable_following(advanced);
        if !led.is_empty() {
            self.broker.on_durable(&led);
        }
    }
}

fn options(host: usize) -> BrokerOptions {
    BrokerOptions {
        node_id: broker(host),
        cluster_id: "sim".to_owned(),
        advertise: Some((name(host), KAFKA_PORT)),
        event_loops: 1,
        auto_create_topics: false,
        offsets_partitions: 1,
        transaction_partitions: 2,
        group_initial_rebalance_delay_ms: 20,
        group_min_session_timeout_ms: 200,
        compaction_check_ms: 500,
        // Shorter than pauses of hosts and slow syncs: requests between brokers time out and are repeated, and the
        // first one takes effect later.
        peer_timeout_ms: 150,
        ..BrokerOptions::default()
    }
}

/// Starts the node of a host from its disk.
pub(super) async fn open(
    shared: Arc<Shared>,
    host: usize,
    process: Process,
    handle: Handle,
) -> io::Result<()> {
    let parts = NodeParts::new(&shared, host, &process);
    let broker = loop {
        let broker_parts = BrokerParts {
            store: Arc::new(process.store.clone()),
            repository: Arc::clone(&parts.repository),
            driver: Arc::clone(&parts.driver),
            clock: Arc::clone(&process.clock),
            metrics: Arc::new(Metrics::new()),
            shutdown: process.scope.shutdown().clone(),
        };
        match Broker::open(options(host), broker_parts).await {
            Ok(broker) => break broker,
            // The core is unreachable: a real node would wait for it earlier.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    broker.reach_peers_by(Arc::new(PeerBrokers { shared: Arc::clone(&shared), from: host }));
    let sink = Sink { driver: Arc::clone(&parts.driver), broker: broker.sink() };
    process.store.set_sink(Arc::new(sink));
    broker.run_here();
    parts.register(host, &process);
    let service = BrokerHandle { broker, scope: process.scope.clone() };
    shared.add_node(host, Node { service, driver: parts.driver, handle });
    Ok(())
}
