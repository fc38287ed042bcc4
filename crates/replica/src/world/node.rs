//! A simulated node: the driver of its replicas, its repository session, its controller term.

use moim_base::{BrokerId, Offset};
use moim_state::{Compare, Event, LeaseId, Txn, TxnOutcome};

use super::{
    IMPAIRED_MS, Message, PARK_MS, PARTITIONS, ScheduledEvent, StoreRequest, TTL_MS, World, is_written_only,
    outcome_of, part_of, partition, topics,
};
use crate::acks::Waiting;
use crate::controller::batch::{Conflict, pack};
use crate::controller::{Controller, ControllerTuning, LogEnd, Node};
use crate::follower::{FollowerTuning, ResetPolicy};
use crate::keys;
use crate::log::LogView;
use crate::message::{Answer, Fetch, Sender};
use crate::mutant::Mutant;
use crate::replica::{Effect, Replica, Role};
use crate::restart::Member;
use crate::state::PartitionState;
use crate::toy::{Entry, ToyLog};
use crate::types::{BrokerEpoch, DirectoryId, Versioned};

/// One node. Disks and their metadata outlive the process.
#[derive(Debug)]
pub(super) struct SimNode {
    pub(super) index: usize,
    pub(super) up: bool,
    /// Counts processes: events of an earlier process are void.
    pub(super) life: u64,
    pub(super) paused_until_ms: u64,
    /// The period during which its disk hangs.
    pub(super) hung_since_ms: u64,
    pub(super) hung_until_ms: u64,
    /// True if it stops renewing its lease while its disk hangs; a node with the only replica of a partition does
    /// not.
    pub(super) yields: bool,
    pub(super) disks: Vec<ToyLog>,
    pub(super) directory: u64,
    /// Kept on disk: the oldest run since which no data was lost; cleared by an unclean stop.
    pub(super) intact_since: Option<BrokerEpoch>,
    pub(super) lease: Option<LeaseId>,
    /// Per partition: the last run target_node data was destroyed.
    pub(super) spoiled: Vec<BrokerEpoch>,
    pub(super) epoch: BrokerEpoch,
    pub(super) replicas: Vec<Option<Replica>>,
    pub(super) waiting: Vec<Waiting<(Offset, u64)>>,
    pub(super) parked: Vec<(usize, usize, u64, Fetch)>,
    pub(super) watched: usize,
    pub(super) controller: Option<Controller>,
}

impl SimNode {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            up: true,
            life: 1,
            paused_until_ms: 0,
            hung_since_ms: 0,
            hung_until_ms: 0,
            yields: false,
            disks: vec![ToyLog::default(); PARTITIONS],
            directory: 1 + index as u64,
            intact_since: None,
            lease: None,
            spoiled: vec![BrokerEpoch(-1); PARTITIONS],
            epoch: BrokerEpoch(0),
            replicas: (0..PARTITIONS).map(|_| None).collect(),
            waiting: (0..PARTITIONS).map(|_| Waiting::default()).collect(),
            parked: Vec::new(),
            watched: 0,
            controller: None,
        }
    }

    pub(super) fn sender(&self) -> Sender {
        Sender {
            node: BrokerId(self.index as i32 + 1),
            epoch: self.epoch,
            directory: DirectoryId(self.directory),
        }
    }

    /// True if a sync has been in progress for too long.
    pub(super) fn is_impaired(&self, now_ms: u64) -> bool {
        now_ms < self.hung_until_ms && now_ms >= self.hung_since_ms + IMPAIRED_MS
    }

    /// Clears the process state.
    pub(super) fn stop(&mut self) {
        self.up = false;
        self.life += 1;
        self.lease = None;
        self.replicas.iter_mut().for_each(|replica| *replica = None);
        self.waiting.iter_mut().for_each(|waiting| *waiting = Waiting::default());
        self.parked.clear();
        self.controller = None;
    }
}

impl World {
    pub(super) fn tick(&mut self, node: usize) {
        if !self.nodes[node].up {
            return;
        }
        let reaches = !self.is_cut(node, self.nodes.len());
        if reaches {
            self.keep_session(node);
            // A watch may lag.
            if self.calm || self.rng.u32(0..10) < 8 {
                self.watch(node);
            }
            self.maybe_control(node);
        }
        for part in 0..PARTITIONS {
            self.step(node, part, |replica, log, now, effects| replica.on_tick(log, now, effects));
        }
        self.control(node);
    }

    fn keep_session(&mut self, node: usize) {
        let until = self.now_ms + TTL_MS;
        if self.nodes[node].yields && self.nodes[node].is_impaired(self.now_ms) {
            if let Some(lease) = self.nodes[node].lease.take() {
                self.store.revoke(lease);
            }
            return;
        }
        if let Some(lease) = self.nodes[node].lease
            && self.store.keep_alive(lease, until)
        {
            return;
        }
        let me = &self.nodes[node];
        let key = keys::member(BrokerId(node as i32 + 1));
        // The key of a former run must be deleted first: a put over it would keep its create revision.
        self.store.txn(Txn::new().delete(key.clone()));
        let lease = self.store.grant(until);
        let since = me.intact_since.map_or(0, |epoch| epoch.0);
        let value = format!("{} {since}", me.directory);
        let done =
            self.store.txn(Txn::new().when(Compare::Absent(key.clone())).put_leased(key, value, lease));
        let TxnOutcome::Done { revision } = done else { return };
        let me = &mut self.nodes[node];
        me.lease = Some(lease);
        me.epoch = BrokerEpoch(revision);
        me.intact_since.get_or_insert(me.epoch);
        me.controller = None;
        // A new run: roles start anew, from the records that name it.
        for part in 0..PARTITIONS {
            let hw = self.nodes[node].replicas[part].as_ref().map_or(Offset(0), Replica::high_watermark);
            self.fail_waiting(node, part);
            self.nodes[node].parked.retain(|(parked, ..)| *parked != part);
            let me = &mut self.nodes[node];
            let replica = Replica::new(me.sender(), partition(part), ResetPolicy::LogStart, hw)
                .tuned(
                    self.scenario.leader_tuning(),
                    FollowerTuning {
                        backoff_ms: 10,
                        max_backoff_ms: 200,
                        timeout_ms: 600,
                        chunk_timeout_ms: 600,
                    },
                )
                .planted(self.scenario.mutants);
            me.replicas[part] = Some(replica);
        }
        // From the present state, never from history: an old record may say that this node has no replica of a
        // partition.
        self.nodes[node].watched = self.store.history.len();
        for part in 0..PARTITIONS {
            self.refresh(node, part);
        }
    }

    /// Delivers the repository's changes to a node.
    fn watch(&mut self, node: usize) {
        let from = std::mem::replace(&mut self.nodes[node].watched, self.store.history.len());
        let events: Vec<Event> = self.store.history[from..].to_vec();
        for event in events {
            if let Some(controller) = &mut self.nodes[node].controller {
                feed(controller, &event, self.now_ms);
            }
            if let Event::Put(entry) = &event
                && let Some(id) = keys::parse_partition(&entry.key)
            {
                let value = PartitionState::decode(&entry.value).expect("what was written can be read");
                self.on_record(node, part_of(id), Versioned { revision: entry.mod_revision, value });
            }
        }
    }

    pub(super) fn refresh(&mut self, node: usize, part: usize) {
        if let Some(entry) = self.store.get(&keys::partition(partition(part))) {
            let value = PartitionState::decode(&entry.value).expect("what was written can be read");
            let record = Versioned { revision: entry.mod_revision, value };
            self.on_record(node, part, record);
        }
    }

    fn on_record(&mut self, node: usize, part: usize, record: Versioned<PartitionState>) {
        self.step(node, part, |replica, log, now, effects| replica.on_record(record, log, now, effects));
    }

    /// Acquires the controller key if it is free, and loads the view.
    fn maybe_control(&mut self, node: usize) {
        if self.nodes[node].controller.is_some() || self.store.get(keys::CONTROLLER).is_some() {
            return;
        }
        let Some(lease) = self.nodes[node].lease else { return };
        let key = keys::CONTROLLER;
        let took = self.store.txn(Txn::new().when(Compare::Absent(key.into())).put_leased(
            key,
            format!("{node}"),
            lease,
        ));
        let TxnOutcome::Done { revision } = took else { return };
        let tuning = ControllerTuning { suspect_ms: 200, return_ms: 1_000, ..ControllerTuning::default() };
        let mut controller = Controller::new(revision, tuning).planted(self.scenario.mutants);
        for (index, order) in self.orders.iter().enumerate() {
            let id = BrokerId(index as i32 + 1);
            if let Some(order) = *order {
                controller.on_node(Node { id, zone: String::new(), order });
            }
        }
        for topic in topics(self.scenario.changes) {
            let key = keys::topic(&topic.name);
            if self.store.get(&key).is_none() {
                self.store.txn(Txn::new().when(Compare::Absent(key.clone())).put(key.clone(), "topic"));
            }
            let create_revision = self.store.get(&key).map_or(0, |entry| entry.create_revision);
            controller.on_topic(crate::controller::Topic { create_revision, ..topic });
        }
        let now = self.now_ms;
        for entry in self.store.list() {
            feed(&mut controller, &Event::Put(entry.clone()), now);
        }
        self.nodes[node].watched = self.store.history.len();
        self.nodes[node].controller = Some(controller);
        // The records that the watch would have delivered to this node as a replica.
        for part in 0..PARTITIONS {
            self.refresh(node, part);
        }
    }

    fn control(&mut self, node: usize) {
        let now = self.now_ms;
        let impaired: Vec<bool> = self.nodes.iter().map(|other| other.is_impaired(now)).collect();
        let Some(controller) = &mut self.nodes[node].controller else { return };
        for (id, impaired) in (1..).zip(impaired) {
            controller.on_impaired(BrokerId(id), impaired);
        }
        let term = controller.term();
        let plan = controller.decide(now);
        for (to, id) in plan.log_end_requests {
            self.send(node, to.0 as usize - 1, Message::AskEnd { part: part_of(id) });
        }
        for batch in pack(plan.changes, Some(term)) {
            self.send_to_store(node, batch.txn(), StoreRequest::Controller { term, batch });
        }
    }

    pub(super) fn send_change(&mut self, node: usize, term: i64, change: crate::transition::Change) {
        for batch in pack(vec![change], Some(term)) {
            self.send_to_store(node, batch.txn(), StoreRequest::Controller { term, batch });
        }
    }

    pub(super) fn on_store_answer(
        &mut self,
        node: usize,
        outcome: Option<TxnOutcome>,
        request: StoreRequest,
    ) {
        match request {
            StoreRequest::Leader { part, id } => {
                let outcome = outcome_of(outcome.as_ref());
                self.step(node, part, |replica, _, now, effects| {
                    replica.on_outcome(id, outcome, now, effects);
                });
            }
            StoreRequest::Controller { term, batch } => {
                let Some(controller) = &mut self.nodes[node].controller else { return };
                if controller.term() != term {
                    return;
                }
                match outcome {
                    Some(TxnOutcome::Done { .. }) => {} // the watch brings it
                    Some(TxnOutcome::Conflict { current, .. }) => match batch.on_conflict(&current) {
                        Conflict::Deposed => self.nodes[node].controller = None,
                        Conflict::Retry { rest, failed } => {
                            failed.iter().for_each(|change| controller.on_failed(change.partition));
                            if let Some(batch) = rest {
                                self.send_to_store(
                                    node,
                                    batch.txn(),
                                    StoreRequest::Controller { term, batch },
                                );
                            }
                        }
                    },
                    None => batch.changes.iter().for_each(|change| controller.on_failed(change.partition)),
                }
            }
        }
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize, message: Message) {
        match message {
            Message::Fetch { part, id, fetch } => self.on_fetch(from, to, part, id, fetch),
            Message::Answer { part, id, to_run, epoch, answer, entries } => {
                let me = &mut self.nodes[to];
                let Some(follower) = me.replicas[part].as_mut().and_then(Replica::follower) else { return };
                if me.epoch != to_run || follower.leader().1 != epoch || !follower.accepts(id) {
                    return;
                }
                let appends = matches!(answer, Ok(Answer::Records { .. })) && !entries.is_empty();
                if appends {
                    entries.into_iter().for_each(|entry| me.disks[part].append(entry));
                    self.write_out(to, part);
                }
                self.step(to, part, |replica, log, now, effects| {
                    let Some(follower) = replica.follower() else { return };
                    match answer {
                        Ok(answer) => follower.on_answer(id, answer, log, now, effects),
                        Err(refusal) => follower.on_refused(id, refusal, now, effects),
                    }
                });
            }
            Message::Report { part, report } => {
                self.step(to, part, |replica, _, now, effects| {
                    // A refused report is equivalent to a lost one.
                    let _ = replica.on_report(&report, now, effects);
                });
            }
            Message::AskEnd { part } => {
                let me = &self.nodes[to];
                let log = &me.disks[part];
                let epoch = log.last_epoch().unwrap_or_default();
                let answer = Message::End { part, from: me.sender(), epoch, end: log.end() };
                self.send(to, from, answer);
            }
            Message::End { part, from, epoch, end } => {
                if let Some(controller) = &mut self.nodes[to].controller {
                    controller.on_log_end(partition(part), from.node, from.epoch, LogEnd { epoch, end });
                }
            }
        }
    }

    fn on_fetch(&mut self, from: usize, to: usize, part: usize, id: u64, fetch: Fetch) {
        let mut answer = None;
        self.step(to, part, |replica, log, now, effects| {
            answer = Some(replica.on_fetch(&fetch, log, now, effects));
        });
        let Some(answer) = answer else { return };
        if matches!(answer, Ok(Answer::Records { log_end, .. }) if log_end <= fetch.offset) {
            let life = self.nodes[to].life;
            self.nodes[to].parked.push((part, from, id, fetch));
            self.after(PARK_MS, ScheduledEvent::Unpark { node: to, life, part });
            return;
        }
        self.answer(to, from, part, id, &fetch, answer);
    }

    fn answer(
        &mut self,
        node: usize,
        to: usize,
        part: usize,
        id: u64,
        fetch: &Fetch,
        answer: Result<Answer, crate::message::Refusal>,
    ) {
        let entries = match answer {
            Ok(Answer::Records { .. }) => {
                let count = self.rng.usize(1..6);
                self.nodes[node].disks[part].read(fetch.offset, count)
            }
            _ => Vec::new(),
        };
        let (to_run, epoch) = (fetch.from.epoch, fetch.leader_epoch);
        self.send(node, to, Message::Answer { part, id, to_run, epoch, answer, entries });
    }

    /// Answers the parked fetches of this partition.
    pub(super) fn unpark(&mut self, node: usize, part: usize) {
        let parked = std::mem::take(&mut self.nodes[node].parked);
        for (parked_part, from, id, fetch) in parked {
            if parked_part != part {
                self.nodes[node].parked.push((parked_part, from, id, fetch));
                continue;
            }
            let me = &mut self.nodes[node];
            let answer = match me.replicas[part].as_mut().and_then(Replica::leader) {
                Some(leader) => leader.answer_parked(fetch.leader_epoch, &me.disks[part]),
                None => Err(crate::message::Refusal::NotLeader),
            };
            self.answer(node, from, part, id, &fetch, answer);
        }
    }

    /// A producer's record arrives at a node.
    pub(super) fn append(&mut self, node: usize, part: usize, value: u64) {
        let me = &mut self.nodes[node];
        let sender = me.sender();
        let Some(leader) = me.replicas[part].as_mut().and_then(Replica::leader) else { return };
        if leader.admit().is_err() {
            return;
        }
        let (epoch, high_watermark) = (leader.epoch(), leader.high_watermark());
        let log = &mut me.disks[part];
        let knows = self.scenario.is_idempotent(part) && !self.scenario.mutants.has(Mutant::ForgetProducers);
        let repeat = if knows { Repeat::of(value, log) } else { Repeat::No };
        match repeat {
            Repeat::No => {}
            Repeat::Gap => return,
            Repeat::Of(offset) if offset < high_watermark => return self.on_acked(part, offset, value),
            Repeat::Of(offset) => {
                return me.waiting[part].push(Offset(offset.0 + 1), (offset, value));
            }
        }
        let offset = log.end();
        log.append(Entry { epoch, value });
        leader.on_append(log.end());
        me.waiting[part].push(Offset(offset.0 + 1), (offset, value));
        self.checker.on_append(part, epoch, sender);
        self.write_out(node, part);
        self.unpark(node, part);
    }

    /// Schedules a write and a sync of the present log.
    fn write_out(&mut self, node: usize, part: usize) {
        let (life, to) = (self.nodes[node].life, self.nodes[node].disks[part].end());
        let stalls = !self.calm && !self.scenario.hangs && self.rng.u32(0..200) == 0;
        let slow = if stalls { self.rng.u64(200..3_000) } else { 0 };
        let write = slow + self.rng.u64(0..4);
        let replicated = is_written_only(part);
        let sync = write + if replicated { self.rng.u64(300..1_500) } else { self.rng.u64(0..8) };
        self.after(write, ScheduledEvent::Disk { node, life, part, to, sync: false });
        self.after(sync, ScheduledEvent::Disk { node, life, part, to, sync: true });
    }

    pub(super) fn on_disk(&mut self, node: usize, life: u64, part: usize, to: Offset, sync: bool) {
        let me = &mut self.nodes[node];
        if me.life != life {
            return;
        }
        // A truncated entry is no longer there to be written; its replacement waits for its own write.
        let log = &mut me.disks[part];
        if sync {
            log.sync(to)
        } else {
            log.write(to)
        }
        if me.up {
            self.step(node, part, |replica, log, _, effects| replica.on_durable(log, effects));
        }
    }

    fn fail_waiting(&mut self, node: usize, part: usize) {
        self.nodes[node].waiting[part].fail().for_each(drop);
    }

    /// Makes one step of a replica and carries out its effects.
    pub(super) fn step(
        &mut self,
        node: usize,
        part: usize,
        call: impl FnOnce(&mut Replica, &ToyLog, u64, &mut Vec<Effect>),
    ) {
        let me = &mut self.nodes[node];
        let Some(replica) = &mut me.replicas[part] else { return };
        let mut effects = Vec::new();
        call(replica, &me.disks[part], self.now_ms, &mut effects);
        let mut at = 0;
        while at < effects.len() {
            let effect = effects[at].clone();
            at += 1;
            self.carry_out(node, part, effect, &mut effects);
        }
    }

    fn carry_out(&mut self, node: usize, part: usize, effect: Effect, more: &mut Vec<Effect>) {
        let now = self.now_ms;
        let me = &mut self.nodes[node];
        let (sender, life) = (me.sender(), me.life);
        match effect {
            Effect::NoteEpoch { epoch, start } => {
                me.disks[part].note_epoch(epoch, start);
                self.elections += 1;
                self.checker.on_leader(part, epoch, sender, &self.nodes[node].disks[part]);
            }
            Effect::HighWatermark(to) => self.on_high_watermark(node, part, to),
            Effect::LowWatermark => {}
            Effect::UnderMinIsr | Effect::LeadershipEnded => self.fail_waiting(node, part),
            Effect::Propose(proposal) => {
                let id = proposal.id;
                let batch = pack(vec![proposal.change], None).remove(0);
                self.send_to_store(node, batch.txn(), StoreRequest::Leader { part, id });
            }
            Effect::Refresh => {
                let delay = self.rng.u64(2..12);
                self.after(delay, ScheduledEvent::Refresh { node, life, part });
            }
            Effect::Fetch { to, id, fetch } => {
                self.send(node, to.0 as usize - 1, Message::Fetch { part, id, fetch });
            }
            Effect::Report { to, report } => {
                self.send(node, to.0 as usize - 1, Message::Report { part, report });
            }
            Effect::Truncate { to } => {
                me.disks[part].truncate(to);
                self.changed(node, part, now, more);
            }
            Effect::Reset { start } => {
                me.disks[part].reset(start);
                self.changed(node, part, now, more);
            }
            Effect::SetStart { start } => me.disks[part].set_start(start),
            Effect::NoteCleaned { .. } | Effect::Rebuild { .. } => unreachable!("toy logs are not compacted"),
            Effect::Drop => {
                me.disks[part] = ToyLog::default();
            }
            Effect::FetchSnapshot { .. } | Effect::Install(_) => unreachable!("queues have no snapshots"),
        }
    }

    fn changed(&mut self, node: usize, part: usize, now: u64, more: &mut Vec<Effect>) {
        let me = &mut self.nodes[node];
        let Some(follower) = me.replicas[part].as_mut().and_then(Replica::follower) else { return };
        follower.on_changed(&me.disks[part], now, more);
    }

    fn on_high_watermark(&mut self, node: usize, part: usize, to: Offset) {
        let me = &mut self.nodes[node];
        let sender = me.sender();
        let Some(replica) = &me.replicas[part] else { return };
        let log = &me.disks[part];
        match replica.role() {
            Role::Leader(leader) => {
                let numbered = self.scenario.is_idempotent(part);
                self.checker.on_committed(part, leader.epoch(), to, log, numbered);
            }
            Role::Follower(_) => self.checker.on_followed(part, to, log, sender),
            Role::Idle => {}
        }
        let acked: Vec<_> = self.nodes[node].waiting[part].committed(to).collect();
        for (offset, value) in acked {
            self.on_acked(part, offset, value);
        }
    }
}

/// A leader's duplicate check for the producer that numbers records from 1, from its log alone.
enum Repeat {
    No,
    Of(Offset),
    Gap,
}

impl Repeat {
    fn of(value: u64, log: &ToyLog) -> Self {
        let newest = Offset(log.end().0 - 1);
        let last = log.get(newest).map(|entry| entry.value);
        match last {
            Some(last) if value == last + 1 => Self::No,
            None if value == 1 && log.end() == Offset(0) => Self::No,
            // Older records were acknowledged long ago.
            Some(last) if value == last => Self::Of(newest),
            _ => Self::Gap,
        }
    }
}

/// Delivers a repository event to a controller.
fn feed(controller: &mut Controller, event: &Event, now_ms: u64) {
    let key = event.key();
    if let Some(id) = keys::parse_partition(key) {
        let record = match event {
            Event::Put(entry) => PartitionState::decode(&entry.value)
                .ok()
                .map(|value| Versioned { revision: entry.mod_revision, value }),
            Event::Delete { .. } => None,
        };
        controller.on_record(id, record);
        return;
    }
    let Some(node) = key.strip_prefix(keys::MEMBERS).and_then(|node| node.parse().ok()) else { return };
    let node = BrokerId(node);
    match event {
        Event::Delete { .. } => controller.on_member_lost(node),
        Event::Put(entry) => {
            let text = String::from_utf8_lossy(&entry.value);
            let mut numbers = text.split(' ').map(|number| number.parse::<i64>().unwrap_or(0));
            let directory = DirectoryId(numbers.next().unwrap_or(0) as u64);
            let since = numbers.next().filter(|since| *since > 0).map(BrokerEpoch);
            let epoch = BrokerEpoch(entry.create_revision);
            let member = Member { node, epoch, directory, intact_since: since, damaged: Vec::new() };
            controller.on_member(member, now_ms);
        }
    }
}
