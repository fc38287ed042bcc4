//! The lock service: one holder at a time, in the order of the requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{GetOptions, LockOptions};

use crate::support::*;

pub(crate) async fn lock_is_granted_in_request_order(t: &mut Scene) {
    let name = t.key("lock");
    let first = t.client.lease_grant(60, None).await.unwrap().id();
    let second = t.client.lease_grant(60, None).await.unwrap().id();
    let with = |lease| Some(LockOptions::new().with_lease(lease));
    let held = t.client.lock(name.clone(), with(first)).await.unwrap();
    let key = String::from_utf8(held.key().to_vec()).unwrap();
    assert_eq!(key, format!("{name}/{first:x}"), "the key is the name and the lease");
    assert!(revision(held.header()) > 0);
    let again = t.client.lock(name.clone(), with(first)).await.unwrap();
    assert_eq!(again.key(), held.key(), "who holds it gets it again");
    let (mut client, waiting) = (t.client.clone(), name.clone());
    let mut waiter = tokio::spawn(async move { client.lock(waiting, with(second)).await.unwrap() });
    let in_line = async |client: &mut etcd_client::Client| {
        let options = GetOptions::new().with_prefix().with_count_only();
        client.get(name.clone(), Some(options)).await.unwrap().count()
    };
    let mut client = t.client.clone();
    eventually("two in line", async || in_line(&mut client).await == 2).await;
    let early = tokio::time::timeout(Duration::from_millis(200), &mut waiter).await;
    assert!(early.is_err(), "two holders");
    t.client.unlock(held.key()).await.unwrap();
    let next = tokio::time::timeout(PATIENCE, waiter).await.expect("the lock passes on").unwrap();
    assert_eq!(String::from_utf8(next.key().to_vec()).unwrap(), format!("{name}/{second:x}"));
    t.client.unlock(next.key()).await.unwrap();
    assert_eq!(in_line(&mut client).await, 0);
}

pub(crate) async fn lease_expiry_releases_the_lock(t: &mut Scene) {
    let name = t.key("lock");
    let first = t.client.lease_grant(60, None).await.unwrap().id();
    let second = t.client.lease_grant(60, None).await.unwrap().id();
    t.client.lock(name.clone(), Some(LockOptions::new().with_lease(first))).await.unwrap();
    let mut client = t.client.clone();
    let waiter =
        tokio::spawn(
            async move { client.lock(name, Some(LockOptions::new().with_lease(second))).await.unwrap() },
        );
    t.client.lease_revoke(first).await.unwrap();
    let next = tokio::time::timeout(PATIENCE, waiter).await.expect("the lock passes on").unwrap();
    t.client.unlock(next.key()).await.unwrap();
}

pub(crate) async fn lock_without_a_lease(t: &mut Scene) {
    let name = t.key("lock");
    let held = t.client.lock(name.clone(), None).await.unwrap();
    let kv = t.client.get(held.key(), None).await.unwrap().take_kvs().pop().unwrap();
    assert_ne!(kv.lease(), 0, "the server grants one");
    t.client.unlock(held.key()).await.unwrap();
    assert_eq!(t.client.get(held.key(), None).await.unwrap().count(), 0);
    let unknown = t.client.lock(name, Some(LockOptions::new().with_lease(0x5555))).await;
    refused(unknown, UNKNOWN, "etcdserver: requested lease not found");
}

pub(crate) async fn lock_has_one_holder_at_a_time(t: &mut Scene) {
    const HOLDERS: usize = 5;
    let name = t.key("lock");
    let nodes = t.nodes().await;
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..HOLDERS {
        let (mut client, name) = (nodes[i % nodes.len()].clone(), name.clone());
        let inside = Arc::clone(&inside);
        tasks.spawn(async move {
            let lease = client.lease_grant(60, None).await.unwrap().id();
            for _ in 0..5 {
                let held =
                    client.lock(name.clone(), Some(LockOptions::new().with_lease(lease))).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                client.unlock(held.key()).await.unwrap();
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
}
