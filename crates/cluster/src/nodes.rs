//! The nodes of a cluster, as the state repository keeps them.
//!
//! | key | lives | says |
//! |---|---|---|
//! | [`NODES`]`<node id>` | until the node is removed | who the node is and where it is reached |
//! | [`MEMBERS`]`<node id>` | while the node renews its lease | that this life of the node runs; its create revision is the broker epoch |
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
    /// Its Raft voter.
    pub voter: u64,
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
    }
}
