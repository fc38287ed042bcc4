//! One watcher per node that sees every event and resumes on another node when its node fails.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{EventType, WatchOptions};
use moim_history::{Fate, History, Step};

use super::World;
use super::clients::client_of;

/// One watch event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) revision: i64,
    key: String,
    /// The value, or `None` for a delete.
    value: Option<String>,
}

/// A watcher's event history.
pub(super) type Events = Vec<Event>;

/// Watches every key from the first revision on until the key `the end` is written.
pub(super) async fn run(world: Arc<World>, first: usize) -> Events {
    let mut events = Events::new();
    let mut node = first;
    loop {
        let endpoint = &world.endpoints[node % world.endpoints.len()];
        node += 1;
        if follow(endpoint, &mut events).await {
            return events;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Appends the events from one node. True at the end.
async fn follow(endpoint: &str, events: &mut Events) -> bool {
    let Some(client) = client_of(endpoint).await else { return false };
    let from = events.last().map_or(1, |event| event.revision + 1);
    let options = WatchOptions::new().with_all_keys().with_start_revision(from);
    let opened =
        tokio::time::timeout(Duration::from_secs(3), client.watch_client().watch("", Some(options))).await;
    let Ok(Ok(mut stream)) = opened else { return false };
    // An isolated node is silent: a watcher without messages for long switches to another node.
    while let Ok(Ok(Some(message))) = tokio::time::timeout(Duration::from_secs(2), stream.message()).await {
        assert!(!message.canceled(), "{message:?}");
        for event in message.events() {
            let kv = event.kv().unwrap();
            let revision = kv.mod_revision();
            assert!(revision >= from, "a watch from {from} told of {revision}");
            let value = match event.event_type() {
                EventType::Put => Some(kv.value_str().unwrap().to_owned()),
                EventType::Delete => None,
            };
            events.push(Event { revision, key: kv.key_str().unwrap().to_owned(), value });
        }
        if events.last().is_some_and(|event| event.key == "the end") {
            return true;
        }
    }
    false
}

/// All watchers saw the same events, in order, including every acknowledged write.
pub(super) fn check(histories: &[Events], history: &History) {
    for (node, events) in histories.iter().enumerate() {
        assert!(events.is_sorted_by(|a, b| a.revision <= b.revision), "watcher {node} went back in time");
        let differs = events.iter().zip(&histories[0]).position(|(a, b)| a != b);
        assert!(
            events == &histories[0],
            "watchers 0 and {node} differ at {differs:?}: {:?} and {:?}",
            differs.map(|at| &histories[0][at]),
            differs.map(|at| &events[at])
        );
    }
    let mut seen: BTreeMap<i64, Vec<&Event>> = BTreeMap::new();
    for event in &histories[0] {
        seen.entry(event.revision).or_default().push(event);
    }
    for entry in &history.entries {
        let Fate::Ok { outcome, .. } = &entry.fate else { continue };
        let steps = if outcome.succeeded { &entry.op.then } else { &entry.op.otherwise };
        for step in steps {
            let Step::Put(key, value) = step else { continue };
            let revision = outcome.revision.expect("answers have revisions");
            let told = seen.get(&revision).is_some_and(|events| {
                events.iter().any(|event| &event.key == key && event.value.as_ref() == Some(value))
            });
            assert!(told, "no watcher was told of {entry}");
        }
    }
}
