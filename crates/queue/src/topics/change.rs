//! Topic changes on client request: create, grow, delete, configure. A change is validated against the view, written
//! to the state repository by compare-and-swap, and applied to the view at once.
//!
//! A topic and its partition registrations appear together. Registrations that do not fit into one transaction are
//! written before the topic record (and removed after it when a topic is deleted), where no reader looks for them:
//! the topic's key is the one that counts. That holds for a new topic, whose id is unique. An existing topic grows in
//! atomic steps: its registrations are never written or removed without a comparison of its record. Every step also
//! compares that the brokers it counts as in sync are still live; the controller repairs what a crash in between
//! leaves behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moim_base::{BrokerId, TopicId};
use moim_replica::controller::Maker;
use moim_replica::{Change, keys};
use moim_state::repository::MAX_TXN_OPS;
use moim_state::{Compare, Txn, TxnOutcome};
use moim_wire_kafka::ErrorCode;

use super::{
    TOPIC_PREFIX, Topic, TopicRecord, Topics, encode, parse, promised, refuse_name, refuse_repository,
    undecodable,
};
use crate::config::{self, TopicConfig};
use crate::partition::Refused;
use crate::partition_registration::{self, PartitionRegistration};

/// Partition registrations per transaction: the topic's own key and the comparisons need the rest.
const PER_TXN: usize = MAX_TXN_OPS - 1;
/// Backoff before a contended change is retried.
pub(crate) const RETRY_BACKOFF: Duration = Duration::from_millis(30);
/// Maximum number of attempts of a change that conflicts with concurrent changes of the same topic.
pub(crate) const MAX_ATTEMPTS: usize = 8;
/// Timeout for the view to reach the state of the repository.
const CATCH_UP: Duration = Duration::from_secs(5);

/// A topic creation request.
#[derive(Clone)]
pub(crate) struct NewTopic {
    pub(crate) name: String,
    pub(crate) partitions: i32,
    /// The requested replication factor; `None` follows the size of the cluster.
    pub(crate) replication_factor: Option<i16>,
    pub(crate) configs: BTreeMap<String, String>,
    /// The requested replicas of each partition, if the client assigns them.
    pub(crate) assignment: Option<Vec<Vec<BrokerId>>>,
}

impl NewTopic {
    /// The effective replication factor.
    pub(crate) fn factor(&self, maker: &Maker) -> i16 {
        let assigned = self.assignment.as_ref().and_then(|all| all.first()).map(|nodes| nodes.len() as i16);
        let asked = assigned.or(self.replication_factor);
        asked.unwrap_or_else(|| i16::try_from(maker.default_factor()).unwrap_or(1))
    }
}

impl Topics {
    /// Returns the validation error of a topic creation, if it is invalid.
    pub(crate) fn refuse_new(&self, new: &NewTopic, maker: &Maker) -> Option<Refused> {
        if let Some(why) = refuse_name(&new.name) {
            return Some(Refused::new(ErrorCode::InvalidTopicException, why));
        }
        if self.get(&new.name).is_some() {
            return Some(exists(&new.name));
        }
        if !(1..=self.max_per_topic).contains(&new.partitions) {
            return Some(Refused::new(
                ErrorCode::InvalidPartitions,
                format!("Number of partitions must be between 1 and {}.", self.max_per_topic),
            ));
        }
        let (brokers, factor) = (maker.registered(), new.factor(maker));
        if let Some(refused) = self.refuse_more(new.partitions as usize, factor, brokers) {
            return Some(refused);
        }
        if factor < 1 {
            return Some(Refused::new(
                ErrorCode::InvalidReplicationFactor,
                "Replication factor must be larger than 0.",
            ));
        }
        if new.assignment.is_none() && usize::from(factor.unsigned_abs()) > brokers {
            let why = format!(
                "Unable to replicate the partition {factor} time(s): only {brokers} broker{} registered.",
                if brokers == 1 { " is" } else { "s are" }
            );
            return Some(Refused::new(ErrorCode::InvalidReplicationFactor, why));
        }
        config::refuse(&new.configs).map(|why| Refused::new(ErrorCode::InvalidConfig, why))
    }

    /// Creates a topic; it is durable when this returns. `Err` with [`contended`] if a broker joined or left
    /// meanwhile.
    pub(crate) async fn create(&self, new: NewTopic, mut maker: Maker) -> Result<Arc<Topic>, Refused> {
        self.catch_up(&new.name).await?;
        let _changing = self.changing.lock().await;
        if let Some(refused) = self.refuse_new(&new, &maker) {
            return Err(refused);
        }
        let id = TopicId(fastrand::u128(1 << 64..));
        let factor = new.factor(&maker);
        let record = TopicRecord {
            id: id.to_string(),
            partitions: new.partitions,
            replication_factor: factor,
            factor_asked: new.assignment.is_some() || new.replication_factor.is_some(),
            configs: new.configs,
        };
        let nodes = match new.assignment {
            Some(assignment) => assignment,
            None => self.assign_replicas(&mut maker, new.partitions as usize, factor),
        };
        let registrations = self.initial_records(id, 0, nodes, &record.configs, &maker)?;
        let key = format!("{TOPIC_PREFIX}{}", new.name);
        let guard = Compare::Absent(key.clone());
        let written = self
            .write_registrations(registrations, guard, Txn::new().put(key.clone(), encode(&record)))
            .await?;
        let Some((revision, registrations)) = written else {
            let there = self.repository.get(&key).await.map_err(refuse_repository)?.is_some();
            return Err(if there { exists(&new.name) } else { contended() });
        };
        let topic = self.on_topic(&new.name, &record, revision)?;
        self.apply_own(&topic, registrations)?;
        tracing::info!(topic = new.name, partitions = new.partitions, factor, "topic created");
        Ok(topic)
    }

    /// The initial registrations of new partitions from `first` on.
    fn initial_records(
        &self,
        id: TopicId,
        first: i32,
        nodes: Vec<Vec<BrokerId>>,
        configs: &BTreeMap<String, String>,
        maker: &Maker,
    ) -> Result<Vec<Change>, Refused> {
        let defaults = self.defaults.load();
        let config = TopicConfig::new(configs, &defaults);
        let min_isr = config::explicit("min.insync.replicas", configs, &defaults);
        let min_isr = min_isr.and_then(|value| value.parse().ok());
        let record = |(index, nodes): (i32, Vec<BrokerId>)| {
            let change =
                maker.create(partition_registration::id(id, index), nodes, min_isr, promised(&config));
            change.ok_or_else(|| {
                Refused::new(ErrorCode::InvalidReplicaAssignment, "None of the brokers of a partition runs.")
            })
        };
        (first..).zip(nodes).map(record).collect()
    }

    /// Writes the initial registrations of partitions and, in the last transaction and only if `guard` holds, `last`.
    /// Returns the revision of that transaction and every registration with its own revision. More registrations than
    /// fit into one transaction are allowed only under a unique new topic id: after a conflict those before the last
    /// are removed without a comparison.
    async fn write_registrations(
        &self,
        mut registrations: Vec<Change>,
        guard: Compare,
        last: Txn,
    ) -> Result<Option<(i64, Vec<(i32, PartitionRegistration)>)>, Refused> {
        let mut written = Vec::with_capacity(registrations.len());
        let (mut guard, mut last) = (Some(guard), Some(last));
        let first_chunk = registrations.len().saturating_sub(PER_TXN);
        let mut rest = registrations.split_off(first_chunk);
        let id = rest.first().map(|change| change.partition.topic).unwrap_or_default();
        let mut chunks: Vec<Vec<Change>> = registrations.chunks(PER_TXN).map(<[Change]>::to_vec).collect();
        chunks.push(std::mem::take(&mut rest));
        let count = chunks.len();
        for (at, chunk) in chunks.into_iter().enumerate() {
            let is_last = at + 1 == count;
            let mut txn = if is_last { last.take().unwrap_or_default() } else { Txn::new() };
            if let Some(guard) = guard.take_if(|_| is_last) {
                txn = txn.when(guard);
            }
            match self.repository.txn(with_records(txn, &chunk)).await.map_err(refuse_repository)? {
                TxnOutcome::Done { revision } => {
                    let registration = |change: Change| {
                        let index = i32::try_from(change.partition.index).unwrap_or(i32::MAX);
                        change.next.map(|record| (index, PartitionRegistration::new(record, revision)))
                    };
                    written.extend(chunk.into_iter().filter_map(registration));
                    if is_last {
                        return Ok(Some((revision, written)));
                    }
                }
                TxnOutcome::Conflict { .. } => {
                    self.remove_registrations(id, written.iter().map(|(index, _)| *index)).await;
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Removes unreferenced registrations. A failure leaves harmless records behind.
    async fn remove_registrations(&self, id: TopicId, indexes: impl Iterator<Item = i32>) {
        let keys: Vec<String> = indexes.map(|index| partition_registration::key(id, index)).collect();
        for chunk in keys.chunks(MAX_TXN_OPS) {
            let txn = chunk.iter().fold(Txn::new(), |txn, key| txn.delete(key.clone()));
            if let Err(error) = self.repository.txn(txn).await {
                tracing::warn!(topic = %id, %error, "stale partition registrations left behind");
            }
        }
    }

    fn apply_own(
        &self,
        topic: &Topic,
        registrations: Vec<(i32, PartitionRegistration)>,
    ) -> Result<(), Refused> {
        registrations
            .into_iter()
            .try_for_each(|(index, registration)| self.on_registration(topic.id, index, registration))
    }

    /// Chooses the replicas of new partitions evenly, existing partitions included in the count.
    fn assign_replicas(&self, maker: &mut Maker, count: usize, factor: i16) -> Vec<Vec<BrokerId>> {
        if maker.registered() > 1 {
            for topic in self.all() {
                for entry in topic.partitions.load().iter() {
                    if let Some(record) = entry.registration.load().record() {
                        maker.count(record);
                    }
                }
            }
        }
        (0..count).map(|_| maker.place(usize::from(factor.unsigned_abs()))).collect()
    }

    /// Creates an internal topic on first use: compacted, with small segments.
    pub(crate) async fn ensure_internal(
        &self,
        name: &str,
        partitions: i32,
        maker: Maker,
    ) -> Result<(), Refused> {
        if self.get(name).is_some() {
            return Ok(());
        }
        let configs = [("cleanup.policy", "compact"), ("segment.bytes", "104857600")];
        let new = NewTopic {
            name: name.to_owned(),
            partitions,
            replication_factor: None,
            assignment: None,
            configs: configs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        };
        match self.create(new, maker).await {
            Err(refused) if refused.code != ErrorCode::TopicAlreadyExists => Err(refused),
            _ => Ok(()),
        }
    }

    /// Deletes a topic: from the repository first, then its files.
    pub(crate) async fn delete(&self, topic: &Topic) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        for _ in 0..MAX_ATTEMPTS {
            let (record, revision) = self.expect_same(topic).await?;
            let with_it = record.partitions.min(PER_TXN as i32);
            let txn = (0..with_it)
                .fold(Txn::new().delete(key.clone()), |txn, index| {
                    txn.delete(partition_registration::key(topic.id, index))
                })
                .when(Compare::ModRevision(key.clone(), revision));
            if let TxnOutcome::Done { revision } =
                self.repository.txn(txn).await.map_err(refuse_repository)?
            {
                self.on_topic_deleted(&topic.name, revision);
                self.remove_registrations(topic.id, with_it..record.partitions).await;
                return Ok(());
            }
        }
        Err(contended())
    }

    /// Returns the validation error of growing a topic to `count` partitions, if any.
    pub(crate) fn refuse_growth(&self, topic: &Topic, count: i32, maker: &Maker) -> Option<Refused> {
        let have = topic.count();
        if count == have {
            return Some(Refused::new(
                ErrorCode::InvalidPartitions,
                format!("Topic already has {have} partition(s)."),
            ));
        }
        if count < have {
            return Some(Refused::new(
                ErrorCode::InvalidPartitions,
                format!(
                    "The topic {} currently has {have} partition(s); {count} would not be an increase.",
                    topic.name
                ),
            ));
        }
        if count > self.max_per_topic {
            let why = format!("A topic has at most {} partitions.", self.max_per_topic);
            return Some(Refused::new(ErrorCode::InvalidPartitions, why));
        }
        self.refuse_more((count - have) as usize, 1, maker.registered())
    }

    /// New partitions are spread evenly, so this node checks the limit for its share of them.
    fn refuse_more(&self, partitions: usize, factor: i16, brokers: usize) -> Option<Refused> {
        let (_, have) = self.counts();
        let added_replicas = partitions.saturating_mul(usize::from(factor.unsigned_abs()));
        (have + added_replicas.div_ceil(brokers.max(1)) > self.max_partitions).then(|| {
            let why = format!("This node holds {have} partitions and may hold {}.", self.max_partitions);
            Refused::new(ErrorCode::PolicyViolation, why)
        })
    }

    /// Adds partitions to a topic, as many at a time as one transaction holds: after an error the topic may have
    /// grown by fewer partitions.
    pub(crate) async fn grow(
        &self,
        topic: &Arc<Topic>,
        count: i32,
        maker: &(dyn Fn() -> Maker + Sync),
        registrations: Option<&[Vec<BrokerId>]>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        let (mut conflicts, mut grown) = (0, 0);
        while conflicts < MAX_ATTEMPTS {
            let (mut record, revision) = self.expect_same(topic).await?;
            self.on_topic(&topic.name, &record, revision)?;
            if grown > 0 && record.partitions >= count {
                return Ok(());
            }
            let mut maker = maker();
            if let Some(refused) = self.refuse_growth(topic, count, &maker) {
                return Err(refused);
            }
            let missing = (count - record.partitions) as usize;
            let step = missing.min(PER_TXN);
            let nodes = match registrations {
                Some(registrations) if registrations.len() == grown + missing => {
                    registrations[grown..grown + step].to_vec()
                }
                // A concurrent change grew the topic too: the assignment was made for other partitions.
                Some(_) => return Err(contended()),
                None => {
                    let brokers = i16::try_from(maker.registered()).unwrap_or(i16::MAX);
                    let factor = if record.factor_asked {
                        // New partitions get the factor of the old ones, or as many replicas as there are brokers.
                        record.replication_factor.min(brokers)
                    } else {
                        i16::try_from(maker.default_factor()).unwrap_or(1)
                    };
                    self.assign_replicas(&mut maker, step, factor)
                }
            };
            let new = self.initial_records(topic.id, record.partitions, nodes, &record.configs, &maker)?;
            record.partitions += step as i32;
            let guard = Compare::ModRevision(key.clone(), revision);
            let whole = Txn::new().put(key.clone(), encode(&record));
            let Some((revision, new)) = self.write_registrations(new, guard, whole).await? else {
                conflicts += 1;
                tokio::time::sleep(RETRY_BACKOFF).await;
                continue;
            };
            self.on_topic(&topic.name, &record, revision)?;
            self.apply_own(topic, new)?;
            grown += step;
        }
        Err(contended())
    }

    /// Changes a topic's settings: `change` gets the current ones.
    pub(crate) async fn configure(
        &self,
        topic: &Topic,
        change: impl Fn(&BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Refused>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        for _ in 0..MAX_ATTEMPTS {
            let (mut record, revision) = self.expect_same(topic).await?;
            record.configs = change(&record.configs)?;
            if let Some(why) = config::refuse(&record.configs) {
                return Err(Refused::new(ErrorCode::InvalidConfig, why));
            }
            let txn = Txn::new()
                .when(Compare::ModRevision(key.clone(), revision))
                .put(key.clone(), encode(&record));
            if let TxnOutcome::Done { revision } =
                self.repository.txn(txn).await.map_err(refuse_repository)?
            {
                return self.on_topic(&topic.name, &record, revision).map(|_| ());
            }
        }
        Err(contended())
    }

    async fn expect_same(&self, topic: &Topic) -> Result<(TopicRecord, i64), Refused> {
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        let entry = self.repository.get(&key).await.map_err(refuse_repository)?;
        entry
            .and_then(|e| parse(&e.value).map(|r| (r, e.mod_revision)))
            .filter(|(record, _)| record.id == topic.id.to_string())
            .ok_or_else(|| ErrorCode::UnknownTopicOrPartition.into())
    }

    /// Brings the view of one topic up to date: another broker may have created or deleted it, and the next request
    /// here must see that.
    pub(crate) async fn catch_up(&self, name: &str) -> Result<(), Refused> {
        let key = format!("{TOPIC_PREFIX}{name}");
        let entry = self.repository.get(&key).await.map_err(refuse_repository)?;
        if let Some(entry) = entry {
            let _changing = self.changing.lock().await;
            let record = parse(&entry.value).ok_or_else(|| undecodable("topic", name))?;
            return self.on_topic(name, &record, entry.mod_revision).map(|_| ());
        }
        // The topic is deleted; the watch will deliver that soon. Removing it before the earlier changes are applied
        // would bring it back.
        let gone = async {
            while self.get(name).is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(CATCH_UP, gone).await.map_err(|_| ErrorCode::RequestTimedOut.into())
    }
}

/// Adds the initial registrations of partitions to a transaction, with the comparisons they depend on.
fn with_records(mut txn: Txn, chunk: &[Change]) -> Txn {
    let mut members: Vec<_> = chunk.iter().flat_map(|change| change.members.iter().copied()).collect();
    members.sort_unstable();
    members.dedup();
    for (node, epoch) in members {
        txn = txn.when(Compare::CreateRevision(keys::member(node), epoch.0));
    }
    for change in chunk {
        if let Some(record) = &change.next {
            txn = txn.put(keys::partition(change.partition), record.encode());
        }
    }
    txn
}

fn exists(name: &str) -> Refused {
    Refused::new(ErrorCode::TopicAlreadyExists, format!("Topic '{name}' already exists."))
}

/// The error of a change that conflicts with a concurrent change; retriable.
pub(crate) fn contended() -> Refused {
    Refused::new(
        ErrorCode::UnknownServerError,
        "The topic or the cluster was changed concurrently; try again.",
    )
}
