//! Metric 22: the client itself, against the crates `redis` and `fred` and a raw connection with the minimum work of
//! a client.
//!
//! The client's CPU time per command is measured: the client shares the machine with the server, so its rate depends
//! mainly on the server.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fred::interfaces::{ClientLike as _, KeysInterface as _};
use fred::types::config::Config;
use moim_slot_client::Client;

use super::{Bench, Doing, Load, loads};
use crate::load::Until;
use crate::procfs;
use crate::report::{Figure, Metric};

/// Numbers of tasks that share the client.
const TASKS: [usize; 3] = [1, 64, 512];

pub(super) fn clients(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let program = bench.options.redis.as_ref().context("it needs a redis-server to talk to")?;
    let server = bench.start_redis(program, "none")?;
    bench.runtime.block_on(loads::fill(server.addr, loads::KEYS))?;
    let slice = bench.options.plan.slice;
    let mut figures = Vec::new();
    for tasks in TASKS {
        progress(&format!("metric 22: {tasks} tasks"));
        let (rate, cpu) = bench.runtime.block_on(shared(&server.addr.to_string(), tasks, slice))?;
        let what = |what: &str| format!("{tasks} task{}: {what}", if tasks == 1 { "" } else { "s" });
        figures.push(Figure::new("slot-client", &what("GET"), rate, "op/s", None));
        figures.push(Figure::new("slot-client", &what("client CPU per GET"), cpu, "µs", None));
        let (rate, cpu) = bench.runtime.block_on(multiplexed(&server.addr.to_string(), tasks, slice))?;
        figures.push(Figure::new("redis crate", &what("GET"), rate, "op/s", None));
        figures.push(Figure::new("redis crate", &what("client CPU per GET"), cpu, "µs", None));
        let (rate, cpu) = bench.runtime.block_on(through_fred(&server.addr.to_string(), tasks, slice))?;
        figures.push(Figure::new("fred crate", &what("GET"), rate, "op/s", None));
        figures.push(Figure::new("fred crate", &what("client CPU per GET"), cpu, "µs", None));
        let load = Load { command: Doing::Get, clients: 1, depth: tasks };
        let before = procfs::cpu_of_self()?;
        let work = bench.runtime.block_on(loads::run(server.addr, load, Until::Elapsed(slice)))?;
        let cpu = (procfs::cpu_of_self()? - before).as_secs_f64() * 1e6 / work.ops.max(1) as f64;
        figures.push(Figure::new("raw connection", &what("client CPU per GET"), cpu, "µs", None));
    }
    Ok(Metric { number: 22, title: "the client".into(), figures, ..Metric::default() })
}

/// GETs by many tasks through one client: operations per second, microseconds of CPU time per operation.
async fn shared(addr: &str, tasks: usize, slice: Duration) -> Result<(f64, f64)> {
    let client = Client::connect(addr).await?;
    let get =
        async |key: String| -> Result<bool> { Ok(client.get::<Option<bytes::Bytes>>(key).await?.is_some()) };
    run_tasks(tasks, slice, get).await
}

/// GETs through one multiplexed connection of the `redis` crate, its way of sharing a connection between tasks.
async fn multiplexed(addr: &str, tasks: usize, slice: Duration) -> Result<(f64, f64)> {
    let client = redis::Client::open(format!("redis://{addr}/"))?;
    let connection = client.get_multiplexed_async_connection().await?;
    let get = async |key: String| -> Result<bool> {
        let command = redis::cmd("GET").arg(key).to_owned();
        let value: Option<Vec<u8>> = command.query_async(&mut connection.clone()).await?;
        Ok(value.is_some())
    };
    run_tasks(tasks, slice, get).await
}

/// GETs through one client of the `fred` crate.
async fn through_fred(addr: &str, tasks: usize, slice: Duration) -> Result<(f64, f64)> {
    let client = fred::types::Builder::from_config(Config::from_url(&format!("redis://{addr}/"))?).build()?;
    client.init().await?;
    let get = async |key: String| -> Result<bool> {
        let value: Option<bytes::Bytes> = client.get(key).await?;
        Ok(value.is_some())
    };
    let measured = run_tasks(tasks, slice, get).await;
    client.quit().await?;
    measured
}

async fn run_tasks(
    tasks: usize,
    slice: Duration,
    get: impl AsyncFn(String) -> Result<bool>,
) -> Result<(f64, f64)> {
    let (start, before) = (Instant::now(), procfs::cpu_of_self()?);
    let one = async |task: usize| -> Result<u64> {
        let mut count = 0;
        while start.elapsed() < slice {
            let key = format!("key:{:012}", (task as u64 * 997 + count) % loads::KEYS);
            ensure!(get(key).await?, "the key is missing");
            count += 1;
        }
        Ok(count)
    };
    let counts = futures_util::future::try_join_all((0..tasks).map(one)).await?;
    let total: u64 = counts.iter().sum();
    let cpu = (procfs::cpu_of_self()? - before).as_secs_f64() * 1e6;
    Ok((total as f64 / start.elapsed().as_secs_f64(), cpu / total.max(1) as f64))
}
