//! Watches the heartbeats of the event loops, and hands over what a loop that stands still holds up.
//!
//! A loop that does not turn serves none of its clients, and may hold the lock of a partition: then the partition stands still
//! although its node looks healthy to the cluster. Silent for ten seconds, the node hands over the partitions whose lock cannot
//! be had, or all that it leads if every lock can, as the store does with its shards.
//!
//! Must never run on one of the loops, and never wait for a lock that a loop may hold: who leads is read from the state
//! repository. The heartbeats stop with the process, so a round that itself comes late judges nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;
use moim_base::rest::rest;
use moim_cluster::nodes::members;
use moim_replica::controller::requests::{self, ElectionKind, RequestError};
use moim_replica::{PartitionId, PartitionState, keys};

use crate::broker::Broker;
use crate::placement;

/// Between two rounds.
const EVERY: Duration = Duration::from_millis(250);
/// A round that comes so much later than it should judges nothing.
const LATE_MS: u64 = 1_000;
/// A loop that is silent for so long costs the node what it leads.
const GIVE_UP_MS: u64 = 10_000;
/// A lock that cannot be had for so long is held by a loop that stands still.
const LOCKED_FOR: Duration = Duration::from_millis(100);
/// Between two looks at locks, or at who leads.
const PAUSE: Duration = Duration::from_millis(10);
/// How long the hand-over of one partition may take.
const PATIENCE: Duration = Duration::from_secs(5);

impl Broker {
    /// Watches the loops until the shutdown. For a thread that runs none of them.
    pub async fn watch_loops(self: Arc<Self>) {
        let mut before_ms = self.clock.monotonic_ms();
        while !self.shutdown.is_stopped() {
            rest(EVERY).await;
            let now_ms = self.clock.monotonic_ms();
            if now_ms.saturating_sub(std::mem::replace(&mut before_ms, now_ms)) > LATE_MS {
                continue;
            }
            self.on_silent_loop(self.loops.silent_ms(now_ms)).await;
            before_ms = self.clock.monotonic_ms();
        }
    }

    /// The most silent loop has not turned for so long. Answers how many partitions were handed over.
    pub async fn on_silent_loop(self: &Arc<Self>, silent_ms: u64) -> usize {
        if silent_ms < GIVE_UP_MS {
            return 0;
        }
        let locked = self.locked_partitions().await;
        let led = match self.led_partitions().await {
            Ok(led) => led,
            Err(error) => {
                tracing::warn!(%error, "leaderships cannot be given up: event loop stalled");
                return 0;
            }
        };
        let is_held_up = |id: &PartitionId| locked.is_empty() || locked.contains(id);
        let mut handed_over = 0;
        for (id, to) in led.into_iter().filter(|(id, _)| is_held_up(id)) {
            match tokio::time::timeout(PATIENCE, self.hand_over(id, to)).await {
                Ok(Ok(())) => {
                    tracing::warn!(%id, to = to.0, silent_ms, "leadership given up: event loop stalled");
                    handed_over += 1;
                }
                Ok(Err(error)) => tracing::warn!(%id, %error, "leadership cannot be given up"),
                Err(_) => tracing::warn!(%id, to = to.0, "leadership was not given up in time"),
            }
        }
        handed_over
    }

    /// Partitions whose lock cannot be had; none where the list of topics itself cannot.
    async fn locked_partitions(self: &Arc<Self>) -> BTreeSet<PartitionId> {
        let broker = Arc::clone(self);
        let list = tokio::task::spawn_blocking(move || broker.topics.all());
        let Ok(Ok(topics)) = tokio::time::timeout(LOCKED_FOR, list).await else { return BTreeSet::new() };
        let mut copies: Vec<_> = topics.iter().flat_map(|topic| topic.copies()).collect();
        let until = tokio::time::Instant::now() + LOCKED_FOR;
        loop {
            copies.retain(|copy| copy.is_locked());
            if copies.is_empty() || tokio::time::Instant::now() >= until {
                return copies.iter().map(|copy| placement::id(copy.topic_id, copy.index)).collect();
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// What this broker leads and another in-sync replica that runs can lead, with that one.
    async fn led_partitions(&self) -> Result<Vec<(PartitionId, BrokerId)>, RequestError> {
        let me = self.options.node_id;
        let (_, live) = members(self.repository.as_ref()).await?;
        let (_, entries) = self.repository.list(keys::PARTITIONS).await?;
        let mut led = Vec::new();
        for entry in entries {
            let Some(id) = keys::parse_partition(&entry.key).filter(|id| id.topic != keys::SHARDS) else {
                continue;
            };
            let Ok(state) = PartitionState::decode(&entry.value) else { continue };
            let runs = |node: BrokerId| live.iter().any(|live| live.record.node_id == node.0);
            let fits = |node: &&BrokerId| **node != me && runs(**node) && state.in_sync(**node).is_some();
            if state.leader == Some(me)
                && let Some(to) = state.target().iter().find(fits)
            {
                led.push((id, *to));
            }
        }
        Ok(led)
    }

    /// Makes `to` the preferred leader, so that leadership does not come back, and has it elected.
    async fn hand_over(&self, id: PartitionId, to: BrokerId) -> Result<(), RequestError> {
        let repository = self.repository.as_ref();
        let key = keys::partition(id);
        let state = || async {
            let entry = repository.get(&key).await?;
            Ok::<_, RequestError>(entry.and_then(|entry| PartitionState::decode(&entry.value).ok()))
        };
        let Some(mut replicas) = state().await?.map(|state| state.target()) else { return Ok(()) };
        let at = replicas.iter().position(|node| *node == to).unwrap_or(0);
        replicas[..=at].rotate_right(1);
        requests::reassign(repository, id, Some(&replicas)).await?;
        loop {
            let elected = requests::elect(repository, id, ElectionKind::Preferred).await;
            if state().await?.is_none_or(|state| state.leader == Some(to)) {
                return Ok(());
            }
            match elected {
                Ok(())
                | Err(
                    RequestError::ElectionNotNeeded
                    | RequestError::PreferredNotAvailable
                    | RequestError::Contended,
                ) => tokio::time::sleep(PAUSE).await,
                Err(error) => return Err(error),
            }
        }
    }
}
