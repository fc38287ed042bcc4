//! Processes of one machine in network namespaces, joined by a bridge, so that each of them can be partitioned as by a
//! pulled plug: packets are dropped without an error.
//!
//! All namespaces are inside of one that the command enters first, and end with its last process: the network of the
//! machine is never changed. Needs `ip`, `nsenter` and `unshare`, and the right to make namespaces (root,
//! or user namespaces).

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::exit::{Failure, Outcome};

/// The first three numbers of every address; the bridge is number 1.
const NETWORK: [u8; 3] = [10, 77, 0];
const BRIDGE: &str = "wire";
/// Node n has the address with this number plus n.
const NODES: u8 = 10;

/// The address with this last number.
pub(crate) fn address(last: u8) -> Ipv4Addr {
    let [a, b, c] = NETWORK;
    Ipv4Addr::new(a, b, c, last)
}

/// The namespace and the address of a node.
pub(crate) fn node(id: i32) -> (String, Ipv4Addr) {
    (format!("node-{id}"), address(NODES + u8::try_from(id).unwrap_or(u8::MAX - NODES)))
}

/// The command prefix that runs a program in a namespace.
pub(crate) fn prefix(namespace: &str) -> [String; 2] {
    ["nsenter".to_owned(), format!("--net=/run/netns/{namespace}")]
}

/// Fails, with the reason, if namespaces cannot be made.
pub(crate) fn possible() -> Result<(), String> {
    let script = "mount -t tmpfs tmpfs /run && ip link add name bridge0 type bridge && ip netns add probe \
                  && ip link add name wire0 type veth peer name eth0 netns probe \
                  && nsenter --net=/run/netns/probe true";
    let tried = unshare().args(["sh", "-c", script]).stdin(Stdio::null()).output();
    match tried {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")),
        Err(error) => Err(format!("unshare: {error}")),
    }
}

/// Executes this command again in a namespace of its own, with one more flag. Returns only if that fails.
pub(crate) fn enter(flag: &str) -> Failure {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return error.into(),
    };
    unshare().arg(program).args(std::env::args_os().skip(1)).arg(flag).exec().into()
}

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg("--");
    command
}

/// The bridge and the wires to it.
pub(crate) struct Wires;

impl Wires {
    /// Makes the bridge, in the namespace that [`enter`] made.
    pub(crate) fn lay() -> Outcome<Self> {
        run("mount", &["-t", "tmpfs", "tmpfs", "/run"])?;
        ip(&["link", "set", "lo", "up"])?;
        ip(&["link", "add", "name", BRIDGE, "type", "bridge"])?;
        ip(&["address", "add", &format!("{}/24", address(1)), "dev", BRIDGE])?;
        ip(&["link", "set", BRIDGE, "up"])?;
        Ok(Self)
    }

    /// A namespace with an address, joined to the bridge.
    pub(crate) fn join(&self, name: &str, at: Ipv4Addr) -> Outcome {
        let wire = wire(name);
        ip(&["netns", "add", name])?;
        ip(&["link", "add", "name", &wire, "type", "veth", "peer", "name", "eth0", "netns", name])?;
        ip(&["link", "set", &wire, "master", BRIDGE, "up"])?;
        ip(&["-n", name, "address", "add", &format!("{at}/24"), "dev", "eth0"])?;
        ip(&["-n", name, "link", "set", "eth0", "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])
    }

    /// Partitions a node: its link is down.
    pub(crate) fn cut(&self, name: &str) -> Outcome {
        ip(&["link", "set", &wire(name), "down"])
    }

    /// Ends the partition of a node.
    pub(crate) fn mend(&self, name: &str) -> Outcome {
        ip(&["link", "set", &wire(name), "up"])
    }
}

/// The bridge's end of a wire. Names of interfaces have at most 15 characters.
fn wire(name: &str) -> String {
    format!("w{}", &name[..name.len().min(14)])
}

fn ip(args: &[&str]) -> Outcome {
    run("ip", args)
}

fn run(program: &str, args: &[&str]) -> Outcome {
    let output = Command::new(Path::new(program)).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Failure::error(format!("{program} {}: {why}", args.join(" "))))
}
