//! The supervisor: starts every node, reports when the cluster is ready, serves the control socket, and stops everything
//! on request or when a first start fails.
//!
//! Invariant: one supervisor per directory (an exclusive lock held until the process ends). The nodes are children of its
//! main thread, so that no end of it, kill -9 included, leaves one behind.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_node::Signals;
use rustix::fs::{FlockOperation, flock};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::UpArgs;
use super::control::{Asked, Request, Response, Socket};
use super::plan::{Member, Plan, initial_cluster};
use super::readmit::Readmission;
use super::roster::{Listing, Roster, listed, remove_context, write_context};
use super::runner::{NodeRequest, Recipe, Runner};
use super::{detach, readmit};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Format, Output, Section, note};

const LOCK: &str = "dev.lock";
const DEFAULT_NODES: u16 = 3;
const DEFAULT_BASE: u16 = 20_000;
/// The interval of progress notes.
const PROGRESS: Duration = Duration::from_secs(5);

/// Starts a cluster and supervises it until a signal or a request stops it.
pub(super) async fn run(args: &UpArgs, data: &Path, patience: Duration, output: Output) -> Outcome {
    let mut signals = Signals::listen()?;
    std::fs::create_dir_all(data)
        .map_err(|error| Failure::error(format!("cannot make {}: {error}", data.display())))?;
    let data = &std::path::absolute(data)?;
    let _lock = lock(data)?;
    let plan = plan(args, data)?;
    let lost = readmit::all_lost(data)?;
    plan.check_free()?;
    let (stop_all, mut stopping) = mpsc::channel(1);
    let cluster = Arc::new(Cluster::new(data, plan, stop_all)?);
    let scope = Scope::new(Shutdown::new());
    let socket = Socket::bind(data)
        .map_err(|error| Failure::error(format!("cannot listen in {}: {error}", data.display())))?;
    scope.spawn("control socket", serve(socket, cluster.clone(), scope.clone()));

    let here = std::env::current_dir()?;
    let started = tokio::select! {
        started = bring_up(&cluster, &lost, patience, output) => started,
        name = signals.next() => Err(Failure::error(format!("{name} before the cluster was ready"))),
        _ = stopping.recv() => Err(Failure::error("stopped before the cluster was ready")),
    };
    let outcome = match started {
        Err(failure) => Err(failure),
        Ok(()) => {
            write_context(&here, &cluster.roster.listing().nodes)?;
            detach::let_go(args, data)?;
            tokio::select! {
                _ = signals.next() => {}
                _ = stopping.recv() => {}
            }
            Ok(())
        }
    };
    take_down(&cluster, &mut signals).await;
    remove_context(&here, &cluster.roster.listing().nodes)?;
    cluster.roster.close()?;
    outcome
}

/// The lock of the supervisor of this directory.
pub(super) fn lock(data: &Path) -> Outcome<File> {
    let path = data.join(LOCK);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        Failure::new(Status::Conflict, format!("a cluster runs in {} already", data.display()))
            .hint("`moim dev stop` ends it; --data names another folder")
    })?;
    Ok(file)
}

/// The plan of the flags; without a flag, that of the earlier start, or the default.
fn plan(args: &UpArgs, data: &Path) -> Outcome<Plan> {
    let before = match Listing::read(data)? {
        Some(listing) => Some(listing.plan()?),
        None => None,
    };
    let nodes = args.nodes.or(before.map(|plan| plan.nodes)).unwrap_or(DEFAULT_NODES);
    if let Some(before) = before.filter(|before| before.nodes > nodes) {
        let message = format!("{} holds a cluster of {} nodes", data.display(), before.nodes);
        return Err(Failure::new(Status::Conflict, message)
            .hint("start as many, take another folder with --data, or delete it with `moim dev purge`"));
    }
    match args.base_port {
        Some(0) => Plan::anywhere_free(nodes),
        Some(base) => Plan::new(nodes, base),
        None => Plan::new(nodes, before.map_or(DEFAULT_BASE, |plan| plan.base)),
    }
}

/// The nodes and what is known about them.
pub(super) struct Cluster {
    data: PathBuf,
    pub(super) roster: Arc<Roster>,
    pub(super) runners: Vec<Runner>,
    stop_all: mpsc::Sender<()>,
}

impl Cluster {
    pub(super) fn new(data: &Path, plan: Plan, stop_all: mpsc::Sender<()>) -> Outcome<Self> {
        let roster = Arc::new(Roster::new(data, plan)?);
        let scope = Scope::new(Shutdown::new());
        let members = plan.members();
        let initial_cluster = initial_cluster(&members);
        let runner = |member: &Member| {
            let others: Vec<Member> = members.iter().filter(|other| other.id != member.id).cloned().collect();
            let recipe = Recipe {
                member: member.clone(),
                data: data.to_owned(),
                initial_cluster: initial_cluster.clone(),
                others: listed(&others, |node| &node.peer),
                apart: plan.apart,
            };
            Runner::spawn(recipe, roster.clone(), &scope)
        };
        let runners = members.iter().map(runner).collect();
        Ok(Self { data: data.to_owned(), roster, runners, stop_all })
    }

    pub(super) fn runner(&self, node: i32) -> Outcome<&Runner> {
        self.runners.iter().find(|runner| runner.id == node).ok_or_else(|| {
            let message = format!("there is no node {node}; nodes are 1 to {}", self.runners.len());
            Failure::new(Status::NotFound, message)
        })
    }

    pub(super) async fn restart(&self, runner: &Runner, fresh: bool) -> Outcome<String> {
        let nodes = self.roster.listing().nodes;
        if !fresh && !readmit::lost_its_folder(&self.data, runner.id, &nodes) {
            return runner.ask(NodeRequest::Restart).await;
        }
        // A process without its data directory would be fenced.
        runner.ask(NodeRequest::Kill).await?;
        if fresh {
            readmit::delete_folder(&self.data, runner.id)?;
        }
        let ready = match readmit::replace(&nodes, runner.id).await? {
            Readmission::Replaced => runner.ask(NodeRequest::Restart).await?,
            Readmission::Removed => runner.ask(NodeRequest::Join).await?,
        };
        Ok(format!("{ready}, as a new node with an empty folder: what it held is gone"))
    }

    async fn on_request(&self, request: Request) -> Outcome<Response> {
        let message = match request {
            Request::Status => return Ok(Response::Nodes(self.roster.listing())),
            Request::Stop { node: None } => {
                // A full channel means that a stop is requested already. The end of this process is the response.
                let _ = self.stop_all.try_send(());
                std::future::pending().await
            }
            Request::Stop { node: Some(node) } => {
                format!("node {node} {}", self.runner(node)?.ask(NodeRequest::Stop).await?)
            }
            Request::Kill { node } => {
                format!("node {node} {}", self.runner(node)?.ask(NodeRequest::Kill).await?)
            }
            Request::Restart { node, fresh, patience_ms } => {
                let runner = self.runner(node)?;
                let patience = Duration::from_millis(patience_ms);
                let ready =
                    tokio::time::timeout(patience, self.restart(runner, fresh)).await.map_err(|_| {
                        let message =
                            format!("node {node} runs, but was not ready within {} s", patience.as_secs());
                        Failure::new(Status::Timeout, message)
                            .hint("it becomes ready when most of the nodes run; see its log")
                    })?;
                format!("node {node} {}", ready?)
            }
        };
        Ok(Response::Done { message })
    }
}

pub(super) async fn serve(socket: Socket, cluster: Arc<Cluster>, scope: Scope) {
    loop {
        match socket.accept().await {
            Ok(asked) => {
                scope.spawn("control request", serve_one(asked, cluster.clone()));
            }
            Err(error) => {
                note(format_args!("the control socket: {error}"));
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_one(mut asked: Asked, cluster: Arc<Cluster>) {
    let response = match asked.request().await {
        Ok(request) => cluster.on_request(request).await.unwrap_or_else(Response::from),
        Err(error) => Failure::usage(format!("the request is not understood: {error}")).into(),
    };
    asked.answer(&response).await;
}

/// Starts every node and waits until all are ready.
async fn bring_up(cluster: &Cluster, lost: &[i32], patience: Duration, output: Output) -> Outcome {
    let data = cluster.data.as_path();
    let since = Instant::now();
    let (finished, mut results) = mpsc::channel(cluster.runners.len());
    let scope = Scope::new(Shutdown::new());
    for runner in cluster.runners.clone() {
        let finished = finished.clone();
        scope.spawn("node start", async move {
            let result = runner.ask(NodeRequest::Start).await;
            // The receiver is closed once another node has failed.
            let _ = finished.send((runner.id, result)).await;
        });
    }
    // Let the runners start their processes, so that the table can name them.
    while cluster.roster.listing().nodes.iter().any(|node| node.pid.is_none()) && results.is_empty() {
        tokio::task::yield_now().await;
    }
    if output.format == Format::Table {
        print(&format!("{} nodes in {}\n", cluster.runners.len(), data.display()))?;
        print(&format!("{}\n", nodes_table(&cluster.roster.listing().nodes).text()))?;
    }
    let mut waiting: Vec<i32> = cluster.runners.iter().map(|runner| runner.id).collect();
    let (mut lost, mut is_up) = (lost.to_vec(), false);
    let mut refused: Vec<(i32, Failure)> = Vec::new();
    while !waiting.is_empty() {
        if since.elapsed() > patience {
            let message = format!("{} not ready within {} s", named(&waiting), patience.as_secs());
            return Err(Failure::new(Status::Timeout, message)
                .hint(format!("their logs are {}/node-*.log; --timeout waits longer", data.display())));
        }
        match tokio::time::timeout(PROGRESS.min(patience), results.recv()).await {
            Ok(Some((id, Ok(message)))) => {
                waiting.retain(|other| *other != id);
                is_up = true;
                note(format_args!("node {id} is {message}"));
                // A ready node has a quorum: nodes that lost their directories can be readmitted.
                for id in std::mem::take(&mut lost) {
                    note(format_args!("node {id} has lost its folder: what it held is gone"));
                    if let Readmission::Removed =
                        readmit::replace(&cluster.roster.listing().nodes, id).await?
                    {
                        note(format_args!(
                            "it was removed; `moim dev restart {id} --fresh` lets it in again"
                        ));
                        waiting.retain(|other| *other != id);
                    }
                }
            }
            // If the node was removed from the cluster, the others run without it; they tell whether it was.
            Ok(Some((id, Err(failure))))
                if failure.status == Status::Conflict && (is_up || waiting.len() > 1) =>
            {
                waiting.retain(|other| *other != id);
                refused.push((id, failure));
            }
            Ok(Some((_, Err(failure)))) => return Err(failure),
            Ok(None) => return Err(Failure::error("the nodes cannot be started")),
            Err(_) => {
                note(format_args!("waiting for {} ({:.0} s)", named(&waiting), since.elapsed().as_secs_f64()))
            }
        }
    }
    let is_refused = |id: i32| refused.iter().any(|(refused, _)| *refused == id);
    let nodes = cluster.roster.listing().nodes;
    if let Some(node) = nodes.iter().find(|node| node.pid.is_none() && !is_refused(node.id)) {
        let message = format!("node {} ended while the others started", node.id);
        return Err(Failure::error(message).hint(format!(
            "its log is {}/node-{}.log",
            data.display(),
            node.id
        )));
    }
    for (id, failure) in refused {
        if readmit::is_member(&cluster.roster.listing().nodes, id).await? {
            return Err(failure);
        }
        note(failure);
    }
    let listing = cluster.roster.listing();
    let running: Vec<Member> = listing.nodes.iter().filter(|node| node.pid.is_some()).cloned().collect();
    match output.format {
        Format::Table => print(&welcome(&running, data, since.elapsed())),
        Format::Json => output.print(&listing),
    }
}

/// Stops every node in order; another signal kills them.
async fn take_down(cluster: &Cluster, signals: &mut Signals) {
    note("stopping; another Ctrl-C kills the nodes");
    let all = async {
        let stops = cluster.runners.iter().map(|runner| runner.ask(NodeRequest::Stop));
        for stop in futures_util::future::join_all(stops).await {
            if let Err(failure) = stop {
                note(failure);
            }
        }
    };
    tokio::select! {
        () = all => {}
        // The children are killed as this process ends.
        _ = signals.next() => note("killing the nodes"),
    }
}

/// The nodes as a table.
pub(super) fn nodes_table(nodes: &[Member]) -> Section {
    let mut table = Section::new(&["NODE", ">PID", "KAFKA", "REDIS", "ETCD", "ADMIN", "PEER"]);
    for node in nodes {
        let pid = node.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let Member { id, kafka, redis, etcd, admin, peer, .. } = node;
        let redis = redis.clone().unwrap_or_else(|| "-".to_owned());
        table.row(vec![id.to_string(), pid, kafka.clone(), redis, etcd.clone(), admin.clone(), peer.clone()]);
    }
    table
}

fn welcome(nodes: &[Member], data: &Path, took: Duration) -> String {
    let kafka = listed(nodes, |node| &node.kafka);
    let etcd = listed(nodes, |node| &node.etcd);
    let redis = nodes.iter().find_map(|node| node.redis.clone()).unwrap_or_default();
    let redis_port = redis.rsplit(':').next().unwrap_or_default();
    let last = nodes.len();
    format!(
        "\nready after {:.1} s. Lines to paste:\n\
         \x20 kcat -b {kafka} -L\n\
         \x20 redis-cli -c -p {redis_port} set greeting hello\n\
         \x20 ETCDCTL_API=3 etcdctl --endpoints={etcd} endpoint status -w table\n\
         \x20 echo hello | moim topic produce greetings --kafka {kafka}\n\
         \x20 moim topic consume greetings -e --kafka {kafka}\n\
         \x20 moim coord put color blue --etcd {etcd}\n\
         \x20 moim dev kill {last} --data {data}\n\
         \x20 moim dev restart {last} --data {data}\n\
         In this folder the addresses can be left out. Ctrl-C, or `moim dev stop --data {data}`, stops all.\n",
        took.as_secs_f64(),
        data = data.display(),
    )
}

fn named(nodes: &[i32]) -> String {
    let list: Vec<_> = nodes.iter().map(ToString::to_string).collect();
    format!("node{} {}", if nodes.len() == 1 { "" } else { "s" }, list.join(", "))
}

fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
