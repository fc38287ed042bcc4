//! Servers of the etcd protocol: a Moim node, and a real etcd, installed or named by `MOIM_TEST_ETCD`. Tests must pass
//! on both.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::eventually;
use crate::support::{Node, moim};

/// A server of the etcd protocol.
pub(crate) struct Etcd {
    process: Process,
    _dir: Option<tempfile::TempDir>,
    pub(crate) address: String,
}

enum Process {
    /// An etcd, and a shell that kills it when its stdin closes, so that it never outlives this process.
    Etcd(Child, Child),
    Moim(Node),
    /// An external server, not started by the test.
    Foreign,
}

impl Etcd {
    /// A Moim node, and a real etcd if available.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::moim_node()];
        all.extend(Self::real());
        all
    }

    /// A Moim node.
    pub(crate) fn moim_node() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let node = Node::start(dir.path(), &[]);
        let address = node.address("etcd").expect("an etcd port").to_owned();
        Self { process: Process::Moim(node), _dir: Some(dir), address }
    }

    /// A real etcd; `None`, with a message, if none is available.
    fn real() -> Option<Self> {
        if let Ok(address) = std::env::var("MOIM_TEST_ETCD") {
            return Some(Self { process: Process::Foreign, _dir: None, address });
        }
        let Some(binary) = binary() else {
            eprintln!("SKIPPED: no etcd is installed, and MOIM_TEST_ETCD names none");
            return None;
        };
        let dir = tempfile::tempdir().expect("a folder");
        let (address, peer) = (free(), free());
        let (client, peer) = (format!("http://{address}"), format!("http://{peer}"));
        let child = Command::new(binary)
            .args(["--name", "one", "--data-dir", dir.path().to_str().expect("text")])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd starts");
        let guard = Command::new("sh")
            .args(["-c", "read _; kill -9 \"$0\"", &child.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell starts");
        let etcd = Self { process: Process::Etcd(child, guard), _dir: Some(dir), address };
        eventually("etcd serves", || etcd.moim(&["coord", "status"]).status == 0);
        Some(etcd)
    }

    /// Runs a command against it.
    pub(crate) fn moim(&self, args: &[&str]) -> crate::support::Done {
        moim(&[args, &["--etcd", &self.address]].concat())
    }

    /// Signals the server; false for an external server.
    pub(crate) fn signal(&self, signal: Signal) -> bool {
        match &self.process {
            Process::Etcd(child, _) => kill_process(Pid::from_child(child), signal).is_ok(),
            Process::Moim(node) => {
                node.signal(signal);
                true
            }
            Process::Foreign => false,
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Process::Etcd(child, guard) = &mut self.process {
            // The guard first: its target process id must not be reused meanwhile.
            let _ = guard.kill();
            let _ = guard.wait();
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// An installed program.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn binary() -> Option<PathBuf> {
    installed("etcd")
}

fn free() -> String {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string()
}
