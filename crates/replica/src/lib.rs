//! Replicated journals: one leader, followers that fetch from it, an in-sync set in the state repository, leader
//! epochs and a high watermark; and the controller that places replicas and elects leaders.
//!
//! Every module except [`driver`] is a plain state machine: inputs in, effects out, no clock, no randomness, no
//! await. The driver carries out the effects: it reads and writes journals, talks to peers, and proposes changes to
//! the state repository.
//!
//! | module | owns |
//! |---|---|
//! | [`state`] | the partition record: replicas, in-sync set, eligible set, leader, leader epoch |
//! | [`transition`] | the legal changes of the partition record, and the comparisons each write must make |
//! | [`leader`] | follower progress, high watermark, in-sync set changes, append admission |
//! | [`follower`] | the fetch loop: truncation by leader epoch, out-of-range reset, high watermark, backoff |
//! | [`replica`] | the role of a replica (leader, follower or idle), from the partition records it has seen |
//! | [`acks`] | the waiters for the high watermark |
//! | [`restart`] | whether a replica keeps its in-sync or eligible entry after a restart |
//! | [`controller`] | replica placement, leader election, partition reassignment |
//! | [`driver`] | runs the replicas of a node: connections between nodes, journals, proposals |
//! | [`machine`] | a state machine on top of a journal: applying committed records, snapshots |
//! | [`fence`] | a primary's serving right: its permission to answer from memory |
//! | [`log`] | the read-only view of a journal that these state machines use |
//! | [`message`] | the messages between followers and leaders |

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
