//! Kafka mode: the consumer group decides who owns which partition; this module follows it, and hands state over.
//!
//! | Kafka says | what happens, in this order |
//! |---|---|
//! | assigned | the record is claimed (its version rises), the last hand-off loaded, the work initialised, the position set behind the hand-off, consuming starts |
//! | revoked | nothing is consumed any more, the work's state is recorded with its last offset, offsets are committed, the partition is let go |
//! | lost | the work is dropped: somebody else has the partition already |
//!
//! State and position are one record, so they never disagree: after a crash the next owner begins with the state of the last
//! record at the offset after it. What was consumed after that is consumed again, on a state that does not know it, so
//! every message counts once. Offsets are committed to Kafka, too, for people and tools, and for partitions without a
//! record.
//!
//! Fencing: claiming raises the record's version, and every later write compares it. A claim reads the record, has the
//! group coordinator confirm this member's generation (by a commit), and then replaces exactly the record it read; so a
//! worker that was cut off from the store cannot take a partition back from its rightful owner. A worker whose record
//! was taken nevertheless claims it again for as long as Kafka assigns it the partition. Ownership counts as valid only
//! while the coordinator has accepted a commit of this generation within the session timeout. A process that was paused
//! and does not know that its partitions are gone can record nothing. The version is the token for what the work writes to.
//!
//! The callbacks of the client run on the worker's own thread, inside of poll, and block on the store: a rebalance goes on
//! when the hand-off is recorded. Never run a second assignor beside Kafka's.

mod claim;
mod election;
mod validity;
mod worker;

pub use self::election::KafkaElection;
pub use self::worker::{KafkaError, KafkaHandler, KafkaMessage, KafkaOptions, KafkaWorker};
