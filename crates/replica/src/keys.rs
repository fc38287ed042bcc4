//! The state repository keys of replication.

use moim_base::{BrokerId, TopicId};

use crate::types::PartitionId;

/// The prefix of all partition records.
pub const PARTITIONS: &str = "/moim/partitions/";
/// The prefix of live member keys: leased, one per node. The create revision is the broker epoch.
pub const MEMBERS: &str = "/moim/members/";
/// The prefix of all topic records, by topic name.
pub const TOPICS: &str = "/moim/topics/";
/// Held by the controller, under its lease. The create revision is the controller's term.
pub const CONTROLLER: &str = "/moim/controller";

/// Broker settings that were changed at run time.
pub const BROKER_SETTINGS: &str = "/moim/configs/brokers";
/// The configuration of the store's shards: their number and their durability.
pub const SLOTS_CONFIG: &str = "/moim/slots/config";

/// The topic id of the store's shards: shard n is partition n of it. Ids of topics are random and above 64 bits.
pub const SHARDS: TopicId = TopicId(0x7368_6172_6473);

/// The prefix of fence keys: changed whenever a leadership with a serving right is taken away from a node.
pub const FENCES: &str = "/moim/fence/";

/// The key that a node reads to extend its serving right.
pub fn fence(node: BrokerId) -> String {
    format!("{FENCES}{node}")
}

/// The key of a partition record.
pub fn partition(id: PartitionId) -> String {
    format!("{PARTITIONS}{}/{}", id.topic, id.index)
}

/// The partition whose record this key holds.
pub fn parse_partition(key: &str) -> Option<PartitionId> {
    parse_partition_id(key.strip_prefix(PARTITIONS)?)
}

/// Parses the display form of [`PartitionId`].
pub fn parse_partition_id(text: &str) -> Option<PartitionId> {
    let (topic, index) = text.split_once('/')?;
    let canonical = index == "0" || !index.starts_with(['0', '+']);
    let index = index.parse().ok().filter(|_| canonical)?;
    Some(PartitionId { topic: TopicId::parse(topic)?, index })
}

/// The key that marks a member as alive.
pub fn member(node: BrokerId) -> String {
    format!("{MEMBERS}{node}")
}

/// The key of a topic's record.
pub fn topic(name: &str) -> String {
    format!("{TOPICS}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partition_key_round_trips() {
        let id = PartitionId { topic: TopicId(7), index: 12 };
        assert_eq!(parse_partition(&partition(id)), Some(id));
        for wrong in ["/moim/partitions/", "/moim/topics/x", &format!("{PARTITIONS}{}/01", TopicId(7)), "x"] {
            assert_eq!(parse_partition(wrong), None, "{wrong}");
        }
    }
}
