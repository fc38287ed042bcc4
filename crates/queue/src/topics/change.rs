//! Changes of topics that somebody asked for: checked against the view, written to the state repository by
//! compare-and-swap, and taken into the view at once.
//!
//! A topic and the places of its partitions appear together. What does not fit into one transaction is written before
//! the topic itself (and, when a topic goes, removed after it), where nobody looks for it: the topic's key is the one
//! that counts. That holds for a new topic, whose id nobody else has. One that is there already grows in steps, each of
//! them whole: its places are never written, nor removed, without a comparison of its record.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moim_base::{BrokerId, TopicId};
use moim_cluster::repository::MAX_TXN_OPS;
use moim_cluster::{Compare, Txn, TxnOutcome};
use moim_wire_kafka::ErrorCode;

use super::{
    TOPIC_PREFIX, Topic, TopicRecord, Topics, encode, illegible, parse, refuse_name, refuse_repository,
};
use crate::config;
use crate::partition::Refused;
use crate::placement::{self, Place};

/// Room for the topic's own key beside the partitions.
const PER_TXN: usize = MAX_TXN_OPS - 1;
/// How often a change is tried again because somebody else changed the same topic.
const TRIES: usize = 8;
/// How long the view may take to see what the repository says already.
const CATCH_UP: Duration = Duration::from_secs(5);

/// What is asked for when a topic is made.
pub(crate) struct NewTopic {
    pub(crate) name: String,
    pub(crate) partitions: i32,
    pub(crate) replication_factor: i16,
    pub(crate) configs: BTreeMap<String, String>,
}

/// Who may get new partitions: the running brokers, each with its broker epoch.
pub(crate) type Hosts = [(BrokerId, i64)];

impl Topics {
    /// Says why a topic like this cannot be made, or nothing.
    pub(crate) fn refuse_new(&self, new: &NewTopic, brokers: usize) -> Option<Refused> {
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
        if let Some(refused) = self.refuse_more(new.partitions as usize, brokers) {
            return Some(refused);
        }
        if new.replication_factor < 1 {
            return Some(Refused::new(
                ErrorCode::InvalidReplicationFactor,
                "Replication factor must be larger than 0.",
            ));
        }
        if new.replication_factor > 1 {
            let why = if usize::from(new.replication_factor.unsigned_abs()) > brokers {
                format!(
                    "Unable to replicate the partition {} time(s): only {brokers} broker{} registered.",
                    new.replication_factor,
                    if brokers == 1 { " is" } else { "s are" }
                )
            } else {
                "Partitions are kept on one broker each; the replication factor must be 1.".to_owned()
            };
            return Some(Refused::new(ErrorCode::InvalidReplicationFactor, why));
        }
        config::refuse(&new.configs).map(|why| Refused::new(ErrorCode::InvalidConfig, why))
    }

    /// Makes a topic; it is durable when this returns. `places` says where its partitions go, or nobody does.
    pub(crate) async fn create(
        &self,
        new: NewTopic,
        hosts: &Hosts,
        places: Option<&[BrokerId]>,
    ) -> Result<Arc<Topic>, Refused> {
        self.catch_up(&new.name).await?;
        let _changing = self.changing.lock().await;
        if let Some(refused) = self.refuse_new(&new, hosts.len()) {
            return Err(refused);
        }
        let id = TopicId(fastrand::u128(1 << 64..));
        let record = TopicRecord {
            id: id.to_string(),
            partitions: new.partitions,
            replication_factor: new.replication_factor,
            configs: new.configs,
        };
        let key = format!("{TOPIC_PREFIX}{}", new.name);
        let nodes = match places {
            Some(places) => places.to_vec(),
            None => self.deal(hosts, new.partitions as usize),
        };
        let places = with_epochs(&nodes, hosts, 0);
        let guard = Compare::Absent(key.clone());
        let written = self.write_places(id, places, guard, Txn::new().put(key, encode(&record))).await?;
        let Some((revision, places)) = written else { return Err(exists(&new.name)) };
        let topic = self.on_topic(&new.name, &record, revision)?;
        self.take_in_own(&topic, places)?;
        tracing::info!(topic = new.name, partitions = new.partitions, "created a topic");
        Ok(topic)
    }

    /// Writes the places of partitions and, in the last transaction and only if `guard` holds, `last`. Gives the
    /// revision of that one and every place with its own. More than [`PER_TXN`] only under an id that nobody else has:
    /// those before the last transaction are written, and after a conflict removed, without a comparison.
    async fn write_places(
        &self,
        id: TopicId,
        places: Vec<(i32, Place, i64)>,
        guard: Compare,
        last: Txn,
    ) -> Result<Option<(i64, Vec<(i32, Place)>)>, Refused> {
        let mut written = Vec::with_capacity(places.len());
        let put = |mut txn: Txn, chunk: &[(i32, Place, i64)]| {
            for (index, place, epoch) in chunk {
                let node = place.leader.unwrap_or(self.me);
                txn = txn.put(placement::key(id, *index), placement::record_on(node, *epoch));
            }
            txn
        };
        let early = places.len().saturating_sub(PER_TXN);
        for chunk in places[..early].chunks(MAX_TXN_OPS) {
            let outcome = self.repository.txn(put(Txn::new(), chunk)).await.map_err(refuse_repository)?;
            if let TxnOutcome::Done { revision } = outcome {
                written.extend(chunk.iter().map(|(at, place, _)| (*at, Place { revision, ..place.clone() })));
            }
        }
        let txn = put(last, &places[early..]).when(guard);
        match self.repository.txn(txn).await.map_err(refuse_repository)? {
            TxnOutcome::Done { revision } => {
                let rest = places[early..].iter();
                written.extend(rest.map(|(at, place, _)| (*at, Place { revision, ..place.clone() })));
                Ok(Some((revision, written)))
            }
            TxnOutcome::Conflict { .. } => {
                self.forget_places(id, places[..early].iter().map(|(index, ..)| *index)).await;
                Ok(None)
            }
        }
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

    /// Chooses the nodes of new partitions: those that have the fewest.
    fn deal(&self, hosts: &Hosts, count: usize) -> Vec<BrokerId> {
        let nodes: Vec<BrokerId> = hosts.iter().map(|(node, _)| *node).collect();
        if let [only] = nodes[..] {
            return vec![only; count];
        }
        let mut load = vec![0; nodes.len()];
        for topic in self.all() {
            for seat in topic.seats.load().iter() {
                let at = seat.place.load().leader.and_then(|leader| nodes.iter().position(|n| *n == leader));
                if let Some(at) = at {
                    load[at] += 1;
                }
            }
        }
        placement::spread(&nodes, &load, count)
    }

    /// Makes one of the broker's own topics the first time somebody needs it: compacted, in small segments.
    pub(crate) async fn ensure_internal(
        &self,
        name: &str,
        partitions: i32,
        hosts: &Hosts,
    ) -> Result<(), ErrorCode> {
        if self.get(name).is_some() {
            return Ok(());
        }
        let configs = [("cleanup.policy", "compact"), ("segment.bytes", "104857600")];
        let new = NewTopic {
            name: name.to_owned(),
            partitions,
            replication_factor: 1,
            configs: configs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        };
        match self.create(new, hosts, None).await {
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
    pub(crate) fn refuse_growth(&self, topic: &Topic, count: i32, brokers: usize) -> Option<Refused> {
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
        self.refuse_more((count - have) as usize, brokers)
    }

    /// New partitions are dealt out evenly, so this node speaks for its share of them.
    fn refuse_more(&self, partitions: usize, brokers: usize) -> Option<Refused> {
        let (_, have) = self.counts();
        (have + partitions.div_ceil(brokers.max(1)) > self.max_partitions).then(|| {
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
        hosts: &Hosts,
        places: Option<&[BrokerId]>,
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
            if let Some(refused) = self.refuse_growth(topic, count, hosts.len()) {
                return Err(refused);
            }
            let missing = (count - record.partitions) as usize;
            let step = missing.min(PER_TXN);
            let nodes = match places {
                Some(places) if places.len() == grown + missing => places[grown..grown + step].to_vec(),
                // Somebody else grew it too: the nodes were named for other partitions.
                Some(_) => return Err(contended()),
                None => self.deal(hosts, step),
            };
            let new = with_epochs(&nodes, hosts, record.partitions);
            record.partitions += step as i32;
            let guard = Compare::ModRevision(key.clone(), revision);
            let whole = Txn::new().put(key.clone(), encode(&record));
            let Some((revision, new)) = self.write_places(topic.id, new, guard, whole).await? else {
                conflicts += 1;
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

    /// Writes the leader epochs that this node has begun (it stopped without order) into the records, before anybody
    /// is told of them: the record is what the other brokers tell clients.
    pub(crate) async fn announce_epochs(&self) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        let mut begun = Vec::new();
        for topic in self.all() {
            let seats = topic.seats.load_full();
            begun.extend(
                seats.iter().filter(|seat| seat.unannounced().is_some()).map(|s| (topic.id, s.index)),
            );
        }
        for chunk in begun.chunks(MAX_TXN_OPS) {
            self.announce(chunk).await?;
        }
        Ok(())
    }

    async fn announce(&self, begun: &[(TopicId, i32)]) -> Result<(), Refused> {
        let (mut txn, mut written) = (Txn::new(), Vec::new());
        for (id, index) in begun {
            let key = placement::key(*id, *index);
            let Some(entry) = self.repository.get(&key).await.map_err(refuse_repository)? else { continue };
            // Somebody may have changed it since it was listed, and may even have given it to another node.
            self.take_in_place(*id, *index, &entry)?;
            let Some(seat) = self.get_by_id(*id).and_then(|t| t.seat(*index)) else { continue };
            let Some(epoch) = seat.unannounced() else { continue };
            let value =
                placement::with_epoch(&entry.value, epoch).ok_or_else(|| illegible("partition", &key))?;
            txn = txn.when(Compare::ModRevision(key.clone(), entry.mod_revision)).put(key, value);
            written.push((*id, seat, epoch));
        }
        if written.is_empty() {
            return Ok(());
        }
        match self.repository.txn(txn).await.map_err(refuse_repository)? {
            TxnOutcome::Conflict { .. } => Err(contended()),
            TxnOutcome::Done { revision } => written.into_iter().try_for_each(|(id, seat, epoch)| {
                let place = Place { leader_epoch: epoch, revision, ..(*seat.place()).clone() };
                self.on_place(id, seat.index, place)
            }),
        }
    }

    /// Gives a place to partitions that have none: to this node what it has the journal of, and the rest to the nodes
    /// that have the fewest. Topics made before there were places have none, nor have those whose maker crashed.
    pub(crate) async fn place_the_placeless(&self, hosts: &Hosts, mine_only: bool) -> Result<usize, Refused> {
        let _changing = self.changing.lock().await;
        let journals: hashbrown::HashSet<_> = self.store.journals().into_iter().map(|(id, _)| id).collect();
        let mut placed = 0;
        for topic in self.all() {
            let seats = topic.seats.load_full();
            let bare = seats.iter().filter(|seat| !seat.place.load().is_known());
            let (mine, others): (Vec<_>, Vec<_>) = bare.map(|seat| seat.index).partition(|index| {
                hosts.len() == 1 || journals.contains(&super::journal_id(topic.id, *index))
            });
            let mut wanted: Vec<_> = mine.into_iter().map(|index| (index, self.me)).collect();
            if !mine_only {
                let nodes = self.deal(hosts, others.len());
                wanted.extend(others.into_iter().zip(nodes));
            }
            for chunk in wanted.chunks(MAX_TXN_OPS) {
                placed += self.place(&topic, chunk, hosts).await?;
            }
        }
        Ok(placed)
    }

    async fn place(
        &self,
        topic: &Topic,
        wanted: &[(i32, BrokerId)],
        hosts: &Hosts,
    ) -> Result<usize, Refused> {
        let mut txn = Txn::new();
        for (index, node) in wanted {
            let key = placement::key(topic.id, *index);
            let epoch = epoch_of(*node, hosts);
            txn = txn.when(Compare::Absent(key.clone())).put(key, placement::record_on(*node, epoch));
        }
        match self.repository.txn(txn).await.map_err(refuse_repository)? {
            // Somebody else was faster; the watch says who got what.
            TxnOutcome::Conflict { .. } => Ok(0),
            TxnOutcome::Done { revision } => {
                for (index, node) in wanted {
                    self.on_place(topic.id, *index, Place { revision, ..Place::on(*node) })?;
                }
                Ok(wanted.len())
            }
        }
    }
}

fn epoch_of(node: BrokerId, hosts: &Hosts) -> i64 {
    hosts.iter().find(|(host, _)| *host == node).map_or(0, |(_, epoch)| *epoch)
}

/// New places from `first` on, each with the broker epoch of its node.
fn with_epochs(nodes: &[BrokerId], hosts: &Hosts, first: i32) -> Vec<(i32, Place, i64)> {
    (first..).zip(nodes).map(|(index, node)| (index, Place::on(*node), epoch_of(*node, hosts))).collect()
}

fn exists(name: &str) -> Refused {
    Refused::new(ErrorCode::TopicAlreadyExists, format!("Topic '{name}' already exists."))
}

fn contended() -> Refused {
    Refused::new(ErrorCode::UnknownServerError, "The topic was changed by somebody else; try again.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Still, append, batch, wait};

    #[test]
    fn an_epoch_is_announced_on_top_of_what_somebody_else_changed() {
        let still = Still::new();
        let partition = still.topic("t", &[]);
        append(&partition, batch(|b| b, "k", "v"));
        still.sync(&partition);
        drop(partition);
        let still = still.restart(false);
        let (topics, repository) = (&still.broker.topics, &still.broker.repository);
        let topic = topics.get("t").unwrap();
        let seat = topic.seat(0).unwrap();
        let epoch = seat.unannounced().expect("a start after a crash begins an epoch");
        // Changed after it was listed, before it is watched.
        let key = placement::key(topic.id, 0);
        let before = wait(repository.get(&key)).unwrap().unwrap();
        wait(repository.txn(Txn::new().put(key.clone(), before.value))).unwrap();
        wait(topics.announce_epochs()).unwrap();
        let after = wait(repository.get(&key)).unwrap().unwrap();
        let told = Place::decode(&after.value, after.mod_revision).unwrap();
        assert_eq!(told.leader_epoch, epoch);
        assert_eq!((seat.place().leader_epoch, seat.place().revision), (epoch, after.mod_revision));
    }
}
