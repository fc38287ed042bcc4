//! Metrics 14 and 15: memory at rest, and start-up.
//!
//! Owns the servers it starts, each with its own data directory. A start is timed from the creation of the process to
//! its ready line (for Kafka: to the first answered request). After SIGKILL every acknowledged batch must still be
//! there, or the recovery time is not reported at all.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Bench, KIB};
use crate::load::admin::{self, NewTopic};
use crate::load::idle::{self, Idle};
use crate::load::produce::{self, ProduceLoad};
use crate::load::{Until, runtime};
use crate::peers::Server;
use crate::probes::waiting;
use crate::procfs;
use crate::report::{Aim, Figure, Metric};
use crate::slices::median;

const STARTS: usize = 5;
const PARTITIONS_PER_TOPIC: usize = 100;
const RECOVERED_BYTES: usize = 1 << 30;
const IDLE_CONSUMERS: i32 = 1000;
const IDLE_FOR: Duration = Duration::from_secs(10);
/// Idle time of a fresh server before its memory is read: lazy initialisation is part of being idle.
const IDLE_TIME: Duration = Duration::from_secs(2);

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Metric 14.
pub(super) fn idle_memory(bench: &Bench<'_>, kafka: bool, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    progress("metric 14: idle memory");
    let mut figures = Vec::new();
    let ours = bench.start_moim("idle-moim")?;
    std::thread::sleep(IDLE_TIME);
    let memory = procfs::memory_of(ours.pid())?;
    figures.push(Figure::new(
        "Moim",
        "idle memory, resident",
        mib(memory.resident),
        "MiB",
        Some(Aim::AtMost(30.0)),
    ));
    figures.push(Figure::new("Moim", "idle memory, anonymous part", mib(memory.anonymous), "MiB", None));
    drop(ours);
    if kafka {
        let theirs = bench.start_kafka("idle-kafka")?;
        std::thread::sleep(IDLE_TIME);
        let memory = procfs::memory_of(theirs.pid())?;
        figures.push(Figure::new("Kafka", "idle memory, resident", mib(memory.resident), "MiB", None));
    }
    Ok(Metric { number: 14, title: "memory at rest".into(), figures, ..Metric::default() })
}

/// Metric 15.
pub(super) fn starting(bench: &Bench<'_>, kafka: bool, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    progress("metric 15: cold starts");
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        starts.push(ms(bench.start_moim("cold-moim")?.ready_after));
    }
    let cold = median(starts).unwrap_or_default();
    figures.push(Figure::new("Moim", "cold start, median of 5", cold, "ms", Some(Aim::AtMost(100.0))));
    if kafka {
        let theirs = bench.start_kafka("cold-kafka")?;
        figures.push(Figure::new("Kafka", "cold start", ms(theirs.ready_after), "ms", None));
    }
    progress("metric 15: many partitions");
    many_partitions(bench, &mut figures)?;
    progress("metric 15: recovery after kill -9");
    recovery(bench, &mut figures)?;
    progress("metric 15: idle consumers");
    for max_wait_ms in [500, 5_000] {
        idle_consumers(bench, max_wait_ms, &mut figures)?;
    }
    Ok(Metric { number: 15, title: "starting, recovering, idling".into(), figures, ..Metric::default() })
}

/// Memory and restart with many idle partitions.
fn many_partitions(bench: &Bench<'_>, figures: &mut Vec<Figure>) -> Result<()> {
    let count = bench.options.many_partitions;
    let server = bench.start_moim("many-moim")?;
    let rt = runtime()?;
    for first in (0..count).step_by(PARTITIONS_PER_TOPIC) {
        let partitions = i32::try_from(PARTITIONS_PER_TOPIC.min(count - first))?;
        let topic = NewTopic { name: format!("many-{first}"), partitions, configs: Vec::new() };
        rt.block_on(admin::create(server.addr, &[topic]))?;
    }
    let say = |what: &str| format!("{count} partitions: {what}");
    let limit = Aim::AtMost(100.0 * count as f64 / 10_000.0);
    let memory = procfs::memory_of(server.pid())?;
    figures.push(Figure::new(
        "Moim",
        &say("memory after creation"),
        mib(memory.resident),
        "MiB",
        Some(limit),
    ));
    let stopped = server.stop()?;
    figures.push(Figure::new("Moim", &say("graceful stop"), ms(stopped), "ms", None));
    let server = bench.start_moim("many-moim")?;
    let ready = ms(server.ready_after);
    figures.push(Figure::new("Moim", &say("restart"), ready, "ms", Some(Aim::AtMost(2000.0))));
    std::thread::sleep(IDLE_TIME);
    let memory = procfs::memory_of(server.pid())?;
    figures.push(Figure::new("Moim", &say("memory after restart"), mib(memory.resident), "MiB", Some(limit)));
    let descriptors = procfs::descriptors_of(server.pid())? as f64;
    figures.push(Figure::new("Moim", &say("descriptors"), descriptors, "", Some(Aim::AtMost(1000.0))));
    server.kill()?;
    let server = bench.start_moim("many-moim")?;
    let ready = ms(server.ready_after);
    figures.push(Figure::new("Moim", &say("restart after kill -9"), ready, "ms", Some(Aim::AtMost(2000.0))));
    Ok(())
}

/// SIGKILL right after one GiB was acknowledged, for both durabilities.
fn recovery(bench: &Bench<'_>, figures: &mut Vec<Figure>) -> Result<()> {
    for durability in ["fsync", "replicated"] {
        let name = format!("recover-{durability}");
        let server = bench.start_moim(&name)?;
        let (partitions, records) = (4, 64);
        let batch = produce::batch(64 * KIB, records);
        let each = (RECOVERED_BYTES / batch.len() / 4) as u64;
        let configs = vec![("durability".into(), durability.into())];
        let topic = NewTopic { name: name.clone(), partitions, configs };
        let load = ProduceLoad { addr: server.addr, topic: name.clone(), partitions, window: 4, batch };
        bench.runtime.block_on(admin::create(server.addr, &[topic]))?;
        bench.runtime.block_on(produce::produce(&load, Until::Operations(each)))?;
        server.kill()?;
        let server = bench.start_moim(&name)?;
        for partition in 0..partitions {
            let end = bench.runtime.block_on(admin::end_offset(server.addr, &name, partition))?;
            let acknowledged = i64::try_from(each * records as u64)?;
            ensure!(
                end >= acknowledged,
                "partition {partition} ends at {end}, acknowledged were {acknowledged}"
            );
        }
        let what = format!("1 GiB recovered after kill -9 ({durability})");
        figures.push(Figure::new("Moim", &what, ms(server.ready_after), "ms", Some(Aim::AtMost(1000.0))));
        let memory = procfs::memory_of(server.pid())?;
        figures.push(Figure::new("Moim", "… memory after it", mib(memory.resident), "MiB", None));
    }
    Ok(())
}

/// The cost of a thousand idle consumers.
fn idle_consumers(bench: &Bench<'_>, max_wait_ms: i32, figures: &mut Vec<Figure>) -> Result<()> {
    let server: Server = bench.start_moim("waiting-moim")?;
    let load = Idle {
        addr: server.addr,
        topic: "waiting".into(),
        partitions: 10,
        consumers: IDLE_CONSUMERS,
        max_wait_ms,
    };
    let topic = NewTopic { name: "waiting".into(), partitions: load.partitions, configs: Vec::new() };
    bench.runtime.block_on(admin::create(server.addr, &[topic]))?;
    let waiting = bench.runtime.block_on(idle::connect(&load))?;
    let before = procfs::cpu_of(server.pid())?;
    let work = bench.runtime.block_on(idle::wait(&load, waiting, IDLE_FOR))?;
    let used = procfs::cpu_of(server.pid())?.saturating_sub(before);
    let share = used.as_secs_f64() / work.elapsed.as_secs_f64() * 100.0;
    let what = format!("1,000 idle consumers, max wait {max_wait_ms} ms");
    figures.push(Figure::new("Moim", &what, share, "% of a core", Some(Aim::AtMost(2.0))));
    let memory = procfs::memory_of(server.pid())?;
    figures.push(Figure::new("Moim", "… memory after it", mib(memory.resident), "MiB", None));
    let answer = bench.runtime.block_on(idle::sample(&load))?;
    drop(server);
    let floor = waiting::Waiting::start(Duration::from_millis(u64::try_from(max_wait_ms)?), &answer)?;
    let load = Idle { addr: floor.addr, ..load };
    let connected = bench.runtime.block_on(idle::connect(&load))?;
    let before = procfs::cpu_of_threads(waiting::THREADS)?;
    let work = bench.runtime.block_on(idle::wait(&load, connected, IDLE_FOR))?;
    let used = procfs::cpu_of_threads(waiting::THREADS)?.saturating_sub(before);
    let share = used.as_secs_f64() / work.elapsed.as_secs_f64() * 100.0;
    figures.push(Figure::new(
        "floor server",
        "… one read and one write for each wait",
        share,
        "% of a core",
        None,
    ));
    Ok(())
}
