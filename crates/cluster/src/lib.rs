//! The cluster library: coordination for a program on several machines. Membership, leader election, locks,
//! partition assignment with hand-off, and key routing.
//!
//! One call starts it ([`Cluster::start`], [`Cluster::builder`]) from one configuration ([`ClusterConfig`]);
//! every part also works by itself on a [`Context`].
//!
//! | part | for |
//! |---|---|
//! | [`membership`], [`events`] | join and leave, heartbeats, a view of the members; the event stream |
//! | [`leadership`], [`lock`] | mutual exclusion with fencing tokens |
//! | [`assignment`] | partitions of work over members, with state hand-off |
//! | `kafka` (feature `kafka`) | the same, assigned by a Kafka consumer group |
//! | `groups` (feature `raft`) | a Raft group of the application's own processes, as the store of all of this |
//! | [`registry`], [`routing`], [`manager`] | servers by key ranges: the routing table, its manager, its followers |
//!
//! All parts use the [state repository](repository::StateRepository) of the crate `state`: keys with revisions,
//! compare-and-swap, leases and watches, with etcd semantics. [`EtcdRepository`] is its backend for applications: an etcd, or a
//! Moim, by its protocol.

#![warn(missing_docs)]

pub mod assignment;
pub mod backoff;
pub mod clock;
pub mod config;
pub mod context;
pub mod etcd;
pub mod events;
mod fault_injection;
mod follow;
#[cfg(any(test, feature = "raft"))]
pub mod groups;
mod held_key;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod keys;
pub mod leadership;
pub mod lock;
pub mod manager;
pub mod membership;
pub mod metrics;
pub mod registry;
pub mod routing;
#[cfg(test)]
mod scenario;
#[cfg(test)]
mod search;
pub mod session;
pub mod start;

pub use config::ClusterConfig;
pub use context::Context;
pub use etcd::{EtcdClient, EtcdRepository};
#[cfg(any(test, feature = "embedded"))]
pub use moim_state::CoordRepository;
pub use moim_state::{
    BoxFuture, Compare, Entry, Event, Expect, Lease, LeaseId, MemoryRepository, Op, RepositoryError,
    StateRepository, Swap, Txn, TxnOutcome, Watch, WatchGap, memory, repository,
};
pub use start::{Cluster, Health, Lifecycle};
