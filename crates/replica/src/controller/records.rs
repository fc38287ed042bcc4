//! The records that the controller reads from the state repository: topics, the store's shards, nodes, members and
//! orders, decoded into the controller's types.
//!
//! Only the needed fields are decoded; unknown fields belong to other components. A record that cannot be decoded is
//! skipped and logged: nothing is decided about it.

use std::collections::BTreeMap;

use moim_base::{BrokerId, TopicId};
use moim_state::Entry;
use moim_state::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeOrder, NodeRecord, ORDERS, node_of};
use serde::Deserialize;

use super::{Order, Topic};
use crate::keys;
use crate::restart::Member;
use crate::types::{BrokerEpoch, DirectoryId, Durability, PartitionId};

/// Defaults for topic settings, by topic setting name.
pub type Settings = BTreeMap<String, String>;

/// The topic setting for durability.
const DURABILITY: &str = "durability";
/// The broker setting for durability.
const BROKER_DURABILITY: &str = "log.durability";
const MIN_ISR: &str = "min.insync.replicas";
const UNCLEAN: &str = "unclean.leader.election.enable";

/// The fields of a topic record that concern replication.
#[derive(Deserialize)]
struct TopicJson {
    id: String,
    partitions: u32,
    replication_factor: usize,
    /// True if the replication factor is explicit. Records from before this field existed do not have it.
    #[serde(default = "explicit_by_default")]
    factor_asked: bool,
    #[serde(default)]
    configs: Settings,
}

/// `/moim/slots/config`: the store's shards are the partitions of one topic.
#[derive(Deserialize)]
struct ShardsJson {
    shards: u32,
    #[serde(default)]
    factor_asked: bool,
    #[serde(default)]
    replication_factor: Option<usize>,
    #[serde(default)]
    durability: Option<String>,
}

/// The queue's internal topics.
const INTERNAL: [&str; 2] = ["__consumer_offsets", "__transaction_state"];

fn explicit_by_default() -> bool {
    true
}

/// A decoded record of the repository.
#[derive(Debug)]
pub(super) enum Record {
    Node(NodeRecord),
    Member(Member),
    Order(BrokerId, Option<Order>),
    Topic(Topic),
    /// Broker settings that were changed at run time.
    Settings(Settings),
    /// A partition record, which is decoded separately.
    Partition,
    /// A record that does not concern the controller.
    Other,
}

/// Decodes a record. `defaults` are the fallback topic settings.
pub(super) fn read(entry: &Entry, defaults: &Settings) -> Result<Record, String> {
    let key = entry.key.as_str();
    let wrong = |error: &dyn std::fmt::Display| format!("{key}: {error}");
    if key.starts_with(keys::PARTITIONS) {
        return Ok(Record::Partition);
    }
    if node_of(key, NODES).is_some() {
        return NodeRecord::from_bytes(&entry.value).map(Record::Node).map_err(|e| wrong(&e));
    }
    if node_of(key, MEMBERS).is_some() {
        let record = MemberRecord::from_bytes(&entry.value).map_err(|e| wrong(&e))?;
        let live = LiveMember { record, broker_epoch: entry.create_revision };
        return Ok(Record::Member(Member::from_live(&live)));
    }
    if let Some(id) = node_of(key, ORDERS) {
        let order = NodeOrder::parse(&entry.value).map(Order::from);
        return Ok(Record::Order(BrokerId(id), order));
    }
    if let Some(name) = key.strip_prefix(keys::TOPICS) {
        return topic(name, entry, defaults).map(Record::Topic).map_err(|e| wrong(&e));
    }
    if key == keys::SLOTS_CONFIG {
        return shards(entry).map(Record::Topic).map_err(|e| wrong(&e));
    }
    if key == keys::BROKER_SETTINGS {
        return serde_json::from_slice(&entry.value).map(Record::Settings).map_err(|e| wrong(&e));
    }
    Ok(Record::Other)
}

fn topic(name: &str, entry: &Entry, defaults: &Settings) -> Result<Topic, String> {
    let json: TopicJson = serde_json::from_slice(&entry.value).map_err(|error| error.to_string())?;
    let id = TopicId::parse(&json.id).ok_or("invalid topic id")?;
    let setting = |name: &str| json.configs.get(name).or_else(|| defaults.get(name)).map(String::as_str);
    Ok(Topic {
        id,
        key: entry.key.clone(),
        name: name.to_owned(),
        create_revision: entry.create_revision,
        partitions: json.partitions,
        // Internal topics have no explicit factor; records from before this field existed do not say so.
        factor: (json.factor_asked && !INTERNAL.contains(&name)).then_some(json.replication_factor),
        assignment: Vec::new(),
        min_isr: setting(MIN_ISR).and_then(|value| value.parse().ok()),
        durability: durability(setting(DURABILITY)),
        unclean: setting(UNCLEAN) == Some("true"),
        fenced: false,
    })
}

fn shards(entry: &Entry) -> Result<Topic, String> {
    let json: ShardsJson = serde_json::from_slice(&entry.value).map_err(|error| error.to_string())?;
    Ok(Topic {
        id: keys::SHARDS,
        key: entry.key.clone(),
        name: "the store's shards".to_owned(),
        create_revision: entry.create_revision,
        partitions: json.shards,
        factor: json.replication_factor.filter(|_| json.factor_asked),
        assignment: Vec::new(),
        min_isr: None,
        durability: durability(json.durability.as_deref()),
        unclean: false,
        fenced: true,
    })
}

/// The store's `async` concerns its replies, not its journal.
fn durability(value: Option<&str>) -> Durability {
    match value {
        Some("replicated") => Durability::Replicated,
        _ => Durability::Fsync,
    }
}

/// The fallback topic settings: broker settings changed at run time override those at startup.
pub(super) fn defaults(started_with: &Settings, changed: &Settings) -> Settings {
    let mut defaults = started_with.clone();
    for (broker_name, name) in [(BROKER_DURABILITY, DURABILITY), (MIN_ISR, MIN_ISR), (UNCLEAN, UNCLEAN)] {
        if let Some(value) = changed.get(broker_name) {
            defaults.insert(name.to_owned(), value.clone());
        }
    }
    defaults
}

impl From<NodeOrder> for Order {
    fn from(order: NodeOrder) -> Self {
        match order {
            NodeOrder::Drain => Self::Drain,
            NodeOrder::Remove => Self::Remove,
        }
    }
}

impl Member {
    /// A member from its record. Its directory id is the voter id that the cluster assigned to it.
    pub fn from_live(live: &LiveMember) -> Self {
        let mut damaged: Vec<PartitionId> =
            live.record.damaged.iter().filter_map(|id| keys::parse_partition_id(id)).collect();
        damaged.sort_unstable();
        Self {
            node: BrokerId(live.record.node_id),
            epoch: BrokerEpoch(live.broker_epoch),
            directory: DirectoryId(live.record.voter),
            intact_since: live.record.intact_since.map(BrokerEpoch),
            damaged,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn entry(key: &str, value: &str) -> Entry {
        Entry {
            key: key.to_owned(),
            value: Bytes::copy_from_slice(value.as_bytes()),
            create_revision: 40,
            mod_revision: 50,
            version: 2,
            lease: None,
        }
    }

    fn topic(value: &str, defaults: &[(&str, &str)]) -> Topic {
        let defaults = defaults.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        match read(&entry("/moim/topics/orders", value), &defaults) {
            Ok(Record::Topic(topic)) => topic,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn topic_record_is_decoded_for_replication() {
        let id = TopicId(7);
        let explicit_by_default = topic(
            &format!(r#"{{"id":"{id}","partitions":6,"replication_factor":3,"configs":{{}},"moons":1}}"#),
            &[],
        );
        assert_eq!(
            (explicit_by_default.id, explicit_by_default.partitions, explicit_by_default.factor),
            (id, 6, Some(3))
        );
        assert_eq!(
            (
                explicit_by_default.name.as_str(),
                explicit_by_default.create_revision,
                explicit_by_default.min_isr
            ),
            ("orders", 40, None)
        );
        let follows = topic(
            &format!(
                r#"{{"id":"{id}","partitions":1,"replication_factor":1,"factor_asked":false,
                "configs":{{"min.insync.replicas":"1","durability":"replicated"}}}}"#
            ),
            &[("min.insync.replicas", "2"), ("unclean.leader.election.enable", "true")],
        );
        assert_eq!((follows.factor, follows.min_isr), (None, Some(1)), "the topic's own setting counts");
        assert_eq!((follows.durability, follows.unclean), (Durability::Replicated, true));
    }

    #[test]
    fn store_shards_are_decoded_as_a_topic() {
        let entry = entry(keys::SLOTS_CONFIG, r#"{"shards":3,"factor_asked":false,"durability":"fsync"}"#);
        let Ok(Record::Topic(shards)) = read(&entry, &Settings::new()) else { panic!("not a topic") };
        assert_eq!((shards.id, shards.partitions, shards.factor), (keys::SHARDS, 3, None));
        assert!(shards.fenced && shards.key == keys::SLOTS_CONFIG);
    }

    #[test]
    fn members_and_orders() {
        let id = PartitionId { topic: TopicId(9), index: 4 };
        let text = format!(r#"{{"node_id":2,"voter":7,"intact_since":30,"damaged":["{id}","x"]}}"#);
        let Ok(Record::Member(member)) = read(&entry("/moim/members/2", &text), &Settings::new()) else {
            panic!("not a member")
        };
        let expected = Member {
            node: BrokerId(2),
            epoch: BrokerEpoch(40),
            directory: DirectoryId(7),
            intact_since: Some(BrokerEpoch(30)),
            damaged: vec![id],
        };
        assert_eq!(member, expected);
        let order = |word: &str| match read(&entry("/moim/orders/2", word), &Settings::new()) {
            Ok(Record::Order(BrokerId(2), order)) => order,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (order("drain"), order("remove"), order("?")),
            (Some(Order::Drain), Some(Order::Remove), None)
        );
        assert!(read(&entry("/moim/topics/x", "{"), &Settings::new()).is_err());
        assert!(matches!(read(&entry("/moim/voters/next", "4"), &Settings::new()), Ok(Record::Other)));
    }

    #[test]
    fn runtime_settings_override_startup_settings() {
        let started = [("durability".to_owned(), "replicated".to_owned())].into();
        let changed = [
            ("log.durability".to_owned(), "fsync".to_owned()),
            ("min.insync.replicas".to_owned(), "2".to_owned()),
        ]
        .into();
        let defaults = defaults(&started, &changed);
        assert_eq!(defaults["durability"], "fsync");
        assert_eq!(defaults["min.insync.replicas"], "2");
    }
}
