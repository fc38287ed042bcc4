//! The view of the members: kept by a watch, judged by this node's own clock, told as a snapshot and events.
//!
//! Invariant: the view is what the events so far make of the empty view; a watch that has a gap is followed by a
//! listing whose differences become events, so no change is missed.

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

/// How a member feels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MemberStatus {
    /// It is heard.
    #[default]
    Up,
    /// It has been silent for a while.
    Suspect,
    /// It has been silent for long, or its lease has ended.
    Down,
    /// It said goodbye.
    Left,
}

/// A member's status has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberEvent {
    /// Who.
    pub node: NodeInfo,
    /// What it was; nothing for one that is new.
    pub from: Option<MemberStatus>,
    /// What it is.
    pub status: MemberStatus,
    /// Why.
    pub reason: String,
}

/// A member as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// What it says about itself.
    pub info: NodeInfo,
    /// How it feels.
    pub status: MemberStatus,
    /// When it wrote its record, by its own wall clock. For people.
    pub last_heartbeat: i64,
    /// Its life: the create revision of its record.
    pub epoch: i64,
}

struct Seen {
    view: MemberView,
    incarnation: u64,
    /// When its record last changed before our eyes.
    heard_ns: u64,
}

/// Watches the members. Cheap to clone.
#[derive(Clone)]
pub struct Monitor {
    context: Context,
    seen: Arc<Mutex<BTreeMap<String, Seen>>>,
    options: HeartbeatOptions,
}

impl Monitor {
    /// Begins to watch, in a task of the context's scope. Returns when the members of this moment are in the view.
    pub async fn start(
        context: &Context,
        options: &HeartbeatOptions,
    ) -> Result<Self, crate::RepositoryError> {
        let monitor = Self { context: context.clone(), seen: Arc::default(), options: options.clone() };
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

    /// Everybody who was seen and has not been forgotten; those who went stay until they come back.
    pub fn view(&self) -> Vec<MemberView> {
        self.seen().values().map(|seen| seen.view.clone()).collect()
    }

    /// The members that are heard.
    pub fn up(&self) -> Vec<MemberView> {
        self.view().into_iter().filter(|member| member.status == MemberStatus::Up).collect()
    }

    /// One member.
    pub fn get(&self, id: &str) -> Option<MemberView> {
        self.seen().get(id).map(|seen| seen.view.clone())
    }

    /// The view of this moment and everything that changes it afterwards. The stream says when it has missed something:
    /// ask again then.
    pub fn subscribe(&self) -> (Vec<MemberView>, MemberStream) {
        // Under the lock that every change is made and published under.
        let seen = self.seen();
        let stream = MemberStream { events: self.context.events.subscribe() };
        (seen.values().map(|seen| seen.view.clone()).collect(), stream)
    }

    fn seen(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads everything; what is different from the view becomes events.
    async fn list(&self) -> Result<i64, crate::RepositoryError> {
        let (revision, entries) = self.context.repository.list(keys::NODES).await?;
        let mut gone: Vec<String> = self.seen().keys().cloned().collect();
        for entry in &entries {
            gone.retain(|id| keys::node(id) != entry.key);
            self.on_put(entry);
        }
        for id in gone {
            self.on_gone(&id);
        }
        Ok(revision)
    }

    async fn watch(&self, listed: i64) {
        let mut backoff = Backoff::default();
        let mut from = Some(listed);
        // Often enough that silence is noticed within a tenth of the timeout.
        let tick = (self.options.timeout / 10).max(Duration::from_millis(5));
        loop {
            let revision = match from.take() {
                Some(revision) => revision,
                None => match self.list().await {
                    Ok(revision) => revision,
                    Err(_) => {
                        self.look();
                        backoff.pause().await;
                        continue;
                    }
                },
            };
            let Ok(mut watch) = self.context.repository.watch(keys::NODES, revision + 1).await else {
                self.look();
                backoff.pause().await;
                continue;
            };
            backoff.reset();
            loop {
                match tokio::time::timeout(tick, watch.next()).await {
                    Err(_) => self.look(),
                    Ok(Some(Ok(Event::Put(entry)))) => {
                        self.on_put(&entry);
                        self.look();
                    }
                    Ok(Some(Ok(Event::Delete { key, .. }))) => {
                        if let Some(id) = key.strip_prefix(keys::NODES) {
                            self.on_gone(id);
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
        let heard_ns = self.context.clock.monotonic_ns();
        let status = if record.status == MemberStatus::Left { MemberStatus::Left } else { MemberStatus::Up };
        let mut members = self.seen();
        let known = members.get(&record.info.id);
        let from = known.map(|seen| seen.view.status);
        let is_new_life = known.is_none_or(|seen| seen.incarnation != record.incarnation);
        let view = MemberView {
            info: record.info.clone(),
            status,
            last_heartbeat: record.last_heartbeat,
            epoch: entry.create_revision,
        };
        let id = record.info.id.clone();
        members.insert(id, Seen { view, incarnation: record.incarnation, heard_ns });
        let reason = match (from, status) {
            (Some(before), now) if before == now && !is_new_life => return,
            (_, MemberStatus::Left) => "it said goodbye",
            (None | Some(MemberStatus::Left), _) => "it joined",
            (Some(_), _) if is_new_life => "it was started again",
            (Some(_), _) => "it is heard again",
        };
        self.publish(&members, MemberEvent { node: record.info, from, status, reason: reason.to_owned() });
    }

    /// The record is gone: with a goodbye, or because the lease ended.
    fn on_gone(&self, id: &str) {
        let mut members = self.seen();
        if let Some(seen) = members.get_mut(id)
            && !matches!(seen.view.status, MemberStatus::Left | MemberStatus::Down)
        {
            let from = Some(std::mem::replace(&mut seen.view.status, MemberStatus::Down));
            let node = seen.view.info.clone();
            let reason = "its lease has ended".to_owned();
            self.publish(&members, MemberEvent { node, from, status: MemberStatus::Down, reason });
        }
    }

    /// Who has been silent for too long?
    fn look(&self) {
        let now = self.context.clock.monotonic_ns();
        let timeout = u64::try_from(self.options.timeout.as_nanos()).unwrap_or(u64::MAX);
        let mut events = Vec::new();
        let mut members = self.seen();
        for seen in members.values_mut() {
            let silent = now.saturating_sub(seen.heard_ns);
            let next = match seen.view.status {
                MemberStatus::Up | MemberStatus::Suspect if silent >= timeout.saturating_mul(2) => {
                    MemberStatus::Down
                }
                MemberStatus::Up if silent >= timeout => MemberStatus::Suspect,
                _ => continue,
            };
            let from = Some(std::mem::replace(&mut seen.view.status, next));
            let reason = format!("silent for {} ms", silent / 1_000_000);
            events.push(MemberEvent { node: seen.view.info.clone(), from, status: next, reason });
        }
        for event in events {
            self.publish(&members, event);
        }
    }

    fn publish(&self, members: &BTreeMap<String, Seen>, event: MemberEvent) {
        let count = |status| {
            let count = members.values().filter(|seen| seen.view.status == status).count();
            i64::try_from(count).unwrap_or(i64::MAX)
        };
        self.context.metrics.members_up.set(count(MemberStatus::Up));
        self.context.metrics.members_suspect.set(count(MemberStatus::Suspect));
        self.context.events.publish(ClusterEvent::Member(event));
    }
}

/// What changes in the membership.
pub struct MemberStream {
    events: EventStream,
}

impl MemberStream {
    /// The next change, or how many events were missed; `None` when the cluster is gone. Cancel-safe.
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
