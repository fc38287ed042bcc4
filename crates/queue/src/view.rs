//! Follows the state repository: what it says of topics, partitions, brokers and settings is what this broker acts on,
//! whoever wrote it.
//!
//! Everything under [`ROOT`] is listed once and watched from there on; after a gap it is listed again. Records of
//! partitions reach the replica driver in the order in which they are seen here: listed first, then watched, never history.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_cluster::{Entry, Event};

use crate::broker::Broker;
use crate::broker_config;
use crate::partition::Refused;
use crate::topics::refuse_repository;

/// Everything the cluster knows about itself.
const ROOT: &str = "/moim/";
/// How long to wait before the repository is asked again.
const RETRY: Duration = Duration::from_millis(200);

impl Broker {
    /// Takes in everything there is. At the start of the node this waits for as long as the repository takes.
    pub(crate) async fn read_repository(&self, first: bool) -> Result<(), Refused> {
        let (revision, entries) = loop {
            match self.repository.list(ROOT).await {
                Ok(listed) => break listed,
                Err(error) if error.is_retryable() && !self.shutdown.is_stopped() => {
                    tracing::info!(%error, "the state repository does not answer yet");
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(refuse_repository(error)),
            }
        };
        self.brokers.reset(&entries);
        let taken = self.topics.take_in_all(&entries, revision, first).await;
        if first {
            taken.clone()?;
        }
        let settings = entries.iter().find(|entry| entry.key == broker_config::KEY);
        let set = settings.map_or(Ok(()), |entry| self.on_settings(entry));
        // What could be taken in is acted on, whatever could not.
        self.follow();
        taken.and(set)?;
        self.revision.store(revision, Ordering::Release);
        Ok(())
    }

    async fn on_event(&self, event: Event) -> Result<(), Refused> {
        let revision = event.revision();
        match &event {
            Event::Put(entry) => self.on_put(entry).await?,
            Event::Delete { key, revision } => {
                self.brokers.on_delete(key);
                self.topics.take_out(key, *revision).await;
            }
        }
        self.revision.store(revision, Ordering::Release);
        self.follow();
        Ok(())
    }

    async fn on_put(&self, entry: &Entry) -> Result<(), Refused> {
        if entry.key == broker_config::KEY {
            return self.on_settings(entry);
        }
        if !self.brokers.on_put(entry) {
            self.topics.take_in(entry).await?;
        }
        Ok(())
    }
}

/// Follows the repository until the broker stops.
pub(crate) async fn run(broker: Arc<Broker>) {
    while !broker.shutdown.is_stopped() {
        let from = broker.revision.load(Ordering::Acquire) + 1;
        let mut watch = match broker.repository.watch(ROOT, from).await {
            Ok(watch) => watch,
            Err(error) => {
                tracing::warn!(%error, "cannot watch the state repository; trying again");
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
                            tracing::error!(%error, "cannot act on a change; reading everything again");
                            break;
                        }
                    }
                    Some(Err(gap)) => {
                        tracing::info!(%gap, "changes were missed; reading everything again");
                        break;
                    }
                    None => break,
                },
                () = broker.shutdown.stopped() => return,
            }
        }
        // Until all of it is taken in: nothing else would come back to what was not.
        while let Err(error) = broker.read_repository(false).await {
            tracing::error!(%error, "cannot take in the state repository; trying again");
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = broker.shutdown.stopped() => return,
            }
        }
    }
}
