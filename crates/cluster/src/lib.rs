//! The cluster library: what a program needs to know about the cluster it runs in.
//!
//! Today that is the [state repository](repository::StateRepository): keys with revisions, compare-and-swap,
//! leases and watches, with the meaning etcd gives them. Metadata stands behind it and nowhere else, so that
//! the coordination core, or a real etcd, can take the place of the single-node backend without a second
//! format to migrate from.
//!
//! | backend | keeps | for |
//! |---|---|---|
//! | [`MemoryRepository`] | nothing | tests, the simulator, throw-away nodes |
//! | [`EtcdRepository`] | an etcd, or a Moim, by its protocol | applications; nodes on an external etcd |
//! | [`LocalRepository`] | a journal | one node, before it had a coordination core |
//! | [`CoordRepository`] | the coordination core | a node of a cluster, also of one |
//!
//! Every backend passes the same suite (module `testing`).

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
