//! A cluster on one thread from one seed: nodes with disks that lose unsynced writes, a network that delays, drops
//! and partitions, a repository that answers late or not at all, producers, and a checker of the guarantees.
//!
//! The same seed gives the same run. The drivers here are as simple as possible; the code under test is this crate's
//! state machines and their interaction.

mod check;
mod faults;
mod node;
mod store;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use fastrand::Rng;
use moim_base::{BrokerId, LeaderEpoch, Offset, TopicId};
use moim_state::{Txn, TxnOutcome};

use self::check::Checker;
use self::node::SimNode;
use self::store::Store;
use crate::controller::batch::Batch;
use crate::controller::{Order, Topic};
use crate::keys;
use crate::leader::{LeaderTuning, Outcome};
use crate::message::{Answer, Fetch, Refusal, Report};
use crate::mutant::Mutants;
use crate::state::PartitionState;
use crate::toy::Entry;
use crate::types::{BrokerEpoch, Durability, PartitionId};

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// The seed that determines the whole run.
    pub seed: u64,
    /// The number of nodes.
    pub nodes: usize,
    /// How long faults are injected.
    pub faults_ms: u64,
    /// True if most faults destroy guaranteed data on one node, which then returns at once.
    pub spoils: bool,
    /// True if nodes are drained, removed, restored and added, the replication factor follows the cluster size, and a
    /// producer retries unacknowledged records.
    pub changes: bool,
    /// True if the only faults are hanging disks, one at a time: then commits may stall for [`STALL_MS`] at most.
    pub hangs: bool,
    /// The planted bug, if any.
    pub mutants: Mutants,
}

impl Scenario {
    /// A run with cluster changes.
    pub fn changing(seed: u64) -> Self {
        Self { changes: true, ..Self::new(seed) }
    }

    /// A run with hanging disks.
    pub fn hanging(seed: u64) -> Self {
        Self { hangs: true, spoils: false, faults_ms: 20_000, ..Self::new(seed) }
    }

    fn leader_tuning(&self) -> LeaderTuning {
        if self.hangs {
            return LeaderTuning::default();
        }
        LeaderTuning { lag_ms: 1_500, disconnect_grace_ms: 300, stall_ms: 700, retry_ms: 100 }
    }

    /// The node that joins in the middle of the run, if any.
    fn latecomer(&self) -> Option<usize> {
        (self.changes && self.seed.is_multiple_of(3)).then(|| self.nodes - 1)
    }

    /// True if the producer of a partition retries a record until it is acknowledged, and the leader detects
    /// duplicates.
    fn is_idempotent(&self, part: usize) -> bool {
        self.changes && part == 0
    }

    /// A default run.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            nodes: 3 + (seed % 2) as usize,
            faults_ms: 12_000,
            spoils: seed % 5 == 4,
            changes: false,
            hangs: false,
            mutants: Mutants::default(),
        }
    }
}

/// The result of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunReport {
    /// The first violation, if any.
    pub violation: Option<String>,
    /// The number of acknowledged records.
    pub acked: usize,
    /// The number of observed elections.
    pub elections: usize,
    /// The number of operator orders and joined nodes.
    pub changes: usize,
    /// A hash of the trace: it differs if anything differs.
    pub trace: u64,
}

const PARTITIONS: usize = 3;
const TTL_MS: u64 = 1_000;
const TICK_MS: u64 = 40;
/// A node's timeout for the repository; after it the outcome is unknown.
const STORE_TIMEOUT_MS: u64 = 300;
/// A sync that takes longer makes a node impaired.
const IMPAIRED_MS: u64 = 1_000;
/// The maximum time without a commit while one disk hangs.
const STALL_MS: u64 = 3_000;
/// How long a leader parks a fetch.
const PARK_MS: u64 = 200;

/// A message between nodes.
#[derive(Debug)]
enum Message {
    Fetch {
        part: usize,
        id: u64,
        fetch: Fetch,
    },
    Answer {
        part: usize,
        id: u64,
        to_run: BrokerEpoch,
        epoch: LeaderEpoch,
        answer: Result<Answer, Refusal>,
        entries: Vec<Entry>,
    },
    Report {
        part: usize,
        report: Report,
    },
    AskEnd {
        part: usize,
    },
    End {
        part: usize,
        from: crate::message::Sender,
        epoch: LeaderEpoch,
        end: Offset,
    },
}

/// A repository request, with its caller.
#[derive(Debug)]
enum StoreRequest {
    Leader { part: usize, id: u64 },
    Controller { term: i64, batch: Batch },
}

#[derive(Debug)]
enum ScheduledEvent {
    Tick(usize),
    Deliver { from: usize, to: usize, message: Message },
    Disk { node: usize, life: u64, part: usize, to: Offset, sync: bool },
    Unpark { node: usize, life: u64, part: usize },
    StoreTxn { node: usize, life: u64, txn: Txn, request: Option<StoreRequest> },
    StoreAnswer { node: usize, life: u64, outcome: Option<TxnOutcome>, request: StoreRequest },
    Refresh { node: usize, life: u64, part: usize },
    Produce { part: usize },
    Fault,
    Heal(faults::Heal),
}

struct Scheduled {
    at_ms: u64,
    seq: u64,
    what: ScheduledEvent,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at_ms, self.seq) == (other.at_ms, other.seq)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ms, self.seq).cmp(&(other.at_ms, other.seq))
    }
}

/// The only producer of a partition: one record at a time.
#[derive(Debug, Default)]
struct Producer {
    next: u64,
    /// The record in flight, and since when.
    waits: Option<(u64, u64)>,
}

/// The simulated cluster.
pub struct World {
    scenario: Scenario,
    rng: Rng,
    now_ms: u64,
    seq: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    store: Store,
    nodes: Vec<SimNode>,
    producers: BTreeMap<usize, Producer>,
    /// When each partition last acknowledged a record.
    acked_ms: BTreeMap<usize, u64>,
    /// Pairs of partitioned nodes; node `nodes.len()` is the repository.
    cut: Vec<(usize, usize)>,
    checker: Checker,
    elections: usize,
    /// The operator's order for each node; `None` while it is not part of the cluster.
    orders: Vec<Option<Order>>,
    changes: usize,
    trace: u64,
    calm: bool,
}

impl World {
    /// Runs a scenario to its end.
    pub fn run(scenario: Scenario) -> RunReport {
        let mut world = Self::new(scenario);
        let end = scenario.faults_ms;
        world.run_until(end);
        world.calm_down();
        world.run_until(end + 8_000);
        world.stop_producing();
        world.run_until(end + 10_000);
        world.check_rest();
        RunReport {
            violation: world.checker.violation.take().map(|what| format!("seed {}: {what}", scenario.seed)),
            acked: world.checker.acked,
            elections: world.elections,
            changes: world.changes,
            trace: world.trace,
        }
    }

    fn new(scenario: Scenario) -> Self {
        let mut world = Self {
            scenario,
            rng: Rng::with_seed(scenario.seed),
            now_ms: 0,
            seq: 0,
            queue: BinaryHeap::new(),
            store: Store::default(),
            nodes: (0..scenario.nodes).map(SimNode::new).collect(),
            producers: BTreeMap::new(),
            acked_ms: BTreeMap::new(),
            cut: Vec::new(),
            checker: Checker::default(),
            elections: 0,
            orders: vec![Some(Order::Serve); scenario.nodes],
            changes: 0,
            trace: 0,
            calm: false,
        };
        if let Some(node) = scenario.latecomer() {
            world.nodes[node].up = false;
            world.orders[node] = None;
            let at = world.rng.u64(1_500..6_000);
            world.after(at, ScheduledEvent::Heal(faults::Heal::Enter(node)));
        }
        for node in 0..scenario.nodes {
            let at = world.rng.u64(0..TICK_MS);
            world.after(at, ScheduledEvent::Tick(node));
        }
        for part in 0..PARTITIONS {
            world.producers.insert(part, Producer { next: 1, waits: None });
            world.after(500 + part as u64, ScheduledEvent::Produce { part });
        }
        world.after(1_000, ScheduledEvent::Fault);
        world
    }

    fn after(&mut self, delay_ms: u64, what: ScheduledEvent) {
        self.seq += 1;
        self.queue.push(Reverse(Scheduled { at_ms: self.now_ms + delay_ms, seq: self.seq, what }));
    }

    fn run_until(&mut self, end_ms: u64) {
        while self.checker.violation.is_none() {
            match self.queue.peek() {
                Some(Reverse(next)) if next.at_ms <= end_ms => {}
                _ => break,
            }
            let Some(Reverse(next)) = self.queue.pop() else { break };
            self.now_ms = next.at_ms;
            self.store.expire(self.now_ms);
            self.trace = self.trace.rotate_left(5) ^ next.at_ms ^ (self.store.history.len() as u64) << 20;
            if let Some(node) = next.what.target_node()
                && self.nodes[node].paused_until_ms > self.now_ms
            {
                // An event for a paused node is delivered later, in the original order.
                let at_ms = self.nodes[node].paused_until_ms;
                self.queue.push(Reverse(Scheduled { at_ms, ..next }));
                continue;
            }
            if let ScheduledEvent::Disk { node, .. } = next.what
                && self.nodes[node].hung_until_ms > self.now_ms
            {
                let at_ms = self.nodes[node].hung_until_ms;
                self.queue.push(Reverse(Scheduled { at_ms, ..next }));
                continue;
            }
            self.dispatch(next.what);
        }
        self.now_ms = end_ms;
    }

    fn dispatch(&mut self, what: ScheduledEvent) {
        match what {
            ScheduledEvent::Tick(node) => {
                self.tick(node);
                let delay = TICK_MS + self.rng.u64(0..10);
                self.after(delay, ScheduledEvent::Tick(node));
            }
            ScheduledEvent::Deliver { from, to, message } => {
                if !self.is_cut(from, to) && self.nodes[to].up {
                    self.deliver(from, to, message);
                }
            }
            ScheduledEvent::Disk { node, life, part, to, sync } => self.on_disk(node, life, part, to, sync),
            ScheduledEvent::Unpark { node, life, part } => {
                if self.nodes[node].life == life {
                    self.unpark(node, part);
                }
            }
            ScheduledEvent::StoreTxn { node, life, txn, request } => {
                self.on_store_txn(node, life, txn, request)
            }
            ScheduledEvent::StoreAnswer { node, life, outcome, request } => {
                if self.nodes[node].life == life && self.nodes[node].up {
                    self.on_store_answer(node, outcome, request);
                }
            }
            ScheduledEvent::Refresh { node, life, part } => {
                if self.nodes[node].life == life
                    && self.nodes[node].up
                    && !self.is_cut(node, self.nodes.len())
                {
                    self.refresh(node, part);
                }
            }
            ScheduledEvent::Produce { part } => self.produce(part),
            ScheduledEvent::Fault => self.fault(),
            ScheduledEvent::Heal(heal) => self.heal(heal),
        }
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut.iter().any(|pair| *pair == (a, b) || *pair == (b, a))
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        let rough = !self.calm && !self.scenario.hangs;
        if rough && self.rng.u32(0..100) < 2 {
            return; // lost
        }
        let delay =
            if rough && self.rng.u32(0..100) < 2 { self.rng.u64(50..1_500) } else { self.rng.u64(1..8) };
        self.after(delay, ScheduledEvent::Deliver { from, to, message });
    }

    /// Sends a transaction to the repository. The request or its answer may be lost or late.
    fn send_to_store(&mut self, node: usize, txn: Txn, request: StoreRequest) {
        let life = self.nodes[node].life;
        let luck = if self.calm || self.scenario.hangs { 100 } else { self.rng.u32(0..100) };
        match luck {
            0..3 => self
                .after(STORE_TIMEOUT_MS, ScheduledEvent::StoreAnswer { node, life, outcome: None, request }),
            3..8 => {
                // It takes effect, perhaps much later, and the caller gets no answer.
                let delay = self.rng.u64(1..2_500);
                self.after(delay, ScheduledEvent::StoreTxn { node, life, txn, request: None });
                self.after(
                    STORE_TIMEOUT_MS,
                    ScheduledEvent::StoreAnswer { node, life, outcome: None, request },
                );
            }
            _ => {
                let delay = self.rng.u64(1..6);
                self.after(delay, ScheduledEvent::StoreTxn { node, life, txn, request: Some(request) });
            }
        }
    }

    fn on_store_txn(&mut self, node: usize, life: u64, txn: Txn, request: Option<StoreRequest>) {
        if self.is_cut(node, self.nodes.len()) {
            if let Some(request) = request {
                self.after(
                    STORE_TIMEOUT_MS,
                    ScheduledEvent::StoreAnswer { node, life, outcome: None, request },
                );
            }
            return;
        }
        let outcome = self.store.txn(txn);
        if let Some(request) = request {
            let delay = self.rng.u64(1..6);
            self.after(delay, ScheduledEvent::StoreAnswer { node, life, outcome: Some(outcome), request });
        }
    }

    fn produce(&mut self, part: usize) {
        let delay = self.rng.u64(5..60);
        if !self.producers.contains_key(&part) {
            return;
        }
        self.after(delay, ScheduledEvent::Produce { part });
        let Some(producer) = self.producers.get_mut(&part) else { return };
        match producer.waits {
            Some((_, since_ms)) if self.now_ms < since_ms + 400 => return,
            _ => {}
        }
        let value = match producer.waits {
            // The outcome is unknown.
            Some((value, _)) if self.scenario.is_idempotent(part) => value,
            _ => producer.next,
        };
        producer.next = value + 1;
        producer.waits = Some((value, self.now_ms));
        let state = self.record(part);
        let believed = state.and_then(|state| state.leader).map(|node| node.0 as usize - 1);
        let node = match believed {
            // Clients with stale metadata exist, but here the commits are timed.
            Some(node) if self.scenario.hangs || self.rng.u32(0..10) < 8 => node,
            _ => self.rng.usize(0..self.nodes.len()),
        };
        if self.nodes[node].up && self.nodes[node].paused_until_ms <= self.now_ms {
            self.append(node, part, value);
        }
    }

    fn on_acked(&mut self, part: usize, offset: Offset, value: u64) {
        self.checker.on_ack(part, offset, value);
        let stall_ms = self.now_ms - self.acked_ms.insert(part, self.now_ms).unwrap_or(self.now_ms);
        if self.scenario.hangs && stall_ms > STALL_MS {
            self.checker.fail(format!("partition {part}: no record was acknowledged for {stall_ms} ms"));
        }
        if let Some(producer) = self.producers.get_mut(&part)
            && producer.waits.is_some_and(|(waits, _)| waits == value)
        {
            producer.waits = None;
        }
    }

    fn record(&self, part: usize) -> Option<PartitionState> {
        let entry = self.store.get(&keys::partition(partition(part)))?;
        Some(PartitionState::decode(&entry.value).expect("what was written can be read"))
    }

    fn stop_producing(&mut self) {
        let acked = self.checker.acked;
        self.producers.clear();
        if self.checker.violation.is_none() && acked == 0 {
            self.checker.fail("nothing was ever acknowledged".into());
        }
    }

    /// All nodes are up and connected: every replica must be in sync, and all logs must be equal.
    fn check_rest(&mut self) {
        if self.checker.violation.is_some() {
            return;
        }
        for part in 0..PARTITIONS {
            let Some(state) = self.record(part) else {
                self.checker.fail(format!("partition {part} has no record"));
                return;
            };
            if state.isr.len() != state.replicas.len() || state.leader.is_none() || state.is_moving() {
                self.checker.fail(format!("partition {part} did not heal: {state:?}"));
                return;
            }
            if self.scenario.changes && state.replicas.len() != 3 {
                self.checker.fail(format!("partition {part} did not grow: {state:?}"));
                return;
            }
            let logs: Vec<_> =
                state.replicas.iter().map(|node| &self.nodes[node.0 as usize - 1].disks[part]).collect();
            self.checker.on_rest(part, &logs);
        }
    }
}

impl ScheduledEvent {
    /// The node that must not be paused for this event.
    fn target_node(&self) -> Option<usize> {
        match self {
            Self::Tick(node)
            | Self::Deliver { to: node, .. }
            | Self::Unpark { node, .. }
            | Self::StoreAnswer { node, .. }
            | Self::Refresh { node, .. } => Some(*node),
            // A disk continues while its process is paused, and the repository is remote.
            Self::Disk { .. }
            | Self::StoreTxn { .. }
            | Self::Produce { .. }
            | Self::Fault
            | Self::Heal(_) => None,
        }
    }
}

fn partition(part: usize) -> PartitionId {
    PartitionId { topic: TopicId(part as u128 + 1), index: 0 }
}

fn part_of(id: PartitionId) -> usize {
    id.topic.0 as usize - 1
}

/// One topic per partition, each with a different durability. In changing scenarios no topic has an explicit
/// assignment or factor.
fn topics(changes: bool) -> Vec<Topic> {
    let asked = vec![BrokerId(1), BrokerId(2), BrokerId(3)];
    let topic = |part: usize, min_isr, durability| Topic {
        id: partition(part).topic,
        key: keys::topic(&format!("topic-{part}")),
        name: format!("topic-{part}"),
        create_revision: 0,
        partitions: 1,
        factor: (!changes).then_some(3),
        assignment: if changes { Vec::new() } else { vec![asked.clone()] },
        min_isr: Some(min_isr),
        durability,
        unclean: false,
        fenced: false,
    };
    vec![topic(0, 2, Durability::Fsync), topic(1, 1, Durability::Fsync), topic(2, 2, Durability::Replicated)]
}

fn is_written_only(part: usize) -> bool {
    topics(false)[part].durability == Durability::Replicated
}

fn outcome_of(outcome: Option<&TxnOutcome>) -> Outcome {
    match outcome {
        None => Outcome::Unknown,
        Some(TxnOutcome::Done { revision }) => Outcome::Done { revision: *revision },
        Some(TxnOutcome::Conflict { .. }) => Outcome::Conflict,
    }
}

#[cfg(test)]
mod tests;
