//! Keeps the right to answer: reads this node's fence key, and says to the shards until when they may speak.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_cluster::{Entry, RepositoryError};
use moim_replica::fence::FenceNews;
use moim_replica::keys;

use super::Service;
use crate::shared::lock;

/// Between reads; three fit into the time a right lasts.
const EVERY: Duration = Duration::from_millis(150);
/// A node whose right has been over for so long is isolated. Longer than an election of the coordination group takes: that the
/// group has no leader for a moment must not disconnect the clients of every node.
const ISOLATED_MS: u64 = 2_000;

pub(super) async fn keep(service: Arc<Service>) {
    let key = keys::fence(service.options.node);
    loop {
        let sent_ms = service.parts.clock.monotonic_ms();
        match service.read_fence(&key).await {
            Ok(entry) => {
                let revision = entry.map_or(0, |entry| entry.mod_revision);
                let news = lock(&service.right).on_read(sent_ms, revision);
                if let FenceNews::Changed { revision } = news {
                    // Something was taken away: what, the records say.
                    match service.read_records().await {
                        Ok(read_at) => lock(&service.right).on_applied(revision.max(read_at)),
                        Err(error) => tracing::debug!(%error, "the shards' records cannot be read"),
                    }
                }
                service.extend_right();
            }
            Err(error) => tracing::debug!(%error, "the right to answer was not renewed"),
        }
        service.update_isolated();
        rest(EVERY).await;
    }
}

impl Service {
    /// Reads the fence key. A read that is not answered counts as isolation while it is under way.
    async fn read_fence(&self, key: &str) -> Result<Option<Entry>, RepositoryError> {
        let mut read = pin!(self.parts.repository.get(key));
        loop {
            tokio::select! {
                biased;
                entry = &mut read => return entry,
                () = tokio::time::sleep(EVERY) => self.update_isolated(),
            }
        }
    }

    /// Isolation begins when the serving right has been over for [`ISOLATED_MS`], and ends with the next right. Its clients are
    /// disconnected when it begins: the other nodes may have elected primaries in its place, and a client that is not
    /// disconnected waits here instead of asking them.
    fn update_isolated(&self) {
        let until_ms = lock(&self.right).until_ms();
        // A node that never had a right is only starting.
        let isolated = until_ms > 0 && self.parts.clock.monotonic_ms() > until_ms.saturating_add(ISOLATED_MS);
        let was = self.shared.isolated.swap(isolated, Ordering::AcqRel);
        if isolated && !was {
            tracing::warn!("node isolated: no linearizable read succeeds; clients of the store disconnected");
            self.shared.clients().values().for_each(|client| client.mailbox.kill());
        } else if was && !isolated {
            tracing::info!("node no longer isolated; commands of the store are served again");
        }
    }

    /// This node's disk does not work and others serve in its place, or it works again. Meanwhile connections of clients
    /// are closed: what this node says of the slots may be old, and a client that waits for it finds no other node.
    pub fn set_withdrawn(&self, withdrawn: bool) {
        let was = self.shared.withdrawn.swap(withdrawn, Ordering::AcqRel);
        if withdrawn && !was {
            tracing::warn!("disk impaired: clients of the store are sent to the other nodes");
            self.shared.clients().values().for_each(|client| client.mailbox.kill());
        }
    }

    /// Tells the shards until when they may answer.
    fn extend_right(&self) {
        let until = lock(&self.right).until_ms();
        for local in lock(&self.locals).values() {
            local.shard.set_right(until);
        }
    }
}
