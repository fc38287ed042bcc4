//! Cluster formation: founding a cluster, joining one, rejoining it after a restart.
//!
//! ```text
//!  empty directory ──standalone───────────▶ Founding ─┐  initialize: only a directory that never had a Raft log
//!       │  └──--initial-cluster──▶ agree ──▶ Founding ─┤
//!       │                            │                 ▼
//!       │     a cluster exists  ─────┘              Member ──▶ records, lease, queue, etcd
//!       └──--join──▶ request ──admitted──▶ Joining ────▲  the leader sends the log
//!                      └─ not admitted: waits for `moim cluster replace`
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `protocol.rs` | requests and responses between nodes |
//! | `founding.rs` | the agreement of the founders, as a pure decision |
//! | `claim.rs`, `confirm.rs` | rollback detection at startup: the claim of a run, and its confirmation by members |
//! | `damaged.rs` | a data directory with a damaged commit log: set aside if the other nodes have all of its data |
//! | `bootstrap.rs` | the steps of this node's data directory into a cluster |
//! | `join_server.rs` | responses to other nodes |
//!
//! Must never: let a data directory vote under a voter id that another data directory may have voted under.

mod bootstrap;
mod claim;
mod confirm;
mod damaged;
mod founding;
mod join_server;
mod protocol;

pub(crate) use self::bootstrap::{Bootstrap, BootstrapMode};
pub(crate) use self::claim::Claimant;
pub(crate) use self::damaged::maybe_set_aside;
pub(crate) use self::join_server::{ClusterAccess, JoinServer};
pub(crate) use self::protocol::{Card, fetch_card};
