//! Cluster membership as clients see it.

use std::collections::BTreeSet;

use etcd_client::{Client, ConnectOptions, MemberAddOptions};
use moim_interop::cluster::http_get;

use crate::support::*;

pub(crate) async fn every_node_lists_all_members(t: &mut Scene) {
    let endpoints = t.cluster.endpoints();
    let mut lists = Vec::new();
    for mut node in t.nodes().await {
        let response = node.member_list().await.unwrap();
        let mut list: Vec<(u64, String, Vec<String>, Vec<String>)> = Vec::new();
        for member in response.members() {
            assert!(!member.is_learner());
            list.push((
                member.id(),
                member.name().to_owned(),
                member.peer_urls().to_vec(),
                member.client_urls().to_vec(),
            ));
        }
        list.sort();
        lists.push(list);
    }
    let first = &lists[0];
    assert!(lists.iter().all(|list| list == first), "{lists:?}");
    assert_eq!(first.len(), endpoints.len());
    let ids: BTreeSet<u64> = first.iter().map(|member| member.0).collect();
    let names: BTreeSet<&String> = first.iter().map(|member| &member.1).collect();
    assert_eq!((ids.len(), names.len()), (endpoints.len(), endpoints.len()), "{first:?}");
    assert!(!ids.contains(&0) && !names.contains(&String::new()), "{first:?}");
    let urls: BTreeSet<&str> =
        first.iter().flat_map(|member| &member.3).filter_map(|url| url.strip_prefix("http://")).collect();
    assert_eq!(urls, endpoints.iter().map(String::as_str).collect(), "{first:?}");
    assert!(first.iter().all(|member| member.2.iter().any(|url| url.starts_with("http://"))), "{first:?}");
}

pub(crate) async fn headers_name_cluster_and_member(t: &mut Scene) {
    let mut clusters = BTreeSet::new();
    let mut members = BTreeSet::new();
    for mut node in t.nodes().await {
        let response = node.get(t.key("k"), None).await.unwrap();
        let header = response.header().unwrap();
        assert!(header.raft_term() > 0);
        clusters.insert(header.cluster_id());
        members.insert(header.member_id());
    }
    let listed = t.client.member_list().await.unwrap();
    let listed: BTreeSet<u64> = listed.members().iter().map(|member| member.id()).collect();
    assert_eq!(clusters.len(), 1);
    assert!(!clusters.contains(&0));
    assert_eq!(members, listed, "each node names itself");
}

pub(crate) async fn unknown_members(t: &mut Scene) {
    let unknown = 0x1234_5678_9abc;
    let text = "etcdserver: member not found";
    refused(t.client.member_remove(unknown).await, NOT_FOUND, text);
    refused(t.client.member_promote(unknown).await, NOT_FOUND, text);
    let urls = vec!["http://127.0.0.1:1".to_owned()];
    refused(t.client.member_update(unknown, urls).await, NOT_FOUND, text);
    let voter = t.client.member_list().await.unwrap().members()[0].id();
    let promoted = t.client.member_promote(voter).await;
    refused(promoted, FAILED_PRECONDITION, "etcdserver: can only promote a learner member");
}

pub(crate) async fn learner_is_added_and_removed(t: &mut Scene) {
    let before = t.client.member_list().await.unwrap().members().len();
    let url = "http://127.0.0.1:1";
    // A cluster that has just started may reject member changes.
    let mut added = None;
    eventually("a learner to be added", async || {
        let options = MemberAddOptions::new().with_is_learner();
        added = t.client.member_add([url], Some(options)).await.ok();
        added.is_some()
    })
    .await;
    let added = added.unwrap();
    let id = added.member().unwrap().id();
    assert_eq!(added.member_list().len(), before + 1);
    // A non-linearizable member list may come from another member and be stale.
    let mut learner = None;
    eventually("the learner to be listed", async || {
        let listed = t.client.member_list().await.unwrap();
        learner = listed.members().iter().find(|member| member.id() == id).cloned();
        learner.is_some()
    })
    .await;
    let learner = learner.unwrap();
    assert!(learner.is_learner());
    assert_eq!((learner.name(), learner.peer_urls()), ("", &[url.to_owned()][..]));
    let options = MemberAddOptions::new().with_is_learner();
    let (code, text) = refusal(t.client.member_add([url], Some(options)).await);
    // etcd derives member ids from addresses and seconds: within the same second the id is reported as a duplicate
    // first.
    let taken = ["etcdserver: Peer URLs already exists", "etcdserver: member ID already exist"];
    assert!(code == FAILED_PRECONDITION && taken.contains(&text.as_str()), "{code} {text}");
    let early = t.client.member_promote(id).await;
    let text = "etcdserver: can only promote a learner member which is in sync with leader";
    refused(early, FAILED_PRECONDITION, text);
    t.put("k", "an unavailable learner blocks no write").await;
    let removed = t.client.member_remove(id).await.unwrap();
    assert_eq!(removed.members().len(), before);
    refused(t.client.member_remove(id).await, NOT_FOUND, "etcdserver: member not found");
}

pub(crate) async fn authentication_is_off(t: &mut Scene) {
    let options = ConnectOptions::new().with_user("root", "secret");
    let client = Client::connect(t.cluster.endpoints(), Some(options)).await;
    let error = client.err().expect("no client");
    refused(Err::<(), _>(error), FAILED_PRECONDITION, "etcdserver: authentication is not enabled");
}

pub(crate) async fn plain_http_endpoints_answer(t: &mut Scene) {
    for endpoint in t.cluster.endpoints() {
        let health = http_get(&endpoint, "/health").unwrap();
        assert!(health.starts_with("HTTP/1.1 200 ") && health.contains("\"health\":\"true\""), "{health}");
        let version = http_get(&endpoint, "/version").unwrap();
        assert!(
            version.contains("\"etcdserver\":\"3.") && version.contains("\"etcdcluster\":\"3."),
            "{version}"
        );
        let metrics = http_get(&endpoint, "/metrics").unwrap();
        assert!(metrics.starts_with("HTTP/1.1 200 "), "{metrics}");
    }
}
