//! The cluster library: what a program needs to run on several machines. Who is there, who leads, who may touch what, who
//! owns which share of the work and what the owner before left, and which server has which key.
//!
//! One call starts it ([`Cluster::start`], [`Cluster::builder`]) from one configuration ([`ClusterConfig`]); every part also
//! works by itself on a [`Context`].
//!
//! | part | for |
//! |---|---|
//! | [`membership`], [`events`] | joining and leaving, heartbeats, a view of the others; what happened, as a stream |
//! | [`leadership`], [`lock`] | at most one at a time, with fencing tokens |
//! | [`assignment`] | shares of work over members, handed over with their state |
//! | `kafka` (feature `kafka`) | the same, decided by the consumer group of a Kafka |
//! | `groups` (feature `raft`) | a Raft group of the application's own processes, as the store of all of this |
//! | [`registry`], [`routing`], [`manager`] | servers by ranges of keys: the table, who keeps it, who follows it |
//!
//! Everything stands on the [state repository](repository::StateRepository): keys with revisions, compare-and-swap, leases and
//! watches, with the meaning etcd gives them.
//!
//! | backend | keeps | for |
//! |---|---|---|
//! | [`MemoryRepository`] | nothing | tests, the simulator, throw-away nodes |
//! | [`EtcdRepository`] | an etcd, or a Moim, by its protocol | applications; nodes on an external etcd |
//! | `CoordRepository` (feature `embedded`) | the coordination core | a node of a cluster, a member of an application's group |
//! | `LocalRepository` (feature `embedded`) | a journal | one node, before it had a coordination core |
//!
//! Every backend passes the same suite (module `testing`). [`election`] and [`nodes`] are what Moim's own nodes use: an election
//! without tasks and events, kept alive by whoever won it, since the thread that rules must be the one that renews.

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
mod follow;
#[cfg(any(test, feature = "raft"))]
pub mod groups;
mod hold;
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
mod planted;
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
