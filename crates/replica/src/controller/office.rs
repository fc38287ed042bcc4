//! The controller in office: what one term of it does with the state repository.
//!
//! It lists everything under `/moim/`, follows it by a watch, lets the [`Controller`] decide whenever something came in or a
//! timer ran out, and writes what was decided, several transactions at a time. All knowledge comes from the
//! repository, so nothing is handed over from one term to the next: whoever is elected reads and goes on.
//!
//! Invariant: nothing is decided before the whole listing was taken in, and nothing is written without a comparison of
//! the term. It must never wait for a write while the watch has news: the news may be what the write's answer is.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use futures_util::{FutureExt as _, future};
use hashbrown::HashMap;
use moim_base::rest::rest_end;
use moim_base::{BrokerId, Clock, TopicId};
use moim_cluster::nodes::{MEMBERS, NODES, NodeRecord, ORDERS, node_of};
use moim_cluster::{BoxFuture, Entry, Event, RepositoryError, StateRepository, TxnOutcome, Watch};
use tokio::time::Instant;

use super::batch::{Batch, Conflict, pack};
use super::records::{self, Record, Settings};
use super::{Controller, ControllerTuning, LogEnd, Node, Order, Plan};
use crate::keys;
use crate::state::PartitionState;
use crate::types::{BrokerEpoch, PartitionId, Versioned};

/// Everything the cluster knows about itself.
const ROOT: &str = "/moim/";
/// How often suspicions are looked at.
const TICK_MS: u64 = 50;
/// The same while there is no other node to look at.
const ALONE_MS: u64 = 1_000;
/// Transactions under way at a time.
const WRITES: usize = 8;
/// Before a record is decided again whose change failed, unless it is heard of sooner.
const AGAIN_MS: u64 = 50;
/// Before anything is written again after the repository did not answer.
const PAUSE_MS: u64 = 100;
/// Partitions of one node asked about at a time.
const ASKS: usize = 1_000;

/// What the other nodes can be seen to do, and be asked.
pub trait Peers: Send + Sync + 'static {
    /// Nodes that do not answer, and since when, on the clock of this process.
    fn suspects(&self) -> Vec<(BrokerId, u64)>;

    /// Nodes whose disk hangs or is full, as they say themselves.
    fn impaired(&self) -> Vec<BrokerId> {
        Vec::new()
    }

    /// How far the logs of a node's copies go, and in which of its runs; none when it does not answer. A partition is left
    /// out if the node cannot say.
    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>>;
}

/// How far the logs of a node go.
#[derive(Clone, Debug)]
pub struct LogEnds {
    /// The run that says so.
    pub run: BrokerEpoch,
    /// Partition by partition.
    pub ends: Vec<(PartitionId, LogEnd)>,
}

/// What a term needs.
pub struct OfficeParts {
    /// Where everything is known.
    pub repository: Arc<dyn StateRepository>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// The other nodes.
    pub peers: Arc<dyn Peers>,
    /// Times and limits.
    pub tuning: ControllerTuning,
    /// Settings that topics fall back to, as this node was started.
    pub settings: Settings,
}

/// Serves one term; returns when another one has begun. Whoever calls drops it when the lead is lost.
pub async fn serve(parts: &OfficeParts, term: i64) {
    let mut told = true;
    loop {
        let mut office = Office::new(parts, term);
        match office.session().await {
            Ok(Ended::Deposed) => return,
            Ok(Ended::Gap) => told = true,
            Err(error) => {
                if std::mem::take(&mut told) {
                    tracing::warn!(%error, "the controller cannot read the cluster's records; trying again");
                }
                tokio::time::sleep(Duration::from_millis(PAUSE_MS)).await;
            }
        }
    }
}

/// Why a session ended.
enum Ended {
    /// There is another controller.
    Deposed,
    /// Changes were missed: everything is to be read again.
    Gap,
}

type Written = (Batch, Result<TxnOutcome, RepositoryError>);

struct Office<'a> {
    parts: &'a OfficeParts,
    controller: Controller,
    nodes: BTreeMap<BrokerId, NodeRecord>,
    orders: BTreeMap<BrokerId, Order>,
    /// Topics by key: their records, to be read again when the brokers' settings change.
    topics: HashMap<String, (TopicId, Entry)>,
    defaults: Settings,
    waiting: VecDeque<Batch>,
    writes: FuturesUnordered<BoxFuture<'static, Written>>,
    asks: FuturesUnordered<BoxFuture<'static, (BrokerId, Option<LogEnds>)>>,
    /// What nodes are to be asked for.
    questions: BTreeMap<BrokerId, BTreeSet<PartitionId>>,
    /// Nodes that were asked and have not answered.
    asked: Vec<BrokerId>,
    suspected: Vec<BrokerId>,
    impaired: Vec<BrokerId>,
    /// Changes that failed: decided again at this moment.
    failed: Vec<PartitionId>,
    again_ms: Option<u64>,
    /// The repository did not answer: nothing is written before this moment.
    pause_ms: u64,
}

impl<'a> Office<'a> {
    fn new(parts: &'a OfficeParts, term: i64) -> Self {
        Self {
            parts,
            controller: Controller::new(term, parts.tuning),
            nodes: BTreeMap::new(),
            orders: BTreeMap::new(),
            topics: HashMap::new(),
            defaults: parts.settings.clone(),
            waiting: VecDeque::new(),
            writes: FuturesUnordered::new(),
            asks: FuturesUnordered::new(),
            questions: BTreeMap::new(),
            asked: Vec::new(),
            suspected: Vec::new(),
            impaired: Vec::new(),
            failed: Vec::new(),
            again_ms: None,
            pause_ms: 0,
        }
    }

    fn now_ms(&self) -> u64 {
        self.parts.clock.monotonic_ms()
    }

    async fn session(&mut self) -> Result<Ended, RepositoryError> {
        let (revision, entries) = self.parts.repository.list(ROOT).await?;
        self.take_in_all(&entries);
        let mut watch = self.parts.repository.watch(ROOT, revision + 1).await?;
        tracing::info!(term = self.controller.term(), records = entries.len(), "this node is the controller");
        drop(entries);
        loop {
            let now_ms = self.now_ms();
            let wake_ms = self.act(now_ms);
            let pause_ms = wake_ms.saturating_sub(now_ms);
            let pause = Duration::from_millis(pause_ms);
            // A look that nothing calls for can come together with others.
            let until = if pause_ms < ALONE_MS { Instant::now() + pause } else { rest_end(pause) };
            let sleep = tokio::time::sleep_until(until);
            tokio::select! {
                event = watch.next() => match event {
                    Some(Ok(event)) => if !self.take_in_ready(event, &mut watch) { return Ok(Ended::Gap) },
                    Some(Err(_)) | None => return Ok(Ended::Gap),
                },
                Some(written) = self.writes.next() => {
                    if !self.on_written(written) {
                        return Ok(Ended::Deposed);
                    }
                }
                Some((node, ends)) = self.asks.next() => self.on_log_ends(node, ends),
                () = sleep => {}
            }
        }
    }

    /// Decides and sends off what can be sent. Answers when to look again at the latest.
    fn act(&mut self, now_ms: u64) -> u64 {
        self.look_around();
        if self.again_ms.is_some_and(|at| at <= now_ms) {
            self.decide_failed_again();
        }
        let Plan { changes, asks, wake_ms } = self.controller.decide(now_ms);
        if !changes.is_empty() {
            tracing::debug!(changes = changes.len(), "the controller decided");
            self.waiting.extend(pack(changes, Some(self.controller.term())));
        }
        for (node, partition) in asks {
            self.questions.entry(node).or_default().insert(partition);
        }
        self.ask();
        if now_ms >= self.pause_ms {
            self.send();
        }
        let tick_ms = if self.nodes.len() > 1 { TICK_MS } else { ALONE_MS };
        let paused_ms = (!self.waiting.is_empty()).then_some(self.pause_ms);
        let wakes = [wake_ms, self.again_ms, paused_ms, Some(now_ms + tick_ms)];
        wakes.into_iter().flatten().min().unwrap_or(now_ms).max(now_ms + 1)
    }

    fn send(&mut self) {
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

    /// What a write has become; false when this controller was replaced.
    fn on_written(&mut self, (batch, outcome): Written) -> bool {
        match outcome {
            // The watch says so too, and that is what counts.
            Ok(TxnOutcome::Done { .. }) => {}
            Ok(TxnOutcome::Conflict { current, .. }) => {
                // What was found is newer than what was decided on; hearing of it now saves a second conflict.
                for entry in current.iter().flatten() {
                    self.on_partition(entry);
                }
                match batch.on_conflict(&current) {
                    Conflict::Deposed => return false,
                    Conflict::Retry { rest, failed } => {
                        self.waiting.extend(rest);
                        self.put_off(failed.iter().map(|change| change.partition));
                    }
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the controller's changes were not made, or nobody knows");
                self.pause_ms = self.now_ms() + PAUSE_MS;
                self.put_off(batch.changes.iter().map(|change| change.partition));
            }
        }
        true
    }

    fn put_off(&mut self, partitions: impl Iterator<Item = PartitionId>) {
        self.failed.extend(partitions);
        if !self.failed.is_empty() && self.again_ms.is_none() {
            self.again_ms = Some(self.now_ms() + AGAIN_MS);
        }
    }

    fn decide_failed_again(&mut self) {
        self.again_ms = None;
        for partition in std::mem::take(&mut self.failed) {
            self.controller.on_failed(partition);
        }
    }

    /// Passes on who is under suspicion, and whose disk does not work.
    fn look_around(&mut self) {
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

    /// Asks nodes how far their logs go, each once at a time.
    fn ask(&mut self) {
        let Self { questions, asked, asks, parts, .. } = self;
        for (node, wanted) in questions.iter_mut() {
            if asked.contains(node) {
                continue;
            }
            asked.push(*node);
            let mut partitions = Vec::new();
            while partitions.len() < ASKS
                && let Some(partition) = wanted.pop_first()
            {
                partitions.push(partition);
            }
            asks.push(Box::pin(future::join(future::ready(*node), parts.peers.log_ends(*node, partitions))));
        }
        questions.retain(|_, wanted| !wanted.is_empty());
    }

    fn on_log_ends(&mut self, node: BrokerId, ends: Option<LogEnds>) {
        self.asked.retain(|asked| *asked != node);
        for (run, (partition, end)) in
            ends.into_iter().flat_map(|LogEnds { run, ends }| ends.into_iter().map(move |end| (run, end)))
        {
            self.controller.on_log_end(partition, node, run, end);
        }
    }

    fn take_in_all(&mut self, entries: &[Entry]) {
        // Settings first: topics are read by them. Partitions last: they are judged by everything else.
        let settings = entries.iter().filter(|entry| entry.key == keys::BROKER_SETTINGS);
        settings.for_each(|entry| self.take_in(entry));
        let (partitions, others): (Vec<&Entry>, Vec<&Entry>) =
            entries.iter().partition(|entry| entry.key.starts_with(keys::PARTITIONS));
        others.into_iter().chain(partitions).for_each(|entry| self.take_in(entry));
    }

    /// Takes in an event and all that are there already: a transaction's changes are decided on together. False when
    /// changes were missed.
    fn take_in_ready(&mut self, event: Event, watch: &mut Watch) -> bool {
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
            Event::Put(entry) => self.take_in(&entry),
            Event::Delete { key, .. } => self.take_out(&key),
        }
    }

    fn take_in(&mut self, entry: &Entry) {
        let record = match records::read(entry, &self.defaults) {
            Ok(record) => record,
            Err(error) => return tracing::error!(%error, "the controller passes over a record"),
        };
        match record {
            Record::Partition => self.on_partition(entry),
            Record::Node(node) => {
                let id = BrokerId(node.node_id);
                self.nodes.insert(id, node);
                self.tell_node(id);
            }
            Record::Member(member) => self.controller.on_member(member, self.now_ms()),
            Record::Order(id, order) => {
                match order {
                    Some(order) => self.orders.insert(id, order),
                    None => self.orders.remove(&id),
                };
                self.tell_node(id);
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

    fn take_out(&mut self, key: &str) {
        if let Some(id) = keys::parse_partition(key) {
            self.controller.on_record(id, None);
        } else if let Some(id) = node_of(key, NODES) {
            self.nodes.remove(&BrokerId(id));
            self.tell_node(BrokerId(id));
        } else if let Some(id) = node_of(key, MEMBERS) {
            self.controller.on_member_lost(BrokerId(id));
        } else if let Some(id) = node_of(key, ORDERS) {
            self.orders.remove(&BrokerId(id));
            self.tell_node(BrokerId(id));
        } else if let Some((id, _)) = self.topics.remove(key) {
            self.controller.on_topic_deleted(id);
        } else if key == keys::BROKER_SETTINGS {
            self.on_settings(&Settings::new());
        }
    }

    /// The brokers' settings as changed at run time: topics are read by them.
    fn on_settings(&mut self, changed: &Settings) {
        self.defaults = records::defaults(&self.parts.settings, changed);
        let topics: Vec<Entry> = self.topics.values().map(|(_, entry)| entry.clone()).collect();
        topics.iter().for_each(|entry| self.take_in(entry));
    }

    fn on_partition(&mut self, entry: &Entry) {
        let Some(id) = keys::parse_partition(&entry.key) else { return };
        match PartitionState::decode(&entry.value) {
            Ok(value) => {
                let record = Versioned { revision: entry.mod_revision, value };
                self.controller.on_record(id, Some(record));
            }
            Err(error) => tracing::error!(partition = %id, %error, "the controller passes over a record"),
        }
    }

    fn tell_node(&mut self, id: BrokerId) {
        let Some(record) = self.nodes.get(&id) else {
            // Whatever it held has to go elsewhere.
            return self.controller.on_node_gone(id);
        };
        let order = self.orders.get(&id).copied().unwrap_or_default();
        self.controller.on_node(Node { id, zone: record.zone.clone(), order });
    }
}

#[cfg(test)]
mod tests;
