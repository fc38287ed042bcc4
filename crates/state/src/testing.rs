//! Repository conformance suite: one suite, run for every backend.
//!
//! A backend's tests call [`conformance_tests!`](crate::conformance_tests) with a function that makes a
//! [`Fixture`]: a fresh repository, a way to advance time, and a way to restart it if it is durable.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::repository::{
    Compare, Entry, Event, Expect, LeaseId, RepositoryError, StateRepository, Swap, Txn, TxnOutcome, Watch,
    WatchGap,
};

/// Stops a repository and reopens it on its durable state.
pub type Restart = Box<dyn FnMut() -> Arc<dyn StateRepository> + Send>;

/// A fresh repository under test.
pub struct Fixture {
    /// The empty repository.
    pub repository: Arc<dyn StateRepository>,
    /// Advances time by this many milliseconds and expires leases.
    pub advance_ms: Box<dyn Fn(u64) + Send>,
    /// Restarts a durable backend; `None` skips the restart cases.
    pub restart: Option<Restart>,
}

/// Runs the suite: one test per case, each on its own fixture.
#[macro_export]
macro_rules! conformance_tests {
    ($make:ident) => {
        $crate::conformance_tests!($make;
            key_revisions_follow_its_changes,
            compare_and_swap_succeeds_only_if_precondition_holds,
            transaction_is_atomic_over_many_keys,
            invalid_transaction_is_rejected,
            list_returns_exactly_the_prefix,
            concurrent_compare_and_swaps_lose_no_update,
            lease_expiry_deletes_its_keys,
            renewed_lease_does_not_expire,
            revoked_lease_ends_immediately,
            key_put_without_lease_outlives_its_old_lease,
            watch_delivers_every_event_in_order,
            watch_from_past_revision_delivers_history,
            list_then_watch_misses_no_event,
            lagging_watcher_gets_a_gap,
            watch_before_history_gets_a_gap,
            restart_keeps_keys_revisions_and_leases,
        );
    };
    ($make:ident; $($case:ident),* $(,)?) => {
        mod conformance {
            $(
                #[test]
                fn $case() {
                    $crate::testing::$case(super::$make());
                }
            )*
        }
    };
}

/// Runs a future to completion, on its own runtime, within a minute.
fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), future).await.expect("test timeout")
    })
}

async fn put(repository: &dyn StateRepository, key: &str, value: &str) -> i64 {
    let value = Some(Bytes::copy_from_slice(value.as_bytes()));
    match repository.compare_and_swap(key, Expect::Any, value, None).await {
        Ok(Swap::Done { revision }) => revision,
        other => panic!("put {key}: {other:?}"),
    }
}

async fn value(repository: &dyn StateRepository, key: &str) -> Option<String> {
    let entry = repository.get(key).await.expect("a read");
    entry.map(|entry| String::from_utf8_lossy(&entry.value).into_owned())
}

/// The next items of a watch as text: `put k=v @r`, `delete k @r`, or the gap.
async fn next(watch: &mut Watch, count: usize) -> Vec<String> {
    let mut seen = Vec::new();
    for _ in 0..count {
        seen.push(match watch.next().await {
            Some(Ok(Event::Put(Entry { key, value, mod_revision, .. }))) => {
                format!("put {key}={} @{mod_revision}", String::from_utf8_lossy(&value))
            }
            Some(Ok(Event::Delete { key, revision })) => format!("delete {key} @{revision}"),
            Some(Err(gap)) => gap.to_string(),
            None => "end".to_owned(),
        });
    }
    seen
}

/// Create revision, mod revision and version follow the changes of the key, and restart after a deletion.
pub fn key_revisions_follow_its_changes(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        assert_eq!(store.get("k").await.expect("a read"), None);
        let first = put(store, "k", "1").await;
        let second = put(store, "k", "2").await;
        assert_eq!(second, first + 1);
        let entry = store.get("k").await.expect("a read").expect("an entry");
        assert_eq!((entry.create_revision, entry.mod_revision, entry.version), (first, second, 2));
        assert_eq!((&entry.value[..], entry.lease), (&b"2"[..], None));
        let deleted = store.compare_and_swap("k", Expect::Any, None, None).await.expect("a deletion");
        assert_eq!(deleted, Swap::Done { revision: second + 1 });
        let nothing =
            store.compare_and_swap("k", Expect::Any, None, None).await.expect("a deletion of nothing");
        assert_eq!(nothing, Swap::Done { revision: second + 1 }, "deleting nothing is no change");
        let again = put(store, "k", "3").await;
        let entry = store.get("k").await.expect("a read").expect("an entry");
        assert_eq!((entry.create_revision, entry.mod_revision, entry.version), (again, again, 1));
    });
}

/// Each precondition against each state of the key.
pub fn compare_and_swap_succeeds_only_if_precondition_holds(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let new = || Some(Bytes::from_static(b"new"));
        let conflict = store.compare_and_swap("k", Expect::Revision(1), new(), None).await.expect("a reply");
        assert_eq!(conflict, Swap::Conflict { current: None });
        let Swap::Done { revision } =
            store.compare_and_swap("k", Expect::Absent, new(), None).await.expect("a reply")
        else {
            panic!("the key was absent");
        };
        for (expected, replacement) in [(Expect::Absent, new()), (Expect::Revision(revision + 1), None)] {
            match store.compare_and_swap("k", expected, replacement, None).await.expect("a reply") {
                Swap::Conflict { current: Some(entry) } => assert_eq!(entry.mod_revision, revision),
                other => panic!("{expected:?}: {other:?}"),
            }
        }
        let deleted =
            store.compare_and_swap("k", Expect::Revision(revision), None, None).await.expect("a reply");
        assert_eq!(deleted, Swap::Done { revision: revision + 1 });
        assert_eq!(value(store, "k").await, None);
    });
}

/// A transaction is one revision, or no change and the current entries of the compared keys.
pub fn transaction_is_atomic_over_many_keys(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let member = put(store, "member", "one").await;
        let part = put(store, "part", "isr=1").await;
        let change = |compare| {
            Txn::new()
                .when(Compare::ModRevision("part".into(), part))
                .when(compare)
                .put("part", "isr=1,2")
                .put("log", "x")
                .delete("member")
        };
        let refused =
            store.txn(change(Compare::CreateRevision("member".into(), member + 9))).await.expect("a reply");
        let TxnOutcome::Conflict { revision, current } = refused else { panic!("{refused:?}") };
        assert_eq!((revision, current.len()), (part, 2));
        assert_eq!(current[1].as_ref().map(|entry| entry.create_revision), Some(member));
        assert_eq!((value(store, "part").await.as_deref(), value(store, "log").await), (Some("isr=1"), None));

        let done =
            store.txn(change(Compare::CreateRevision("member".into(), member))).await.expect("a reply");
        assert_eq!(done, TxnOutcome::Done { revision: part + 1 });
        for key in ["part", "log"] {
            let entry = store.get(key).await.expect("a read").expect("an entry");
            assert_eq!(entry.mod_revision, part + 1, "{key}");
        }
        assert_eq!(value(store, "member").await, None);
        for (compare, holds) in [
            (Compare::Present("log".into()), true),
            (Compare::Present("member".into()), false),
            (Compare::Absent("log".into()), false),
            (Compare::Value("log".into(), Bytes::from_static(b"x")), true),
            (Compare::Value("log".into(), Bytes::from_static(b"y")), false),
        ] {
            let outcome = store.txn(Txn::new().when(compare.clone())).await.expect("a reply");
            assert_eq!(matches!(outcome, TxnOutcome::Done { .. }), holds, "{compare:?}");
        }
    });
}

/// Too many operations, too many bytes, a duplicate key, an empty key, an unknown lease: rejected without a
/// change.
pub fn invalid_transaction_is_rejected(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let before = put(store, "k", "1").await;
        let many = (0..129).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), "x"));
        let invalid = [
            many,
            Txn::new().put("big", vec![0u8; 1_600_000]),
            Txn::new().put("k", "2").delete("k"),
            Txn::new().put("", "x"),
        ];
        for txn in invalid {
            assert!(matches!(store.txn(txn).await, Err(RepositoryError::Invalid(_))));
        }
        let unknown = store.txn(Txn::new().put("k", "2").put_leased("l", "x", LeaseId(99))).await;
        assert!(matches!(unknown, Err(RepositoryError::LeaseNotFound(LeaseId(99)))), "{unknown:?}");
        assert_eq!(store.list("").await.expect("a listing").0, before);
        assert_eq!(value(store, "k").await.as_deref(), Some("1"));
    });
}

/// A list returns exactly the prefix, in key order, with the current revision.
pub fn list_returns_exactly_the_prefix(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        for key in ["/b/1", "/a/2", "/a/1", "/a", "/ab", "/a/10"] {
            put(store, key, key).await;
        }
        let keys = |entries: Vec<Entry>| entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>();
        let (revision, entries) = store.list("/a/").await.expect("a listing");
        assert_eq!(revision, store.get("/a/10").await.expect("a read").expect("an entry").mod_revision);
        assert_eq!(keys(entries), ["/a/1", "/a/10", "/a/2"]);
        assert_eq!(keys(store.list("/c").await.expect("a listing").1), [] as [&str; 0]);
        assert_eq!(store.list("").await.expect("a listing").1.len(), 6);
    });
}

/// Several threads increment one key by compare-and-swap: the sum is correct.
pub fn concurrent_compare_and_swaps_lose_no_update(fixture: Fixture) {
    const THREADS: usize = 4;
    const EACH: usize = 25;
    let count = |store: &dyn StateRepository| {
        block_on(async {
            for _ in 0..EACH {
                loop {
                    let entry = store.get("count").await.expect("a read");
                    let (expected, old) = match &entry {
                        None => (Expect::Absent, 0),
                        Some(entry) => (Expect::Revision(entry.mod_revision), entry.value.len()),
                    };
                    let new = Some(Bytes::from(vec![b'x'; old + 1]));
                    if let Swap::Done { .. } =
                        store.compare_and_swap("count", expected, new, None).await.expect("a reply")
                    {
                        break;
                    }
                }
            }
        });
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| count(&*fixture.repository));
        }
    });
    block_on(async {
        let entry = fixture.repository.get("count").await.expect("a read").expect("an entry");
        assert_eq!(entry.value.len(), THREADS * EACH);
        assert_eq!(entry.version, i64::try_from(THREADS * EACH).expect("small"));
    });
}

/// An expired lease deletes its keys at one revision, and watchers see the events.
pub fn lease_expiry_deletes_its_keys(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease");
        let txn = Txn::new().put_leased("a", "1", lease.id).put_leased("b", "2", lease.id).put("c", "3");
        let TxnOutcome::Done { revision } = store.txn(txn).await.expect("a reply") else { panic!("refused") };
        let mut watch = store.watch("", revision + 1).await.expect("a watch");
        let ttl_ms = u64::try_from(lease.ttl.as_millis()).expect("short");
        (fixture.advance_ms)(ttl_ms - 1);
        assert_eq!(value(store, "a").await.as_deref(), Some("1"));
        (fixture.advance_ms)(1);
        let expected = [format!("delete a @{}", revision + 1), format!("delete b @{}", revision + 1)];
        assert_eq!(next(&mut watch, 2).await, expected);
        assert_eq!((value(store, "a").await, value(store, "c").await.as_deref()), (None, Some("3")));
        let late = store.keep_alive(lease.id).await;
        assert!(matches!(late, Err(RepositoryError::LeaseNotFound(_))), "{late:?}");
        let late = store.txn(Txn::new().put_leased("a", "1", lease.id)).await;
        assert!(matches!(late, Err(RepositoryError::LeaseNotFound(_))), "{late:?}");
    });
}

/// A renewal restores the full TTL.
pub fn renewed_lease_does_not_expire(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease");
        store.txn(Txn::new().put_leased("a", "1", lease.id)).await.expect("a reply");
        for _ in 0..5 {
            (fixture.advance_ms)(9_000);
            assert_eq!(store.keep_alive(lease.id).await.expect("alive"), lease.ttl);
        }
        assert_eq!(value(store, "a").await.as_deref(), Some("1"));
        (fixture.advance_ms)(10_000);
        assert_eq!(value(store, "a").await, None);
    });
}

/// A revocation takes effect immediately; a second one is an error.
pub fn revoked_lease_ends_immediately(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let (one, two) =
            (store.grant(Duration::from_secs(10)).await, store.grant(Duration::from_secs(10)).await);
        let (one, two) = (one.expect("a lease").id, two.expect("a lease").id);
        assert_ne!(one, two);
        store.txn(Txn::new().put_leased("a", "1", one).put_leased("b", "1", two)).await.expect("a reply");
        store.revoke(one).await.expect("revoked");
        assert_eq!((value(store, "a").await, value(store, "b").await.as_deref()), (None, Some("1")));
        assert!(matches!(store.revoke(one).await, Err(RepositoryError::LeaseNotFound(_))));
    });
}

/// The last put determines the lease of a key.
pub fn key_put_without_lease_outlives_its_old_lease(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease").id;
        let other = store.grant(Duration::from_secs(100)).await.expect("a lease").id;
        store.txn(Txn::new().put_leased("a", "1", lease).put_leased("b", "1", lease)).await.expect("a reply");
        store.txn(Txn::new().put("a", "2").put_leased("b", "2", other)).await.expect("a reply");
        assert_eq!(store.get("b").await.expect("a read").expect("an entry").lease, Some(other));
        store.revoke(lease).await.expect("revoked");
        assert_eq!(value(store, "a").await.as_deref(), Some("2"));
        assert_eq!(value(store, "b").await.as_deref(), Some("2"));
    });
}

/// Events of the prefix arrive in order; those of a transaction share one revision.
pub fn watch_delivers_every_event_in_order(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        put(store, "/a/before", "x").await;
        let mut watch = store.watch("/a/", 0).await.expect("a watch");
        let r = put(store, "/a/1", "x").await;
        put(store, "/b/1", "x").await;
        store.txn(Txn::new().put("/a/2", "y").delete("/a/1").put("/b/2", "z")).await.expect("a reply");
        let expected =
            [format!("put /a/1=x @{r}"), format!("put /a/2=y @{}", r + 2), format!("delete /a/1 @{}", r + 2)];
        assert_eq!(next(&mut watch, 3).await, expected);
    });
}

/// History is delivered first, then new events, without duplicates.
pub fn watch_from_past_revision_delivers_history(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        put(store, "k", "0").await;
        let r = put(store, "k", "1").await;
        put(store, "other", "x").await;
        put(store, "k", "2").await;
        let mut watch = store.watch("k", r).await.expect("a watch");
        put(store, "k", "3").await;
        let expected =
            [format!("put k=1 @{r}"), format!("put k=2 @{}", r + 2), format!("put k=3 @{}", r + 3)];
        assert_eq!(next(&mut watch, 3).await, expected);
        let mut future = store.watch("k", r + 5).await.expect("a watch");
        put(store, "k", "4").await;
        put(store, "k", "5").await;
        assert_eq!(next(&mut future, 1).await, [format!("put k=5 @{}", r + 5)]);
    });
}

/// List, then watch from the next revision, during concurrent writes: list plus events equals the store.
pub fn list_then_watch_misses_no_event(fixture: Fixture) {
    const KEYS: usize = 200;
    let store = &fixture.repository;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            block_on(async {
                for i in 0..KEYS {
                    put(&**store, &format!("/k/{i:03}"), "x").await;
                }
            });
        });
        block_on(async {
            for _ in 0..5 {
                let (revision, entries) = store.list("/k/").await.expect("a listing");
                let mut watch = store.watch("/k/", revision + 1).await.expect("a watch");
                let mut keys: Vec<String> = entries.into_iter().map(|entry| entry.key).collect();
                while keys.len() < KEYS {
                    let event = watch.next().await.expect("more to come").expect("no gap");
                    keys.push(event.key().to_owned());
                }
                let expected: Vec<String> = (0..KEYS).map(|i| format!("/k/{i:03}")).collect();
                assert_eq!(keys, expected);
            }
        });
        writer.join().expect("the writer");
    });
}

/// A lagging watcher gets the buffered events and then a gap with the first missing revision.
pub fn lagging_watcher_gets_a_gap(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let mut watch = store.watch("k", 0).await.expect("a watch");
        let mut other = store.watch("j", 0).await.expect("a watch");
        let first = store.list("").await.expect("a listing").0 + 1;
        // Enough for any reasonable buffer, in large steps.
        for step in 0..40 {
            let txn = (0..100).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), format!("{step}")));
            store.txn(txn).await.expect("a reply");
        }
        let mut last = first;
        let gap = loop {
            match watch.next().await.expect("a gap before the end") {
                Ok(event) => last = event.revision(),
                Err(gap) => break gap,
            }
        };
        let WatchGap::Lagged { revision } = gap else { panic!("{gap:?}") };
        assert!(revision == last || revision == last + 1, "delivered up to {last}, missing from {revision}");
        assert!(watch.next().await.is_none(), "after a gap the watch ends");
        put(store, "j", "x").await;
        assert_eq!(next(&mut other, 1).await.len(), 1, "others go on");
    });
}

/// History is bounded: a watch from before it starts with a gap that names the oldest watchable revision.
pub fn watch_before_history_gets_a_gap(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let first = put(store, "k", "0").await;
        for step in 0..100 {
            let txn = (0..100).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), format!("{step}")));
            store.txn(txn).await.expect("a reply");
        }
        let mut watch = store.watch("k", first).await.expect("a watch");
        let Some(Err(WatchGap::Compacted { oldest })) = watch.next().await else { panic!("no gap") };
        assert!(oldest > first);
        assert!(watch.next().await.is_none());
        let mut watch = store.watch("k", oldest).await.expect("a watch");
        let event = watch.next().await.expect("an event").expect("no gap");
        assert_eq!(event.revision(), oldest);
    });
}

/// Keys, revisions and leases survive a restart; leases get their full TTL again; history may be lost, which
/// is reported as a gap.
pub fn restart_keeps_keys_revisions_and_leases(mut fixture: Fixture) {
    let Some(mut restart) = fixture.restart.take() else { return };
    block_on(async {
        let mut store = fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease").id;
        store.txn(Txn::new().put_leased("leased", "x", lease)).await.expect("a reply");
        let mut expected = store.list("").await.expect("a listing");
        for round in 0..20 {
            for i in 0..50 {
                let txn = Txn::new()
                    .put(format!("k{}", i % 7), format!("{round} {i}"))
                    .delete(format!("k{}", (i + 1) % 7));
                store.txn(txn).await.expect("a reply");
            }
            expected = store.list("").await.expect("a listing");
            drop(store);
            store = restart();
            assert_eq!(store.list("").await.expect("a listing"), expected, "round {round}");
        }
        let mut watch = store.watch("", 1).await.expect("a watch");
        match watch.next().await {
            Some(Ok(_) | Err(WatchGap::Compacted { .. })) => {}
            other => panic!("neither history nor a gap: {other:?}"),
        }
        let next = put(&*store, "after", "x").await;
        assert_eq!(next, expected.0 + 1);
        let another = store.grant(Duration::from_secs(10)).await.expect("a lease").id;
        assert_ne!(another, lease);
        (fixture.advance_ms)(9_999);
        store.keep_alive(lease).await.expect("its whole time again");
        store.revoke(lease).await.expect("revoked");
        assert_eq!(value(&*store, "leased").await, None);
    });
}
