//! Watch clients: each watches every key from the first revision. All of them must receive the same events, each once
//! and in order, from whichever nodes and over any number of reconnects.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_coord::{Coordinator, Event, WatchItem, WatchRequest};
use tokio::sync::mpsc;

use super::{ClientPool, random_sleep};

/// The events that watchers received.
#[derive(Default)]
pub(crate) struct Watched {
    changes: Mutex<BTreeMap<i64, Vec<String>>>,
    /// The newest revision that each watcher received.
    revisions: [AtomicI64; 2],
}

impl Watched {
    /// True if every watcher has received all events up to a revision.
    pub(crate) fn all_received(&self, revision: i64) -> bool {
        self.revisions().iter().all(|received| *received >= revision)
    }

    /// The newest revision of each watcher.
    pub(crate) fn revisions(&self) -> Vec<i64> {
        self.revisions.iter().map(|revision| revision.load(Ordering::Relaxed)).collect()
    }

    fn on_revision(&self, revision: i64, events: Vec<String>) -> Result<(), String> {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = changes.entry(revision).or_insert_with(|| events.clone());
        if *known == events {
            return Ok(());
        }
        Err(format!(
            "two watchers received different events of revision {revision}: {known:?} and {events:?}"
        ))
    }
}

/// Runs until the end of the world: the last events count, too.
pub(super) async fn client(pool: Arc<ClientPool>, number: u64) {
    let number = usize::try_from(number).expect("there are two watchers");
    // The key space starts at revision 1.
    let mut revision = 1;
    loop {
        random_sleep(10..200).await;
        let Some(node) = pool.shared.any_node() else { continue };
        let (_connection, mut disconnected) = pool.shared.connect(&node);
        let (sender, mut received) = mpsc::channel(1);
        node.handle.spawn(watch(node.coordinator, revision + 1, sender));
        // Sometimes switches to another node although this one works.
        let until = tokio::time::Instant::now() + Duration::from_millis(fastrand::u64(500..5_000));
        loop {
            let events = tokio::select! {
                biased;
                events = received.recv() => events,
                _ = &mut disconnected => None,
                () = tokio::time::sleep_until(until) => None,
            };
            let Some(events) = events else { break };
            if let Err(why) = on_events(&pool, &mut revision, &events) {
                pool.shared.violation(format!("watcher {number}: {why}"));
            }
            pool.watched.revisions[number].store(revision, Ordering::Relaxed);
        }
    }
}

fn on_events(pool: &ClientPool, last: &mut i64, events: &[Event]) -> Result<(), String> {
    for group in events.chunk_by(|a, b| a.kv.mod_revision == b.kv.mod_revision) {
        let revision = group[0].kv.mod_revision;
        if revision != *last + 1 {
            return Err(format!("received revision {revision} after {last}"));
        }
        *last = revision;
        let line = |event: &Event| {
            let (key, value) =
                (String::from_utf8_lossy(&event.kv.key), String::from_utf8_lossy(&event.kv.value));
            if event.is_delete { format!("-{key}") } else { format!("{key}={value}") }
        };
        pool.watched.on_revision(revision, group.iter().map(line).collect())?;
    }
    Ok(())
}

async fn watch(coordinator: Coordinator, from: i64, sender: mpsc::Sender<Vec<Event>>) {
    let mut stream = coordinator.watcher();
    let all_keys = bytes::Bytes::from_static(b"\0");
    let request = WatchRequest {
        key: all_keys.clone(),
        range_end: all_keys,
        start_revision: from,
        ..WatchRequest::default()
    };
    if stream.create(request).is_err() {
        return;
    }
    loop {
        let item = tokio::select! {
            biased;
            () = sender.closed() => return,
            item = stream.next() => item,
        };
        match item {
            Some(WatchItem::Events { batch, .. }) => {
                if sender.send(batch.events).await.is_err() {
                    return;
                }
            }
            Some(WatchItem::Progress { .. }) => {}
            Some(WatchItem::Canceled { .. }) | None => return,
        }
    }
}
