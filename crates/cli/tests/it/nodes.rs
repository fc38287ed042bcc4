//! Multi-node clusters of real processes, each with its own ports, and the operations of the tests on them.

use std::fs::File;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cluster::eventually;
use crate::support::{Done, PATIENCE, command, moim};

/// A node, running or not: its data directory and ports outlive its process.
pub(crate) struct Peer {
    pub(crate) id: i32,
    dir: tempfile::TempDir,
    kafka: u16,
    etcd: u16,
    admin: u16,
    pub(crate) peer: u16,
    child: Option<Child>,
}

/// Free ports, each returned once, from below the kernel's ephemeral port range: they are still free when a killed node
/// restarts.
fn free_ports<const N: usize>() -> [u16; N] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 7;
    std::array::from_fn(|_| {
        (0..20_000)
            .map(|_| 12_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000)
            .map(|port| u16::try_from(port).expect("a port"))
            .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
            .expect("a free port")
    })
}

impl Peer {
    pub(crate) fn new(id: i32) -> Self {
        let [kafka, etcd, admin, peer] = free_ports();
        Self { id, dir: tempfile::tempdir().expect("a folder"), kafka, etcd, admin, peer, child: None }
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn peer_address(&self) -> String {
        format!("127.0.0.1:{}", self.peer)
    }

    pub(crate) fn etcd_address(&self) -> String {
        format!("127.0.0.1:{}", self.etcd)
    }

    /// An address of the ready line.
    pub(crate) fn listener(&self, name: &str) -> String {
        let line = self.read("out");
        let found = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        found.expect("a listener").to_owned()
    }

    /// The ready line of the running process.
    pub(crate) fn read_ready(&self) -> String {
        self.read("out")
    }

    pub(crate) fn admin_address(&self) -> String {
        format!("127.0.0.1:{}", self.admin)
    }

    /// Uses another peer port from the next start on.
    pub(crate) fn move_peer_port(&mut self) {
        [self.peer] = free_ports();
    }

    /// Starts the process without waiting for its ready line.
    pub(crate) fn start(&mut self, args: &[&str]) {
        let open = |name: &str| {
            let file = File::options().create(true).append(true).open(self.dir.path().join(name));
            Stdio::from(file.expect("a file"))
        };
        std::fs::write(self.dir.path().join("out"), "").expect("a file");
        let (id, data) = (self.id.to_string(), self.data());
        let ports = [self.kafka, self.etcd, self.admin, self.peer].map(|port| port.to_string());
        let child = command(&["serve", "--node-id", &id, "--data", data.to_str().expect("text")])
            .args(["--kafka-port", &ports[0], "--etcd-port", &ports[1]])
            .args(["--admin-port", &ports[2], "--peer-port", &ports[3]])
            .args(["--redis-port", "0", "--redis-replica-ports", "0"])
            .args(args)
            .stdout(open("out"))
            .stderr(open("log"))
            .spawn();
        self.child = Some(child.expect("moim starts"));
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    pub(crate) fn log(&self) -> String {
        self.read("log")
    }

    /// Waits for the ready line.
    pub(crate) fn ready(&mut self) -> String {
        #[allow(clippy::disallowed_methods)] // a deadline for the test itself
        let deadline = Instant::now() + PATIENCE;
        loop {
            let line = self.read("out");
            if line.ends_with('\n') {
                return line;
            }
            let ended = self.child.as_mut().expect("it was started").try_wait().expect("a process");
            #[allow(clippy::disallowed_methods)]
            let late = Instant::now() > deadline;
            assert!(ended.is_none() && !late, "node {} is not ready: {ended:?}\n{}", self.id, self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn start_ready(&mut self, args: &[&str]) -> String {
        self.start(args);
        self.ready()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(self.child.as_ref().expect("it runs")), signal).expect("it runs");
    }

    /// Waits for the exit of the process.
    pub(crate) fn wait(&mut self) -> i32 {
        let mut status = None;
        let child = self.child.as_mut().expect("it was started");
        eventually("the process ends", || {
            status = child.try_wait().expect("a process");
            status.is_some()
        });
        self.child = None;
        status.and_then(|status| status.code()).unwrap_or(-1)
    }

    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.data()).expect("a folder");
    }

    /// Deletes the data directory except `node.json`.
    pub(crate) fn keep_identity_only(&self) {
        let identity = std::fs::read(self.data().join("node.json")).expect("a file");
        self.wipe();
        std::fs::create_dir(self.data()).expect("a folder");
        std::fs::write(self.data().join("node.json"), identity).expect("a file");
    }

    /// Changes `node.json` and returns its content.
    pub(crate) fn edit_identity(&self, change: impl FnOnce(&mut Value)) -> Value {
        let file = self.data().join("node.json");
        let mut identity: Value =
            serde_json::from_str(&std::fs::read_to_string(&file).expect("a file")).expect("JSON");
        change(&mut identity);
        identity.as_object_mut().expect("an object").remove("checksum");
        std::fs::write(&file, identity.to_string()).expect("a file");
        identity
    }

    /// Response of `/readyz`; empty if the admin port is closed.
    pub(crate) fn readyz(&self) -> String {
        http(&self.admin_address(), "GET", "/readyz").unwrap_or_default()
    }

    /// Cluster report of the node, if it responds.
    pub(crate) fn report(&self) -> Option<Value> {
        serde_json::from_str(&http(&self.admin_address(), "GET", "/api/v1/cluster")?).ok()
    }

    /// `moim cluster …` against this node.
    pub(crate) fn cluster(&self, args: &[&str]) -> Done {
        moim(&[&["cluster"], args, &["--admin", &self.admin_address(), "--timeout", "60s"]].concat())
    }

    /// Puts a key through this node, with retries.
    pub(crate) fn put(&self, key: &str, value: &str) {
        let etcd = format!("127.0.0.1:{}", self.etcd);
        eventually("a put succeeds", || moim(&["coord", "put", key, value, "--etcd", &etcd]).status == 0);
    }

    /// Reads a key through this node.
    pub(crate) fn get(&self, key: &str) -> Option<String> {
        let etcd = format!("127.0.0.1:{}", self.etcd);
        let done = moim(&["coord", "get", key, "--value-only", "--etcd", &etcd]);
        (done.status == 0).then(|| done.stdout.trim_end().to_owned())
    }

    pub(crate) fn kafka_address(&self) -> String {
        format!("127.0.0.1:{}", self.kafka)
    }

    /// A Kafka client command against this node.
    pub(crate) fn kafka(&self, args: &[&str]) -> Done {
        moim(&[args, &["--kafka", &self.kafka_address()]].concat())
    }

    /// Waits until this node reports a healthy cluster with these numbers of nodes and voters.
    pub(crate) fn healthy_with(&self, nodes: usize, voters: usize) {
        let seen = std::cell::RefCell::new(None);
        let ok = || {
            *seen.borrow_mut() = self.report();
            let seen = seen.borrow();
            let Some(report) = seen.as_ref() else { return false };
            let all = report["nodes"].as_array().expect("a list");
            let vote = all.iter().filter(|node| node["role"] == "voter" || node["role"] == "leader").count();
            report["healthy"] == true && all.len() == nodes && vote == voters
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| eventually("a healthy cluster", ok)))
            .is_err()
        {
            panic!("node {} sees {:?}\n{}", self.id, seen.borrow(), self.log());
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- node {} ---\n{}", self.id, self.log());
        }
    }
}

/// Body of an HTTP response, if there is one.
fn http(address: &str, method: &str, path: &str) -> Option<String> {
    use std::io::Write as _;
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

/// The value of `--initial-cluster` for these nodes.
pub(crate) fn initial_cluster(peers: &[Peer]) -> String {
    let all: Vec<_> = peers.iter().map(|peer| format!("{}={}", peer.id, peer.peer_address())).collect();
    all.join(",")
}

/// Three nodes that founded a cluster.
pub(crate) fn founders() -> (Vec<Peer>, String) {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    let list = initial_cluster(&peers);
    peers.iter_mut().for_each(|peer| peer.start(&["--initial-cluster", &list]));
    peers.iter_mut().for_each(|peer| drop(peer.ready()));
    (peers, list)
}
