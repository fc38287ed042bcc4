//! A small load on all three protocols that records the time of each acknowledgement: the longest pause of any
//! partition, key or client is the stall. At the end every acknowledged write is verified.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer as _, ProducerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::{ClientContext, Statistics};
use redis::cluster::ClusterClientBuilder;

const TOPIC: &str = "gray";
const PARTITIONS: i32 = 6;
/// Keys of the store, spread over the slots; one thread each.
const KEYS: usize = 6;
/// Clients of the coordination core: one per node, and one for all nodes.
const ETCD: usize = 4;
/// Timeout of one client call.
const PATIENCE: Duration = Duration::from_millis(1_000);

/// Acknowledgements of one client: the last number, its time, and the longest pause so far.
#[derive(Clone, Copy, Debug)]
struct Acked {
    last: u64,
    at: Instant,
    longest: Duration,
}

/// Acknowledgements by client: `queue 3`, `store 0`, `core 1`.
type Clients = Arc<Mutex<BTreeMap<String, Acked>>>;

fn ack(clients: &Clients, name: &str, number: u64) {
    let mut clients = clients.lock().unwrap();
    let now = Instant::now();
    let acked = clients.entry(name.to_owned()).or_insert(Acked { last: 0, at: now, longest: Duration::ZERO });
    acked.longest = acked.longest.max(now - acked.at);
    (acked.last, acked.at) = (acked.last.max(number), now);
}

/// The running clients.
pub(super) struct Load {
    clients: Clients,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    brokers: String,
    seeds: Vec<String>,
    endpoints: Vec<String>,
}

impl Load {
    pub(super) fn start(cluster: &Cluster) -> Self {
        let server = |node: usize| cluster.server(node).unwrap();
        let brokers = (0..3).map(|node| server(node).kafka()).collect::<Vec<_>>().join(",");
        let seeds: Vec<String> = (0..3).map(|node| format!("redis://{}/", server(node).redis())).collect();
        let (clients, stop) = (Clients::default(), Arc::new(AtomicBool::new(false)));
        topic(&brokers);
        let mut load =
            Self { clients, stop, threads: Vec::new(), brokers, seeds, endpoints: cluster.endpoints() };
        let brokers = load.brokers.clone();
        load.spawn(move |stop, clients| write(&brokers, stop, clients));
        for key in 0..KEYS {
            let seeds = load.seeds.clone();
            load.spawn(move |stop, clients| set(&seeds, key, stop, clients));
        }
        for client in 0..ETCD {
            let endpoints = match client {
                0..3 => vec![load.endpoints[client].clone()],
                _ => load.endpoints.clone(),
            };
            load.spawn(move |stop, clients| put(&endpoints, client, stop, clients));
        }
        load
    }

    fn spawn(&mut self, work: impl FnOnce(&AtomicBool, &Clients) + Send + 'static) {
        let (stop, clients) = (Arc::clone(&self.stop), Arc::clone(&self.clients));
        self.threads.push(std::thread::spawn(move || work(&stop, &clients)));
    }

    /// Waits until every client was served, and resets the recorded pauses.
    pub(super) fn settle(&self) {
        let began = Instant::now();
        let all = PARTITIONS as usize + KEYS + ETCD;
        let from: BTreeMap<String, u64> = self.numbers();
        loop {
            let now = self.numbers();
            if now.len() == all && now.iter().all(|(name, last)| from.get(name) < Some(last)) {
                break;
            }
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "not every client is served: {from:?} {now:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let now = Instant::now();
        for acked in self.clients.lock().unwrap().values_mut() {
            (acked.longest, acked.at) = (Duration::ZERO, now);
        }
    }

    fn numbers(&self) -> BTreeMap<String, u64> {
        self.clients.lock().unwrap().iter().map(|(name, acked)| (name.clone(), acked.last)).collect()
    }

    /// The longest pause of each client since [`Load::settle`], including the current one. A client of the core that
    /// uses only the `victim` is left out.
    pub(super) fn stalls(&self, victim: usize) -> BTreeMap<String, Duration> {
        let clients = self.clients.lock().unwrap();
        let now = Instant::now();
        let left_out = format!("core {victim}");
        let stalls = clients.iter().filter(|(name, _)| **name != left_out);
        stalls.map(|(name, acked)| (name.clone(), acked.longest.max(now - acked.at))).collect()
    }

    /// Stops the clients and verifies every acknowledged write.
    pub(super) fn finish(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in std::mem::take(&mut self.threads) {
            thread.join().unwrap();
        }
        let acked = self.numbers();
        let queue = read_queue(&self.brokers);
        for partition in 0..PARTITIONS {
            let numbers = &queue[&partition];
            let wanted: Vec<u64> = (1..=acked[&format!("queue {partition}")]).collect();
            assert_eq!(numbers[..wanted.len()], wanted, "partition {partition}");
        }
        let client = ClusterClientBuilder::new(self.seeds.clone()).build().unwrap();
        let mut connection = client.get_connection().unwrap();
        for key in 0..KEYS {
            let found: u64 = redis::cmd("GET").arg(store_key(key)).query(&mut connection).unwrap();
            assert!(found >= acked[&format!("store {key}")], "key {key}: {found}");
        }
        runtime().block_on(async {
            let mut client = etcd_client::Client::connect(&self.endpoints, None).await.unwrap();
            for number in 0..ETCD {
                let found = client.get(format!("gray-{number}"), None).await.unwrap();
                let found: u64 = found.kvs()[0].value_str().unwrap().parse().unwrap();
                assert!(found >= acked[&format!("core {number}")], "client {number}: {found}");
            }
        });
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn kafka(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("retry.backoff.ms", "50");
    config
}

fn topic(brokers: &str) {
    let admin: AdminClient<DefaultClientContext> = kafka(brokers).create().unwrap();
    let new = NewTopic::new(TOPIC, PARTITIONS, TopicReplication::Fixed(3));
    let made = runtime().block_on(admin.create_topics([&new], &AdminOptions::new())).unwrap();
    assert!(made[0].is_ok(), "{made:?}");
}

struct Reports(Clients);

impl ClientContext for Reports {
    fn stats(&self, _: Statistics) {}
}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<(i32, u64)>;

    fn delivery(&self, result: &DeliveryResult<'_>, id: Self::DeliveryOpaque) {
        if let Err((error, _)) = result {
            panic!("a record was given up: {id:?}: {error}");
        }
        ack(&self.0, &format!("queue {}", id.0), id.1);
    }
}

/// Produces numbers from 1 to every partition, in order.
fn write(brokers: &str, stop: &AtomicBool, clients: &Clients) {
    let producer: BaseProducer<Reports> = kafka(brokers)
        .set("enable.idempotence", "true")
        .set("linger.ms", "2")
        .create_with_context(Reports(Arc::clone(clients)))
        .unwrap();
    for number in 1.. {
        for partition in 0..PARTITIONS {
            let value = number.to_string();
            let record = BaseRecord::with_opaque_to(TOPIC, Box::new((partition, number)));
            let record = record.partition(partition).key("").payload(&value);
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        producer.poll(Duration::from_millis(20));
        if stop.load(Ordering::SeqCst) {
            break;
        }
    }
    producer.flush(Duration::from_secs(60)).unwrap();
}

/// The end of a partition. Leadership may return to a recovered node at this very moment; librdkafka does not retry then.
fn end_of(consumer: &BaseConsumer, partition: i32) -> i64 {
    let began = Instant::now();
    loop {
        match consumer.fetch_watermarks(TOPIC, partition, Duration::from_secs(10)) {
            Ok((_, end)) => return end,
            Err(error) => {
                assert!(began.elapsed() < Duration::from_secs(60), "partition {partition}: {error}")
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn read_queue(brokers: &str) -> BTreeMap<i32, Vec<u64>> {
    let consumer: BaseConsumer = kafka(brokers).set("group.id", "reader").create().unwrap();
    let mut all = TopicPartitionList::new();
    let mut left: BTreeMap<i32, i64> = BTreeMap::new();
    for partition in 0..PARTITIONS {
        all.add_partition_offset(TOPIC, partition, Offset::Beginning).unwrap();
        left.insert(partition, end_of(&consumer, partition));
    }
    consumer.assign(&all).unwrap();
    let mut read: BTreeMap<i32, Vec<u64>> = BTreeMap::new();
    while left.values().any(|end| *end > 0) {
        let message = consumer.poll(Duration::from_secs(20)).expect("records that are there").unwrap();
        let number = std::str::from_utf8(message.payload().unwrap()).unwrap().parse().unwrap();
        read.entry(message.partition()).or_default().push(number);
        if message.offset() + 1 >= left[&message.partition()] {
            left.insert(message.partition(), 0);
        }
    }
    read
}

fn store_key(key: usize) -> String {
    format!("gray:{key}")
}

fn set(seeds: &[String], key: usize, stop: &AtomicBool, clients: &Clients) {
    let client = ClusterClientBuilder::new(seeds.to_vec())
        .connection_timeout(PATIENCE)
        .response_timeout(PATIENCE)
        .retries(0)
        .build()
        .unwrap();
    let (mut number, mut connection) = (0, None);
    while !stop.load(Ordering::SeqCst) {
        if connection.is_none() {
            connection = client.get_connection().ok();
        }
        std::thread::sleep(Duration::from_millis(10));
        let Some(open) = &mut connection else { continue };
        number += 1;
        let set = redis::cmd("SET").arg(store_key(key)).arg(number).query::<()>(open);
        match set {
            Ok(()) => ack(clients, &format!("store {key}"), number),
            Err(_) => connection = None,
        }
    }
}

fn put(endpoints: &[String], client: usize, stop: &AtomicBool, clients: &Clients) {
    runtime().block_on(async {
        let options =
            etcd_client::ConnectOptions::new().with_connect_timeout(PATIENCE).with_timeout(PATIENCE);
        let (mut number, mut connection) = (0_u64, None);
        while !stop.load(Ordering::SeqCst) {
            if connection.is_none() {
                connection = etcd_client::Client::connect(endpoints, Some(options.clone())).await.ok();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            let Some(open) = &mut connection else { continue };
            number += 1;
            match open.put(format!("gray-{client}"), number.to_string(), None).await {
                Ok(_) => ack(clients, &format!("core {client}"), number),
                Err(_) => connection = None,
            }
        }
    });
}
