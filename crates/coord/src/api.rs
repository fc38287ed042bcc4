//! The etcd v3 API: gRPC over HTTP/2, and a few plain HTTP endpoints on the same port.
//!
//! ```text
//!  listener ─▶ first bytes ─▶ connection.rs   one task per connection, calls are futures in it
//!                   │            └▶ dispatch.rs   headers, method ─▶ kv, watch, lease, cluster, maintenance, lock, election, health
//!                   │                                                  └▶ Coordinator
//!                   ├▶ http1.rs   GET /health, /version, /metrics
//!                   └▶ anything else is closed
//! ```
//!
//! The messages are those of `moim-wire-grpc`; error codes and texts are etcd's, because clients match them. There is
//! no framework between the bytes and the handlers: a call costs what HTTP/2 costs and little more.
//!
//! Must never: depend on Raft, or hold a response for a client that does not read it beyond the bounds of `memory.rs`.

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
use self::dispatch::CallOptions;
pub use self::listener::{EtcdOptions, EtcdServer, Serving};
use self::memory::Budget;
pub use self::memory::MEMORY_RESERVE;
use self::metrics::EtcdMetrics;
use self::quorum::Quorum;
use crate::engine::{Coordinator, Header};
use crate::range::SpaceId;

/// The etcd version whose behaviour clients can expect.
pub const VERSION: &str = "3.5.21";

/// Shared state of all calls.
pub(crate) struct Api {
    coordinator: Coordinator,
    budget: Arc<Budget>,
    quorum: Quorum,
    scope: Scope,
    counters: EtcdMetrics,
    /// The metrics that `/metrics` renders.
    metrics: Option<Arc<Metrics>>,
}

impl Api {
    /// Response header at a revision.
    fn header(&self, revision: i64) -> ResponseHeader {
        header(self.coordinator.header_at(revision))
    }

    /// Response header at this node's current revision.
    fn header_now(&self) -> ResponseHeader {
        header(self.coordinator.header(SpaceId::User))
    }

    /// True if this node knows a leader and has not lost the quorum.
    fn has_leader(&self) -> bool {
        self.coordinator.group().leader().is_some() && !self.quorum.is_lost()
    }

    /// Waits until the server has to end a stream; returns the reason.
    async fn stream_end(&self, call_options: CallOptions) -> Status {
        let leaderless = async {
            match call_options.needs_leader {
                true => self.quorum.subscribe().lost().await,
                false => std::future::pending().await,
            }
        };
        let deadline = async {
            match call_options.timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.scope.shutdown().stopped() => status::stopped(),
            () = leaderless => status::no_leader(),
            () = deadline => status::deadline_exceeded(),
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
