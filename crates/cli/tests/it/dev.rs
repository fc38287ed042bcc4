//! `moim dev`: a supervised cluster of processes; nodes are killed, stopped and removed, and no process is left behind.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cluster::eventually;
use crate::support::{Done, command};

/// A supervisor in the foreground, with its own directory.
struct Dev {
    child: Child,
    dir: tempfile::TempDir,
}

impl Dev {
    /// Starts it and waits for its first line.
    #[allow(clippy::disallowed_methods)] // measures the time to the first line
    fn start(dir: tempfile::TempDir, args: &[&str]) -> Self {
        let began = Instant::now();
        let mut child = command(&[&["dev", "--data", "data"], args].concat())
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("moim starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let first = lines.next().expect("a line").expect("text");
        assert!(first.contains("nodes in "), "{first}");
        assert!(began.elapsed() < Duration::from_secs(10), "the first line comes at once");
        // Reads the rest, so that the supervisor does not block on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, dir }
    }

    fn new(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        Self::start(dir, &[args, &["--base-port", "0"]].concat())
    }

    fn run(&self, args: &[&str]) -> Done {
        run_in(self.dir.path(), args)
    }

    fn ok(&self, args: &[&str]) -> Done {
        let done = self.run(args);
        assert_eq!(done.status, 0, "{args:?} {done:?}\n{}", logs(self.dir.path()));
        done
    }

    fn dev(&self, verb: &str, node: &str) {
        self.ok(&["dev", verb, node, "--data", "data"]);
    }

    fn pids(&self) -> Vec<Option<u32>> {
        pids(self.dir.path())
    }

    /// Waits until the whole cluster serves.
    fn ready(&self) {
        eventually("the cluster is ready", || self.dir.path().join(".moim/context.toml").exists());
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // The nodes exit with the supervisor.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run_in(dir: &Path, args: &[&str]) -> Done {
    let output = command(args).current_dir(dir).stdin(Stdio::null()).output().expect("moim runs");
    Done {
        status: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).expect("text"),
        stderr: String::from_utf8(output.stderr).expect("text"),
    }
}

fn listing(dir: &Path) -> Value {
    let text = std::fs::read_to_string(dir.join("data/cluster.json")).expect("cluster.json");
    serde_json::from_str(&text).expect("JSON, whole at any moment")
}

fn pids(dir: &Path) -> Vec<Option<u32>> {
    let nodes = listing(dir)["nodes"].as_array().expect("a list").clone();
    nodes.iter().map(|node| node["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())).collect()
}

fn logs(dir: &Path) -> String {
    (1..=3)
        .map(|id| std::fs::read_to_string(dir.join(format!("data/node-{id}.log"))).unwrap_or_default())
        .map(|log| log.lines().rev().take(5).collect::<Vec<_>>().join("\n"))
        .collect::<Vec<_>>()
        .join("\n--\n")
}

fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn dev_cluster_recovers_from_killed_stopped_and_removed_nodes() {
    let dev = Dev::new(&["-n", "3"]);
    dev.ready();
    let before = dev.pids();
    assert!(before.iter().all(|pid| pid.is_some_and(lives)), "{before:?}");
    let node = listing(dev.dir.path())["nodes"][0].clone();
    let keys: Vec<_> = node.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(keys, ["id", "pid", "kafka", "redis", "etcd", "admin", "peer"]);
    assert!(node["redis"].as_str().is_some_and(|redis| redis.starts_with("127.0.0.1:")), "{node}");

    dev.ok(&["coord", "put", "k", "1"]);
    dev.dev("kill", "3");
    assert_eq!(dev.pids()[2], None);
    assert!(!lives(before[2].expect("it ran")));
    dev.ok(&["coord", "put", "k", "2"]);
    dev.dev("restart", "3");
    let after = dev.pids();
    assert!(after[2].is_some_and(lives) && after[2] != before[2], "{after:?}");

    dev.dev("stop", "1");
    assert_eq!(dev.pids()[0], None);
    assert_eq!(dev.ok(&["coord", "get", "k", "--value-only"]).stdout, "2\n");
    dev.dev("restart", "1");
    // A node that runs is stopped first.
    dev.dev("restart", "2");
    assert_ne!(dev.pids()[1], before[1]);

    // A node that was killed without `moim dev` can be restarted too.
    let external = dev.pids()[1].expect("it runs");
    kill_process(Pid::from_raw(external.cast_signed()).expect("a pid"), Signal::KILL).expect("it runs");
    eventually("its exit is recorded", || dev.pids()[1].is_none());
    dev.dev("restart", "2");

    // A node that lost its data directory rejoins as a new one.
    dev.dev("kill", "3");
    std::fs::remove_dir_all(dev.dir.path().join("data/node-3")).expect("a folder");
    dev.dev("restart", "3");
    let etcd = listing(dev.dir.path())["nodes"][2]["etcd"].as_str().expect("text").to_owned();
    assert_eq!(dev.ok(&["coord", "get", "k", "--value-only", "--etcd", &etcd]).stdout, "2\n");

    // A removed node is rejected with its old data directory, with a hint.
    dev.ok(&["cluster", "remove", "3", "--yes"]);
    eventually("it stops", || dev.pids()[2].is_none());
    let refused = dev.run(&["dev", "restart", "3", "--data", "data"]);
    assert_eq!(refused.status, 7, "{refused:?}");
    assert!(refused.stderr.contains("moim dev restart 3 --fresh"), "{refused:?}");
    let fresh = dev.ok(&["dev", "restart", "3", "--fresh", "--data", "data"]);
    assert!(fresh.stderr.contains("what it held is gone"), "{fresh:?}");
    assert_eq!(dev.ok(&["coord", "get", "k", "--value-only", "--etcd", &etcd]).stdout, "2\n");

    for (args, status) in [
        (&["dev", "kill", "9", "--data", "data"][..], 3),
        (&["dev", "--data", "data"], 7),
        (&["dev", "status", "--data", "elsewhere"], 4),
        (&["dev", "purge", "--data", "data"], 2),
    ] {
        assert_eq!(dev.run(args).status, status, "{args:?}");
    }
}

#[test]
fn supervisor_exit_leaves_no_process() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut dev = Dev::new(&["-n", "1"]);
        dev.ready();
        let pids: Vec<u32> = dev.pids().into_iter().flatten().collect();
        assert_eq!(pids.len(), 1);
        dev.signal(signal);
        let status = dev.child.wait().expect("it ends");
        if signal != Signal::KILL {
            assert_eq!(status.code(), Some(0), "{signal:?}");
            assert!(!pids.iter().any(|pid| lives(*pid)), "the nodes exit before the supervisor");
            assert!(
                !dev.dir.path().join(".moim/context.toml").exists(),
                "the context of a stopped cluster is deleted"
            );
        }
        eventually("the nodes are gone", || !pids.iter().any(|pid| lives(*pid)));
    }
}

#[test]
fn detached_dev_cluster_is_found_stopped_and_purged() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |args: &[&str]| run_in(dir.path(), args);
    let up = run(&["dev", "-n", "1", "-d", "--data", "data", "--base-port", "0", "-o", "json"]);
    assert_eq!(up.status, 0, "{up:?}\n{}", logs(dir.path()));
    assert_eq!(up.json(), listing(dir.path()), "it is ready when the command ends");
    let pids: Vec<u32> = pids(dir.path()).into_iter().flatten().collect();
    let put = run(&["coord", "put", "k", "v"]);
    assert_eq!(put.status, 0, "the context says where it is: {put:?}");
    assert_eq!(run(&["dev", "status", "--data", "data", "-o", "json"]).json(), listing(dir.path()));
    let second = run(&["dev", "-d", "--data", "data"]);
    assert_eq!(second.status, 7, "one runs already: {second:?}");
    assert_eq!(run(&["dev", "stop", "--data", "data"]).status, 0);
    assert!(!pids.iter().any(|pid| lives(*pid)));
    // The same ports and the same data again.
    let again = run(&["dev", "-d", "--data", "data", "-o", "json"]);
    assert_eq!((again.status, &again.json()["base_port"]), (0, &up.json()["base_port"]), "{again:?}");
    assert_eq!(run(&["coord", "get", "k", "--value-only"]).stdout, "v\n");
    assert_eq!(run(&["dev", "purge", "--data", "data", "--yes"]).status, 0);
    assert!(!dir.path().join("data").exists());
    assert_eq!(run(&["dev", "purge", "--data", "data", "--yes"]).status, 3);
}

#[test]
fn node_that_cannot_start_is_reported_with_its_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let data = dir.path().join("data");
    std::fs::create_dir(&data).expect("a folder");
    std::fs::write(data.join("node-1"), "in the way").expect("a file");
    let failed = run_in(dir.path(), &["dev", "-n", "1", "--data", "data", "--base-port", "0"]);
    assert_eq!(failed.status, 1, "{failed:?}");
    assert!(failed.stderr.contains("node 1 ended with status 1 before it was ready"), "{failed:?}");
    assert!(failed.stderr.contains("cannot create the data directory"), "{failed:?}");
}

#[test]
fn node_that_fails_at_start_is_not_reported_ready() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |args: &[&str]| run_in(dir.path(), args);
    let up = ["dev", "-n", "3", "-d", "--data", "data", "--base-port", "0"];
    assert_eq!(run(&up).status, 0, "{}", logs(dir.path()));
    assert_eq!(run(&["dev", "stop", "--data", "data"]).status, 0);
    // The data directory of node 2 belongs to another node: the node exits at once, with the conflict status.
    let identity = |node: u32| dir.path().join(format!("data/node-{node}/node.json"));
    std::fs::copy(identity(3), identity(2)).expect("a copy");
    let failed = run(&["dev", "-n", "3", "-d", "--data", "data"]);
    assert_ne!(failed.status, 0, "{failed:?}");
    assert!(!failed.stdout.contains("ready after"), "{failed:?}");
    assert!(failed.stderr.contains("belongs to node 3"), "{failed:?}");
    let _ = run(&["dev", "stop", "--data", "data"]);
}
