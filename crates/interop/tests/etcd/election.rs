//! The election service: one leader, its proclaimed value, and its successor.

use std::time::Duration;

use etcd_client::{LeaderKey, ProclaimOptions, ResignOptions};

use crate::support::*;

pub(crate) async fn leader_campaigns_proclaims_and_resigns(t: &mut Scene) {
    let name = t.key("election");
    refused(t.client.leader(name.clone()).await, UNKNOWN, "election: no leader");
    let lease = t.client.lease_grant(60, None).await.unwrap().id();
    let won = t.client.campaign(name.clone(), "one", lease).await.unwrap();
    let leader = won.leader().unwrap().clone();
    assert_eq!(leader.name_str().unwrap(), name);
    assert_eq!(leader.key_str().unwrap(), format!("{name}/{lease:x}"));
    assert_eq!(leader.lease(), lease);
    let kv = t.client.leader(name.clone()).await.unwrap().take_kv().unwrap();
    assert_eq!((kv.value(), kv.create_revision()), (&b"one"[..], leader.rev()));
    let options = ProclaimOptions::new().with_leader(leader.clone());
    t.client.proclaim("two", Some(options.clone())).await.unwrap();
    let kv = t.client.leader(name.clone()).await.unwrap().take_kv().unwrap();
    assert_eq!((kv.value(), kv.create_revision()), (&b"two"[..], leader.rev()));
    t.client.resign(Some(ResignOptions::new().with_leader(leader))).await.unwrap();
    refused(t.client.leader(name).await, UNKNOWN, "election: no leader");
    refused(t.client.proclaim("three", Some(options)).await, UNKNOWN, "election: not leader");
}

pub(crate) async fn next_candidate_is_elected_after_resign(t: &mut Scene) {
    let name = t.key("election");
    let first = t.client.lease_grant(60, None).await.unwrap().id();
    let second = t.client.lease_grant(60, None).await.unwrap().id();
    t.client.campaign(name.clone(), "first", first).await.unwrap();
    let (mut client, campaign) = (t.client.clone(), name.clone());
    let mut waiter = tokio::spawn(async move { client.campaign(campaign, "second", second).await.unwrap() });
    let early = tokio::time::timeout(Duration::from_millis(200), &mut waiter).await;
    assert!(early.is_err(), "two leaders");
    let kv = t.client.leader(name.clone()).await.unwrap().take_kv().unwrap();
    assert_eq!(kv.value(), b"first");
    t.client.lease_revoke(first).await.unwrap();
    let won = tokio::time::timeout(PATIENCE, waiter).await.expect("the next one leads").unwrap();
    assert_eq!(won.leader().unwrap().lease(), second);
    let kv = t.client.leader(name).await.unwrap().take_kv().unwrap();
    assert_eq!(kv.value(), b"second");
}

pub(crate) async fn observe_returns_every_leader(t: &mut Scene) {
    let name = t.key("election");
    // An observe stream starts with its first message: without a leader the call would block.
    let mut observer = None;
    let mut words = Vec::new();
    for i in 0..3 {
        let lease = t.client.lease_grant(60, None).await.unwrap().id();
        let won = t.client.campaign(name.clone(), format!("leader {i}"), lease).await.unwrap();
        let observer = match &mut observer {
            Some(observer) => observer,
            none => none.insert(t.client.observe(name.clone()).await.unwrap()),
        };
        let mut response =
            tokio::time::timeout(PATIENCE, observer.message()).await.unwrap().unwrap().unwrap();
        words.push(response.take_kv().unwrap().value_str().unwrap().to_owned());
        let leader = won.leader().unwrap().clone();
        let options = ProclaimOptions::new().with_leader(leader.clone());
        t.client.proclaim(format!("word {i}"), Some(options)).await.unwrap();
        let mut response =
            tokio::time::timeout(PATIENCE, observer.message()).await.unwrap().unwrap().unwrap();
        words.push(response.take_kv().unwrap().value_str().unwrap().to_owned());
        t.client.resign(Some(ResignOptions::new().with_leader(leader))).await.unwrap();
    }
    assert_eq!(words, ["leader 0", "word 0", "leader 1", "word 1", "leader 2", "word 2"]);
}

pub(crate) async fn proclaim_by_a_non_leader_is_refused(t: &mut Scene) {
    let missing = "\"leader\" field must be provided";
    refused(t.client.proclaim("x", None).await, UNKNOWN, missing);
    refused(t.client.resign(None).await, UNKNOWN, missing);
    let name = t.key("election");
    let unknown_leader =
        LeaderKey::new().with_name(name.clone()).with_key(format!("{name}/1")).with_rev(1).with_lease(1);
    let options = ProclaimOptions::new().with_leader(unknown_leader);
    refused(t.client.proclaim("x", Some(options)).await, UNKNOWN, "election: not leader");
}
