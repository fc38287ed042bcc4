//! Shared support: the server, unique names, and wrappers that wait with a deadline.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use moim_interop::cluster::Cluster;
use moim_interop::proxy::Proxy;
use moim_interop::{Deadline, Options, Server, until};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::{ClientContext, Timestamp};

/// Timeout: long enough for a busy machine, short enough to notice.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The configuration of every server: short timers, so that time-dependent tests are fast.
pub(crate) fn options() -> Options {
    Options::new()
        .set("kafka.group_initial_rebalance_delay_ms", 100)
        .set("kafka.group_min_session_timeout_ms", 1000)
        .set("log.retention_check_interval_ms", 200)
        .set("journal.min_free_bytes", 1 << 20)
        .set("node.log_level", std::env::var("INTEROP_LOG").unwrap_or("info".to_owned()))
}

/// The shared server, or a cluster of several.
pub(crate) struct Shared {
    nodes: Vec<Server>,
    cluster: Option<Cluster>,
}

impl Shared {
    fn start() -> Self {
        if let Some(server) = Server::external() {
            return Self { nodes: vec![server], cluster: None };
        }
        match nodes() {
            1 => Self { nodes: vec![Server::start(options()).unwrap()], cluster: None },
            count => {
                let cluster = Cluster::moim(count, &options(), false).unwrap();
                await_all(&cluster);
                Self { nodes: Vec::new(), cluster: Some(cluster) }
            }
        }
    }

    fn first(&self) -> &Server {
        let of_cluster = self.cluster.as_ref().and_then(|cluster| cluster.server(0));
        of_cluster.or(self.nodes.first()).expect("there is a server")
    }

    /// The bootstrap address.
    pub(crate) fn kafka(&self) -> &str {
        self.first().kafka()
    }

    /// The process id of that server, if this harness runs it.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.first().pid()
    }

    /// Address of a partition's leader, for raw requests. The first server if there is no such partition.
    pub(crate) fn leader_of(&self, topic: &str, partition: i32) -> String {
        let probe: BaseConsumer =
            client(self.kafka(), &[("allow.auto.create.topics", "false")]).create().unwrap();
        let metadata = probe.fetch_metadata(Some(topic), PATIENCE).unwrap();
        let found =
            metadata.topics().first().and_then(|t| t.partitions().get(usize::try_from(partition).ok()?));
        let leader = found.and_then(|p| metadata.brokers().iter().find(|broker| broker.id() == p.leader()));
        leader
            .map_or_else(|| self.kafka().to_owned(), |broker| format!("{}:{}", broker.host(), broker.port()))
    }
}

/// Number of nodes of the shared cluster: `INTEROP_NODES`, or one.
pub(crate) fn nodes() -> usize {
    std::env::var("INTEROP_NODES").ok().map_or(1, |text| text.parse().expect("INTEROP_NODES is a number"))
}

/// Waits until every node knows every other: topics created then are spread over all of them.
pub(crate) fn await_all(cluster: &Cluster) {
    for node in 0..cluster.len() {
        let address = cluster.server(node).unwrap().kafka();
        until(PATIENCE, "every node is known", || {
            let consumer: BaseConsumer = client(address, &[]).create().ok()?;
            let metadata = consumer.fetch_metadata(None, PATIENCE).ok()?;
            (metadata.brokers().len() == cluster.len()).then_some(())
        });
    }
}

/// The shared server. It stops with the last test that holds it.
pub(crate) fn server() -> Arc<Shared> {
    static SHARED: Mutex<Weak<Shared>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = shared.upgrade() {
        return server;
    }
    let server = Arc::new(Shared::start());
    *shared = Arc::downgrade(&server);
    server
}

/// A dedicated server; none if the suite runs against an external broker.
pub(crate) fn own_server() -> Option<Server> {
    match std::env::var_os("INTEROP_KAFKA") {
        Some(_) => None,
        None => Some(Server::start(options()).unwrap()),
    }
}

/// A dedicated server that clients reach only through a proxy.
pub(crate) fn proxied() -> Option<(Server, Proxy)> {
    if std::env::var_os("INTEROP_KAFKA").is_some() {
        return None;
    }
    let proxy = Proxy::listen().unwrap();
    let options = options().set("kafka.advertise", proxy.address());
    let server = Server::start(options).unwrap();
    proxy.forward_to(server.kafka());
    Some((server, proxy))
}

/// A unique name.
pub(crate) fn unique(what: &str) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{what}-{}-{next}-{:04x}", std::process::id(), fastrand::u16(..))
}

/// The configuration of any client.
pub(crate) fn client(address: &str, settings: &[(&str, &str)]) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", address);
    config.set("broker.address.family", "v4");
    config.set("reconnect.backoff.ms", "20");
    config.set("reconnect.backoff.max.ms", "200");
    for (key, value) in settings {
        config.set(*key, *value);
    }
    config
}

/// An admin client.
pub(crate) fn admin(address: &str) -> AdminClient<DefaultClientContext> {
    client(address, &[]).create().unwrap()
}

/// The options of an admin request.
pub(crate) fn admin_options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

/// Runs an admin request to completion.
pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(2 * PATIENCE, future).await.expect("an answer in time") })
}

/// Creates a topic with a unique name that starts with `what`.
pub(crate) fn topic(address: &str, what: &str, partitions: i32, config: &[(&str, &str)]) -> String {
    let name = unique(what);
    create(address, &name, partitions, config);
    name
}

/// Creates a topic. By default retention is unlimited: tests write timestamps of the past.
pub(crate) fn create(address: &str, name: &str, partitions: i32, config: &[(&str, &str)]) {
    // The usual replication factor: three, or as many as there are brokers.
    let metadata = admin(address).inner().fetch_metadata(None, PATIENCE).unwrap();
    let factor = i32::try_from(metadata.brokers().len().min(3)).unwrap();
    create_replicated(address, name, partitions, factor, config);
}

/// Creates a topic with this replication factor.
pub(crate) fn create_replicated(
    address: &str,
    name: &str,
    partitions: i32,
    factor: i32,
    config: &[(&str, &str)],
) {
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(factor));
    topic.config = config.to_vec();
    if !config.iter().any(|(key, _)| key.starts_with("retention.")) {
        topic.config.push(("retention.ms", "-1"));
    }
    let results = wait(admin(address).create_topics([&topic], &admin_options())).unwrap();
    assert_eq!(results, [Ok(name.to_owned())]);
}

/// One record, as it is sent and as it must be read back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) value: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
    pub(crate) timestamp: Option<i64>,
}

impl Sample {
    pub(crate) fn value(value: impl Into<Vec<u8>>) -> Self {
        Self { value: Some(value.into()), ..Self::default() }
    }

    pub(crate) fn keyed(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        Self { key: Some(key.into()), value: Some(value.into()), ..Self::default() }
    }

    fn of(message: &BorrowedMessage<'_>) -> Self {
        let headers = message.headers().map(|headers| {
            headers.iter().map(|header| (header.key.to_owned(), header.value.map(<[u8]>::to_vec))).collect()
        });
        Self {
            key: message.key().map(<[u8]>::to_vec),
            value: message.payload().map(<[u8]>::to_vec),
            headers: headers.unwrap_or_default(),
            timestamp: message.timestamp().to_millis(),
        }
    }

    /// The value as text.
    pub(crate) fn text(&self) -> String {
        self.value.as_deref().map(String::from_utf8_lossy).unwrap_or_default().into_owned()
    }
}

/// A consumed record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) timestamp: Timestamp,
    pub(crate) sample: Sample,
}

impl Seen {
    pub(crate) fn of(message: &BorrowedMessage<'_>) -> Self {
        Self {
            partition: message.partition(),
            offset: message.offset(),
            timestamp: message.timestamp(),
            sample: Sample::of(message),
        }
    }

    pub(crate) fn text(&self) -> String {
        self.sample.text()
    }
}

/// Partition and offset of a record, or its delivery error.
pub(crate) type Report = Result<(i32, i64), RDKafkaErrorCode>;

/// Collects delivery reports by record number.
#[derive(Default)]
pub(crate) struct Reports(Mutex<Vec<(usize, Report)>>);

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<usize>;

    fn delivery(&self, result: &DeliveryResult<'_>, number: Box<usize>) {
        let report = match result {
            Ok(message) => Ok((message.partition(), message.offset())),
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown)),
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((*number, report));
    }
}

/// A producer that collects all delivery reports.
pub(crate) struct Sender {
    pub(crate) inner: BaseProducer<Reports>,
    sent: usize,
}

impl Sender {
    pub(crate) fn new(address: &str, settings: &[(&str, &str)]) -> Self {
        let inner = client(address, settings).create_with_context(Reports::default()).unwrap();
        Self { inner, sent: 0 }
    }

    /// Queues a record; its number is the one its delivery report will have.
    pub(crate) fn send(&mut self, topic: &str, partition: Option<i32>, sample: &Sample) -> usize {
        let number = self.sent;
        self.sent += 1;
        let deadline = Deadline::after(PATIENCE);
        let mut record = record(topic, partition, sample, number);
        while let Err((error, refused)) = self.inner.send(record) {
            assert_eq!(error.rdkafka_error_code(), Some(RDKafkaErrorCode::QueueFull), "{error}");
            assert!(!deadline.is_over(), "the producer's queue does not empty");
            self.inner.poll(Duration::from_millis(20));
            record = refused;
        }
        self.inner.poll(Duration::ZERO);
        number
    }

    /// Waits for all delivery reports, and returns them in sending order.
    pub(crate) fn reports(&mut self) -> Vec<Report> {
        // As long as the longest `message.timeout.ms` in use: by then every record has its delivery report, success
        // or error.
        self.inner.flush(4 * PATIENCE).unwrap();
        let mut reports = self.reports_so_far();
        assert_eq!(reports.len(), self.sent, "reports");
        reports.sort_by_key(|(number, _)| *number);
        reports.into_iter().map(|(_, report)| report).collect()
    }

    /// The delivery reports so far, in order of arrival.
    pub(crate) fn reports_so_far(&self) -> Vec<(usize, Report)> {
        self.inner.context().0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends all records to one partition and expects all to be delivered; returns their offsets.
    pub(crate) fn deliver(&mut self, topic: &str, partition: i32, samples: &[Sample]) -> Vec<i64> {
        let before = self.sent;
        for sample in samples {
            self.send(topic, Some(partition), sample);
        }
        let reports = self.reports().split_off(before);
        reports.into_iter().map(|report| report.expect("delivered").1).collect()
    }
}

fn record<'a>(
    topic: &'a str,
    partition: Option<i32>,
    sample: &'a Sample,
    number: usize,
) -> BaseRecord<'a, [u8], [u8], Box<usize>> {
    let mut record = BaseRecord::with_opaque_to(topic, Box::new(number));
    record.partition = partition;
    record.key = sample.key.as_deref();
    record.payload = sample.value.as_deref();
    record.timestamp = sample.timestamp;
    if !sample.headers.is_empty() {
        let mut headers = OwnedHeaders::new();
        for (key, value) in &sample.headers {
            headers = headers.insert(rdkafka::message::Header { key, value: value.as_ref() });
        }
        record.headers = Some(headers);
    }
    record
}

/// Sends values to partition 0 with a new producer; returns their offsets.
pub(crate) fn deliver(address: &str, topic: &str, values: &[&str]) -> Vec<i64> {
    let samples: Vec<Sample> = values.iter().map(|value| Sample::value(*value)).collect();
    Sender::new(address, &[("linger.ms", "5")]).deliver(topic, 0, &samples)
}

/// A consumer without a group that reads these partitions from these offsets.
pub(crate) fn reader(
    address: &str,
    topic: &str,
    from: &[(i32, Offset)],
    settings: &[(&str, &str)],
) -> BaseConsumer {
    let defaults = [("group.id", "unused"), ("enable.auto.commit", "false"), ("auto.offset.reset", "error")];
    let mut config = client(address, &defaults);
    for (key, value) in settings {
        config.set(*key, *value);
    }
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    for (partition, offset) in from {
        list.add_partition_offset(topic, *partition, *offset).unwrap();
    }
    consumer.assign(&list).unwrap();
    consumer
}

/// The next record of a consumer. Transient errors (a restarting server) are skipped.
pub(crate) fn next(consumer: &BaseConsumer, patience: Duration) -> Option<Seen> {
    let deadline = Deadline::after(patience);
    while !deadline.is_over() {
        match consumer.poll(deadline.left().min(Duration::from_millis(200))) {
            Some(Ok(message)) => return Some(Seen::of(&message)),
            Some(Err(error)) => assert!(is_transient(&error), "consumer: {error}"),
            None => {}
        }
    }
    None
}

/// True if the client itself recovers from such an error.
pub(crate) fn is_transient(error: &KafkaError) -> bool {
    matches!(error, KafkaError::PartitionEOF(_))
        || matches!(
            error.rdkafka_error_code(),
            Some(
                RDKafkaErrorCode::AllBrokersDown
                    | RDKafkaErrorCode::BrokerTransportFailure
                    | RDKafkaErrorCode::Resolve
                    | RDKafkaErrorCode::OperationTimedOut
                    | RDKafkaErrorCode::NotCoordinator
                    | RDKafkaErrorCode::CoordinatorLoadInProgress
                    | RDKafkaErrorCode::CoordinatorNotAvailable
            )
        )
}

/// The next `count` records.
pub(crate) fn take(consumer: &BaseConsumer, count: usize) -> Vec<Seen> {
    let mut seen = Vec::with_capacity(count);
    while seen.len() < count {
        let Some(next) = next(consumer, PATIENCE) else {
            panic!("only {} of {count} records came", seen.len())
        };
        seen.push(next);
    }
    seen
}

/// All records of partitions 0.. of a topic, each read to its end.
pub(crate) fn read_all(address: &str, topic: &str, partitions: i32, settings: &[(&str, &str)]) -> Vec<Seen> {
    let mut all = vec![("enable.partition.eof", "true")];
    all.extend(settings);
    let from: Vec<(i32, Offset)> = (0..partitions).map(|partition| (partition, Offset::Beginning)).collect();
    let consumer = reader(address, topic, &from, &all);
    let (mut seen, mut ended) = (Vec::new(), std::collections::BTreeSet::new());
    let deadline = Deadline::after(2 * PATIENCE);
    while ended.len() < from.len() {
        assert!(!deadline.is_over(), "only {} of {partitions} partitions ended", ended.len());
        match consumer.poll(Duration::from_millis(200)) {
            Some(Ok(message)) => {
                ended.remove(&message.partition());
                seen.push(Seen::of(&message));
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                ended.insert(partition);
            }
            Some(Err(error)) => assert!(is_transient(&error), "consumer: {error}"),
            None => {}
        }
    }
    seen
}

/// The values of all records of one partition.
pub(crate) fn values(address: &str, topic: &str, settings: &[(&str, &str)]) -> Vec<String> {
    read_all(address, topic, 1, settings).iter().map(Seen::text).collect()
}

/// Log start offset and high watermark of a partition.
pub(crate) fn watermarks(address: &str, topic: &str, partition: i32) -> (i64, i64) {
    let consumer: BaseConsumer = client(address, &[("group.id", "unused")]).create().unwrap();
    consumer.fetch_watermarks(topic, partition, PATIENCE).unwrap()
}

/// A list with one partition.
pub(crate) fn partition(topic: &str, partition: i32, offset: Offset) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, partition, offset).unwrap();
    list
}

/// The committed offset of a group for a partition, if any.
pub(crate) fn committed(address: &str, group: &str, topic: &str, number: i32) -> Option<i64> {
    let consumer: BaseConsumer = client(address, &[("group.id", group)]).create().unwrap();
    let list = consumer.committed_offsets(partition(topic, number, Offset::Invalid), PATIENCE).unwrap();
    match list.elements()[0].offset() {
        Offset::Offset(offset) => Some(offset),
        Offset::Invalid => None,
        other => panic!("committed: {other:?}"),
    }
}
