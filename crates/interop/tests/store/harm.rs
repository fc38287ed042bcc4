//! Harmful clients, intentional or not: endless scripts, `KEYS *` over everything, thousands of connections, slow
//! readers. No leadership and no in-sync replica is lost because of them, and the other layers continue.
//!
//! The slowdown of the others is a measurement, so the full test runs only on request (`INTEROP_STORE_HARM=1`), on an
//! otherwise idle machine; with `INTEROP_STORE_KEYS` keys. The measuring clients have their own threads: the client's
//! cost of receiving a reply is not caused by the store.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use etcd_client::GetOptions;
use moim_interop::Options;
use moim_interop::cluster::Cluster;
use moim_slot_client::Client;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};

use super::number;

/// Length of each measurement.
const WINDOW: Duration = Duration::from_secs(6);
/// Duration of the endless script.
const SCRIPT: Duration = Duration::from_secs(5);
const CONNECTIONS: usize = 10_000;
const SLOW_READERS: usize = 50;
/// Produced records waiting for their acknowledgement.
const IN_FLIGHT: &str = "64";
const TOPIC: &str = "harm";

/// Leaders, leader epochs and in-sync sets; and the Raft term.
async fn order(etcd: &mut etcd_client::Client) -> (Vec<String>, u64) {
    let found = etcd.get("/moim/partitions/", Some(GetOptions::new().with_prefix())).await.unwrap();
    let line = |kv: &etcd_client::KeyValue| format!("{} {}", kv.key_str().unwrap(), kv.value_str().unwrap());
    let term = etcd.status().await.unwrap().raft_term();
    (found.kvs().iter().map(line).collect(), term)
}

/// Completed operations of the other layers.
#[derive(Default)]
struct Done {
    stop: AtomicBool,
    puts: AtomicU64,
    records: AtomicU64,
}

/// Clients of the coordination core and of the queue, running from beginning to end.
struct Others {
    done: Arc<Done>,
    threads: Vec<JoinHandle<()>>,
}

impl Others {
    fn start(cluster: &Cluster) -> Self {
        let done = Arc::new(Done::default());
        let (endpoint, shared) = (cluster.endpoint(0), Arc::clone(&done));
        let puts = std::thread::spawn(move || put(&endpoint, &shared));
        let brokers: Vec<String> =
            (0..cluster.len()).map(|node| cluster.server(node).unwrap().kafka().to_owned()).collect();
        let shared = Arc::clone(&done);
        let records = std::thread::spawn(move || produce(&brokers.join(","), &shared));
        Self { done, threads: vec![puts, records] }
    }

    /// Operations per second of both, while `other` runs.
    fn beside(&self, other: impl FnOnce()) -> Rates {
        let now = || (self.done.puts.load(Ordering::Relaxed), self.done.records.load(Ordering::Relaxed));
        let (start, before) = (Instant::now(), now());
        other();
        let (after, seconds) = (now(), start.elapsed().as_secs_f64());
        Rates { puts: (after.0 - before.0) as f64 / seconds, records: (after.1 - before.1) as f64 / seconds }
    }

    fn end(self) {
        self.done.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

/// Operations per second.
struct Rates {
    puts: f64,
    records: f64,
}

/// Puts to the coordination core until the stop flag is set.
fn put(endpoint: &str, done: &Done) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let etcd = etcd_client::Client::connect([endpoint], None).await.unwrap();
        let one = async |number: usize| {
            let mut etcd = etcd.clone();
            while !done.stop.load(Ordering::Relaxed) {
                etcd.put(format!("harm/{number}"), "x".repeat(100), None).await.unwrap();
                done.puts.fetch_add(1, Ordering::Relaxed);
            }
        };
        tokio::join!(one(0), one(1), one(2), one(3));
    });
}

struct Counted(Arc<AtomicU64>);

impl rdkafka::ClientContext for Counted {}

impl ProducerContext for Counted {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        assert!(result.is_ok(), "{:?}", result.as_ref().err());
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Produces to the queue until the stop flag is set; a record counts once all in-sync replicas have it.
fn produce(brokers: &str, done: &Done) {
    let acknowledged = Arc::new(AtomicU64::new(0));
    let producer: BaseProducer<Counted> = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("acks", "all")
        .set("linger.ms", "1")
        .set("queue.buffering.max.messages", IN_FLIGHT)
        .create_with_context(Counted(Arc::clone(&acknowledged)))
        .unwrap();
    let payload = "x".repeat(100);
    while !done.stop.load(Ordering::Relaxed) {
        while producer.send(BaseRecord::<(), str>::to(TOPIC).payload(&payload)).is_ok() {}
        producer.poll(Duration::from_millis(10));
        done.records.store(acknowledged.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    producer.flush(Duration::from_secs(30)).unwrap();
}

/// Sends KEYS to one node and discards the reply.
fn all_keys(address: &str) {
    const LAST: &[u8] = b"+PONG\r\n";
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"KEYS *\r\nPING\r\n").unwrap();
    let (mut buffer, mut tail) = (vec![0; 1 << 20], Vec::new());
    while !tail.ends_with(LAST) {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "{address} hung up");
        tail.extend_from_slice(&buffer[..read]);
        tail.drain(..tail.len().saturating_sub(LAST.len()));
    }
}

/// Runs an endless script on every node for a while.
fn endless_scripts(seeds: &[String]) {
    let endless = |seed: &String| {
        let mut stream = TcpStream::connect(seed).unwrap();
        stream.write_all(b"EVAL \"while true do end\" 0\r\n").unwrap();
        stream
    };
    let scripts: Vec<TcpStream> = seeds.iter().map(endless).collect();
    std::thread::sleep(SCRIPT);
    for seed in seeds {
        let killed = super::load::ask(seed, &["SCRIPT", "KILL"]);
        assert_eq!(killed.as_deref(), Some("OK"), "the script of {seed} can be ended");
    }
    drop(scripts);
}

#[test]
fn harmful_clients_do_not_affect_other_clients() {
    if std::env::var_os("INTEROP_STORE_HARM").is_none() {
        eprintln!("SKIPPED: INTEROP_STORE_HARM is not set");
        return;
    }
    let cluster = Cluster::moim(3, &Options::new(), false).unwrap_or_else(|error| panic!("{error:#}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seeds: Vec<String> = (0..3).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect();
    runtime.block_on(fill(&seeds));
    let mut etcd = runtime.block_on(etcd_client::Client::connect([cluster.endpoint(0)], None)).unwrap();
    let others = Others::start(&cluster);
    let rest = || std::thread::sleep(WINDOW);
    rest(); // all keys are loaded and warm
    let before = runtime.block_on(order(&mut etcd));
    let calm = others.beside(rest);

    let crowd: Vec<TcpStream> =
        (0..CONNECTIONS).map_while(|number| TcpStream::connect(&seeds[number % 3]).ok()).collect();
    assert_eq!(crowd.len(), CONNECTIONS, "connections were refused; the limit of open files must allow them");
    let crowded = others.beside(rest);
    let slow: Vec<TcpStream> = (0..SLOW_READERS)
        .map(|number| {
            let mut stream = TcpStream::connect(&seeds[number % 3]).unwrap();
            stream.write_all("GET large\r\n".repeat(200).as_bytes()).unwrap();
            stream
        })
        .collect();
    let unread = others.beside(rest);
    let keyed = others.beside(|| (0..3).for_each(|_| seeds.iter().for_each(|seed| all_keys(seed))));
    let scripted = others.beside(|| endless_scripts(&seeds));
    drop((crowd, slow));
    assert_eq!(runtime.block_on(order(&mut etcd)), before, "a leadership or an in-sync replica was lost");
    others.end();

    eprintln!("calm: {:.0} puts/s, {:.0} records/s", calm.puts, calm.records);
    let all = [
        (crowded, "10,000 connections"),
        (unread, "slow readers"),
        (keyed, "KEYS of a million keys, three times"),
        (scripted, "scripts of 5 s on all nodes"),
    ];
    let shares = all.map(|(rates, what)| (rates.puts / calm.puts, rates.records / calm.records, what));
    for (puts, records, what) in shares {
        eprintln!("{what}: {puts:.2} of the puts, {records:.2} of the records");
    }
    for (puts, records, what) in shares {
        assert!(puts >= 0.7 && records >= 0.7, "{what}");
    }
}

/// Writes the keys that the harmful clients request.
async fn fill(seeds: &[String]) {
    let client = Client::builder(&seeds.join(",")).timeout(Duration::from_secs(60)).connect().await.unwrap();
    let keys = number("INTEROP_STORE_KEYS", 1_000_000);
    for first in (0..keys).step_by(1000) {
        let mut pipeline = client.pipeline();
        for key in first..keys.min(first + 1000) {
            pipeline.set(format!("key:{key}"), "x".repeat(64));
        }
        assert!(pipeline.run().await.iter().all(Result::is_ok));
    }
    client.set("large", "x".repeat(1 << 20)).await.unwrap();
}
