//! The membership view: maintained by a watch, judged by this node's own clock, published as a snapshot and
//! events.
//!
//! Invariant: the view is the result of the events so far on the empty view; a watch gap is followed by a
//! list whose differences become events, so no change is missed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{HeartbeatOptions, NodeInfo, NodeRecord};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::{ClusterEvent, EventStream};
use crate::keys;
use crate::repository::{Entry, Event};

/// Status of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MemberStatus {
    /// Heartbeats arrive.
    #[default]
    Up,
    /// No heartbeat for the heartbeat timeout.
    Suspect,
    /// No heartbeat for twice the timeout, or lease expired.
    Down,
    /// The member left gracefully.
    Left,
}

/// A status change of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberEvent {
    /// The member.
    pub node: NodeInfo,
    /// Previous status; `None` for a new member.
    pub from: Option<MemberStatus>,
    /// New status.
    pub status: MemberStatus,
    /// Reason of the change.
    pub reason: String,
}

/// A member as observed by this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Description of the node.
    pub info: NodeInfo,
    /// Observed status.
    pub status: MemberStatus,
    /// Time of its last record write, by its own wall clock. Informational.
    pub last_heartbeat: i64,
    /// Incarnation: the create revision of its record.
    pub epoch: i64,
}

struct Observed {
    view: MemberView,
    incarnation: u64,
    /// Monotonic time at which this node last observed a change of the record.
    observed_ns: u64,
}

/// Monitors the members. Cheap to clone.
#[derive(Clone)]
pub struct Monitor {
    context: Context,
    observed: Arc<Mutex<BTreeMap<String, Observed>>>,
    options: HeartbeatOptions,
}

impl Monitor {
    /// Starts the monitor in a task of the context's scope. Returns when the current members are in the
    /// view.
    pub async fn start(
        context: &Context,
        options: &HeartbeatOptions,
    ) -> Result<Self, crate::RepositoryError> {
        let monitor = Self { context: context.clone(), observed: Arc::default(), options: options.clone() };
        let revision = crate::backoff::read(Duration::from_secs(10), || monitor.list()).await?;
        let (watching, stop) = (monitor.clone(), context.scope.shutdown().clone());
        context.scope.spawn("cluster members", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = watching.watch(revision) => {}
            }
        });
        Ok(monitor)
    }

    /// All observed members, including those that left or are down.
    pub fn view(&self) -> Vec<MemberView> {
        self.observed().values().map(|observed| observed.view.clone()).collect()
    }

    /// The members with status UP.
    pub fn up(&self) -> Vec<MemberView> {
        self.view().into_iter().filter(|member| member.status == MemberStatus::Up).collect()
    }

    /// One member.
    pub fn get(&self, id: &str) -> Option<MemberView> {
        self.observed().get(id).map(|observed| observed.view.clone())
    }

    /// The current view and all later changes. The stream reports missed events: subscribe again then.
    pub fn subscribe(&self) -> (Vec<MemberView>, MemberStream) {
        // Under the lock that covers every change and its publication.
        let observed = self.observed();
        let stream = MemberStream { events: self.context.events.subscribe() };
        (observed.values().map(|observed| observed.view.clone()).collect(), stream)
    }

    fn observed(&self) -> MutexGuard<'_, BTreeMap<String, Observed>> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists all records; differences to the view become events.
    async fn list(&self) -> Result<i64, crate::RepositoryError> {
        let (revision, entries) = self.context.repository.list(keys::NODES).await?;
        let mut deleted: Vec<String> = self.observed().keys().cloned().collect();
        for entry in &entries {
            deleted.retain(|id| keys::node(id) != entry.key);
            self.on_put(entry);
        }
        for id in deleted {
            self.on_deleted(&id);
        }
        Ok(revision)
    }

    async fn watch(&self, listed: i64) {
        let mut backoff = Backoff::default();
        let mut from = Some(listed);
        // Silence is detected within a tenth of the timeout.
        let tick = (self.options.timeout / 10).max(Duration::from_millis(5));
        loop {
            let revision = match from.take() {
                Some(revision) => revision,
                None => match self.list().await {
                    Ok(revision) => revision,
                    Err(_) => {
                        self.check_silence();
                        backoff.pause().await;
                        continue;
                    }
                },
            };
            let Ok(mut watch) = self.context.repository.watch(keys::NODES, revision + 1).await else {
                self.check_silence();
                backoff.pause().await;
                continue;
            };
            backoff.reset();
            loop {
                match tokio::time::timeout(tick, watch.next()).await {
                    Err(_) => self.check_silence(),
                    Ok(Some(Ok(Event::Put(entry)))) => {
                        self.on_put(&entry);
                        self.check_silence();
                    }
                    Ok(Some(Ok(Event::Delete { key, .. }))) => {
                        if let Some(id) = key.strip_prefix(keys::NODES) {
                            self.on_deleted(id);
                        }
                    }
                    Ok(Some(Err(_)) | None) => break,
                }
            }
        }
    }

    fn on_put(&self, entry: &Entry) {
        let record: NodeRecord = match serde_json::from_slice(&entry.value) {
            Ok(record) => record,
            Err(error) => {
                let (key, reason) = (entry.key.clone(), error.to_string());
                return self.context.events.publish(ClusterEvent::Malformed { key, reason });
            }
        };
        let observed_ns = self.context.clock.monotonic_ns();
        let status = if record.status == MemberStatus::Left { MemberStatus::Left } else { MemberStatus::Up };
        let mut members = self.observed();
        let known = members.get(&record.info.id);
        let from = known.map(|observed| observed.view.status);
        let is_new_incarnation = known.is_none_or(|observed| observed.incarnation != record.incarnation);
        let view = MemberView {
            info: record.info.clone(),
            status,
            last_heartbeat: record.last_heartbeat,
            epoch: entry.create_revision,
        };
        let id = record.info.id.clone();
        members.insert(id, Observed { view, incarnation: record.incarnation, observed_ns });
        let reason = match (from, status) {
            (Some(before), now) if before == now && !is_new_incarnation => return,
            (_, MemberStatus::Left) => "left gracefully",
            (None | Some(MemberStatus::Left), _) => "joined",
            (Some(_), _) if is_new_incarnation => "restarted",
            (Some(_), _) => "heartbeats resumed",
        };
        self.publish(&members, MemberEvent { node: record.info, from, status, reason: reason.to_owned() });
    }

    /// The record was deleted: after a graceful leave, or by lease expiry.
    fn on_deleted(&self, id: &str) {
        let mut members = self.observed();
        if let Some(observed) = members.get_mut(id)
            && !matches!(observed.view.status, MemberStatus::Left | MemberStatus::Down)
        {
            let from = Some(std::mem::replace(&mut observed.view.status, MemberStatus::Down));
            let node = observed.view.info.clone();
            let reason = "lease expired".to_owned();
            self.publish(&members, MemberEvent { node, from, status: MemberStatus::Down, reason });
        }
    }

    /// Marks members without heartbeats as suspect or down.
    fn check_silence(&self) {
        let now = self.context.clock.monotonic_ns();
        let timeout = u64::try_from(self.options.timeout.as_nanos()).unwrap_or(u64::MAX);
        let mut events = Vec::new();
        let mut members = self.observed();
        for observed in members.values_mut() {
            let silent = now.saturating_sub(observed.observed_ns);
            let next = match observed.view.status {
                MemberStatus::Up | MemberStatus::Suspect if silent >= timeout.saturating_mul(2) => {
                    MemberStatus::Down
                }
                MemberStatus::Up if silent >= timeout => MemberStatus::Suspect,
                _ => continue,
            };
            let from = Some(std::mem::replace(&mut observed.view.status, next));
            let reason = format!("silent for {} ms", silent / 1_000_000);
            events.push(MemberEvent { node: observed.view.info.clone(), from, status: next, reason });
        }
        for event in events {
            self.publish(&members, event);
        }
    }

    fn publish(&self, members: &BTreeMap<String, Observed>, event: MemberEvent) {
        let count = |status| {
            let count = members.values().filter(|observed| observed.view.status == status).count();
            i64::try_from(count).unwrap_or(i64::MAX)
        };
        self.context.metrics.members_up.set(count(MemberStatus::Up));
        self.context.metrics.members_suspect.set(count(MemberStatus::Suspect));
        self.context.events.publish(ClusterEvent::Member(event));
    }
}

/// Changes of the membership.
pub struct MemberStream {
    events: EventStream,
}

impl MemberStream {
    /// The next change, or the number of missed events; `None` when the bus is closed. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<MemberEvent, crate::events::Lagged>> {
        loop {
            match self.events.next().await? {
                Ok(ClusterEvent::Member(event)) => return Some(Ok(event)),
                Ok(_) => {}
                Err(lagged) => return Some(Err(lagged)),
            }
        }
    }
}
