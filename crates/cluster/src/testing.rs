//! What every backend must do, whatever keeps its keys: one suite, run for each.
//!
//! A backend's tests call [`conformance_tests!`](crate::conformance_tests) with a function that makes a
//! [`Fixture`]: a fresh repository, a way to let time pass, and a way to restart it if it can.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::repository::{
    Compare, Entry, Event, Expect, LeaseId, RepositoryError, StateRepository, Swap, Txn, TxnOutcome, Watch,
    WatchGap,
};

/// Stops a repository and opens it again on what it kept.
pub type Restart = Box<dyn FnMut() -> Arc<dyn StateRepository> + Send>;

/// A fresh repository under test.
pub struct Fixture {
    /// The repository, empty.
    pub repository: Arc<dyn StateRepository>,
    /// Lets this many milliseconds pass and leases end.
    pub advance_ms: Box<dyn Fn(u64) + Send>,
    /// For backends that keep something: `None` skips the restart cases.
    pub restart: Option<Restart>,
}

/// Runs the suite: one test per case, each on a fixture of its own.
#[macro_export]
macro_rules! conformance_tests {
    ($make:ident) => {
        $crate::conformance_tests!($make;
            a_key_has_the_revisions_of_its_changes,
            compare_and_swap_wins_only_as_expected,
            a_transaction_compares_many_keys_and_changes_all_or_nothing,
            a_transaction_that_cannot_be_is_refused,
            a_listing_is_the_prefix_and_nothing_else,
            racing_swaps_lose_no_update,
            a_lease_takes_its_keys_when_it_ends,
            a_lease_that_is_kept_alive_stays,
            a_revoked_lease_is_gone_at_once,
            a_key_put_without_its_lease_outlives_it,
            a_watch_sees_every_change_in_order,
            a_watch_starts_in_the_past,
            a_listing_and_a_watch_leave_no_gap,
            a_slow_watcher_is_told_what_it_missed,
            a_watch_before_all_history_is_refused,
            a_restart_keeps_everything,
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

/// Runs a future to its end, on a runtime of its own, within a minute.
fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), future).await.expect("an answer in time")
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

/// Create and mod revision and version follow the changes of the key, and start again after a deletion.
pub fn a_key_has_the_revisions_of_its_changes(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        assert_eq!(store.get("k").await.expect("a read"), None);
        let first = put(store, "k", "1").await;
        let second = put(store, "k", "2").await;
        assert_eq!(second, first + 1);
        let entry = store.get("k").await.expect("a read").expect("an entry");
        assert_eq!((entry.create_revision, entry.mod_revision, entry.version), (first, second, 2));
        assert_eq!((&entry.value[..], entry.lease), (&b"2"[..], None));
        let gone = store.compare_and_swap("k", Expect::Any, None, None).await.expect("a deletion");
        assert_eq!(gone, Swap::Done { revision: second + 1 });
        let nothing =
            store.compare_and_swap("k", Expect::Any, None, None).await.expect("a deletion of nothing");
        assert_eq!(nothing, Swap::Done { revision: second + 1 }, "deleting nothing is no change");
        let again = put(store, "k", "3").await;
        let entry = store.get("k").await.expect("a read").expect("an entry");
        assert_eq!((entry.create_revision, entry.mod_revision, entry.version), (again, again, 1));
    });
}

/// Each expectation against each situation.
pub fn compare_and_swap_wins_only_as_expected(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let new = || Some(Bytes::from_static(b"new"));
        let conflict =
            store.compare_and_swap("k", Expect::Revision(1), new(), None).await.expect("an answer");
        assert_eq!(conflict, Swap::Conflict { current: None });
        let Swap::Done { revision } =
            store.compare_and_swap("k", Expect::Absent, new(), None).await.expect("an answer")
        else {
            panic!("the key was absent");
        };
        for (expected, replacement) in [(Expect::Absent, new()), (Expect::Revision(revision + 1), None)] {
            match store.compare_and_swap("k", expected, replacement, None).await.expect("an answer") {
                Swap::Conflict { current: Some(entry) } => assert_eq!(entry.mod_revision, revision),
                other => panic!("{expected:?}: {other:?}"),
            }
        }
        let deleted =
            store.compare_and_swap("k", Expect::Revision(revision), None, None).await.expect("an answer");
        assert_eq!(deleted, Swap::Done { revision: revision + 1 });
        assert_eq!(value(store, "k").await, None);
    });
}

/// A transaction is one revision, or nothing and the truth about what it compared.
pub fn a_transaction_compares_many_keys_and_changes_all_or_nothing(fixture: Fixture) {
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
            store.txn(change(Compare::CreateRevision("member".into(), member + 9))).await.expect("an answer");
        let TxnOutcome::Conflict { revision, current } = refused else { panic!("{refused:?}") };
        assert_eq!((revision, current.len()), (part, 2));
        assert_eq!(current[1].as_ref().map(|entry| entry.create_revision), Some(member));
        assert_eq!((value(store, "part").await.as_deref(), value(store, "log").await), (Some("isr=1"), None));

        let done =
            store.txn(change(Compare::CreateRevision("member".into(), member))).await.expect("an answer");
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
            let outcome = store.txn(Txn::new().when(compare.clone())).await.expect("an answer");
            assert_eq!(matches!(outcome, TxnOutcome::Done { .. }), holds, "{compare:?}");
        }
    });
}

/// Too many operations, too many bytes, a key twice, no key, an unknown lease: refused, and nothing changes.
pub fn a_transaction_that_cannot_be_is_refused(fixture: Fixture) {
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

/// Prefixes end where they end, in key order, with the revision of the moment.
pub fn a_listing_is_the_prefix_and_nothing_else(fixture: Fixture) {
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

/// Many threads count up one key by compare-and-swap: the sum is right.
pub fn racing_swaps_lose_no_update(fixture: Fixture) {
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
                        store.compare_and_swap("count", expected, new, None).await.expect("an answer")
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

/// A lease that nobody renews deletes its keys at one revision, and watchers see it.
pub fn a_lease_takes_its_keys_when_it_ends(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease");
        let txn = Txn::new().put_leased("a", "1", lease.id).put_leased("b", "2", lease.id).put("c", "3");
        let TxnOutcome::Done { revision } = store.txn(txn).await.expect("an answer") else {
            panic!("refused")
        };
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

/// Renewing gives the whole time again.
pub fn a_lease_that_is_kept_alive_stays(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease");
        store.txn(Txn::new().put_leased("a", "1", lease.id)).await.expect("an answer");
        for _ in 0..5 {
            (fixture.advance_ms)(9_000);
            assert_eq!(store.keep_alive(lease.id).await.expect("alive"), lease.ttl);
        }
        assert_eq!(value(store, "a").await.as_deref(), Some("1"));
        (fixture.advance_ms)(10_000);
        assert_eq!(value(store, "a").await, None);
    });
}

/// Revoking does not wait for the time to pass; doing it twice is an error.
pub fn a_revoked_lease_is_gone_at_once(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let (one, two) =
            (store.grant(Duration::from_secs(10)).await, store.grant(Duration::from_secs(10)).await);
        let (one, two) = (one.expect("a lease").id, two.expect("a lease").id);
        assert_ne!(one, two);
        store.txn(Txn::new().put_leased("a", "1", one).put_leased("b", "1", two)).await.expect("an answer");
        store.revoke(one).await.expect("revoked");
        assert_eq!((value(store, "a").await, value(store, "b").await.as_deref()), (None, Some("1")));
        assert!(matches!(store.revoke(one).await, Err(RepositoryError::LeaseNotFound(_))));
    });
}

/// The last put decides which lease a key has.
pub fn a_key_put_without_its_lease_outlives_it(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease").id;
        let other = store.grant(Duration::from_secs(100)).await.expect("a lease").id;
        store
            .txn(Txn::new().put_leased("a", "1", lease).put_leased("b", "1", lease))
            .await
            .expect("an answer");
        store.txn(Txn::new().put("a", "2").put_leased("b", "2", other)).await.expect("an answer");
        assert_eq!(store.get("b").await.expect("a read").expect("an entry").lease, Some(other));
        store.revoke(lease).await.expect("revoked");
        assert_eq!(value(store, "a").await.as_deref(), Some("2"));
        assert_eq!(value(store, "b").await.as_deref(), Some("2"));
    });
}

/// Puts and deletes of the prefix arrive in order; a transaction's share one revision.
pub fn a_watch_sees_every_change_in_order(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        put(store, "/a/before", "x").await;
        let mut watch = store.watch("/a/", 0).await.expect("a watch");
        let r = put(store, "/a/1", "x").await;
        put(store, "/b/1", "x").await;
        store.txn(Txn::new().put("/a/2", "y").delete("/a/1").put("/b/2", "z")).await.expect("an answer");
        let expected =
            [format!("put /a/1=x @{r}"), format!("put /a/2=y @{}", r + 2), format!("delete /a/1 @{}", r + 2)];
        assert_eq!(next(&mut watch, 3).await, expected);
    });
}

/// History is delivered first, then what comes, with nothing twice.
pub fn a_watch_starts_in_the_past(fixture: Fixture) {
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

/// List, then watch from the next revision, while others write: list plus events is always the truth.
pub fn a_listing_and_a_watch_leave_no_gap(fixture: Fixture) {
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

/// A watcher that does not read gets what fits and then, explicitly, the revision from which it misses changes.
pub fn a_slow_watcher_is_told_what_it_missed(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let mut watch = store.watch("k", 0).await.expect("a watch");
        let mut other = store.watch("j", 0).await.expect("a watch");
        let first = store.list("").await.expect("a listing").0 + 1;
        // Enough for any reasonable buffer, in large steps.
        for step in 0..40 {
            let txn = (0..100).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), format!("{step}")));
            store.txn(txn).await.expect("an answer");
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

/// History is bounded: a watch from before it begins with a gap that says from where it would work.
pub fn a_watch_before_all_history_is_refused(fixture: Fixture) {
    block_on(async {
        let store = &*fixture.repository;
        let first = put(store, "k", "0").await;
        for step in 0..100 {
            let txn = (0..100).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), format!("{step}")));
            store.txn(txn).await.expect("an answer");
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

/// Keys, revisions and leases come back; leases get their whole time again; history may be gone, and then says so.
pub fn a_restart_keeps_everything(mut fixture: Fixture) {
    let Some(mut restart) = fixture.restart.take() else { return };
    block_on(async {
        let mut store = fixture.repository;
        let lease = store.grant(Duration::from_secs(10)).await.expect("a lease").id;
        store.txn(Txn::new().put_leased("leased", "x", lease)).await.expect("an answer");
        let mut expected = store.list("").await.expect("a listing");
        for round in 0..20 {
            for i in 0..50 {
                let txn = Txn::new()
                    .put(format!("k{}", i % 7), format!("{round} {i}"))
                    .delete(format!("k{}", (i + 1) % 7));
                store.txn(txn).await.expect("an answer");
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
