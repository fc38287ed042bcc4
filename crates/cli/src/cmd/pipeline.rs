//! `moim pipeline …`: the exactly-once pipeline, its load and its verdict.
//!
//! | file | owns |
//! |---|---|
//! | `roles.rs` | run, gateway, counter, aggregator |
//! | `load.rs` | clients that send lines |
//! | `verify.rs` | the verdict, and cleaning up |
//! | `fault.rs` | faults injected into a cluster made for it |
//! | `storm.rs` | the storm among them |
//! | `stand.rs` | such a cluster with a pipeline on it |
//! | `live.rs` | counts while they grow |

pub(crate) mod fault;
pub(crate) mod live;
pub(crate) mod load;
mod roles;
pub(crate) mod stand;
mod storm;
pub(crate) mod verify;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use moim_pipeline::{PipelineConfig, Secret, Store};

use crate::cmd::block_on;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, note};
use crate::target::{Service, Target, target};

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    common: CommonArgs,
    #[command(subcommand)]
    verb: PipelineVerb,
}

/// The flags of every verb.
#[derive(Clone, Debug, Args)]
pub(crate) struct CommonArgs {
    /// Kafka servers [default: $MOIM_KAFKA, else the nearest .moim/context.toml, else 127.0.0.1:9092]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    kafka: Option<String>,
    /// Redis Cluster nodes [default: $MOIM_REDIS, else the nearest .moim/context.toml, else 127.0.0.1:6379]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    redis: Option<String>,
    /// Settings of the pipeline; flags win
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Put before the names of groups and transactional ids [default: pipeline]
    #[arg(long, global = true, value_name = "NAME")]
    name: Option<String>,
    /// The secret clients and gateways share; made when it is not there [default: .moim/pipeline.token]
    #[arg(long, global = true, value_name = "FILE")]
    token: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum PipelineVerb {
    /// Run gateways, counters and aggregators in one process
    #[command(after_help = "Example:
  moim pipeline run
  moim pipeline run --kafka k1:9092,k2:9092 --redis r1:6379,r2:6379 --ack-after-queue")]
    Run(RoleArgs),
    /// Run gateways alone
    #[command(after_help = "Example:\n  moim pipeline gateway --listen 127.0.0.1:9700")]
    Gateway(RoleArgs),
    /// Run counters alone
    #[command(after_help = "Example:\n  moim pipeline counter --instances 2 --first-instance 4")]
    Counter(RoleArgs),
    /// Run aggregators alone
    #[command(after_help = "Example:\n  moim pipeline aggregator --instances 2")]
    Aggregator(RoleArgs),
    /// Send lines to a gateway: a file, the built-in text, or what you type
    #[command(after_help = "Example:
  moim pipeline load --clients 10                 # ten clients, the built-in 4,422 lines each
  moim pipeline load --clients 3 --file book.txt
  moim pipeline load --client me --type           # lines you type")]
    Load(load::LoadArgs),
    /// Say whether every message was counted exactly once; status 8 when not
    #[command(after_help = "Example:\n  moim pipeline verify --wait 30s\n  moim pipeline verify -o json")]
    Verify(verify::VerifyArgs),
    /// Delete a run: topics, groups and keys
    #[command(after_help = "Example:\n  moim pipeline clean --yes")]
    Clean {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
    /// Break something on purpose in a cluster made for it, heal it, and verify
    #[command(
        after_help = "Example:\n  moim pipeline fault broker-kill --clients 50\n  moim pipeline fault storm"
    )]
    Fault(fault::FaultArgs),
}

/// The flags of the roles.
#[derive(Clone, Debug, Args)]
struct RoleArgs {
    /// Where the first gateway listens; the others take the ports after it [default: 127.0.0.1:9700]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<SocketAddr>,
    /// How many of each role [default: 1 gateway, 3 counters, 3 aggregators]
    #[arg(long, value_name = "N")]
    instances: Option<usize>,
    /// The number of the first counter and aggregator: every one of a pipeline needs its own
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_instance: usize,
    /// The certificate gateways show, with those that lead to its authority (PEM); without it nothing is encrypted
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Acknowledge what is in the queue, not what is in the store: for a store that can lose what it acknowledged
    #[arg(long)]
    ack_after_queue: bool,
    /// A message without a report from the queue for so long goes out again [default: 2m]
    #[arg(long, value_name = "DURATION", value_parser = crate::target::duration)]
    report_timeout: Option<std::time::Duration>,
    /// At most so many messages in one transaction [default: 1000]
    #[arg(long, value_name = "N")]
    transaction_size: Option<usize>,
    /// Faults of the gateways, for tests.
    #[arg(long, hide = true, value_name = "SN")]
    fail_report_of: Option<u64>,
    #[arg(long, hide = true, value_name = "SN")]
    lose_report_of: Option<u64>,
    #[arg(long, hide = true, value_name = "N", default_value_t = 0)]
    producer_messages: usize,
    /// End when the process with this id, which must be the parent, ends.
    #[arg(long, hide = true, value_name = "PID")]
    die_with: Option<u32>,
}

pub(crate) fn run(args: PipelineArgs, output: Output) -> Outcome {
    let PipelineArgs { common, verb } = args;
    match &verb {
        PipelineVerb::Run(role)
        | PipelineVerb::Gateway(role)
        | PipelineVerb::Counter(role)
        | PipelineVerb::Aggregator(role) => crate::parent::exit_with_parent(role.die_with)?,
        _ => {}
    }
    if let PipelineVerb::Fault(args) = &verb {
        fault::maybe_enter(args)?;
    }
    block_on(async {
        match verb {
            PipelineVerb::Run(role) => roles::run(&common, &role, roles::Which::All, output).await,
            PipelineVerb::Gateway(role) => roles::run(&common, &role, roles::Which::Gateway, output).await,
            PipelineVerb::Counter(role) => roles::run(&common, &role, roles::Which::Counter, output).await,
            PipelineVerb::Aggregator(role) => {
                roles::run(&common, &role, roles::Which::Aggregator, output).await
            }
            PipelineVerb::Load(load) => load::run(&common, &load, output).await,
            PipelineVerb::Verify(args) => verify::run(&common, &args, output).await,
            PipelineVerb::Clean { yes } => verify::clean(&common, yes).await,
            PipelineVerb::Fault(args) => fault::run(&args, output).await,
        }
    })
}

impl CommonArgs {
    /// The settings: file, then flags and the usual places for addresses.
    pub(crate) fn settings(&self) -> Outcome<PipelineConfig> {
        let mut config = match &self.config {
            None => PipelineConfig::default(),
            Some(path) => {
                let wrong = |why: String| Failure::usage(format!("{}: {why}", path.display()));
                let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
                toml::from_str(&text).map_err(|error| wrong(error.to_string()))?
            }
        };
        let listed = |target: Target| {
            let all = target.addresses.iter().map(|(host, port)| format!("{host}:{port}"));
            all.collect::<Vec<_>>().join(",")
        };
        let from_file = self.config.is_some();
        if self.kafka.is_some() || !from_file {
            config.kafka = listed(target(Service::Kafka, self.kafka.as_deref())?);
        }
        if self.redis.is_some() || !from_file {
            config.redis = listed(target(Service::Redis, self.redis.as_deref())?);
        }
        if let Some(name) = &self.name {
            config.name.clone_from(name);
        }
        if let Some(token) = &self.token {
            config.token_file.clone_from(token);
        }
        Ok(config)
    }
}

/// Reads the secret, or makes it.
pub(crate) fn secret(config: &PipelineConfig) -> Outcome<Secret> {
    Secret::load_or_create(&config.token_file)
        .map_err(|error| Failure::error(format!("{}: {error}", config.token_file.display())))
}

/// Connects to the store.
pub(crate) async fn store(config: &PipelineConfig) -> Outcome<Store> {
    moim_pipeline::store::connect(&config.redis).await.map_err(|error| {
        Failure::new(Status::Unreachable, format!("{}: {error}", config.redis))
            .hint("--redis names nodes of a Redis Cluster; `moim dev` starts one")
    })
}

/// What the queue's client says, for people.
/// Creates the topics; notes what it waits for.
pub(crate) async fn create_topics(config: &PipelineConfig) -> Outcome {
    let made = moim_pipeline::queue::create_topics(&config.queue(), |why| note(why)).await;
    made.map_err(|error| match config.replication_factor {
        0 => Failure::error(format!("cannot make the topics: {error}")),
        copies => Failure::error(format!("cannot make the topics with {copies} copies: {error}")),
    })
}

pub(crate) fn kafka_failure(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Status::Unreachable, format!("the queue: {error}")).hint("--kafka names its servers")
}
