//! Metrics 14, 17 and 18: memory, failover, and the queue as a noisy neighbour.
//!
//! Owns the servers it starts. Nothing alternates here: each figure measures one server at a time.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::task::LocalSet;

use super::{Bench, Running};
use crate::load::admin::{self, NewTopic};
use crate::load::produce::{self, ProduceLoad};
use crate::load::{Until, coord as loads};
use crate::procfs;
use crate::report::{Aim, Figure, Metric};
use crate::slices::median;

/// Idle time of a fresh server before its memory is read.
const IDLE_TIME: Duration = Duration::from_secs(2);
/// Duration of the load before the leader is killed, so that connections and caches are warm.
const WARM_UP: Duration = Duration::from_millis(1500);
/// Timeout of a failover.
const FAILOVER_LIMIT: Duration = Duration::from_secs(30);
/// Request timeout of a client before it tries the next node.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(250);
/// Duration of the noisy produce load.
const ISOLATION: Duration = Duration::from_secs(10);
/// Puts of the memory test: each of the load's keys ten times.
const HISTORY: u64 = 100_000;

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Metric 14, the coordination part: at rest, and with keys and history.
pub(super) fn memory(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    let mut loaded = Vec::new();
    for maker in &bench.makers {
        progress(&format!("metric 14: memory of {}", maker.label));
        let running = maker.start(1)?;
        std::thread::sleep(IDLE_TIME);
        let pid = running.cluster.pids()[0];
        let at_rest = mib(procfs::memory_of(pid)?.resident);
        figures.push(Figure::new(maker.label, "memory at rest", at_rest, "MiB", None));
        let clients = 64;
        let load = loads::puts(running.addr(0)?, clients, Until::Operations(HISTORY / clients as u64));
        bench.runtime.block_on(load)?;
        let full = mib(procfs::memory_of(pid)?.resident);
        let what = "memory with 10,000 keys of 256 bytes, 10 versions each";
        figures.push(Figure::new(maker.label, what, full, "MiB", None));
        loaded.push((maker.label, full));
    }
    for (label, full) in loaded.iter().skip(1) {
        let what = format!("that memory, as a share of {label}'s");
        figures.push(Figure::new("Moim", &what, loaded[0].1 / full, "x", Some(Aim::AtMost(0.33))));
    }
    Ok(Metric { number: 14, title: "memory of coordination".into(), figures, ..Metric::default() })
}

/// Metric 17: from SIGKILL of the leader to the next acknowledged put, with default timers.
pub(super) fn failover(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    for maker in &bench.makers {
        let mut running = maker.start(3)?;
        let mut gaps = Vec::new();
        for round in 1..=bench.options.failovers {
            let gap = bench.runtime.block_on(one_failover(&mut running))?;
            progress(&format!("metric 17: {} round {round}: {:.0} ms", maker.label, gap.as_secs_f64() * 1e3));
            gaps.push(gap.as_secs_f64() * 1e3);
        }
        let worst = gaps.iter().copied().fold(0.0, f64::max);
        let aim = maker.etcd.is_none().then_some(Aim::AtMost(1000.0));
        let rounds = gaps.len();
        let middle = median(gaps).unwrap_or_default();
        figures.push(Figure::new(maker.label, &format!("median of {rounds}"), middle, "ms", aim));
        figures.push(Figure::new(maker.label, "worst", worst, "ms", None));
    }
    let title = "three nodes, kill -9 of the leader: until the next put is acknowledged".into();
    Ok(Metric { number: 17, title, figures, ..Metric::default() })
}

async fn leader_of(running: &Running) -> Result<usize> {
    let deadline = Instant::now() + FAILOVER_LIMIT;
    while Instant::now() < deadline {
        for (node, addr) in running.addrs()?.into_iter().enumerate() {
            if let Ok(status) = loads::status(addr).await
                && status.leader != 0
                && status.header.is_some_and(|header| header.member_id == status.leader)
            {
                return Ok(node);
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("no leader within {FAILOVER_LIMIT:?}")
}

async fn one_failover(running: &mut Running) -> Result<Duration> {
    let leader = leader_of(running).await?;
    // The client is not connected to the node that dies: it measures the cluster, not its own reconnect.
    let mut addrs = running.addrs()?;
    addrs.rotate_left(leader + 1);
    let stop = Rc::new(Cell::new(false));
    let local = LocalSet::new();
    let put_until_stopped =
        local.spawn_local(loads::put_until_stopped(addrs, REQUEST_TIMEOUT, Rc::clone(&stop)));
    let killed = local
        .run_until(async {
            tokio::time::sleep(WARM_UP).await;
            running.cluster.kill(leader)?;
            let killed = Instant::now();
            tokio::time::sleep(Duration::from_secs(4)).await;
            stop.set(true);
            Ok::<_, anyhow::Error>(killed)
        })
        .await?;
    let acknowledged = local.run_until(put_until_stopped).await.context("the client panicked")??;
    let first = acknowledged.iter().find(|at| **at > killed + Duration::from_millis(1));
    let first = *first.context("no put was acknowledged within 4 s of the kill")?;
    running.cluster.restart(leader)?;
    tokio::time::sleep(Duration::from_secs(1)).await; // the restarted node catches up
    // The pause counts: the last acknowledgement before it may have arrived after the signal.
    let before = acknowledged.iter().filter(|at| **at < first).max().copied().unwrap_or(killed);
    Ok(first - before.max(killed))
}

/// Metric 18: puts beside a produce load that saturates disk and CPU.
pub(super) fn isolation(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    for nodes in [1, 3] {
        progress(&format!("metric 18: {nodes} node(s)"));
        let running = bench.makers[0].start(nodes)?;
        let what = |text: &str| format!("{nodes} node{}: {text}", if nodes == 1 { "" } else { "s" });
        let addr = running.addr(0)?;
        let before = bench.runtime.block_on(loads::status(addr))?.raft_term;
        let quiet = bench.runtime.block_on(loads::puts(addr, 1, Until::Elapsed(Duration::from_secs(3))))?;
        let kafka: SocketAddr = running.cluster.server(0).context("our server")?.kafka().parse()?;
        let loud = bench.runtime.block_on(during_produce(addr, kafka))?;
        let after = bench.runtime.block_on(loads::status(addr))?.raft_term;
        let p99 = |work: &crate::slices::Work| {
            work.latency.as_ref().map_or(0.0, |latency| latency.value_at_quantile(0.99) as f64 / 1e6)
        };
        figures.push(Figure::new("Moim", &what("put p99 alone"), p99(&quiet), "ms", None));
        let aim = Some(Aim::AtMost(50.0));
        figures.push(Figure::new(
            "Moim",
            &what("put p99 beside a saturating produce"),
            p99(&loud.0),
            "ms",
            aim,
        ));
        let throughput = loud.1.bytes as f64 / f64::from(1 << 20) / loud.1.elapsed.as_secs_f64();
        figures.push(Figure::new("Moim", &what("that produce"), throughput, "MiB/s", None));
        let elections = (after - before) as f64;
        figures.push(Figure::new(
            "Moim",
            &what("elections meanwhile"),
            elections,
            "",
            Some(Aim::AtMost(0.0)),
        ));
    }
    let title = "coordination beside a saturating produce".into();
    Ok(Metric { number: 18, title, figures, ..Metric::default() })
}

async fn during_produce(
    addr: SocketAddr,
    kafka: SocketAddr,
) -> Result<(crate::slices::Work, crate::slices::Work)> {
    let topic = "neighbour".to_owned();
    let partitions = 4;
    let configs = vec![("durability".into(), "fsync".into())];
    admin::create_on(kafka, 1, &[NewTopic { name: topic.clone(), partitions, configs }]).await?;
    let load = ProduceLoad { addr: kafka, topic, partitions, window: 4, batch: produce::batch(64 << 10, 64) };
    let until = Until::Elapsed(ISOLATION);
    let (puts, produced) = tokio::join!(loads::puts(addr, 1, until), produce::produce(&load, until));
    let (puts, produced) = (puts?, produced?);
    ensure!(puts.ops > 0 && produced.ops > 0, "one of the loads did nothing");
    Ok((puts, produced))
}
