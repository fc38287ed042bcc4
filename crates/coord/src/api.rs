//! The etcd v3 API: gRPC on HTTP/2, and a little plain HTTP on the same port.
//!
//! ```text
//!  listener ─▶ first bytes ─▶ connection.rs   one task per connection, calls are futures in it
//!                   │            └▶ dispatch.rs   headers, method ─▶ kv, watch, lease, cluster, maintenance, lock, election, health
//!                   │                                                  └▶ Coordinator
//!                   ├▶ http1.rs   GET /health, /version, /metrics
//!                   └▶ anything else is closed
//! ```
//!
//! The messages are those of `moim-wire-grpc`; codes and texts of errors are etcd's, because clients match them. There is
//! no framework between the bytes and the handlers: a call costs what HTTP/2 costs and little more.
//!
//! Must never: know anything of Raft, or keep an answer in memory for a client that does not read it beyond the bounds
//! that `memory.rs` sets.

mod auth;
mod backup;
mod call;
mod cluster;
mod connection;
mod convert;
mod dispatch;
mod election;
mod health;
mod http1;
mod kv;
mod lease;
mod listener;
mod lock;
mod maintenance;
mod memory;
mod metrics;
mod quorum;
mod socket;
mod status;
mod watch;

use std::sync::Arc;

use moim_base::metrics::Metrics;
use moim_base::task::Scope;
use moim_wire_grpc::Status;
use moim_wire_grpc::etcd::ResponseHeader;

pub use self::backup::{BackupError, read_backup};
use self::dispatch::Terms;
pub use self::listener::{EtcdOptions, EtcdServer, Serving};
use self::memory::Budget;
pub use self::memory::MEMORY_RESERVE;
use self::metrics::EtcdMetrics;
use self::quorum::Quorum;
use crate::engine::{Coordinator, Header};
use crate::range::SpaceId;

/// The version of etcd whose behaviour clients can expect.
pub const VERSION: &str = "3.5.21";

/// What every call needs.
pub(crate) struct Api {
    coordinator: Coordinator,
    budget: Arc<Budget>,
    quorum: Quorum,
    scope: Scope,
    counters: EtcdMetrics,
    /// What `/metrics` shows.
    metrics: Option<Arc<Metrics>>,
}

impl Api {
    /// The header of an answer as of a revision.
    fn header(&self, revision: i64) -> ResponseHeader {
        header(self.coordinator.stamp(revision))
    }

    /// The header of an answer as of what this node knows now.
    fn header_now(&self) -> ResponseHeader {
        header(self.coordinator.header(SpaceId::User))
    }

    /// Whether somebody leads, as far as this node can tell at once.
    fn has_leader(&self) -> bool {
        self.coordinator.group().leader().is_some() && !self.quorum.is_lost()
    }

    /// Returns when the server has to end a stream, with the reason.
    async fn stream_end(&self, terms: Terms) -> Status {
        let leaderless = async {
            match terms.needs_leader {
                true => self.quorum.interest().lost().await,
                false => std::future::pending().await,
            }
        };
        let too_late = async {
            match terms.timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.scope.shutdown().stopped() => status::stopped(),
            () = leaderless => status::no_leader(),
            () = too_late => status::deadline_exceeded(),
        }
    }
}

fn header(header: Header) -> ResponseHeader {
    ResponseHeader {
        cluster_id: header.cluster_id,
        member_id: header.member_id,
        revision: header.revision,
        raft_term: header.raft_term,
    }
}

#[cfg(test)]
mod tests;
