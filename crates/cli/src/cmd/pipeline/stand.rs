//! A cluster made for one occasion, and what is needed to run a pipeline on it: as processes of their own that can be
//! killed, or in this process.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use moim_pipeline::{PipelineConfig, Secret, Store};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::store;
use crate::cmd::dev::embed::{Embedded, Member};
use crate::cmd::dev::wires::{self, Wires};
use crate::exit::{Failure, Outcome};

/// Last numbers of the addresses of roles in networks of their own; nodes are below.
const GATEWAYS: u8 = 20;
const COUNTERS: u8 = 30;
const AGGREGATORS: u8 = 40;

/// The cluster, and how it is reached.
pub(crate) struct Stand {
    pub(crate) cluster: Embedded,
    pub(crate) config: PipelineConfig,
    pub(crate) store: Store,
    pub(crate) secret: Secret,
    /// The bridge between the processes, if each has a network namespace of its own.
    pub(crate) wires: Option<Wires>,
    data: PathBuf,
}

impl Stand {
    /// Three nodes on free ports.
    pub(crate) async fn start(data: &Path, patience: Duration) -> Outcome<Self> {
        Self::on(Embedded::start(data, 3, patience).await?, data, None).await
    }

    /// Three nodes in networks of their own, and more such for the roles: anything can be cut off. Only in the namespace
    /// that [`wires::enter`] made.
    pub(crate) async fn start_apart(data: &Path, patience: Duration) -> Outcome<Self> {
        let wires = Wires::lay()?;
        for id in 1..=3 {
            let (name, address) = wires::node(id);
            wires.join(&name, address)?;
        }
        Self::on(Embedded::start_apart(data, 3, patience).await?, data, Some(wires)).await
    }

    async fn on(cluster: Embedded, data: &Path, wires: Option<Wires>) -> Outcome<Self> {
        let members = cluster.members();
        let redis: Option<Vec<String>> = members.iter().map(|member| member.redis.clone()).collect();
        let redis = redis.ok_or_else(|| Failure::error("the nodes have no store"))?;
        let kafka: Vec<String> = members.iter().map(|member| member.kafka.clone()).collect();
        let mut config = PipelineConfig {
            kafka: kafka.join(","),
            redis: redis.join(","),
            token_file: data.join("pipeline.token"),
            ..PipelineConfig::default()
        };
        config.gateway.listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let secret = super::secret(&config)?;
        let store = store(&config).await?;
        Ok(Self { cluster, config, store, secret, wires, data: data.to_owned() })
    }

    /// Where two gateways can listen.
    pub(crate) fn gateway_addresses(&self) -> Outcome<[SocketAddr; 2]> {
        match &self.wires {
            None => Ok([free_address()?, free_address()?]),
            Some(_) => {
                Ok([GATEWAYS, GATEWAYS + 1].map(|last| SocketAddr::from((wires::address(last), 9_700))))
            }
        }
    }

    /// A network of its own for a role, where every process has one.
    pub(crate) fn join(&self, role: &Role) -> Outcome {
        let Some(wires) = &self.wires else { return Ok(()) };
        let address = match role {
            Role::Gateway(SocketAddr::V4(address), _) => *address.ip(),
            Role::Gateway(SocketAddr::V6(_), _) => return Err(Failure::error("gateways here have IPv4")),
            Role::Counter(n) => wires::address(COUNTERS + u8::try_from(*n).unwrap_or(0)),
            Role::Aggregator(n) => wires::address(AGGREGATORS + u8::try_from(*n).unwrap_or(0)),
        };
        wires.join(&role.name(), address)
    }

    /// A role as a process of its own.
    pub(crate) fn spawn(&self, role: Role) -> Outcome<RoleProcess> {
        let executable = std::env::current_exe()?;
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.data.join(format!("{}.log", role.name())))?;
        let mut command = match &self.wires {
            None => Command::new(executable),
            Some(_) => {
                let [enter, where_to] = wires::prefix(&role.name());
                let mut command = Command::new(enter);
                command.arg(where_to).arg(executable);
                command
            }
        };
        command
            .args(["pipeline", role.verb(), "--instances", "1"])
            .args(["--kafka", &self.config.kafka, "--redis", &self.config.redis])
            .arg("--token")
            .arg(&self.config.token_file)
            .args(["--die-with", &std::process::id().to_string()])
            .args(role.flags())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        let child = command
            .spawn()
            .map_err(|error| Failure::error(format!("cannot start {}: {error}", role.name())))?;
        Ok(RoleProcess { role, child })
    }
}

/// A role of a pipeline.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// A gateway at this address, with these flags.
    Gateway(SocketAddr, Vec<String>),
    /// A counter with this number.
    Counter(usize),
    /// An aggregator with this number.
    Aggregator(usize),
}

impl Role {
    fn verb(&self) -> &'static str {
        match self {
            Self::Gateway(..) => "gateway",
            Self::Counter(_) => "counter",
            Self::Aggregator(_) => "aggregator",
        }
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::Gateway(SocketAddr::V4(address), _) if !address.ip().is_loopback() => {
                format!("gateway-{}", address.ip().octets()[3])
            }
            Self::Gateway(address, _) => format!("gateway-{}", address.port()),
            Self::Counter(n) => format!("counter-{n}"),
            Self::Aggregator(n) => format!("aggregator-{n}"),
        }
    }

    fn flags(&self) -> Vec<String> {
        match self {
            Self::Gateway(address, more) => {
                let mut flags = vec!["--listen".to_owned(), address.to_string()];
                flags.extend(more.iter().cloned());
                flags
            }
            Self::Counter(n) | Self::Aggregator(n) => vec!["--first-instance".to_owned(), n.to_string()],
        }
    }
}

/// A role at work.
pub(crate) struct RoleProcess {
    pub(crate) role: Role,
    child: Child,
}

impl RoleProcess {
    /// True if the process has ended, by itself or by a signal.
    pub(crate) fn has_ended(&mut self) -> Outcome<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Its id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// `kill -9`; returns once it is gone.
    pub(crate) async fn kill(&mut self) -> Outcome {
        Ok(self.child.kill().await?)
    }

    /// Asks it to stop, and waits.
    pub(crate) async fn stop(&mut self) -> Outcome {
        if let Some(pid) = self.child.id() {
            signal(pid, Signal::TERM)?;
        }
        self.child.wait().await?;
        Ok(())
    }
}

/// Signals a process that this one has started.
pub(crate) fn signal(pid: u32, signal: Signal) -> Outcome {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Failure::error("not a process id"))?;
    kill_process(pid, signal).map_err(|error| Failure::error(format!("cannot signal: {error}")))
}

/// Stops the time of a node.
pub(crate) fn pause(member: &Member, paused: bool) -> Outcome {
    let Some(pid) = member.pid else { return Ok(()) };
    signal(pid, if paused { Signal::STOP } else { Signal::CONT })
}

/// A free address of this machine.
fn free_address() -> Outcome<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}
