//! A development cluster that another command runs (`moim demo`, `moim pipeline fault`): started with it, ended with it.
//!
//! The content of its directory is temporary: that of an earlier run is deleted. While it runs, `moim dev … --data` works
//! on it as on any other.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use tokio::sync::mpsc;

use super::control::Socket;
use super::plan::Plan;
use super::roster::{remove_context, write_context};
use super::runner::NodeRequest;
use super::up::{self, Cluster};
use crate::exit::{Failure, Outcome, Status};

pub(crate) use super::plan::Member;

/// The file that marks directories that may be deleted.
const MARK: &str = "dev.lock";

/// The first port if every node has a network namespace of its own.
const APART_BASE: u16 = 20_000;

/// A running cluster.
pub(crate) struct Embedded {
    cluster: Arc<Cluster>,
    here: Option<PathBuf>,
    _lock: File,
}

impl Embedded {
    /// Starts nodes on free ports in an empty folder, and returns once all are ready.
    pub(crate) async fn start(data: &Path, nodes: u16, patience: Duration) -> Outcome<Self> {
        Self::start_as(data, Plan::anywhere_free(nodes)?, patience).await
    }

    /// The same, with every node in the namespace that [`super::wires::node`] says.
    pub(crate) async fn start_apart(data: &Path, nodes: u16, patience: Duration) -> Outcome<Self> {
        Self::start_as(data, Plan::apart(nodes, APART_BASE)?, patience).await
    }

    async fn start_as(data: &Path, plan: Plan, patience: Duration) -> Outcome<Self> {
        let data = &std::path::absolute(data)?;
        clear(data)?;
        std::fs::create_dir_all(data)
            .map_err(|error| Failure::error(format!("cannot make {}: {error}", data.display())))?;
        let lock = up::lock(data)?;
        let (stop_all, _) = mpsc::channel(1);
        let cluster = Arc::new(Cluster::new(data, plan, stop_all)?);
        let socket = Socket::bind(data)
            .map_err(|error| Failure::error(format!("cannot listen in {}: {error}", data.display())))?;
        let scope = Scope::new(Shutdown::new());
        scope.spawn("control socket", up::serve(socket, cluster.clone(), scope.clone()));
        let embedded = Self { cluster, here: None, _lock: lock };
        let starts = embedded.cluster.runners.iter().map(|runner| runner.ask(NodeRequest::Start));
        let all = futures_util::future::try_join_all(starts);
        match tokio::time::timeout(patience, all).await {
            Ok(started) => started.map(drop)?,
            Err(_) => {
                let message = format!("the nodes were not ready within {} s", patience.as_secs());
                let hint = format!("their logs are {}/node-*.log", data.display());
                return Err(Failure::new(Status::Timeout, message).hint(hint));
            }
        }
        Ok(embedded)
    }

    /// From now on client commands in this folder find the cluster.
    pub(crate) fn announce(&mut self) -> Outcome {
        let here = std::env::current_dir()?;
        write_context(&here, &self.members())?;
        self.here = Some(here);
        Ok(())
    }

    /// The nodes, running or not.
    pub(crate) fn members(&self) -> Vec<Member> {
        self.cluster.roster.listing().nodes
    }

    /// `kill -9`.
    pub(crate) async fn kill(&self, node: i32) -> Outcome {
        self.cluster.runner(node)?.ask(NodeRequest::Kill).await.map(drop)
    }

    /// Starts a node again, stopping it in order first if it runs; returns once it is ready.
    pub(crate) async fn restart(&self, node: i32) -> Outcome {
        self.cluster.restart(self.cluster.runner(node)?, false).await.map(drop)
    }

    /// Ends all nodes: in order, or killed when that takes too long.
    pub(crate) async fn end(self) -> Outcome {
        let stops = self.cluster.runners.iter().map(|runner| runner.ask(NodeRequest::Stop));
        futures_util::future::join_all(stops).await;
        if let Some(here) = &self.here {
            remove_context(here, &self.members())?;
        }
        self.cluster.roster.close()
    }
}

/// Deletes what an earlier run left. A folder that is not ours is refused.
fn clear(data: &Path) -> Outcome {
    let mut entries = match std::fs::read_dir(data) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Failure::error(format!("cannot read {}: {error}", data.display()))),
    };
    if entries.next().is_none() {
        return Ok(());
    }
    if !data.join(MARK).exists() {
        return Err(Failure::new(Status::Conflict, format!("{} holds something else", data.display()))
            .hint("name an empty folder, or one that does not exist, with --data"));
    }
    let running = up::lock(data)?;
    std::fs::remove_dir_all(data)
        .map_err(|error| Failure::error(format!("cannot delete {}: {error}", data.display())))?;
    drop(running);
    Ok(())
}
