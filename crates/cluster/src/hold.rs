//! Watches over a key that stands for something held: when the key goes, or somebody else's takes its place, whatever
//! it stood for has ended, although the lease may live.

use std::time::Duration;

use crate::backoff::{self, Backoff};
use crate::context::Context;
use crate::repository::{Event, StateRepository};
use crate::session::{Session, SessionEnd};

/// Patience for a read while holding; the session's own deadline is what ends the waiting.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Starts to watch over `key`, which was created at `created`. `on_loss` is told why it ended, unless it was closed.
pub(crate) fn watch_over(
    context: &Context,
    session: &Session,
    key: String,
    created: i64,
    on_loss: impl FnOnce(&str) + Send + 'static,
) {
    let (store, session) = (context.repository.clone(), session.watcher());
    context.scope.spawn("cluster hold", async move {
        let end = tokio::select! {
            biased;
            end = session.lost() => end,
            () = gone(&*store, &key, created) => {
                session.end(SessionEnd::Taken(format!("the key {key} was deleted or taken by somebody else")));
                session.lost().await
            }
        };
        if end != SessionEnd::Closed {
            on_loss(&end.to_string());
        }
    });
}

/// Returns when the key is not the one that was created at `created` any more.
pub(crate) async fn gone(store: &dyn StateRepository, key: &str, created: i64) {
    let mut backoff = Backoff::default();
    loop {
        let Ok((revision, entries)) = backoff::read(PATIENCE, || store.list(key)).await else {
            backoff.pause().await;
            continue;
        };
        if !entries.iter().any(|entry| entry.key == key && entry.create_revision == created) {
            return;
        }
        let Ok(mut watch) = store.watch(key, revision + 1).await else {
            backoff.pause().await;
            continue;
        };
        backoff.reset();
        while let Some(Ok(event)) = watch.next().await {
            match event {
                Event::Delete { key: gone, .. } if gone == key => return,
                Event::Put(entry) if entry.key == key && entry.create_revision != created => return,
                Event::Put(_) | Event::Delete { .. } => {}
            }
        }
        // A gap, or the end of the watch: look again.
        backoff.pause().await;
    }
}
