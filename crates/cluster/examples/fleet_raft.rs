//! A fleet of workers that share partitions, in Raft mode: a leader rebalances, state is handed over, no
//! state is lost when a worker joins, leaves, or fails.
//!
//! ```text
//! cargo run -p moim-cluster --example fleet_raft
//! ```
//!
//! Each partition is a hall of presses; the state is how many strokes its presses have made.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_cluster::assignment::{HandedOver, Handoff, Owned, PartitionHandler, PartitionSpec};
use moim_cluster::config::AppConfig;
use moim_cluster::{BoxFuture, Cluster, ClusterConfig, MemoryRepository, StateRepository};

/// A worker: the strokes of every partition it owns.
#[derive(Default)]
pub(crate) struct Presses {
    strokes: Mutex<BTreeMap<String, (Owned, u64)>>,
}

impl Presses {
    /// Every owned press makes a stroke.
    pub(crate) async fn work(&self) -> u64 {
        let mut done = Vec::new();
        {
            let mut strokes = self.strokes.lock().unwrap_or_else(PoisonError::into_inner);
            for (owned, count) in strokes.values_mut().filter(|(owned, _)| owned.is_valid()) {
                *count += 1;
                done.push((owned.clone(), *count));
            }
        }
        let mut counted = 0;
        for (owned, count) in done {
            // Recorded before it counts: a crash loses only unacknowledged strokes.
            if owned.checkpoint(&state(count)).await.is_ok() {
                counted += 1;
            }
        }
        counted
    }

    fn total(&self) -> u64 {
        self.strokes.lock().unwrap_or_else(PoisonError::into_inner).values().map(|(_, count)| count).sum()
    }
}

fn state(count: u64) -> HandedOver {
    let handoff = Handoff { checkpoint: count.to_string().into(), ..Handoff::default() };
    HandedOver { handoff, last_offset: i64::try_from(count).unwrap_or(i64::MAX) }
}

impl PartitionHandler for Presses {
    fn on_assigned(&self, owned: Owned, handed_over: Option<HandedOver>) -> BoxFuture<'_, ()> {
        let count = handed_over.map_or(0, |state| u64::try_from(state.last_offset).unwrap_or(0));
        let mut strokes = self.strokes.lock().unwrap_or_else(PoisonError::into_inner);
        strokes.insert(owned.partition().to_owned(), (owned, count));
        Box::pin(async {})
    }

    fn on_revoked<'a>(&'a self, partition: &'a str) -> BoxFuture<'a, HandedOver> {
        let removed = self.strokes.lock().unwrap_or_else(PoisonError::into_inner).remove(partition);
        Box::pin(async move { state(removed.map_or(0, |(_, count)| count)) })
    }

    fn on_lost(&self, partition: &str) {
        self.strokes.lock().unwrap_or_else(PoisonError::into_inner).remove(partition);
    }
}

/// Starts a worker.
pub(crate) async fn worker(
    name: &str,
    store: &Arc<dyn StateRepository>,
) -> Result<(Cluster, Arc<Presses>), Box<dyn Error>> {
    let hall = |at| PartitionSpec {
        id: format!("hall-{at}"),
        equipment_ids: vec![format!("press-{at}-a"), format!("press-{at}-b")],
        ..PartitionSpec::default()
    };
    let app = AppConfig { partitions: (1..=12).map(hall).collect(), ..AppConfig::default() };
    let config = ClusterConfig {
        node_id: name.to_owned(),
        apps: BTreeMap::from([("presses".to_owned(), app)]),
        ..ClusterConfig::default()
    };
    let presses = Arc::new(Presses::default());
    let cluster = Cluster::builder(config).repository(Arc::clone(store)).app("presses", presses.clone());
    Ok((cluster.start().await?, presses))
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) -> Result<(), Box<dyn Error>> {
    for _ in 0..2_000 {
        if condition() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err(format!("timeout waiting for: {what}").into())
}

/// One worker, then two, then one again: returns the counted strokes and the strokes in the final state.
pub(crate) async fn run() -> Result<(u64, u64), Box<dyn Error>> {
    let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
    let store: Arc<dyn StateRepository> =
        MemoryRepository::started(Arc::new(moim_cluster::clock::BootClock), &scope);
    let (one, first) = worker("one", &store).await?;
    until("worker one owns all partitions", || one.owned("presses").len() == 12).await?;
    let mut counted = 0;
    for _ in 0..10 {
        counted += first.work().await;
    }
    let (two, second) = worker("two", &store).await?;
    until("the partitions are balanced", || {
        one.owned("presses").len() == 6 && two.owned("presses").len() == 6
    })
    .await?;
    for _ in 0..10 {
        counted += first.work().await + second.work().await;
    }
    one.stop().await?;
    until("worker two owns all partitions", || two.owned("presses").len() == 12).await?;
    let total = second.total();
    two.stop().await?;
    Ok((counted, total))
}

#[allow(dead_code, clippy::print_stdout)] // the tests call `run`
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (counted, total) = run().await?;
    println!("{counted} strokes were counted, {total} are in the state that was handed over");
    Ok(())
}
