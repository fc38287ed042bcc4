//! The coordination service core: keys with revisions, transactions, leases and watches, with etcd's semantics.
//!
//! All modules except [`engine`] and [`api`] are a pure state machine: no clock, no randomness, no I/O, no await. The
//! same commands in the same order give the same state on every node, and time enters only as an argument. [`engine`]
//! runs the state machine on a Raft group.
//!
//! | part | what it is | where it runs |
//! |---|---|---|
//! | [`State`] | the applied state of the Raft log: two key spaces, leases, alarms | every node, from the log |
//! | [`Command`], [`Reply`] | the input and the output of apply, with their binary encoding | |
//! | [`snapshot`] | a [`State`] as a stream of checksummed frames, and the restore from it | every node |
//! | [`spill`] | the file that superseded values are moved to | every node |
//! | [`bolt`] | the user keys as a bbolt database file of etcd, and the import of one | backup and restore |
//! | [`WatchHub`] | the watchers, their key ranges and the next revision of each | the node that serves the watch stream |
//! | [`LeaseClock`] | lease deadlines | the leader |
//! | [`AutoCompactor`] | the revision that history is compacted to | the leader |
//! | [`api`] | the etcd v3 API on a port | every node |
//! | [`Coordinator`] | the running service on a node: proposals, reads, lease keepalives, watch streams | every node |

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
pub mod snapshot;
mod space;
pub mod spill;
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
