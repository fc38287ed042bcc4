//! Small and large tables in every store: chunks, fences, malformed heads, lost replies.

use std::time::Duration;

use super::*;
use crate::events::ClusterEvent;
use crate::leadership::{CasElection, ElectionOptions, LeaderElection as _};
use crate::repository::Txn;
use crate::scenario::{Faults, Flaky, everywhere, in_memory, until};

pub(crate) fn large(count: usize) -> Vec<RouteEntry> {
    let bound = |at: usize| if at == 0 || at == count { String::new() } else { format!("{at:08}") };
    let entry = |at: usize| RouteEntry {
        partition_id: format!("part-{at}"),
        key_range_start: bound(at),
        key_range_end: bound(at + 1),
        node_id: format!("n{}", at % 7),
        node_address: format!("10.0.0.{}:7", at % 7),
        node_status: 1,
    };
    (0..count).map(entry).collect()
}

fn table(version: i64, count: usize) -> RoutingTable {
    RoutingTable::new(version, large(count)).unwrap()
}

#[test]
fn small_and_large_tables_round_trip() {
    everywhere(async |store| {
        let tables = RoutingTableStore::new(&store.node("m"), "actorbase");
        assert!(tables.load().await.unwrap().is_none(), "an empty store has no table");
        let mut before = Saved::default();
        for (version, count) in [(1, 3), (2, 1_000), (3, 5_000), (4, 5_001), (5, 2)] {
            before = tables.save(&before, table(version, count), vec!["n1".into()], None).await.unwrap();
            // Another reader, without a cache.
            let fresh = RoutingTableStore::new(&store.node("r"), "actorbase").load().await.unwrap().unwrap();
            assert_eq!(fresh.table, before.table, "{}: {count}", store.name);
            assert_eq!(fresh.revision, before.revision);
            assert_eq!(fresh.draining, ["n1"]);
        }
        let (_, keys) = store.repository.list("/actorbase/routing").await.unwrap();
        assert_eq!(keys.len(), 1, "unnamed chunks are deleted");
        let head: serde_json::Value = serde_json::from_slice(&keys[0].value).unwrap();
        assert_eq!((&head["version"], head["entries"].as_array().unwrap().len()), (&5.into(), 2));
        let entry = &head["entries"][1];
        for (field, value) in [("partitionId", "part-1"), ("keyRangeEnd", ""), ("nodeAddress", "10.0.0.1:7")]
        {
            assert_eq!(entry[field], value);
        }
        assert_eq!(entry["nodeStatus"], 1);
    });
}

#[test]
fn change_of_a_large_table_writes_few_chunks() {
    in_memory(async |store| {
        let tables = RoutingTableStore::new(&store.node("m"), "n");
        let first = tables.save(&Saved::default(), table(1, 20_000), vec![], None).await.unwrap();
        let pieces =
            |entries: Vec<crate::Entry>| entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>();
        let before = pieces(store.repository.list("/n/routing/pieces/").await.unwrap().1);
        let next = first.table.next(|entries| {
            let upper = RouteEntry {
                partition_id: "new".into(),
                key_range_start: "00010000x".into(),
                key_range_end: entries[10_000].key_range_end.clone(),
                ..(*entries[10_000]).clone()
            };
            std::sync::Arc::make_mut(&mut entries[10_000]).key_range_end = "00010000x".into();
            entries.push(upper.into());
        });
        tables.save(&first, next.unwrap(), vec![], None).await.unwrap();
        let after = pieces(store.repository.list("/n/routing/pieces/").await.unwrap().1);
        let new = after.iter().filter(|key| !before.contains(key)).count();
        assert!(before.len() > 10 && new <= 2, "{new} of {} were written", after.len());
    });
}

#[test]
fn stale_save_and_save_of_a_deposed_manager_are_rejected() {
    everywhere(async |store| {
        let tables = RoutingTableStore::new(&store.node("m"), "n");
        let first = tables.save(&Saved::default(), table(1, 3), vec![], None).await.unwrap();
        let again = tables.save(&Saved::default(), table(1, 3), vec![], None).await;
        assert!(matches!(again, Err(RoutingError::Conflict)), "{again:?}");
        tables.save(&first, table(2, 2_000), vec![], None).await.unwrap();
        let stale = tables.save(&first, table(2, 3_000), vec![], None).await;
        assert!(matches!(stale, Err(RoutingError::Conflict)), "{stale:?}");
        let now = tables.load().await.unwrap().unwrap();
        assert_eq!(now.table.entries().len(), 2_000);
        let options = ElectionOptions { ttl: store.ttl, ..ElectionOptions::default() };
        let old = CasElection::new(&store.node("a"), "m", options.clone()).campaign().await.unwrap();
        let fence = old.fence();
        old.resign().await.unwrap();
        let _new = CasElection::new(&store.node("b"), "m", options).campaign().await.unwrap();
        for count in [3, 3_000] {
            let fenced = tables.save(&now, table(3, count), vec![], Some(fence.clone())).await;
            assert!(matches!(fenced, Err(RoutingError::Fenced)), "{}: {fenced:?}", store.name);
        }
        assert_eq!(tables.load().await.unwrap().unwrap().table.version, 2);
    });
}

#[test]
fn watch_starts_with_the_current_table_and_skips_malformed_heads() {
    everywhere(async |store| {
        let context = store.node("r");
        let tables = RoutingTableStore::new(&context, "n");
        let mut watch = tables.watch();
        assert_eq!(watch.next().await.unwrap().revision, 0, "no table yet");
        let first = tables.save(&Saved::default(), table(1, 3_000), vec![], None).await.unwrap();
        assert_eq!(watch.next().await.unwrap().table, first.table);
        assert_eq!(tables.watch().next().await.unwrap().table, first.table, "{}", store.name);
        let mut events = context.events.subscribe();
        for malformed in ["{", "{\"version\":2,\"entries\":[{}]}", "{\"version\":2,\"pieces\":7}"] {
            store.repository.txn(Txn::new().put("/n/routing", malformed)).await.unwrap();
            loop {
                if let ClusterEvent::Malformed { key, .. } = events.next().await.unwrap().unwrap() {
                    break assert_eq!(key, "/n/routing");
                }
            }
            assert!(matches!(tables.load().await, Err(RoutingError::Malformed(_))));
        }
        let entry = store.repository.get("/n/routing").await.unwrap().unwrap();
        let repaired = Saved { revision: entry.mod_revision, ..first };
        tables.save(&repaired, table(3, 4), vec![], None).await.unwrap();
        assert_eq!(watch.next().await.unwrap().table.version, 3);
    });
}

#[test]
fn save_with_a_lost_reply_is_not_lost() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("m");
        context.repository = flaky.clone();
        let tables = RoutingTableStore::new(&context, "n");
        flaky.set(Faults { lost_percent: 30, ..Faults::default() });
        let mut before = Saved::default();
        let mut version = 0;
        while version < 30 {
            match tables.save(&before, table(before.table.version + 1, 1_500), vec![], None).await {
                Ok(saved) => {
                    assert_eq!(saved.table.version, version + 1, "no version is skipped or saved twice");
                    (version, before) = (saved.table.version, saved);
                }
                Err(_) => before = tables.load().await.unwrap().unwrap_or_default(),
            }
            version = version.max(before.table.version);
        }
        until("the reader has the same table", async || {
            let read = RoutingTableStore::new(&store.node("r"), "n").load().await.unwrap().unwrap();
            (read.table.version == version).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    });
}
