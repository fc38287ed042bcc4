//! The metadata watch: applies topics, partition registrations, brokers and settings from the state repository,
//! whichever node wrote them.
//!
//! Everything under [`ROOT`] is listed once and watched from that revision on; after a watch gap it is listed again.
//! Partition registrations reach the replica driver in the order in which they are seen here: first the listing, then
//! watch events, never history.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_state::{Entry, Event};

use crate::broker::Broker;
use crate::broker_config;
use crate::partition::Refused;
use crate::topics::refuse_repository;

/// Prefix of all cluster metadata.
const ROOT: &str = "/moim/";
/// Backoff before the repository is read or watched again.
const RETRY: Duration = Duration::from_millis(200);

impl Broker {
    /// Applies a full listing. At node start this waits until the repository responds.
    pub(crate) async fn read_repository(&self, first: bool) -> Result<(), Refused> {
        let (revision, entries) = loop {
            match self.repository.list(ROOT).await {
                Ok(listed) => break listed,
                Err(error) if error.is_retryable() && !self.shutdown.is_stopped() => {
                    tracing::info!(%error, "waiting for the state repository");
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(refuse_repository(error)),
            }
        };
        self.brokers.reset(&entries);
        let applied = self.topics.apply_listing(&entries, revision, first).await;
        if first {
            applied.clone()?;
        }
        let settings = entries.iter().find(|entry| entry.key == broker_config::KEY);
        let set = settings.map_or(Ok(()), |entry| self.on_settings(entry));
        // Topic events of the applied part are handled even if another part failed.
        self.apply_topic_events();
        applied.and(set)?;
        self.revision.store(revision, Ordering::Release);
        Ok(())
    }

    async fn on_event(&self, event: Event) -> Result<(), Refused> {
        let revision = event.revision();
        match &event {
            Event::Put(entry) => self.on_put(entry).await?,
            Event::Delete { key, revision } => {
                self.brokers.on_delete(key);
                self.topics.apply_delete(key, *revision).await;
            }
        }
        self.revision.store(revision, Ordering::Release);
        self.apply_topic_events();
        Ok(())
    }

    async fn on_put(&self, entry: &Entry) -> Result<(), Refused> {
        if entry.key == broker_config::KEY {
            return self.on_settings(entry);
        }
        if !self.brokers.on_put(entry) {
            self.topics.apply_put(entry).await?;
        }
        Ok(())
    }
}

/// Watches the repository until the broker stops.
pub(crate) async fn run(broker: Arc<Broker>) {
    while !broker.shutdown.is_stopped() {
        let from = broker.revision.load(Ordering::Acquire) + 1;
        let mut watch = match broker.repository.watch(ROOT, from).await {
            Ok(watch) => watch,
            Err(error) => {
                tracing::warn!(%error, "state repository watch failed; retrying");
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => continue,
                    () = broker.shutdown.stopped() => return,
                }
            }
        };
        loop {
            tokio::select! {
                event = watch.next() => match event {
                    Some(Ok(event)) => {
                        if let Err(error) = broker.on_event(event).await {
                            tracing::error!(%error, "metadata change not applied; listing again");
                            break;
                        }
                    }
                    Some(Err(gap)) => {
                        tracing::info!(%gap, "metadata watch gap; listing again");
                        break;
                    }
                    None => break,
                },
                () = broker.shutdown.stopped() => return,
            }
        }
        // Retries until the whole listing is applied: no later event would bring the missing part.
        while let Err(error) = broker.read_repository(false).await {
            tracing::error!(%error, "metadata listing not applied; retrying");
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = broker.shutdown.stopped() => return,
            }
        }
    }
}
