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
//! All parts use the [state repository](repository::StateRepository): keys with revisions, compare-and-swap,
//! leases and watches, with etcd semantics.
//!
//! | backend | storage | for |
//! |---|---|---|
//! | [`MemoryRepository`] | none | tests, the simulator, throw-away nodes |
//! | [`EtcdRepository`] | an etcd, or a Moim, by its protocol | applications; nodes on an external etcd |
//! | `CoordRepository` (feature `embedded`) | the coordination core | a node of a cluster, a member of an application's group |
//! | `LocalRepository` (feature `embedded`) | a journal | one node, before it had a coordination core |
//!
//! Every backend passes the same suite (module `testing`). [`election`] and [`nodes`] are for Moim's own
//! nodes: an election without tasks and events, whose winner renews it itself, since the controller thread
//! must be the thread that renews.

#![warn(missing_docs)]

pub mod assignment;
pub mod backoff;
pub mod clock;
pub mod config;
pub mod context;
pub mod election;
#[cfg(any(test, feature = "embedded"))]
pub mod embedded;
pub mod engine;
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
#[cfg(any(test, feature = "embedded"))]
pub mod local;
pub mod lock;
pub mod manager;
pub mod membership;
pub mod memory;
pub mod metrics;
pub mod nodes;
pub mod registry;
pub mod repository;
pub mod routing;
#[cfg(test)]
mod scenario;
#[cfg(test)]
mod search;
pub mod session;
pub mod start;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use config::ClusterConfig;
pub use context::Context;
pub use election::{Election, Leadership};
#[cfg(any(test, feature = "embedded"))]
pub use embedded::CoordRepository;
pub use etcd::{EtcdClient, EtcdRepository};
#[cfg(any(test, feature = "embedded"))]
pub use local::LocalRepository;
pub use memory::MemoryRepository;
pub use repository::{
    BoxFuture, Compare, Entry, Event, Expect, Lease, LeaseId, Op, RepositoryError, StateRepository, Swap,
    Txn, TxnOutcome, Watch, WatchGap,
};
pub use start::{Cluster, Health, Lifecycle};
