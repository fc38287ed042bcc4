//! Raft groups: replicated state machines whose logs share the node's commit log and its fsync.
//!
//! A [`Group`] is one member of one group. The embedder brings a [`StateMachine`] and a [`Transport`]; the log is two
//! journals of the node's store, the snapshots are files beside them. Many groups share one process, one transport
//! and one [`Router`].
//!
//! The algorithm is openraft's, pinned exactly, and no other crate names it (`docs/decisions/0004-openraft.md`).
//!
//! | file | owns |
//! |---|---|
//! | `group.rs` | the interface: propose, read, membership changes; serving peer RPCs |
//! | `log.rs` | log entries and vote on the journal |
//! | `machine.rs`, `snapshot.rs`, `seed.rs` | apply, snapshot files, an initial state |
//! | `runtime.rs` | the async runtime under openraft, deterministic for the simulator |
//! | `transport.rs`, `network.rs`, `rpc.rs`, `codec.rs` | the RPCs between members |
//!
//! Beside the groups, nodes call each other's [`Service`]s over the same connections.
//!
//! The node must call [`Router::on_durable`] from the store's durable sink, or nothing is ever acknowledged; it must
//! call [`Router::handle`] for every request that the transport receives; it must assign a voter id to one data
//! directory only, ever.

#![warn(missing_docs)]

mod codec;
mod group;
mod log;
mod machine;
mod network;
#[cfg(feature = "planted")]
pub mod planted;
mod rpc;
mod runtime;
mod seed;
mod snapshot;
mod transport;
mod types;

pub use group::{Group, GroupOptions, Host, LeaderWatch, MAX_ENTRY_BYTES, Timers, is_raft_journal};
pub use machine::{SnapshotWriter, StateMachine};
pub use seed::{SEED_INDEX, seed};
pub use transport::{
    BoxFuture, Doors, LocalPeer, MemoryNetwork, MemoryTransport, PeerId, Router, Service, ServiceError,
    ServiceId, TcpServer, TcpTransport, Transport, TransportError, open_stream, visit,
};
pub use types::{Applied, GroupError, GroupId, GroupMetrics, Leadership, Member, OpenError, Role, VoterId};
