//! The coordination core: keys with revisions, transactions, leases and watches, with the meaning etcd gives them.
//!
//! All but [`engine`] and [`api`] is a pure state machine: no clock, no randomness, no I/O, no await. The same commands in
//! the same order give the same state on every node, and time enters only as an argument. [`engine`] runs it on a Raft
//! group.
//!
//! | part | what it is | who runs it |
//! |---|---|---|
//! | [`State`] | what the Raft log adds up to: two key spaces, leases, alarms | every node, from the log |
//! | [`Command`], [`Reply`] | what goes into the log and what comes out, with their binary form | |
//! | [`snapshot`] | a [`State`] as a stream of checked frames, and back | every node |
//! | [`shelf`] | a file that old values go to | every node |
//! | [`bolt`] | the user's keys as a database file of etcd, and back | whoever backs up or moves in |
//! | [`WatchHub`] | who wants to hear of which keys, and how far each has heard | the node that holds the stream |
//! | [`LeaseClock`] | when leases end | the leader |
//! | [`AutoCompactor`] | how far history may be forgotten | the leader |
//! | [`api`] | the etcd v3 API on a port | every node |
//! | [`Coordinator`] | all of this on a node: proposals, reads, renewals, watch streams | every node |

#![warn(missing_docs)]

pub mod api;
mod auto_compact;
pub mod bolt;
mod codec;
pub mod engine;
mod error;
mod lease;
mod lease_clock;
mod range;
mod reply;
mod request;
pub mod shelf;
pub mod snapshot;
mod space;
mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod watch;

pub use auto_compact::AutoCompactor;
pub use codec::DecodeError;
pub use engine::{
    CoordError, Coordinator, CoordinatorOptions, Header, LeaseInfo, MemberInfo, Status, WatchItem,
    WatchStream,
};
pub use error::{Code, Error};
pub use lease::{Lease, LeaseId, MAX_LEASE_TTL_MS, MIN_CLIENT_TTL_MS, MIN_NODE_TTL_MS};
pub use lease_clock::{LeaseClock, LeaseClockConfig, Renewal};
pub use range::{KeyRange, RangeEnd, SYSTEM_PREFIX, SpaceId};
pub use reply::{DeleteReply, HashReply, KeyValue, PutReply, RangeReply, Reply, TxnOpReply, TxnReply};
pub use request::{
    Alarm, AlarmKind, Command, Compare, CompareResult, CompareTarget, DeleteRequest, MAX_REQUEST_BYTES,
    MAX_TXN_OPS, Op, Origin, PutRequest, RangeRequest, SortOrder, SortTarget, TxnOp, TxnRequest,
};
pub use state::State;
pub use watch::{Batch, Event, EventBatch, WatchHub, WatchRequest, WatcherId};
