//! Follows a prefix of the store: a list, then every change, and after a watch gap the difference to a new
//! list.
//!
//! Invariant: the changes so far, applied in order, give exactly the state of the store at some revision
//! that never goes back. One follower has at most one watch on the store.

use std::collections::BTreeMap;

use tokio::sync::mpsc;

use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::repository::{Entry, Event};

/// A change under the followed prefix.
pub(crate) enum Change {
    Put(Entry),
    Deleted(String),
    /// The initial list is complete.
    Listed,
}

/// Follows a prefix in a separate task.
pub(crate) struct Follower {
    changes: mpsc::Receiver<Change>,
}

impl Follower {
    pub(crate) fn start(context: &Context, prefix: String) -> Self {
        let (sender, changes) = mpsc::channel(256);
        let (context, stop) = (context.clone(), context.scope.shutdown().clone());
        context.scope.clone().spawn("cluster follower", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = sender.closed() => {}
                _ = follow(&context, &prefix, &sender) => {}
            }
        });
        Self { changes }
    }

    /// The next change; `None` when the process stops. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Change> {
        self.changes.recv().await
    }
}

type Sent = Result<(), mpsc::error::SendError<Change>>;

async fn follow(context: &Context, prefix: &str, sender: &mpsc::Sender<Change>) -> Sent {
    let mut backoff = Backoff::default();
    // Mod revisions of the entries that were sent.
    let mut sent: BTreeMap<String, i64> = BTreeMap::new();
    let mut is_away = false;
    loop {
        let listed = context.repository.list(prefix).await;
        if let Ok((revision, entries)) = listed
            && let Ok(mut watch) = context.repository.watch(prefix, revision + 1).await
        {
            backoff.reset();
            if std::mem::take(&mut is_away) {
                context.events.publish(ClusterEvent::Store { reachable: true });
            }
            let mut deleted: Vec<String> = sent.keys().cloned().collect();
            for entry in entries {
                deleted.retain(|key| *key != entry.key);
                if sent.insert(entry.key.clone(), entry.mod_revision) != Some(entry.mod_revision) {
                    sender.send(Change::Put(entry)).await?;
                }
            }
            for key in deleted {
                sent.remove(&key);
                sender.send(Change::Deleted(key)).await?;
            }
            sender.send(Change::Listed).await?;
            while let Some(Ok(event)) = watch.next().await {
                match event {
                    Event::Put(entry) => {
                        sent.insert(entry.key.clone(), entry.mod_revision);
                        sender.send(Change::Put(entry)).await?;
                    }
                    Event::Delete { key, .. } => {
                        sent.remove(&key);
                        sender.send(Change::Deleted(key)).await?;
                    }
                }
            }
        } else if !std::mem::replace(&mut is_away, true) {
            context.events.publish(ClusterEvent::Store { reachable: false });
        }
        backoff.pause().await;
    }
}
