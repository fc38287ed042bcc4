//! Throughput of the coordination service without sockets: callers on one thread, every node's control loop on its own.
//!
//! `cargo run --release -p moim-coord --features testing --example engine_load -- [nodes] [callers] [seconds] [put|get]
//! [via]` prints operations per second, and CPU time of the whole process for each. `via` is the node that is asked (0
//! is the leader).

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moim_base::task::{Scope, Shutdown};
use moim_coord::testing::TestCluster;
use moim_coord::{Command, Op, PutRequest, RangeRequest};

/// User and system time of this process so far, in microseconds.
fn cpu_us() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks * 10_000
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, usual: u64| args.get(at).map_or(usual, |text| text.parse().unwrap());
    let (nodes, callers, seconds) = (number(0, 1), number(1, 256), number(2, 5));
    let get = args.get(3).is_some_and(|kind| kind == "get");
    let cluster = TestCluster::start(nodes as usize, |_| {});
    cluster.settle();
    let leader = cluster.leader();
    let at = (leader + number(4, 0) as usize) % nodes as usize;
    let node = cluster.node(at);
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut latencies = Vec::new();
    let (mut cpu, mut wall, mut operations) = (0, Duration::ZERO, 0);
    runtime.block_on(async {
        let mut tasks = Vec::new();
        let node = match std::env::var_os("DIRECT") {
            Some(_) => node.clone(),
            None => node.for_many_callers(&Scope::new(Shutdown::new())),
        };
        for caller in 0..callers {
            let (node, stop, done) = (node.clone(), Arc::clone(&stop), Arc::clone(&done));
            tasks.push(tokio::spawn(async move {
                let mut taken = Vec::new();
                let mut round = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let key = format!("key/{caller:04}/{:04}", round % 1_000);
                    round += 1;
                    let start = Instant::now();
                    if get {
                        node.range(RangeRequest::key(key), false).await.unwrap();
                    } else {
                        let put = PutRequest::new(key, vec![b'x'; 256]);
                        node.execute(Command::client(Op::Put(put))).await.unwrap();
                    }
                    taken.push(start.elapsed());
                    done.fetch_add(1, Ordering::Relaxed);
                }
                taken
            }));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (start, used, before) = (Instant::now(), cpu_us(), done.load(Ordering::Relaxed));
        let entries = node.status().applied;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        (cpu, wall, operations) = (cpu_us() - used, start.elapsed(), done.load(Ordering::Relaxed) - before);
        println!("entries {}", node.status().applied - entries);
        stop.store(true, Ordering::Relaxed);
        for task in tasks {
            latencies.extend(task.await.unwrap());
        }
    });
    latencies.sort_unstable();
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize];
    println!(
        "{nodes} nodes, {callers} callers: {:.0}/s, {:.2} us CPU each, p50 {:?} p99 {:?}",
        operations as f64 / wall.as_secs_f64(),
        cpu as f64 / operations as f64,
        at(0.5),
        at(0.99),
    );
}
