//! Locks on every store: FIFO order, fencing tokens, loss.

use super::*;
use crate::scenario::{Faults, Flaky, Resource, everywhere, in_memory, until};

fn options(ttl: Duration) -> LockOptions {
    LockOptions { ttl, ..LockOptions::default() }
}

#[test]
fn waiters_acquire_in_fifo_order_and_tokens_grow() {
    everywhere(async |store| {
        let resource = Arc::new(Resource::default());
        let first = Locks::new(&store.node("n0")).acquire("a/b", options(store.ttl)).await.unwrap();
        for number in 1..5 {
            let (locks, ttl) = (Locks::new(&store.node(&format!("n{number}"))), store.ttl);
            let resource = resource.clone();
            store.scope.spawn("contender", async move {
                let guard = locks.acquire("a/b", options(ttl)).await.unwrap();
                assert!(resource.write(guard.fencing_token(), number.to_string()), "tokens grow");
                guard.release().await.unwrap();
            });
            let locks = Locks::new(&store.node("o"));
            until("the contender is queued", async || {
                (locks.queue_length("a/b").await.unwrap() == number + 1).then_some(())
            })
            .await;
        }
        let holder = Locks::new(&store.node("o")).holder("a/b").await.unwrap().unwrap();
        assert_eq!(holder.owner_node_id, "n0", "{}", store.name);
        assert!(resource.write(first.fencing_token(), "0"));
        first.release().await.unwrap();
        until("all contenders have held the lock", async || (resource.writes().len() == 5).then_some(()))
            .await;
        let order: Vec<_> = resource.writes().into_iter().map(|(_, who)| who).collect();
        assert_eq!(order, ["0", "1", "2", "3", "4"], "{}", store.name);
        let locks = Locks::new(&store.node("o"));
        until("the lock is free", async || locks.holder("a/b").await.unwrap().is_none().then_some(())).await;
    });
}

#[test]
fn zero_wait_fails_at_once_and_bounded_wait_times_out() {
    everywhere(async |store| {
        let context = store.node("b");
        let locks = Locks::new(&context);
        let held = Locks::new(&store.node("a")).acquire("l", options(store.ttl)).await.unwrap();
        for wait in [Duration::ZERO, Duration::from_millis(50)] {
            let refused = locks.acquire("l", LockOptions { wait: Some(wait), ..options(store.ttl) }).await;
            assert!(matches!(refused, Err(LockError::Timeout(_))), "{refused:?}");
        }
        until("timed out contenders have left the queue", async || {
            (locks.queue_length("l").await.unwrap() == 1).then_some(())
        })
        .await;
        held.release().await.unwrap();
        let once = LockOptions { wait: Some(Duration::ZERO), ..options(store.ttl) };
        let guard = locks.acquire("l", once).await.unwrap();
        assert_eq!(context.metrics.locks_held.get(), 1);
        drop(guard);
        assert_eq!(context.metrics.locks_held.get(), 0);
        until("dropping the guard releases the lock", async || {
            (locks.queue_length("l").await.unwrap() == 0).then_some(())
        })
        .await;
        assert!(context.metrics.lock_waits.get() >= 1);
    });
}

#[test]
fn lock_of_a_failed_holder_passes_on_and_its_release_reports_the_loss() {
    everywhere(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut a = store.node("a");
        a.repository = flaky.clone();
        let lost = Locks::new(&a).acquire("l", options(store.ttl)).await.unwrap();
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        let next = Locks::new(&store.node("b")).acquire("l", options(store.ttl)).await.unwrap();
        assert!(!lost.is_valid() && next.is_valid(), "{}", store.name);
        assert!(next.fencing_token() > lost.fencing_token());
        let fenced = Txn::new().when(lost.fence()).put("x", "1");
        let outcome = store.repository.txn(fenced).await.unwrap();
        assert!(matches!(outcome, TxnOutcome::Conflict { .. }));
        assert!(matches!(lost.release().await, Err(LockError::Lost { .. })));
        assert_eq!(a.metrics.locks_lost.get(), 1);
    });
}

#[test]
fn locks_exclude_each_other_while_replies_are_lost() {
    in_memory(async |store| {
        let holders = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let done = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        use std::sync::atomic::Ordering::SeqCst;
        for number in 0..6 {
            let flaky = Flaky::new(store.repository.clone());
            flaky.set(Faults { lost_percent: 15, ..Faults::default() });
            let mut context = store.node(&format!("n{number}"));
            context.repository = flaky;
            let (holders, done, ttl) = (holders.clone(), done.clone(), store.ttl);
            store.scope.spawn("contender", async move {
                loop {
                    let guard = Locks::new(&context).acquire("l", options(ttl)).await.unwrap();
                    if guard.is_valid() {
                        assert_eq!(holders.fetch_add(1, SeqCst), 0, "two holders");
                        tokio::task::yield_now().await;
                        holders.fetch_sub(1, SeqCst);
                        done.fetch_add(1, SeqCst);
                    }
                    // An unknown outcome is an error here; the lease expiry cleans up.
                    let _ = guard.release().await;
                }
            });
        }
        until("200 acquisitions", async || (done.load(SeqCst) > 200).then_some(())).await;
        assert!(!store.scope.shutdown().has_panicked());
    });
}

#[test]
fn empty_lock_name_is_rejected() {
    in_memory(async |store| {
        let refused = Locks::new(&store.node("a")).acquire("", LockOptions::default()).await;
        assert!(matches!(refused, Err(LockError::NoName)));
    });
}
