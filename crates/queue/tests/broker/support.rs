//! Starts a broker on a free port and sends requests to it.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, SystemClock};
use moim_journal::{RealDisk, Store, StoreOptions};
use moim_queue::{Broker, BrokerOptions, BrokerParts, Server};
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, LogEnds, Peers};
use moim_replica::controller::{ControllerTuning, Settings};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::message::Sender;
use moim_replica::{BrokerEpoch, DirectoryId, PartitionId, keys};
use moim_state::nodes::{MemberRecord, NodeRecord, member_key, node_key};
use moim_state::{BoxFuture, MemoryRepository, StateRepository, Txn, TxnOutcome};
use moim_wire_kafka::messages::{
    PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData, create_topics,
};
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{
    Message, Records, RequestHeader, compression::Compression, decode_response, encode_request,
};

/// A running broker; stops when dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    shutdown: Shutdown,
    server: Option<Server>,
    replicating: Option<JoinHandle<()>>,
    store: Arc<Store>,
    pub(crate) broker: Arc<Broker>,
    /// Kept if the broker is to be started again.
    folder: Option<tempfile::TempDir>,
    /// The controller of a single-broker cluster.
    _controller: Option<ControllerThread>,
}

pub(crate) fn start() -> Running {
    start_with(|_| {})
}

pub(crate) fn start_with(change: impl FnOnce(&mut BrokerOptions)) -> Running {
    start_on(StoreOptions::default(), change)
}

pub(crate) fn start_on(store: StoreOptions, change: impl FnOnce(&mut BrokerOptions)) -> Running {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
    start_alone(folder, repository, store, change)
}

/// A single-broker cluster, on the data in `folder` and the metadata in `repository`.
pub(crate) fn start_alone(
    folder: tempfile::TempDir,
    repository: Arc<MemoryRepository>,
    store: StoreOptions,
    change: impl FnOnce(&mut BrokerOptions),
) -> Running {
    let controller = ControllerThread::start(&repository);
    let mut running = start_in(folder, repository, &Arc::default(), store, change);
    running._controller = Some(controller);
    until("the broker leads all its partitions", || running.broker.is_settled());
    running
}

/// The replication listeners of the brokers of a cluster.
#[derive(Default)]
pub(crate) struct Net {
    addresses: Mutex<HashMap<BrokerId, SocketAddr>>,
}

impl Dialler for Net {
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            let address = self.addresses.lock().unwrap().get(&node).copied();
            let stream = tokio::net::TcpStream::connect(address.ok_or(io::ErrorKind::NotConnected)?).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Socket>)
        })
    }
}

/// Starts the replication thread of a broker.
fn replicate(
    node: BrokerId,
    repository: Arc<MemoryRepository>,
    net: Arc<Net>,
    shutdown: Shutdown,
) -> (Arc<Driver>, JoinHandle<()>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            net.addresses.lock().unwrap().insert(node, listener.local_addr().unwrap());
            let driver = Driver::start(DriverParts {
                node,
                repository,
                dialler: Arc::clone(&net) as _,
                clock: Arc::new(SystemClock::new()),
                scope: Scope::new(shutdown.clone()),
                tuning: DriverTuning::default(),
            });
            sender.send(Arc::clone(&driver)).unwrap();
            loop {
                tokio::select! {
                    accepted = listener.accept() => driver.accept(Box::new(accepted.unwrap().0)),
                    () = shutdown.stopped() => break,
                }
            }
        });
    });
    (receiver.recv().unwrap(), thread)
}

/// The controller of a cluster, on a thread; ends when dropped.
pub(crate) struct ControllerThread {
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

/// A failure detector that suspects no node.
struct NoSuspects;

impl Peers for NoSuspects {
    fn suspects(&self) -> Vec<(BrokerId, u64)> {
        Vec::new()
    }

    fn log_ends(&self, _: BrokerId, _: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>> {
        Box::pin(async { None })
    }
}

impl ControllerThread {
    pub(crate) fn start(repository: &Arc<MemoryRepository>) -> Self {
        let (repository, shutdown) = (Arc::clone(repository), Shutdown::new());
        let stopped = shutdown.clone();
        let serve = async move {
            repository.txn(Txn::new().delete(keys::CONTROLLER)).await.unwrap();
            let put = repository.txn(Txn::new().put(keys::CONTROLLER, "1")).await.unwrap();
            let TxnOutcome::Done { revision } = put else { panic!("nothing is compared") };
            let parts = ControllerTermParts {
                repository,
                clock: Arc::new(SystemClock::new()),
                peers: Arc::new(NoSuspects),
                tuning: ControllerTuning { return_ms: 200, ..ControllerTuning::default() },
                settings: Settings::new(),
            };
            tokio::select! {
                () = controller_term::serve(&parts, revision) => {}
                () = stopped.stopped() => {}
            }
        };
        let thread = std::thread::spawn(move || block_on(serve));
        Self { shutdown, thread: Some(thread) }
    }
}

impl Drop for ControllerThread {
    fn drop(&mut self) {
        self.shutdown.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A broker of a cluster, on the data in `folder` and the metadata in `repository`, and registered there.
pub(crate) fn start_in(
    folder: tempfile::TempDir,
    repository: Arc<MemoryRepository>,
    net: &Arc<Net>,
    store: StoreOptions,
    change: impl FnOnce(&mut BrokerOptions),
) -> Running {
    let clock: Arc<SystemClock> = Arc::new(SystemClock::new());
    let options = StoreOptions { min_free_bytes: 0, ..store };
    let store = Arc::new(Store::open(folder.path(), Arc::new(RealDisk), clock.clone(), options).unwrap());
    let shutdown = Shutdown::new();
    let mut options = BrokerOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        offsets_partitions: 4,
        transaction_partitions: 4,
        group_initial_rebalance_delay_ms: 0,
        ..BrokerOptions::default()
    };
    change(&mut options);
    let (node, zone) = (options.node_id, options.rack.clone().unwrap_or_default());
    let (driver, replicating) = replicate(node, Arc::clone(&repository), Arc::clone(net), shutdown.clone());
    let parts = BrokerParts {
        store: Arc::clone(&store),
        repository: repository.clone(),
        driver: Arc::clone(&driver),
        clock,
        metrics: Arc::new(Metrics::new()),
        shutdown: shutdown.clone(),
    };
    let broker = block_on(Broker::open(options, parts)).unwrap();
    store.set_sink(broker.sink());
    store.start();
    let server = Server::start(Arc::clone(&broker)).unwrap();
    let address = server.address();
    driver.set_run(block_on(register(repository.as_ref(), node.0, address.to_string(), zone)));
    let (server, replicating, folder) = (Some(server), Some(replicating), Some(folder));
    Running { address, shutdown, server, replicating, store, broker, folder, _controller: None }
}

/// Registers a node in the repository; returns its broker epoch.
async fn register(repository: &MemoryRepository, node_id: i32, kafka: String, zone: String) -> Sender {
    let node = NodeRecord { node_id, kafka, zone, ..NodeRecord::default() };
    let mark = MemberRecord { node_id, voter: node_id as u64, ..MemberRecord::default() };
    repository.txn(Txn::new().delete(member_key(node_id))).await.unwrap();
    let put = Txn::new().put(node_key(node_id), node.to_bytes()).put(member_key(node_id), mark.to_bytes());
    let TxnOutcome::Done { revision } = repository.txn(put).await.unwrap() else {
        panic!("nothing is compared")
    };
    let directory = DirectoryId(node_id as u64);
    Sender { node: BrokerId(node_id), epoch: BrokerEpoch(revision), directory }
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Waits until a condition holds, with a deadline.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Running {
    /// The data directory.
    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.as_ref().unwrap().path()
    }

    /// Stops the broker, cleanly or as a crash would. Returns its data directory.
    pub(crate) fn stop(mut self, in_order: bool) -> tempfile::TempDir {
        let folder = self.folder.take().unwrap();
        self.end(in_order);
        folder
    }

    fn end(&mut self, in_order: bool) {
        self.shutdown.stop();
        if let Some(server) = self.server.take() {
            server.join();
            self.replicating.take().unwrap().join().unwrap();
            if in_order {
                self.store.close().unwrap();
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end(true);
    }
}

/// One client connection.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    next: i32,
}

impl Client {
    pub(crate) fn connect(running: &Running) -> Self {
        let stream = TcpStream::connect(running.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { stream, next: 1 }
    }

    /// Sends a request and reads its response; an error if the broker closes the connection instead.
    pub(crate) fn call<Q: Message, S: Message>(&mut self, request: &Q, version: i16) -> std::io::Result<S> {
        let frame = self.frame(request, version);
        self.stream.write_all(&frame)?;
        self.receive(version)
    }

    /// A request in wire format.
    pub(crate) fn frame<Q: Message>(&mut self, request: &Q, version: i16) -> Vec<u8> {
        self.next += 1;
        let header = RequestHeader {
            api_key: Q::KEY as i16,
            api_version: version,
            correlation_id: self.next,
            client_id: Some("test".into()),
        };
        encode_request(&header, request).unwrap().to_vec()
    }

    /// Reads the response to the last request.
    fn receive<S: Message>(&mut self, version: i16) -> std::io::Result<S> {
        let (correlation_id, response) = self.any_answer(version)?;
        assert_eq!(correlation_id, self.next);
        Ok(response)
    }

    /// Reads the next response, of any request.
    pub(crate) fn answer<S: Message>(&mut self, version: i16) -> std::io::Result<S> {
        self.any_answer(version).map(|(_, response)| response)
    }

    fn any_answer<S: Message>(&mut self, version: i16) -> std::io::Result<(i32, S)> {
        let mut size = [0; 4];
        self.stream.read_exact(&mut size)?;
        let mut frame = vec![0; u32::from_be_bytes(size) as usize];
        self.stream.read_exact(&mut frame)?;
        let (answered, response) = decode_response::<S>(Bytes::from(frame), version).unwrap();
        Ok((answered.correlation_id, response))
    }

    pub(crate) fn create_topic(&mut self, name: &str, partitions: i32) {
        self.create_replicated(name, partitions, 1);
    }

    pub(crate) fn create_replicated(&mut self, name: &str, partitions: i32, factor: i16) {
        let topic = create_topics::CreatableTopic {
            name: name.into(),
            num_partitions: partitions,
            replication_factor: factor,
            ..Default::default()
        };
        let request = create_topics::CreateTopicsRequest { topics: vec![topic], ..Default::default() };
        let response: create_topics::CreateTopicsResponse = self.call(&request, 5).unwrap();
        assert_eq!(response.topics[0].error_code, 0, "{response:?}");
    }

    /// Produces one record and returns its offset.
    pub(crate) fn produce(&mut self, topic: &str, value: &[u8]) -> i64 {
        let response: ProduceResponse = self.call(&one_batch(topic, value), 9).unwrap();
        let partition = &response.responses[0].partition_responses[0];
        assert_eq!(partition.error_code, 0, "{response:?}");
        partition.base_offset
    }
}

/// A produce of one record to partition 0.
pub(crate) fn one_batch(topic: &str, value: &[u8]) -> ProduceRequest {
    produce_of(topic, BatchBuilder::new(Compression::None), value)
}

/// The batch of an idempotent producer.
pub(crate) fn batch_of(topic: &str, producer: i64, sequence: i32) -> ProduceRequest {
    produce_of(topic, BatchBuilder::new(Compression::None).producer(producer, 0, sequence), b"v")
}

fn produce_of(topic: &str, mut batch: BatchBuilder, value: &[u8]) -> ProduceRequest {
    batch.push(1_700_000_000_000, Some(b"k"), Some(value), &[]);
    let data = PartitionProduceData { index: 0, records: Some(Records::Bytes(batch.build())) };
    let topic_data =
        vec![TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() }];
    ProduceRequest { acks: -1, timeout_ms: 10_000, topic_data, ..Default::default() }
}
