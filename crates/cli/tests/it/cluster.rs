//! A single-node cluster and client commands against it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Done, Node, PATIENCE, command, moim_with_input};

impl Done {
    /// Stdout as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Waits until a condition holds, up to a deadline.
#[allow(clippy::disallowed_methods)] // a deadline for the test itself
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A node with its data directory, and client commands against it.
pub(crate) struct Cluster {
    node: Node,
    dir: tempfile::TempDir,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self { node: Node::start(dir.path(), &[]), dir }
    }

    /// kill -9, then a restart of the same node at the same address after `downtime`.
    pub(crate) fn crash_and_restart(&mut self, downtime: Duration) {
        let port = self.kafka().rsplit(':').next().expect("a port").to_owned();
        self.node.signal(Signal::KILL);
        self.node.wait();
        std::thread::sleep(downtime);
        self.node = Node::start_on(self.dir.path(), &port, &[]);
    }

    pub(crate) fn kafka(&self) -> &str {
        self.node.address("kafka").expect("a Kafka port")
    }

    /// Runs a client command.
    pub(crate) fn moim(&self, args: &[&str]) -> Done {
        self.moim_with_input(args, "")
    }

    /// Runs a client command with input on stdin.
    pub(crate) fn moim_with_input(&self, args: &[&str], input: &str) -> Done {
        moim_with_input(&[args, &["--kafka", self.kafka()]].concat(), input)
    }

    /// Runs a client command that must succeed.
    pub(crate) fn ok(&self, args: &[&str]) -> Done {
        let done = self.moim(args);
        assert_eq!(done.status, 0, "{args:?} {done:?}");
        done
    }
}

/// A client command in the background.
pub(crate) struct Running {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(cluster: &Cluster, args: &[&str]) -> Self {
        let mut child = command(args)
            .args(["--kafka", cluster.kafka()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("moim starts");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = lines.clone();
        let reader = std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                sink.lock().expect("no panic").push(line);
            }
        });
        Self { child, lines, reader: Some(reader) }
    }

    /// Writes a line to its stdin.
    pub(crate) fn write(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("stdin is piped");
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.write_all(b"\n")).expect("it reads");
    }

    /// Lines printed so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().expect("no panic").clone()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Waits for its exit: exit status and all printed lines.
    pub(crate) fn wait(mut self) -> (i32, Vec<String>) {
        drop(self.child.stdin.take());
        let status = self.child.wait().expect("it ends").code().unwrap_or(-1);
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader ends");
        }
        (status, self.lines())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
