//! Raft groups of three members in one process, over real sockets and folders.

use std::collections::BTreeMap;
use std::path::Path;

use futures_util::FutureExt as _;

use super::*;
use crate::events::ClusterEvent;
use crate::leadership::LeaderElection as _;
use crate::repository::{StateRepository as _, Txn, TxnOutcome};
use crate::scenario::{free_address as free, until};

fn quick(app: &str, node: &str, dir: &Path) -> GroupConfig {
    let mut config = GroupConfig::new(app, node, dir.join(node));
    config.timers_ms = (20, 60, 150);
    config.join_timeout = Duration::from_secs(5);
    config
}

/// Two threads: the group's tasks run while a test waits.
pub(crate) fn run<F: Future<Output = ()>>(scenario: impl FnOnce(tempfile::TempDir) -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().to_owned();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), scenario(dir)).await.expect("test timeout");
    });
    drop(runtime);
    drop(kept);
}

/// Founds a group of three.
async fn three(app: &str, dir: &Path, tune: impl Fn(&mut GroupConfig)) -> Vec<AppGroup> {
    let configs: Vec<GroupConfig> = ["a", "b", "c"]
        .iter()
        .map(|node| {
            let mut config = quick(app, node, dir);
            config.listen = free();
            tune(&mut config);
            config
        })
        .collect();
    let peers: Vec<GroupPeer> = configs
        .iter()
        .map(|one| GroupPeer { node_id: one.node_id.clone(), address: one.listen.to_string() })
        .collect();
    let founding = configs.iter().map(|config| AppGroup::found(config.clone(), &peers));
    let groups = futures_util::future::join_all(founding).await;
    let groups: Vec<AppGroup> = groups.into_iter().map(|group| group.unwrap()).collect();
    for group in &groups {
        group.ready(Duration::from_secs(20)).await.unwrap();
    }
    groups
}

async fn stop_all(groups: &[AppGroup]) {
    for group in groups {
        group.stop().await;
    }
}

fn addresses(groups: &[AppGroup]) -> Vec<String> {
    groups.iter().map(|group| group.address().to_owned()).collect()
}

async fn leader(groups: &[AppGroup]) -> usize {
    until("a leader is elected", async || groups.iter().position(AppGroup::leads)).await
}

async fn put(group: &AppGroup, key: &str, value: &str) {
    let done = group.repository().txn(Txn::new().put(key, value.to_owned())).await.unwrap();
    assert!(matches!(done, TxnOutcome::Done { .. }));
}

#[test]
fn founders_agree_and_restarted_member_keeps_its_data() {
    run(async |dir| {
        let mut groups = three("press", dir.path(), |_| {}).await;
        put(&groups[0], "k", "1").await;
        let value = groups[2].repository().get("k").await.unwrap().unwrap();
        assert_eq!(&value.value[..], b"1");
        let back = groups.remove(1);
        let config = back.inner.config.clone();
        back.stop().await;
        drop(back);
        put(&groups[0], "k", "2").await;
        let back = AppGroup::found(config, &[]).await.unwrap();
        back.ready(Duration::from_secs(20)).await.unwrap();
        assert_eq!(&back.repository().get("k").await.unwrap().unwrap().value[..], b"2");
        groups.push(back);
        let other = GroupConfig { app: "other".into(), ..groups[0].inner.config.clone() };
        assert!(matches!(
            AppGroup::found(other, &[]).await,
            Err(GroupError::Folder(_) | GroupError::Port(_))
        ));
        stop_all(&groups).await;
    });
}

#[test]
fn founder_with_lost_folder_does_not_vote_again() {
    run(async |dir| {
        let mut groups = three("press", dir.path(), |_| {}).await;
        let lost = groups.remove(2);
        let config = lost.inner.config.clone();
        lost.stop().await;
        drop(lost);
        std::fs::remove_dir_all(&config.data).unwrap();
        let mut peers: Vec<GroupPeer> = groups
            .iter()
            .map(|one| GroupPeer {
                node_id: one.inner.config.node_id.clone(),
                address: one.address().to_owned(),
            })
            .collect();
        peers.push(GroupPeer { node_id: config.node_id.clone(), address: config.listen.to_string() });
        let refused = AppGroup::found(config, &peers).await;
        assert!(matches!(refused, Err(GroupError::BegunWithout(_))), "{:?}", refused.err());
        stop_all(&groups).await;
    });
}

#[test]
fn node_joins_through_a_follower_syncs_and_becomes_voter() {
    run(async |dir| {
        let mut groups = three("press", dir.path(), |_| {}).await;
        for number in 0..50 {
            put(&groups[0], &format!("k{number}"), "v").await;
        }
        let at = leader(&groups).await;
        let follower = groups[(at + 1) % 3].address().to_owned();
        let request = JoinRequest { zone: "z2".into(), ..JoinRequest::default() };
        let joined = AppGroup::join(quick("press", "d", dir.path()), &[follower], request).await.unwrap();
        assert_eq!(joined.peer_id(), 4);
        joined.ready(Duration::from_secs(20)).await.unwrap();
        assert!(joined.repository().get("k49").await.unwrap().is_some());
        until("the learner is promoted to voter", async || (joined.members().0.len() == 4).then_some(()))
            .await;
        let key = "cluster:raft/join-requests/press/d";
        assert!(joined.repository().get(key).await.unwrap().is_none(), "the join request is deleted");
        let members = addresses(&groups);
        let again = AppGroup::join(quick("press", "d2", dir.path()), &members, JoinRequest::default());
        let again = again.await.unwrap();
        assert_eq!(again.peer_id(), 5, "voter ids are not reused");
        let record: GroupRecord = serde_json::from_slice(
            &joined.repository().get("cluster:raft/groups/press").await.unwrap().unwrap().value,
        )
        .unwrap();
        assert_eq!(record.peers.len(), 5);
        groups.extend([joined, again]);
        stop_all(&groups).await;
    });
}

#[test]
fn joins_are_rejected_approved_manually_and_expire() {
    run(async |dir| {
        let groups = three("press", dir.path(), |config| {
            config.manual_approval = true;
            config.join_timeout = Duration::from_millis(1_500);
        })
        .await;
        let members = addresses(&groups);
        let client = JoinClient::new("press", &members);
        let wrong = JoinClient::new("other", &members);
        let refused = wrong.request_join("d", "x:1", &JoinRequest::default()).await;
        assert!(matches!(refused, Err(JoinError::Rejected(_))), "{refused:?}");
        let refused = client.request_join("a", "x:1", &JoinRequest::default()).await;
        assert!(matches!(&refused, Err(JoinError::Rejected(why)) if why.contains("already")), "{refused:?}");

        let mut subscriptions: Vec<_> =
            groups.iter().map(|group| group.inner.config.events.subscribe()).collect();
        let ticket = client.request_join("d", "127.0.0.1:1", &JoinRequest::default()).await.unwrap();
        assert_eq!(groups[0].pending().await.unwrap()[0].node_id, "d");
        groups[1].reject("d", "no room").await.unwrap();
        let refused = client.await_acceptance(&ticket).await;
        assert_eq!(refused, Err(JoinError::Rejected("no room".to_owned())));

        // No decision: the request expires and leaves nothing.
        let ticket = client.request_join("e", "127.0.0.1:1", &JoinRequest::default()).await.unwrap();
        assert_eq!(client.await_acceptance(&ticket).await, Err(JoinError::Expired));
        assert!(groups[0].pending().await.unwrap().is_empty());

        // Accepted, but it never syncs: the learner is removed, too.
        let ticket = client.request_join("f", "127.0.0.1:1", &JoinRequest::default()).await.unwrap();
        groups[2].approve("f").await.unwrap();
        client.await_acceptance(&ticket).await.unwrap();
        let at = leader(&groups).await;
        until("the node is a learner", async || (groups[at].members().1.len() == 1).then_some(())).await;
        until("the request and the learner are removed", async || {
            groups.iter().find(|group| group.leads()).filter(|group| group.members().1.is_empty()).map(drop)
        })
        .await;
        let stale = JoinTicket { id: "0".into(), ..ticket };
        assert_eq!(client.await_acceptance(&stale).await, Err(JoinError::Expired));
        // The leader published every step.
        let mut published = std::collections::BTreeSet::new();
        until("every join step is published", async || {
            for events in &mut subscriptions {
                while let Some(Some(Ok(event))) = events.next().now_or_never() {
                    if let ClusterEvent::Join { node, step, .. } = event {
                        published.insert(format!("{node} {step}"));
                    }
                }
            }
            let wanted = ["d requested", "d rejected", "e requested", "e expired", "f accepted", "f expired"];
            wanted.iter().all(|step| published.contains(*step)).then_some(())
        })
        .await;
        let failures: u64 = groups.iter().map(|group| group.inner.config.metrics.join_failures.get()).sum();
        assert!(failures >= 4, "{failures} of one rejected call, one rejected request, two expired");
        stop_all(&groups).await;
    });
}

#[test]
fn folder_of_an_expired_join_joins_again() {
    run(async |dir| {
        let mut groups = three("press", dir.path(), |config| {
            config.join_timeout = Duration::from_millis(1_500);
        })
        .await;
        let members = addresses(&groups);
        let client = JoinClient::new("press", &members);
        let config = GroupConfig { listen: free(), ..quick("press", "d", dir.path()) };
        let endpoint = config.listen.to_string();
        let ticket = client.request_join("d", &endpoint, &JoinRequest::default()).await.unwrap();
        let acceptance = client.await_acceptance(&ticket).await.unwrap();
        // It crashes after it has persisted its identity, and restarts after the join has expired.
        let identity = Identity {
            cluster: acceptance.cluster.clone(),
            voter: acceptance.peer_id,
            secret: acceptance.secret.clone(),
            joining: Some(ticket),
            ..Identity::new(&config)
        };
        identity.save(&config).unwrap();
        until("the learner is removed", async || {
            groups.iter().find(|group| group.leads()).filter(|group| group.members().1.is_empty()).map(drop)
        })
        .await;
        let joined = AppGroup::join(config.clone(), &members, JoinRequest::default()).await.unwrap();
        joined.ready(Duration::from_secs(20)).await.unwrap();
        assert!(joined.peer_id() > acceptance.peer_id, "a voter id is never used again");
        assert!(Identity::load(&config).unwrap().unwrap().joining.is_none());
        groups.push(joined);
        stop_all(&groups).await;
    });
}

#[test]
fn join_continues_across_a_leader_change() {
    run(async |dir| {
        let mut groups = three("press", dir.path(), |_| {}).await;
        let client = JoinClient::new("press", &addresses(&groups));
        let config = GroupConfig { listen: free(), ..quick("press", "d", dir.path()) };
        let endpoint = config.listen.to_string();
        let ticket = client.request_join("d", &endpoint, &JoinRequest::default()).await.unwrap();
        let at = leader(&groups).await;
        let removed = groups.remove(at);
        removed.stop().await;
        drop(removed);
        let acceptance = client.await_acceptance(&ticket).await.unwrap();
        let identity = Identity {
            app: "press".into(),
            node_id: "d".into(),
            directory: identity::directory(),
            cluster: acceptance.cluster.clone(),
            voter: acceptance.peer_id,
            founders: Vec::new(),
            nonce: String::new(),
            secret: acceptance.secret.clone(),
            joining: Some(ticket.clone()),
        };
        identity.save(&config).unwrap();
        let port = Port::open(&config).await.unwrap();
        let joined = AppGroup::open(config, port, identity).await.unwrap();
        client.complete_sync(&ticket, &acceptance).await.unwrap();
        joined.ready(Duration::from_secs(20)).await.unwrap();
        groups.push(joined);
        stop_all(&groups).await;
    });
}

#[test]
fn leadership_follows_the_raft_leader_and_the_term_fences() {
    run(async |dir| {
        let groups = three("press", dir.path(), |_| {}).await;
        let scope = Scope::new(Shutdown::new());
        let contexts: Vec<Context> = groups.iter().map(|group| group.context(&scope)).collect();
        let elections: Vec<_> =
            groups.iter().zip(&contexts).map(|(group, context)| group.election(context)).collect();
        let mut changes = elections[0].observe();
        let at = leader(&groups).await;
        let first = elections[at].campaign().await.unwrap();
        assert!(first.is_valid());
        let fenced = |leadership: &crate::leadership::Leadership, value: &str| {
            leadership.fenced(Txn::new().put("x", value.to_owned()))
        };
        let done = groups[at].repository().txn(fenced(&first, "1")).await.unwrap();
        assert!(matches!(done, TxnOutcome::Done { .. }));
        until("the leadership is observed", async || {
            let term = first.fencing_token();
            changes.current().filter(|leader| leader.fencing_token == term).map(drop)
        })
        .await;
        groups[at].step_down().await;
        assert!(!first.is_valid(), "immediately: the next leader did not wait for the election timeout");
        let next = leader(&groups).await;
        let second = tokio::select! {
            won = elections[(at + 1) % 3].campaign() => won.unwrap(),
            won = elections[(at + 2) % 3].campaign() => won.unwrap(),
        };
        first.lost().await;
        assert!(!first.is_valid());
        assert!(second.fencing_token() > first.fencing_token());
        let late = groups[next].repository().txn(fenced(&first, "2")).await.unwrap();
        assert!(matches!(late, TxnOutcome::Conflict { .. }), "the former leader is fenced");
        changes.changed().await;
        scope.shutdown().stop();
        stop_all(&groups).await;
    });
}

#[test]
fn leader_without_quorum_loses_its_leadership() {
    run(async |dir| {
        let groups = three("press", dir.path(), |_| {}).await;
        let scope = Scope::new(Shutdown::new());
        let at = leader(&groups).await;
        let leadership = groups[at].election(&groups[at].context(&scope)).campaign().await.unwrap();
        for (other, group) in groups.iter().enumerate() {
            if other != at {
                group.stop().await;
            }
        }
        leadership.lost().await;
        assert!(!leadership.is_valid());
        scope.shutdown().stop();
        groups[at].stop().await;
    });
}

#[test]
fn group_members_are_published_to_a_store() {
    run(async |dir| {
        let groups = three("press", dir.path(), |config| config.equipment_group = "hall-1".into()).await;
        let store = crate::MemoryRepository::new(Arc::new(BootClock));
        groups[0].publish(&store).await.unwrap();
        let entry = store.get("cluster:raft/groups/press").await.unwrap().unwrap();
        let record: GroupRecord = serde_json::from_slice(&entry.value).unwrap();
        assert_eq!((record.peers.len(), record.equipment_group.as_str()), (3, "hall-1"));
        assert!(store.get("cluster:raft/metadata/press").await.unwrap().is_some());
        let names: BTreeMap<&str, u64> =
            record.peers.iter().map(|peer| (peer.node_id.as_str(), peer.peer_id)).collect();
        assert_eq!(names, BTreeMap::from([("a", 1), ("b", 2), ("c", 3)]));
        stop_all(&groups).await;
    });
}
