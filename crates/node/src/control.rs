//! The control thread: Raft, the coordination core on it, and this node's part in the cluster.
//!
//! It has its own runtime, so that no client of the queue or of the etcd port keeps Raft from its timers. Everything
//! else holds a [`Control`], a handle for any thread.
//!
//! | file | owns |
//! |---|---|
//! | `thread.rs` | the thread: how it comes up and goes down |
//! | `records.rs` | what the cluster knows about its nodes, and every change of it |
//! | `view.rs` | what this node's own state says about the cluster |
//! | `presence.rs` | the leased mark that this node serves, and what its folder is worth |
//! | `marks.rs` | how far this node's folder is, in the cluster's records |
//! | `pulse.rs` | whether the other nodes answer |
//! | `ruler.rs` | this node's part in electing the controller, and its terms of office |
//! | `voters.rs`, `steward.rs` | who votes: the decision, and the leader who sees to it |
//! | `disk_watchdog.rs`, `disk_health.rs` | a disk that hangs or is full: the verdict, and how the node hands over |
//! | `damage.rs` | damage that is found while the node runs |
//! | `migrate.rs` | folders from before there was a coordination core |
//! | `report.rs`, `events.rs`, `metrics.rs` | what operators see |

mod damage;
pub(crate) mod disk_health;
mod disk_watchdog;
pub(crate) mod events;
mod marks;
mod metrics;
mod migrate;
mod presence;
pub(crate) mod pulse;
pub(crate) mod records;
pub(crate) mod report;
mod ruler;
mod steward;
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
use moim_cluster::StateRepository;
use moim_cluster::nodes::NodeRecord;
use moim_coord::Coordinator;
use moim_journal::Store;
use moim_queue::Broker;
use moim_raft::{LocalPeer, Router};
use moim_replica::PartitionId;
use moim_replica::controller::Settings;
use moim_replica::driver::Driver;
use tokio::runtime::Handle;

use self::presence::Presence;
use self::pulse::Pulse;
use self::records::RecordError;
use self::view::{Partitions, View};
use crate::admin::Readiness;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome, Status};
use crate::journals::Journals;

pub(crate) use self::thread::{GROUP, start};

/// How long a leader that stops tries to find a successor.
const HAND_OVER: Duration = Duration::from_secs(2);
/// How long a node that stops waits for others to lead its partitions.
const RESIGN: Duration = Duration::from_secs(3);
/// Between two looks at who leads.
const LOOK: Duration = Duration::from_millis(20);
/// Between two looks at what the queue and the store find out about themselves.
const FINDINGS_LOOK: Duration = Duration::from_secs(1);
/// A look that comes so late finds nothing.
const FINDINGS_LATE_MS: u64 = 2_000;
/// What the readiness of the event loops is called.
const EVENT_LOOPS: &str = "event loops";

/// What the control thread is made of.
pub(crate) struct ControlParts {
    pub(crate) config: Config,
    pub(crate) host: IpAddr,
    pub(crate) data: Arc<DataDir>,
    pub(crate) store: Arc<Store>,
    pub(crate) router: Router,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) readiness: Readiness,
    /// Settings that topics fall back to.
    pub(crate) topic_defaults: Settings,
    /// The runtime of the etcd port: watchers are woken there.
    pub(crate) etcd_runtime: Handle,
    /// Listeners that are bound already.
    pub(crate) etcd: SocketAddr,
    pub(crate) admin: SocketAddr,
}

/// This node's part in the cluster.
pub(crate) struct Control {
    /// The coordination core.
    pub(crate) coordinator: Coordinator,
    /// The same, as the cluster's metadata store.
    pub(crate) repository: Arc<dyn StateRepository>,
    /// Where the peer port listens.
    pub(crate) peer: SocketAddr,
    /// Given when the control thread cannot go on.
    pub(crate) failed: Shutdown,
    /// Given when this node was removed from the cluster.
    pub(crate) removed: Shutdown,
    /// Under which name connections to other nodes are made.
    pub(crate) local: LocalPeer,
    /// What this node has seen happen.
    pub(crate) events: Arc<events::EventLog>,
    /// Whether the others answer.
    pub(crate) pulse: Arc<Pulse>,
    presence: Arc<Presence>,
    record: Mutex<NodeRecord>,
    thread: std::thread::JoinHandle<()>,
}

impl Control {
    /// Tells the cluster where Kafka clients reach this node.
    pub(crate) async fn publish_kafka(&self, address: String) -> Outcome {
        let record = {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            record.kafka = address;
            record.clone()
        };
        publish(self.repository.as_ref(), &record).await
    }

    /// Tells the cluster where Redis clients reach this node's home shard.
    pub(crate) async fn publish_redis(&self, address: String) -> Outcome {
        let record = {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            record.redis = address;
            record.clone()
        };
        publish(self.repository.as_ref(), &record).await
    }

    /// This node's journals are recovered, and these are damaged: from now on it is a member of the cluster, in the run
    /// that is returned.
    pub(crate) async fn enlist(&self, damaged: &[PartitionId]) -> i64 {
        self.presence.begin(damaged.iter().map(PartitionId::to_string).collect()).await
    }

    /// The runs of this node: the present one, and those that follow when its lease was lost.
    pub(crate) fn runs(&self) -> tokio::sync::watch::Receiver<Option<i64>> {
        self.presence.runs()
    }

    /// Tells the cluster of damage that is found from now on, until the node stops.
    pub(crate) fn report_damage(&self, journals: &Journals, driver: &Arc<Driver>, scope: &Scope) {
        let watch = damage::watch(Arc::clone(&self.presence), journals.clone(), Arc::clone(driver), scope);
        scope.spawn("damage", watch);
    }

    /// Tells the queue whether it may speak for what it leads, and the etcd API whether a quorum can be reached, until the
    /// node stops. A node without others is always in touch with itself.
    pub(crate) fn keep_in_touch(&self, broker: Arc<Broker>, scope: &Scope) {
        let (mut touch, coordinator) = (self.presence.touch(), self.coordinator.clone());
        let mut given_up = self.presence.withdrawals();
        scope.spawn("touch", async move {
            loop {
                let in_touch = *touch.borrow_and_update() || View::of(&coordinator).nodes.len() <= 1;
                coordinator.set_isolated(!in_touch);
                // With a disk that hangs this node may not even learn that others lead: its clients must not wait for that.
                let in_touch = in_touch && !*given_up.borrow_and_update();
                broker.set_in_touch(in_touch);
                let changed = tokio::select! {
                    biased;
                    changed = touch.changed() => changed,
                    changed = given_up.changed() => changed,
                };
                if changed.is_err() {
                    return;
                }
            }
        });
    }

    /// Sends clients of the store to the other nodes while this node has given its presence up, until the node stops.
    pub(crate) fn follow_withdrawal(&self, store: Arc<moim_slots::service::Service>, scope: &Scope) {
        let mut given_up = self.presence.withdrawals();
        scope.spawn("withdrawal", async move {
            loop {
                store.set_withdrawn(*given_up.borrow_and_update());
                if given_up.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Tells operators of event loops that stand still and of store replicas that differ from their primary, until the node
    /// stops.
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
            let mut looked_ms = clock.monotonic_ms();
            loop {
                tokio::select! {
                    () = shutdown.stopped() => return,
                    () = rest(FINDINGS_LOOK) => {}
                }
                let now_ms = clock.monotonic_ms();
                if now_ms - std::mem::replace(&mut looked_ms, now_ms) > FINDINGS_LATE_MS {
                    continue; // the process stood still, and its loops with it
                }
                let (stalled, mismatches) = store.findings();
                let is_stalled = stalled + queue.stalled_loops() > 0;
                if is_stalled && !was_stalled {
                    readiness.fails(EVENT_LOOPS, "an event loop does not turn");
                    events.on_finding(clock.wall_ms(), "event loop stalled".to_owned());
                } else if was_stalled && !is_stalled {
                    readiness.holds(EVENT_LOOPS);
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

    /// Lets others lead what this node leads, as far as there is somebody in sync.
    async fn resign(&self) {
        let me = self.record.lock().unwrap_or_else(PoisonError::into_inner).node_id;
        if View::of(&self.coordinator).members.iter().all(|live| live.record.node_id == me) {
            return;
        }
        if let Err(error) = self.presence.resign().await {
            return tracing::warn!(%error, "leaderships were not handed over");
        }
        while Partitions::of(&self.coordinator).movable(me) > 0 {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The first half of a graceful stop: others take over while this node still serves.
    pub(crate) async fn hand_over(&self) {
        if tokio::time::timeout(RESIGN, self.resign()).await.is_err() {
            tracing::warn!("others did not take over all partitions in time");
        }
        let group = self.coordinator.group();
        if group.is_leader() {
            let metrics = group.metrics();
            let voters = metrics.voters.iter().filter(|voter| voter.id != metrics.voter);
            let matched =
                |id| metrics.matched.iter().find(|(other, _)| *other == id).and_then(|found| found.1);
            if let Some(to) = voters.max_by_key(|voter| matched(voter.id)) {
                match tokio::time::timeout(HAND_OVER, group.transfer_leadership(to.id)).await {
                    Ok(Ok(())) => tracing::info!(to = %to.id, "handed the coordination group over"),
                    Ok(Err(error)) => tracing::warn!(%error, "the coordination group was not handed over"),
                    Err(_) => tracing::warn!("the coordination group was not handed over in time"),
                }
            }
        }
        if tokio::time::timeout(HAND_OVER, self.presence.leave()).await.is_err() {
            tracing::debug!("this node's lease ends by itself");
        }
    }

    /// The second half. Blocks until the control thread has ended.
    pub(crate) fn stop(self) {
        self.failed.stop();
        if self.thread.join().is_err() {
            tracing::error!("the control thread panicked");
        }
    }
}

/// Writes this node's record, as long as the cluster knows its folder.
async fn publish(repository: &dyn StateRepository, record: &NodeRecord) -> Outcome {
    const RETRY: Duration = Duration::from_millis(100);
    loop {
        match records::publish(repository, record).await {
            Ok(()) => return Ok(()),
            Err(
                error @ (RecordError::NoSuchNode(_)
                | RecordError::OtherFolder(_)
                | RecordError::LastNode(_)
                | RecordError::Holds(..)
                | RecordError::Running(_)),
            ) => {
                return Err(Failure::new(Status::Conflict, error.to_string())
                    .hint("to join again, start with an empty folder and --join"));
            }
            Err(RecordError::Store(error)) if !error.is_retryable() => {
                return Err(Failure::error(format!("this node's record cannot be written: {error}")));
            }
            Err(error) => {
                tracing::debug!(%error, "this node's record was not written; trying again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
