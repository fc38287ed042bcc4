//! A prefix of the store, followed: everything that is there, then every change, and after any gap the difference.
//!
//! Invariant: the changes so far, applied in order, make exactly what the store held at some revision that never goes
//! back. One watch on the store, whatever happens.

use std::collections::BTreeMap;

use tokio::sync::mpsc;

use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::repository::{Entry, Event};

/// A change of what is followed.
pub(crate) enum Change {
    Put(Entry),
    Gone(String),
    /// Everything that the store holds has been told.
    Listed,
}

/// Follows a prefix in a task of its own.
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
    // The mod revision of what was told.
    let mut told: BTreeMap<String, i64> = BTreeMap::new();
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
            let mut gone: Vec<String> = told.keys().cloned().collect();
            for entry in entries {
                gone.retain(|key| *key != entry.key);
                if told.insert(entry.key.clone(), entry.mod_revision) != Some(entry.mod_revision) {
                    sender.send(Change::Put(entry)).await?;
                }
            }
            for key in gone {
                told.remove(&key);
                sender.send(Change::Gone(key)).await?;
            }
            sender.send(Change::Listed).await?;
            while let Some(Ok(event)) = watch.next().await {
                match event {
                    Event::Put(entry) => {
                        told.insert(entry.key.clone(), entry.mod_revision);
                        sender.send(Change::Put(entry)).await?;
                    }
                    Event::Delete { key, .. } => {
                        told.remove(&key);
                        sender.send(Change::Gone(key)).await?;
                    }
                }
            }
        } else if !std::mem::replace(&mut is_away, true) {
            context.events.publish(ClusterEvent::Store { reachable: false });
        }
        backoff.pause().await;
    }
}
