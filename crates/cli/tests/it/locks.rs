//! `moim lock run` and `moim elect run`, with real processes that are paused, killed and disconnected.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::eventually;
use crate::etcd::{Etcd, installed};
use crate::support::{PATIENCE, command};

/// A running `moim lock run`, or any other process.
struct Holder {
    child: Child,
}

impl Holder {
    fn start(etcd: &Etcd, args: &[&str]) -> Self {
        let child = command(args)
            .env("MOIM_ETCD", &etcd.address)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("moim starts");
        Self { child }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("text");
        line.trim().to_owned()
    }

    #[allow(clippy::disallowed_methods)] // a deadline for the test itself
    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "process did not exit");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // SIGKILL also ends a stopped process, and its command with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory for the output files of commands.
struct Traces(tempfile::TempDir);

impl Traces {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A shell line that writes its process id and its fencing token and then loops for ever.
    fn worker(&self, name: &str) -> String {
        let path = self.path(name).display().to_string();
        format!(
            "echo $$ $MOIM_FENCING_TOKEN > {path}.new; mv {path}.new {path}; while :; do sleep 0.02; done"
        )
    }

    /// Process id and fencing token of a started worker.
    fn begun(&self, name: &str) -> Option<(i32, u64)> {
        let text = std::fs::read_to_string(self.path(name)).ok()?;
        let (pid, token) = text.trim().split_once(' ')?;
        Some((pid.parse().ok()?, token.parse().ok()?))
    }
}

/// Runs each check against every server, as a test of the same name.
macro_rules! on_every_server {
    ($($test:ident),* $(,)?) => {
        $(
            #[test]
            fn $test() {
                for etcd in &Etcd::all() {
                    on_server::$test(etcd);
                }
            }
        )*
    };
}

on_every_server!(
    command_gets_a_growing_fencing_token_and_its_exit_status_is_returned,
    held_lock_is_not_acquired_and_waiters_acquire_it_in_order,
    command_of_a_paused_holder_is_killed_before_the_next_holder_starts,
    paused_server_loses_the_lock_but_not_mutual_exclusion,
    command_that_ignores_sigterm_is_killed_with_its_children,
    kill_9_of_the_holder_kills_its_command,
    kill_9_of_the_holder_kills_the_children_of_its_command,
    deleted_lock_key_loses_the_lock,
    etcdctl_lock_and_moim_elect_share_one_queue,
);

fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

mod on_server {
    use super::*;

    pub(super) fn command_gets_a_growing_fencing_token_and_its_exit_status_is_returned(etcd: &Etcd) {
        let mut last = 0;
        for (script, status) in [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)] {
            let script = format!("echo $MOIM_FENCING_TOKEN $MOIM_LOCK_KEY; {script}");
            let mut holder = Holder::start(etcd, &["lock", "run", "job", "--", "sh", "-c", &script]);
            let line = holder.line();
            let (token, key) = line.split_once(' ').expect("two words");
            let token: u64 = token.parse().expect("a decimal number");
            assert!(token > last && key.starts_with("job/"), "{line}");
            last = token;
            assert_eq!(holder.wait().code(), Some(status));
            assert_eq!(
                etcd.moim(&["coord", "get", "--prefix", "job/", "--count-only"]).stdout.trim(),
                "count  0"
            );
        }
        let missing = Holder::start(etcd, &["lock", "run", "job", "--", "/no/such/program"]).wait();
        assert_eq!(missing.code(), Some(127));
    }

    pub(super) fn held_lock_is_not_acquired_and_waiters_acquire_it_in_order(etcd: &Etcd) {
        let traces = Traces::new();
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--", "sh", "-c", &traces.worker("first")]);
        eventually("the first begins", || traces.begun("first").is_some());
        for wait in ["0s", "300ms"] {
            let status = Holder::start(etcd, &["lock", "run", "job", "--wait", wait, "--", "true"]).wait();
            assert_eq!(status.code(), Some(125), "{wait}");
        }
        let contenders = || etcd.moim(&["coord", "get", "--prefix", "job/", "--count-only"]).stdout;
        assert_eq!(contenders().trim(), "count  1", "a timed-out waiter leaves the queue");
        let order = traces.path("order");
        let mut waiters: Vec<Holder> = Vec::new();
        for name in ["a", "b", "c"] {
            let script = format!("echo {name} >> {}", order.display());
            waiters.push(Holder::start(etcd, &["lock", "run", "job", "--", "sh", "-c", &script]));
            let wanted = format!("count  {}", waiters.len() + 1);
            eventually("it waits", || contenders().trim() == wanted);
        }
        first.signal(Signal::TERM);
        assert_eq!(first.wait().code(), Some(143), "the signal went to the command");
        for waiter in &mut waiters {
            assert_eq!(waiter.wait().code(), Some(0));
        }
        assert_eq!(std::fs::read_to_string(order).expect("traces"), "a\nb\nc\n");
    }

    pub(super) fn command_of_a_paused_holder_is_killed_before_the_next_holder_starts(etcd: &Etcd) {
        let traces = Traces::new();
        let script = traces.worker("first");
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &script]);
        eventually("the first begins", || traces.begun("first").is_some());
        let (worker, token) = traces.begun("first").expect("it began");
        // Detects whether the first command is still alive when the second starts.
        let check = format!(
            "kill -0 {worker} 2>/dev/null && grep -qv ') Z ' /proc/{worker}/stat && echo both > {}; {}",
            traces.path("both").display(),
            traces.worker("second"),
        );
        let _second = Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &check]);
        first.signal(Signal::STOP);
        eventually("the second begins", || traces.begun("second").is_some());
        assert!(!lives(worker), "the first command was killed by the guard");
        assert!(!traces.path("both").exists(), "two commands at once");
        assert!(traces.begun("second").expect("it began").1 > token);
        first.signal(Signal::CONT);
        assert_eq!(first.wait().code(), Some(125));
    }

    pub(super) fn paused_server_loses_the_lock_but_not_mutual_exclusion(etcd: &Etcd) {
        let traces = Traces::new();
        let script = traces.worker("first");
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &script]);
        eventually("the first begins", || traces.begun("first").is_some());
        let (worker, _) = traces.begun("first").expect("it began");
        if !etcd.signal(Signal::STOP) {
            return;
        }
        assert_eq!(first.wait().code(), Some(125), "it exits without a response from the server");
        assert!(!lives(worker));
        assert!(etcd.signal(Signal::CONT));
        let again = Holder::start(etcd, &["lock", "run", "job", "--wait", "30s", "--", "true"]).wait();
        assert_eq!(again.code(), Some(0));
    }

    pub(super) fn command_that_ignores_sigterm_is_killed_with_its_children(etcd: &Etcd) {
        let traces = Traces::new();
        let deaf = traces.path("deaf.sh");
        std::fs::write(
            &deaf,
            format!(
                "trap '' TERM\nsetsid sh -c 'trap \"\" TERM; {}' &\n{}\n",
                traces.worker("child"),
                traces.worker("parent")
            ),
        )
        .expect("a script");
        let mut holder = Holder::start(
            etcd,
            &["lock", "run", "job", "--ttl", "2s", "--", "sh", deaf.to_str().expect("text")],
        );
        eventually("both run", || traces.begun("child").is_some() && traces.begun("parent").is_some());
        let key = etcd.moim(&["coord", "get", "--prefix", "job/", "--keys-only", "-o", "json"]).json();
        let key = key["entries"][0]["key"].as_str().expect("a key").to_owned();
        let lease = key.strip_prefix("job/").expect("a lease").to_owned();
        assert_eq!(etcd.moim(&["coord", "lease", "revoke", &lease]).status, 0);
        assert_eq!(holder.wait().code(), Some(125));
        for name in ["child", "parent"] {
            assert!(!lives(traces.begun(name).expect("it began").0), "{name} survived");
        }
    }

    pub(super) fn kill_9_of_the_holder_kills_its_command(etcd: &Etcd) {
        let traces = Traces::new();
        let script = traces.worker("first");
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &script]);
        eventually("the first begins", || traces.begun("first").is_some());
        let (worker, _) = traces.begun("first").expect("it began");
        first.signal(Signal::KILL);
        first.wait();
        eventually("the command is gone", || !lives(worker));
    }

    /// The command is killed with its parent; its children must not survive as orphans.
    pub(super) fn kill_9_of_the_holder_kills_the_children_of_its_command(etcd: &Etcd) {
        let traces = Traces::new();
        let log = traces.path("log");
        let script = format!("(while :; do echo old >> {}; sleep 0.02; done) | cat", log.display());
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &script]);
        let written = || std::fs::read_to_string(&log).unwrap_or_default();
        eventually("the first begins", || !written().is_empty());
        first.signal(Signal::KILL);
        first.wait();
        // Long enough for an orphan of the first command to write.
        let next = format!("echo new >> {}; sleep 0.5", log.display());
        let second =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &next]).wait();
        assert_eq!(second.code(), Some(0));
        assert!(written().ends_with("new\n"), "an orphan of the first command runs during the second");
    }

    pub(super) fn deleted_lock_key_loses_the_lock(etcd: &Etcd) {
        let traces = Traces::new();
        let script = traces.worker("first");
        let mut first =
            Holder::start(etcd, &["lock", "run", "job", "--ttl", "2s", "--", "sh", "-c", &script]);
        eventually("the first begins", || traces.begun("first").is_some());
        assert_eq!(etcd.moim(&["coord", "del", "--prefix", "job/", "--yes"]).status, 0);
        assert_eq!(first.wait().code(), Some(125));
        assert!(!lives(traces.begun("first").expect("it began").0));
    }

    pub(super) fn etcdctl_lock_and_moim_elect_share_one_queue(etcd: &Etcd) {
        let Some(etcdctl) = installed("etcdctl") else {
            eprintln!("SKIPPED: no etcdctl is installed");
            return;
        };
        let traces = Traces::new();
        let (theirs, done) = (traces.path("theirs"), traces.path("done"));
        let script =
            format!("touch {}; while ! test -e {}; do sleep 0.02; done", theirs.display(), done.display());
        let _theirs = Holder {
            child: Command::new(etcdctl)
                .env("ETCDCTL_API", "3")
                .args(["--endpoints", &etcd.address, "lock", "job", "--", "sh", "-c", &script])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("etcdctl starts"),
        };
        eventually("etcdctl holds it", || theirs.exists());
        let refused = Holder::start(etcd, &["lock", "run", "job", "--wait", "0s", "--", "true"]).wait();
        assert_eq!(refused.code(), Some(125));
        let mut ours = Holder::start(
            etcd,
            &["elect", "run", "job", "--value", "me", "--", "sh", "-c", &traces.worker("ours")],
        );
        eventually("we wait", || {
            etcd.moim(&["coord", "get", "--prefix", "job/", "--count-only"]).stdout.trim() == "count  2"
        });
        assert!(traces.begun("ours").is_none() && ours.is_running());
        std::fs::write(done, "").expect("a trace");
        eventually("we lead", || traces.begun("ours").is_some());
        let leader = etcd.moim(&["coord", "get", "--prefix", "job/", "--value-only"]);
        assert_eq!(leader.stdout, "me\n");
    }
}

#[test]
fn lock_is_not_acquired_without_a_server() {
    let started =
        command(&["lock", "run", "job", "--etcd", "127.0.0.1:1", "--", "true"]).output().expect("it runs");
    assert_eq!(started.status.code(), Some(125));
    let mut waited =
        command(&["lock", "run", "job", "--etcd", "127.0.0.1:1", "--wait", "300ms", "--", "true"]);
    assert_eq!(waited.output().expect("it runs").status.code(), Some(125));
}
