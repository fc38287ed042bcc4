//! How nodes come together: founding a cluster, joining one, coming back to it.
//!
//! ```text
//!  empty folder ──alone──────────────▶ Founding ─┐  initialize: only a folder that never had a log
//!       │  └──--initial-cluster──▶ agree ─▶ Founding ─┤
//!       │                             │          ▼
//!       │     a cluster is there  ────┘       Member ──▶ records, lease, queue, etcd
//!       └──--join──▶ ask ──let in──▶ Joining ────▲  the leader sends the log
//!                     └─ not admitted: waits for `moim cluster replace`
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `protocol.rs` | questions and answers between nodes |
//! | `agree.rs` | how founders agree, as a pure decision |
//! | `claim.rs`, `confirm.rs` | a folder's proof that it is current, before its voter takes part; the other side of it |
//! | `damaged.rs` | a directory whose commit log is damaged: set aside where the other nodes have everything |
//! | `enter.rs` | the way of this node's folder into a cluster |
//! | `doorkeeper.rs` | answering other nodes |
//!
//! Must never: let a folder vote under an id that another folder may have voted under.

mod agree;
mod claim;
mod confirm;
mod damaged;
mod doorkeeper;
mod enter;
mod protocol;

pub(crate) use self::claim::Claimant;
pub(crate) use self::damaged::maybe_set_aside;
pub(crate) use self::doorkeeper::{Doorkeeper, Inside};
pub(crate) use self::enter::{Entrant, Way};
pub(crate) use self::protocol::{Card, greet};
