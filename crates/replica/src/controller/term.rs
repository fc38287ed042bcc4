//! One controller term: the controller's interaction with the state repository.
//!
//! It lists everything under `/moim/`, follows it by a watch, calls [`Controller::decide`] after every event and
//! timer, and writes the decided changes, several transactions at a time. All state comes from the repository, so
//! nothing is handed over between terms: a newly elected controller reads the records and continues.
//!
//! Invariant: nothing is decided before the whole listing was processed, and nothing is written without comparing the
//! term. It must never wait for a write while the watch has events: an event may be the result of that write.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use futures_util::{FutureExt as _, future};
use hashbrown::HashMap;
use moim_base::rest::rest_end;
use moim_base::{BrokerId, Clock, TopicId};
use moim_state::nodes::{MEMBERS, NODES, NodeRecord, ORDERS, node_of};
use moim_state::{BoxFuture, Entry, Event, RepositoryError, StateRepository, TxnOutcome, Watch};
use tokio::time::Instant;

use super::batch::{Batch, Conflict, pack};
use super::records::{self, Record, Settings};
use super::{Controller, ControllerTuning, LogEnd, Node, Order, Plan};
use crate::keys;
use crate::state::PartitionState;
use crate::types::{BrokerEpoch, PartitionId, Versioned};

/// The prefix of all cluster records.
const ROOT: &str = "/moim/";
/// The interval at which suspicions are polled.
const TICK_MS: u64 = 50;
/// The same interval while there is no other node.
const SINGLE_NODE_TICK_MS: u64 = 1_000;
/// The maximum number of transactions in flight.
const WRITES: usize = 8;
/// The delay before a record whose change failed is decided again, unless the watch reports it sooner.
const RETRY_MS: u64 = 50;
/// The pause before further writes after the repository did not answer.
const PAUSE_MS: u64 = 100;
/// The maximum number of partitions per log end request.
const LOG_ENDS_PER_REQUEST: usize = 1_000;

/// The controller's view of the other nodes: failure detection and log end requests.
pub trait Peers: Send + Sync + 'static {
    /// Suspected nodes, and since when, on this process's clock.
    fn suspects(&self) -> Vec<(BrokerId, u64)>;

    /// Nodes that report that their disk hangs or is full.
    fn impaired(&self) -> Vec<BrokerId> {
        Vec::new()
    }

    /// The log ends of a node's replicas, and the run that reports them; `None` if it does not answer. A partition
    /// whose log end the node does not know is omitted.
    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>>;
}

/// The log ends of a node.
#[derive(Clone, Debug)]
pub struct LogEnds {
    /// The reporting run.
    pub run: BrokerEpoch,
    /// The log end of each partition.
    pub ends: Vec<(PartitionId, LogEnd)>,
}

/// The dependencies of a controller term.
pub struct ControllerTermParts {
    /// The state repository.
    pub repository: Arc<dyn StateRepository>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The other nodes.
    pub peers: Arc<dyn Peers>,
    /// Timeouts and limits.
    pub tuning: ControllerTuning,
    /// Defaults for topic settings, as this node was started with.
    pub settings: Settings,
}

/// Serves one term; returns when another term has begun. The caller drops the future when it loses the leadership.
pub async fn serve(parts: &ControllerTermParts, term: i64) {
    let mut report_failure = true;
    loop {
        let mut controller_term = Term::new(parts, term);
        match controller_term.session().await {
            Ok(Ended::Deposed) => return,
            Ok(Ended::Gap) => report_failure = true,
            Err(error) => {
                if std::mem::take(&mut report_failure) {
                    tracing::warn!(%error, "controller cannot list cluster records; retrying");
                }
                tokio::time::sleep(Duration::from_millis(PAUSE_MS)).await;
            }
        }
    }
}

/// Why a session ended.
enum Ended {
    /// Another controller was elected.
    Deposed,
    /// The watch missed changes: everything must be listed again.
    Gap,
}

type WriteOutcome = (Batch, Result<TxnOutcome, RepositoryError>);

struct Term<'a> {
    parts: &'a ControllerTermParts,
    controller: Controller,
    nodes: BTreeMap<BrokerId, NodeRecord>,
    orders: BTreeMap<BrokerId, Order>,
    /// Topic records by key, decoded again when the broker settings change.
    topics: HashMap<String, (TopicId, Entry)>,
    defaults: Settings,
    waiting: VecDeque<Batch>,
    writes: FuturesUnordered<BoxFuture<'static, WriteOutcome>>,
    log_end_requests: FuturesUnordered<BoxFuture<'static, (BrokerId, Option<LogEnds>)>>,
    /// Log ends to request, per node.
    wanted_log_ends: BTreeMap<BrokerId, BTreeSet<PartitionId>>,
    /// Nodes with a log end request in flight.
    asked_nodes: Vec<BrokerId>,
    suspected: Vec<BrokerId>,
    impaired: Vec<BrokerId>,
    /// Partitions whose changes failed: decided again at this time.
    failed: Vec<PartitionId>,
    retry_at_ms: Option<u64>,
    /// The repository did not answer: nothing is written before this time.
    pause_ms: u64,
}

impl<'a> Term<'a> {
    fn new(parts: &'a ControllerTermParts, term: i64) -> Self {
        Self {
            parts,
            controller: Controller::new(term, parts.tuning),
            nodes: BTreeMap::new(),
            orders: BTreeMap::new(),
            topics: HashMap::new(),
            defaults: parts.settings.clone(),
            waiting: VecDeque::new(),
            writes: FuturesUnordered::new(),
            log_end_requests: FuturesUnordered::new(),
            wanted_log_ends: BTreeMap::new(),
            asked_nodes: Vec::new(),
            suspected: Vec::new(),
            impaired: Vec::new(),
            failed: Vec::new(),
            retry_at_ms: None,
            pause_ms: 0,
        }
    }

    fn now_ms(&self) -> u64 {
        self.parts.clock.monotonic_ms()
    }

    async fn session(&mut self) -> Result<Ended, RepositoryError> {
        let (revision, entries) = self.parts.repository.list(ROOT).await?;
        self.on_listing(&entries);
        let mut watch = self.parts.repository.watch(ROOT, revision + 1).await?;
        tracing::info!(term = self.controller.term(), records = entries.len(), "controller term started");
        drop(entries);
        loop {
            let now_ms = self.now_ms();
            let wake_ms = self.decide(now_ms);
            let pause_ms = wake_ms.saturating_sub(now_ms);
            let pause = Duration::from_millis(pause_ms);
            // A periodic check without a deadline can be coalesced with others.
            let until = if pause_ms < SINGLE_NODE_TICK_MS { Instant::now() + pause } else { rest_end(pause) };
            let sleep = tokio::time::sleep_until(until);
            tokio::select! {
                event = watch.next() => match event {
                    Some(Ok(event)) => if !self.on_watch_event(event, &mut watch) { return Ok(Ended::Gap) },
                    Some(Err(_)) | None => return Ok(Ended::Gap),
                },
                Some(written) = self.writes.next() => {
                    if !self.on_written(written) {
                        return Ok(Ended::Deposed);
                    }
                }
                Some((node, ends)) = self.log_end_requests.next() => self.on_log_ends(node, ends),
                () = sleep => {}
            }
        }
    }

    /// Decides and starts the writes that may start. Returns the latest time of the next decision.
    fn decide(&mut self, now_ms: u64) -> u64 {
        self.poll_peers();
        if self.retry_at_ms.is_some_and(|at| at <= now_ms) {
            self.retry_failed();
        }
        let Plan { changes, log_end_requests, wake_ms } = self.controller.decide(now_ms);
        if !changes.is_empty() {
            tracing::debug!(changes = changes.len(), "controller decision");
            self.waiting.extend(pack(changes, Some(self.controller.term())));
        }
        for (node, partition) in log_end_requests {
            self.wanted_log_ends.entry(node).or_default().insert(partition);
        }
        self.request_log_ends();
        if now_ms >= self.pause_ms {
            self.start_writes();
        }
        let tick_ms = if self.nodes.len() > 1 { TICK_MS } else { SINGLE_NODE_TICK_MS };
        let paused_ms = (!self.waiting.is_empty()).then_some(self.pause_ms);
        let wakes = [wake_ms, self.retry_at_ms, paused_ms, Some(now_ms + tick_ms)];
        wakes.into_iter().flatten().min().unwrap_or(now_ms).max(now_ms + 1)
    }

    fn start_writes(&mut self) {
        while self.writes.len() < WRITES
            && let Some(batch) = self.waiting.pop_front()
        {
            let repository = Arc::clone(&self.parts.repository);
            self.writes.push(Box::pin(async move {
                let outcome = repository.txn(batch.txn()).await;
                (batch, outcome)
            }));
        }
    }

    /// The outcome of a write; false if this controller was deposed.
    fn on_written(&mut self, (batch, outcome): WriteOutcome) -> bool {
        match outcome {
            // The watch delivers the change too, and only that counts.
            Ok(TxnOutcome::Done { .. }) => {}
            Ok(TxnOutcome::Conflict { current, .. }) => {
                // The returned record is newer than the decision's input; using it now avoids a second conflict.
                for entry in current.iter().flatten() {
                    self.on_partition(entry);
                }
                match batch.on_conflict(&current) {
                    Conflict::Deposed => return false,
                    Conflict::Retry { rest, failed } => {
                        self.waiting.extend(rest);
                        self.retry_later(failed.iter().map(|change| change.partition));
                    }
                }
            }
            Err(error) => {
                tracing::debug!(%error, "controller transaction failed or has an unknown outcome");
                self.pause_ms = self.now_ms() + PAUSE_MS;
                self.retry_later(batch.changes.iter().map(|change| change.partition));
            }
        }
        true
    }

    fn retry_later(&mut self, partitions: impl Iterator<Item = PartitionId>) {
        self.failed.extend(partitions);
        if !self.failed.is_empty() && self.retry_at_ms.is_none() {
            self.retry_at_ms = Some(self.now_ms() + RETRY_MS);
        }
    }

    fn retry_failed(&mut self) {
        self.retry_at_ms = None;
        for partition in std::mem::take(&mut self.failed) {
            self.controller.on_failed(partition);
        }
    }

    /// Passes the suspected and the impaired nodes to the controller.
    fn poll_peers(&mut self) {
        let suspects = self.parts.peers.suspects();
        for node in std::mem::take(&mut self.suspected) {
            if !suspects.iter().any(|(suspect, _)| *suspect == node) {
                self.controller.on_suspect(node, None);
            }
        }
        for (node, since_ms) in suspects {
            self.controller.on_suspect(node, Some(since_ms));
            self.suspected.push(node);
        }
        let impaired = self.parts.peers.impaired();
        for node in self.impaired.iter().filter(|node| !impaired.contains(node)) {
            self.controller.on_impaired(*node, false);
        }
        for node in &impaired {
            self.controller.on_impaired(*node, true);
        }
        self.impaired = impaired;
    }

    /// Requests log ends, at most one request per node at a time.
    fn request_log_ends(&mut self) {
        let Self { wanted_log_ends, asked_nodes, log_end_requests, parts, .. } = self;
        for (node, wanted) in wanted_log_ends.iter_mut() {
            if asked_nodes.contains(node) {
                continue;
            }
            asked_nodes.push(*node);
            let mut partitions = Vec::new();
            while partitions.len() < LOG_ENDS_PER_REQUEST
                && let Some(partition) = wanted.pop_first()
            {
                partitions.push(partition);
            }
            log_end_requests
                .push(Box::pin(future::join(future::ready(*node), parts.peers.log_ends(*node, partitions))));
        }
        wanted_log_ends.retain(|_, wanted| !wanted.is_empty());
    }

    fn on_log_ends(&mut self, node: BrokerId, ends: Option<LogEnds>) {
        self.asked_nodes.retain(|asked| *asked != node);
        for (run, (partition, end)) in
            ends.into_iter().flat_map(|LogEnds { run, ends }| ends.into_iter().map(move |end| (run, end)))
        {
            self.controller.on_log_end(partition, node, run, end);
        }
    }

    fn on_listing(&mut self, entries: &[Entry]) {
        // Settings first: topics are decoded with them. Partitions last: they are judged by everything else.
        let settings = entries.iter().filter(|entry| entry.key == keys::BROKER_SETTINGS);
        settings.for_each(|entry| self.on_put(entry));
        let (partitions, others): (Vec<&Entry>, Vec<&Entry>) =
            entries.iter().partition(|entry| entry.key.starts_with(keys::PARTITIONS));
        others.into_iter().chain(partitions).for_each(|entry| self.on_put(entry));
    }

    /// Processes an event and all events that are already available: the changes of one transaction are decided
    /// together. False if changes were missed.
    fn on_watch_event(&mut self, event: Event, watch: &mut Watch) -> bool {
        self.on_event(event);
        while let Some(next) = watch.next().now_or_never() {
            match next {
                Some(Ok(event)) => self.on_event(event),
                Some(Err(_)) | None => return false,
            }
        }
        true
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Put(entry) => self.on_put(&entry),
            Event::Delete { key, .. } => self.on_delete(&key),
        }
    }

    fn on_put(&mut self, entry: &Entry) {
        let record = match records::read(entry, &self.defaults) {
            Ok(record) => record,
            Err(error) => {
                return tracing::error!(key = %entry.key, %error, "undecodable record skipped by controller");
            }
        };
        match record {
            Record::Partition => self.on_partition(entry),
            Record::Node(node) => {
                let id = BrokerId(node.node_id);
                self.nodes.insert(id, node);
                self.update_node(id);
            }
            Record::Member(member) => self.controller.on_member(member, self.now_ms()),
            Record::Order(id, order) => {
                match order {
                    Some(order) => self.orders.insert(id, order),
                    None => self.orders.remove(&id),
                };
                self.update_node(id);
            }
            Record::Topic(topic) => {
                let known = self.topics.insert(entry.key.clone(), (topic.id, entry.clone()));
                if let Some((id, _)) = known.filter(|(id, _)| *id != topic.id) {
                    self.controller.on_topic_deleted(id);
                }
                self.controller.on_topic(topic);
            }
            Record::Settings(changed) => self.on_settings(&changed),
            Record::Other => {}
        }
    }

    fn on_delete(&mut self, key: &str) {
        if let Some(id) = keys::parse_partition(key) {
            self.controller.on_record(id, None);
        } else if let Some(id) = node_of(key, NODES) {
            self.nodes.remove(&BrokerId(id));
            self.update_node(BrokerId(id));
        } else if let Some(id) = node_of(key, MEMBERS) {
            self.controller.on_member_lost(BrokerId(id));
        } else if let Some(id) = node_of(key, ORDERS) {
            self.orders.remove(&BrokerId(id));
            self.update_node(BrokerId(id));
        } else if let Some((id, _)) = self.topics.remove(key) {
            self.controller.on_topic_deleted(id);
        } else if key == keys::BROKER_SETTINGS {
            self.on_settings(&Settings::new());
        }
    }

    /// The broker settings changed at run time: topics are decoded with them.
    fn on_settings(&mut self, changed: &Settings) {
        self.defaults = records::defaults(&self.parts.settings, changed);
        let topics: Vec<Entry> = self.topics.values().map(|(_, entry)| entry.clone()).collect();
        topics.iter().for_each(|entry| self.on_put(entry));
    }

    fn on_partition(&mut self, entry: &Entry) {
        let Some(id) = keys::parse_partition(&entry.key) else { return };
        match PartitionState::decode(&entry.value) {
            Ok(value) => {
                let record = Versioned { revision: entry.mod_revision, value };
                self.controller.on_record(id, Some(record));
            }
            Err(error) => {
                tracing::error!(partition = %id, %error, "undecodable partition record skipped by controller")
            }
        }
    }

    fn update_node(&mut self, id: BrokerId) {
        let Some(record) = self.nodes.get(&id) else {
            // Its replicas must move to other nodes.
            return self.controller.on_node_gone(id);
        };
        let order = self.orders.get(&id).copied().unwrap_or_default();
        self.controller.on_node(Node { id, zone: record.zone.clone(), order });
    }
}

#[cfg(test)]
mod tests;
