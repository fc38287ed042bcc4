//! The transaction coordinator of one partition: which producer owns a transactional id, which partitions its
//! transaction includes, and how it ends. Pure: requests, completed writes and time go in, responses and writes come
//! out.
//!
//! One entry per transactional id, whose durable image ([`Transaction`]) changes in one way only: the next image is
//! written to `__transaction_state` ([`Effect::Persist`]) and adopted when it is durable. So the state after a
//! restart is the state that was acted on. Invariants:
//! - one write per id is in flight at a time; meanwhile requests get CONCURRENT_TRANSACTIONS;
//! - a decision (PrepareCommit, PrepareAbort) is durable before its first marker, and is never changed;
//! - a transaction begins only after the markers of the previous one are durable on every partition, so a marker that
//!   is written again cannot end a later transaction;
//! - a partition has at most one marker of an id in flight: only failed markers are sent again;
//! - every token of a request is answered exactly once;
//! - no request succeeds without a write, not even if the state already matches: a coordinator that does not know yet
//!   that it was replaced has the end of an earlier transaction, and would take the next one's for it. It cannot write.
//!
//! A failed write leaves the image unchanged. That is safe even if the record did reach the log: nothing was done
//! because of it, and a coordinator that loads it finds a decision it may complete.
//!
//! Time: deadlines count on the monotonic `now_ms`; wall time appears in records only ([`Coordinator::set_wall_ms`]).
//!
//! Transaction version 2 (KIP-890): a client that sends EndTxn 5 gets a new epoch with every end, and its partitions
//! require that a marker's epoch is newer than the records'. So neither a late record nor a late marker of one
//! transaction can reach the next. A producer may use version 1 in one transaction and version 2 in the next; the
//! request decides.
//!
//! The caller checks that the id belongs to this coordinator ([`partition_for`]) and that partitions exist.

mod api;
mod query;
mod records;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;

pub use api::{
    Config, Description, Effect, Input, ListFilter, Listed, MarkersToken, PersistToken, Reply, Token,
    TopicPartition, WriteMarkers,
};
pub use query::verification_error;
pub use records::{RecordError, decode_key, decode_value, encode_key, encode_value};
pub use state::{LAST_EPOCH, State, Transaction};

use state::{Claim, NONE, by_topic};

/// The topic whose partitions hold committed offsets.
const OFFSETS_TOPIC: &str = "__consumer_offsets";

/// All transactional ids of one coordinator.
pub struct Coordinator {
    config: Config,
    coordinator_epoch: i32,
    /// True until [`Coordinator::start`]: requests are not answered from the state yet.
    loading: bool,
    entries: HashMap<Arc<str>, Entry>,
    /// Invariant: holds `(wake, id)` exactly for the entries that have a `wake`.
    deadlines: BTreeSet<(u64, Arc<str>)>,
    /// Invariant: one for every entry with a `pending`.
    writes: BTreeMap<PersistToken, Arc<str>>,
    /// Invariant: one for every entry with markers in flight.
    rounds: BTreeMap<MarkersToken, Arc<str>>,
    last_token: u64,
    wall_minus_now_ms: i64,
    effects: Vec<Effect>,
}

/// A transactional id in memory.
#[derive(Debug)]
struct Entry {
    /// Invariant: durable, unless its epoch is -1.
    txn: Transaction,
    pending: Option<Pending>,
    markers: Option<Markers>,
    /// The timeout of the open transaction, or the expiry of the idle id.
    due_at: u64,
    /// The next retry of a failed step; counts consecutive failures.
    retry_at: Option<u64>,
    failures: u32,
    wake: Option<u64>,
}

/// A write in flight.
#[derive(Debug)]
struct Pending {
    /// `None` is a tombstone.
    next: Option<Transaction>,
    /// The response to send when it is durable.
    answer: Option<(Token, Reply)>,
}

/// The markers of a decided transaction.
#[derive(Debug, Default)]
struct Markers {
    in_flight: BTreeSet<TopicPartition>,
    /// Markers to send again.
    failed: BTreeSet<TopicPartition>,
}

impl Entry {
    fn new(txn: Transaction, due_at: u64) -> Self {
        Self { txn, pending: None, markers: None, due_at, retry_at: None, failures: 0, wake: None }
    }

    fn is_ending(&self) -> bool {
        self.pending.as_ref().and_then(|p| p.next.as_ref()).is_some_and(|n| n.state.is_preparing())
    }

    /// True if the id is visible to requests: not before its first write, not during its last.
    fn is_visible(&self) -> bool {
        self.txn.epoch != NONE && self.pending.as_ref().is_none_or(|p| p.next.is_some())
    }

    fn next_wake(&self) -> Option<u64> {
        if self.pending.is_some() {
            None
        } else if self.txn.state.is_preparing() {
            self.retry_at
        } else {
            Some(self.due_at.max(self.retry_at.unwrap_or(0)))
        }
    }

    fn back_off(&mut self, now_ms: u64, config: &Config) {
        let pause = config.retry_min_ms.saturating_mul(1 << self.failures.min(16)).min(config.retry_max_ms);
        self.failures += 1;
        self.retry_at = Some(now_ms + pause);
    }
}

/// The fencing error for a client of this API and version.
fn fenced(error: ErrorCode, knows_fenced: bool) -> ErrorCode {
    match error {
        ErrorCode::ProducerFenced if !knows_fenced => ErrorCode::InvalidProducerEpoch,
        other => other,
    }
}

/// The client's error if its step could not be written.
fn write_error(error: ErrorCode) -> ErrorCode {
    match error {
        ErrorCode::NotLeaderOrFollower | ErrorCode::KafkaStorageError => ErrorCode::NotCoordinator,
        ErrorCode::MessageTooLarge | ErrorCode::RecordListTooLarge => ErrorCode::UnknownServerError,
        _ => ErrorCode::CoordinatorNotAvailable,
    }
}

/// The partition of `__transaction_state` that holds a transactional id, as every client and tool computes it.
pub fn partition_for(transactional_id: &str, partitions: i32) -> i32 {
    crate::groups::partition_for(transactional_id, partitions)
}

impl Coordinator {
    /// An empty coordinator: [`Coordinator::replay`] the log, then [`Coordinator::start`]. The epoch must be higher
    /// than that of any previous coordinator.
    pub fn new(config: Config, coordinator_epoch: i32) -> Self {
        Self {
            config,
            coordinator_epoch,
            loading: true,
            entries: HashMap::new(),
            deadlines: BTreeSet::new(),
            writes: BTreeMap::new(),
            rounds: BTreeMap::new(),
            last_token: 0,
            wall_minus_now_ms: 0,
            effects: Vec::new(),
        }
    }

    /// Sets the wall time of `now_ms`. Records carry wall time; deadlines never do.
    pub fn set_wall_ms(&mut self, now_ms: u64, wall_ms: i64) {
        self.wall_minus_now_ms = wall_ms.saturating_sub_unsigned(now_ms);
    }

    fn wall_ms(&self, now_ms: u64) -> i64 {
        self.wall_minus_now_ms.saturating_add_unsigned(now_ms)
    }

    /// Replays a record of `__transaction_state`, in log order.
    pub fn replay(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), RecordError> {
        assert!(self.loading, "record replayed into a started coordinator");
        let Some(id) = decode_key(key)? else { return Ok(()) };
        match value {
            Some(value) => {
                let txn = decode_value(value)?;
                self.entries.insert(id, Entry::new(txn, 0));
            }
            None => {
                self.entries.remove(&id);
            }
        }
        Ok(())
    }

    /// Ends the load. Open transactions keep their remaining time; decided ones are completed.
    pub fn start(&mut self, now_ms: u64) -> Vec<Effect> {
        self.loading = false;
        let mut ids: Vec<_> = self.entries.keys().cloned().collect();
        ids.sort();
        for id in ids {
            self.begin_state(now_ms, &id);
        }
        self.take_effects()
    }

    /// The coordinator epoch.
    pub fn epoch(&self) -> i32 {
        self.coordinator_epoch
    }

    /// Number of transactional ids.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no transactional ids.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The durable image of a transactional id.
    pub fn transaction(&self, transactional_id: &str) -> Option<&Transaction> {
        self.entries.get(transactional_id).map(|e| &e.txn).filter(|t| t.epoch != NONE)
    }

    /// Handles a request.
    pub fn step(&mut self, now_ms: u64, input: Input) -> Vec<Effect> {
        match input {
            Input::InitProducerId { token, version, transactional_id, timeout_ms, current, fresh_id } => {
                let result = match transactional_id {
                    // Idempotent only: any unused producer id will do.
                    None => {
                        Ok(Some(Reply { error: ErrorCode::None, producer_id: fresh_id, producer_epoch: 0 }))
                    }
                    Some(id) => self.init_producer_id(now_ms, token, id, timeout_ms, current, fresh_id),
                };
                self.answer(token, result, version >= 4);
            }
            Input::AddPartitions {
                token,
                version,
                transactional_id,
                producer_id,
                producer_epoch,
                partitions,
            } => {
                let claim = (producer_id, producer_epoch);
                let own_epoch = version >= 4;
                let result =
                    self.add_partitions(now_ms, token, &transactional_id, claim, partitions, own_epoch);
                self.answer(token, result, version >= 2);
            }
            Input::AddOffsets {
                token,
                version,
                transactional_id,
                producer_id,
                producer_epoch,
                offsets_partition,
            } => {
                let claim = (producer_id, producer_epoch);
                let partitions = vec![TopicPartition::new(OFFSETS_TOPIC, offsets_partition)];
                let result = self.add_partitions(now_ms, token, &transactional_id, claim, partitions, false);
                self.answer(token, result, version >= 2);
            }
            Input::EndTxn {
                token,
                version,
                transactional_id,
                producer_id,
                producer_epoch,
                commit,
                fresh_id,
            } => {
                let claim = (producer_id, producer_epoch);
                let result = if version >= 5 {
                    self.end_with_new_epoch(now_ms, token, &transactional_id, claim, commit, fresh_id)
                } else {
                    self.end_txn(now_ms, token, &transactional_id, claim, commit)
                };
                self.answer(token, result, version >= 2);
            }
        }
        self.take_effects()
    }

    /// `Ok(None)`: the response waits for a write.
    fn answer(&mut self, token: Token, result: Result<Option<Reply>, ErrorCode>, knows_fenced: bool) {
        let reply = match result {
            Ok(None) => return,
            Ok(Some(reply)) => reply,
            Err(error) => Reply::of(fenced(error, knows_fenced)),
        };
        self.effects.push(Effect::Reply(token, reply));
    }

    fn init_producer_id(
        &mut self,
        now_ms: u64,
        token: Token,
        id: Arc<str>,
        timeout_ms: i32,
        current: Option<Claim>,
        fresh_id: i64,
    ) -> Result<Option<Reply>, ErrorCode> {
        if id.is_empty() {
            return Err(ErrorCode::InvalidRequest);
        }
        if timeout_ms <= 0 || timeout_ms > self.config.max_timeout_ms {
            return Err(ErrorCode::InvalidTransactionTimeout);
        }
        if self.loading {
            return Err(ErrorCode::CoordinatorLoadInProgress);
        }
        let wall_ms = self.wall_ms(now_ms);
        let entry = self
            .entries
            .entry(id.clone())
            .or_insert_with(|| Entry::new(Transaction::new(fresh_id, timeout_ms, wall_ms), 0));
        if entry.pending.is_some() || entry.txn.state.is_preparing() {
            return Err(ErrorCode::ConcurrentTransactions);
        }
        if entry.txn.state == State::Ongoing {
            // The epoch bumped here is given to no client: after the abort the client sends InitProducerId again.
            entry.txn.check_fence(current)?;
            let next = entry.txn.fence(current.is_some(), wall_ms);
            let reply = Reply::of(ErrorCode::ConcurrentTransactions);
            self.persist(&id, Some(next), Some((token, reply)));
            return Ok(None);
        }
        let next = entry.txn.init(timeout_ms, current, fresh_id, wall_ms)?;
        let (producer_id, producer_epoch) = (next.producer_id, next.epoch);
        let reply = Reply { error: ErrorCode::None, producer_id, producer_epoch };
        self.persist(&id, Some(next), Some((token, reply)));
        Ok(None)
    }

    /// The entry of a producer's claim, if nothing is being written for it.
    fn claimed(&mut self, id: &str, claim: Claim) -> Result<&mut Entry, ErrorCode> {
        if id.is_empty() {
            return Err(ErrorCode::InvalidRequest);
        }
        if self.loading {
            return Err(ErrorCode::CoordinatorLoadInProgress);
        }
        let entry = self.entries.get_mut(id).ok_or(ErrorCode::InvalidProducerIdMapping)?;
        entry.txn.check_claim(claim)?;
        if entry.pending.is_some() { Err(ErrorCode::ConcurrentTransactions) } else { Ok(entry) }
    }

    fn add_partitions(
        &mut self,
        now_ms: u64,
        token: Token,
        id: &Arc<str>,
        claim: Claim,
        partitions: Vec<TopicPartition>,
        own_epoch: bool,
    ) -> Result<Option<Reply>, ErrorCode> {
        let wall_ms = self.wall_ms(now_ms);
        let entry = self.claimed(id, claim)?;
        if entry.txn.state.is_preparing() {
            return Err(ErrorCode::ConcurrentTransactions);
        }
        let nothing_new = partitions.iter().all(|p| entry.txn.partitions.contains(p));
        let next =
            if nothing_new { entry.txn.clone() } else { entry.txn.add(partitions, own_epoch, wall_ms) };
        self.persist(id, Some(next), Some((token, Reply::of(ErrorCode::None))));
        Ok(None)
    }

    fn end_txn(
        &mut self,
        now_ms: u64,
        token: Token,
        id: &Arc<str>,
        claim: Claim,
        commit: bool,
    ) -> Result<Option<Reply>, ErrorCode> {
        let wall_ms = self.wall_ms(now_ms);
        let entry = self.claimed(id, claim)?;
        match (entry.txn.state, commit) {
            (State::Ongoing, _) => {
                let mut next = entry.txn.end(commit, wall_ms);
                next.epoch_per_transaction = false;
                // The client may continue as soon as the decision is durable; markers follow.
                self.persist(id, Some(next), Some((token, Reply::of(ErrorCode::None))));
                Ok(None)
            }
            // A retry because the response was lost.
            (State::CompleteCommit, true) | (State::CompleteAbort, false) => {
                let same = entry.txn.clone();
                self.persist(id, Some(same), Some((token, Reply::of(ErrorCode::None))));
                Ok(None)
            }
            (State::PrepareCommit, true) | (State::PrepareAbort, false) => {
                Err(ErrorCode::ConcurrentTransactions)
            }
            _ => Err(ErrorCode::InvalidTxnState),
        }
    }

    /// EndTxn from version 5 on: the transaction ends under a new epoch.
    ///
    /// A client whose response was lost retries with the previous epoch; so does one whose transaction the
    /// coordinator has aborted under a new epoch in the meantime. An abort then succeeds and its response has that
    /// epoch. A commit gets INVALID_PRODUCER_EPOCH, not INVALID_TXN_STATE, which would blame the client
    /// (KAFKA-20785).
    fn end_with_new_epoch(
        &mut self,
        now_ms: u64,
        token: Token,
        id: &Arc<str>,
        claim: Claim,
        commit: bool,
        fresh_id: i64,
    ) -> Result<Option<Reply>, ErrorCode> {
        let wall_ms = self.wall_ms(now_ms);
        let repeats = self.entries.get(id).is_some_and(|entry| entry.txn.is_repeated_end(claim));
        if repeats && !self.loading {
            return self.repeat_end(token, id, claim, commit);
        }
        let entry = self.claimed(id, claim)?;
        let next = match (entry.txn.state, commit) {
            (State::Ongoing, _) | (State::Empty | State::CompleteCommit | State::CompleteAbort, false) => {
                entry.txn.end_with_new_epoch(commit, fresh_id, wall_ms)
            }
            // The client continues under the new epoch while the markers are written.
            (State::PrepareCommit | State::PrepareAbort, _) => return Err(ErrorCode::ConcurrentTransactions),
            _ => return Err(ErrorCode::InvalidTxnState),
        };
        let reply = Reply::to(next.successor());
        self.persist(id, Some(next), Some((token, reply)));
        Ok(None)
    }

    /// Answers a retried EndTxn; see [`Self::end_with_new_epoch`].
    fn repeat_end(
        &mut self,
        token: Token,
        id: &Arc<str>,
        (_, epoch): Claim,
        commit: bool,
    ) -> Result<Option<Reply>, ErrorCode> {
        let entry = self.entries.get(id).ok_or(ErrorCode::InvalidProducerIdMapping)?;
        if entry.pending.is_some() {
            return Err(ErrorCode::ConcurrentTransactions);
        }
        match (entry.txn.state, commit) {
            (State::CompleteCommit, true) | (State::CompleteAbort, false) => {
                let same = entry.txn.clone();
                let reply = Reply::to(same.successor());
                self.persist(id, Some(same), Some((token, reply)));
                Ok(None)
            }
            (State::PrepareCommit, true) | (State::PrepareAbort, false) => {
                Err(ErrorCode::ConcurrentTransactions)
            }
            (State::PrepareAbort | State::CompleteAbort, true) if entry.txn.last_epoch != epoch => {
                Err(ErrorCode::InvalidProducerEpoch)
            }
            (State::Empty | State::Ongoing, _) => Err(ErrorCode::ProducerFenced),
            _ => Err(ErrorCode::InvalidTxnState),
        }
    }

    /// Writes the next image, or a tombstone. Only for an entry that exists and has no write in flight.
    fn persist(&mut self, id: &Arc<str>, next: Option<Transaction>, answer: Option<(Token, Reply)>) {
        self.last_token += 1;
        let token = PersistToken(self.last_token);
        let value = next.as_ref().map(encode_value);
        let Some(entry) = self.entries.get_mut(id) else { return };
        assert!(entry.pending.is_none(), "two writes in flight for {id}");
        entry.pending = Some(Pending { next, answer });
        self.writes.insert(token, id.clone());
        self.reindex(id);
        let transactional_id = id.clone();
        self.effects.push(Effect::Persist { transactional_id, key: encode_key(id), value, token });
    }

    /// A write is durable, or has failed. An unknown token has no effect.
    pub fn on_persisted(
        &mut self,
        now_ms: u64,
        token: PersistToken,
        result: Result<(), ErrorCode>,
    ) -> Vec<Effect> {
        let Some(id) = self.writes.remove(&token) else { return Vec::new() };
        let Some(entry) = self.entries.get_mut(&id) else { return Vec::new() };
        let Some(Pending { next, answer }) = entry.pending.take() else { return Vec::new() };
        match (result, next) {
            (Ok(()), Some(next)) => {
                // An open transaction keeps its original deadline.
                let same = entry.txn.state == State::Ongoing && next.state == State::Ongoing;
                entry.txn = next;
                entry.failures = 0;
                entry.retry_at = None;
                if same {
                    self.reindex(&id);
                } else {
                    self.begin_state(now_ms, &id);
                }
            }
            (Ok(()), None) => self.forget(&id),
            (Err(_), _) if entry.txn.epoch == NONE => self.forget(&id),
            (Err(_), _) => {
                if answer.is_none() {
                    // No request will trigger a retry.
                    entry.back_off(now_ms, &self.config);
                }
                self.reindex(&id);
            }
        }
        if let Some((token, reply)) = answer {
            let reply = result.map_or_else(|e| Reply::of(write_error(e)), |()| reply);
            // Before the markers: the client waits for the decision only.
            self.effects.insert(0, Effect::Reply(token, reply));
        }
        self.take_effects()
    }

    fn forget(&mut self, id: &Arc<str>) {
        if let Some(wake) = self.entries.remove(id).and_then(|e| e.wake) {
            self.deadlines.remove(&(wake, id.clone()));
        }
    }

    /// Starts the work of the state just entered: sets its deadline, or writes its markers.
    fn begin_state(&mut self, now_ms: u64, id: &Arc<str>) {
        let wall_ms = self.wall_ms(now_ms);
        let Some(entry) = self.entries.get_mut(id) else { return };
        let (since_ms, limit_ms) = match entry.txn.state {
            State::Ongoing => (entry.txn.start_ms, u64::try_from(entry.txn.timeout_ms).unwrap_or(0)),
            _ => (entry.txn.updated_ms, self.config.id_expiration_ms),
        };
        // Wall time may have jumped while the node was down: never wait longer than the limit.
        let spent_ms = u64::try_from(wall_ms.saturating_sub(since_ms)).unwrap_or(0);
        entry.due_at = now_ms + limit_ms.saturating_sub(spent_ms);
        if entry.txn.state.is_preparing() {
            entry.markers =
                Some(Markers { in_flight: BTreeSet::new(), failed: entry.txn.partitions.clone() });
            self.write_markers(now_ms, id);
        } else {
            entry.markers = None;
            self.reindex(id);
        }
    }

    /// Sends the markers that are due, or writes the completion if all are durable.
    fn write_markers(&mut self, now_ms: u64, id: &Arc<str>) {
        let wall_ms = self.wall_ms(now_ms);
        let Some(entry) = self.entries.get_mut(id) else { return };
        entry.retry_at = None;
        let Some(markers) = entry.markers.as_mut() else { return };
        assert!(markers.in_flight.is_empty(), "markers of {id} sent twice");
        if markers.failed.is_empty() {
            let next = entry.txn.complete(wall_ms);
            self.persist(id, Some(next), None);
            return;
        }
        markers.in_flight = std::mem::take(&mut markers.failed);
        self.last_token += 1;
        let token = MarkersToken(self.last_token);
        self.rounds.insert(token, id.clone());
        self.effects.push(Effect::WriteMarkers(WriteMarkers {
            token,
            transactional_id: id.clone(),
            producer_id: entry.txn.producer_id,
            producer_epoch: entry.txn.epoch,
            commit: entry.txn.state == State::PrepareCommit,
            coordinator_epoch: self.coordinator_epoch,
            epoch_per_transaction: entry.txn.epoch_per_transaction,
            partitions: by_topic(&markers.in_flight),
        }));
        self.reindex(id);
    }

    /// A marker is durable, or could not be written. UNKNOWN_TOPIC_OR_PARTITION means that the partition was deleted;
    /// for a partition that is only unavailable pass another code, and the marker is retried.
    pub fn on_marker_written(
        &mut self,
        now_ms: u64,
        token: MarkersToken,
        topic: &str,
        partition: i32,
        result: Result<(), ErrorCode>,
    ) -> Vec<Effect> {
        let Some(id) = self.rounds.get(&token).cloned() else { return Vec::new() };
        let Some(entry) = self.entries.get_mut(&id) else { return Vec::new() };
        let Some(markers) = entry.markers.as_mut() else { return Vec::new() };
        let Some(partition) = markers.in_flight.take(&TopicPartition::new(topic, partition)) else {
            return Vec::new();
        };
        match result {
            // A newer epoch on the partition means that the transaction was ended there before.
            Ok(())
            | Err(
                ErrorCode::UnknownTopicOrPartition
                | ErrorCode::UnknownTopicId
                | ErrorCode::InvalidProducerEpoch
                | ErrorCode::ProducerFenced,
            ) => {}
            Err(ErrorCode::TransactionCoordinatorFenced) => {
                // Another coordinator owns the id now, and completes the rest.
                entry.markers = None;
                self.rounds.remove(&token);
                return Vec::new();
            }
            Err(_) => {
                markers.failed.insert(partition);
            }
        }
        if !markers.in_flight.is_empty() {
            return Vec::new();
        }
        let done = markers.failed.is_empty();
        self.rounds.remove(&token);
        if done {
            self.write_markers(now_ms, &id);
        } else {
            entry.back_off(now_ms, &self.config);
            self.reindex(&id);
        }
        self.take_effects()
    }

    /// The time of the next [`Coordinator::tick`].
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Aborts timed-out transactions, resends failed markers, expires idle ids.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Effect> {
        while let Some((at, id)) = self.deadlines.first().cloned() {
            if at > now_ms {
                break;
            }
            let wall_ms = self.wall_ms(now_ms);
            let Some(entry) = self.entries.get_mut(&id) else { break };
            match entry.txn.state {
                State::Ongoing => {
                    // Fenced, so that the producer cannot continue the aborted transaction.
                    let next = entry.txn.fence(false, wall_ms);
                    self.persist(&id, Some(next), None);
                }
                State::PrepareCommit | State::PrepareAbort => self.write_markers(now_ms, &id),
                _ => self.persist(&id, None, None),
            }
        }
        self.take_effects()
    }

    fn reindex(&mut self, id: &Arc<str>) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        let next = entry.next_wake();
        if next == entry.wake {
            return;
        }
        if let Some(at) = entry.wake {
            self.deadlines.remove(&(at, id.clone()));
        }
        entry.wake = next;
        if let Some(at) = next {
            self.deadlines.insert((at, id.clone()));
        }
    }

    fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }
}
