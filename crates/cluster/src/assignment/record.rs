//! The assignment record of a partition, and the topology events.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::handoff::StoredHandoff;

/// A configured partition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PartitionSpec {
    /// Partition id.
    pub id: String,
    /// Home zone; empty for none.
    pub zone: String,
    /// Equipment of the partition.
    pub equipment_ids: Vec<String>,
}

/// Owner of a partition, and the hand-off of the previous owner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AssignmentRecord {
    /// Current owner; empty during an ownership transfer.
    pub owner_node_id: String,
    /// Incarnation of the owner: the create revision of its member record. 0 in Kafka mode without a member
    /// record.
    pub owner_epoch: i64,
    /// Next owner; empty when no transfer is in progress.
    pub target_node_id: String,
    /// Equipment of the partition.
    pub equipment_ids: Vec<String>,
    /// The last recorded hand-off.
    pub workflow_handoff: Option<StoredHandoff>,
    /// Last offset that the hand-off includes; -1 for none.
    pub last_offset: i64,
    /// Kafka mode: fingerprint of the message at `last_offset`, to detect a recreated topic; 0 for none.
    #[serde(skip_serializing_if = "is_zero")]
    pub last_message: u32,
    /// The partition is no longer configured: its owner hands it over and no member acquires it. The record
    /// is kept for the version and the last hand-off.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_retired: bool,
    /// Grows with every owner: the fencing token. See [`AssignmentRecord::next_version`].
    pub version: i64,
    /// Store revision on which the last rebalance was planned.
    pub last_applied_index: i64,
    /// Time of the write, by the writer's wall clock. Informational.
    pub updated_at: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "signature required by serde")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl AssignmentRecord {
    pub(crate) fn new() -> Self {
        Self { last_offset: -1, ..Self::default() }
    }

    /// Fencing token of the next owner, for a store at `revision`.
    ///
    /// Invariant: a token is never larger than the revision of the write that acquires the partition, and
    /// never smaller than the revision before it. Tokens therefore grow also across a deleted or malformed
    /// record.
    pub(crate) fn next_version(&self, revision: i64) -> i64 {
        (self.version + 1).max(revision)
    }

    pub(crate) fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain fields serialize to JSON").into()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

/// Ownership change of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TopologyChange {
    /// This node acquired the partition.
    Assigned,
    /// This node handed the partition over.
    Revoked,
    /// This node lost the partition without a hand-off.
    Lost,
    /// Another node acquired the partition.
    Moved,
}

/// An ownership change of a partition, as published to subscribers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyEvent {
    /// Assignment group.
    pub group: String,
    /// Partition id.
    pub partition: String,
    /// Kind of the change.
    pub change: TopologyChange,
    /// Current owner; empty while there is none.
    pub owner_node_id: String,
    /// Equipment of the partition.
    pub equipment_ids: Vec<String>,
    /// The recorded hand-off; a large hand-off as its reference.
    pub workflow_handoff: Option<StoredHandoff>,
    /// Last offset that the hand-off includes; -1 for none.
    pub last_offset: i64,
    /// Fencing token of the ownership.
    pub version: i64,
}

impl TopologyEvent {
    pub(crate) fn new(
        group: &str,
        partition: &str,
        change: TopologyChange,
        record: &AssignmentRecord,
    ) -> Self {
        Self {
            group: group.to_owned(),
            partition: partition.to_owned(),
            change,
            owner_node_id: record.owner_node_id.clone(),
            equipment_ids: record.equipment_ids.clone(),
            workflow_handoff: record.workflow_handoff.clone(),
            last_offset: record.last_offset,
            version: record.version,
        }
    }
}
