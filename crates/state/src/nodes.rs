//! Node records of a cluster in the state repository.
//!
//! | key | lifetime | content |
//! |---|---|---|
//! | [`NODES`]`<node id>` | until the node is removed | identity and addresses of the node |
//! | [`MEMBERS`]`<node id>` | while the node renews its lease | liveness of this run of the node, and the integrity of its data folder; its create revision is the broker epoch |
//! | [`ORDERS`]`<node id>` | until it is completed or cancelled | an operator's order for the node |
//!
//! Addresses are advertised addresses, as `host:port`; empty without such a listener. Invariant: a node
//! writes only its own records, under the directory id that the cluster admitted; admission, removal and
//! replacement are written by the node that serves that request.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::repository::{RepositoryError, StateRepository};

/// Prefix of node records.
pub const NODES: &str = "/moim/nodes/";
/// Prefix of member records (running nodes).
pub const MEMBERS: &str = "/moim/members/";

/// Prefix of node orders.
pub const ORDERS: &str = "/moim/orders/";

/// A node of the cluster, running or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeRecord {
    /// Stable node id; the Kafka broker id.
    pub node_id: i32,
    /// Raft voter id; 0 while a replacement is pending.
    pub voter: u64,
    /// Grows with every new data folder of the node.
    pub incarnation: u64,
    /// Directory id that the cluster admitted; empty while a replacement is pending.
    pub directory_id: String,
    /// Display name.
    pub name: String,
    /// Zone (failure domain); empty for none.
    pub zone: String,
    /// Peer address.
    pub peer: String,
    /// Advertised address for etcd clients.
    pub etcd: String,
    /// Advertised address for Kafka clients.
    pub kafka: String,
    /// Address of its admin port.
    pub admin: String,
    /// Advertised address for Redis clients.
    pub redis: String,
    /// Moim version of the node.
    pub version: String,
    /// Highest feature level that the node supports.
    pub feature_level: u32,
}

/// Member record of a running node, under its lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemberRecord {
    /// Node id.
    pub node_id: i32,
    /// Incarnation of its data folder.
    pub incarnation: u64,
    /// Raft voter id: the number that the cluster assigned to this data folder and never reuses.
    pub voter: u64,
    /// Broker epoch since which this folder has lost no written byte; `None` means since this epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intact_since: Option<i64>,
    /// Partitions (`<topic id>/<n>`) whose replica in this folder is damaged.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
}

/// An order of an operator, or of a node that shuts down, for a node. The key's value is the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeOrder {
    /// Lead no partitions.
    Drain,
    /// Hold no replicas.
    Remove,
}

impl NodeOrder {
    /// The stored word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Remove => "remove",
        }
    }

    /// Parses the stored word. A word of a newer version is ignored: an unknown order has no effect.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Drain, Self::Remove].into_iter().find(|order| order.as_str().as_bytes() == bytes)
    }
}

/// A running node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveMember {
    /// The member record.
    pub record: MemberRecord,
    /// Broker epoch: distinguishes this run from every earlier run of the node.
    pub broker_epoch: i64,
}

/// The key of a node's record.
pub fn node_key(node_id: i32) -> String {
    format!("{NODES}{node_id}")
}

/// The key of a running node's member record.
pub fn member_key(node_id: i32) -> String {
    format!("{MEMBERS}{node_id}")
}

/// The key of a node's order.
pub fn order_key(node_id: i32) -> String {
    format!("{ORDERS}{node_id}")
}

/// The node id of a key under `prefix`.
pub fn node_of(key: &str, prefix: &str) -> Option<i32> {
    key.strip_prefix(prefix)?.parse().ok()
}

macro_rules! json {
    ($record:ty, $what:literal) => {
        impl $record {
            /// Encodes the record as JSON.
            pub fn to_bytes(&self) -> Bytes {
                serde_json::to_vec(self).expect("plain fields serialize to JSON").into()
            }

            /// Decodes the record. Unknown fields of newer versions are ignored, missing fields are empty.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, RepositoryError> {
                serde_json::from_slice(bytes)
                    .map_err(|error| RepositoryError::Damaged(format!("{}: {error}", $what)))
            }
        }
    };
}

json!(NodeRecord, "a node's record");
json!(MemberRecord, "a member's record");

/// All nodes in order of their ids, and the revision of the read.
pub async fn nodes(repository: &dyn StateRepository) -> Result<(i64, Vec<NodeRecord>), RepositoryError> {
    let (revision, entries) = repository.list(NODES).await?;
    let mut nodes: Vec<_> =
        entries.iter().map(|entry| NodeRecord::from_bytes(&entry.value)).collect::<Result<_, _>>()?;
    // Keys sort as text, node ids as numbers.
    nodes.sort_by_key(|node| node.node_id);
    Ok((revision, nodes))
}

/// All running nodes in order of their ids, and the revision of the read.
pub async fn members(repository: &dyn StateRepository) -> Result<(i64, Vec<LiveMember>), RepositoryError> {
    let (revision, entries) = repository.list(MEMBERS).await?;
    let live = |entry: &crate::Entry| {
        let record = MemberRecord::from_bytes(&entry.value)?;
        Ok(LiveMember { record, broker_epoch: entry.create_revision })
    };
    let mut members: Vec<_> = entries.iter().map(live).collect::<Result<_, RepositoryError>>()?;
    members.sort_by_key(|member| member.record.node_id);
    Ok((revision, members))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_other_versions_are_decoded() {
        let record = NodeRecord { node_id: 2, voter: 7, peer: "h:1".into(), ..NodeRecord::default() };
        assert_eq!(NodeRecord::from_bytes(&record.to_bytes()).unwrap(), record);
        let newer = NodeRecord::from_bytes(br#"{"node_id":2,"voter":7,"peer":"h:1","moons":3}"#).unwrap();
        assert_eq!(newer, record);
        assert!(NodeRecord::from_bytes(b"{").is_err());
        assert!(MemberRecord::from_bytes(b"7").is_err());
        let member = MemberRecord { node_id: 2, voter: 7, ..MemberRecord::default() };
        assert_eq!(&member.to_bytes()[..], br#"{"node_id":2,"incarnation":0,"voter":7}"#);
        assert_eq!(MemberRecord::from_bytes(&member.to_bytes()).unwrap(), member);
    }

    #[test]
    fn orders_round_trip_as_words() {
        for order in [NodeOrder::Drain, NodeOrder::Remove] {
            assert_eq!(NodeOrder::parse(order.as_str().as_bytes()), Some(order));
        }
        assert_eq!(NodeOrder::parse(b"dance"), None);
        assert_eq!(node_of(&order_key(12), ORDERS), Some(12));
        assert_eq!(node_of("/moim/orders/x", ORDERS), None);
    }
}
