//! Replicated journals: one leader, followers that fetch from it, an in-sync set in the state repository, leader
//! epochs and a high watermark; and the controller that places replicas and elects leaders.
//!
//! All but [`driver`] are plain state machines: inputs in, effects out, no clock, no randomness, no await. The driver
//! carries the effects out: it reads and writes journals, talks to peers, proposes to the repository.
//!
//! | module | owns |
//! |---|---|
//! | [`state`] | the record of a partition: replicas, in-sync set, eligible set, leader, leader epoch |
//! | [`transition`] | the legal changes of that record, and what each must compare |
//! | [`leader`] | progress of followers, high watermark, changes of the in-sync set, who may append |
//! | [`follower`] | the fetch loop: truncation by epoch, out of range, high watermark, backoff |
//! | [`replica`] | which of the two a replica is, from the records it has seen |
//! | [`acks`] | who waits for the high watermark |
//! | [`restart`] | what a replica's place is worth after a restart |
//! | [`controller`] | places replicas, elects leaders, moves replicas |
//! | [`driver`] | runs the copies of a node: connections between nodes, journals, proposals |
//! | [`machine`] | a state machine on top of a journal: applying what is committed, snapshots |
//! | [`fence`] | a primary's right to answer from memory |
//! | [`log`] | what these machines see of a journal |
//! | [`message`] | what followers and leaders tell each other |

#![warn(missing_docs)]

pub mod acks;
pub mod controller;
pub mod driver;
pub mod fence;
pub mod follower;
pub mod keys;
pub mod leader;
pub mod log;
pub mod machine;
pub mod message;
pub mod mutant;
pub mod replica;
pub mod restart;
pub mod state;
#[cfg(any(test, feature = "testing"))]
pub mod toy;
pub mod transition;
pub mod types;
#[cfg(any(test, feature = "testing"))]
pub mod world;

pub use acks::{AckError, Waiting};
pub use controller::{Controller, ControllerTuning, Plan};
pub use driver::{Dialler, Driver, DriverParts, Owner, Replicated};
pub use follower::{Follower, FollowerTuning, ResetPolicy};
pub use leader::{Leader, LeaderTuning, Outcome};
pub use log::LogView;
pub use replica::{Effect, Replica, Role};
pub use restart::Member;
pub use state::{InSync, PartitionState};
pub use transition::{Change, Expected};
pub use types::{BrokerEpoch, DirectoryId, Durability, PartitionId, Versioned};
