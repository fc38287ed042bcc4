//! `moim group …` and consuming as a member, against a node.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::json;

use crate::cluster::{Cluster, Running, eventually};

fn produce(cluster: &Cluster, topic: &str, count: usize) {
    let lines: String = (0..count).map(|n| format!("k{n},{n}\n")).collect();
    let done = cluster.moim_with_input(&["topic", "produce", topic, "-f", "%k,%v"], &lines);
    assert_eq!(done.status, 0, "{done:?}");
}

#[test]
fn group_resumes_at_its_committed_offset() {
    let cluster = Cluster::start();
    produce(&cluster, "t", 10);
    let first = cluster.ok(&["topic", "consume", "t", "-g", "g", "-n", "4"]);
    assert_eq!(first.stdout, "0\n1\n2\n3\n");
    let described = cluster.ok(&["group", "describe", "g", "-o", "json"]).json();
    let group = &described["groups"][0];
    assert_eq!(
        (&group["state"], &group["total_lag"], &group["members"]),
        (&json!("Empty"), &json!(6), &json!([]))
    );
    assert_eq!(
        group["offsets"][0],
        json!({
            "topic": "t", "partition": 0, "committed_offset": 4, "end_offset": 10, "lag": 6,
            "member_id": null, "client_id": null, "host": null,
        })
    );
    let rest = cluster.ok(&["topic", "consume", "t", "-g", "g", "-e"]);
    assert_eq!(rest.stdout, "4\n5\n6\n7\n8\n9\n");
    assert_eq!(cluster.ok(&["topic", "consume", "t", "-g", "g", "-e"]).stdout, "");
    let listed = cluster.ok(&["group", "list"]).stdout;
    assert_eq!(listed, "GROUP  STATE  PROTOCOL  COORDINATOR\ng      Empty  consumer            1\n");
    assert_eq!(cluster.ok(&["group", "list", "--state", "stable"]).stdout.lines().count(), 1);
}

#[test]
fn seek_sets_offsets_of_an_empty_group_except_in_a_dry_run() {
    let cluster = Cluster::start();
    produce(&cluster, "t", 10);
    cluster.ok(&["topic", "consume", "t", "-g", "g", "-e"]);
    let dry = cluster.ok(&["group", "seek", "g", "--to", "start", "--dry-run"]);
    assert_eq!(dry.stdout, "TOPIC  PARTITION  FROM  TO\nt              0    10   0\n");
    assert_eq!(cluster.ok(&["topic", "consume", "t", "-g", "g", "-e"]).stdout, "");
    for (to, wanted) in [("start", 10), ("8", 2), ("end", 0), ("@-1h", 10), ("@2100-01-01", 0), ("99", 0)] {
        cluster.ok(&["group", "seek", "g", "--to", to]);
        let read = cluster.ok(&["topic", "consume", "t", "-g", "g", "-e"]).stdout.lines().count();
        assert_eq!(read, wanted, "--to {to}");
    }
    // Offsets of a new group can be set before its first member joins.
    assert_eq!(cluster.moim(&["group", "seek", "new", "--to", "9"]).status, 3);
    cluster.ok(&["group", "seek", "new", "--to", "9", "--topic", "t:0"]);
    assert_eq!(cluster.ok(&["topic", "consume", "t", "-g", "new", "-e"]).stdout, "9\n");
    assert_eq!(cluster.moim(&["group", "seek", "g", "--to", "1", "--topic", "t:5"]).status, 3);
    assert_eq!(cluster.moim(&["group", "seek", "g", "--to", "1", "--topic", "nope"]).status, 3);

    assert_eq!(cluster.ok(&["group", "delete", "g", "new", "--yes"]).stdout.lines().count(), 3);
    for gone in [
        &["group", "describe", "g"][..],
        &["group", "delete", "g", "--yes"],
        &["group", "seek", "g", "--to", "end"],
    ] {
        assert_eq!(cluster.moim(gone).status, 3, "{gone:?}");
    }
}

#[test]
fn members_share_partitions_without_loss_or_duplicates() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t", "-p", "4"]);
    let members =
        || cluster.ok(&["group", "describe", "g", "-o", "json"]).json()["groups"][0]["members"].clone();
    let consume = ["topic", "consume", "t", "-g", "g", "-f", "%v\\n"];
    let first = Running::start(&cluster, &consume);
    eventually("the first has all partitions", || {
        cluster.moim(&["group", "describe", "g"]).status == 0
            && members()[0]["partitions"].as_array().is_some_and(|all| all.len() == 4)
    });
    let second = Running::start(&cluster, &consume);
    eventually("both have two partitions", || {
        let members = members();
        let members = members.as_array().unwrap();
        members.len() == 2 && members.iter().all(|one| one["partitions"].as_array().unwrap().len() == 2)
    });
    // Offsets of a group with members are not changed, and it is not deleted.
    assert_eq!(cluster.moim(&["group", "seek", "g", "--to", "start"]).status, 7);
    assert_eq!(cluster.moim(&["group", "delete", "g", "--yes"]).status, 7);

    produce(&cluster, "t", 100);
    eventually("everything is read", || first.lines().len() + second.lines().len() >= 100);
    first.signal(Signal::INT);
    let (status, from_first) = first.wait();
    assert_eq!(status, 0);
    // The first member sent LeaveGroup: the other takes over without waiting for the session timeout.
    eventually("the second has all partitions", || {
        members()[0]["partitions"].as_array().is_some_and(|all| all.len() == 4)
    });
    produce(&cluster, "t", 100);
    let expected = 200 - from_first.len();
    eventually("the rest is read", || second.lines().len() >= expected);
    second.signal(Signal::TERM);
    let (status, from_second) = second.wait();
    assert_eq!(status, 0);
    let mut all: Vec<usize> =
        from_first.iter().chain(&from_second).map(|line| line.parse().unwrap()).collect();
    all.sort_unstable();
    let wanted: Vec<usize> = (0..100).flat_map(|n| [n, n]).collect();
    assert_eq!(all, wanted);
    assert!(!from_first.is_empty() && !from_second.is_empty());
    assert_eq!(from_first.iter().collect::<BTreeSet<_>>().len(), from_first.len());
    assert_eq!(cluster.ok(&["group", "describe", "g", "-o", "json"]).json()["groups"][0]["total_lag"], 0);
}
