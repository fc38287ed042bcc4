//! Who owns which partition, and what an owner hands to the next.
//!
//! A partition is any share of the work: a Kafka partition, a range, a group of machines. Its record
//! `cluster:assignments/{group}/{partition}` names the owner, the equipment that belongs to it, the last hand-off and how
//! far the owner came.
//!
//! | file | owns |
//! |---|---|
//! | `plan.rs` | who should own what: a pure function |
//! | `record.rs` | the record, the topology events |
//! | `handoff.rs` | hand-offs: small in the record, larger compressed, large ones by reference |
//! | `leader.rs` | the leader's part: decides and commits |
//! | `worker.rs` | the owners' part: takes, drains, hands over |
//!
//! How a partition changes hands (store or Raft mode; in Kafka mode Kafka decides, see `kafka`):
//!
//! ```text
//!   owner=A            the leader wants B:    owner=A target=B      A drains, records its hand-off, lets go
//!   owner=- target=B   B takes it:            owner=B version+1     B loads the hand-off, then works
//! ```
//!
//! Invariants:
//! - Every step is a compare-and-swap of the record. The leader's also compare its leadership; an owner's also
//!   compare its member record, so nothing is taken by a node whose lease has ended.
//! - The leader takes a partition from a living owner never; from one that is gone only in a transaction that compares
//!   that its member record *is* gone. The owner itself stops before, by its own clock.
//! - `version` grows with every owner: it is the fencing token of what the owner writes to.

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
