//! Where replication keeps its records in the state repository.

use moim_base::{BrokerId, TopicId};

use crate::types::PartitionId;

/// Every partition's record stands under this.
pub const PARTITIONS: &str = "/moim/partitions/";
/// Marks of living members: leased, one per node. The create revision is the broker epoch.
pub const MEMBERS: &str = "/moim/members/";
/// Every topic's record stands under this, by name.
pub const TOPICS: &str = "/moim/topics/";
/// Held by the one controller, under its lease. The create revision is the controller's term.
pub const CONTROLLER: &str = "/moim/controller";

/// Settings of the brokers that were changed at run time.
pub const BROKER_SETTINGS: &str = "/moim/configs/brokers";
/// The shards of the store: how many there are, and what they promise.
pub const SLOTS_CONFIG: &str = "/moim/slots/config";

/// The topic id of the store's shards: shard n is partition n of it. Ids of topics are random and above 64 bits.
pub const SHARDS: TopicId = TopicId(0x7368_6172_6473);

/// Changed whenever a leadership with a serving right is taken away from a node.
pub const FENCES: &str = "/moim/fence/";

/// The key a node reads to keep its right to answer.
pub fn fence(node: BrokerId) -> String {
    format!("{FENCES}{node}")
}

/// The key of a partition's record.
pub fn partition(id: PartitionId) -> String {
    format!("{PARTITIONS}{}/{}", id.topic, id.index)
}

/// The partition whose record this key holds.
pub fn parse_partition(key: &str) -> Option<PartitionId> {
    parse_partition_id(key.strip_prefix(PARTITIONS)?)
}

/// Reads what [`PartitionId`] prints.
pub fn parse_partition_id(text: &str) -> Option<PartitionId> {
    let (topic, index) = text.split_once('/')?;
    let canonical = index == "0" || !index.starts_with(['0', '+']);
    let index = index.parse().ok().filter(|_| canonical)?;
    Some(PartitionId { topic: TopicId::parse(topic)?, index })
}

/// The key that says a member is alive.
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
    fn a_partition_key_survives_the_way_there_and_back() {
        let id = PartitionId { topic: TopicId(7), index: 12 };
        assert_eq!(parse_partition(&partition(id)), Some(id));
        for wrong in ["/moim/partitions/", "/moim/topics/x", &format!("{PARTITIONS}{}/01", TopicId(7)), "x"] {
            assert_eq!(parse_partition(wrong), None, "{wrong}");
        }
    }
}
