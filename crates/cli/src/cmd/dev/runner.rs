//! One node of a development cluster: its process, started, watched, stopped and killed.
//!
//! The runner is a task that owns the child. Invariants: at most one process at a time; cluster.json is written before the
//! start or the end of the node is reported; the process cannot outlive the supervisor, because the kernel kills it when
//! the thread that started it ends (`moim serve --die-with`).

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use moim_base::task::Scope;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::plan::Member;
use super::roster::Roster;
use super::wires;
use crate::exit::{Failure, Outcome, Status};
use crate::output::note;

/// How long an orderly stop may take before the node is killed: what it acknowledged is safe either way.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// Lines of a log that are shown when a node did not start.
const LOG_LINES: usize = 12;

/// Receives the result of a request.
pub(super) type Answer = oneshot::Sender<Outcome<String>>;

/// A request to a runner. The result is sent when the state is reached.
pub(super) enum NodeRequest {
    /// Start it unless it runs; the answer comes when it is ready, or has ended.
    Start(Answer),
    /// Stop it if it runs, then start it; the answer comes when it is ready, or has ended.
    Restart(Answer),
    /// Start it with its empty folder as one that the cluster has never had; the answer comes as for a start.
    Join(Answer),
    /// Stop it in order; the answer comes when it has ended.
    Stop(Answer),
    /// Kill it; the answer comes when it has ended.
    Kill(Answer),
}

/// How a node is started, every time.
#[derive(Clone)]
pub(super) struct Recipe {
    /// Who it is and where it listens.
    pub(super) member: Member,
    /// The folder of the cluster.
    pub(super) data: PathBuf,
    /// Every node and its peer address.
    pub(super) initial_cluster: String,
    /// The peer addresses of the others.
    pub(super) others: String,
    /// Whether it has a network of its own.
    pub(super) apart: bool,
}

/// A handle on a runner.
#[derive(Clone)]
pub(super) struct Runner {
    /// The node.
    pub(super) id: i32,
    requests: mpsc::Sender<NodeRequest>,
}

impl Runner {
    /// A runner with nothing to run yet.
    pub(super) fn spawn(recipe: Recipe, roster: Arc<Roster>, scope: &Scope) -> Self {
        let (requests, inbox) = mpsc::channel(16);
        let id = recipe.member.id;
        let task = Task { recipe, roster, process: None, started: Vec::new() };
        scope.spawn("node runner", task.run(inbox));
        Self { id, requests }
    }

    /// Sends a request and waits for its result.
    pub(super) async fn ask(&self, request: impl FnOnce(Answer) -> NodeRequest) -> Outcome<String> {
        let (answer, answered) = oneshot::channel();
        let gone = || Failure::error(format!("node {}: the supervisor is stopping", self.id));
        self.requests.send(request(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

struct Task {
    recipe: Recipe,
    roster: Arc<Roster>,
    process: Option<Process>,
    /// The requests that wait for the node to be ready.
    started: Vec<Answer>,
}

struct Process {
    child: Child,
    pid: Pid,
    stdout: Lines<BufReader<ChildStdout>>,
    since: Instant,
    ready: bool,
}

enum Happening {
    Requested(Option<NodeRequest>),
    Said(String),
    Ended(std::io::Result<ExitStatus>),
}

impl Task {
    async fn run(mut self, mut inbox: mpsc::Receiver<NodeRequest>) {
        loop {
            let happening = match &mut self.process {
                None => Happening::Requested(inbox.recv().await),
                Some(process) => tokio::select! {
                    biased;
                    line = process.stdout.next_line(), if !process.ready => match line {
                        Ok(Some(line)) => Happening::Said(line),
                        // It closed its output: its end says why.
                        Ok(None) | Err(_) => Happening::Ended(process.child.wait().await),
                    },
                    status = process.child.wait() => Happening::Ended(status),
                    request = inbox.recv() => Happening::Requested(request),
                },
            };
            match happening {
                Happening::Requested(Some(request)) => self.on_request(request).await,
                Happening::Requested(None) => return,
                Happening::Said(line) => self.on_line(&line),
                Happening::Ended(status) => self.on_end(status),
            }
        }
    }

    async fn on_request(&mut self, request: NodeRequest) {
        match request {
            NodeRequest::Start(answer) => self.start(answer, false),
            NodeRequest::Restart(answer) => {
                self.end(Signal::TERM).await;
                self.start(answer, false);
            }
            NodeRequest::Join(answer) => {
                self.end(Signal::TERM).await;
                self.start(answer, true);
            }
            NodeRequest::Stop(answer) => {
                let how = self.end(Signal::TERM).await;
                let _ = answer.send(Ok(how));
            }
            NodeRequest::Kill(answer) => {
                let how = self.end(Signal::KILL).await;
                let _ = answer.send(Ok(how));
            }
        }
    }

    fn start(&mut self, answer: Answer, joins: bool) {
        if let Some(process) = &self.process
            && process.ready
        {
            let _ = answer.send(Ok("runs already".to_owned()));
            return;
        }
        if self.process.is_none() {
            match self.launch(joins) {
                Ok(process) => self.process = Some(process),
                Err(failure) => {
                    let _ = answer.send(Err(failure.context(format!("node {}", self.recipe.member.id))));
                    return;
                }
            }
        }
        self.started.push(answer);
    }

    fn launch(&self, joins: bool) -> Outcome<Process> {
        let Member { id, kafka, redis, etcd, admin, peer, .. } = &self.recipe.member;
        let log = log_path(&self.recipe.data, *id);
        let log = OpenOptions::new().create(true).append(true).open(&log)?;
        let mut command = match self.recipe.apart {
            false => Command::new(std::env::current_exe()?),
            true => {
                let [enter, where_to] = wires::prefix(&wires::node(*id).0);
                let mut command = Command::new(enter);
                command.arg(where_to).arg(std::env::current_exe()?);
                command
            }
        };
        command
            .arg("serve")
            .args(["--node-id", &id.to_string(), "--host", host(kafka)])
            .args(self.recipe.apart.then_some("--insecure"))
            .arg("--data")
            .arg(node_folder(&self.recipe.data, *id))
            .args(["--kafka-port", port(kafka), "--etcd-port", port(etcd)])
            .args(["--admin-port", port(admin), "--peer-port", port(peer)])
            .args(redis_ports(redis.as_deref()))
            .args(match joins {
                false => ["--initial-cluster", &self.recipe.initial_cluster],
                true => ["--join", &self.recipe.others],
            })
            .args(["--die-with", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            // Ctrl-C is for the supervisor; it stops the nodes in its own way.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        let (Some(raw), Some(stdout)) = (child.id(), child.stdout.take()) else {
            return Err(Failure::error("the process has no id or no output"));
        };
        let pid = i32::try_from(raw).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Failure::error("the process has no id"))?;
        self.roster.set_pid(*id, Some(raw))?;
        let stdout = BufReader::new(stdout).lines();
        Ok(Process { child, pid, stdout, since: Instant::now(), ready: false })
    }

    fn on_line(&mut self, line: &str) {
        let Some(process) = self.process.as_mut().filter(|_| line.starts_with("ready ")) else { return };
        process.ready = true;
        let message = format!("ready after {:.1} s", process.since.elapsed().as_secs_f64());
        for answer in self.started.drain(..) {
            let _ = answer.send(Ok(message.clone()));
        }
    }

    /// The process ended by itself, or by a signal of another process.
    fn on_end(&mut self, status: std::io::Result<ExitStatus>) {
        let id = self.recipe.member.id;
        let was_ready = self.process.as_ref().is_some_and(|process| process.ready);
        self.forget();
        let conflict = status.as_ref().is_ok_and(|status| status.code() == Some(Status::Conflict as i32));
        let how = status.map_or_else(|error| error.to_string(), said);
        if was_ready {
            let fresh = if conflict { " --fresh" } else { "" };
            note(format_args!("node {id} {how}; `moim dev restart {id}{fresh}` starts it again"));
            return;
        }
        let log = log_path(&self.recipe.data, id);
        let message = format!("node {id} {how} before it was ready\n{}", last_lines(&log));
        for answer in self.started.drain(..) {
            let hint = match conflict {
                true => {
                    format!("a node that was removed comes back with `moim dev restart {id} --fresh`, empty")
                }
                false => format!("the whole log: {}", log.display()),
            };
            let status = if conflict { Status::Conflict } else { Status::Error };
            let failure = Failure::new(status, message.clone()).hint(hint);
            let _ = answer.send(Err(failure));
        }
    }

    /// Ends the process with this signal, and with SIGKILL when that takes too long.
    async fn end(&mut self, signal: Signal) -> String {
        let Some(process) = &mut self.process else { return "did not run".to_owned() };
        // Neither can fail on a child that was not waited for; and if so, waiting is what is left to do.
        let _ = kill_process(process.pid, signal);
        // A process that was stopped with SIGSTOP handles SIGTERM only after SIGCONT.
        let _ = kill_process(process.pid, Signal::CONT);
        let how = match tokio::time::timeout(STOP_PATIENCE, process.child.wait()).await {
            Ok(status) => status.map_or_else(|error| error.to_string(), said),
            Err(_) => {
                let _ = process.child.kill().await;
                format!("was killed, as it did not stop within {} s", STOP_PATIENCE.as_secs())
            }
        };
        self.forget();
        let id = self.recipe.member.id;
        for answer in self.started.drain(..) {
            let _ = answer.send(Err(Failure::error(format!("node {id} {how} before it was ready"))));
        }
        how
    }

    fn forget(&mut self) {
        self.process = None;
        if let Err(failure) = self.roster.set_pid(self.recipe.member.id, None) {
            note(failure);
        }
    }
}

/// The data folder of a node.
pub(super) fn node_folder(data: &Path, id: i32) -> PathBuf {
    data.join(format!("node-{id}"))
}

/// Where a node's log goes.
pub(super) fn log_path(data: &Path, id: i32) -> PathBuf {
    data.join(format!("node-{id}.log"))
}

/// The flags of the store: the home shard's port, and those of the other shards' replicas nine above it.
fn redis_ports(redis: Option<&str>) -> Vec<String> {
    let Some(home) = redis.and_then(|redis| port(redis).parse::<u16>().ok()) else { return Vec::new() };
    let first = home.saturating_add(9);
    let range = format!("{first}-{}", first.saturating_add(79));
    vec!["--redis-port".to_owned(), home.to_string(), "--redis-replica-ports".to_owned(), range]
}

fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

fn port(address: &str) -> &str {
    address.rsplit(':').next().unwrap_or_default()
}

fn said(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

fn last_lines(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(LOG_LINES);
    let shown: Vec<String> = lines[from..].iter().map(|line| format!("  {line}")).collect();
    shown.join("\n")
}
