//! The store: a Redis Cluster whose memory is a view of a replicated journal.
//!
//! A shard is one [`keyspace::Keyspace`] under one lock with one journal. A command runs on the event loop of its
//! connection ([`cmd`] has one file per family), its changes are appended to the journal as [`effects`], and no reply
//! that could show an uncommitted change is sent before the journal has committed it.
//!
//! Invariants: the keyspace and the commands are pure (time and randomness are inputs); a replay of the effects gives
//! the same keyspace; no lock is held across an await.

#![warn(missing_docs)]

mod active_expiry;
mod busy;
pub mod cluster;
pub mod cmd;
pub mod command_stats;
mod connection;
pub mod ctx;
pub mod deferred;
pub mod effects;
pub mod error;
pub mod events;
pub mod evict;
pub mod exec;
pub mod functions;
pub mod hazard;
pub mod keyspace;
pub mod log;
pub mod memory;
mod migration;
pub mod monitor;
mod offloaded;
pub mod ops;
pub mod output_limit;
mod peer;
#[cfg(feature = "planted")]
pub mod planted;
pub mod pubsub;
pub mod rdb;
pub mod replicated;
pub mod script;
pub mod server;
pub mod service;
pub mod session;
pub mod settings;
pub mod shard;
mod shard_task;
pub mod shared;
pub mod slot_set;
pub mod snapshot;
pub mod tracking;
pub mod value;

/// The number of hash slots.
pub const SLOTS: usize = moim_wire_resp::Slot::COUNT as usize;

/// The hash slot of a key.
pub fn slot_of(key: &[u8]) -> u16 {
    moim_wire_resp::Slot::of(key).get()
}
