//! Partition assignment: partition ownership and the hand-off between owners.
//!
//! A partition is any unit of work: a Kafka partition, a key range, a group of machines. Its assignment
//! record `cluster:assignments/{group}/{partition}` holds the owner, the equipment of the partition, the
//! last hand-off and the last processed offset.
//!
//! | file | owns |
//! |---|---|
//! | `plan.rs` | the assignment plan: a pure function |
//! | `record.rs` | the assignment record, the topology events |
//! | `handoff.rs` | hand-off storage: inline, compressed, or by reference |
//! | `leader.rs` | the leader: plans and commits |
//! | `worker.rs` | the owner: acquires, drains, hands over |
//!
//! Ownership transfer (store or Raft mode; in Kafka mode the Kafka group coordinator assigns, see `kafka`):
//!
//! ```text
//!
//!   owner=A            the leader plans B:    owner=A target=B      A drains, records its hand-off, releases
//!   owner=- target=B   B acquires:            owner=B version+1     B loads the hand-off, then starts work
//! ```
//!
//! Invariants:
//!
//! - Every step is a compare-and-swap of the record. The leader also compares its leadership; an owner also
//!   compares its member record, so a node with an expired lease acquires nothing.
//! - The leader never takes a partition from a live owner. It takes a partition from a failed owner only in
//!   a transaction that compares that the member record is deleted. The owner itself stops earlier, by its
//!   own clock.
//! - `version` grows with every owner: it is the fencing token for writes of the owner.

mod handoff;
mod leader;
pub mod plan;
mod record;
mod worker;

pub use self::handoff::{BlobStore, Handoff, HandoffError, HandoffOptions, HandoffStore, StoredHandoff};
pub use self::leader::{AssignmentLeader, LeaderOptions, Rebalanced};
pub use self::record::{AssignmentRecord, PartitionSpec, TopologyChange, TopologyEvent};
pub use self::worker::{AssignmentWorker, HandedOver, Owned, PartitionHandler};

#[cfg(test)]
mod tests;
