//! The record of a partition, and the events about it.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::handoff::StoredHandoff;

/// A partition that is to be owned by somebody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PartitionSpec {
    /// Its name.
    pub id: String,
    /// Where it is at home; empty for nowhere in particular.
    pub zone: String,
    /// The equipment that belongs to it.
    pub equipment_ids: Vec<String>,
}

/// Who owns a partition, and what the owner before handed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AssignmentRecord {
    /// Who owns it; empty while it changes hands.
    pub owner_node_id: String,
    /// The owner's life: the create revision of its member record. 0 where nothing but Kafka says who lives.
    pub owner_epoch: i64,
    /// Who is to own it next; empty when nobody else is.
    pub target_node_id: String,
    /// The equipment that belongs to it.
    pub equipment_ids: Vec<String>,
    /// What was handed over last.
    pub workflow_handoff: Option<StoredHandoff>,
    /// The last offset that the hand-off includes; -1 for none.
    pub last_offset: i64,
    /// Kafka mode: fingerprint of the message at `last_offset`, by which a recreated topic is noticed; 0 for none.
    #[serde(skip_serializing_if = "is_zero")]
    pub last_message: u32,
    /// The partition is no longer configured: its owner hands it over and no other takes it. The record stays, for the
    /// version and the last hand-off.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_retired: bool,
    /// Grows with every owner: the fencing token. See [`AssignmentRecord::next_version`].
    pub version: i64,
    /// The store's revision that the last rebalance was decided on.
    pub last_applied_index: i64,
    /// When it was written, by the writer's wall clock. For people.
    pub updated_at: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl AssignmentRecord {
    pub(crate) fn new() -> Self {
        Self { last_offset: -1, ..Self::default() }
    }

    /// The fencing token of the next owner, at a moment when the store was at `revision`.
    ///
    /// Invariant: a token is never larger than the revision of the write that takes the partition, and never smaller than
    /// the revision before it. So tokens grow also across a record that was deleted or could not be read.
    pub(crate) fn next_version(&self, revision: i64) -> i64 {
        (self.version + 1).max(revision)
    }

    pub(crate) fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain fields can be written down").into()
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }
}

/// What happened to a partition on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TopologyChange {
    /// This node owns it now.
    Assigned,
    /// This node has handed it over.
    Revoked,
    /// This node lost it without a chance to hand over.
    Lost,
    /// Another node owns it now.
    Moved,
}

/// A partition changes hands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyEvent {
    /// Of which group.
    pub group: String,
    /// Which partition.
    pub partition: String,
    /// What happened.
    pub change: TopologyChange,
    /// Who owns it now; empty while nobody does.
    pub owner_node_id: String,
    /// The equipment that belongs to it.
    pub equipment_ids: Vec<String>,
    /// What was handed over; a large one as its reference.
    pub workflow_handoff: Option<StoredHandoff>,
    /// The last offset that the hand-off includes; -1 for none.
    pub last_offset: i64,
    /// The fencing token of the ownership.
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
