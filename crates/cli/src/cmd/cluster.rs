//! `moim cluster …`: state and changes of the nodes of a cluster, through the admin port of any node.

mod change;
mod empty;
mod events;
mod health;
mod members;
mod recover;
mod status;

use std::time::Duration;

use clap::{Args, Subcommand};
use moim_node::api::{ClusterReport, NOT_IN_CLUSTER};

use crate::cmd::block_on;
use crate::exit::{Failure, Outcome, Status};
use crate::http::{RequestError, Response, request};
use crate::output::Output;
use crate::target::{AdminArgs, Target};

/// The timeout of one request to one node.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    #[command(flatten)]
    admin: AdminArgs,
    #[command(subcommand)]
    verb: ClusterVerb,
}

#[derive(Debug, Subcommand)]
enum ClusterVerb {
    /// The cluster in a few lines
    #[command(
        after_help = "Example:\n  moim cluster status\n  moim cluster status --admin 10.0.0.1:9644 -o json"
    )]
    Status,
    /// The nodes: who they are, what they do, where they listen
    #[command(after_help = "Example:\n  moim cluster members")]
    Members,
    /// Whether everything is as it should be; status 8 when it is not
    #[command(after_help = "Example:
  moim cluster health
  moim cluster health --watch --exit-when-healthy --timeout 2m")]
    Health(HealthArgs),
    /// What has happened, as one node saw it since its start
    #[command(after_help = "Example:\n  moim cluster events\n  moim cluster events --follow -o json")]
    Events(EventsArgs),
    /// Let others lead what a node leads, and keep it so: before its machine is worked on
    #[command(after_help = "Example:\n  moim cluster drain 2 --timeout 1m\n  moim cluster undrain 2")]
    Drain(NodeArgs),
    /// Let a node lead again
    #[command(after_help = "Example:\n  moim cluster undrain 2")]
    Undrain(NodeArgs),
    /// Move everything off a node, then take it out of the cluster for good; it stops by itself if it runs
    #[command(
        after_help = "Example:\n  moim cluster remove 3 --yes --timeout 10m\n  moim cluster remove 3 --yes --force    # it is lost, with what only it had"
    )]
    Remove(RemoveArgs),
    /// Let an empty data folder take the place of a node that lost its own
    #[command(
        after_help = "Example:\n  moim cluster replace 3 --yes    # then start node 3 with an empty folder"
    )]
    Replace(ChangeArgs),
    /// Let a data directory go on that was found to be an older copy, where no other copy is left; its node must be stopped
    #[command(after_help = "Example:\n  moim cluster recover --data /var/lib/moim --accept-data-loss")]
    Recover(RecoverArgs),
}

#[derive(Debug, Args)]
struct RecoverArgs {
    /// The data directory
    #[arg(long, value_name = "DIR")]
    data: String,
    /// Give up what was acknowledged after the copy was made and is on no other node
    #[arg(long)]
    accept_data_loss: bool,
}

#[derive(Debug, Args)]
struct HealthArgs {
    /// Go on, and print what changes
    #[arg(short, long)]
    watch: bool,
    /// Wait until the cluster is healthy, --timeout at most
    #[arg(short, long)]
    exit_when_healthy: bool,
}

#[derive(Debug, Args)]
struct EventsArgs {
    /// Go on, and print what happens
    #[arg(short, long)]
    follow: bool,
    /// Only the last so many
    #[arg(short, long, value_name = "N")]
    num: Option<usize>,
}

#[derive(Debug, Args)]
struct NodeArgs {
    /// The node
    #[arg(value_name = "NODE")]
    node_id: i32,
}

#[derive(Debug, Args)]
struct RemoveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Do not move anything: copies that only this node has are lost
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct ChangeArgs {
    /// The node
    #[arg(value_name = "NODE")]
    node_id: i32,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub(crate) fn run(args: ClusterArgs, output: Output) -> Outcome {
    let ClusterArgs { admin, verb } = args;
    if let ClusterVerb::Recover(args) = &verb {
        return recover::run(args, output);
    }
    block_on(async {
        let nodes = Nodes::new(&admin)?;
        match verb {
            ClusterVerb::Status => status::run(&nodes, output).await,
            ClusterVerb::Members => members::run(&nodes, output).await,
            ClusterVerb::Health(args) => health::run(&nodes, &args, output).await,
            ClusterVerb::Events(args) => events::run(&nodes, &args, output).await,
            ClusterVerb::Drain(args) => empty::drain(&nodes, &args, output).await,
            ClusterVerb::Undrain(args) => empty::undrain(&nodes, &args, output).await,
            ClusterVerb::Remove(args) => change::remove(&nodes, &args, output).await,
            ClusterVerb::Replace(args) => change::replace(&nodes, &args, output).await,
            ClusterVerb::Recover(args) => recover::run(&args, output),
        }
    })
}

/// The admin ports of a command.
pub(crate) struct Nodes {
    target: Target,
    pub(crate) timeout: Duration,
}

impl Nodes {
    /// The admin ports that the flags name.
    pub(crate) fn new(admin: &AdminArgs) -> Outcome<Self> {
        Ok(Self { target: admin.target()?, timeout: admin.timeout })
    }

    fn request_timeout(&self) -> Duration {
        self.timeout.min(REQUEST_TIMEOUT)
    }

    /// The report of the first node that has one; of the leader if it answers, because only it knows the lag of others.
    async fn report(&self) -> Outcome<ClusterReport> {
        let first = self.first_report().await?;
        let leader = first.nodes.iter().find(|node| Some(node.node_id) == first.leader);
        let admin =
            leader.and_then(|node| node.admin.as_deref()).and_then(moim_node::config::split_host_port);
        if first.leader == Some(first.node_id) {
            return Ok(first);
        }
        let Some(admin) = admin else { return Ok(first) };
        match get_report(&admin, self.request_timeout()).await {
            Ok(report) if report.cluster_id == first.cluster_id => Ok(report),
            _ => Ok(first),
        }
    }

    async fn first_report(&self) -> Outcome<ClusterReport> {
        let mut refusal = None;
        for address in &self.target.addresses {
            match get_report(address, self.request_timeout()).await {
                Ok(report) => return Ok(report),
                Err(failure) if failure.status == Status::Unreachable => refusal = refusal.or(Some(failure)),
                Err(failure) => refusal = Some(failure),
            }
        }
        let failure = refusal.unwrap_or_else(|| Failure::usage("no admin port is named"));
        Err(match failure.status {
            Status::Unreachable => failure.hint("is `moim serve` running? name a node with --admin"),
            _ => failure,
        })
    }

    /// The response of the first node that is in a cluster.
    pub(crate) async fn get(&self, path: &str) -> Outcome<String> {
        self.ask("GET", path, self.request_timeout()).await
    }

    /// Sends a change to the first node that is in a cluster.
    async fn change(&self, path: &str) -> Outcome {
        self.ask_for(path).await.map(drop)
    }

    /// The same, with the response.
    pub(crate) async fn ask_for(&self, path: &str) -> Outcome<String> {
        self.ask("POST", path, self.timeout).await
    }

    /// Skips nodes that do not run and nodes that are not in a cluster yet: neither has executed anything. The error of a
    /// node outside a cluster is preferred, because its return may be the purpose of the command.
    async fn ask(&self, method: &str, path: &str, timeout: Duration) -> Outcome<String> {
        let mut outside = None;
        let mut unreachable = Failure::usage("no admin port is named");
        for address in &self.target.addresses {
            match request(address, method, path, timeout).await {
                Err(RequestError::Unreachable(why)) => unreachable = not_there(address, &why),
                Ok(answer) if answer.status == 503 && answer.body.contains(NOT_IN_CLUSTER) => {
                    outside = Some(refused(address, &answer));
                }
                answer => return changed(address, answer),
            }
        }
        Err(outside.unwrap_or_else(|| unreachable.hint("is `moim serve` running? name a node with --admin")))
    }
}

fn not_there(address: &(String, u16), why: &str) -> Failure {
    Failure::new(Status::Unreachable, format!("no node answers at {}:{}: {why}", address.0, address.1))
}

async fn get_report(address: &(String, u16), timeout: Duration) -> Outcome<ClusterReport> {
    let answer = answered(address, request(address, "GET", "/api/v1/cluster", timeout).await)?;
    if answer.status != 200 {
        return Err(refused(address, &answer));
    }
    serde_json::from_str(&answer.body).map_err(|error| {
        Failure::error(format!("{}:{} says what this moim does not know: {error}", address.0, address.1))
    })
}

fn answered(address: &(String, u16), answer: Result<Response, RequestError>) -> Outcome<Response> {
    let (host, port) = address;
    answer.map_err(|why| match why {
        RequestError::Unreachable(why) => not_there(address, &why),
        RequestError::Lost(why) => Failure::error(format!("{host}:{port}: {why}")),
        RequestError::TimedOut => {
            Failure::new(Status::Timeout, format!("{host}:{port} did not answer in time"))
        }
    })
}

fn changed(address: &(String, u16), answer: Result<Response, RequestError>) -> Outcome<String> {
    let answer = answered(address, answer)?;
    if answer.status == 200 { Ok(answer.body) } else { Err(refused(address, &answer)) }
}

/// The failure, with its exit status, of a refused request.
fn refused(address: &(String, u16), answer: &Response) -> Failure {
    #[derive(serde::Deserialize)]
    struct Refusal {
        error: String,
    }
    let why = match serde_json::from_str::<Refusal>(&answer.body) {
        Ok(refusal) => refusal.error,
        Err(_) => format!("{}:{} answers {} {}", address.0, address.1, answer.status, answer.body.trim()),
    };
    let status = match answer.status {
        400 => Status::Usage,
        404 => Status::NotFound,
        409 => Status::Conflict,
        503 => Status::Unhealthy,
        504 => Status::Timeout,
        _ => Status::Error,
    };
    Failure::new(status, why)
}
