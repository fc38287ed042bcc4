//! Clients that do harm, on purpose or not: scripts that do not end, `KEYS *` over everything, thousands of connections, readers
//! that do not read. Nobody loses a lead or an in-sync replica over them, and the other layers go on.
//!
//! How much slower the others get is a measurement, so the whole runs only when asked (`INTEROP_STORE_HARM=1`), on a machine that has
//! nothing else to do; `INTEROP_STORE_KEYS` keys.

use std::io::Write as _;
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use etcd_client::GetOptions;
use moim_interop::Options;
use moim_interop::cluster::Cluster;
use moim_slot_client::Client;

use super::number;

/// How long each measurement is.
const WINDOW: Duration = Duration::from_secs(6);
/// How long the script that does not end has.
const SCRIPT: Duration = Duration::from_secs(5);
const CONNECTIONS: usize = 10_000;
const SLOW_READERS: usize = 50;

/// Who leads what in which epoch, and who is in sync; and the term of Raft.
async fn order(etcd: &mut etcd_client::Client) -> (Vec<String>, u64) {
    let found = etcd.get("/moim/partitions/", Some(GetOptions::new().with_prefix())).await.unwrap();
    let line = |kv: &etcd_client::KeyValue| format!("{} {}", kv.key_str().unwrap(), kv.value_str().unwrap());
    let term = etcd.status().await.unwrap().raft_term();
    (found.kvs().iter().map(line).collect(), term)
}

/// Puts in the coordination core until told to stop.
async fn put(etcd: etcd_client::Client, stop: &AtomicBool, done: &AtomicU64) {
    let one = async |number: usize| {
        let mut etcd = etcd.clone();
        while !stop.load(Ordering::Relaxed) {
            etcd.put(format!("harm/{number}"), "x".repeat(100), None).await.unwrap();
            done.fetch_add(1, Ordering::Relaxed);
        }
    };
    tokio::join!(one(0), one(1), one(2), one(3));
}

/// What the core takes in a window, beside whatever else goes on.
fn puts_beside<'a>(
    etcd: &'a etcd_client::Client,
    other: impl Future<Output = ()> + 'a,
) -> Pin<Box<dyn Future<Output = f64> + 'a>> {
    Box::pin(puts_while(etcd, other))
}

async fn puts_while(etcd: &etcd_client::Client, other: impl Future<Output = ()>) -> f64 {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let watch = async {
        let start = Instant::now();
        other.await;
        let rate = done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        rate
    };
    tokio::join!(put(etcd.clone(), &stop, &done), watch).1
}

#[test]
fn harmful_clients_harm_nobody_else() {
    if std::env::var_os("INTEROP_STORE_HARM").is_none() {
        eprintln!("SKIPPED: INTEROP_STORE_HARM is not set");
        return;
    }
    let cluster = Cluster::moim(3, &Options::new(), false).unwrap_or_else(|error| panic!("{error:#}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(run(&cluster));
}

async fn run(cluster: &Cluster) {
    let seeds: Vec<String> = (0..3).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect();
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
    let mut etcd = etcd_client::Client::connect([cluster.endpoint(0)], None).await.unwrap();
    let before = order(&mut etcd).await;
    let calm = puts_beside(&etcd, tokio::time::sleep(WINDOW)).await;

    let crowd: Vec<TcpStream> =
        (0..CONNECTIONS).map_while(|number| TcpStream::connect(&seeds[number % 3]).ok()).collect();
    eprintln!("{} connections", crowd.len());
    let crowded = puts_beside(&etcd, tokio::time::sleep(WINDOW)).await;

    let slow: Vec<TcpStream> = (0..SLOW_READERS)
        .filter_map(|number| {
            let mut stream = TcpStream::connect(&seeds[number % 3]).ok()?;
            stream.write_all("GET large\r\n".repeat(200).as_bytes()).ok()?;
            Some(stream)
        })
        .collect();
    let unread = puts_beside(&etcd, tokio::time::sleep(WINDOW)).await;

    let keyed = puts_beside(&etcd, async {
        for _ in 0..3 {
            let _: u64 = client.keys("*").await.map(|keys: Vec<String>| keys.len() as u64).unwrap();
        }
    })
    .await;

    let scripted = puts_beside(&etcd, async {
        let endless = |seed: &String| {
            let mut stream = TcpStream::connect(seed).unwrap();
            stream.write_all(b"EVAL \"while true do end\" 0\r\n").unwrap();
            stream
        };
        let scripts: Vec<TcpStream> = seeds.iter().map(endless).collect();
        tokio::time::sleep(SCRIPT).await;
        for seed in &seeds {
            let killed = super::load::ask(seed, &["SCRIPT", "KILL"]);
            assert_eq!(killed.as_deref(), Some("OK"), "the script of {seed} can be ended");
        }
        drop(scripts);
    })
    .await;
    drop((crowd, slow));
    assert_eq!(order(&mut etcd).await, before, "somebody lost a lead or an in-sync replica");
    client.set("after", 1).await.unwrap();
    let share = |rate: f64| rate / calm;
    eprintln!(
        "puts of the coordination core: {calm:.0}/s; {CONNECTIONS} connections {:.2}, slow readers {:.2}, KEYS {:.2}, scripts {:.2}",
        share(crowded),
        share(unread),
        share(keyed),
        share(scripted)
    );
    for (rate, what) in
        [(crowded, "connections"), (unread, "slow readers"), (keyed, "KEYS"), (scripted, "scripts")]
    {
        assert!(share(rate) >= 0.7, "{what}: {rate:.0} puts/s of {calm:.0}");
    }
}
