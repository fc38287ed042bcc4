//! Event-loop watchdog: checks the heartbeats of the event loops and hands over leadership of partitions that a
//! stalled loop blocks.
//!
//! A stalled loop serves none of its clients, and may hold the lock of a partition: then the partition is unavailable
//! although its node looks healthy to the cluster. After a stall of ten seconds the node hands over the partitions
//! whose lock is held, or all that it leads if no lock is held, as the store does with its shards.
//!
//! Must never run on one of the loops, and must never wait for a lock that a loop may hold: leadership is read from
//! the state repository. The heartbeats stop with the process, so a round that is itself late draws no conclusion.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;
use moim_base::rest::rest;
use moim_replica::controller::requests::{self, ElectionKind, RequestError};
use moim_replica::{PartitionId, PartitionState, keys};
use moim_state::nodes::members;

use crate::broker::Broker;
use crate::partition_registration;

/// Interval of the watchdog rounds.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// A round that is later than this draws no conclusion.
const LATE_MS: u64 = 1_000;
/// A stall of this length makes the node hand over leadership.
const HAND_OVER_AFTER_MS: u64 = 10_000;
/// A lock that is held for this long is held by a stalled loop.
const LOCK_WAIT: Duration = Duration::from_millis(100);
/// Poll interval for locks and for the result of an election.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Timeout of the hand-over of one partition.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(5);

impl Broker {
    /// Runs the watchdog until shutdown. Must run on a thread that runs none of the loops.
    pub async fn watch_loops(self: Arc<Self>) {
        let mut before_ms = self.clock.monotonic_ms();
        while !self.shutdown.is_stopped() {
            rest(CHECK_INTERVAL).await;
            let now_ms = self.clock.monotonic_ms();
            if now_ms.saturating_sub(std::mem::replace(&mut before_ms, now_ms)) > LATE_MS {
                continue;
            }
            self.on_stalled_loop(self.loops.stalled_ms(now_ms)).await;
            before_ms = self.clock.monotonic_ms();
        }
    }

    /// Handles a stall of the slowest loop. Returns the number of partitions handed over.
    pub async fn on_stalled_loop(self: &Arc<Self>, stalled_ms: u64) -> usize {
        if stalled_ms < HAND_OVER_AFTER_MS {
            return 0;
        }
        let locked = self.locked_partitions().await;
        let led = match self.led_partitions().await {
            Ok(led) => led,
            Err(error) => {
                tracing::warn!(%error, "leadership hand-over failed: event loop stalled");
                return 0;
            }
        };
        let is_held_up = |id: &PartitionId| locked.is_empty() || locked.contains(id);
        let mut handed_over = 0;
        for (id, to) in led.into_iter().filter(|(id, _)| is_held_up(id)) {
            match tokio::time::timeout(HAND_OVER_TIMEOUT, self.hand_over(id, to)).await {
                Ok(Ok(())) => {
                    tracing::warn!(%id, to = to.0, stalled_ms, "leadership handed over: event loop stalled");
                    handed_over += 1;
                }
                Ok(Err(error)) => tracing::warn!(%id, %error, "leadership hand-over failed"),
                Err(_) => tracing::warn!(%id, to = to.0, "leadership hand-over timed out"),
            }
        }
        handed_over
    }

    /// Partitions whose lock is held; empty if the list of topics itself is locked.
    async fn locked_partitions(self: &Arc<Self>) -> BTreeSet<PartitionId> {
        let broker = Arc::clone(self);
        let list = tokio::task::spawn_blocking(move || broker.topics.all());
        let Ok(Ok(topics)) = tokio::time::timeout(LOCK_WAIT, list).await else { return BTreeSet::new() };
        let mut replicas: Vec<_> = topics.iter().flat_map(|topic| topic.replicas()).collect();
        let until = tokio::time::Instant::now() + LOCK_WAIT;
        loop {
            replicas.retain(|replica| replica.is_locked());
            if replicas.is_empty() || tokio::time::Instant::now() >= until {
                return replicas
                    .iter()
                    .map(|replica| partition_registration::id(replica.topic_id, replica.index))
                    .collect();
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The partitions this broker leads that another live in-sync replica can lead, with that replica.
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

    /// Makes `to` the preferred leader, so that leadership does not move back, and has it elected.
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
                ) => tokio::time::sleep(POLL_INTERVAL).await,
                Err(error) => return Err(error),
            }
        }
    }
}
