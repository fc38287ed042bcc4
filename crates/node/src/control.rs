//! The control thread: the Raft group, the coordination core on it, and this node's membership in the cluster.
//!
//! It has its own runtime, so that no client of the queue or of the etcd port delays Raft's timers. All other threads
//! use a [`Control`] handle.
//!
//! | file | owns |
//! |---|---|
//! | `thread.rs` | startup and shutdown of the thread |
//! | `records.rs` | the cluster's node records, and every change of them |
//! | `view.rs` | the cluster as this node's local state shows it, without a quorum read |
//! | `presence.rs` | the leased member key of this node, its broker epoch, and the state of its data directory |
//! | `marks.rs` | durable Raft index of this node's data directory, recorded in the coordination core |
//! | `failure_detector.rs` | health probes of the other nodes |
//! | `controller_election.rs` | controller election and this node's controller terms |
//! | `voters.rs`, `group_membership.rs` | voters of the coordination group: the plan, and its execution by the leader |
//! | `disk_watchdog.rs`, `disk_health.rs` | an impaired or full disk: the verdict, and the hand-off of leaderships |
//! | `damage.rs` | damaged replicas found at runtime |
//! | `report.rs`, `events.rs`, `metrics.rs` | the operator's view |

mod controller_election;
mod damage;
pub(crate) mod disk_health;
mod disk_watchdog;
pub(crate) mod events;
pub(crate) mod failure_detector;
mod group_membership;
mod marks;
mod metrics;
mod presence;
pub(crate) mod records;
pub(crate) mod report;
mod thread;
pub(crate) mod view;
pub(crate) mod voters;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::Clock;
use moim_base::metrics::Metrics;
use moim_base::rest::rest;
use moim_base::task::{Scope, Shutdown};
use moim_coord::Coordinator;
use moim_journal::Store;
use moim_queue::Broker;
use moim_raft::{LocalPeer, Router};
use moim_replica::PartitionId;
use moim_replica::controller::Settings;
use moim_replica::driver::Driver;
use moim_state::StateRepository;
use moim_state::nodes::NodeRecord;
use tokio::runtime::Handle;

use self::failure_detector::FailureDetector;
use self::presence::Presence;
use self::records::RecordError;
use self::view::{Partitions, View};
use crate::admin::Readiness;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome, Status};
use crate::journals::Journals;

pub(crate) use self::thread::{GROUP, start};

/// Timeout of the Raft leadership transfer, and of the lease revocation, at a graceful shutdown.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of the partition leadership hand-off at a graceful shutdown.
const RESIGN_TIMEOUT: Duration = Duration::from_secs(3);
/// Poll interval of the partition leaders during the hand-off.
const LEADER_POLL: Duration = Duration::from_millis(20);
/// Poll interval of the self-checks of the queue and the store.
const FINDINGS_POLL: Duration = Duration::from_secs(1);
/// A poll that is this late is skipped: the whole process was paused.
const FINDINGS_LATE_MS: u64 = 2_000;
/// Readiness condition: the event loops make progress.
const EVENT_LOOPS: &str = "event loops";

/// Dependencies of the control thread.
pub(crate) struct ControlParts {
    pub(crate) config: Config,
    pub(crate) host: IpAddr,
    pub(crate) data: Arc<DataDir>,
    pub(crate) store: Arc<Store>,
    pub(crate) router: Router,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) readiness: Readiness,
    /// Default topic settings.
    pub(crate) topic_defaults: Settings,
    /// The runtime of the etcd port, where watchers are woken.
    pub(crate) etcd_runtime: Handle,
    /// Address of the bound etcd listener.
    pub(crate) etcd: SocketAddr,
    /// Address of the bound admin listener.
    pub(crate) admin: SocketAddr,
}

/// Handle of the control thread.
pub(crate) struct Control {
    /// The coordination core.
    pub(crate) coordinator: Coordinator,
    /// The coordination core as the cluster's metadata store.
    pub(crate) repository: Arc<dyn StateRepository>,
    /// Address of the peer listener.
    pub(crate) peer: SocketAddr,
    /// Triggered when the control thread fails.
    pub(crate) failed: Shutdown,
    /// Triggered when this node was removed from the cluster or replaced.
    pub(crate) removed: Shutdown,
    /// This node's identity on connections to other nodes.
    pub(crate) local: LocalPeer,
    /// Cluster events that this node has observed.
    pub(crate) events: Arc<events::EventLog>,
    /// Health of the other nodes.
    pub(crate) failure_detector: Arc<FailureDetector>,
    presence: Arc<Presence>,
    record: Mutex<NodeRecord>,
    thread: std::thread::JoinHandle<()>,
}

impl Control {
    /// Publishes the advertised Kafka address in this node's record.
    pub(crate) async fn publish_kafka(&self, address: String) -> Outcome {
        let record = {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            record.kafka = address;
            record.clone()
        };
        publish(self.repository.as_ref(), &record).await
    }

    /// Publishes the advertised Redis address of this node's home shard in its record.
    pub(crate) async fn publish_redis(&self, address: String) -> Outcome {
        let record = {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            record.redis = address;
            record.clone()
        };
        publish(self.repository.as_ref(), &record).await
    }

    /// Registers this node as a live member after journal recovery, with its damaged replicas. Returns the broker
    /// epoch.
    pub(crate) async fn register(&self, damaged: &[PartitionId]) -> i64 {
        self.presence.begin(damaged.iter().map(PartitionId::to_string).collect()).await
    }

    /// Broker epoch of this node; a new one follows each lease loss.
    pub(crate) fn broker_epochs(&self) -> tokio::sync::watch::Receiver<Option<i64>> {
        self.presence.broker_epochs()
    }

    /// Reports replicas that are found damaged at runtime, until the node stops.
    pub(crate) fn report_damage(&self, journals: &Journals, driver: &Arc<Driver>, scope: &Scope) {
        let watch = damage::watch(Arc::clone(&self.presence), journals.clone(), Arc::clone(driver), scope);
        scope.spawn("damage", watch);
    }

    /// Propagates quorum contact to the queue (whether it may answer for the partitions that it leads) and isolation to
    /// the etcd API, until the node stops. A single-node cluster is never isolated.
    pub(crate) fn follow_quorum_contact(&self, broker: Arc<Broker>, scope: &Scope) {
        let (mut contact, coordinator) = (self.presence.quorum_contact(), self.coordinator.clone());
        let mut withdrawn = self.presence.withdrawals();
        scope.spawn("quorum-contact", async move {
            loop {
                let has_contact = *contact.borrow_and_update() || View::of(&coordinator).nodes.len() <= 1;
                coordinator.set_isolated(!has_contact);
                // A node with a hung disk may not even learn that other replicas lead: its clients must not wait for
                // that.
                let has_contact = has_contact && !*withdrawn.borrow_and_update();
                broker.set_in_touch(has_contact);
                let changed = tokio::select! {
                    biased;
                    changed = contact.changed() => changed,
                    changed = withdrawn.changed() => changed,
                };
                if changed.is_err() {
                    return;
                }
            }
        });
    }

    /// Redirects clients of the store to the other nodes while this node's presence is withdrawn, until the node stops.
    pub(crate) fn follow_withdrawal(&self, store: Arc<moim_slots::service::Service>, scope: &Scope) {
        let mut withdrawn = self.presence.withdrawals();
        scope.spawn("withdrawal", async move {
            loop {
                store.set_withdrawn(*withdrawn.borrow_and_update());
                if withdrawn.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Reports stalled event loops and store replicas that differ from their primary as events, until the node stops.
    pub(crate) fn report_findings(
        &self,
        queue: Arc<Broker>,
        store: Arc<moim_slots::service::Service>,
        readiness: Readiness,
        clock: Arc<dyn Clock>,
        scope: &Scope,
    ) {
        let (events, shutdown) = (Arc::clone(&self.events), scope.shutdown().clone());
        scope.spawn("findings", async move {
            let (mut was_stalled, mut known) = (false, std::collections::BTreeMap::new());
            let mut polled_ms = clock.monotonic_ms();
            loop {
                tokio::select! {
                    () = shutdown.stopped() => return,
                    () = rest(FINDINGS_POLL) => {}
                }
                let now_ms = clock.monotonic_ms();
                if now_ms - std::mem::replace(&mut polled_ms, now_ms) > FINDINGS_LATE_MS {
                    continue; // the process was paused, and its event loops with it
                }
                let (stalled, mismatches) = store.findings();
                let is_stalled = stalled + queue.stalled_loops() > 0;
                if is_stalled && !was_stalled {
                    readiness.set_failing(EVENT_LOOPS, "an event loop does not turn");
                    events.on_finding(clock.wall_ms(), "event loop stalled".to_owned());
                } else if was_stalled && !is_stalled {
                    readiness.clear_failing(EVENT_LOOPS);
                    events.on_finding(clock.wall_ms(), "event loop turns again".to_owned());
                }
                for (shard, count) in &mismatches {
                    if *count > known.get(shard).copied().unwrap_or(0) {
                        let text =
                            format!("keyspace of shard {shard} differs from its primary's: replica rebuilt");
                        events.on_finding(clock.wall_ms(), text);
                    }
                }
                (was_stalled, known) = (is_stalled, mismatches);
            }
        });
    }

    /// Hands partition leadership to other in-sync replicas, where there are any.
    async fn resign(&self) {
        let me = self.record.lock().unwrap_or_else(PoisonError::into_inner).node_id;
        if View::of(&self.coordinator).members.iter().all(|live| live.record.node_id == me) {
            return;
        }
        if let Err(error) = self.presence.resign().await {
            return tracing::warn!(%error, "partition leadership hand-off failed");
        }
        while Partitions::of(&self.coordinator).movable(me) > 0 {
            tokio::time::sleep(LEADER_POLL).await;
        }
    }

    /// First phase of a graceful shutdown: other nodes take over leadership while this node still serves.
    pub(crate) async fn hand_over(&self) {
        if tokio::time::timeout(RESIGN_TIMEOUT, self.resign()).await.is_err() {
            tracing::warn!("partition leadership hand-off timed out");
        }
        let group = self.coordinator.group();
        if group.is_leader() {
            let metrics = group.metrics();
            let voters = metrics.voters.iter().filter(|voter| voter.id != metrics.voter);
            let matched =
                |id| metrics.matched.iter().find(|(other, _)| *other == id).and_then(|found| found.1);
            if let Some(to) = voters.max_by_key(|voter| matched(voter.id)) {
                match tokio::time::timeout(HAND_OVER_TIMEOUT, group.transfer_leadership(to.id)).await {
                    Ok(Ok(())) => tracing::info!(to = %to.id, "coordination leadership transferred"),
                    Ok(Err(error)) => tracing::warn!(%error, "coordination leadership transfer failed"),
                    Err(_) => tracing::warn!("coordination leadership transfer timed out"),
                }
            }
        }
        if tokio::time::timeout(HAND_OVER_TIMEOUT, self.presence.leave()).await.is_err() {
            tracing::debug!("member lease revocation timed out; the lease expires");
        }
    }

    /// Second phase of a graceful shutdown. Blocks until the control thread has ended.
    pub(crate) fn stop(self) {
        self.failed.stop();
        if self.thread.join().is_err() {
            tracing::error!("control thread panicked");
        }
    }
}

/// Writes this node's record, with retries. Fails if the cluster's record names another data directory.
async fn publish(repository: &dyn StateRepository, record: &NodeRecord) -> Outcome {
    const RETRY: Duration = Duration::from_millis(100);
    loop {
        match records::publish(repository, record).await {
            Ok(()) => return Ok(()),
            Err(
                error @ (RecordError::NoSuchNode(_)
                | RecordError::OtherDirectory(_)
                | RecordError::LastNode(_)
                | RecordError::HasReplicas(..)
                | RecordError::Running(_)),
            ) => {
                return Err(Failure::new(Status::Conflict, error.to_string())
                    .hint("to join again, start with an empty data directory and --join"));
            }
            Err(RecordError::Store(error)) if !error.is_retryable() => {
                return Err(Failure::error(format!("cannot write this node's record: {error}")));
            }
            Err(error) => {
                tracing::debug!(%error, "node record write failed; retrying");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
