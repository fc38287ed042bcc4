//! The nodes of a cluster, as the state repository keeps them.
//!
//! | key | lives | says |
//! |---|---|---|
//! | [`NODES`]`<node id>` | until the node is removed | who the node is and where it is reached |
//! | [`MEMBERS`]`<node id>` | while the node renews its lease | that this run of the node serves, and what its data folder is worth; its create revision is the broker epoch |
//! | [`ORDERS`]`<node id>` | until it is carried out or taken back | what an operator wants of the node |
//!
//! Addresses are those the node wants to be reached by, as `host:port`; empty where it has no such listener.
//! Invariant: a node writes only its own records, under the directory id the cluster admitted; the one who admits,
//! removes or replaces it is whoever was asked to.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::repository::{RepositoryError, StateRepository};

/// Where nodes are.
pub const NODES: &str = "/moim/nodes/";
/// Where running nodes are.
pub const MEMBERS: &str = "/moim/members/";

/// Where orders are.
pub const ORDERS: &str = "/moim/orders/";

/// A node of the cluster, running or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeRecord {
    /// The stable number; the Kafka broker id.
    pub node_id: i32,
    /// The Raft voter; 0 while a replacement is waited for.
    pub voter: u64,
    /// Rises with every new data folder of the node.
    pub incarnation: u64,
    /// The data folder the cluster admitted; empty while a replacement is waited for.
    pub directory_id: String,
    /// For people.
    pub name: String,
    /// The failure domain; empty when there is none.
    pub zone: String,
    /// Where other nodes reach it.
    pub peer: String,
    /// Where etcd clients reach it.
    pub etcd: String,
    /// Where Kafka clients reach it.
    pub kafka: String,
    /// Where its admin port is.
    pub admin: String,
    /// Where Redis clients reach it.
    pub redis: String,
    /// The Moim it runs.
    pub version: String,
    /// The newest cluster format it can take part in.
    pub feature_level: u32,
}

/// The mark of a running node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemberRecord {
    /// The node.
    pub node_id: i32,
    /// Which of its data folders.
    pub incarnation: u64,
    /// Its Raft voter: the number the cluster gave to this data folder and gives to no other.
    pub voter: u64,
    /// The broker epoch since which this folder has lost no written byte; none means: since this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intact_since: Option<i64>,
    /// Partitions (`<topic id>/<n>`) whose copy in this folder is damaged.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
}

/// What an operator, or a node that stops, wants of a node. Its key holds the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeOrder {
    /// To lead nothing.
    Drain,
    /// To hold nothing.
    Remove,
}

impl NodeOrder {
    /// The word that is kept.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Remove => "remove",
        }
    }

    /// Reads what was kept. A word of a newer version is no order: nothing is done that is not understood.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Drain, Self::Remove].into_iter().find(|order| order.as_str().as_bytes() == bytes)
    }
}

/// A running node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveMember {
    /// What it says of itself.
    pub record: MemberRecord,
    /// Told apart from every earlier life of the node.
    pub broker_epoch: i64,
}

/// The key of a node's record.
pub fn node_key(node_id: i32) -> String {
    format!("{NODES}{node_id}")
}

/// The key of a running node's mark.
pub fn member_key(node_id: i32) -> String {
    format!("{MEMBERS}{node_id}")
}

/// The key of what is wanted of a node.
pub fn order_key(node_id: i32) -> String {
    format!("{ORDERS}{node_id}")
}

/// The node a key under `prefix` is about.
pub fn node_of(key: &str, prefix: &str) -> Option<i32> {
    key.strip_prefix(prefix)?.parse().ok()
}

macro_rules! json {
    ($record:ty, $what:literal) => {
        impl $record {
            /// As it is kept.
            pub fn to_bytes(&self) -> Bytes {
                serde_json::to_vec(self).expect("plain fields can be written down").into()
            }

            /// Reads what was kept. Fields of newer versions are passed over, missing ones are empty.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, RepositoryError> {
                serde_json::from_slice(bytes)
                    .map_err(|error| RepositoryError::Damaged(format!("{}: {error}", $what)))
            }
        }
    };
}

json!(NodeRecord, "a node's record");
json!(MemberRecord, "a member's record");

/// Every node, by number, and the revision they were read at.
pub async fn nodes(repository: &dyn StateRepository) -> Result<(i64, Vec<NodeRecord>), RepositoryError> {
    let (revision, entries) = repository.list(NODES).await?;
    let mut nodes: Vec<_> =
        entries.iter().map(|entry| NodeRecord::from_bytes(&entry.value)).collect::<Result<_, _>>()?;
    // Keys sort as text, nodes count as numbers.
    nodes.sort_by_key(|node| node.node_id);
    Ok((revision, nodes))
}

/// Every running node, by number, and the revision they were read at.
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
    fn records_of_other_versions_can_be_read() {
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
    fn orders_are_words() {
        for order in [NodeOrder::Drain, NodeOrder::Remove] {
            assert_eq!(NodeOrder::parse(order.as_str().as_bytes()), Some(order));
        }
        assert_eq!(NodeOrder::parse(b"dance"), None);
        assert_eq!(node_of(&order_key(12), ORDERS), Some(12));
        assert_eq!(node_of("/moim/orders/x", ORDERS), None);
    }
}
