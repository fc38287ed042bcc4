//! The topics of this node: what they are called, how they are set, which partitions they have.
//!
//! The state repository is the truth (key [`TOPIC_PREFIX`]`<name>`, JSON of [`TopicRecord`]); this is a view
//! of it with the open partitions attached. A topic is changed by compare-and-swap first and in the view
//! second, so a crash in between is mended by the next start.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

use arc_swap::ArcSwap;
use bytes::Bytes;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use moim_base::{Clock, TopicId};
use moim_cluster::{Expect, RepositoryError, StateRepository, Swap};
use moim_journal::{Durability, Framing, JournalId, JournalOptions, Store};
use moim_wire_kafka::ErrorCode;

use crate::broker::BrokerOptions;
use crate::config::{self, Defaults, TopicConfig};
use crate::framing::BatchFraming;
use crate::loops::{Loops, Wake};
use crate::partition::{Partition, Refused};

/// Where topics stand in the state repository.
pub(crate) const TOPIC_PREFIX: &str = "/moim/topics/";
/// The offsets and members of consumer groups.
pub const OFFSETS_TOPIC: &str = "__consumer_offsets";
/// The state of transactions.
pub const TRANSACTIONS_TOPIC: &str = "__transaction_state";

/// A topic as the state repository keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicRecord {
    pub(crate) id: String,
    pub(crate) partitions: i32,
    pub(crate) replication_factor: i16,
    pub(crate) configs: BTreeMap<String, String>,
}

/// A topic with its partitions.
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) id: TopicId,
    pub(crate) replication_factor: i16,
    /// The settings as their owner wrote them.
    pub(crate) configs: ArcSwap<BTreeMap<String, String>>,
    /// The same, parsed, over the broker's defaults; shared with the partitions.
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    pub(crate) partitions: ArcSwap<Vec<Arc<Partition>>>,
}

impl Topic {
    /// Whether only the broker itself writes to it.
    pub(crate) fn is_internal(&self) -> bool {
        is_internal(&self.name)
    }

    pub(crate) fn partition(&self, index: i32) -> Option<Arc<Partition>> {
        usize::try_from(index).ok().and_then(|i| self.partitions.load().get(i).cloned())
    }

    fn record(&self, partitions: i32, configs: BTreeMap<String, String>) -> TopicRecord {
        let replication_factor = self.replication_factor;
        TopicRecord { id: self.id.to_string(), partitions, replication_factor, configs }
    }
}

pub(crate) fn is_internal(name: &str) -> bool {
    name == OFFSETS_TOPIC || name == TRANSACTIONS_TOPIC
}

/// What is asked for when a topic is made.
pub(crate) struct NewTopic {
    pub(crate) name: String,
    pub(crate) partitions: i32,
    pub(crate) replication_factor: i16,
    pub(crate) configs: BTreeMap<String, String>,
}

#[derive(Default)]
struct Maps {
    by_name: HashMap<Arc<str>, Arc<Topic>>,
    by_id: HashMap<TopicId, Arc<Topic>>,
    /// By tag: what the journal reports progress for.
    by_tag: Vec<Option<Arc<Partition>>>,
    free_tags: Vec<usize>,
}

/// All topics.
pub(crate) struct Topics {
    repository: Arc<dyn StateRepository>,
    store: Arc<Store>,
    clock: Arc<dyn Clock>,
    loops: Arc<Loops>,
    framing: Arc<dyn Framing>,
    defaults: ArcSwap<Defaults>,
    max_per_topic: i32,
    max_partitions: usize,
    /// One change of the set of topics at a time.
    changing: tokio::sync::Mutex<()>,
    maps: RwLock<Maps>,
}

impl Topics {
    pub(crate) fn new(
        repository: Arc<dyn StateRepository>,
        store: Arc<Store>,
        clock: Arc<dyn Clock>,
        loops: Arc<Loops>,
        options: &BrokerOptions,
    ) -> Self {
        Self {
            repository,
            store,
            clock,
            loops,
            framing: Arc::new(BatchFraming),
            defaults: ArcSwap::from_pointee(options.topic_defaults.clone()),
            max_per_topic: options.max_partitions_per_topic,
            max_partitions: options.max_partitions,
            changing: tokio::sync::Mutex::new(()),
            maps: RwLock::default(),
        }
    }

    /// Opens every topic the repository knows and drops the journals of those it no longer does.
    pub(crate) async fn load(&self) -> Result<(), Refused> {
        let (revision, entries) = self.repository.list(TOPIC_PREFIX).await.map_err(refuse_repository)?;
        let journals = self.store.journals();
        if revision == 0 && journals.iter().any(|(_, folder)| folder.starts_with("queue/")) {
            // A repository that never held anything is not the one these journals were made with: nothing is
            // deleted on its word.
            let why = "there are journals of topics, but the state repository is new; is `coord/` missing?";
            return Err(Refused::new(ErrorCode::UnknownServerError, why));
        }
        let mut known = hashbrown::HashSet::new();
        for entry in entries {
            let name = &entry.key[TOPIC_PREFIX.len()..];
            let record = parse(&entry.value).ok_or_else(|| {
                Refused::new(
                    ErrorCode::UnknownServerError,
                    format!("topic {name} has a record that cannot be read"),
                )
            })?;
            let topic = self.open(name, &record)?;
            known.insert(topic.id.0);
            self.publish(topic);
        }
        for (id, folder) in journals {
            if folder.starts_with("queue/") && !known.contains(&id.incarnation) {
                tracing::info!(folder, "removing a journal whose topic is gone");
                self.store
                    .delete(id)
                    .map_err(|e| Refused::new(ErrorCode::KafkaStorageError, e.to_string()))?;
            }
        }
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Topic>> {
        self.read().by_name.get(name).cloned()
    }

    pub(crate) fn get_by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        self.read().by_id.get(&id).cloned()
    }

    pub(crate) fn partition(&self, topic: &str, index: i32) -> Option<Arc<Partition>> {
        self.read().by_name.get(topic)?.partition(index)
    }

    /// All topics, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Topic>> {
        let mut all: Vec<_> = self.read().by_name.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Calls `f` with the partition of each tag, under one lock.
    pub(crate) fn for_tags(&self, tags: &[(u64, i64)], mut f: impl FnMut(&Partition, i64)) {
        let maps = self.read();
        for (tag, end) in tags {
            if let Some(Some(partition)) = usize::try_from(*tag).ok().and_then(|t| maps.by_tag.get(t)) {
                f(partition, *end);
            }
        }
    }

    pub(crate) fn counts(&self) -> (usize, usize) {
        let maps = self.read();
        (maps.by_name.len(), maps.by_tag.len() - maps.free_tags.len())
    }

    pub(crate) fn defaults(&self) -> Arc<Defaults> {
        self.defaults.load_full()
    }

    /// Changes what topics fall back to; those that exist follow at once.
    pub(crate) fn set_defaults(&self, defaults: Defaults) {
        self.defaults.store(Arc::new(defaults));
        for topic in self.all() {
            self.apply_config(&topic, (**topic.configs.load()).clone());
        }
    }

    /// Says why a topic like this cannot be made, or nothing.
    pub(crate) fn refuse_new(&self, new: &NewTopic) -> Option<Refused> {
        if let Some(why) = refuse_name(&new.name) {
            return Some(Refused::new(ErrorCode::InvalidTopicException, why));
        }
        if self.get(&new.name).is_some() {
            return Some(Refused::new(
                ErrorCode::TopicAlreadyExists,
                format!("Topic '{}' already exists.", new.name),
            ));
        }
        if !(1..=self.max_per_topic).contains(&new.partitions) {
            return Some(Refused::new(
                ErrorCode::InvalidPartitions,
                format!("Number of partitions must be between 1 and {}.", self.max_per_topic),
            ));
        }
        if let Some(refused) = self.refuse_more(new.partitions as usize) {
            return Some(refused);
        }
        if new.replication_factor < 1 {
            return Some(Refused::new(
                ErrorCode::InvalidReplicationFactor,
                "Replication factor must be larger than 0.",
            ));
        }
        if new.replication_factor > 1 {
            return Some(Refused::new(
                ErrorCode::InvalidReplicationFactor,
                format!(
                    "Unable to replicate the partition {} time(s): only 1 broker is registered.",
                    new.replication_factor
                ),
            ));
        }
        config::refuse(&new.configs).map(|why| Refused::new(ErrorCode::InvalidConfig, why))
    }

    /// Makes a topic; it is durable when this returns.
    pub(crate) async fn create(&self, new: NewTopic) -> Result<Arc<Topic>, Refused> {
        let _changing = self.changing.lock().await;
        if let Some(refused) = self.refuse_new(&new) {
            return Err(refused);
        }
        let record = TopicRecord {
            id: TopicId(fastrand::u128(1 << 64..)).to_string(),
            partitions: new.partitions,
            replication_factor: new.replication_factor,
            configs: new.configs,
        };
        let key = format!("{TOPIC_PREFIX}{}", new.name);
        let swap = self.repository.compare_and_swap(&key, Expect::Absent, Some(encode(&record)), None);
        if let Swap::Conflict { .. } = swap.await.map_err(refuse_repository)? {
            return Err(Refused::new(
                ErrorCode::TopicAlreadyExists,
                format!("Topic '{}' already exists.", new.name),
            ));
        }
        let topic = self.open(&new.name, &record)?;
        tracing::info!(topic = new.name, partitions = new.partitions, "created a topic");
        Ok(self.publish(topic))
    }

    /// Makes one of the broker's own topics the first time somebody needs it: compacted, in small segments.
    pub(crate) async fn ensure_internal(&self, name: &str, partitions: usize) -> Result<(), ErrorCode> {
        if self.get(name).is_some() {
            return Ok(());
        }
        let configs = [("cleanup.policy", "compact"), ("segment.bytes", "104857600")];
        let new = NewTopic {
            name: name.to_owned(),
            partitions: i32::try_from(partitions).unwrap_or(i32::MAX),
            replication_factor: 1,
            configs: configs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        };
        match self.create(new).await {
            Ok(_) => Ok(()),
            Err(refused) if refused.code == ErrorCode::TopicAlreadyExists => Ok(()),
            Err(refused) => {
                tracing::warn!(topic = name, %refused, "cannot make an internal topic");
                Err(ErrorCode::CoordinatorNotAvailable)
            }
        }
    }

    /// Deletes a topic: from the repository first, then its files.
    pub(crate) async fn delete(&self, topic: &Topic) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        self.expect_same(topic).await?;
        self.repository.compare_and_swap(&key, Expect::Any, None, None).await.map_err(refuse_repository)?;
        {
            let mut maps = self.write();
            maps.by_name.remove(&topic.name);
            maps.by_id.remove(&topic.id);
            for partition in topic.partitions.load().iter() {
                maps.by_tag[partition.tag] = None;
                maps.free_tags.push(partition.tag);
            }
        }
        let mut wakes: Vec<Arc<Wake>> = Vec::new();
        for partition in topic.partitions.load().iter() {
            partition.close(&mut wakes);
            let id = journal_id(topic.id, partition.index);
            if let Err(error) = self.store.delete(id) {
                tracing::error!(topic = %topic.name, partition = partition.index, %error, "could not remove a journal");
            }
        }
        self.loops.wake(None, &mut wakes);
        tracing::info!(topic = %topic.name, "deleted a topic");
        Ok(())
    }

    /// Says why a topic cannot grow to `count` partitions, or nothing.
    pub(crate) fn refuse_growth(&self, topic: &Topic, count: i32) -> Option<Refused> {
        let have = topic.partitions.load().len() as i32;
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
        self.refuse_more((count - have) as usize)
    }

    fn refuse_more(&self, partitions: usize) -> Option<Refused> {
        let (_, have) = self.counts();
        (have + partitions > self.max_partitions).then(|| {
            let why = format!("This node holds {have} partitions and may hold {}.", self.max_partitions);
            Refused::new(ErrorCode::PolicyViolation, why)
        })
    }

    /// Gives a topic more partitions.
    pub(crate) async fn grow(&self, topic: &Topic, count: i32) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        if let Some(refused) = self.refuse_growth(topic, count) {
            return Err(refused);
        }
        self.swap(topic, |record| record.partitions = count).await?;
        let mut partitions = (**topic.partitions.load()).clone();
        for index in partitions.len() as i32..count {
            partitions.push(self.open_partition(&topic.name, topic.id, index, &topic.config)?);
        }
        topic.partitions.store(Arc::new(partitions));
        Ok(())
    }

    /// Replaces a topic's settings.
    pub(crate) async fn configure(
        &self,
        topic: &Topic,
        configs: BTreeMap<String, String>,
    ) -> Result<(), Refused> {
        if let Some(why) = config::refuse(&configs) {
            return Err(Refused::new(ErrorCode::InvalidConfig, why));
        }
        let _changing = self.changing.lock().await;
        self.swap(topic, |record| record.configs.clone_from(&configs)).await?;
        self.apply_config(topic, configs);
        Ok(())
    }

    fn apply_config(&self, topic: &Topic, configs: BTreeMap<String, String>) {
        let parsed = TopicConfig::new(&configs, &self.defaults.load());
        for partition in topic.partitions.load().iter() {
            partition.journal.set_options(durability(&parsed), parsed.segment_bytes);
        }
        topic.configs.store(Arc::new(configs));
        topic.config.store(Arc::new(parsed));
    }

    async fn expect_same(&self, topic: &Topic) -> Result<(TopicRecord, i64), Refused> {
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        let entry = self.repository.get(&key).await.map_err(refuse_repository)?;
        entry
            .and_then(|e| parse(&e.value).map(|r| (r, e.mod_revision)))
            .filter(|(record, _)| record.id == topic.id.to_string())
            .ok_or_else(|| ErrorCode::UnknownTopicOrPartition.into())
    }

    async fn swap(&self, topic: &Topic, change: impl FnOnce(&mut TopicRecord)) -> Result<(), Refused> {
        let (_, revision) = self.expect_same(topic).await?;
        let mut record = topic.record(topic.partitions.load().len() as i32, (**topic.configs.load()).clone());
        change(&mut record);
        let key = format!("{TOPIC_PREFIX}{}", topic.name);
        let swap =
            self.repository.compare_and_swap(&key, Expect::Revision(revision), Some(encode(&record)), None);
        match swap.await.map_err(refuse_repository)? {
            Swap::Done { .. } => Ok(()),
            Swap::Conflict { .. } => Err(Refused::new(
                ErrorCode::UnknownServerError,
                "The topic was changed by somebody else; try again.",
            )),
        }
    }

    fn open(&self, name: &str, record: &TopicRecord) -> Result<Topic, Refused> {
        let id = TopicId::parse(&record.id).ok_or_else(|| {
            Refused::new(ErrorCode::UnknownServerError, format!("topic {name} has an illegible id"))
        })?;
        let name: Arc<str> = name.into();
        let config = TopicConfig::new(&record.configs, &self.defaults.load());
        let config = Arc::new(ArcSwap::from_pointee(config));
        let partitions = (0..record.partitions)
            .map(|index| self.open_partition(&name, id, index, &config))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Topic {
            name,
            id,
            replication_factor: record.replication_factor,
            configs: ArcSwap::from_pointee(record.configs.clone()),
            config,
            partitions: ArcSwap::from_pointee(partitions),
        })
    }

    fn open_partition(
        &self,
        topic: &Arc<str>,
        id: TopicId,
        index: i32,
        config: &Arc<ArcSwap<TopicConfig>>,
    ) -> Result<Arc<Partition>, Refused> {
        let storage = |e: &dyn std::fmt::Display| {
            Refused::new(ErrorCode::KafkaStorageError, format!("{topic}-{index}: {e}"))
        };
        let tag = self.take_tag();
        let parsed = config.load();
        let options = JournalOptions {
            folder: format!("queue/{topic}/Partition-{index}"),
            framing: Arc::clone(&self.framing),
            durability: durability(&parsed),
            segment_bytes: parsed.segment_bytes,
            tag: tag as u64,
        };
        let journal = self.store.journal(journal_id(id, index), options).map_err(|e| storage(&e))?;
        let unclean = !self.store.was_clean();
        let now_ms = self.clock.wall_ms();
        let partition = Partition::open(
            Arc::clone(topic),
            id,
            index,
            (tag, journal),
            Arc::clone(config),
            unclean,
            now_ms,
        )
        .map_err(|e| storage(&e))?;
        let partition = Arc::new(partition);
        self.write().by_tag[tag] = Some(Arc::clone(&partition));
        Ok(partition)
    }

    fn take_tag(&self) -> usize {
        let mut maps = self.write();
        maps.free_tags.pop().unwrap_or_else(|| {
            maps.by_tag.push(None);
            maps.by_tag.len() - 1
        })
    }

    fn publish(&self, topic: Topic) -> Arc<Topic> {
        let topic = Arc::new(topic);
        let mut maps = self.write();
        maps.by_id.insert(topic.id, Arc::clone(&topic));
        maps.by_name.insert(Arc::clone(&topic.name), Arc::clone(&topic));
        topic
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Maps> {
        self.maps.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Maps> {
        self.maps.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn durability(config: &TopicConfig) -> Durability {
    if config.replicated_durability { Durability::Replicated } else { Durability::Fsync }
}

fn journal_id(id: TopicId, index: i32) -> JournalId {
    JournalId { incarnation: id.0, part: index.unsigned_abs() }
}

fn encode(record: &TopicRecord) -> Bytes {
    Bytes::from(serde_json::to_vec(record).unwrap_or_default())
}

fn parse(value: &[u8]) -> Option<TopicRecord> {
    serde_json::from_slice(value).ok()
}

pub(crate) fn refuse_repository(error: RepositoryError) -> Refused {
    let code = match &error {
        RepositoryError::Unavailable(_) => ErrorCode::KafkaStorageError,
        RepositoryError::Unknown => ErrorCode::RequestTimedOut,
        RepositoryError::Invalid(_) => ErrorCode::InvalidRequest,
        _ => ErrorCode::UnknownServerError,
    };
    Refused::new(code, error.to_string())
}

/// Says why a topic cannot have this name, or nothing.
pub(crate) fn refuse_name(name: &str) -> Option<String> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() {
        Some("Topic name is invalid: the empty string is not allowed".into())
    } else if name == "." || name == ".." {
        Some(format!("Topic name is invalid: '{name}' is not allowed"))
    } else if name.len() > 249 {
        Some(format!(
            "Topic name is invalid: the length of '{name}' is longer than the max allowed length 249"
        ))
    } else if !name.bytes().all(legal) {
        Some(format!(
            "Topic name is invalid: '{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_data_folder_are_refused() {
        for bad in ["", ".", "..", "a/b", "a b", "한글", "a\0", &"x".repeat(250)] {
            assert!(refuse_name(bad).is_some(), "{bad}");
        }
        for good in ["orders", "a.b_c-9", "...", &"x".repeat(249)] {
            assert_eq!(refuse_name(good), None, "{good}");
        }
    }

    #[test]
    fn the_record_has_the_stored_form() {
        let record = TopicRecord {
            id: TopicId(7).to_string(),
            partitions: 3,
            replication_factor: 1,
            configs: BTreeMap::from([("retention.ms".to_owned(), "1000".to_owned())]),
        };
        let text = r#"{"id":"00000000000000000000000000000007","partitions":3,"replication_factor":1,"configs":{"retention.ms":"1000"}}"#;
        assert_eq!(encode(&record), text.as_bytes());
        assert_eq!(parse(text.as_bytes()), Some(record));
    }
}
