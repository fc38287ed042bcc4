//! Keeps the right to answer: reads this node's fence key, and says to the shards until when they may speak.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_replica::fence::FenceNews;
use moim_replica::keys;

use super::Service;
use crate::shared::lock;

/// Between reads; three fit into the time a right lasts.
const EVERY: Duration = Duration::from_millis(150);

pub(super) async fn keep(service: Arc<Service>) {
    let key = keys::fence(service.options.node);
    loop {
        let sent_ms = service.parts.clock.monotonic_ms();
        match service.parts.repository.get(&key).await {
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
        rest(EVERY).await;
    }
}

impl Service {
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
