//! Kafka mode: the consumer group assigns the partitions; this module claims and releases them, with a hand-off of
//! state.
//!
//! | rebalance callback | steps, in this order |
//! |---|---|
//! | assigned | claim the assignment record (its version increases), load the last hand-off, initialise the handler, seek to the offset after the hand-off, start consuming |
//! | revoked | stop consuming, record the handler's state with its last offset, commit offsets, release the partition |
//! | lost | drop the handler's state: another member owns the partition already |
//!
//! State and offset are one record, so they never disagree: after a crash the next owner starts with the state of the
//! last record, at the offset after it. Messages consumed after that record are consumed again, on a state that does
//! not include them, so every message counts once. Offsets are also committed to Kafka, for operators and tools, and
//! for partitions without a record.
//!
//! Fencing: a claim increases the record's version, and every later write compares it. A claim reads the record, has
//! the group coordinator confirm this member's generation (by an offset commit), and then replaces exactly the record
//! it read; so a worker that was disconnected from the state repository cannot take a partition back from its current
//! owner. A worker whose record was taken nevertheless claims it again as long as Kafka assigns it the partition.
//! Ownership is valid only while the coordinator has accepted a commit of this generation within the session timeout.
//! A process that was paused and has lost its partitions unnoticed can record nothing. The version is the fencing
//! token for resources that the handler writes to.
//!
//! The client's callbacks run on the worker's own thread, inside of poll, and block on the repository: a rebalance
//! continues when the hand-off is recorded. Never run a second assignor beside Kafka's.

mod claim;
mod election;
mod validity;
mod worker;

pub use self::election::KafkaElection;
pub use self::worker::{KafkaError, KafkaHandler, KafkaMessage, KafkaOptions, KafkaWorker};
