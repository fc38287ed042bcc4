//! Renews the serving right by reading this node's fence key (docs/decisions/0012-serving-right.md).
//!
//! A right lasts from the moment at which a successful linearizable read was sent. Invariant: before a right is
//! extended past a change of the fence key, the shards' records were read and applied.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_replica::fence::FenceNews;
use moim_replica::keys;
use moim_state::{Entry, RepositoryError};

use super::Service;
use crate::shared::lock;

/// The renewal interval; three reads fit into the length of a right.
const RENEW_INTERVAL: Duration = Duration::from_millis(150);
/// A node whose serving right has been expired for this long is isolated. Longer than an election of the coordination
/// group takes: a moment without a leader must not disconnect the clients of every node.
const ISOLATION_TIMEOUT_MS: u64 = 2_000;

/// Renews the serving right until the shutdown.
pub(super) async fn keep(service: Arc<Service>) {
    let key = keys::fence(service.options.node);
    loop {
        let sent_ms = service.parts.clock.monotonic_ms();
        match service.read_fence(&key).await {
            Ok(entry) => {
                let revision = entry.map_or(0, |entry| entry.mod_revision);
                let change = lock(&service.serving_right).on_read(sent_ms, revision);
                if let FenceNews::Changed { revision } = change {
                    // A leadership was taken from this node; the records show which.
                    match service.read_records().await {
                        Ok(read_at) => lock(&service.serving_right).on_applied(revision.max(read_at)),
                        Err(error) => tracing::debug!(%error, "shard records: read failed"),
                    }
                }
                service.extend_serving_right();
            }
            Err(error) => tracing::debug!(%error, "serving right not renewed"),
        }
        service.update_isolated();
        rest(RENEW_INTERVAL).await;
    }
}

impl Service {
    /// Reads the fence key. A read without a response counts as isolation while it is pending.
    async fn read_fence(&self, key: &str) -> Result<Option<Entry>, RepositoryError> {
        let mut read = pin!(self.parts.repository.get(key));
        loop {
            tokio::select! {
                biased;
                entry = &mut read => return entry,
                () = tokio::time::sleep(RENEW_INTERVAL) => self.update_isolated(),
            }
        }
    }

    /// Isolation begins when the serving right has been expired for [`ISOLATION_TIMEOUT_MS`], and ends with the next
    /// right. Clients are disconnected when it begins: the other nodes may have elected primaries in place of this
    /// node, and a connected client waits here instead of asking them.
    fn update_isolated(&self) {
        let until_ms = lock(&self.serving_right).until_ms();
        // A node that never had a serving right is starting.
        let isolated =
            until_ms > 0 && self.parts.clock.monotonic_ms() > until_ms.saturating_add(ISOLATION_TIMEOUT_MS);
        let was = self.shared.isolated.swap(isolated, Ordering::AcqRel);
        if isolated && !was {
            tracing::warn!("node isolated: no linearizable read succeeds; clients of the store disconnected");
            self.shared.clients().values().for_each(|client| client.mailbox.kill());
        } else if was && !isolated {
            tracing::info!("node no longer isolated; commands of the store are served again");
        }
    }

    /// The disk of this node is impaired and other nodes serve in its place, or it works again. Meanwhile connections
    /// of clients are closed: this node's view of the slots may be stale, and a client that waits for it finds no other
    /// node.
    pub fn set_withdrawn(&self, withdrawn: bool) {
        let was = self.shared.withdrawn.swap(withdrawn, Ordering::AcqRel);
        if withdrawn && !was {
            tracing::warn!("disk impaired: clients of the store are sent to the other nodes");
            self.shared.clients().values().for_each(|client| client.mailbox.kill());
        }
    }

    /// Extends the serving right of all shards.
    fn extend_serving_right(&self) {
        let until = lock(&self.serving_right).until_ms();
        for local in lock(&self.locals).values() {
            local.shard.set_serving_right_until(until);
        }
    }
}
