//! The state repository: keys with revisions, compare-and-swap, leases and watches, with etcd semantics; and the records of
//! nodes in it.
//!
//! This is the coordination interface of `replica`, `queue` and `slots`, and the ground of the cluster library.
//!
//! | backend | storage | for |
//! |---|---|---|
//! | [`MemoryRepository`] | none | tests, the simulator, throw-away nodes |
//! | `CoordRepository` (feature `embedded`) | the coordination core | a node of a cluster, a member of an application's group |
//! | `EtcdRepository` of the crate `cluster` | an etcd, or a Moim, by its protocol | applications; nodes on an external etcd |
//!
//! Every backend passes the same suite (module `testing`). [`election`] is an election without tasks and events, whose winner
//! renews it itself: the controller thread must be the thread that renews.

#![warn(missing_docs)]

pub mod election;
#[cfg(any(test, feature = "embedded"))]
pub mod embedded;
pub mod engine;
pub mod memory;
pub mod nodes;
pub mod repository;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use election::{Election, Leadership};
#[cfg(any(test, feature = "embedded"))]
pub use embedded::CoordRepository;
pub use memory::MemoryRepository;
pub use repository::{
    BoxFuture, Compare, Entry, Event, Expect, Lease, LeaseId, Op, RepositoryError, StateRepository, Swap,
    Txn, TxnOutcome, Watch, WatchGap, prefix_end, prefix_range,
};
