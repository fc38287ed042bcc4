//! The topics of the cluster: what they are called, how they are set, where their partitions are.
//!
//! The state repository is the truth (keys [`TOPIC_PREFIX`]`<name>`, JSON of [`TopicRecord`], and one key per
//! partition, see [`crate::placement`]); this is a view of it with the copies that this node holds attached. The
//! view changes in one way: a record that was read or written is taken in ([`Topics::on_topic`], [`Topics::on_place`],
//! [`Topics::on_topic_gone`]), under the lock `changing`, and never one that is older than what is known. So it does
//! not matter who made a change, nor who is told of it first: whoever wrote it, or the watch. A node that crashed after
//! a change and before it acted on it does so at its next start.
//!
//! A node holds a copy exactly of the partitions whose record names it among the replicas. Whether that copy leads is for
//! the replica driver to say, which is passed every record of a copy that is here.
//!
//! What else must happen because of a change (coordinators that begin or end) is noted as [`News`] for the broker.

mod change;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

use moim_base::{BrokerId, Clock, TopicId};
use moim_cluster::{Entry, RepositoryError, StateRepository};
use moim_journal::{Durability, Framing, Journal, JournalError, JournalId, JournalOptions, Store};
use moim_replica::driver::Driver;
use moim_replica::{InSync, ResetPolicy};
use moim_wire_kafka::ErrorCode;

use crate::broker::BrokerOptions;
use crate::completions::Completions;
use crate::config::{Defaults, TopicConfig};
use crate::framing::BatchFraming;
use crate::loops::{Loops, lock};
use crate::partition::{Around, Copy, Partition, Refused, RoleChange};
use crate::placement::{self, Place};

pub(crate) use change::{NewTopic, PAUSE, TRIES, contended};

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
    /// Whether somebody asked for that factor; a topic for which nobody did follows the size of the cluster.
    #[serde(default = "asked")]
    pub(crate) factor_asked: bool,
    pub(crate) configs: BTreeMap<String, String>,
}

fn asked() -> bool {
    true
}

/// A partition of a topic, wherever it is.
pub(crate) struct Seat {
    pub(crate) index: i32,
    place: ArcSwap<Place>,
    /// Invariant: there exactly while `place` names this node among the replicas.
    here: ArcSwapOption<Partition>,
}

impl Seat {
    fn new(index: i32) -> Arc<Self> {
        Arc::new(Self { index, place: ArcSwap::default(), here: ArcSwapOption::empty() })
    }

    /// Where it is.
    pub(crate) fn place(&self) -> Arc<Place> {
        self.place.load_full()
    }

    /// The copy on this node, if there is one.
    pub(crate) fn copy(&self) -> Option<Arc<Partition>> {
        self.here.load_full()
    }
}

/// A topic with its partitions.
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) id: TopicId,
    /// The settings as their owner wrote them.
    pub(crate) configs: ArcSwap<BTreeMap<String, String>>,
    /// The same, parsed, over the broker's defaults; shared with the partitions.
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    pub(crate) seats: ArcSwap<Vec<Arc<Seat>>>,
    /// The mod revision of the record this was made from.
    revision: AtomicI64,
}

impl Topic {
    /// Whether only the broker itself writes to it.
    pub(crate) fn is_internal(&self) -> bool {
        is_internal(&self.name)
    }

    /// How many partitions there are, here or elsewhere.
    pub(crate) fn count(&self) -> i32 {
        self.seats.load().len() as i32
    }

    /// Whether there is such a partition, here or elsewhere.
    pub(crate) fn has(&self, index: i32) -> bool {
        (0..self.count()).contains(&index)
    }

    pub(crate) fn seat(&self, index: i32) -> Option<Arc<Seat>> {
        usize::try_from(index).ok().and_then(|at| self.seats.load().get(at).cloned())
    }

    /// A partition that this node leads; otherwise what to tell the client.
    pub(crate) fn partition(&self, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        let copy = self.copy(index)?;
        if copy.leading().is_some() { Ok(copy) } else { Err(ErrorCode::NotLeaderOrFollower) }
    }

    /// The copy of a partition on this node, whether it leads or not.
    pub(crate) fn copy(&self, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        let seats = self.seats.load();
        let seat = usize::try_from(index).ok().and_then(|at| seats.get(at));
        let seat = seat.ok_or(ErrorCode::UnknownTopicOrPartition)?;
        seat.here.load_full().ok_or(ErrorCode::NotLeaderOrFollower)
    }

    /// All copies on this node.
    pub(crate) fn copies(&self) -> Vec<Arc<Partition>> {
        self.seats.load().iter().filter_map(|seat| seat.copy()).collect()
    }
}

pub(crate) fn is_internal(name: &str) -> bool {
    name == OFFSETS_TOPIC || name == TRANSACTIONS_TOPIC
}

/// What became of topics and partitions, for those who must act on it.
pub(crate) enum News {
    /// A topic is known now.
    Appeared(Arc<Topic>),
    /// A topic is gone.
    Deleted(Arc<Topic>),
}

#[derive(Default)]
struct Maps {
    by_name: HashMap<Arc<str>, Arc<Topic>>,
    by_id: HashMap<TopicId, Arc<Topic>>,
    /// By tag: what the journal reports progress for.
    by_tag: Vec<Option<Arc<Partition>>>,
    free_tags: Vec<usize>,
    /// Places of partitions whose topic does not have them yet: a large topic is written in several steps, itself last.
    early: HashMap<TopicId, HashMap<i32, Place>>,
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
    /// Where partitions that keep a coordinator's state say who leads them.
    pub(crate) roles: Completions<RoleChange>,
    defaults: ArcSwap<Defaults>,
    max_per_topic: i32,
    max_partitions: usize,
    /// One change of the view at a time.
    changing: tokio::sync::Mutex<()>,
    maps: RwLock<Maps>,
    news: Mutex<Vec<News>>,
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
            news: Mutex::default(),
        }
    }

    /// Takes in everything a new repository says, or one that was not followed for a while, and drops what it no
    /// longer knows. `first` is the start of the node: then journals of topics that are gone are removed too.
    ///
    /// What cannot be taken in does not keep the rest out; the first such error is given back after it.
    pub(crate) async fn take_in_all(
        &self,
        entries: &[Entry],
        revision: i64,
        first: bool,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        if first {
            self.refuse_foreign(revision)?;
        }
        self.write().early.clear();
        let mut taken = Ok(());
        // Places first: a topic then opens with all of them.
        for entry in entries {
            if let Some((topic, index)) = placement::parse_key(&entry.key) {
                taken = taken.and(self.take_in_place(topic, index, entry));
            }
        }
        let mut known = HashSet::new();
        for entry in entries.iter().filter(|e| e.key.starts_with(TOPIC_PREFIX)) {
            known.insert(entry.key[TOPIC_PREFIX.len()..].to_owned());
            taken = taken.and(self.take_in_topic(entry));
        }
        for topic in self.all() {
            if !known.contains(&*topic.name) {
                self.on_topic_gone(&topic.name, revision);
            }
        }
        taken?;
        if first { self.remove_orphans(known.is_empty()) } else { Ok(()) }
    }

    /// A repository that never held anything is not the one these journals were made with: nothing is deleted on its
    /// word.
    fn refuse_foreign(&self, revision: i64) -> Result<(), Refused> {
        let journals = self.store.journals();
        if revision == 0 && journals.iter().any(|(_, folder)| folder.starts_with("queue/")) {
            let why = "there are journals of topics, but the state repository is new; is `coord/` missing?";
            return Err(Refused::new(ErrorCode::UnknownServerError, why));
        }
        Ok(())
    }

    /// Removes the journals of topics that were deleted, and of partitions that were moved away, while this node was away.
    fn remove_orphans(&self, no_topics: bool) -> Result<(), Refused> {
        let orphans: Vec<_> = {
            let maps = self.read();
            let orphan = |id: &JournalId| {
                let Some(topic) = maps.by_id.get(&TopicId(id.incarnation)) else { return true };
                let place =
                    i32::try_from(id.part).ok().and_then(|index| topic.seat(index)).map(|s| s.place());
                place.is_some_and(|place| place.is_known() && !place.is_on(self.me))
            };
            let journals = self.store.journals().into_iter();
            journals.filter(|(id, folder)| folder.starts_with("queue/") && orphan(id)).collect()
        };
        if no_topics && orphans.len() > 1 {
            tracing::warn!(
                journals = orphans.len(),
                "there are journals and no topic at all: nothing is removed"
            );
            return Ok(());
        }
        for (id, folder) in orphans {
            tracing::info!(folder, "removing a journal that has no place here any more");
            self.store.delete(id).map_err(|e| Refused::new(ErrorCode::KafkaStorageError, e.to_string()))?;
        }
        Ok(())
    }

    /// Takes in one change of the repository; false when it is not about topics.
    pub(crate) async fn take_in(&self, entry: &Entry) -> Result<bool, Refused> {
        if let Some((topic, index)) = placement::parse_key(&entry.key) {
            let _changing = self.changing.lock().await;
            self.take_in_place(topic, index, entry)?;
            return Ok(true);
        }
        if entry.key.starts_with(TOPIC_PREFIX) {
            let _changing = self.changing.lock().await;
            self.take_in_topic(entry)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes in that a key is gone since `revision`.
    pub(crate) async fn take_out(&self, key: &str, revision: i64) {
        if let Some(name) = key.strip_prefix(TOPIC_PREFIX) {
            let _changing = self.changing.lock().await;
            self.on_topic_gone(name, revision);
        }
        if let Some((topic, index)) = placement::parse_key(key) {
            // Records of partitions go with their topic only, so the topic's end is what counts.
            let mut maps = self.write();
            let empty = maps.early.get_mut(&topic).is_some_and(|places| {
                places.remove(&index);
                places.is_empty()
            });
            if empty {
                maps.early.remove(&topic);
            }
        }
    }

    fn take_in_topic(&self, entry: &Entry) -> Result<(), Refused> {
        let name = &entry.key[TOPIC_PREFIX.len()..];
        let record = parse(&entry.value).ok_or_else(|| illegible("topic", name))?;
        self.on_topic(name, &record, entry.mod_revision).map(|_| ())
    }

    fn take_in_place(&self, topic: TopicId, index: i32, entry: &Entry) -> Result<(), Refused> {
        let place = Place::decode(&entry.value, entry.mod_revision)
            .ok_or_else(|| illegible("partition", &entry.key))?;
        self.on_place(topic, index, place)
    }

    /// A topic is as `record` says since `revision`.
    fn on_topic(&self, name: &str, record: &TopicRecord, revision: i64) -> Result<Arc<Topic>, Refused> {
        let id = TopicId::parse(&record.id).ok_or_else(|| illegible("topic", name))?;
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
            // Deleted and made again, and only the end of it was seen.
            self.on_topic_gone(name, revision);
        }
        let config = TopicConfig::new(&record.configs, &self.defaults.load());
        let topic = Arc::new(Topic {
            name: name.into(),
            id,
            configs: ArcSwap::from_pointee(record.configs.clone()),
            config: Arc::new(ArcSwap::from_pointee(config)),
            seats: ArcSwap::default(),
            revision: AtomicI64::new(revision),
        });
        {
            let mut maps = self.write();
            maps.by_id.insert(topic.id, Arc::clone(&topic));
            maps.by_name.insert(Arc::clone(&topic.name), Arc::clone(&topic));
        }
        lock(&self.news).push(News::Appeared(Arc::clone(&topic)));
        self.grow_to(&topic, record.partitions)?;
        Ok(topic)
    }

    fn grow_to(&self, topic: &Arc<Topic>, count: i32) -> Result<(), Refused> {
        let have = topic.count();
        if count <= have {
            return Ok(());
        }
        let seats: Vec<_> = topic.seats.load().iter().cloned().chain((have..count).map(Seat::new)).collect();
        topic.seats.store(Arc::new(seats));
        let early = self.write().early.remove(&topic.id).unwrap_or_default();
        let mut early: Vec<_> = early.into_iter().collect();
        early.sort_unstable_by_key(|(index, _)| *index);
        let mut taken = Ok(());
        for (index, place) in early {
            taken = taken.and(self.on_place(topic.id, index, place));
        }
        taken
    }

    /// A partition is where `place` says. If this node is to hold a copy and cannot open it, the place is not known either:
    /// whoever reads it again tries again.
    fn on_place(&self, topic: TopicId, index: i32, place: Place) -> Result<(), Refused> {
        let Some((topic, seat)) = self.get_by_id(topic).and_then(|t| t.seat(index).map(|seat| (t, seat)))
        else {
            let mut maps = self.write();
            let known = maps.early.entry(topic).or_default().entry(index).or_default();
            if place.revision > known.revision {
                *known = place;
            }
            return Ok(());
        };
        if place.revision <= seat.place.load().revision {
            return Ok(());
        }
        let (mine, record) = (place.is_on(self.me), place.versioned());
        if mine && seat.copy().is_none() {
            // Before the place is known: this may fail.
            let copy = self.open_copy(&topic, &seat, &place)?;
            seat.here.store(Some(copy));
        }
        seat.place.store(Arc::new(place));
        if mine {
            if let Some(record) = record {
                self.driver.on_record(placement::id(topic.id, index), record);
            }
        } else if let Some(copy) = seat.here.swap(None) {
            tracing::info!(topic = %topic.name, partition = index, "a copy was moved away");
            self.let_go(&copy, ErrorCode::NotLeaderOrFollower);
            self.delete_journal(&topic.name, topic.id, index);
        }
        Ok(())
    }

    /// A topic is gone since `revision`: its partitions here are closed and their files removed.
    fn on_topic_gone(&self, name: &str, revision: i64) {
        let Some(topic) = self.get(name) else { return };
        if revision <= topic.revision.load(Ordering::Acquire) {
            return;
        }
        {
            let mut maps = self.write();
            maps.by_name.remove(&topic.name);
            maps.by_id.remove(&topic.id);
        }
        for seat in topic.seats.load().iter() {
            if let Some(copy) = seat.here.swap(None) {
                self.let_go(&copy, ErrorCode::UnknownTopicOrPartition);
            }
            if seat.place.load().is_on(self.me) {
                self.delete_journal(name, topic.id, seat.index);
            }
        }
        tracing::info!(topic = name, "a topic is gone");
        lock(&self.news).push(News::Deleted(topic));
    }

    /// Ends a copy and tells everybody who waits for it.
    fn let_go(&self, copy: &Arc<Partition>, code: ErrorCode) {
        // First, so that nothing is appended to what is deleted.
        self.driver.detach(placement::id(copy.topic_id, copy.index));
        {
            let mut maps = self.write();
            maps.by_tag[copy.tag] = None;
            maps.free_tags.push(copy.tag);
        }
        copy.close(code);
    }

    fn delete_journal(&self, topic: &str, id: TopicId, partition: i32) {
        if let Err(error) = self.store.delete(journal_id(id, partition)) {
            tracing::error!(topic, partition, %error, "could not remove a journal");
        }
    }

    /// What has happened since the last time somebody asked, in order.
    pub(crate) fn take_news(&self) -> Vec<News> {
        std::mem::take(&mut *lock(&self.news))
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Topic>> {
        self.read().by_name.get(name).cloned()
    }

    pub(crate) fn get_by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        self.read().by_id.get(&id).cloned()
    }

    /// A partition that this node leads; otherwise what to tell the client.
    pub(crate) fn partition(&self, topic: &str, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        self.read().by_name.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?.partition(index)
    }

    /// The copy of a partition on this node, whether it leads or not; otherwise what to tell the client.
    pub(crate) fn copy(&self, topic: &str, index: i32) -> Result<Arc<Partition>, ErrorCode> {
        self.read().by_name.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?.copy(index)
    }

    /// Whether there is such a partition, here or elsewhere.
    pub(crate) fn has(&self, topic: &str, index: i32) -> bool {
        self.read().by_name.get(topic).is_some_and(|t| t.has(index))
    }

    /// Whether the state repository has no such partition. The view of this node may be behind it.
    pub(crate) async fn is_deleted(&self, topic: &str, index: i32) -> Result<bool, Refused> {
        let key = format!("{TOPIC_PREFIX}{topic}");
        let Some(entry) = self.repository.get(&key).await.map_err(refuse_repository)? else {
            return Ok(true);
        };
        let record = parse(&entry.value).ok_or_else(|| illegible("topic", topic))?;
        Ok(index >= record.partitions)
    }

    /// All topics, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Topic>> {
        let mut all: Vec<_> = self.read().by_name.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The copies whose journals report under these tags.
    pub(crate) fn by_tags(&self, tags: &[(u64, i64)]) -> Vec<Arc<Partition>> {
        let maps = self.read();
        let copy = |(tag, _): &(u64, i64)| maps.by_tag.get(usize::try_from(*tag).ok()?)?.clone();
        tags.iter().filter_map(copy).collect()
    }

    /// Topics of the cluster and partitions of this node.
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

    fn apply_config(&self, topic: &Topic, configs: BTreeMap<String, String>) {
        let parsed = TopicConfig::new(&configs, &self.defaults.load());
        for copy in topic.copies() {
            copy.journal.set_options(durability(&parsed), parsed.segment_bytes);
            if let Some(replicated) = copy.replicated() {
                replicated.set_durability(promised(&parsed));
            }
        }
        topic.configs.store(Arc::new(configs));
        topic.config.store(Arc::new(parsed));
    }

    /// Opens the journal of a copy and has the driver look after it.
    fn open_copy(&self, topic: &Topic, seat: &Seat, place: &Place) -> Result<Arc<Partition>, Refused> {
        let (name, index) = (&topic.name, seat.index);
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
        let around = Around {
            loops: Arc::clone(&self.loops),
            clock: Arc::clone(&self.clock),
            roles: self.roles.clone(),
            keeps_state: topic.is_internal(),
        };
        let config = Arc::clone(&topic.config);
        let opened = self.open_journal(topic, index, options, place).map_err(|e| storage(&e));
        let opened = opened.and_then(|journal| {
            if journal.tag() != tag as u64 {
                return Err(storage(&"its former copy is still being removed"));
            }
            let journal = (tag, journal);
            Partition::open(Arc::clone(name), topic.id, index, journal, config, around)
                .map_err(|e| storage(&e))
        });
        let copy = match opened {
            Ok(copy) => Arc::new(copy),
            Err(refused) => {
                self.write().free_tags.push(tag);
                return Err(refused);
            }
        };
        let replicated = self.driver.attach(
            placement::id(topic.id, index),
            Arc::clone(&copy.journal),
            ResetPolicy::LogStart,
            promised(&parsed),
            Arc::new(Copy(Arc::clone(&copy))),
        );
        copy.attach(replicated);
        self.write().by_tag[tag] = Some(Arc::clone(&copy));
        Ok(copy)
    }

    /// Opens the journal of a copy; an empty one in place of one that is damaged and that nobody counts on any more. That
    /// a record does not count on it is known only of runs before this one: in the run that finds the damage the copy is
    /// kept, said to be damaged, and taken out of the record.
    fn open_journal(
        &self,
        topic: &Topic,
        index: i32,
        options: JournalOptions,
        place: &Place,
    ) -> Result<Arc<Journal>, JournalError> {
        let id = journal_id(topic.id, index);
        let journal = self.store.journal(id, options.clone())?;
        let others = place.record().is_some_and(|record| {
            let named = |members: &[InSync]| members.iter().any(|member| member.node == self.me);
            !record.isr.is_empty()
                && !named(&record.isr)
                && !named(&record.eligible)
                && !named(&record.last_known)
        });
        if !journal.is_damaged() || !others {
            return Ok(journal);
        }
        tracing::warn!(topic = %topic.name, partition = index, "a damaged copy is thrown away; it is fetched again");
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

fn illegible(what: &str, name: &str) -> Refused {
    Refused::new(ErrorCode::UnknownServerError, format!("{what} {name} has a record that cannot be read"))
}

fn durability(config: &TopicConfig) -> Durability {
    if config.replicated_durability { Durability::Replicated } else { Durability::Fsync }
}

/// What the record of a partition promises for it.
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
            factor_asked: false,
            configs: BTreeMap::from([("retention.ms".to_owned(), "1000".to_owned())]),
        };
        let text = r#"{"id":"00000000000000000000000000000007","partitions":3,"replication_factor":1,"factor_asked":false,"configs":{"retention.ms":"1000"}}"#;
        assert_eq!(encode(&record), text.as_bytes());
        assert_eq!(parse(text.as_bytes()), Some(record));
        let older = text.replace(r#""factor_asked":false,"#, "");
        assert!(parse(older.as_bytes()).unwrap().factor_asked, "who said nothing asked for it");
    }
}
