//! Locks and elections: order, waiting, giving up.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{election, lock, method};

use super::*;

async fn lease(client: &Client, id: i64) {
    let grant = wire::LeaseGrantRequest { id, ttl: 100 };
    let _: wire::LeaseGrantResponse = client.call(method::lease::GRANT, &grant).await.unwrap();
}

async fn keys(client: &Client, prefix: &str) -> Vec<String> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().unwrap() += 1;
    let range = wire::RangeRequest {
        key: prefix.to_owned().into(),
        range_end: end.into(),
        sort_target: wire::SortTarget::Create.into(),
        sort_order: wire::SortOrder::Ascend.into(),
        ..Default::default()
    };
    let answer: wire::RangeResponse = client.call(method::kv::RANGE, &range).await.unwrap();
    answer.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect()
}

/// Polls until the keys under a prefix are as expected.
async fn until_keys(client: &Client, prefix: &str, expected: &[&str]) {
    while keys(client, prefix).await != expected {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn lock_of(lease: i64) -> lock::LockRequest {
    lock::LockRequest { name: "l".into(), lease }
}

#[test]
fn locks_are_acquired_in_create_revision_order() {
    Ports::with_client(1, async |_, client| {
        for id in [0xa, 0xb, 0xc] {
            lease(&client, id).await;
        }
        let first: lock::LockResponse = client.call(method::lock::LOCK, &lock_of(0xa)).await.unwrap();
        assert_eq!(first.key, "l/a");
        // The same lease holds it already.
        let again: lock::LockResponse = client.call(method::lock::LOCK, &lock_of(0xa)).await.unwrap();
        assert_eq!(again.key, "l/a");
        let mut second = client.open(method::lock::LOCK, &[]).await;
        second.send(&lock_of(0xb), true);
        until_keys(&client, "l/", &["l/a", "l/b"]).await;
        let mut third = client.open(method::lock::LOCK, &[]).await;
        third.send(&lock_of(0xc), true);
        until_keys(&client, "l/", &["l/a", "l/b", "l/c"]).await;
        let unlock = lock::UnlockRequest { key: first.key };
        let _: lock::UnlockResponse = client.call(method::lock::UNLOCK, &unlock).await.unwrap();
        let second: lock::LockResponse = second.answer().await.unwrap().next().await.unwrap();
        assert_eq!(second.key, "l/b");
        // The holder's lease is revoked, and with it the lock.
        let revoke = wire::LeaseRevokeRequest { id: 0xb };
        let _: wire::LeaseRevokeResponse = client.call(method::lease::REVOKE, &revoke).await.unwrap();
        let third: lock::LockResponse = third.answer().await.unwrap().next().await.unwrap();
        assert_eq!(third.key, "l/c");
        assert!(third.header.unwrap().revision > second.header.unwrap().revision);
    });
}

#[test]
fn lock_request_that_times_out_leaves_the_queue() {
    Ports::with_client(1, async |_, client| {
        for id in [0xa, 0xb, 0xc] {
            lease(&client, id).await;
        }
        let _: lock::LockResponse = client.call(method::lock::LOCK, &lock_of(0xa)).await.unwrap();
        let late = client
            .call_with::<_, lock::LockResponse>(method::lock::LOCK, &[("grpc-timeout", "50m")], &lock_of(0xb))
            .await;
        assert_eq!(refusal(late), "DeadlineExceeded: context deadline exceeded");
        until_keys(&client, "l/", &["l/a"]).await;
        let mut gone = client.open(method::lock::LOCK, &[]).await;
        gone.send(&lock_of(0xc), true);
        until_keys(&client, "l/", &["l/a", "l/c"]).await;
        drop(gone); // resets the stream
        until_keys(&client, "l/", &["l/a"]).await;
    });
}

#[test]
fn waiter_whose_lease_ends_does_not_get_the_lock() {
    Ports::with_client(1, async |_, client| {
        lease(&client, 0xa).await;
        lease(&client, 0xb).await;
        let _: lock::LockResponse = client.call(method::lock::LOCK, &lock_of(0xa)).await.unwrap();
        let mut waiter = client.open(method::lock::LOCK, &[]).await;
        waiter.send(&lock_of(0xb), true);
        until_keys(&client, "l/", &["l/a", "l/b"]).await;
        for id in [0xb, 0xa] {
            let revoke = wire::LeaseRevokeRequest { id };
            let _: wire::LeaseRevokeResponse = client.call(method::lease::REVOKE, &revoke).await.unwrap();
        }
        let outcome = waiter.answer().await.map(|_| ());
        assert_eq!(refusal(outcome), "Unknown: mutex: session is expired");
        let unknown = client.call::<_, lock::LockResponse>(method::lock::LOCK, &lock_of(0xf)).await;
        assert_eq!(refusal(unknown), "Unknown: etcdserver: requested lease not found");
        // Without a lease, the server grants one.
        let own: lock::LockResponse = client.call(method::lock::LOCK, &lock_of(0)).await.unwrap();
        assert_eq!(keys(&client, "l/").await, [String::from_utf8_lossy(&own.key).into_owned()]);
    });
}

#[test]
fn candidate_whose_lease_ends_is_not_elected() {
    Ports::with_client(1, async |_, client| {
        lease(&client, 0xa).await;
        lease(&client, 0xb).await;
        let campaign = |lease| election::CampaignRequest { name: "e".into(), lease, value: "v".into() };
        let _: election::CampaignResponse =
            client.call(method::election::CAMPAIGN, &campaign(0xa)).await.unwrap();
        let mut candidate = client.open(method::election::CAMPAIGN, &[]).await;
        candidate.send(&campaign(0xb), true);
        until_keys(&client, "e/", &["e/a", "e/b"]).await;
        let revoke = wire::LeaseRevokeRequest { id: 0xb };
        let _: wire::LeaseRevokeResponse = client.call(method::lease::REVOKE, &revoke).await.unwrap();
        // Reported while the leader still exists, and never elected.
        let outcome = candidate.answer().await.map(|_| ());
        assert_eq!(refusal(outcome), "Unknown: election: session expired before leadership was won");
    });
}

#[test]
fn leader_may_proclaim_and_resign() {
    Ports::with_client(1, async |_, client| {
        lease(&client, 0xa).await;
        lease(&client, 0xb).await;
        let ask = election::LeaderRequest { name: "e".into() };
        let no_leader = client.call::<_, election::LeaderResponse>(method::election::LEADER, &ask).await;
        assert_eq!(refusal(no_leader), "Unknown: election: no leader");
        let mut observer = client.open(method::election::OBSERVE, &[]).await;
        observer.send(&ask, true);
        let mut observed = observer.answer().await.unwrap();

        let campaign = |lease, value: &str| election::CampaignRequest {
            name: "e".into(),
            lease,
            value: value.to_owned().into(),
        };
        let won: election::CampaignResponse =
            client.call(method::election::CAMPAIGN, &campaign(0xa, "one")).await.unwrap();
        let first = won.leader.unwrap();
        assert_eq!((&first.key[..], first.lease), (&b"e/a"[..], 0xa));
        let mut waiting = client.open(method::election::CAMPAIGN, &[]).await;
        waiting.send(&campaign(0xb, "two"), true);
        until_keys(&client, "e/", &["e/a", "e/b"]).await;
        let leads: election::LeaderResponse = client.call(method::election::LEADER, &ask).await.unwrap();
        assert_eq!(leads.kv.unwrap().value, "one");

        let proclaim = election::ProclaimRequest { leader: Some(first.clone()), value: "one again".into() };
        let _: election::ProclaimResponse = client.call(method::election::PROCLAIM, &proclaim).await.unwrap();
        let resign = election::ResignRequest { leader: Some(first) };
        let _: election::ResignResponse = client.call(method::election::RESIGN, &resign).await.unwrap();
        let won: election::CampaignResponse = waiting.answer().await.unwrap().next().await.unwrap();
        assert_eq!(won.leader.unwrap().key, "e/b");
        let refused =
            client.call::<_, election::ProclaimResponse>(method::election::PROCLAIM, &proclaim).await;
        assert_eq!(refusal(refused), "Unknown: election: not leader");
        let unsaid = election::ProclaimRequest { leader: None, value: "x".into() };
        let refused = client.call::<_, election::ProclaimResponse>(method::election::PROCLAIM, &unsaid).await;
        assert_eq!(refusal(refused), "Unknown: \"leader\" field must be provided");

        for expected in ["one", "one again", "two"] {
            let observed_leader: election::LeaderResponse = observed.next().await.unwrap();
            assert_eq!(observed_leader.kv.unwrap().value, expected);
        }
    });
}
