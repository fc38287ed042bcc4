//! A real Redis Cluster: six processes of Debian's redis-server on free ports.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

/// Cluster node timeout: short, so that tests are.
const NODE_TIMEOUT_MS: u32 = 1500;

/// A server process.
pub(crate) struct Server {
    pub(crate) port: u16,
    child: Option<Child>,
    folder: PathBuf,
}

impl Server {
    fn start(folder: PathBuf, port: u16) -> Self {
        std::fs::create_dir_all(&folder).unwrap();
        let mut server = Self { port, child: None, folder };
        server.run();
        server
    }

    /// Starts or restarts the process.
    pub(crate) fn run(&mut self) {
        let child = Command::new("redis-server")
            .args([
                "--port",
                &self.port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ])
            .args(["--cluster-enabled", "yes", "--cluster-node-timeout", &NODE_TIMEOUT_MS.to_string()])
            .args(["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"])
            .args(["--cluster-port", &cluster_port(self.port).to_string(), "--dir"])
            .arg(&self.folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    /// Moves it to another port: its data and its node id stay.
    pub(crate) fn move_to(&mut self, port: u16) {
        self.kill();
        self.port = port;
        self.run();
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Suspends it without closing anything: a hung node.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("it runs");
        kill_process(Pid::from_child(child), signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.thaw();
        }
        self.kill();
    }
}

fn cluster_port(port: u16) -> u16 {
    port + 10_000
}

/// Free ports whose cluster bus ports are free, too.
fn free_ports(count: usize) -> Vec<u16> {
    let mut held = Vec::new();
    while held.len() < count {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Ephemeral ports are high; the cluster bus port must be valid too.
        let port = listener.local_addr().unwrap().port() % 20_000 + 10_240;
        if held.iter().any(|(_, _, other): &(TcpListener, TcpListener, u16)| *other == port) {
            continue;
        }
        let both =
            (TcpListener::bind(("127.0.0.1", port)), TcpListener::bind(("127.0.0.1", cluster_port(port))));
        if let (Ok(one), Ok(other)) = both {
            held.push((one, other, port));
        }
    }
    held.iter().map(|(_, _, port)| *port).collect()
}

/// Six servers: three primaries, three replicas.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<Server>,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Creates a cluster; `None`, with a message, where redis is not installed.
    pub(crate) async fn start() -> Option<Self> {
        if !["redis-server", "redis-cli"].iter().all(|name| on_path(name)) {
            moim_base::require::skip("redis", "redis-server and redis-cli are not on PATH");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let ports = free_ports(6);
        let servers: Vec<_> =
            ports.iter().map(|port| Server::start(folder.path().join(port.to_string()), *port)).collect();
        let cluster = Self { servers, folder };
        for port in &ports {
            cluster.until("a server replies", || cli(*port, &["PING"]).contains("PONG")).await;
        }
        let addresses: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let output = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(&addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        for port in &ports {
            cluster
                .until("the cluster is formed", || {
                    let nodes = cli(*port, &["CLUSTER", "NODES"]);
                    cli(*port, &["CLUSTER", "INFO"]).contains("cluster_state:ok")
                        && nodes.lines().filter(|line| line.contains("slave")).count() == 3
                        && nodes.lines().filter(|line| line.contains("connected")).count() == 6
                })
                .await;
        }
        // A failover needs an in-sync replica.
        for port in &ports {
            cluster
                .until("replicas are in sync", || {
                    let info = cli(*port, &["INFO", "replication"]);
                    info.contains("master_link_status:up") || info.contains("state=online")
                })
                .await;
        }
        Some(cluster)
    }

    pub(crate) fn seeds(&self) -> String {
        self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn by_port(&mut self, port: u16) -> &mut Server {
        self.servers.iter_mut().find(|server| server.port == port).unwrap()
    }

    /// A seventh server outside of the cluster.
    pub(crate) async fn spare(&mut self) -> u16 {
        let port = free_ports(1)[0];
        self.servers.push(Server::start(self.folder.path().join(port.to_string()), port));
        self.until("the spare replies", || cli(port, &["PING"]).contains("PONG")).await;
        port
    }

    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(40);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}: timed out");
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }
}

fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// Output of redis-cli.
pub(crate) fn cli(port: u16, args: &[&str]) -> String {
    let output: Output =
        Command::new("redis-cli").args(["-p", &port.to_string()]).args(args).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `redis-cli --cluster …`, which must succeed. Off the runtime: it takes seconds.
pub(crate) async fn cluster_cli(args: Vec<String>) {
    let run =
        move || Command::new("redis-cli").arg("--cluster").args(&args).output().map(|output| (args, output));
    let (args, output) = moim_base::task::offload(run).await.unwrap();
    let output_text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{args:?}: {output_text}");
}

/// The id of a node.
pub(crate) fn id_of(port: u16) -> String {
    cli(port, &["CLUSTER", "MYID"]).trim().to_owned()
}
