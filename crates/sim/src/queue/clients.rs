//! Clients of the queue: transactional producers, a copying consumer group, readers; and the checks of their
//! observations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{
    CreatableTopic, CreatableTopicConfig, CreateTopicsRequest, CreateTopicsResponse,
};

use super::kafka_client::{KafkaClient, RequestError};
use super::producer::Producer;
use super::{QueueReport, Shared, group, log};
use crate::testbed::{NODES, StopFlag, locked};

/// Topic that producers write to.
pub(super) const INPUT: &str = "input";
/// Topic that the group copies to.
pub(super) const OUTPUT: &str = "output";
/// Partitions of each topic.
pub(super) const PARTITIONS: i32 = 2;
pub(super) const WRITERS: u64 = 3;
pub(super) const COPIERS: u64 = 2;

const PAUSE: Duration = Duration::from_millis(30);
/// Consecutive reads of the same log end that are required.
const STABLE_READS: usize = 30;

/// Outcome of a transaction, as its producer knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TxnOutcome {
    Committed,
    Aborted,
    Unknown,
}

struct Transaction {
    outcome: TxnOutcome,
    values: Vec<(i32, String)>,
}

/// Values by offset.
type Log = BTreeMap<i64, String>;

/// Observations and acknowledgements so far.
#[derive(Default)]
struct Observed {
    transactions: BTreeMap<(u64, u64), Transaction>,
    /// Records that readers saw during fault injection.
    reads: BTreeMap<i32, Log>,
    /// The complete logs at the end.
    logs: BTreeMap<(&'static str, i32), Log>,
    /// Committed offsets of the group.
    copied: BTreeMap<i32, i64>,
    generations: u64,
    violation: Option<String>,
}

/// State shared by all clients.
pub(super) struct ClientPool {
    pub(super) kafka: KafkaClient,
    pub(super) writing: StopFlag,
    pub(super) copying: StopFlag,
    observed: Mutex<Observed>,
}

impl ClientPool {
    pub(super) fn new(shared: Arc<Shared>, host: usize) -> Arc<Self> {
        Arc::new(Self {
            kafka: KafkaClient::new(shared, host),
            writing: StopFlag::default(),
            copying: StopFlag::default(),
            observed: Mutex::default(),
        })
    }

    pub(super) fn first_violation(&self) -> Option<String> {
        locked(&self.observed).violation.clone()
    }

    fn on_violation(&self, violation: String) {
        locked(&self.observed).violation.get_or_insert(violation);
    }

    fn on_outcome(&self, transaction: (u64, u64), outcome: TxnOutcome) {
        if let Some(known) = locked(&self.observed).transactions.get_mut(&transaction) {
            known.outcome = outcome;
        }
    }

    pub(super) fn on_generation(&self) {
        locked(&self.observed).generations += 1;
    }

    /// The group has committed this offset.
    pub(super) fn on_group_offset(&self, partition: i32, offset: i64) {
        let mut observed = locked(&self.observed);
        let known = observed.copied.entry(partition).or_default();
        *known = (*known).max(offset);
    }

    /// True if the group has committed the end of the input.
    pub(super) fn is_copied(&self) -> bool {
        let observed = locked(&self.observed);
        (0..PARTITIONS).all(|partition| {
            let last = observed.logs.get(&(INPUT, partition)).and_then(|log| log.keys().next_back());
            last.is_none_or(|last| observed.copied.get(&partition).is_some_and(|copied| copied > last))
        })
    }

    /// Checks that the input has every committed transaction completely, once and in order, and no aborted one.
    pub(super) fn check_input(&self) -> Result<(), String> {
        let observed = locked(&self.observed);
        let mut positions: BTreeMap<&str, Vec<(i32, i64)>> = BTreeMap::new();
        for ((topic, partition), log) in &observed.logs {
            for (offset, value) in log.iter().filter(|_| *topic == INPUT) {
                positions.entry(value).or_default().push((*partition, *offset));
            }
        }
        let mut newest: BTreeMap<(u64, i32), i64> = BTreeMap::new();
        for ((writer, number), transaction) in &observed.transactions {
            let name = format!("transaction {number} of writer {writer} ({:?})", transaction.outcome);
            let mut present = 0;
            for (partition, value) in &transaction.values {
                let found = positions.remove(value.as_str()).unwrap_or_default();
                match found.as_slice() {
                    [] => continue,
                    [(at, offset)] if at == partition => {
                        present += 1;
                        let before = newest.insert((*writer, *partition), *offset);
                        if before.is_some_and(|before| before > *offset) {
                            return Err(format!("{name}: {value} is out of order"));
                        }
                    }
                    _ => return Err(format!("{name}: {value} is at {found:?}")),
                }
            }
            let is_complete = present == transaction.values.len();
            let is_correct = match transaction.outcome {
                TxnOutcome::Committed => is_complete,
                TxnOutcome::Aborted => present == 0,
                TxnOutcome::Unknown => is_complete || present == 0,
            };
            if !is_correct {
                return Err(format!("{name}: {present} of {:?} are present", transaction.values));
            }
        }
        if let Some((value, found)) = positions.first_key_value() {
            return Err(format!("no producer wrote {value}, which is at {found:?}"));
        }
        for (partition, reads) in &observed.reads {
            let log = &observed.logs[&(INPUT, *partition)];
            if let Some((offset, value)) = reads.iter().find(|(offset, value)| log.get(offset) != Some(value))
            {
                return Err(format!(
                    "a reader saw {value} at offset {offset} of partition {partition}; it is no longer there"
                ));
            }
        }
        Ok(())
    }

    /// Checks that the copy equals the original; returns the statistics.
    pub(super) fn check_output(&self) -> Result<QueueReport, String> {
        let observed = locked(&self.observed);
        let mut copied = 0;
        for partition in 0..PARTITIONS {
            let values = |topic| observed.logs[&(topic, partition)].values().collect::<Vec<_>>();
            let (input, output) = (values(INPUT), values(OUTPUT));
            if input != output {
                let at = input.iter().zip(&output).position(|(one, other)| one != other);
                let at = at.unwrap_or(input.len().min(output.len()));
                let (one, other) = (input.get(at), output.get(at));
                return Err(format!("the copy of partition {partition} differs at {at}: {one:?}, {other:?}"));
            }
            copied += output.len();
        }
        let count = |outcome| observed.transactions.values().filter(|txn| txn.outcome == outcome).count();
        Ok(QueueReport {
            committed: count(TxnOutcome::Committed),
            aborted: count(TxnOutcome::Aborted),
            unknown: count(TxnOutcome::Unknown),
            copied,
            generations: observed.generations,
            ..QueueReport::default()
        })
    }
}

/// Creates the topics.
pub(super) async fn create_topics(pool: Arc<ClientPool>) {
    for topic in [INPUT, OUTPUT] {
        let creatable = CreatableTopic {
            name: topic.into(),
            num_partitions: PARTITIONS,
            replication_factor: 3,
            // Wall clocks are random here: retention by time would delete records.
            configs: vec![CreatableTopicConfig { name: "retention.ms".into(), value: Some("-1".into()) }],
            ..Default::default()
        };
        let request =
            CreateTopicsRequest { topics: vec![creatable], timeout_ms: 1_000, validate_only: false };
        loop {
            let response: Result<CreateTopicsResponse, RequestError> =
                pool.kafka.request(fastrand::usize(..NODES), &request, 5).await;
            let exists = ErrorCode::TopicAlreadyExists as i16;
            let is_created = |response: CreateTopicsResponse| {
                response.topics.iter().all(|topic| [0, exists].contains(&topic.error_code))
            };
            if response.is_ok_and(is_created) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Every other client uses transaction version 2.
fn uses_transaction_v2(number: u64) -> bool {
    number % 2 == 1
}

/// Writes transactions; commits most of them and aborts the others.
pub(super) async fn write(pool: Arc<ClientPool>, writer: u64) {
    let mut number = 0;
    while let Some(mut producer) =
        Producer::begin(&pool.kafka, &format!("writer-{writer}"), uses_transaction_v2(writer), &pool.writing)
            .await
    {
        while !pool.writing.is_stopped() {
            number += 1;
            let may_continue = run_transaction(&pool, &mut producer, (writer, number)).await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..60))).await;
            if !may_continue {
                break;
            }
        }
        if pool.writing.is_stopped() {
            return;
        }
    }
}

/// Runs one transaction. Returns whether the producer may continue with its producer id and epoch.
async fn run_transaction(pool: &ClientPool, producer: &mut Producer<'_>, id: (u64, u64)) -> bool {
    let partitions = if fastrand::bool() { 0..PARTITIONS } else { 0..1 };
    let values: Vec<(i32, Vec<String>)> = partitions
        .map(|partition| {
            let count = fastrand::usize(1..4);
            let value = |at| format!("{}-{}-{partition}-{at}", id.0, id.1);
            (partition, (0..count).map(value).collect())
        })
        .collect();
    let flat =
        values.iter().flat_map(|(partition, values)| values.iter().map(|value| (*partition, value.clone())));
    let transaction = Transaction { outcome: TxnOutcome::Unknown, values: flat.collect() };
    locked(&pool.observed).transactions.insert(id, transaction);
    let mut written = true;
    for (partition, values) in &values {
        written = written && producer.write(INPUT, *partition, values).await.is_ok();
    }
    let commits = written && fastrand::u8(..3) > 0;
    let ended = producer.end(commits).await;
    pool.on_outcome(
        id,
        match ended {
            Ok(()) if commits => TxnOutcome::Committed,
            Err(RequestError::Unknown) if commits => TxnOutcome::Unknown,
            // A commit was not requested, or every attempt was rejected: the transaction never commits.
            Ok(()) | Err(_) => TxnOutcome::Aborted,
        },
    );
    written && ended.is_ok()
}

/// Runs one member of the copying group.
pub(super) async fn copy(pool: Arc<ClientPool>, number: u64) {
    let mut member = group::Member::default();
    while let Some(mut producer) =
        Producer::begin(&pool.kafka, &format!("copier-{number}"), uses_transaction_v2(number), &pool.copying)
            .await
    {
        let mut may_continue = true;
        while may_continue && !pool.copying.is_stopped() {
            let Ok(assigned) = member.join(&pool.kafka).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            pool.on_generation();
            while may_continue && !pool.copying.is_stopped() && member.heartbeat(&pool.kafka).await.is_ok() {
                for partition in &assigned {
                    may_continue =
                        may_continue && copy_batch(&pool, &mut producer, &member, *partition).await;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        if pool.copying.is_stopped() {
            return;
        }
    }
}

/// Copies the next records and commits their offset in one transaction. Returns whether the producer may continue
/// with its producer id and epoch.
async fn copy_batch(
    pool: &ClientPool,
    producer: &mut Producer<'_>,
    member: &group::Member,
    partition: i32,
) -> bool {
    let Ok(from) = group::committed(&pool.kafka, INPUT, partition).await else { return true };
    pool.on_group_offset(partition, from);
    let Ok(page) = log::fetch(&pool.kafka, INPUT, partition, from).await else { return true };
    let values: Vec<String> = page.values.into_iter().map(|(_, value)| value).collect();
    if page.next == from {
        return true;
    }
    let done = async {
        if !values.is_empty() {
            producer.write(OUTPUT, partition, &values).await?;
        }
        let offset = (INPUT, partition, page.next);
        producer.commit_offset(group::NAME, &member.membership, offset).await
    };
    if done.await.is_err() {
        let _ = producer.end(false).await;
        return false;
    }
    producer.end(true).await.is_ok()
}

/// Reads during fault injection: a record that was visible once must stay.
pub(super) async fn read(pool: Arc<ClientPool>, partition: i32) {
    let mut next = 0;
    while !pool.writing.is_stopped() {
        match log::fetch(&pool.kafka, INPUT, partition, next).await {
            Ok(page) => {
                next = page.next;
                locked(&pool.observed).reads.entry(partition).or_default().extend(page.values);
            }
            Err(error) if error.is(ErrorCode::OffsetOutOfRange) => {
                let violation = format!("partition {partition} ends before offset {next}, which was read");
                return pool.on_violation(violation);
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Reads a topic to its end, once it has no open transaction.
pub(super) async fn read_to_end(pool: Arc<ClientPool>, topic: &'static str) {
    for partition in 0..PARTITIONS {
        let (mut next, mut log, mut stable_reads) = (0, Log::new(), 0);
        // The high watermark of a new leader may lag behind: one read is not enough.
        while stable_reads < STABLE_READS {
            if let Ok(page) = log::fetch(&pool.kafka, topic, partition, next).await {
                let is_end = page.next == next && page.stable == page.end && next >= page.end;
                stable_reads = if is_end { stable_reads + 1 } else { 0 };
                next = page.next;
                log.extend(page.values);
            }
            tokio::time::sleep(PAUSE).await;
        }
        locked(&pool.observed).logs.insert((topic, partition), log);
    }
}
