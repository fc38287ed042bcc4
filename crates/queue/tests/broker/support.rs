//! Starts a broker on a free port and talks to it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use moim_base::SystemClock;
use moim_base::metrics::Metrics;
use moim_base::task::Shutdown;
use moim_cluster::MemoryRepository;
use moim_journal::{RealDisk, Store, StoreOptions};
use moim_queue::{Broker, BrokerOptions, BrokerParts, Server};
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
    store: Arc<Store>,
    pub(crate) broker: Arc<Broker>,
    /// Kept when the broker is to start again.
    folder: Option<tempfile::TempDir>,
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
    start_in(folder, repository, store, change)
}

/// A broker on the data in `folder` and the metadata in `repository`.
pub(crate) fn start_in(
    folder: tempfile::TempDir,
    repository: Arc<MemoryRepository>,
    store: StoreOptions,
    change: impl FnOnce(&mut BrokerOptions),
) -> Running {
    let clock: Arc<SystemClock> = Arc::new(SystemClock::new());
    let options = StoreOptions { min_free_bytes: 0, ..store };
    let store = Arc::new(Store::open(folder.path(), Arc::new(RealDisk), clock.clone(), options).unwrap());
    let shutdown = Shutdown::new();
    let parts = BrokerParts {
        store: Arc::clone(&store),
        repository,
        clock,
        metrics: Arc::new(Metrics::new()),
        shutdown: shutdown.clone(),
    };
    let mut options = BrokerOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        offsets_partitions: 4,
        transaction_partitions: 4,
        group_initial_rebalance_delay_ms: 0,
        ..BrokerOptions::default()
    };
    change(&mut options);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let broker = runtime.block_on(Broker::open(options, parts)).unwrap();
    store.set_sink(broker.sink());
    store.start();
    let server = Server::start(Arc::clone(&broker)).unwrap();
    let address = server.address();
    Running { address, shutdown, server: Some(server), store, broker, folder: Some(folder) }
}

impl Running {
    /// Where its data is.
    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.as_ref().unwrap().path()
    }

    /// Ends it; as a crash would, unless in order. Gives its data back.
    pub(crate) fn stop(mut self, in_order: bool) -> tempfile::TempDir {
        let folder = self.folder.take().unwrap();
        self.end(in_order);
        folder
    }

    fn end(&mut self, in_order: bool) {
        self.shutdown.stop();
        if let Some(server) = self.server.take() {
            server.join();
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

/// One connection.
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

    /// Sends a request and reads its answer; an error when the broker closes the connection instead.
    pub(crate) fn call<Q: Message, S: Message>(&mut self, request: &Q, version: i16) -> std::io::Result<S> {
        let frame = self.frame(request, version);
        self.stream.write_all(&frame)?;
        self.receive(version)
    }

    /// A request as it goes over the wire.
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

    /// Reads the answer to the last request.
    fn receive<S: Message>(&mut self, version: i16) -> std::io::Result<S> {
        let (correlation_id, response) = self.any_answer(version)?;
        assert_eq!(correlation_id, self.next);
        Ok(response)
    }

    /// Reads the next answer, whichever request it belongs to.
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
        let topic = create_topics::CreatableTopic {
            name: name.into(),
            num_partitions: partitions,
            replication_factor: 1,
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
    let mut batch = BatchBuilder::new(Compression::None);
    batch.push(1_700_000_000_000, Some(b"k"), Some(value), &[]);
    let data = PartitionProduceData { index: 0, records: Some(Records::Bytes(batch.build())) };
    let topic_data =
        vec![TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() }];
    ProduceRequest { acks: -1, timeout_ms: 10_000, topic_data, ..Default::default() }
}
