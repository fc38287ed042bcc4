//! Monitors a key that represents something held (a leadership, a lock): when the key is deleted or
//! replaced, the hold has ended, although the lease may be valid.

use std::time::Duration;

use crate::backoff::{self, Backoff};
use crate::context::Context;
use crate::repository::{Event, StateRepository};
use crate::session::{Session, SessionEnd};

/// Timeout for a read while holding; the session's own deadline ends the wait earlier.
const READ_TIMEOUT: Duration = Duration::from_secs(3600);

/// Starts to monitor `key`, which was created at revision `created`. `on_loss` gets the reason, unless the
/// session was closed.
pub(crate) fn monitor(
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
            () = wait_until_replaced(&*store, &key, created) => {
                session.end(SessionEnd::Taken(format!("the key {key} was deleted or replaced by another owner")));
                session.lost().await
            }
        };
        if end != SessionEnd::Closed {
            on_loss(&end.to_string());
        }
    });
}

/// Returns when the key with create revision `created` no longer exists.
pub(crate) async fn wait_until_replaced(store: &dyn StateRepository, key: &str, created: i64) {
    let mut backoff = Backoff::default();
    loop {
        let Ok((revision, entries)) = backoff::read(READ_TIMEOUT, || store.list(key)).await else {
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
                Event::Delete { key: deleted, .. } if deleted == key => return,
                Event::Put(entry) if entry.key == key && entry.create_revision != created => return,
                Event::Put(_) | Event::Delete { .. } => {}
            }
        }
        // A watch gap, or the end of the watch: read again.
        backoff.pause().await;
    }
}
