//! Metric 33: a primary is killed under three kinds of clients: ours, and the crates `redis` and `fred`. Measures the
//! time without an acknowledged write, and the errors that callers see.
//!
//! All clients have their defaults except for the request timeout, which is the same, and the reconnect policy of
//! `fred`. The Redis Cluster for comparison has a node timeout of 1.5 s instead of its default of 15 s, and is
//! included in the comparison.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fred::clients::Client as Fred;
use fred::interfaces::{ClientLike as _, KeysInterface as _};
use fred::types::Builder;
use fred::types::config::{Config, ReconnectPolicy, Server, ServerConfig};
use moim_interop::Options;
use moim_interop::cluster::Cluster;
use moim_interop::net::listens;
use moim_interop::redis::RedisCluster;
use moim_slot_client::Client;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;

use super::Bench;
use crate::report::{Aim, Figure, Metric};

const ROUNDS: usize = 3;
/// Total timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the clients run before and after the kill.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(8);
/// Keys of the shard whose primary is killed; each has one task per client.
const KEYS: usize = 4;

/// The cluster under test.
enum Subject {
    Moim(Cluster),
    Redis(RedisCluster),
}

impl Subject {
    fn seeds(&self) -> Vec<String> {
        match self {
            Self::Moim(cluster) => {
                (0..cluster.len()).filter_map(|node| Some(cluster.server(node)?.redis().to_owned())).collect()
            }
            Self::Redis(cluster) => {
                (0..moim_interop::redis::NODES).map(|node| cluster.address(node)).collect()
            }
        }
    }

    fn kill(&mut self, port: u16) -> Result<()> {
        match self {
            Self::Moim(cluster) => {
                let node = cluster.pids().iter().position(|pid| listens(*pid, port));
                cluster.kill(node.context("no node listens on the primary's port")?)
            }
            Self::Redis(cluster) => {
                let node = cluster.node_at(port).context("no node listens on the primary's port")?;
                cluster.kill(node)
            }
        }
    }
}

/// What the tasks of one client observed.
#[derive(Default)]
struct Observed {
    worst: Cell<Duration>,
    errors: Cell<u64>,
}

impl Observed {
    fn note(&self, worst: Duration, errors: u64) {
        self.worst.set(self.worst.get().max(worst));
        self.errors.set(self.errors.get() + errors);
    }
}

pub(super) fn failover(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    for side in ["Moim", "Redis Cluster"] {
        let (mut ours, mut theirs, mut freds, mut gaps) = (0, 0, 0, Vec::new());
        for round in 1..=ROUNDS {
            progress(&format!("metric 33: {side}, round {round}"));
            let Some(subject) = start(bench.options.moim.as_deref(), side)? else { break };
            let (mine, other, third) = (Observed::default(), Observed::default(), Observed::default());
            bench.runtime.block_on(kill_a_primary(subject, &mine, &other, &third))?;
            gaps.push(mine.worst.get());
            ours += mine.errors.get();
            theirs += other.errors.get();
            freds += third.errors.get();
        }
        let Some(worst) = gaps.iter().max().copied() else { continue };
        gaps.sort_unstable();
        let aim = |most| (side == "Moim").then_some(Aim::AtMost(most));
        let ms = |gap: Duration| gap.as_secs_f64() * 1e3;
        let median = ms(gaps[gaps.len() / 2]);
        figures.push(Figure::new(side, "longest wait for an acknowledged SET", median, "ms", aim(2_000.0)));
        figures.push(Figure::new(side, "the same, worst", ms(worst), "ms", None));
        figures.push(Figure::new(side, "errors that slot-client showed", ours as f64, "", aim(0.0)));
        figures.push(Figure::new(side, "errors that the redis crate showed", theirs as f64, "", None));
        figures.push(Figure::new(side, "errors that the fred crate showed", freds as f64, "", None));
    }
    ensure!(!figures.is_empty(), "neither Moim nor Redis is here");
    let title = format!("failover of a shard, kill -9 of its primary, {ROUNDS} rounds");
    Ok(Metric { number: 33, title, figures, ..Metric::default() })
}

fn start(moim: Option<&Path>, side: &str) -> Result<Option<Subject>> {
    if side != "Moim" {
        return Ok(RedisCluster::start()?.map(Subject::Redis));
    }
    let Some(program) = moim else { return Ok(None) };
    let options = Options { program: Some(program.to_owned()), ..Options::new() };
    Ok(Some(Subject::Moim(Cluster::moim(3, &options, false)?)))
}

async fn kill_a_primary(
    mut subject: Subject,
    mine: &Observed,
    other: &Observed,
    third: &Observed,
) -> Result<()> {
    let seeds = subject.seeds();
    let client = Client::builder(&seeds.join(",")).timeout(TIMEOUT).connect().await?;
    let deadline = Instant::now() + TIMEOUT;
    while client.uncovered_slots() > 0 {
        ensure!(Instant::now() < deadline, "not every slot has a primary");
        client.refresh();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let urls = seeds.iter().map(|seed| format!("redis://{seed}/"));
    let theirs = ClusterClientBuilder::new(urls)
        .response_timeout(TIMEOUT / 4)
        .overall_response_timeout(Some(TIMEOUT))
        .build()?
        .get_async_connection()
        .await?;
    let third_client = fred(&seeds).await?;
    let port = client.primary_of("victim").context("a primary")?.port;
    let own = |key: &String| client.primary_of(key).is_some_and(|address| address.port == port);
    let keys: Vec<String> = (0..).map(|number| format!("key:{number}")).filter(own).take(KEYS).collect();
    let end = Instant::now() + BEFORE + AFTER;
    let (ours, theirs, freds) = (&client, &theirs, &third_client);
    let workers = keys.iter().map(|key| async move {
        tokio::join!(
            write_ours(ours, key, end, mine),
            write_theirs(theirs.clone(), key, end, other),
            write_freds(freds, key, end, third)
        );
    });
    let killed = async {
        tokio::time::sleep(BEFORE).await;
        subject.kill(port)
    };
    let (_, killed) = tokio::join!(futures_util::future::join_all(workers), killed);
    // The client is no longer needed; a failed QUIT does not matter.
    let _ = third_client.quit().await;
    killed
}

async fn fred(seeds: &[String]) -> Result<Fred> {
    let server = |seed: &String| -> Result<Server> {
        let (host, port) = seed.rsplit_once(':').context("a port")?;
        Ok(Server::new(host, port.parse()?))
    };
    let hosts = seeds.iter().map(server).collect::<Result<Vec<_>>>()?;
    let server = ServerConfig::Clustered { hosts, policy: Default::default() };
    let client = Builder::from_config(Config { server, ..Config::default() })
        .with_performance_config(|settings| settings.default_command_timeout = TIMEOUT)
        .set_policy(ReconnectPolicy::default())
        .build()?;
    client.init().await?;
    Ok(client)
}

async fn write_ours(client: &Client, key: &str, end: Instant, observed: &Observed) {
    let mut number = 0u64;
    while Instant::now() < end {
        let asked = Instant::now();
        let answer = client.set(format!("{{{key}}}ours"), number).await;
        observed.note(asked.elapsed(), u64::from(answer.is_err()));
        number += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn write_freds(client: &Fred, key: &str, end: Instant, observed: &Observed) {
    let mut number = 0u64;
    while Instant::now() < end {
        let asked = Instant::now();
        let text = number.to_string();
        let answer: Result<(), fred::error::Error> =
            client.set(format!("{{{key}}}freds"), text, None, None, false).await;
        observed.note(asked.elapsed(), u64::from(answer.is_err()));
        number += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn write_theirs(mut connection: ClusterConnection, key: &str, end: Instant, observed: &Observed) {
    let mut number = 0u64;
    while Instant::now() < end {
        let asked = Instant::now();
        let command = redis::cmd("SET").arg(format!("{{{key}}}theirs")).arg(number).to_owned();
        let answer: redis::RedisResult<()> = command.query_async(&mut connection).await;
        observed.note(asked.elapsed(), u64::from(answer.is_err()));
        number += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
