//! The topics of the cluster: names, settings and partition registrations.
//!
//! The state repository is the source of truth (keys [`TOPIC_PREFIX`]`<name>`, JSON of [`TopicRecord`], and one key
//! per partition, see [`crate::partition_registration`]); this is a view of it, with the replicas on this node
//! attached. The view changes in one way: a record that was read or written is applied ([`Topics::on_topic`],
//! [`Topics::on_registration`], [`Topics::on_topic_deleted`]) under the lock `changing`, and never one that is older
//! than the known record. So it does not matter which node made a change, nor whether the writer or the watch
//! delivers it first. A node that crashed after a change and before it applied it does so at its next start.
//!
//! A node holds exactly the replicas that the partition registrations assign to it. Whether a replica leads is
//! decided by the replica driver, which gets every registration of a local replica.
//!
//! Follow-up work of a change (coordinators that load or unload) is queued as [`TopicEvent`] for the broker.

mod change;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

use moim_base::{BrokerId, Clock, TopicId};
use moim_journal::{Durability, Framing, Journal, JournalError, JournalId, JournalOptions, Store};
use moim_replica::driver::Driver;
use moim_replica::{InSync, ResetPolicy};
use moim_state::{Entry, RepositoryError, StateRepository};
use moim_wire_kafka::ErrorCode;

use crate::broker::BrokerOptions;
use crate::completions::Completions;
use crate::config::{Defaults, TopicConfig};
use crate::framing::BatchFraming;
use crate::loops::{Loops, lock};
use crate::partition::{Partition, PartitionContext, Refused, ReplicaOwner, RoleChange};
use crate::partition_registration::{self, PartitionRegistration};

pub(crate) use change::{MAX_ATTEMPTS, NewTopic, RETRY_BACKOFF, contended};

/// Key prefix of topic records in the state repository.
pub(crate) const TOPIC_PREFIX: &str = "/moim/topics/";
/// The internal topic of committed offsets and group metadata.
pub const OFFSETS_TOPIC: &str = "__consumer_offsets";
/// The internal topic of transaction state.
pub const TRANSACTIONS_TOPIC: &str = "__transaction_state";

/// A topic record in the state repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicRecord {
    pub(crate) id: String,
    pub(crate) partitions: i32,
    pub(crate) replication_factor: i16,
    /// True if a client requested the replication factor; otherwise the factor follows the size of the cluster.
    #[serde(default = "default_factor_asked")]
    pub(crate) factor_asked: bool,
    pub(crate) configs: BTreeMap<String, String>,
}

fn default_factor_asked() -> bool {
    true
}

/// A partition of a topic, with or without a replica on this node.
pub(crate) struct PartitionEntry {
    pub(crate) index: i32,
    registration: ArcSwap<PartitionRegistration>,
    /// Invariant: set exactly while `registration` names this node among the replicas.
    local: ArcSwapOption<Partition>,
}

impl PartitionEntry {
    fn new(index: i32) -> Arc<Self> {
        Arc::new(Self { index, registration: ArcSwap::default(), local: ArcSwapOption::empty() })
    }

    /// The current registration.
    pub(crate) fn registration(&self) -> Arc<PartitionRegistration> {
        self.registration.load_full()
    }

    /// The replica on this node, if any.
    pub(crate) fn replica(&self) -> Option<Arc<Partition>> {
        self.local.load_full()
    }
}

/// A topic with its partitions.
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) id: TopicId,
    /// The topic's own settings, as text.
    pub(crate) configs: ArcSwap<BTreeMap<String, String>>,
    /// The parsed settings over the broker defaults; shared with the partitions.
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    pub(crate) partitions: ArcSwap<Vec<Arc<PartitionEntry>>>,
    /// The mod revision of the applied topic record.
    revision: AtomicI64,
}

impl Topic {
    /// True if only the broker writes to the topic.
    pub(crate) fn is_internal(&self) -> bool {
        is_internal(&self.name)
    }

    /// Number of partitions, local or not.
    pub(crate) fn count(&self) -> i32 {
        self.partitions.load().len() as i32
    }

    /// True if the partition exists, local or not.
    pub(crate) fn has(&self, index: i32) -> bool {
        (0..self.count()).contains(&index)
    }

    pub(crate) fn entry(&self, index: i32) -> Option<Arc<PartitionEntry>> {
        usize::try_from(index).ok().and_then(|at| self.partitions.load().get(at).cloned())
    }

    /// A partition that this node leads, or the error for the client.
    pub(crate) fn partition(&self, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        let replica = self.replica(index)?;
        if replica.leading().is_some() { Ok(replica) } else { Err(ErrorCode::NotLeaderOrFollower) }
    }

    /// The local replica of a partition, leader or follower.
    pub(crate) fn replica(&self, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        let partitions = self.partitions.load();
        let entry = usize::try_from(index).ok().and_then(|at| partitions.get(at));
        let entry = entry.ok_or(ErrorCode::UnknownTopicOrPartition)?;
        entry.local.load_full().ok_or(ErrorCode::NotLeaderOrFollower)
    }

    /// All local replicas.
    pub(crate) fn replicas(&self) -> Vec<Arc<Partition>> {
        self.partitions.load().iter().filter_map(|entry| entry.replica()).collect()
    }
}

pub(crate) fn is_internal(name: &str) -> bool {
    name == OFFSETS_TOPIC || name == TRANSACTIONS_TOPIC
}

/// A topic change that the coordinators must follow.
pub(crate) enum TopicEvent {
    /// The topic is known now.
    Added(Arc<Topic>),
    /// The topic was deleted.
    Deleted(Arc<Topic>),
}

#[derive(Default)]
struct Maps {
    by_name: HashMap<Arc<str>, Arc<Topic>>,
    by_id: HashMap<TopicId, Arc<Topic>>,
    /// Partitions by journal tag, for durability notifications.
    by_tag: Vec<Option<Arc<Partition>>>,
    free_tags: Vec<usize>,
    /// Registrations of partitions that their topic does not have yet: a large topic is written in several
    /// transactions, the topic record last.
    pending_registrations: HashMap<TopicId, HashMap<i32, PartitionRegistration>>,
}

/// All topics.
pub(crate) struct Topics {
    me: BrokerId,
    repository: Arc<dyn StateRepository>,
    store: Arc<Store>,
    clock: Arc<dyn Clock>,
    loops: Arc<Loops>,
    framing: Arc<dyn Framing>,
    driver: Arc<Driver>,
    /// Role changes of partitions that hold coordinator state.
    pub(crate) roles: Completions<RoleChange>,
    defaults: ArcSwap<Defaults>,
    max_per_topic: i32,
    max_partitions: usize,
    /// Serializes changes of the view.
    changing: tokio::sync::Mutex<()>,
    maps: RwLock<Maps>,
    events: Mutex<Vec<TopicEvent>>,
}

impl Topics {
    pub(crate) fn new(
        repository: Arc<dyn StateRepository>,
        store: Arc<Store>,
        clock: Arc<dyn Clock>,
        loops: Arc<Loops>,
        driver: Arc<Driver>,
        options: &BrokerOptions,
    ) -> Self {
        Self {
            me: options.node_id,
            repository,
            store,
            clock,
            loops,
            framing: Arc::new(BatchFraming),
            driver,
            roles: Completions::default(),
            defaults: ArcSwap::from_pointee(options.topic_defaults.clone()),
            max_per_topic: options.max_partitions_per_topic,
            max_partitions: options.max_partitions,
            changing: tokio::sync::Mutex::new(()),
            maps: RwLock::default(),
            events: Mutex::default(),
        }
    }

    /// Applies a full listing of the repository, and drops what it no longer has. `first` is the node's start: then
    /// journals of deleted topics are removed too.
    ///
    /// A record that cannot be applied does not block the others; the first such error is returned at the end.
    pub(crate) async fn apply_listing(
        &self,
        entries: &[Entry],
        revision: i64,
        first: bool,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        if first {
            self.reject_foreign_repository(revision)?;
        }
        self.write().pending_registrations.clear();
        let mut applied = Ok(());
        // Registrations first: a topic then opens with all its partitions.
        for entry in entries {
            if let Some((topic, index)) = partition_registration::parse_key(&entry.key) {
                applied = applied.and(self.apply_registration(topic, index, entry));
            }
        }
        let mut known = HashSet::new();
        for entry in entries.iter().filter(|e| e.key.starts_with(TOPIC_PREFIX)) {
            known.insert(entry.key[TOPIC_PREFIX.len()..].to_owned());
            applied = applied.and(self.apply_topic(entry));
        }
        for topic in self.all() {
            if !known.contains(&*topic.name) {
                self.on_topic_deleted(&topic.name, revision);
            }
        }
        applied?;
        if first { self.remove_orphans(known.is_empty()) } else { Ok(()) }
    }

    /// Rejects a repository that never held anything: it is not the one these journals were created with, so nothing
    /// is deleted because of it.
    fn reject_foreign_repository(&self, revision: i64) -> Result<(), Refused> {
        let journals = self.store.journals();
        if revision == 0 && journals.iter().any(|(_, folder)| folder.starts_with("queue/")) {
            let why = "topic journals exist, but the state repository is new; is `coord/` missing?";
            return Err(Refused::new(ErrorCode::UnknownServerError, why));
        }
        Ok(())
    }

    /// Removes the journals of topics that were deleted, and of replicas that were moved away, while this node was
    /// offline.
    fn remove_orphans(&self, no_topics: bool) -> Result<(), Refused> {
        let orphans: Vec<_> = {
            let maps = self.read();
            let orphan = |id: &JournalId| {
                let Some(topic) = maps.by_id.get(&TopicId(id.incarnation)) else { return true };
                let registration = i32::try_from(id.part)
                    .ok()
                    .and_then(|index| topic.entry(index))
                    .map(|s| s.registration());
                registration
                    .is_some_and(|registration| registration.is_known() && !registration.is_on(self.me))
            };
            let journals = self.store.journals().into_iter();
            journals.filter(|(id, folder)| folder.starts_with("queue/") && orphan(id)).collect()
        };
        if no_topics && orphans.len() > 1 {
            tracing::warn!(journals = orphans.len(), "journals exist without any topic; nothing removed");
            return Ok(());
        }
        for (id, folder) in orphans {
            tracing::info!(folder, "orphan journal removed");
            self.store.delete(id).map_err(|e| Refused::new(ErrorCode::KafkaStorageError, e.to_string()))?;
        }
        Ok(())
    }

    /// Applies one put; false if the key is not about topics.
    pub(crate) async fn apply_put(&self, entry: &Entry) -> Result<bool, Refused> {
        if let Some((topic, index)) = partition_registration::parse_key(&entry.key) {
            let _changing = self.changing.lock().await;
            self.apply_registration(topic, index, entry)?;
            return Ok(true);
        }
        if entry.key.starts_with(TOPIC_PREFIX) {
            let _changing = self.changing.lock().await;
            self.apply_topic(entry)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Applies the deletion of a key at `revision`.
    pub(crate) async fn apply_delete(&self, key: &str, revision: i64) {
        if let Some(name) = key.strip_prefix(TOPIC_PREFIX) {
            let _changing = self.changing.lock().await;
            self.on_topic_deleted(name, revision);
        }
        if let Some((topic, index)) = partition_registration::parse_key(key) {
            // Partition registrations are deleted with their topic only, so the topic's deletion is what counts.
            let mut maps = self.write();
            let empty = maps.pending_registrations.get_mut(&topic).is_some_and(|registrations| {
                registrations.remove(&index);
                registrations.is_empty()
            });
            if empty {
                maps.pending_registrations.remove(&topic);
            }
        }
    }

    fn apply_topic(&self, entry: &Entry) -> Result<(), Refused> {
        let name = &entry.key[TOPIC_PREFIX.len()..];
        let record = parse(&entry.value).ok_or_else(|| undecodable("topic", name))?;
        self.on_topic(name, &record, entry.mod_revision).map(|_| ())
    }

    fn apply_registration(&self, topic: TopicId, index: i32, entry: &Entry) -> Result<(), Refused> {
        let registration = PartitionRegistration::decode(&entry.value, entry.mod_revision)
            .ok_or_else(|| undecodable("partition", &entry.key))?;
        self.on_registration(topic, index, registration)
    }

    /// Applies a topic record of `revision`.
    fn on_topic(&self, name: &str, record: &TopicRecord, revision: i64) -> Result<Arc<Topic>, Refused> {
        let id = TopicId::parse(&record.id).ok_or_else(|| undecodable("topic", name))?;
        if let Some(topic) = self.get(name) {
            if revision <= topic.revision.load(Ordering::Acquire) {
                return Ok(topic);
            }
            if topic.id == id {
                topic.revision.store(revision, Ordering::Release);
                self.grow_to(&topic, record.partitions)?;
                if **topic.configs.load() != record.configs {
                    self.apply_config(&topic, record.configs.clone());
                }
                return Ok(topic);
            }
            // Deleted and recreated, and only the recreation was seen.
            self.on_topic_deleted(name, revision);
        }
        let config = TopicConfig::new(&record.configs, &self.defaults.load());
        let topic = Arc::new(Topic {
            name: name.into(),
            id,
            configs: ArcSwap::from_pointee(record.configs.clone()),
            config: Arc::new(ArcSwap::from_pointee(config)),
            partitions: ArcSwap::default(),
            revision: AtomicI64::new(revision),
        });
        {
            let mut maps = self.write();
            maps.by_id.insert(topic.id, Arc::clone(&topic));
            maps.by_name.insert(Arc::clone(&topic.name), Arc::clone(&topic));
        }
        lock(&self.events).push(TopicEvent::Added(Arc::clone(&topic)));
        self.grow_to(&topic, record.partitions)?;
        Ok(topic)
    }

    fn grow_to(&self, topic: &Arc<Topic>, count: i32) -> Result<(), Refused> {
        let have = topic.count();
        if count <= have {
            return Ok(());
        }
        let partitions: Vec<_> =
            topic.partitions.load().iter().cloned().chain((have..count).map(PartitionEntry::new)).collect();
        topic.partitions.store(Arc::new(partitions));
        let pending_registrations = self.write().pending_registrations.remove(&topic.id).unwrap_or_default();
        let mut pending_registrations: Vec<_> = pending_registrations.into_iter().collect();
        pending_registrations.sort_unstable_by_key(|(index, _)| *index);
        let mut applied = Ok(());
        for (index, registration) in pending_registrations {
            applied = applied.and(self.on_registration(topic.id, index, registration));
        }
        applied
    }

    /// Applies a partition registration. If this node is assigned a replica and cannot open it, the registration is
    /// not applied either: the next listing tries again.
    fn on_registration(
        &self,
        topic: TopicId,
        index: i32,
        registration: PartitionRegistration,
    ) -> Result<(), Refused> {
        let Some((topic, entry)) = self.get_by_id(topic).and_then(|t| t.entry(index).map(|entry| (t, entry)))
        else {
            let mut maps = self.write();
            let known = maps.pending_registrations.entry(topic).or_default().entry(index).or_default();
            if registration.revision > known.revision {
                *known = registration;
            }
            return Ok(());
        };
        if registration.revision <= entry.registration.load().revision {
            return Ok(());
        }
        let (mine, record) = (registration.is_on(self.me), registration.versioned());
        if mine && entry.replica().is_none() {
            // Before the registration is applied: opening the replica may fail.
            let replica = self.open_replica(&topic, &entry, &registration)?;
            entry.local.store(Some(replica));
        }
        entry.registration.store(Arc::new(registration));
        if mine {
            if let Some(record) = record {
                self.driver.on_record(partition_registration::id(topic.id, index), record);
            }
        } else if let Some(replica) = entry.local.swap(None) {
            tracing::info!(topic = %topic.name, partition = index, "replica removed: reassigned to other brokers");
            self.close_replica(&replica, ErrorCode::NotLeaderOrFollower);
            self.delete_journal(&topic.name, topic.id, index);
        }
        Ok(())
    }

    /// Applies the deletion of a topic at `revision`: closes its local replicas and removes their files.
    fn on_topic_deleted(&self, name: &str, revision: i64) {
        let Some(topic) = self.get(name) else { return };
        if revision <= topic.revision.load(Ordering::Acquire) {
            return;
        }
        {
            let mut maps = self.write();
            maps.by_name.remove(&topic.name);
            maps.by_id.remove(&topic.id);
        }
        for entry in topic.partitions.load().iter() {
            if let Some(replica) = entry.local.swap(None) {
                self.close_replica(&replica, ErrorCode::UnknownTopicOrPartition);
            }
            if entry.registration.load().is_on(self.me) {
                self.delete_journal(name, topic.id, entry.index);
            }
        }
        tracing::info!(topic = name, "topic deleted");
        lock(&self.events).push(TopicEvent::Deleted(topic));
    }

    /// Closes a replica and fails every request that waits for it.
    fn close_replica(&self, replica: &Arc<Partition>, code: ErrorCode) {
        // First, so that nothing is appended to a log that is being deleted.
        self.driver.detach(partition_registration::id(replica.topic_id, replica.index));
        {
            let mut maps = self.write();
            maps.by_tag[replica.tag] = None;
            maps.free_tags.push(replica.tag);
        }
        replica.close(code);
    }

    fn delete_journal(&self, topic: &str, id: TopicId, partition: i32) {
        if let Err(error) = self.store.delete(journal_id(id, partition)) {
            tracing::error!(topic, partition, %error, "journal removal failed");
        }
    }

    /// The topic events since the last call, in order.
    pub(crate) fn take_events(&self) -> Vec<TopicEvent> {
        std::mem::take(&mut *lock(&self.events))
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Topic>> {
        self.read().by_name.get(name).cloned()
    }

    pub(crate) fn get_by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        self.read().by_id.get(&id).cloned()
    }

    /// A partition that this node leads, or the error for the client.
    pub(crate) fn partition(&self, topic: &str, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        self.read().by_name.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?.partition(index)
    }

    /// The local replica of a partition, leader or follower, or the error for the client.
    pub(crate) fn replica(&self, topic: &str, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        self.read().by_name.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?.replica(index)
    }

    /// True if the partition exists, local or not.
    pub(crate) fn has(&self, topic: &str, index: i32) -> bool {
        self.read().by_name.get(topic).is_some_and(|t| t.has(index))
    }

    /// True if the state repository has no such partition. The view of this node may be behind the repository.
    pub(crate) async fn is_deleted(&self, topic: &str, index: i32) -> Result<bool, Refused> {
        let key = format!("{TOPIC_PREFIX}{topic}");
        let Some(entry) = self.repository.get(&key).await.map_err(refuse_repository)? else {
            return Ok(true);
        };
        let record = parse(&entry.value).ok_or_else(|| undecodable("topic", topic))?;
        Ok(index >= record.partitions)
    }

    /// All topics, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Topic>> {
        let mut all: Vec<_> = self.read().by_name.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The local replicas of these journal tags.
    pub(crate) fn by_tags(&self, tags: &[(u64, i64)]) -> Vec<Arc<Partition>> {
        let maps = self.read();
        let replica = |(tag, _): &(u64, i64)| maps.by_tag.get(usize::try_from(*tag).ok()?)?.clone();
        tags.iter().filter_map(replica).collect()
    }

    /// Number of topics in the cluster and of partitions on this node.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let maps = self.read();
        (maps.by_name.len(), maps.by_tag.len() - maps.free_tags.len())
    }

    pub(crate) fn defaults(&self) -> Arc<Defaults> {
        self.defaults.load_full()
    }

    /// Changes the broker defaults of topic settings; existing topics follow at once.
    pub(crate) fn set_defaults(&self, defaults: Defaults) {
        self.defaults.store(Arc::new(defaults));
        for topic in self.all() {
            self.apply_config(&topic, (**topic.configs.load()).clone());
        }
    }

    fn apply_config(&self, topic: &Topic, configs: BTreeMap<String, String>) {
        let parsed = TopicConfig::new(&configs, &self.defaults.load());
        for replica in topic.replicas() {
            replica.journal.set_options(durability(&parsed), parsed.segment_bytes);
            if let Some(replicated) = replica.replicated() {
                replicated.set_durability(promised(&parsed));
            }
        }
        topic.configs.store(Arc::new(configs));
        topic.config.store(Arc::new(parsed));
    }

    /// Opens the journal of a replica and attaches it to the replica driver.
    fn open_replica(
        &self,
        topic: &Topic,
        entry: &PartitionEntry,
        registration: &PartitionRegistration,
    ) -> Result<Arc<Partition>, Refused> {
        let (name, index) = (&topic.name, entry.index);
        let storage = |e: &dyn std::fmt::Display| {
            Refused::new(ErrorCode::KafkaStorageError, format!("{name}-{index}: {e}"))
        };
        let tag = self.take_tag();
        let parsed = topic.config.load();
        let options = JournalOptions {
            folder: format!("queue/{name}/Partition-{index}"),
            framing: Arc::clone(&self.framing),
            durability: durability(&parsed),
            segment_bytes: parsed.segment_bytes,
            tag: tag as u64,
        };
        let context = PartitionContext {
            loops: Arc::clone(&self.loops),
            clock: Arc::clone(&self.clock),
            roles: self.roles.clone(),
            is_coordinator_log: topic.is_internal(),
        };
        let config = Arc::clone(&topic.config);
        let opened = self.open_journal(topic, index, options, registration).map_err(|e| storage(&e));
        let opened = opened.and_then(|journal| {
            if journal.tag() != tag as u64 {
                return Err(storage(&"the previous replica is still being removed"));
            }
            let journal = (tag, journal);
            Partition::open(Arc::clone(name), topic.id, index, journal, config, context)
                .map_err(|e| storage(&e))
        });
        let replica = match opened {
            Ok(replica) => Arc::new(replica),
            Err(refused) => {
                self.write().free_tags.push(tag);
                return Err(refused);
            }
        };
        let replicated = self.driver.attach(
            partition_registration::id(topic.id, index),
            Arc::clone(&replica.journal),
            ResetPolicy::LogStart,
            promised(&parsed),
            Arc::new(ReplicaOwner(Arc::clone(&replica))),
        );
        replica.attach(replicated);
        self.write().by_tag[tag] = Some(Arc::clone(&replica));
        Ok(replica)
    }

    /// Opens the journal of a replica; replaces a damaged journal that no registration counts on any more by an empty
    /// one. A registration proves that only for earlier broker epochs: in the run that finds the damage, the replica
    /// is kept, reported as damaged, and removed from the registration.
    fn open_journal(
        &self,
        topic: &Topic,
        index: i32,
        options: JournalOptions,
        registration: &PartitionRegistration,
    ) -> Result<Arc<Journal>, JournalError> {
        let id = journal_id(topic.id, index);
        let journal = self.store.journal(id, options.clone())?;
        let others = registration.record().is_some_and(|record| {
            let named = |members: &[InSync]| members.iter().any(|member| member.node == self.me);
            !record.isr.is_empty()
                && !named(&record.isr)
                && !named(&record.eligible)
                && !named(&record.last_known)
        });
        if !journal.is_damaged() || !others {
            return Ok(journal);
        }
        tracing::warn!(topic = %topic.name, partition = index, "damaged replica discarded; fetching it again");
        drop(journal);
        self.store.delete(id)?;
        self.store.journal(id, options)
    }

    fn take_tag(&self) -> usize {
        let mut maps = self.write();
        maps.free_tags.pop().unwrap_or_else(|| {
            maps.by_tag.push(None);
            maps.by_tag.len() - 1
        })
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Maps> {
        self.maps.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Maps> {
        self.maps.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn undecodable(what: &str, name: &str) -> Refused {
    Refused::new(ErrorCode::UnknownServerError, format!("undecodable record of {what} {name}"))
}

fn durability(config: &TopicConfig) -> Durability {
    if config.replicated_durability { Durability::Replicated } else { Durability::Fsync }
}

/// The durability in the partition's registration.
fn promised(config: &TopicConfig) -> moim_replica::Durability {
    if config.replicated_durability {
        moim_replica::Durability::Replicated
    } else {
        moim_replica::Durability::Fsync
    }
}

fn journal_id(id: TopicId, index: i32) -> JournalId {
    JournalId { incarnation: id.0, part: index.unsigned_abs() }
}

fn encode(record: &TopicRecord) -> Bytes {
    Bytes::from(serde_json::to_vec(record).expect("plain data encodes as JSON"))
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

/// Returns the validation error of a topic name, if it is invalid.
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
    fn topic_name_with_path_traversal_is_rejected() {
        for bad in ["", ".", "..", "a/b", "a b", "한글", "a\0", &"x".repeat(250)] {
            assert!(refuse_name(bad).is_some(), "{bad}");
        }
        for good in ["orders", "a.b_c-9", "...", &"x".repeat(249)] {
            assert_eq!(refuse_name(good), None, "{good}");
        }
    }

    #[test]
    fn topic_record_has_a_stable_json_format() {
        let record = TopicRecord {
            id: TopicId(7).to_string(),
            partitions: 3,
            replication_factor: 1,
            factor_asked: false,
            configs: BTreeMap::from([("retention.ms".to_owned(), "1000".to_owned())]),
        };
        let text = r#"{"id":"00000000000000000000000000000007","partitions":3,"replication_factor":1,"factor_asked":false,"configs":{"retention.ms":"1000"}}"#;
        assert_eq!(encode(&record), text.as_bytes());
        assert_eq!(parse(text.as_bytes()), Some(record));
        let older = text.replace(r#""factor_asked":false,"#, "");
        assert!(
            parse(older.as_bytes()).unwrap().factor_asked,
            "a record without the field counts as requested"
        );
    }
}
