//! Servers that speak etcd v3: one `moim serve`, three of them, or the real etcd. The same suite runs on all.
//!
//! The real etcd: `MOIM_TEST_ETCD` names a binary (a path) or running servers (`HOST:PORT,…`); without it an `etcd`
//! on the path is used.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::net::Net;
use crate::process::Process;
use crate::server::{Options, Server, scratch};

/// Time limit for the start of a cluster.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The reference etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RealEtcd {
    /// A binary to start.
    Program(PathBuf),
    /// Externally managed servers.
    Servers(Vec<String>),
}

impl RealEtcd {
    /// The reference etcd from the environment, if there is one.
    pub fn find() -> Option<Self> {
        match std::env::var("MOIM_TEST_ETCD") {
            Ok(text) if text.contains('/') => Some(Self::Program(PathBuf::from(text))),
            Ok(text) => Some(Self::Servers(text.split(',').map(str::to_owned).collect())),
            Err(_) => {
                let path = std::env::var_os("PATH")?;
                std::env::split_paths(&path)
                    .map(|dir| dir.join("etcd"))
                    .find(|file| file.is_file())
                    .map(Self::Program)
            }
        }
    }
}

/// One or more servers that form a cluster.
pub struct Cluster {
    members: Vec<Member>,
    net: Option<Net>,
    /// Addresses of externally managed servers.
    external: Vec<String>,
}

/// One server process.
enum Member {
    Moim(Box<Server>),
    Etcd(EtcdServer),
}

impl Cluster {
    /// Starts this many Moim nodes. With `cuttable` their peer connections run through a [`Net`].
    pub fn moim(nodes: usize, options: &Options, cuttable: bool) -> Result<Self> {
        Self::moim_on(nodes, options, cuttable, |_| None)
    }

    /// Starts Moim nodes with the data directories given by `data`; by default each node creates one.
    pub fn moim_on(
        nodes: usize,
        options: &Options,
        cuttable: bool,
        data: impl Fn(usize) -> Option<PathBuf>,
    ) -> Result<Self> {
        Self::moim_with(nodes, cuttable, |node| Options { data: data(node), ..options.clone() })
    }

    /// Starts Moim nodes with separate options for each node.
    pub fn moim_with(nodes: usize, cuttable: bool, options: impl Fn(usize) -> Options) -> Result<Self> {
        let net = cuttable.then(|| Net::between(nodes)).transpose()?;
        let listeners = free_addresses(nodes)?;
        let advertised: Vec<String> = match &net {
            Some(net) => (0..nodes).map(|node| net.address(node)).collect(),
            None => listeners.clone(),
        };
        let initial: Vec<String> =
            (1..).zip(&advertised).map(|(id, address)| format!("{id}={address}")).collect();
        let started = std::thread::scope(|scope| {
            let mut starting = Vec::new();
            for node in 0..nodes {
                let mut options = options(node);
                if nodes > 1 {
                    let id = (node + 1).to_string();
                    options.args.extend(["--node-id".to_owned(), id]);
                    options.args.extend(["--initial-cluster".to_owned(), initial.join(",")]);
                    options.peer = Some(listeners[node].clone());
                }
                if let Some(net) = &net {
                    options.args.extend(["--advertise-peer".to_owned(), advertised[node].clone()]);
                    net.forward(node, &listeners[node]);
                }
                let identify = net.as_ref().map(|net| net.identify(node));
                starting.push(scope.spawn(move || {
                    Server::start_watched(options, |pid| identify.into_iter().for_each(|tell| tell(pid)))
                }));
            }
            starting.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
        });
        let members =
            started.into_iter().map(|server| Ok(Member::Moim(Box::new(server?)))).collect::<Result<_>>()?;
        Ok(Self { members, net, external: Vec::new() })
    }

    /// Starts this many nodes of the real etcd. With `cuttable` their peer connections run through a [`Net`].
    pub fn etcd(real: &RealEtcd, nodes: usize, cuttable: bool) -> Result<Self> {
        let program = match real {
            RealEtcd::Servers(external) => {
                return Ok(Self { members: Vec::new(), net: None, external: external.clone() });
            }
            RealEtcd::Program(program) => program,
        };
        let net = cuttable.then(|| Net::between(nodes)).transpose()?;
        let addresses = free_addresses(2 * nodes)?;
        let (clients, peers) = addresses.split_at(nodes);
        let advertised: Vec<String> = match &net {
            Some(net) => (0..nodes).map(|node| net.address(node)).collect(),
            None => peers.to_vec(),
        };
        let initial: Vec<String> =
            (1..).zip(&advertised).map(|(id, address)| format!("n{id}=http://{address}")).collect();
        let mut members = Vec::new();
        for node in 0..nodes {
            let mut server = EtcdServer::new(
                program,
                node + 1,
                &clients[node],
                &peers[node],
                &advertised[node],
                &initial,
            )?;
            server.launch()?;
            if let (Some(net), Some(process)) = (&net, &server.process) {
                net.forward(node, &peers[node]);
                net.identify(node)(process.id());
            }
            members.push(Member::Etcd(server));
        }
        let cluster = Self { members, net, external: Vec::new() };
        for endpoint in cluster.endpoints() {
            await_health(&endpoint)?;
        }
        Ok(cluster)
    }

    /// `HOST:PORT` of every etcd listener.
    pub fn endpoints(&self) -> Vec<String> {
        if self.members.is_empty() {
            return self.external.clone();
        }
        (0..self.members.len()).map(|node| self.endpoint(node)).collect()
    }

    /// `HOST:PORT` of one etcd listener.
    pub fn endpoint(&self, node: usize) -> String {
        match &self.members[node] {
            Member::Moim(server) => server.etcd().to_owned(),
            Member::Etcd(server) => server.client.clone(),
        }
    }

    /// Number of servers that this harness runs.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// True if all servers are externally managed.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The network between the nodes, if it can be partitioned.
    pub fn net(&self) -> Option<&Net> {
        self.net.as_ref()
    }

    /// The Moim process of a node.
    pub fn server(&self, node: usize) -> Option<&Server> {
        match &self.members[node] {
            Member::Moim(server) => Some(server),
            Member::Etcd(_) => None,
        }
    }

    /// True if a node's process is running.
    pub fn is_running(&mut self, node: usize) -> bool {
        match &mut self.members[node] {
            Member::Moim(server) => server.is_running(),
            Member::Etcd(server) => server.process.as_mut().is_some_and(Process::is_running),
        }
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        match &mut self.members[node] {
            Member::Moim(server) => server.kill(),
            Member::Etcd(server) => server.kill(),
        }
    }

    /// Restarts a killed node; with a quorum it becomes ready.
    pub fn restart(&mut self, node: usize) -> Result<()> {
        let identify = self.net.as_ref().map(|net| net.identify(node));
        match &mut self.members[node] {
            Member::Moim(server) => {
                server.restart_watched(|pid| identify.into_iter().for_each(|tell| tell(pid)))
            }
            Member::Etcd(server) => {
                server.launch()?;
                let process = server.process.as_ref().context("a process")?;
                identify.into_iter().for_each(|tell| tell(process.id()));
                await_health(&server.client)
            }
        }
    }

    /// Sends SIGTERM and waits for the exit.
    pub fn terminate(&mut self, node: usize) -> Result<()> {
        match &mut self.members[node] {
            Member::Moim(server) => server.terminate().map(drop),
            Member::Etcd(server) => server.kill(),
        }
    }

    /// Restarts killed nodes together: no node needs to be ready before the others run.
    pub fn restart_all(&mut self, nodes: &[usize]) -> Result<()> {
        let net = self.net.as_ref();
        let restarted = std::thread::scope(|scope| {
            let mut starting = Vec::new();
            for (node, member) in self.members.iter_mut().enumerate().filter(|(node, _)| nodes.contains(node))
            {
                let identify = net.map(|net| net.identify(node));
                let Member::Moim(server) = member else { bail!("only nodes of Moim start together") };
                starting.push(scope.spawn(move || {
                    server.restart_watched(|pid| identify.into_iter().for_each(|tell| tell(pid)))
                }));
            }
            Ok(starting.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>())
        });
        restarted?.into_iter().collect()
    }

    /// Sends SIGSTOP.
    pub fn pause(&self, node: usize) -> Result<()> {
        match &self.members[node] {
            Member::Moim(server) => server.pause(),
            Member::Etcd(server) => server.signal(Signal::STOP),
        }
    }

    /// Sends SIGCONT.
    pub fn resume(&self, node: usize) -> Result<()> {
        match &self.members[node] {
            Member::Moim(server) => server.resume(),
            Member::Etcd(server) => server.signal(Signal::CONT),
        }
    }

    /// The process ids, by node.
    pub fn pids(&self) -> Vec<u32> {
        let pid = |member: &Member| match member {
            Member::Moim(server) => server.pid(),
            Member::Etcd(server) => server.process.as_ref().map(Process::id),
        };
        self.members.iter().filter_map(pid).collect()
    }

    /// The tails of all logs, for the message of a failed test.
    pub fn log_tails(&self) -> String {
        let mut text = String::new();
        for (node, member) in self.members.iter().enumerate() {
            let tail = match member {
                Member::Moim(server) => server.log_tail(),
                Member::Etcd(server) => server.log_tail(),
            };
            text.push_str(&format!("--- node {}\n{tail}\n", node + 1));
        }
        text
    }
}

struct EtcdServer {
    command: Vec<String>,
    client: String,
    dir: TempDir,
    process: Option<Process>,
}

impl EtcdServer {
    fn new(
        program: &std::path::Path,
        id: usize,
        client: &str,
        peer: &str,
        advertised: &str,
        initial: &[String],
    ) -> Result<Self> {
        let dir = scratch()?;
        let url = |address: &str| format!("http://{address}");
        let command = vec![
            program.display().to_string(),
            format!("--name=n{id}"),
            format!("--data-dir={}", dir.path().join("data").display()),
            format!("--listen-client-urls={}", url(client)),
            format!("--advertise-client-urls={}", url(client)),
            format!("--listen-peer-urls={}", url(peer)),
            format!("--initial-advertise-peer-urls={}", url(advertised)),
            format!("--initial-cluster={}", initial.join(",")),
            format!("--initial-cluster-token={}", initial.join("")),
            "--initial-cluster-state=new".to_owned(),
            "--logger=zap".to_owned(),
            "--log-outputs=stderr".to_owned(),
        ];
        Ok(Self { command, client: client.to_owned(), dir, process: None })
    }

    fn launch(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log()).context("the log file")?;
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(Process::spawn(&mut command)?);
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().context("etcd does not run")?.signal(signal)
    }

    fn kill(&mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.process.as_mut().context("etcd does not run")?.wait(Duration::from_secs(10))?;
        self.process = None;
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("stderr.log")
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

/// Addresses without a listener, outside the kernel's range of ephemeral ports.
pub fn free_addresses(count: usize) -> Result<Vec<String>> {
    let mut held = Vec::new();
    let mut port = 10_000 + (std::process::id() ^ nanos()) % 20_000;
    for _ in 0..5_000 {
        port = 10_000 + (port - 10_000 + 7) % 20_000;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", u16::try_from(port)?)) {
            held.push(listener);
            if held.len() == count {
                return held.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect();
            }
        }
    }
    bail!("no {count} free ports")
}

fn nanos() -> u32 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos())
}

/// Waits until a server reports healthy on its client port.
fn await_health(address: &str) -> Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    while Instant::now() < deadline {
        if http_get(address, "/health").is_ok_and(|body| body.contains("\"health\":\"true\"")) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("{address} was not healthy within {START_TIMEOUT:?}")
}

/// The complete response to a plain GET.
pub fn http_get(address: &str, path: &str) -> Result<String> {
    http(address, "GET", path)
}

/// The complete response to a POST without a body.
pub fn http_post(address: &str, path: &str) -> Result<String> {
    http(address, "POST", path)
}

fn http(address: &str, method: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
