//! Starts `moim` processes and waits for conditions with a deadline. Every process is killed by its own handle.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Test timeout: far more than needed, even on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Result of a finished command.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A `moim` command without the environment of this machine.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moim"));
    command.args(args).current_dir(std::env::temp_dir()).env_remove("RUST_LOG");
    for name in ["MOIM_KAFKA", "MOIM_ETCD", "MOIM_ADMIN"] {
        command.env_remove(name);
    }
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("MOIM__")) {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end.
pub(crate) fn moim(args: &[&str]) -> Done {
    moim_with_input(args, "")
}

/// Runs a command with input on stdin.
pub(crate) fn moim_with_input(args: &[&str], input: &str) -> Done {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("moim starts");
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let input = input.to_owned();
    // A command may exit without reading all input.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("moim ends");
    writer.join().expect("the writer ends");
    Done {
        status: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).expect("text"),
        stderr: String::from_utf8(output.stderr).expect("text"),
    }
}

/// A running node.
pub(crate) struct Node {
    child: Child,
    pub(crate) ready: String,
    lines: Receiver<String>,
}

impl Node {
    /// Starts a node on free ports and waits until it is ready.
    pub(crate) fn start(data: &Path, args: &[&str]) -> Self {
        Self::start_on(data, "0", args)
    }

    /// Starts a node with this Kafka port, and waits until it is ready.
    pub(crate) fn start_on(data: &Path, kafka_port: &str, args: &[&str]) -> Self {
        let data = data.to_str().expect("text");
        let mut child = command(&["serve", "--data", data, "--kafka-port", kafka_port, "--admin-port", "0"])
            .args(if args.contains(&"--etcd-port") { &[][..] } else { &["--etcd-port", "0"] })
            .args(if args.contains(&"--redis-port") { &[][..] } else { &["--redis-port", "0"] })
            .args(["--redis-replica-ports", "0", "--peer-port", "0", "--log-level", "warn"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .expect("moim starts");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (sender, lines) = sync_channel(16);
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let ready = lines.recv_timeout(PATIENCE).expect("a ready line");
        Self { child, ready, lines }
    }

    /// An address of the ready line.
    pub(crate) fn address(&self, listener: &str) -> Option<&str> {
        self.ready.split(' ').find_map(|word| word.strip_prefix(listener)?.strip_prefix('='))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// GET on the admin port: status and body.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut stream =
            TcpStream::connect(self.address("admin").expect("an admin port")).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        (head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status"), body.to_owned())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it runs");
    }

    /// Waits for its exit: exit status and the remaining lines.
    pub(crate) fn wait(&mut self) -> (ExitStatus, Vec<String>) {
        let status = self.child.wait().expect("it ends");
        (status, self.lines.iter().collect())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
