//! Performance isolation: a produce load at full throughput causes no election and fails no put.
//!
//! The latency of puts under this load is a benchmark (`cargo xtask bench coord --metric 18`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use moim_interop::{moim_binary, serves_etcd};
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::support::{connect, options};

/// Duration of the load: several election timeouts.
const LOAD_DURATION: Duration = Duration::from_secs(6);

#[test]
fn saturating_produce_load_causes_no_election_on_one_node() {
    during_produce(1);
}

#[test]
fn saturating_produce_load_causes_no_election_on_three_nodes() {
    during_produce(3);
}

fn during_produce(nodes: usize) {
    if !serves_etcd(moim_binary().unwrap()).unwrap() {
        eprintln!("SKIPPED: this moim has no etcd port");
        return;
    }
    let cluster = Cluster::moim(nodes, &options(), false).unwrap_or_else(|error| panic!("{error:#}"));
    let stop = Arc::new(AtomicBool::new(false));
    let mut producers = Vec::new();
    for node in 0..nodes {
        let (address, stop) = (cluster.server(node).unwrap().kafka().to_owned(), Arc::clone(&stop));
        producers.push(std::thread::spawn(move || produce(&address, &stop)));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = connect(&cluster.endpoints()).await;
        let before = client.status().await.unwrap().raft_term();
        let end = Instant::now() + LOAD_DURATION;
        let mut slowest = Duration::ZERO;
        let mut count = 0;
        while Instant::now() < end {
            let asked = Instant::now();
            client.put("beside", count.to_string(), None).await.unwrap();
            slowest = slowest.max(asked.elapsed());
            count += 1;
        }
        let after = client.status().await.unwrap().raft_term();
        eprintln!("{count} puts, the slowest took {slowest:?}");
        assert_eq!(after, before, "an election\n{}", cluster.log_tails());
    });
    stop.store(true, Ordering::SeqCst);
    let produced: usize = producers.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert!(produced > 0);
    eprintln!("{produced} records beside them");
}

/// Produces at full throughput; returns the number of records.
fn produce(address: &str, stop: &AtomicBool) -> usize {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", address)
        .set("broker.address.family", "v4")
        .set("acks", "all")
        .set("linger.ms", "5")
        .set("batch.size", "262144")
        .set("queue.buffering.max.messages", "100000")
        .create()
        .unwrap();
    let value = vec![b'x'; 1000];
    let mut sent = 0;
    while !stop.load(Ordering::SeqCst) {
        let record: BaseRecord<'_, (), [u8]> = BaseRecord::to("neighbour").payload(&value);
        match producer.send(record) {
            Ok(()) => sent += 1,
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                producer.poll(Duration::from_millis(10));
            }
            Err((error, _)) => panic!("{error}"),
        }
        producer.poll(Duration::ZERO);
    }
    producer.flush(Duration::from_secs(60)).unwrap();
    sent
}
