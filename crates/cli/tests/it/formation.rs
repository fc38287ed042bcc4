//! Cluster formation and membership: founding, joining, loss, replacement and removal of nodes.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use rustix::process::Signal;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders, initial_cluster};
use crate::support::{PATIENCE, moim};

fn encode(id: u128) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(id.to_be_bytes())
}

fn cluster_id(ready: &str) -> &str {
    ready.split(' ').find_map(|word| word.strip_prefix("cluster=")).expect("a cluster")
}

#[test]
fn three_founders_agree_and_tolerate_the_loss_of_one() {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    let list = initial_cluster(&peers);
    // Two of three founders do not found the cluster.
    peers[0].start(&["--initial-cluster", &list]);
    peers[1].start(&["--initial-cluster", &list]);
    eventually("waits for the third founder", || peers[0].readyz().contains("waiting for founder 3"));
    // A founder that is killed before the agreement starts over.
    peers[1].kill();
    peers[1].start(&["--initial-cluster", &list]);
    let third = peers[2].start_ready(&["--initial-cluster", &list]);
    for peer in &mut peers[..2] {
        assert_eq!(cluster_id(&peer.ready()), cluster_id(&third));
    }
    peers[2].healthy_with(3, 3);
    peers[0].put("k", "1");
    assert_eq!(peers[2].get("k").as_deref(), Some("1"));

    peers[0].kill();
    peers[1].put("k", "2");
    assert_eq!(peers[2].get("k").as_deref(), Some("2"));
    peers[0].start_ready(&["--initial-cluster", &list]);
    assert_eq!(peers[0].get("k").as_deref(), Some("2"));
    peers[0].healthy_with(3, 3);
    assert_eq!(peers[0].cluster(&["health"]).status, 0);
}

#[test]
fn acknowledged_writes_survive_kill_9_of_all_nodes() {
    let (mut peers, _) = founders();
    peers[0].put("k", "before");
    peers.iter_mut().for_each(Peer::kill);
    // As after a crash between the first Raft entry and its record in node.json.
    peers[1].edit_identity(|identity| identity["admission"] = "founding".into());
    // The data directory has the cluster id, so no flags are needed.
    peers.iter_mut().for_each(|peer| peer.start(&[]));
    peers.iter_mut().for_each(|peer| drop(peer.ready()));
    assert_eq!(peers[1].get("k").as_deref(), Some("before"));
    assert_eq!(peers[1].edit_identity(|_| {})["admission"], "member");

    // A data directory that lost its Raft log does not start a second one.
    peers[2].kill();
    peers[2].keep_identity_only();
    peers[2].start(&[]);
    assert_eq!(peers[2].wait(), 1, "{}", peers[2].log());
    assert!(peers[2].log().contains("holds no Raft log, but voter 3 had one"), "{}", peers[2].log());
}

#[test]
fn founders_that_crashed_after_the_agreement_resume() {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    let list = initial_cluster(&peers);
    let folder = |id: i32| encode(u128::from_be_bytes([id as u8; 16]));
    let founders: Vec<_> = peers
        .iter()
        .map(|peer| {
            serde_json::json!({"node_id": peer.id, "directory_id": folder(peer.id), "peer": peer.peer_address()})
        })
        .collect();
    let mixed = (1..=3).fold(0, |mixed: u128, id| mixed.rotate_left(11) ^ u128::from_be_bytes([id; 16]));
    // Two founders had recorded the agreement and had no Raft log yet; the third had recorded nothing.
    for (peer, agreed) in peers.iter().zip([true, true, false]) {
        std::fs::create_dir_all(peer.data()).unwrap();
        let identity = serde_json::json!({
            "format": 2, "node_id": peer.id, "incarnation": 7, "version": "0.1.0", "directory_id": folder(peer.id),
            "cluster_id": if agreed { encode(mixed) } else { String::new() },
            "voter": if agreed { peer.id } else { 0 },
            "admission": if agreed { "founding" } else { "new" },
            "founders": if agreed { founders.clone() } else { vec![] },
        });
        std::fs::write(peer.data().join("node.json"), identity.to_string()).unwrap();
    }
    peers.iter_mut().for_each(|peer| peer.start(&["--initial-cluster", &list]));
    for peer in &mut peers {
        assert_eq!(cluster_id(&peer.ready()), encode(mixed));
    }
    peers[2].healthy_with(3, 3);
}

#[test]
fn founder_with_an_empty_directory_waits_for_admission() {
    let (mut peers, list) = founders();
    peers[0].put("k", "v");
    peers[1].kill();
    peers[1].wipe();
    peers[1].start(&["--initial-cluster", &list]);
    eventually("readiness reason with the remedy", || peers[1].readyz().contains("`moim cluster replace 2`"));
    let report = peers[0].report().unwrap();
    let voter = |report: &serde_json::Value| report["nodes"][1]["voter"].as_u64();
    assert_eq!(voter(&report), Some(2), "{report}");

    let running = peers[0].cluster(&["replace", "3", "--yes"]);
    assert_eq!(running.status, 7, "{running:?}");
    assert!(running.stderr.contains("node 3 is running"), "{running:?}");
    assert_eq!(peers[0].cluster(&["replace", "9", "--yes"]).status, 3);
    assert_eq!(peers[0].cluster(&["replace", "2"]).status, 2, "needs --yes");

    // The empty node gets the request first: it is not in a cluster, so the next address is used.
    let admins = format!("{},{}", peers[1].admin_address(), peers[0].admin_address());
    let replaced = moim(&["cluster", "replace", "2", "--yes", "--admin", &admins, "--timeout", "60s"]);
    assert_eq!(replaced.status, 0, "{replaced:?}");
    peers[1].ready();
    peers[0].healthy_with(3, 3);
    assert_eq!(voter(&peers[1].report().unwrap()), Some(4), "a new data directory has a new voter id");
    assert_eq!(peers[1].get("k").as_deref(), Some("v"));

    // The vote of the new voter counts.
    peers[2].kill();
    peers[1].put("k", "w");
    assert_eq!(peers[0].get("k").as_deref(), Some("w"));
}

#[test]
fn cluster_grows_to_three_voters_and_tolerates_the_loss_of_the_first() {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    peers[0].start_ready(&[]);
    peers[0].put("k", "v");
    let seed = peers[0].peer_address();
    peers[1].start_ready(&["--join", &seed]);
    peers[0].healthy_with(2, 1);
    let ready = peers[2].start_ready(&["--join", &seed]);
    peers[2].healthy_with(3, 3);
    assert_eq!(peers[2].get("k").as_deref(), Some("v"));

    let members = peers[1].cluster(&["members", "-o", "json"]).json();
    let ids: Vec<_> =
        members["members"].as_array().unwrap().iter().map(|node| node["node_id"].as_i64()).collect();
    assert_eq!(ids, [Some(1), Some(2), Some(3)]);
    let table = peers[1].cluster(&["members"]).stdout;
    assert!(table.starts_with("NODE  STATE  ROLE"), "{table}");
    let status = peers[1].cluster(&["status"]).stdout;
    assert!(status.contains(cluster_id(&ready)) && status.contains("3 (3 up, 3 vote)"), "{status}");

    peers[0].kill();
    peers[1].put("k", "w");
    assert_eq!(peers[2].get("k").as_deref(), Some("w"));
    eventually("its loss is reported", || {
        let health = peers[1].cluster(&["health"]);
        health.status == 8 && health.stdout.contains("node 1 is down")
    });
}

#[test]
fn removed_node_stops_and_its_data_directory_is_rejected() {
    let (mut peers, list) = founders();
    peers[0].put("k", "v");
    let removed = peers[1].cluster(&["remove", "3", "--yes"]);
    assert_eq!(removed.status, 0, "{removed:?}");
    assert_eq!(peers[2].wait(), 0, "{}", peers[2].log());
    peers[0].healthy_with(2, 1);
    peers[1].put("k", "w");

    for args in [&["--initial-cluster", list.as_str()][..], &[]] {
        peers[2].start(args);
        assert_eq!(peers[2].wait(), 7, "{}", peers[2].log());
        assert!(peers[2].log().contains("was removed or replaced"), "{}", peers[2].log());
    }
    // With an empty data directory it is admitted.
    peers[2].wipe();
    let seed = peers[0].peer_address();
    peers[2].start_ready(&["--join", &seed]);
    peers[2].healthy_with(3, 3);
    assert_eq!(peers[2].get("k").as_deref(), Some("w"));
}

#[test]
fn leader_can_be_removed_and_the_last_node_cannot() {
    let mut peers: Vec<_> = (1..=2).map(Peer::new).collect();
    peers[0].start_ready(&[]);
    let last = peers[0].cluster(&["remove", "1", "--yes"]);
    assert_eq!((last.status, last.stderr.contains("last node")), (7, true), "{last:?}");
    let seed = peers[0].peer_address();
    peers[1].start_ready(&["--join", &seed]);
    peers[1].healthy_with(2, 1);
    peers[0].put("k", "v");
    // Node 1 is the only voter and the leader.
    let removed = peers[1].cluster(&["remove", "1", "--yes"]);
    assert_eq!(removed.status, 0, "{removed:?}");
    assert_eq!(peers[0].wait(), 0, "{}", peers[0].log());
    peers[1].healthy_with(1, 1);
    assert_eq!(peers[1].get("k").as_deref(), Some("v"));
}

#[test]
fn directory_of_another_cluster_and_duplicate_node_id_are_rejected() {
    let mut here = Peer::new(1);
    let mut there = Peer::new(2);
    here.start_ready(&[]);
    there.start_ready(&[]);
    // A data directory of one cluster with the seed of another.
    there.kill();
    let seed = here.peer_address();
    there.start(&["--join", &seed]);
    assert_eq!(there.wait(), 7, "{}", there.log());
    assert!(there.log().contains("belongs to cluster"), "{}", there.log());

    // Two nodes with one node id.
    let mut twin = Peer::new(1);
    twin.start(&["--join", &seed]);
    assert_eq!(twin.wait(), 7, "{}", twin.log());
    assert!(twin.log().contains("node 1 is running at"), "{}", twin.log());
    assert!(here.readyz().starts_with("ready"));
}

#[test]
fn node_without_a_quorum_is_not_ready_and_reports_no_leader() {
    let (mut peers, _) = founders();
    let leader = peers[0].report().unwrap()["leader"].as_u64().unwrap() as usize - 1;
    let left = (leader + 1) % 3;
    peers[leader].kill();
    peers[(leader + 2) % 3].kill();
    // The first response, before the lease has expired.
    let answer = peers[left].readyz();
    assert!(answer.contains("no coordination quorum in sight"), "{answer}");
    let report = peers[left].report().unwrap();
    assert_eq!((&report["quorum"], &report["leader"]), (&false.into(), &serde_json::Value::Null), "{report}");
    let mut roles = report["nodes"].as_array().unwrap().iter().map(|node| &node["role"]);
    assert!(roles.all(|role| role == "voter"), "{report}");
}

#[test]
fn node_below_the_feature_level_is_not_admitted() {
    let mut peer = Peer::new(1);
    peer.start_ready(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let join = |node: i32, level: u32| {
        let me = serde_json::json!({
            "node_id": node, "directory_id": format!("folder of {node}"), "peer": "127.0.0.1:1",
            "version": "0.0.9", "feature_level": level,
        });
        let request = serde_json::json!({ "ask": "join", "me": me, "fresh": true }).to_string();
        let response = runtime.block_on(moim_raft::visit(&peer.peer_address(), request.into(), PATIENCE));
        serde_json::from_slice::<serde_json::Value>(&response.unwrap()).unwrap()
    };
    let refused = join(8, 0);
    assert_eq!(refused["answer"], "conflict", "{refused}");
    let why = refused["why"].as_str().unwrap();
    assert_eq!(why, "the cluster runs at feature level 1, moim 0.0.9 supports up to 0");
    // A node that supports a higher level is admitted at the level of the cluster.
    assert_eq!(join(9, 2)["answer"], "admitted");
    let report = peer.report().unwrap();
    assert_eq!(report["feature_level"], 1, "{report}");
    let nodes: Vec<_> = report["nodes"].as_array().unwrap().iter().map(|node| &node["node_id"]).collect();
    assert_eq!(nodes, [1, 9], "the rejected node has no record");
}

#[test]
fn garbage_on_the_peer_port_does_not_affect_the_node() {
    let mut peer = Peer::new(1);
    peer.start_ready(&[]);
    let garbage: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"moimpeer",
        &[0xFF; 4096],
        b"moimpeer\x09\0\0\0 another version, or so it says",
    ];
    for bytes in garbage {
        let mut stream = TcpStream::connect(peer.peer_address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        // Closed or reset.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 100);
    }
    // Many idle connections at a time are evicted one after the other.
    let crowd: Vec<_> = (0..200).filter_map(|_| TcpStream::connect(peer.peer_address()).ok()).collect();
    peer.put("k", "v");
    drop(crowd);
    assert!(peer.log().contains("a connection to the peer port was closed"), "{}", peer.log());
}

#[test]
fn node_with_a_new_peer_address_announces_it() {
    let (mut peers, _) = founders();
    peers[2].kill();
    peers[2].move_peer_port();
    peers[2].start_ready(&[]);
    let here = peers[2].peer_address();
    eventually("the new address is recorded", || {
        peers[0].report().is_some_and(|report| report["nodes"][2]["peer"] == here.as_str())
    });
    // Its vote counts at the new address.
    peers[0].kill();
    peers[1].put("k", "v");
    assert_eq!(peers[2].get("k").as_deref(), Some("v"));
}

#[test]
fn graceful_shutdown_of_the_leader_transfers_leadership() {
    let (mut peers, _) = founders();
    let leader = peers[0].report().unwrap()["leader"].as_i64().unwrap();
    let at = peers.iter().position(|peer| i64::from(peer.id) == leader).unwrap();
    peers[at].signal(Signal::TERM);
    assert_eq!(peers[at].wait(), 0);
    assert!(peers[at].log().contains("coordination leadership transferred"), "{}", peers[at].log());
    let other = &peers[(at + 1) % 3];
    eventually("its lease is revoked", || {
        other.report().is_some_and(|report| report["nodes"][at]["up"] == false)
    });
    other.put("k", "v");
}

/// Bytes of a client that does not know the cluster secret: a hello as voter `from`, an invalid proof, and a vote
/// request with the maximum term.
fn forged_vote(cluster: &str, from: u64, to: u64) -> Vec<u8> {
    use base64::Engine as _;
    let cluster = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(cluster).expect("an id");
    let cluster = u128::from_be_bytes(cluster.try_into().expect("16 bytes"));
    let mut vote = vec![2];
    vote.extend(u64::MAX.to_le_bytes());
    vote.extend(from.to_le_bytes());
    vote.push(0);
    // Its last log entry is newer than any.
    vote.push(1);
    vote.extend((u64::MAX - 1).to_le_bytes());
    vote.extend((1_u64 << 40).to_le_bytes());
    vote.push(0);
    let mut bytes = b"moimpeer".to_vec();
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend(cluster.to_le_bytes());
    bytes.extend(from.to_le_bytes());
    bytes.extend(to.to_le_bytes());
    bytes.extend([7; 16]);
    bytes.extend([9; 32]);
    bytes.extend(u32::try_from(vote.len()).expect("short").to_le_bytes());
    bytes.push(0);
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(crc32c::crc32c(&vote).to_le_bytes());
    bytes.extend(vote);
    bytes
}

#[test]
fn unauthenticated_peer_connections_change_nothing_and_keep_the_quorum() {
    let (mut peers, list) = founders();
    peers[0].put("k", "v");
    let ready = peers[0].read_ready();
    let term = |peer: &Peer| peer.report().and_then(|report| report["term"].as_u64()).expect("a term");
    let before = term(&peers[0]);
    for to in 0..3 {
        // An unknown voter id, and that of a member.
        for from in [99, 1 + (to + 1) % 3] {
            let mut stream = TcpStream::connect(peers[to as usize].peer_address()).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let _ = stream.write_all(&forged_vote(cluster_id(&ready), from, to + 1));
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.len() <= 92, "a hello and a proof, and nothing else: {}", answer.len());
        }
    }
    // Thousands of connections that never finish their hello.
    let mut crowd = Vec::new();
    for peer in &peers {
        for _ in 0..1_600 {
            let mut stream = TcpStream::connect(peer.peer_address()).unwrap();
            let _ = stream.write_all(b"moimpe");
            crowd.push(stream);
        }
    }
    peers[1].put("k", "w");
    assert_eq!(peers[2].get("k").as_deref(), Some("w"));
    // A member restarts while these connections are open.
    peers[2].kill();
    peers[2].start_ready(&["--initial-cluster", &list]);
    peers[0].healthy_with(3, 3);
    assert!(term(&peers[0]) < before + 100, "{} {before}", term(&peers[0]));
    drop(crowd);
    // Nothing was persisted either: all nodes restart.
    peers.iter_mut().for_each(Peer::kill);
    peers.iter_mut().for_each(|peer| peer.start(&["--initial-cluster", &list]));
    peers.iter_mut().for_each(|peer| drop(peer.ready()));
    assert_eq!(peers[0].get("k").as_deref(), Some("w"));
    assert!(term(&peers[0]) < before + 100);
}

#[test]
fn member_removed_by_an_etcd_client_stays_removed_also_the_leader() {
    let (mut peers, _) = founders();
    peers[0].put("k", "v");
    peers[0].healthy_with(3, 3);
    let leader = peers[0].report().and_then(|report| report["leader"].as_i64()).expect("a leader");
    let at = usize::try_from(leader - 1).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
    let client = |peer: &Peer| {
        let _home = runtime.enter();
        let options = moim_cluster::etcd::EtcdOptions::new([peer.etcd_address()]);
        moim_cluster::EtcdClient::new(options, &scope)
    };
    let listed = |peer: &Peer| -> Vec<u64> {
        let members = runtime.block_on(client(peer).member_list()).map(|list| list.members);
        members.unwrap_or_default().iter().map(|member| member.id).collect()
    };
    let (asked, other) = ((at + 1) % 3, (at + 2) % 3);
    let gone = u64::try_from(leader).unwrap();
    let removed = runtime.block_on(client(&peers[asked]).member_remove(gone)).expect("member removed");
    assert!(removed.members.iter().all(|member| member.id != gone), "{removed:?}");
    // Its node is drained and stops.
    assert_eq!(peers[at].wait(), 0, "{}", peers[at].log());
    peers[asked].healthy_with(2, 1);
    for at in [asked, other] {
        assert_eq!(listed(&peers[at]).len(), 2);
        assert!(!listed(&peers[at]).contains(&gone));
        assert_eq!(peers[at].get("k").as_deref(), Some("v"));
    }
    // A restart does not bring it back.
    peers[at].start(&[]);
    assert_eq!(peers[at].wait(), 7, "{}", peers[at].log());
    assert!(!listed(&peers[asked]).contains(&gone));
    // The last member cannot be removed.
    let last = listed(&peers[asked]);
    let keep = last[0];
    runtime.block_on(client(&peers[asked]).member_remove(last[1])).expect("it is removed");
    let kept = usize::try_from(keep - 1).unwrap();
    peers[kept].healthy_with(1, 1);
    let refused = runtime.block_on(client(&peers[kept]).member_remove(keep)).unwrap_err().to_string();
    assert!(refused.contains("not enough started members"), "{refused}");
}
