//! Cluster event log of this node, for operators (`moim cluster events`).
//!
//! Derived from the watch on the cluster's records, so all nodes report the same events, each since its own start. A
//! change of many partitions in one transaction is one event: a failover of a thousand partitions is one line.
//!
//! Bounded: the last [`KEPT`] events.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use moim_base::Clock;
use moim_base::task::Shutdown;
use moim_replica::{PartitionId, PartitionState, keys};
use moim_state::nodes::{MEMBERS, MemberRecord, NODES, NodeRecord, ORDERS, node_of};
use moim_state::{Entry, Event, RepositoryError, StateRepository};
use serde::{Deserialize, Serialize};

use crate::text::counted;

/// Watched key prefix.
const ROOT: &str = "/moim/";
/// Number of retained events.
const KEPT: usize = 1_024;
/// Maximum number of partitions that an event names.
const NAMED: usize = 3;
/// Pause before the watch is opened again.
const RETRY: Duration = Duration::from_millis(500);

/// A cluster event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterEvent {
    /// Counts the events of the node that tells them.
    pub number: u64,
    /// Milliseconds since 1970 when that node saw it.
    pub at_ms: i64,
    /// The revision of the cluster's records at which it happened; 0 where it is not of the records.
    pub revision: i64,
    /// What kind of thing: `node`, `rollback`, `order`, `controller`, `topic`, `leader`, `in-sync`, `move`, `disk`, `damage`.
    pub kind: String,
    /// In words.
    pub text: String,
}

/// The event log of a node.
#[derive(Default)]
pub(crate) struct EventLog {
    events: Mutex<(u64, VecDeque<ClusterEvent>)>,
}

impl EventLog {
    /// Events after this number, oldest first.
    pub(crate) fn after(&self, number: u64) -> Vec<ClusterEvent> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.1.iter().filter(|event| event.number > number).cloned().collect()
    }

    /// Adds a disk event: a node's disk became impaired, full or healthy.
    pub(super) fn on_disk(&self, at_ms: i64, text: String) {
        self.add(at_ms, vec![NewEvent { revision: 0, kind: "disk", text }]);
    }

    /// Adds a finding: a failed or recovered self-check of this node's event loops or store.
    pub(super) fn on_finding(&self, at_ms: i64, text: String) {
        self.add(at_ms, vec![NewEvent { revision: 0, kind: "finding", text }]);
    }

    fn add(&self, at_ms: i64, new: Vec<NewEvent>) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        for NewEvent { revision, kind, text } in new {
            events.0 += 1;
            let number = events.0;
            events.1.push_back(ClusterEvent { number, at_ms, revision, kind: kind.to_owned(), text });
            if events.1.len() > KEPT {
                events.1.pop_front();
            }
        }
    }
}

/// Watches the cluster's records until the node stops.
pub(super) async fn follow(
    log: Arc<EventLog>,
    repository: Arc<dyn StateRepository>,
    clock: Arc<dyn Clock>,
    shutdown: Shutdown,
) {
    let mut history = History::default();
    loop {
        tokio::select! {
            () = shutdown.stopped() => return,
            watched = watch(&mut history, &log, repository.as_ref(), clock.as_ref()) => {
                if let Err(error) = watched {
                    tracing::debug!(%error, "cluster record watch failed; retrying");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

/// One watch: a listing, then its changes until the watch ends.
async fn watch(
    history: &mut History,
    log: &EventLog,
    repository: &dyn StateRepository,
    clock: &dyn Clock,
) -> Result<(), RepositoryError> {
    let (revision, entries) = repository.list(ROOT).await?;
    let first = !std::mem::replace(&mut history.begun, true);
    entries.into_iter().for_each(|entry| history.on_event(Event::Put(entry)));
    let events = history.drain();
    if !first {
        // Of the changes since the last watch only the result is known.
        log.add(clock.wall_ms(), events);
    }
    let mut watch = repository.watch(ROOT, revision + 1).await?;
    while let Some(Ok(event)) = watch.next().await {
        history.on_event(event);
        while let Some(next) = watch.next().now_or_never() {
            match next {
                Some(Ok(event)) => history.on_event(event),
                Some(Err(_)) | None => break,
            }
        }
        log.add(clock.wall_ms(), history.drain());
    }
    Ok(())
}

/// An event without its sequence number and time.
struct NewEvent {
    revision: i64,
    kind: &'static str,
    text: String,
}

/// Last observed state of a partition.
#[derive(Clone, Default, PartialEq, Eq)]
struct PartitionSummary {
    leader: Option<i32>,
    in_sync: Vec<i32>,
    moving: bool,
}

impl PartitionSummary {
    fn of(state: &PartitionState) -> Self {
        let mut in_sync: Vec<i32> = state.isr.iter().map(|member| member.node.0).collect();
        in_sync.sort_unstable();
        Self { leader: state.leader.map(|leader| leader.0), in_sync, moving: state.is_moving() }
    }
}

/// Derives events from record changes.
#[derive(Default)]
struct History {
    begun: bool,
    nodes: BTreeMap<i32, NodeRecord>,
    members: BTreeMap<i32, i64>,
    damaged: BTreeMap<i32, Vec<String>>,
    orders: BTreeMap<i32, String>,
    controller: Option<(i64, String)>,
    topics: BTreeMap<String, String>,
    partitions: BTreeMap<PartitionId, PartitionSummary>,
    revision: i64,
    pending: Vec<NewEvent>,
    /// Partition changes since the last [`History::drain`], by kind and text.
    changes: BTreeMap<(&'static str, String), Vec<PartitionId>>,
}

impl History {
    fn on_event(&mut self, event: Event) {
        self.revision = self.revision.max(event.revision());
        match event {
            Event::Put(entry) => self.on_put(&entry),
            Event::Delete { key, .. } => self.on_delete(&key),
        }
    }

    fn push(&mut self, kind: &'static str, text: String) {
        self.pending.push(NewEvent { revision: self.revision, kind, text });
    }

    fn on_put(&mut self, entry: &Entry) {
        let key = entry.key.as_str();
        if let Some(id) = keys::parse_partition(key) {
            if let Ok(state) = PartitionState::decode(&entry.value) {
                self.on_partition(id, &state);
            }
        } else if let Some(id) = node_of(key, NODES) {
            let Ok(record) = NodeRecord::from_bytes(&entry.value) else { return };
            let known = self.nodes.insert(id, record.clone());
            match known {
                None => self.push("node", format!("node {id} is in the cluster")),
                Some(known) if known.voter != record.voter && record.voter == 0 => {
                    self.push("node", format!("node {id} waits for its replacement"));
                }
                Some(known) if known.voter != record.voter => {
                    self.push("node", format!("node {id} has another data folder"));
                }
                Some(_) => {}
            }
        } else if let Some(id) = node_of(key, super::records::ROLLBACKS) {
            let why = String::from_utf8_lossy(&entry.value);
            match why.strip_prefix(super::records::DAMAGED) {
                Some(why) => {
                    self.push(
                        "damage",
                        format!("data directory of node {id} is damaged and refetched: {why}"),
                    );
                }
                None => self.push("rollback", format!("data directory of node {id} was rolled back: {why}")),
            }
        } else if let Some(id) = node_of(key, MEMBERS) {
            if self.members.insert(id, entry.create_revision) != Some(entry.create_revision) {
                self.push("node", format!("node {id} is up (run {})", entry.create_revision));
            }
            if let Ok(record) = MemberRecord::from_bytes(&entry.value) {
                self.on_damaged(id, record.damaged);
            }
        } else if let Some(id) = node_of(key, ORDERS) {
            let order = String::from_utf8_lossy(&entry.value).into_owned();
            if self.orders.insert(id, order.clone()).as_ref() != Some(&order) {
                self.push("order", format!("node {id} shall {order}"));
            }
        } else if key == keys::CONTROLLER {
            let value = String::from_utf8_lossy(&entry.value).into_owned();
            let now = Some((entry.create_revision, value));
            if self.controller != now {
                self.controller = now;
                match super::view::controller_node(&entry.value) {
                    Some(node) => self.push("controller", format!("node {node} is the controller")),
                    None => self.push("controller", "there is another controller".to_owned()),
                }
            }
        } else if let Some(name) = key.strip_prefix(keys::TOPICS) {
            let Some(id) = topic_id(&entry.value) else { return };
            if self.topics.insert(id, name.to_owned()).is_none() {
                self.push("topic", format!("topic {name} exists"));
            }
        }
    }

    fn on_delete(&mut self, key: &str) {
        if let Some(id) = keys::parse_partition(key) {
            self.partitions.remove(&id);
        } else if let Some(id) = node_of(key, NODES) {
            self.nodes.remove(&id);
            self.push("node", format!("node {id} is no longer in the cluster"));
        } else if let Some(id) = node_of(key, MEMBERS) {
            self.members.remove(&id);
            self.push("node", format!("node {id} is down"));
        } else if let Some(id) = node_of(key, ORDERS) {
            self.orders.remove(&id);
            self.push("order", format!("node {id} may lead again"));
        } else if key == keys::CONTROLLER {
            self.controller = None;
            self.push("controller", "there is no controller".to_owned());
        } else if let Some(name) = key.strip_prefix(keys::TOPICS) {
            self.topics.retain(|_, known| known != name);
            self.push("topic", format!("topic {name} is deleted"));
        }
    }

    /// Compares the damaged replicas in a node's member record with the previous ones.
    fn on_damaged(&mut self, node: i32, damaged: Vec<String>) {
        let was = self.damaged.insert(node, damaged.clone()).unwrap_or_default();
        let mut change = |what: String, ids: Vec<&String>| {
            let ids: Vec<PartitionId> =
                ids.into_iter().filter_map(|id| keys::parse_partition_id(id)).collect();
            if !ids.is_empty() {
                self.changes.entry(("damage", what)).or_default().extend(ids);
            }
        };
        let found = damaged.iter().filter(|id| !was.contains(id)).collect();
        change(format!("damaged on node {node}"), found);
        let repaired = was.iter().filter(|id| !damaged.contains(id)).collect();
        change(format!("repaired on node {node}"), repaired);
    }

    fn on_partition(&mut self, id: PartitionId, state: &PartitionState) {
        let now = PartitionSummary::of(state);
        let Some(was) = self.partitions.insert(id, now.clone()) else { return };
        let mut change = |kind, what: String| self.changes.entry((kind, what)).or_default().push(id);
        if was.leader != now.leader {
            change(
                "leader",
                match (was.leader, now.leader) {
                    (None, Some(to)) => format!("led by node {to}"),
                    (Some(from), Some(to)) => format!("led by node {to} instead of node {from}"),
                    (_, None) => "without a leader".to_owned(),
                },
            );
        }
        for node in was.in_sync.iter().filter(|node| !now.in_sync.contains(node)) {
            change("in-sync", format!("no longer in sync on node {node}"));
        }
        for node in now.in_sync.iter().filter(|node| !was.in_sync.contains(node)) {
            change("in-sync", format!("in sync on node {node}"));
        }
        match (was.moving, now.moving) {
            (false, true) => change("move", "being moved".to_owned()),
            (true, false) => change("move", "where it shall be".to_owned()),
            _ => {}
        }
    }

    /// Returns all events since the last call.
    fn drain(&mut self) -> Vec<NewEvent> {
        for ((kind, what), partitions) in std::mem::take(&mut self.changes) {
            let mut names: Vec<String> = partitions.iter().take(NAMED).map(|id| self.name(*id)).collect();
            if partitions.len() > NAMED {
                names.push("…".to_owned());
            }
            let count = counted(partitions.len() as u64, "partition");
            self.push(kind, format!("{count} {what}: {}", names.join(", ")));
        }
        std::mem::take(&mut self.pending)
    }

    fn name(&self, id: PartitionId) -> String {
        if id.topic == keys::SHARDS {
            return format!("shard {}", id.index);
        }
        match self.topics.get(&id.topic.to_string()) {
            Some(name) => format!("{name}:{}", id.index),
            None => id.to_string(),
        }
    }
}

fn topic_id(value: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Id {
        id: String,
    }
    serde_json::from_slice::<Id>(value).ok().map(|topic| topic.id)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use moim_base::TopicId;
    use moim_replica::Durability;
    use moim_state::nodes::member_key;

    use super::*;

    fn put(key: String, value: impl Into<Bytes>, revision: i64) -> Event {
        let (value, lease) = (value.into(), None);
        Event::Put(Entry { key, value, create_revision: revision, mod_revision: revision, version: 1, lease })
    }

    fn texts(history: &mut History) -> Vec<String> {
        history.drain().into_iter().map(|events| format!("{}: {}", events.kind, events.text)).collect()
    }

    #[test]
    fn damage_and_repair_are_reported_once() {
        let mut history = History::default();
        let member = |damaged: &[&str], revision| {
            let damaged = damaged.iter().map(|id| (*id).to_owned()).collect();
            let record = MemberRecord { node_id: 2, damaged, ..MemberRecord::default() };
            let Event::Put(entry) = put(member_key(2), record.to_bytes(), revision) else { unreachable!() };
            Event::Put(Entry { create_revision: 5, ..entry })
        };
        let id = PartitionId { topic: TopicId(3), index: 7 }.to_string();
        history.on_event(member(&[], 5));
        assert_eq!(texts(&mut history), ["node: node 2 is up (run 5)"]);
        history.on_event(member(&[&id], 6));
        assert_eq!(texts(&mut history), [format!("damage: 1 partition damaged on node 2: {id}")]);
        history.on_event(member(&[&id], 7));
        assert_eq!(texts(&mut history), [""; 0]);
        history.on_event(member(&[], 8));
        assert_eq!(texts(&mut history), [format!("damage: 1 partition repaired on node 2: {id}")]);
    }

    #[test]
    fn change_of_many_partitions_in_one_transaction_is_one_event() {
        let mut history = History::default();
        let topic = TopicId(3);
        history.on_event(put(keys::topic("orders"), format!(r#"{{"id":"{topic}"}}"#), 2));
        let record = |leader: i32, revision| {
            let isr = vec![(leader, 1, 1).into(), (3, 1, 1).into()];
            let state = PartitionState::new(isr, 1, Durability::Fsync);
            move |index| put(keys::partition(PartitionId { topic, index }), state.encode(), revision)
        };
        (0..5).map(record(1, 3)).for_each(|event| history.on_event(event));
        assert_eq!(texts(&mut history), ["topic: topic orders exists"]);
        (0..5).map(record(2, 4)).for_each(|event| history.on_event(event));
        let events = texts(&mut history);
        let leader = "leader: 5 partitions led by node 2 instead of node 1: orders:0, orders:1, orders:2, …";
        assert!(events.contains(&leader.to_owned()), "{events:?}");
        assert!(events.iter().any(|text| text.contains("no longer in sync on node 1")), "{events:?}");
        assert_eq!(texts(&mut history), Vec::<String>::new(), "reported once");
    }

    #[test]
    fn node_order_and_controller_changes_are_events() {
        let mut history = History::default();
        let member = |revision| put("/moim/members/2".into(), "{}", revision);
        history.on_event(member(5));
        history.on_event(member(5));
        history.on_event(put("/moim/orders/2".into(), "drain", 6));
        history.on_event(put(keys::CONTROLLER.into(), r#"{"node_id":1}"#, 7));
        history.on_event(Event::Delete { key: "/moim/members/2".into(), revision: 8 });
        let expected = [
            "node: node 2 is up (run 5)",
            "order: node 2 shall drain",
            "controller: node 1 is the controller",
            "node: node 2 is down",
        ];
        assert_eq!(texts(&mut history), expected);
    }

    #[test]
    fn event_log_is_bounded_and_sequence_numbers_count_all_events() {
        let log = EventLog::default();
        let events =
            (0..KEPT as i64 + 10).map(|revision| NewEvent { revision, kind: "node", text: String::new() });
        log.add(1, events.collect());
        let kept = log.after(0);
        assert_eq!((kept.len(), kept[0].number), (KEPT, 11));
        assert_eq!(log.after(KEPT as u64 + 9).len(), 1);
    }
}
