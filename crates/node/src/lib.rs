//! The runtime of a node: wires the queue, the store and the coordination core together and runs them.
//!
//! A library, so that the command line and the simulator can start a node. It reads no command line, no configuration
//! file and no environment variable of the configuration: [`run`] gets a [`config::Config`].
//!
//! | module | owns |
//! |---|---|
//! | `serve` | start and stop of a node, in order; the ready line |
//! | `config` | the keys of the configuration, their defaults and the rules between them |
//! | `data_dir` | the data directory: lock, identity, runs |
//! | `formation` | how a data directory becomes a member of a cluster |
//! | `control` | the control thread: Raft, the coordination core, presence, controller election |
//! | `journals`, `replication` | the journal store and the replication driver |
//! | `queue`, `slots`, `etcd` | the Kafka, Redis and etcd listeners |
//! | `admin` | the HTTP listener: health, metrics, admin API |
//! | `offline` | changes of the data directory of a node that does not run |
//!
//! The public items are those that the command line uses; everything else is private to this crate.

#![warn(missing_docs)]

mod admin;
mod allocator;
pub mod config;
mod control;
mod data_dir;
mod etcd;
mod exit;
mod formation;
mod journals;
pub mod offline;
mod queue;
mod replication;
mod serve;
mod signals;
mod slots;
mod text;

pub use crate::allocator::set_release_memory;
pub use crate::data_dir::FORMAT as DATA_FORMAT;
pub use crate::exit::{Failure, Outcome, Status};
pub use crate::serve::{cannot_listen, raise_file_limit, run, start_logs, use_small_pages};
pub use crate::signals::Signals;
pub use crate::text::{counted, styled};

/// The responses of the admin API, for clients that decode them.
pub mod api {
    pub use crate::admin::NOT_IN_CLUSTER;
    pub use crate::control::events::ClusterEvent;
    pub use crate::control::report::{ClusterReport, NodeReport, StrangerReport};
    pub use crate::control::view::PartitionCounts;
}
