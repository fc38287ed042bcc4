//! A real etcd to talk to: an installed one, or whatever `MOIM_TEST_ETCD` names.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::eventually;
use crate::support::moim;

/// A server of the etcd protocol.
pub(crate) struct Etcd {
    child: Option<Child>,
    _dir: Option<tempfile::TempDir>,
    pub(crate) address: String,
}

impl Etcd {
    /// `None`, said loudly, when there is none on this machine.
    pub(crate) fn start() -> Option<Self> {
        if let Ok(address) = std::env::var("MOIM_TEST_ETCD") {
            return Some(Self { child: None, _dir: None, address });
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
        let etcd = Self { child: Some(child), _dir: Some(dir), address };
        eventually("etcd serves", || etcd.moim(&["coord", "status"]).status == 0);
        Some(etcd)
    }

    /// Runs a command against it.
    pub(crate) fn moim(&self, args: &[&str]) -> crate::support::Done {
        moim(&[args, &["--etcd", &self.address]].concat())
    }

    /// Signals the server; false when it is somebody else's.
    pub(crate) fn signal(&self, signal: Signal) -> bool {
        match &self.child {
            Some(child) => kill_process(Pid::from_child(child), signal).is_ok(),
            None => false,
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
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
