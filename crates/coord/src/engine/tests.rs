//! Coordinators over the in-memory network, on real journals: forwarding, leader changes, leases, watches, alarms.

use super::*;
use crate::request::PutRequest;
use crate::testing::TestCluster;

fn usual(_: &mut CoordinatorOptions) {}

fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Command {
    Command::client(Op::Put(PutRequest::new(key, value)))
}

fn revision(reply: &Reply) -> i64 {
    match reply {
        Reply::Put(put) => put.revision,
        other => panic!("{other:?}"),
    }
}

async fn value(node: &Coordinator, key: &'static str, serializable: bool) -> Option<Bytes> {
    let reply = node.range(RangeRequest::key(key), serializable).await.unwrap();
    reply.kvs.first().map(|kv| kv.value.clone())
}

#[test]
fn one_node_puts_reads_and_comes_back_from_disk() {
    let mut cluster = TestCluster::start(1, usual);
    let node = cluster.node(0);
    for number in 0..50_i64 {
        let reply = cluster.wait(node.execute(put("k", number.to_string()))).unwrap();
        assert_eq!(revision(&reply), number + 2);
        assert_eq!(cluster.wait(value(&node, "k", false)), Some(number.to_string().into()));
    }
    let header = node.header(SpaceId::User);
    assert_eq!((header.member_id, header.revision), (1, 51));
    drop(node);
    cluster.kill(0);
    cluster.start_node(0);
    cluster.settle();
    assert_eq!(cluster.wait(value(&cluster.node(0), "k", false)), Some("49".into()));
    assert_eq!(cluster.node(0).header(SpaceId::User).revision, 51);
}

#[test]
fn every_node_takes_writes_and_sees_them_at_once() {
    let cluster = TestCluster::start(3, usual);
    cluster.settle();
    for round in 0..30 {
        let node = cluster.node(round % 3);
        let reply = cluster.wait(node.execute(put("k", round.to_string()))).unwrap();
        // Its own state is never behind its answer.
        assert_eq!(node.header(SpaceId::User).revision, revision(&reply));
        assert_eq!(cluster.wait(value(&node, "k", true)), Some(round.to_string().into()));
        for at in 0..3 {
            let read = cluster.wait(value(&cluster.node(at), "k", false));
            assert_eq!(read, Some(round.to_string().into()), "node {at}");
        }
    }
    let refused = cluster.wait(cluster.node(1).execute(put("", "x"))).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::EmptyKey));
    let refused = cluster.wait(cluster.node(1).execute(put("/moim/x", "x"))).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::PermissionDenied));
}
