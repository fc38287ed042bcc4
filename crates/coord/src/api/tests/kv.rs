//! Valid gRPC requests: the response of each service, and the code and text of every refusal.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{health, method};

use super::*;
use crate::api::read_backup;

fn put(key: &str, value: impl Into<Bytes>) -> wire::PutRequest {
    wire::PutRequest { key: key.to_owned().into(), value: value.into(), ..Default::default() }
}

fn get(key: &str) -> wire::RangeRequest {
    wire::RangeRequest { key: key.to_owned().into(), ..Default::default() }
}

fn put_op(key: &str) -> wire::RequestOp {
    wire::RequestOp { op: Some(wire::RequestOpKind::Put(put(key, "v"))) }
}

#[test]
fn put_is_read_back_with_its_revisions() {
    Ports::with_client(1, async |_, client| {
        for round in 0..3_i64 {
            let request = wire::PutRequest { prev_kv: true, ..put("k", round.to_string()) };
            let answer: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
            let header = answer.header.unwrap();
            assert_eq!((header.cluster_id, header.member_id, header.revision), (0xC1, 1, round + 2));
            assert!(header.raft_term > 0);
            let before = answer.prev_kv.map(|kv| kv.value);
            assert_eq!(before, (round > 0).then(|| Bytes::from((round - 1).to_string())));
        }
        let answer: wire::RangeResponse = client.call(method::kv::RANGE, &get("k")).await.unwrap();
        let kv = &answer.kvs[0];
        assert_eq!((kv.create_revision, kv.mod_revision, kv.version, &kv.value[..]), (2, 4, 3, &b"2"[..]));
        let delete = wire::DeleteRangeRequest { key: "k".into(), prev_kv: true, ..Default::default() };
        let answer: wire::DeleteRangeResponse = client.call(method::kv::DELETE_RANGE, &delete).await.unwrap();
        assert_eq!((answer.deleted, answer.prev_kvs.len(), answer.header.unwrap().revision), (1, 1, 5));
    });
}

#[test]
fn txn_responds_to_each_operation() {
    Ports::with_client(1, async |_, client| {
        let missing = wire::Compare {
            key: "k".into(),
            target: wire::CompareTarget::Create.into(),
            result: wire::CompareResult::Equal.into(),
            value: None, // nothing given compares with 0
            range_end: Bytes::new(),
        };
        let nested = wire::TxnRequest { success: vec![put_op("n")], ..Default::default() };
        let txn = wire::TxnRequest {
            compare: vec![missing],
            success: vec![
                put_op("k"),
                wire::RequestOp { op: Some(wire::RequestOpKind::Range(get("k"))) },
                wire::RequestOp { op: Some(wire::RequestOpKind::Txn(nested)) },
            ],
            failure: Vec::new(),
        };
        let answer: wire::TxnResponse = client.call(method::kv::TXN, &txn).await.unwrap();
        assert!(answer.succeeded);
        assert_eq!(answer.header.unwrap().revision, 2);
        let kinds: Vec<_> = answer.responses.into_iter().map(|response| response.op.unwrap()).collect();
        assert!(
            matches!(&kinds[0], wire::ResponseOpKind::Put(put) if put.header.as_ref().unwrap().revision == 2)
        );
        assert!(matches!(&kinds[1], wire::ResponseOpKind::Range(range) if range.kvs[0].value == "v"));
        assert!(matches!(&kinds[2], wire::ResponseOpKind::Txn(txn) if txn.responses.len() == 1));
        let again: wire::TxnResponse = client.call(method::kv::TXN, &txn).await.unwrap();
        assert!(!again.succeeded);
        assert_eq!(again.header.unwrap().revision, 2);
    });
}

#[test]
fn kv_refusals_have_etcd_codes_and_texts() {
    Ports::with_client(1, async |_, client| {
        for _ in 0..5 {
            let _: wire::PutResponse = client.call(method::kv::PUT, &put("k", "v")).await.unwrap();
        }
        let compact = |revision| wire::CompactionRequest { revision, physical: true };
        let _: wire::CompactionResponse = client.call(method::kv::COMPACT, &compact(4)).await.unwrap();
        let granted = wire::LeaseGrantRequest { id: 7, ttl: 100 };
        let _: wire::LeaseGrantResponse = client.call(method::lease::GRANT, &granted).await.unwrap();

        let range = async |request: wire::RangeRequest| {
            refusal(client.call::<_, wire::RangeResponse>(method::kv::RANGE, &request).await)
        };
        let compacted = "OutOfRange: etcdserver: mvcc: required revision has been compacted";
        let future = "OutOfRange: etcdserver: mvcc: required revision is a future revision";
        let empty = "InvalidArgument: etcdserver: key is not provided";
        assert_eq!(range(wire::RangeRequest { revision: 3, ..get("k") }).await, compacted);
        assert_eq!(range(wire::RangeRequest { revision: 99, ..get("k") }).await, future);
        assert_eq!(range(get("")).await, empty);
        let unsorted = wire::RangeRequest { sort_order: 9, ..get("k") };
        assert_eq!(range(unsorted).await, "InvalidArgument: etcdserver: invalid sort option");

        let puts = async |request: wire::PutRequest| {
            refusal(client.call::<_, wire::PutResponse>(method::kv::PUT, &request).await)
        };
        assert_eq!(puts(put("", "v")).await, empty);
        let on_lease = wire::PutRequest { lease: 99, ..put("k", "v") };
        assert_eq!(puts(on_lease).await, "NotFound: etcdserver: requested lease not found");
        let keep = wire::PutRequest { ignore_value: true, ..put("new", "") };
        assert_eq!(puts(keep).await, "InvalidArgument: etcdserver: key not found");
        let both = wire::PutRequest { ignore_value: true, ..put("k", "v") };
        assert_eq!(puts(both).await, "InvalidArgument: etcdserver: value is provided");
        let both = wire::PutRequest { ignore_lease: true, lease: 7, ..put("k", "v") };
        assert_eq!(puts(both).await, "InvalidArgument: etcdserver: lease is provided");
        assert_eq!(puts(put("/moim/x", "v")).await, "PermissionDenied: etcdserver: permission denied");
        let large = put("k", vec![0; 1_600_000]);
        assert_eq!(puts(large).await, "InvalidArgument: etcdserver: request is too large");
        let larger = puts(put("k", vec![0; 2_200_000])).await;
        assert!(larger.starts_with("ResourceExhausted: grpc: received message larger than max"), "{larger}");

        let txns = async |success: Vec<wire::RequestOp>| {
            let request = wire::TxnRequest { success, ..Default::default() };
            refusal(client.call::<_, wire::TxnResponse>(method::kv::TXN, &request).await)
        };
        let many = (0..129).map(|number| put_op(&number.to_string())).collect();
        assert_eq!(txns(many).await, "InvalidArgument: etcdserver: too many operations in txn request");
        let twice = "InvalidArgument: etcdserver: duplicate key given in txn request";
        assert_eq!(txns(vec![put_op("a"), put_op("a")]).await, twice);
        let nothing = vec![wire::RequestOp { op: None }];
        assert_eq!(txns(nothing).await, "InvalidArgument: etcdserver: key not found");

        let compacts = async |revision| {
            refusal(client.call::<_, wire::CompactionResponse>(method::kv::COMPACT, &compact(revision)).await)
        };
        assert_eq!(compacts(2).await, compacted);
        assert_eq!(compacts(99).await, future);
    });
}

#[test]
fn lease_member_and_maintenance_refusals_have_etcd_codes_and_texts() {
    Ports::with_client(1, async |_, client| {
        let grants = async |id, ttl| {
            let request = wire::LeaseGrantRequest { id, ttl };
            client.call::<_, wire::LeaseGrantResponse>(method::lease::GRANT, &request).await
        };
        assert_eq!(grants(7, 100).await.unwrap().ttl, 100);
        assert_eq!(refusal(grants(7, 1).await), "FailedPrecondition: etcdserver: lease already exists");
        assert_eq!(refusal(grants(8, 9_000_000_001).await), "OutOfRange: etcdserver: too large lease TTL");
        assert_ne!(grants(0, 5).await.unwrap().id, 0);
        let revoke = wire::LeaseRevokeRequest { id: 99 };
        let revoked = client.call::<_, wire::LeaseRevokeResponse>(method::lease::REVOKE, &revoke).await;
        assert_eq!(refusal(revoked), "NotFound: etcdserver: requested lease not found");

        let remove = wire::MemberRemoveRequest { id: 99 };
        let removed =
            client.call::<_, wire::MemberRemoveResponse>(method::cluster::MEMBER_REMOVE, &remove).await;
        assert_eq!(refusal(removed), "NotFound: etcdserver: member not found");
        let add = wire::MemberAddRequest { peer_urls: vec!["nowhere".into()], is_learner: true };
        let added = client.call::<_, wire::MemberAddResponse>(method::cluster::MEMBER_ADD, &add).await;
        assert_eq!(refusal(added), "InvalidArgument: etcdserver: given member URLs are invalid");
        let promote = wire::MemberPromoteRequest { id: 1 };
        let promoted =
            client.call::<_, wire::MemberPromoteResponse>(method::cluster::MEMBER_PROMOTE, &promote).await;
        assert_eq!(refusal(promoted), "FailedPrecondition: etcdserver: can only promote a learner member");
        let lead = wire::MoveLeaderRequest { target_id: 99 };
        let moved = client.call::<_, wire::MoveLeaderResponse>(method::maintenance::MOVE_LEADER, &lead).await;
        assert_eq!(refusal(moved), "FailedPrecondition: etcdserver: bad leader transferee");
        let back = wire::DowngradeRequest { action: 1, version: "3.4.0".into() };
        let downgraded =
            client.call::<_, wire::DowngradeResponse>(method::maintenance::DOWNGRADE, &back).await;
        assert_eq!(refusal(downgraded), "InvalidArgument: etcdserver: invalid downgrade target version");
        let hash = wire::HashKvRequest { revision: 99 };
        let hashed = client.call::<_, wire::HashKvResponse>(method::maintenance::HASH_KV, &hash).await;
        assert_eq!(refusal(hashed), "OutOfRange: etcdserver: mvcc: required revision is a future revision");

        let status = wire::AuthStatusRequest {};
        let auth: wire::AuthStatusResponse = client.call(method::auth::STATUS, &status).await.unwrap();
        assert!(!auth.enabled);
        for (name, text) in [
            ("AuthEnable", "FailedPrecondition: etcdserver: root user does not exist"),
            ("Authenticate", "FailedPrecondition: etcdserver: authentication is not enabled"),
            ("UserGet", "FailedPrecondition: etcdserver: user name not found"),
            ("Nonsense", "Unimplemented: unknown method Nonsense for service etcdserverpb.Auth"),
        ] {
            let path = format!("{}{name}", method::auth::PREFIX);
            let answer = client.call::<_, wire::AuthStatusResponse>(&path, &status).await;
            assert_eq!(refusal(answer), text);
        }
    });
}

#[test]
fn leases_are_granted_listed_and_revoked() {
    Ports::with_client(1, async |_, client| {
        let grant = wire::LeaseGrantRequest { id: 7, ttl: 100 };
        let _: wire::LeaseGrantResponse = client.call(method::lease::GRANT, &grant).await.unwrap();
        let on_lease = wire::PutRequest { lease: 7, ..put("k", "v") };
        let _: wire::PutResponse = client.call(method::kv::PUT, &on_lease).await.unwrap();
        let ask = |id| wire::LeaseTimeToLiveRequest { id, keys: true };
        let alive: wire::LeaseTimeToLiveResponse =
            client.call(method::lease::TIME_TO_LIVE, &ask(7)).await.unwrap();
        assert_eq!((alive.id, alive.granted_ttl, &alive.keys[..]), (7, 100, &[Bytes::from("k")][..]));
        assert!((90..=100).contains(&alive.ttl), "{}", alive.ttl);
        let list: wire::LeaseLeasesResponse =
            client.call(method::lease::LEASES, &wire::LeaseLeasesRequest {}).await.unwrap();
        assert_eq!(list.leases, [wire::LeaseStatus { id: 7 }]);
        let revoke = wire::LeaseRevokeRequest { id: 7 };
        let _: wire::LeaseRevokeResponse = client.call(method::lease::REVOKE, &revoke).await.unwrap();
        let gone: wire::LeaseTimeToLiveResponse =
            client.call(method::lease::TIME_TO_LIVE, &ask(7)).await.unwrap();
        assert_eq!((gone.id, gone.ttl, gone.granted_ttl), (7, -1, 0));
        let answer: wire::RangeResponse = client.call(method::kv::RANGE, &get("k")).await.unwrap();
        assert_eq!(answer.count, 0);
    });
}

#[test]
fn keepalives_are_answered_in_order_and_the_stream_ends_with_its_client() {
    Ports::with_client(1, async |_, client| {
        let grant = wire::LeaseGrantRequest { id: 7, ttl: 100 };
        let _: wire::LeaseGrantResponse = client.call(method::lease::GRANT, &grant).await.unwrap();
        let mut stream = client.open(method::lease::KEEP_ALIVE, &[]).await;
        let asked: Vec<i64> =
            (0..600).map(|number| if number % 3 == 0 { 7 } else { 1_000 + number }).collect();
        for id in &asked {
            stream.send(&wire::LeaseKeepAliveRequest { id: *id }, false);
        }
        let (mut body, mut answer) = stream.talk().await;
        for id in &asked {
            let renewed: wire::LeaseKeepAliveResponse = answer.next().await.unwrap();
            assert_eq!((renewed.id, renewed.ttl), (*id, if *id == 7 { 100 } else { 0 }));
        }
        body.send_data(Bytes::new(), true).unwrap();
        assert_eq!(answer.next::<wire::LeaseKeepAliveResponse>().await, None);
        assert_eq!(answer.end().await, Ok(()));
    });
}

#[test]
fn status_members_alarms_and_health() {
    Ports::with_client(1, async |_, client| {
        let _: wire::PutResponse = client.call(method::kv::PUT, &put("k", "v")).await.unwrap();
        let ask = wire::StatusRequest {};
        let status: wire::StatusResponse = client.call(method::maintenance::STATUS, &ask).await.unwrap();
        assert_eq!((status.version.as_str(), status.leader, status.is_learner), ("3.5.21", 1, false));
        assert!(status.db_size > 0 && status.raft_applied_index > 0 && status.errors.is_empty());
        let ask = wire::MemberListRequest { linearizable: true };
        let members: wire::MemberListResponse =
            client.call(method::cluster::MEMBER_LIST, &ask).await.unwrap();
        assert_eq!((members.members.len(), members.members[0].id), (1, 1));

        let ask = |action: wire::AlarmAction, alarm: wire::AlarmType| wire::AlarmRequest {
            action: action.into(),
            member_id: 1,
            alarm: alarm.into(),
        };
        let alarm = async |request: wire::AlarmRequest| {
            let answer: wire::AlarmResponse =
                client.call(method::maintenance::ALARM, &request).await.unwrap();
            answer.alarms.len()
        };
        assert_eq!(alarm(ask(wire::AlarmAction::Get, wire::AlarmType::None)).await, 0);
        assert_eq!(alarm(ask(wire::AlarmAction::Activate, wire::AlarmType::NoSpace)).await, 1);
        let refused = client.call::<_, wire::PutResponse>(method::kv::PUT, &put("k", "v")).await;
        assert_eq!(refusal(refused), "ResourceExhausted: etcdserver: mvcc: database space exceeded");
        let status: wire::StatusResponse =
            client.call(method::maintenance::STATUS, &wire::StatusRequest {}).await.unwrap();
        assert_eq!(status.errors.len(), 1);
        assert_eq!(alarm(ask(wire::AlarmAction::Get, wire::AlarmType::Corrupt)).await, 0);
        assert_eq!(alarm(ask(wire::AlarmAction::Get, wire::AlarmType::None)).await, 1);
        assert_eq!(alarm(ask(wire::AlarmAction::Deactivate, wire::AlarmType::NoSpace)).await, 1);
        let _: wire::PutResponse = client.call(method::kv::PUT, &put("k", "v")).await.unwrap();

        let ask = |service: &str| health::HealthCheckRequest { service: service.to_owned() };
        let answer: health::HealthCheckResponse = client.call(method::health::CHECK, &ask("")).await.unwrap();
        assert_eq!(answer.status, 1);
        let unknown = client.call::<_, health::HealthCheckResponse>(method::health::CHECK, &ask("x")).await;
        assert_eq!(refusal(unknown), "NotFound: unknown service");
    });
}

#[test]
fn snapshot_stream_is_a_restorable_file() {
    Ports::with_client(1, async |ports, client| {
        for number in 0..200 {
            let request = put(&format!("key-{number:03}"), vec![b'x'; 1_000]);
            let _: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
        }
        let mut stream = client.open(method::maintenance::SNAPSHOT, &[]).await;
        stream.send(&wire::SnapshotRequest {}, true);
        let mut answer = stream.answer().await.unwrap();
        let mut file = Vec::new();
        let mut ended = false;
        while let Some(piece) = answer.next::<wire::SnapshotResponse>().await {
            assert!(!ended, "nothing remains after 0 bytes remain");
            ended = piece.remaining_bytes == 0;
            file.extend_from_slice(&piece.blob);
        }
        assert_eq!(answer.end().await, Ok(()));
        assert_eq!(file.len() % 512, 32);
        let restored = read_backup(&file).unwrap();
        let everything = crate::RangeRequest::between("key-", "key.");
        let here = ports.cluster.node(0).read(|state| state.range(&everything));
        assert_eq!(restored.range(&everything), here);
        assert_eq!(here.unwrap().count, 200);
    });
}
