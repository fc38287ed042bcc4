//! A job that runs on one node at a time: three nodes campaign, one is elected, and after its failure
//! another one takes over.
//!
//! ```text
//! cargo run -p moim-cluster --example singleton_job
//! ```
//!
//! The "database" checks fencing tokens, so that a paused leader changes nothing.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_cluster::leadership::LeaderElection as _;
use moim_cluster::{Cluster, ClusterConfig, MemoryRepository, StateRepository};

/// The resource that the job writes to: it rejects tokens older than one it has seen.
#[derive(Default)]
struct Database {
    rows: Mutex<(i64, Vec<String>)>,
}

impl Database {
    fn write(&self, token: i64, row: String) -> bool {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if token < rows.0 {
            return false;
        }
        rows.0 = token;
        rows.1.push(row);
        true
    }

    fn rows(&self) -> Vec<String> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}

/// A node: campaigns, works while it is the leader, campaigns again.
async fn node(
    name: String,
    store: Arc<dyn StateRepository>,
    database: Arc<Database>,
) -> Result<(), Box<dyn Error>> {
    let config = ClusterConfig { node_id: name.clone(), ..ClusterConfig::default() };
    let cluster = Cluster::builder(config).repository(store).start().await?;
    let election = cluster.election("nightly-report");
    let leadership = election.campaign().await?;
    for step in 1..=5 {
        // Check before each use: after a pause the leadership is invalid.
        if !leadership.is_valid() {
            break;
        }
        database.write(leadership.fencing_token(), format!("{name} did step {step}"));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    leadership.resign().await?;
    cluster.stop().await?;
    Ok(())
}

/// Runs three nodes to completion; returns the rows of the database.
pub(crate) async fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
    // One process, so memory is sufficient; `store.kind = "etcd"` in the configuration selects a Moim.
    let store = MemoryRepository::started(Arc::new(moim_cluster::clock::BootClock), &scope);
    let database = Arc::new(Database::default());
    let nodes = ["ada", "bob", "cleo"].map(|name| node(name.to_owned(), store.clone(), database.clone()));
    for done in futures_util::future::join_all(nodes).await {
        done?;
    }
    Ok(database.rows())
}

#[allow(dead_code, clippy::print_stdout)] // the tests call `run`
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    for row in run().await? {
        println!("{row}");
    }
    Ok(())
}
