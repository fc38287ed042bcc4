//! Servers that register, fail and return, and watchers with gaps.

use super::*;
use crate::scenario::{Faults, Flaky, everywhere, in_memory, until};

fn server(id: &str) -> ServerInfo {
    ServerInfo { id: id.to_owned(), address: format!("{id}:1"), ..ServerInfo::default() }
}

#[test]
fn servers_are_listed_until_they_deregister() {
    everywhere(async |store| {
        let registry = NodeRegistry::new(&store.node("m"), "actorbase", store.ttl);
        let mut watcher = registry.watcher();
        let a = registry.register(server("a")).await.unwrap();
        let b = registry.register(server("b")).await.unwrap();
        assert_eq!(registry.list().await.unwrap(), [server("a"), server("b")]);
        let entry = store.repository.get("/actorbase/nodes/a").await.unwrap().unwrap();
        assert!(entry.lease.is_some());
        assert_eq!(watcher.next().await, Some(NodeEvent::Joined(server("a"))));
        assert_eq!(watcher.next().await, Some(NodeEvent::Joined(server("b"))));
        tokio::time::sleep(store.ttl * 2).await;
        assert!(a.is_valid() && b.is_valid());
        a.deregister().await.unwrap();
        assert_eq!(registry.list().await.unwrap(), [server("b")], "{}: at once", store.name);
        assert_eq!(watcher.next().await, Some(NodeEvent::Left(server("a"))));
        drop(b);
        assert_eq!(watcher.next().await, Some(NodeEvent::Left(server("b"))));
    });
}

#[test]
fn lost_registration_is_renewed_automatically() {
    everywhere(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("a");
        context.repository = flaky.clone();
        let registration = NodeRegistry::new(&context, "n", store.ttl).register(server("a")).await.unwrap();
        let registry = NodeRegistry::new(&store.node("m"), "n", store.ttl);
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        until("the lease expires", async || registry.list().await.unwrap().is_empty().then_some(())).await;
        assert!(!registration.is_valid(), "{}", store.name);
        flaky.set(Faults::default());
        until("the server is listed again", async || {
            (registry.list().await.unwrap().len() == 1).then_some(())
        })
        .await;
        until("the registration is valid again", async || registration.is_valid().then_some(())).await;
    });
}

#[test]
fn server_can_be_removed_by_others_and_a_new_incarnation_replaces_it() {
    in_memory(async |store| {
        let registry = NodeRegistry::new(&store.node("m"), "n", Duration::from_secs(60));
        let lease = store.repository.grant(store.ttl).await.unwrap();
        let txn = Txn::new().put_leased("/n/nodes/a", server("a").to_bytes(), lease.id);
        store.repository.txn(txn).await.unwrap();
        let before = store.repository.get("/n/nodes/a").await.unwrap().unwrap();
        let _a = registry.register(server("a")).await.unwrap();
        assert!(store.repository.keep_alive(lease.id).await.is_err(), "it waited for the lease to expire");
        let after = store.repository.get("/n/nodes/a").await.unwrap().unwrap();
        assert!(after.create_revision > before.create_revision);
        let _b = registry.register(server("b")).await.unwrap();
        registry.deregister("b").await.unwrap();
        registry.deregister("missing").await.unwrap();
        assert!(matches!(registry.register(server("a/b")).await, Err(RegisterError::BadId(_))));
    });
}

#[test]
fn two_processes_never_hold_one_id_at_the_same_time() {
    everywhere(async |store| {
        let mine = Flaky::new(store.repository.clone());
        let mut context = store.node("a");
        context.repository = mine.clone();
        let first = NodeRegistry::new(&context, "n", store.ttl).register(server("a")).await.unwrap();
        let registry = NodeRegistry::new(&store.node("a"), "n", store.ttl);
        let second = registry.register(server("a")).await;
        assert!(
            matches!(second, Err(RegisterError::Duplicate { .. })),
            "{}: the first process is alive",
            store.name
        );
        assert!(first.is_valid(), "{}", store.name);
        mine.set(Faults { unreachable: true, ..Faults::default() });
        let second = registry.register(server("a")).await.unwrap();
        assert!(second.is_valid() && !first.is_valid(), "{}", store.name);
    });
}

#[test]
fn watcher_emits_the_difference_after_a_gap() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("m");
        context.repository = flaky.clone();
        let mut watcher = NodeRegistry::new(&context, "n", store.ttl).watcher();
        let registry = NodeRegistry::new(&store.node("x"), "n", Duration::from_secs(60));
        let _a = registry.register(server("a")).await.unwrap();
        let b = registry.register(server("b")).await.unwrap();
        for _ in 0..2 {
            watcher.next().await.unwrap();
        }
        // More changes than a watch buffers: it has a gap, and cannot list at first.
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        for round in 0..3_000 {
            store.repository.txn(Txn::new().put("/n/nodes/noise", "{}")).await.unwrap();
            if round == 1_000 {
                b.clone().deregister().await.unwrap();
            }
        }
        let _c = registry.register(server("c")).await.unwrap();
        store.repository.txn(Txn::new().delete("/n/nodes/noise")).await.unwrap();
        flaky.set(Faults::default());
        let mut net: BTreeMap<String, i32> = BTreeMap::new();
        until("the difference is emitted", async || {
            while let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(50), watcher.next()).await
            {
                match event {
                    NodeEvent::Joined(server) => *net.entry(server.id).or_default() += 1,
                    NodeEvent::Left(server) => *net.entry(server.id).or_default() -= 1,
                }
            }
            (net.get("b") == Some(&-1) && net.get("c") == Some(&1)).then_some(())
        })
        .await;
        assert_eq!(net.get("").copied().unwrap_or(0), 0, "noise joined and left: {net:?}");
    });
}
