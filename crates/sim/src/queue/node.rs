//! A node of the queue on a machine: the shipped driver and broker, and the little of a node that they need.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::Scope;
use moim_cluster::BoxFuture;
use moim_journal::DurableSink;
use moim_queue::{Broker, BrokerOptions, BrokerParts, Reach};
use moim_replica::driver::Driver;
use tokio::runtime::Handle;

use super::Shared;
use crate::site::{Ground, KAFKA_PORT, Node, broker, host_named, name};
use crate::world::Process;

/// A broker, and where its connections live.
#[derive(Clone)]
pub(super) struct Serves {
    broker: Arc<Broker>,
    scope: Scope,
}

/// Opens a stream to the broker of a machine; the end of whoever asked.
pub(super) fn connect(shared: &Shared, from: usize, to: usize) -> io::Result<Box<dyn Socket>> {
    let node = shared.node(to).ok_or(io::ErrorKind::ConnectionRefused)?;
    let (mine, theirs) = shared.wires.stream(from, to);
    let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(from).unwrap_or(0)));
    let serves = node.serves;
    let _there = node.handle.enter();
    serves.scope.spawn("sim-connection", async move { serves.broker.serve(theirs, peer).await });
    Ok(mine)
}

/// How brokers reach each other.
struct Others {
    shared: Arc<Shared>,
    from: usize,
}

impl Reach for Others {
    fn reach(&self, host: String, _: u16) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
            let to = host_named(&host).ok_or(io::ErrorKind::NotFound)?;
            if self.shared.wires.is_cut(self.from, to) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            connect(&self.shared, self.from, to)
        })
    }
}

/// The disk has something: copies that follow are the driver's, the others the broker's.
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
        // Shorter than machines stand still and disks are slow: brokers give up on each other, ask again, and what they
        // asked first is done later.
        peer_timeout_ms: 150,
        ..BrokerOptions::default()
    }
}

/// Starts the node of a machine on what its disk holds.
pub(super) async fn open(
    shared: Arc<Shared>,
    host: usize,
    process: Process,
    handle: Handle,
) -> io::Result<()> {
    let ground = Ground::new(&shared, host, &process);
    let broker = loop {
        let parts = BrokerParts {
            store: Arc::new(process.store.clone()),
            repository: Arc::clone(&ground.repository),
            driver: Arc::clone(&ground.driver),
            clock: Arc::clone(&process.clock),
            metrics: Arc::new(Metrics::new()),
            shutdown: process.scope.shutdown().clone(),
        };
        match Broker::open(options(host), parts).await {
            Ok(broker) => break broker,
            // The core is not reached: a node would wait for it before it gets here.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    broker.reach_peers_by(Arc::new(Others { shared: Arc::clone(&shared), from: host }));
    let sink = Sink { driver: Arc::clone(&ground.driver), broker: broker.sink() };
    process.store.set_sink(Arc::new(sink));
    broker.run_here();
    ground.enlist(host, &process);
    let serves = Serves { broker, scope: process.scope.clone() };
    shared.arrive(host, Node { serves, driver: ground.driver, handle });
    Ok(())
}
