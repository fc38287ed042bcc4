//! Clients that watch every key from the beginning: all of them see the same changes, each once, in order, whichever
//! node they hear them from and however often they have to ask another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_coord::{Coordinator, Event, WatchItem, WatchRequest};
use tokio::sync::mpsc;

use super::{Crowd, nap};

/// What was heard.
#[derive(Default)]
pub(crate) struct Watched {
    changes: Mutex<BTreeMap<i64, Vec<String>>>,
    /// How far each watcher is.
    heard: [AtomicI64; 2],
}

impl Watched {
    /// Whether every watcher has heard everything up to a revision.
    pub(crate) fn all_heard(&self, revision: i64) -> bool {
        self.heard.iter().all(|heard| heard.load(Ordering::Relaxed) >= revision)
    }

    /// How far the watchers are.
    pub(crate) fn heard(&self) -> Vec<i64> {
        self.heard.iter().map(|heard| heard.load(Ordering::Relaxed)).collect()
    }

    fn on_revision(&self, revision: i64, events: Vec<String>) -> Result<(), String> {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = changes.entry(revision).or_insert_with(|| events.clone());
        if *known == events {
            return Ok(());
        }
        Err(format!("two watchers heard different things of revision {revision}: {known:?} and {events:?}"))
    }
}

/// Ends by the end of the world only: what is told last counts, too.
pub(super) async fn client(crowd: Arc<Crowd>, number: u64) {
    let number = usize::try_from(number).expect("there are two watchers");
    // The store begins at revision 1.
    let mut heard = 1;
    loop {
        nap(10..200).await;
        let Some(node) = crowd.shared.any_node() else { continue };
        let (_line, mut hung_up) = crowd.shared.connect(&node);
        let (tell, mut told) = mpsc::channel(1);
        node.handle.spawn(watch(node.coordinator, heard + 1, tell));
        // Now and then it turns to another node though this one is fine.
        let until = tokio::time::Instant::now() + Duration::from_millis(fastrand::u64(500..5_000));
        loop {
            let events = tokio::select! {
                biased;
                events = told.recv() => events,
                _ = &mut hung_up => None,
                () = tokio::time::sleep_until(until) => None,
            };
            let Some(events) = events else { break };
            if let Err(why) = hear(&crowd, &mut heard, &events) {
                crowd.shared.violation(format!("watcher {number}: {why}"));
            }
            crowd.watched.heard[number].store(heard, Ordering::Relaxed);
        }
    }
}

fn hear(crowd: &Crowd, heard: &mut i64, events: &[Event]) -> Result<(), String> {
    for one in events.chunk_by(|a, b| a.kv.mod_revision == b.kv.mod_revision) {
        let revision = one[0].kv.mod_revision;
        if revision != *heard + 1 {
            return Err(format!("after revision {heard} came {revision}"));
        }
        *heard = revision;
        let line = |event: &Event| {
            let (key, value) =
                (String::from_utf8_lossy(&event.kv.key), String::from_utf8_lossy(&event.kv.value));
            if event.is_delete { format!("-{key}") } else { format!("{key}={value}") }
        };
        crowd.watched.on_revision(revision, one.iter().map(line).collect())?;
    }
    Ok(())
}

async fn watch(coordinator: Coordinator, from: i64, tell: mpsc::Sender<Vec<Event>>) {
    let mut stream = coordinator.watcher();
    let everything = bytes::Bytes::from_static(b"\0");
    let request = WatchRequest {
        key: everything.clone(),
        range_end: everything,
        start_revision: from,
        ..WatchRequest::default()
    };
    if stream.create(request).is_err() {
        return;
    }
    loop {
        let item = tokio::select! {
            biased;
            () = tell.closed() => return,
            item = stream.next() => item,
        };
        match item {
            Some(WatchItem::Events { batch, .. }) => {
                if tell.send(batch.events).await.is_err() {
                    return;
                }
            }
            Some(WatchItem::Progress { .. }) => {}
            Some(WatchItem::Canceled { .. }) | None => return,
        }
    }
}
