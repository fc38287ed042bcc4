//! Clients of the queue: producers of transactions, a group that copies, readers; and what all of them were promised.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{
    CreatableTopic, CreatableTopicConfig, CreateTopicsRequest, CreateTopicsResponse,
};

use super::producer::Producer;
use super::wire::{Lost, Wire};
use super::{QueueReport, Shared, group, log};
use crate::site::{NODES, Switch, locked};

/// What producers write to.
pub(super) const INPUT: &str = "input";
/// Where the group copies it to.
pub(super) const OUTPUT: &str = "output";
/// Of each.
pub(super) const PARTITIONS: i32 = 2;
pub(super) const WRITERS: u64 = 3;
pub(super) const COPIERS: u64 = 2;

const PAUSE: Duration = Duration::from_millis(30);
/// How often in a row a log has to end at the same place.
const CALM: usize = 30;

/// How a transaction ended, as far as its producer knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Committed,
    Aborted,
    Unknown,
}

struct Transaction {
    fate: Fate,
    values: Vec<(i32, String)>,
}

/// Values by offset.
type Log = BTreeMap<i64, String>;

/// What was seen and promised so far.
#[derive(Default)]
struct Seen {
    transactions: BTreeMap<(u64, u64), Transaction>,
    /// What readers saw while things went wrong.
    glimpses: BTreeMap<i32, Log>,
    /// Everything there is in the end.
    logs: BTreeMap<(&'static str, i32), Log>,
    /// Up to where the group has come.
    copied: BTreeMap<i32, i64>,
    generations: u64,
    violation: Option<String>,
}

/// All clients and what they saw.
pub(super) struct Crowd {
    pub(super) wire: Wire,
    pub(super) writing: Switch,
    pub(super) copying: Switch,
    seen: Mutex<Seen>,
}

impl Crowd {
    pub(super) fn new(shared: Arc<Shared>, host: usize) -> Arc<Self> {
        let wire = Wire::new(shared, host);
        Arc::new(Self {
            wire,
            writing: Switch::default(),
            copying: Switch::default(),
            seen: Mutex::default(),
        })
    }

    pub(super) fn first_violation(&self) -> Option<String> {
        locked(&self.seen).violation.clone()
    }

    fn wrong(&self, what: String) {
        locked(&self.seen).violation.get_or_insert(what);
    }

    fn note(&self, transaction: (u64, u64), fate: Fate) {
        if let Some(known) = locked(&self.seen).transactions.get_mut(&transaction) {
            known.fate = fate;
        }
    }

    pub(super) fn note_generation(&self) {
        locked(&self.seen).generations += 1;
    }

    /// The group has committed up to here.
    pub(super) fn note_copied(&self, partition: i32, offset: i64) {
        let mut seen = locked(&self.seen);
        let known = seen.copied.entry(partition).or_default();
        *known = (*known).max(offset);
    }

    /// Whether the group has come to the end of what there is.
    pub(super) fn is_copied(&self) -> bool {
        let seen = locked(&self.seen);
        (0..PARTITIONS).all(|partition| {
            let last = seen.logs.get(&(INPUT, partition)).and_then(|log| log.keys().next_back());
            last.is_none_or(|last| seen.copied.get(&partition).is_some_and(|copied| copied > last))
        })
    }

    /// Whether what was written is there as it was promised.
    pub(super) fn judge_input(&self) -> Result<(), String> {
        let seen = locked(&self.seen);
        let mut places: BTreeMap<&str, Vec<(i32, i64)>> = BTreeMap::new();
        for ((topic, partition), log) in &seen.logs {
            for (offset, value) in log.iter().filter(|_| *topic == INPUT) {
                places.entry(value).or_default().push((*partition, *offset));
            }
        }
        let mut newest: BTreeMap<(u64, i32), i64> = BTreeMap::new();
        for ((writer, number), transaction) in &seen.transactions {
            let name = format!("transaction {number} of writer {writer} ({:?})", transaction.fate);
            let mut there = 0;
            for (partition, value) in &transaction.values {
                let found = places.remove(value.as_str()).unwrap_or_default();
                match found.as_slice() {
                    [] => continue,
                    [(at, offset)] if at == partition => {
                        there += 1;
                        let before = newest.insert((*writer, *partition), *offset);
                        if before.is_some_and(|before| before > *offset) {
                            return Err(format!("{name}: {value} stands before what was written before it"));
                        }
                    }
                    _ => return Err(format!("{name}: {value} is at {found:?}")),
                }
            }
            let whole = there == transaction.values.len();
            let right = match transaction.fate {
                Fate::Committed => whole,
                Fate::Aborted => there == 0,
                Fate::Unknown => whole || there == 0,
            };
            if !right {
                return Err(format!("{name}: {there} of {:?} are there", transaction.values));
            }
        }
        if let Some((value, found)) = places.first_key_value() {
            return Err(format!("nobody wrote {value}, which is at {found:?}"));
        }
        for (partition, glimpses) in &seen.glimpses {
            let log = &seen.logs[&(INPUT, *partition)];
            if let Some((offset, value)) =
                glimpses.iter().find(|(offset, value)| log.get(offset) != Some(value))
            {
                return Err(format!(
                    "a reader saw {value} at {offset} of partition {partition}; it is not there"
                ));
            }
        }
        Ok(())
    }

    /// Whether the copy is the original, and how much there was.
    pub(super) fn judge(&self) -> Result<QueueReport, String> {
        let seen = locked(&self.seen);
        let mut copied = 0;
        for partition in 0..PARTITIONS {
            let values = |topic| seen.logs[&(topic, partition)].values().collect::<Vec<_>>();
            let (input, output) = (values(INPUT), values(OUTPUT));
            if input != output {
                let at = input.iter().zip(&output).position(|(one, other)| one != other);
                let at = at.unwrap_or(input.len().min(output.len()));
                let (one, other) = (input.get(at), output.get(at));
                return Err(format!("the copy of partition {partition} differs at {at}: {one:?}, {other:?}"));
            }
            copied += output.len();
        }
        let count = |fate| seen.transactions.values().filter(|transaction| transaction.fate == fate).count();
        Ok(QueueReport {
            committed: count(Fate::Committed),
            aborted: count(Fate::Aborted),
            unknown: count(Fate::Unknown),
            copied,
            generations: seen.generations,
            ..QueueReport::default()
        })
    }
}

/// Makes the topics.
pub(super) async fn found(crowd: Arc<Crowd>) {
    for topic in [INPUT, OUTPUT] {
        let creatable = CreatableTopic {
            name: topic.into(),
            num_partitions: PARTITIONS,
            replication_factor: 3,
            // Wall clocks here are anywhere, and what is too old by one of them would be gone.
            configs: vec![CreatableTopicConfig { name: "retention.ms".into(), value: Some("-1".into()) }],
            ..Default::default()
        };
        let question =
            CreateTopicsRequest { topics: vec![creatable], timeout_ms: 1_000, validate_only: false };
        loop {
            let made: Result<CreateTopicsResponse, Lost> =
                crowd.wire.ask(fastrand::usize(..NODES), &question, 5).await;
            let exists = ErrorCode::TopicAlreadyExists as i16;
            if made.is_ok_and(|made| made.topics.iter().all(|topic| [0, exists].contains(&topic.error_code)))
            {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Every other client uses transaction version 2.
fn own_epochs(number: u64) -> bool {
    number % 2 == 1
}

/// Writes transactions, commits most of them and aborts the others.
pub(super) async fn write(crowd: Arc<Crowd>, writer: u64) {
    let mut number = 0;
    while let Some(mut producer) =
        Producer::begin(&crowd.wire, &format!("writer-{writer}"), own_epochs(writer), &crowd.writing).await
    {
        while !crowd.writing.is_off() {
            number += 1;
            let sound = one_transaction(&crowd, &mut producer, (writer, number)).await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..60))).await;
            if !sound {
                break;
            }
        }
        if crowd.writing.is_off() {
            return;
        }
    }
}

/// Answers whether the producer may go on under its identity.
async fn one_transaction(crowd: &Crowd, producer: &mut Producer<'_>, which: (u64, u64)) -> bool {
    let partitions = if fastrand::bool() { 0..PARTITIONS } else { 0..1 };
    let values: Vec<(i32, Vec<String>)> = partitions
        .map(|partition| {
            let count = fastrand::usize(1..4);
            let value = |at| format!("{}-{}-{partition}-{at}", which.0, which.1);
            (partition, (0..count).map(value).collect())
        })
        .collect();
    let flat =
        values.iter().flat_map(|(partition, values)| values.iter().map(|value| (*partition, value.clone())));
    let transaction = Transaction { fate: Fate::Unknown, values: flat.collect() };
    locked(&crowd.seen).transactions.insert(which, transaction);
    let mut written = true;
    for (partition, values) in &values {
        written = written && producer.write(INPUT, *partition, values).await.is_ok();
    }
    let commits = written && fastrand::u8(..3) > 0;
    let ended = producer.end(commits).await;
    crowd.note(
        which,
        match ended {
            Ok(()) if commits => Fate::Committed,
            Err(Lost::Unknown) if commits => Fate::Unknown,
            // It was not asked for, or refused and never anything else: it never happens.
            Ok(()) | Err(_) => Fate::Aborted,
        },
    );
    written && ended.is_ok()
}

/// One member of the group that copies.
pub(super) async fn copy(crowd: Arc<Crowd>, number: u64) {
    let mut member = group::Member::default();
    while let Some(mut producer) =
        Producer::begin(&crowd.wire, &format!("copier-{number}"), own_epochs(number), &crowd.copying).await
    {
        let mut sound = true;
        while sound && !crowd.copying.is_off() {
            let Ok(assigned) = member.join(&crowd.wire).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            crowd.note_generation();
            while sound && !crowd.copying.is_off() && member.beat(&crowd.wire).await.is_ok() {
                for partition in &assigned {
                    sound = sound && copy_some(&crowd, &mut producer, &member, *partition).await;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        if crowd.copying.is_off() {
            return;
        }
    }
}

/// Copies what comes next in one transaction with the offset. Answers whether the producer may go on under its identity.
async fn copy_some(
    crowd: &Crowd,
    producer: &mut Producer<'_>,
    member: &group::Member,
    partition: i32,
) -> bool {
    let Ok(from) = group::committed(&crowd.wire, INPUT, partition).await else { return true };
    crowd.note_copied(partition, from);
    let Ok(page) = log::fetch(&crowd.wire, INPUT, partition, from).await else { return true };
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

/// Looks on while things go wrong: what is seen once stays.
pub(super) async fn read(crowd: Arc<Crowd>, partition: i32) {
    let mut next = 0;
    while !crowd.writing.is_off() {
        match log::fetch(&crowd.wire, INPUT, partition, next).await {
            Ok(page) => {
                next = page.next;
                locked(&crowd.seen).glimpses.entry(partition).or_default().extend(page.values);
            }
            Err(lost) if lost.is(ErrorCode::OffsetOutOfRange) => {
                return crowd.wrong(format!("partition {partition} ends before {next}, which was read"));
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Reads all of a topic, once no transaction in it is open.
pub(super) async fn read_to_the_end(crowd: Arc<Crowd>, topic: &'static str) {
    for partition in 0..PARTITIONS {
        let (mut next, mut log, mut calm) = (0, Log::new(), 0);
        // A leader that has just begun does not know yet how much is committed: once is not enough.
        while calm < CALM {
            if let Ok(page) = log::fetch(&crowd.wire, topic, partition, next).await {
                let is_end = page.next == next && page.stable == page.end && next >= page.end;
                calm = if is_end { calm + 1 } else { 0 };
                next = page.next;
                log.extend(page.values);
            }
            tokio::time::sleep(PAUSE).await;
        }
        locked(&crowd.seen).logs.insert((topic, partition), log);
    }
}
