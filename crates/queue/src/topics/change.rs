//! Changes of topics that somebody asked for: checked against the view, written to the state repository by
//! compare-and-swap, and taken into the view at once.
//!
//! A topic and the places of its partitions appear together. What does not fit into one transaction is written before
//! the topic itself (and, when a topic goes, removed after it), where nobody looks for it: the topic's key is the one
//! that counts. That holds for a new topic, whose id nobody else has. One that is there already grows in steps, each of
//! them whole: its places are never written, nor removed, without a comparison of its record. Every step also compares
//! that those it counts as in sync still run; what a crash in between leaves behind is put right by the controller.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moim_base::{BrokerId, TopicId};
use moim_cluster::repository::MAX_TXN_OPS;
use moim_cluster::{Compare, Txn, TxnOutcome};
use moim_replica::controller::Maker;
use moim_replica::{Change, keys};
use moim_wire_kafka::ErrorCode;

use super::{
    TOPIC_PREFIX, Topic, TopicRecord, Topics, encode, illegible, parse, promised, refuse_name,
    refuse_repository,
};
use crate::config::{self, TopicConfig};
use crate::partition::Refused;
use crate::placement::{self, Place};

/// Room beside the partitions for the topic's own key, and for the comparisons.
const PER_TXN: usize = MAX_TXN_OPS - 1;
/// How long to let others finish.
pub(crate) const PAUSE: Duration = Duration::from_millis(30);
/// How often a change is tried again because somebody else changed the same topic.
pub(crate) const TRIES: usize = 8;
/// How long the view may take to see what the repository says already.
const CATCH_UP: Duration = Duration::from_secs(5);

/// What is asked for when a topic is made.
#[derive(Clone)]
pub(crate) struct NewTopic {
    pub(crate) name: String,
    pub(crate) partitions: i32,
    /// How many replicas; nobody said when there is none, and then it follows the size of the cluster.
    pub(crate) replication_factor: Option<i16>,
    pub(crate) configs: BTreeMap<String, String>,
    /// The replicas of each partition, where the client says so.
    pub(crate) assignment: Option<Vec<Vec<BrokerId>>>,
}

impl NewTopic {
    /// The factor it gets.
    pub(crate) fn factor(&self, maker: &Maker) -> i16 {
        let assigned = self.assignment.as_ref().and_then(|all| all.first()).map(|nodes| nodes.len() as i16);
        let asked = assigned.or(self.replication_factor);
        asked.unwrap_or_else(|| i16::try_from(maker.default_factor()).unwrap_or(1))
    }
}

impl Topics {
    /// Says why a topic like this cannot be made, or nothing.
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

    /// Makes a topic; it is durable when this returns. `Err` with [`contended`] when a broker came or went meanwhile.
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
            None => self.deal(&mut maker, new.partitions as usize, factor),
        };
        let places = self.first_records(id, 0, nodes, &record.configs, &maker)?;
        let key = format!("{TOPIC_PREFIX}{}", new.name);
        let guard = Compare::Absent(key.clone());
        let written = self.write_places(places, guard, Txn::new().put(key.clone(), encode(&record))).await?;
        let Some((revision, places)) = written else {
            let there = self.repository.get(&key).await.map_err(refuse_repository)?.is_some();
            return Err(if there { exists(&new.name) } else { contended() });
        };
        let topic = self.on_topic(&new.name, &record, revision)?;
        self.take_in_own(&topic, places)?;
        tracing::info!(topic = new.name, partitions = new.partitions, factor, "created a topic");
        Ok(topic)
    }

    /// The first records of new partitions from `first` on.
    fn first_records(
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
            let change = maker.create(placement::id(id, index), nodes, min_isr, promised(&config));
            change.ok_or_else(|| {
                Refused::new(ErrorCode::InvalidReplicaAssignment, "None of the brokers of a partition runs.")
            })
        };
        (first..).zip(nodes).map(record).collect()
    }

    /// Writes the first records of partitions and, in the last transaction and only if `guard` holds, `last`. Gives the
    /// revision of that one and every record with its own. More than fit into one transaction only under an id that
    /// nobody else has: those before the last are removed without a comparison after a conflict.
    async fn write_places(
        &self,
        mut places: Vec<Change>,
        guard: Compare,
        last: Txn,
    ) -> Result<Option<(i64, Vec<(i32, Place)>)>, Refused> {
        let mut written = Vec::with_capacity(places.len());
        let (mut guard, mut last) = (Some(guard), Some(last));
        let early = places.len().saturating_sub(PER_TXN);
        let mut rest = places.split_off(early);
        let id = rest.first().map(|change| change.partition.topic).unwrap_or_default();
        let mut chunks: Vec<Vec<Change>> = places.chunks(PER_TXN).map(<[Change]>::to_vec).collect();
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
                    let place = |change: Change| {
                        let index = i32::try_from(change.partition.index).unwrap_or(i32::MAX);
                        change.next.map(|record| (index, Place::new(record, revision)))
                    };
                    written.extend(chunk.into_iter().filter_map(place));
                    if is_last {
                        return Ok(Some((revision, written)));
                    }
                }
                TxnOutcome::Conflict { .. } => {
                    self.forget_places(id, written.iter().map(|(index, _)| *index)).await;
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Removes records nobody looks for any more. What is left behind by a failure here harms nobody.
    async fn forget_places(&self, id: TopicId, indexes: impl Iterator<Item = i32>) {
        let keys: Vec<String> = indexes.map(|index| placement::key(id, index)).collect();
        for chunk in keys.chunks(MAX_TXN_OPS) {
            let txn = chunk.iter().fold(Txn::new(), |txn, key| txn.delete(key.clone()));
            if let Err(error) = self.repository.txn(txn).await {
                tracing::warn!(topic = %id, %error, "records of partitions that are gone were left behind");
            }
        }
    }

    fn take_in_own(&self, topic: &Topic, places: Vec<(i32, Place)>) -> Result<(), Refused> {
        places.into_iter().try_for_each(|(index, place)| self.on_place(topic.id, index, place))
    }

    /// Chooses the nodes of new partitions: evenly, what is there counted.
    fn deal(&self, maker: &mut Maker, count: usize, factor: i16) -> Vec<Vec<BrokerId>> {
        if maker.registered() > 1 {
            for topic in self.all() {
                for seat in topic.seats.load().iter() {
                    if let Some(record) = seat.place.load().record() {
                        maker.count(record);
                    }
                }
            }
        }
        (0..count).map(|_| maker.place(usize::from(factor.unsigned_abs()))).collect()
    }

    /// Makes one of the broker's own topics the first time somebody needs it: compacted, in small segments.
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
        for _ in 0..TRIES {
            let (record, revision) = self.expect_same(topic).await?;
            let with_it = record.partitions.min(PER_TXN as i32);
            let txn = (0..with_it)
                .fold(Txn::new().delete(key.clone()), |txn, index| {
                    txn.delete(placement::key(topic.id, index))
                })
                .when(Compare::ModRevision(key.clone(), revision));
            if let TxnOutcome::Done { revision } =
                self.repository.txn(txn).await.map_err(refuse_repository)?
            {
                self.on_topic_gone(&topic.name, revision);
                self.forget_places(topic.id, with_it..record.partitions).await;
                return Ok(());
            }
        }
        Err(contended())
    }

    /// Says why a topic cannot grow to `count` partitions, or nothing.
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

    /// New partitions are dealt out evenly, so this node speaks for its share of them.
    fn refuse_more(&self, partitions: usize, factor: i16, brokers: usize) -> Option<Refused> {
        let (_, have) = self.counts();
        let copies = partitions.saturating_mul(usize::from(factor.unsigned_abs()));
        (have + copies.div_ceil(brokers.max(1)) > self.max_partitions).then(|| {
            let why = format!("This node holds {have} partitions and may hold {}.", self.max_partitions);
            Refused::new(ErrorCode::PolicyViolation, why)
        })
    }

    /// Gives a topic more partitions, as many at a time as one transaction holds: what an error leaves behind is a
    /// topic that has grown by less.
    pub(crate) async fn grow(
        &self,
        topic: &Arc<Topic>,
        count: i32,
        maker: &(dyn Fn() -> Maker + Sync),
        places: Option<&[Vec<BrokerId>]>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        let (mut conflicts, mut grown) = (0, 0);
        while conflicts < TRIES {
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
            let nodes = match places {
                Some(places) if places.len() == grown + missing => places[grown..grown + step].to_vec(),
                // Somebody else grew it too: the nodes were named for other partitions.
                Some(_) => return Err(contended()),
                None => {
                    let brokers = i16::try_from(maker.registered()).unwrap_or(i16::MAX);
                    let factor = if record.factor_asked {
                        // New partitions are as safe as the old ones, or as safe as they can be now.
                        record.replication_factor.min(brokers)
                    } else {
                        i16::try_from(maker.default_factor()).unwrap_or(1)
                    };
                    self.deal(&mut maker, step, factor)
                }
            };
            let new = self.first_records(topic.id, record.partitions, nodes, &record.configs, &maker)?;
            record.partitions += step as i32;
            let guard = Compare::ModRevision(key.clone(), revision);
            let whole = Txn::new().put(key.clone(), encode(&record));
            let Some((revision, new)) = self.write_places(new, guard, whole).await? else {
                conflicts += 1;
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            self.on_topic(&topic.name, &record, revision)?;
            self.take_in_own(topic, new)?;
            grown += step;
        }
        Err(contended())
    }

    /// Changes a topic's settings: `change` gets them as they are.
    pub(crate) async fn configure(
        &self,
        topic: &Topic,
        change: impl Fn(&BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Refused>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        for _ in 0..TRIES {
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

    /// Brings the view of one topic up to date: somebody may have made or deleted it through another broker, and
    /// whoever asks here next must not be told otherwise.
    pub(crate) async fn catch_up(&self, name: &str) -> Result<(), Refused> {
        let key = format!("{TOPIC_PREFIX}{name}");
        let entry = self.repository.get(&key).await.map_err(refuse_repository)?;
        if let Some(entry) = entry {
            let _changing = self.changing.lock().await;
            let record = parse(&entry.value).ok_or_else(|| illegible("topic", name))?;
            return self.on_topic(name, &record, entry.mod_revision).map(|_| ());
        }
        // It is gone; the watch says so in a moment. Taking it out before the changes that came first are taken in
        // would bring it back.
        let gone = async {
            while self.get(name).is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(CATCH_UP, gone).await.map_err(|_| ErrorCode::RequestTimedOut.into())
    }
}

/// Adds the first records of partitions to a transaction, with what they count on.
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

/// What a change ends with that met another: worth another try.
pub(crate) fn contended() -> Refused {
    Refused::new(
        ErrorCode::UnknownServerError,
        "The topic or the cluster was changed by somebody else; try again.",
    )
}
