//! `moim pipeline fault`: a cluster of three nodes, a pipeline of real processes on it, a load, a fault in the middle of
//! it, and the verdict.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::{Args, ValueEnum};
use moim_pipeline::{ClientOptions, QueueOptions, Sending, StoreError, client};
use tokio::time::Instant;

use super::load::built_in;
use super::stand::{Role, RoleProcess, Stand};
use super::verify::{conclude, settle};
use crate::cmd::dev::embed::Member;
use crate::cmd::dev::wires;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, note};
use crate::target::duration;

#[derive(Clone, Debug, Args)]
pub(crate) struct FaultArgs {
    /// What to break
    fault: Fault,
    /// How many clients send [default: 3, 30 or 50, as the fault needs]
    #[arg(long, value_name = "N")]
    clients: Option<usize>,
    /// How many lines each client sends
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    lines: usize,
    /// How long a storm lasts
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "15s")]
    storm: Duration,
    /// Where chance begins
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The folder of the cluster; deleted first
    #[arg(long, value_name = "DIR", default_value = ".moim/fault")]
    data: PathBuf,
    /// How long the run may take
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "2m")]
    timeout: Duration,
    /// Set by the command itself: it is in a network of its own.
    #[arg(long, hide = true)]
    apart: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Fault {
    /// The queue fails to store message 3 of every client
    StoreFailure,
    /// The report on message 3 of every client is lost
    ReportLost,
    /// The gateways' producers have room for 50 messages
    BufferFull,
    /// A broker is restarted in order
    BrokerRestart,
    /// A broker is killed
    BrokerKill,
    /// A counter is added, one restarted, one killed
    ConsumerChurn,
    /// A gateway is killed
    GatewayKill,
    /// The node with a primary of the store is killed
    PrimaryKill,
    /// Kills, pauses and cut-offs of everything, several at once
    Storm,
}

impl Fault {
    fn clients(self) -> usize {
        match self {
            Self::StoreFailure
            | Self::ReportLost
            | Self::ConsumerChurn
            | Self::GatewayKill
            | Self::PrimaryKill => 10,
            Self::BufferFull => 30,
            Self::BrokerRestart | Self::BrokerKill | Self::Storm => 50,
        }
    }

    fn gateway_flags(self) -> Vec<String> {
        let flags: &[&str] = match self {
            Self::StoreFailure => &["--fail-report-of", "3"],
            Self::ReportLost => &["--lose-report-of", "3", "--report-timeout", "2s"],
            Self::BufferFull => &["--producer-messages", "50"],
            _ => &[],
        };
        flags.iter().map(|flag| (*flag).to_owned()).collect()
    }
}

/// Everything that runs.
pub(super) struct Scene {
    pub(super) stand: Stand,
    pub(super) roles: Vec<RoleProcess>,
}

/// A storm cuts off as well: everything then runs in networks of its own, where that is possible.
pub(super) fn maybe_enter(args: &FaultArgs) -> Outcome {
    if args.fault != Fault::Storm || args.apart {
        return Ok(());
    }
    match wires::possible() {
        Ok(()) => Err(wires::enter("--apart")),
        Err(why) => {
            note(format_args!("without cut-offs: no network namespaces can be made here ({why})"));
            Ok(())
        }
    }
}

pub(super) async fn run(args: &FaultArgs, output: Output) -> Outcome {
    let clients = args.clients.unwrap_or_else(|| args.fault.clients()).max(1);
    let total = args.lines.min(moim_pipeline::lines::COUNT) * clients;
    note(format_args!("starting three nodes, two gateways, three counters and three aggregators"));
    let stand = match args.apart {
        false => Stand::start(&args.data, args.timeout).await?,
        true => Stand::start_apart(&args.data, args.timeout).await?,
    };
    super::create_topics(&stand.config).await?;
    let mut scene = Scene { roles: Vec::new(), stand };
    let outcome = scene.play(args, clients, total, output).await;
    let Scene { stand, mut roles } = scene;
    for role in &mut roles {
        // Whether it still ran does not matter now.
        let _ = role.kill().await;
    }
    stand.cluster.end().await?;
    outcome
}

impl Scene {
    async fn play(&mut self, args: &FaultArgs, clients: usize, total: usize, output: Output) -> Outcome {
        let gateways = self.stand.gateway_addresses()?;
        for address in gateways {
            self.add(Role::Gateway(address, args.fault.gateway_flags()))?;
        }
        for n in 0..3 {
            self.add(Role::Counter(n))?;
            self.add(Role::Aggregator(n))?;
        }
        let lines: Vec<_> = built_in().into_iter().take(args.lines.max(1)).collect();
        let sending: Vec<Arc<Sending>> = (0..clients).map(|_| Arc::default()).collect();
        // A storm needs a load that lasts as long as it does.
        let storm = args.fault == Fault::Storm;
        let rate = storm.then(|| lines.len() as f64 / args.storm.as_secs_f64().max(0.1));
        let options = (0..clients).map(|n| ClientOptions {
            client: format!("client-{n}"),
            incarnation: 1,
            gateways: gateways.to_vec(),
            secret: self.stand.secret.clone(),
            tls: None,
            patience: None,
            rate,
        });
        let options: Vec<_> = options.collect();
        note(format_args!("{clients} clients send {} lines each", lines.len()));
        let since = Instant::now();
        let sends =
            options.iter().zip(&sending).map(|(options, sending)| client::send(options, &lines, sending));
        let all = tokio::time::timeout(args.timeout, futures_util::future::try_join_all(sends));
        let acked = || sending.iter().map(|s| s.acked.load(Ordering::Relaxed) as usize).sum::<usize>();
        let (sent, broken) = tokio::join!(all, self.inject(args, total, &acked));
        broken?;
        sent.map_err(|_| {
            Failure::new(Status::Timeout, format!("{} of {total} messages were acknowledged", acked()))
        })?
        .map_err(|error| Failure::error(error.to_string()))?;
        note(format_args!("all sent after {:.1} s; verifying", since.elapsed().as_secs_f64()));
        let queue: QueueOptions = self.stand.config.queue();
        let each = Some(clients as u64);
        let verdict = settle(&self.stand.store, &queue, args.timeout, each, || ()).await?;
        output.print(&verdict)?;
        conclude(&verdict)
    }

    fn add(&mut self, role: Role) -> Outcome {
        self.stand.join(&role)?;
        self.roles.push(self.stand.spawn(role)?);
        Ok(())
    }

    async fn inject(&mut self, args: &FaultArgs, total: usize, acked: &dyn Fn() -> usize) -> Outcome {
        if !matches!(args.fault, Fault::StoreFailure | Fault::ReportLost | Fault::BufferFull) {
            // In the middle of the load; a storm from its beginning on.
            let until = Instant::now() + args.timeout;
            let enough = if args.fault == Fault::Storm { 1 } else { total / 4 };
            while acked() < enough && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        match args.fault {
            Fault::StoreFailure | Fault::ReportLost | Fault::BufferFull => Ok(()),
            Fault::BrokerRestart => {
                let node = self.busiest().await?;
                note(format_args!("restarting node {node}, which leads most"));
                self.stand.cluster.restart(node).await
            }
            Fault::BrokerKill => {
                let node = self.busiest().await?;
                self.kill_node(node, "which leads most").await
            }
            Fault::PrimaryKill => {
                let node = self.primary_of("client-0").await?;
                self.kill_node(node, "which has the primary of client-0's keys").await
            }
            Fault::GatewayKill => self.kill_and_restart(0).await,
            Fault::ConsumerChurn => self.churn().await,
            Fault::Storm => self.storm(args.seed, args.storm).await,
        }
    }

    async fn kill_node(&self, node: i32, which: &str) -> Outcome {
        note(format_args!("kill -9 of node {node}, {which}"));
        self.stand.cluster.kill(node).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        note(format_args!("node {node} starts again"));
        self.stand.cluster.restart(node).await
    }

    /// The node that answers for a client's keys. Its stores have the ports after its first one.
    async fn primary_of(&self, client: &str) -> Outcome<i32> {
        let strange = || Failure::error("the store does not say who has which slot");
        let commands = self.stand.store.commands();
        let unreachable = |error: StoreError| Failure::new(Status::Unreachable, error.to_string());
        let slot = commands.call(&[b"CLUSTER", b"KEYSLOT", client.as_bytes()]).await.map_err(unreachable)?;
        let slot = slot.int().ok_or_else(strange)?;
        let ranges = commands.call(&[b"CLUSTER", b"SLOTS"]).await.map_err(unreachable)?;
        let port = ranges.list().iter().find_map(|range| {
            let range = range.list();
            let (first, last) = (range.first()?.int()?, range.get(1)?.int()?);
            (first..=last).contains(&slot).then(|| range.get(2)?.list().get(1)?.int())?
        });
        let port = port.ok_or_else(strange)?;
        let home = |member: &Member| member.redis.as_ref()?.rsplit_once(':')?.1.parse::<i64>().ok();
        let nearest = self.stand.cluster.members().into_iter();
        let nearest = nearest.filter_map(|m| home(&m).filter(|home| *home <= port).map(|home| (home, m.id)));
        nearest.max().map(|(_, id)| id).ok_or_else(strange)
    }

    async fn busiest(&self) -> Outcome<i32> {
        let queue = self.stand.config.queue();
        let leaders = tokio::task::spawn_blocking(move || moim_pipeline::queue::leaders(&queue)).await;
        let leaders =
            leaders.map_err(|e| Failure::error(e.to_string()))?.map_err(|e| super::kafka_failure(&e))?;
        Ok(leaders.into_iter().max_by_key(|(_, count)| *count).map_or(1, |(node, _)| node))
    }

    async fn kill_and_restart(&mut self, at: usize) -> Outcome {
        let role = self.roles[at].role.clone();
        note(format_args!("kill -9 of {}", role.name()));
        self.roles[at].kill().await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        note(format_args!("{} starts again", role.name()));
        self.roles[at] = self.stand.spawn(role)?;
        Ok(())
    }

    async fn churn(&mut self) -> Outcome {
        let counters: Vec<usize> =
            (0..self.roles.len()).filter(|at| matches!(self.roles[*at].role, Role::Counter(_))).collect();
        note("a fourth counter joins");
        self.add(Role::Counter(3))?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let role = self.roles[counters[0]].role.clone();
        note(format_args!("{} is restarted in order", role.name()));
        self.roles[counters[0]].stop().await?;
        self.roles[counters[0]] = self.stand.spawn(role)?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.kill_and_restart(counters[1]).await
    }
}
