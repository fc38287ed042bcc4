//! `moim coord`: keys, leases, watches and snapshots, against every server of the etcd protocol.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cluster::eventually;
use crate::etcd::{Etcd, installed};
use crate::support::{Done, Node, command, moim, moim_with_input};

fn ok(etcd: &Etcd, args: &[&str]) -> Done {
    let done = etcd.moim(args);
    assert_eq!(done.status, 0, "{args:?} {done:?}");
    done
}

fn json(etcd: &Etcd, args: &[&str]) -> Value {
    ok(etcd, &[args, &["-o", "json"]].concat()).json()
}

/// The names of an object's members, in order.
fn members(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn put_get_and_exit_statuses() {
    for etcd in &Etcd::all() {
        let first = json(etcd, &["coord", "put", "color", "blue"])["revision"].as_i64().expect("a number");
        let second = json(etcd, &["coord", "put", "color", "green", "--prev"]);
        assert_eq!(second["previous"]["value"], "blue");
        let got = json(etcd, &["coord", "get", "color"]);
        let expected = [
            "key",
            "key_encoding",
            "value",
            "value_encoding",
            "create_revision",
            "mod_revision",
            "version",
            "lease",
            "revision",
        ];
        assert_eq!(members(&got), expected);
        assert_eq!(
            (&got["value"], &got["value_encoding"], &got["lease"]),
            (&"green".into(), &"utf8".into(), &Value::Null)
        );
        assert_eq!((got["create_revision"].as_i64(), got["version"].as_i64()), (Some(first), Some(2)));
        let old = json(etcd, &["coord", "get", "color", "--rev", &first.to_string()]);
        assert_eq!(old["value"], "blue");
        for (args, status) in [
            (&["coord", "get", "nothing"][..], 3),
            (&["coord", "get", ""], 2),
            (&["coord", "get", "color", "--rev", "999999"], 3),
            (&["coord", "put", "color", "x", "--if-absent"], 7),
            (&["coord", "put", "color", "x", "--if-revision", "1"], 7),
            (&["coord", "put", "color", "x", "--lease", "1234"], 3),
            (&["coord", "del", "nothing"], 3),
            (&["coord", "del", "color", "--if-revision", "1"], 7),
            (&["coord", "del", "--prefix", "c"], 2),
            (&["coord", "lease", "revoke", "1234"], 3),
            (&["coord", "lease", "ttl", "1234"], 3),
            (&["coord", "lease", "keep-alive", "1234", "--once"], 3),
            (&["coord", "compact", "999999"], 3),
        ] {
            let done = etcd.moim(args);
            assert_eq!(done.status, status, "{args:?} {done:?}");
            assert_eq!(done.stdout, "", "{args:?}");
        }
        ok(etcd, &["coord", "put", "fresh", "x", "--if-absent"]);
        assert_eq!(ok(etcd, &["coord", "get", "color", "--value-only"]).stdout, "green\n");
        assert_eq!(json(etcd, &["coord", "del", "--prefix", "", "--yes"])["deleted"], 2);
    }
}

#[test]
fn values_and_ranges_are_returned_unchanged() {
    for etcd in &Etcd::all() {
        let put = |key: &str, value: &str| {
            assert_eq!(moim_with_input(&["coord", "put", key, "--etcd", &etcd.address], value).status, 0);
        };
        for key in ["/a/1", "/a/2", "/a/3", "/b", "/ab"] {
            put(key, &format!("v{key}\n"));
        }
        let all = json(etcd, &["coord", "get", "--prefix", "/a/", "--limit", "2"]);
        assert_eq!((all["count"].as_i64(), all["more"].as_bool()), (Some(3), Some(true)));
        assert_eq!(all["entries"][1]["value"], "v/a/2\n", "a line end belongs to the value");
        let keys = |args: &[&str]| {
            let found = json(etcd, &[&["coord", "get"], args].concat());
            let entries = found["entries"].as_array().expect("a list").clone();
            entries.iter().map(|entry| entry["key"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(keys(&["--prefix", "/a/", "--descending"]), ["/a/3", "/a/2", "/a/1"]);
        assert_eq!(keys(&["--from-key", "/a/3"]), ["/a/3", "/ab", "/b"]);
        assert_eq!(keys(&["--prefix", "", "--sort-by", "create", "--descending", "--limit", "1"]), ["/ab"]);
        assert_eq!(ok(etcd, &["coord", "get", "--prefix", "", "--count-only"]).stdout, "count  5\n");
        ok(etcd, &["coord", "put", "/a/4", "-dash"]);
        assert_eq!(json(etcd, &["coord", "get", "/a/4"])["value"], "-dash");
    }
}

#[test]
fn revoked_lease_deletes_its_keys() {
    for etcd in &Etcd::all() {
        let granted = json(etcd, &["coord", "lease", "grant", "60"]);
        let id = granted["id"].as_str().expect("text");
        assert_eq!(granted["ttl_seconds"], 60);
        ok(etcd, &["coord", "put", "leased", "x", "--lease", id]);
        assert_eq!(json(etcd, &["coord", "get", "leased"])["lease"], id);
        let left = json(etcd, &["coord", "lease", "ttl", id, "--keys"]);
        assert_eq!((&left["keys"][0]["key"], left["granted_seconds"].as_i64()), (&"leased".into(), Some(60)));
        let listed = json(etcd, &["coord", "lease", "list"]);
        assert!(listed["leases"].as_array().expect("a list").contains(&id.into()), "{listed}");
        assert_eq!(json(etcd, &["coord", "lease", "keep-alive", id, "--once"])["ttl_seconds"], 60);
        ok(etcd, &["coord", "lease", "revoke", id]);
        assert_eq!(etcd.moim(&["coord", "get", "leased"]).status, 3);
    }
}

#[test]
fn watch_prints_one_object_per_event() {
    for etcd in &Etcd::all() {
        let first = json(etcd, &["coord", "put", "k", "1"])["revision"].as_i64().expect("a number");
        let mut watch =
            command(&["coord", "watch", "--prefix", "", "--prev", "-n", "3", "-o", "json", "--rev"])
                .args([&first.to_string(), "--etcd", &etcd.address])
                .stdout(Stdio::piped())
                .spawn()
                .expect("moim starts");
        let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
        let mut next = || -> Value {
            serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("an object")
        };
        assert_eq!(next()["value"], "1", "history comes first");
        ok(etcd, &["coord", "put", "k", "2"]);
        let second = next();
        let expected = [
            "type",
            "key",
            "key_encoding",
            "value",
            "value_encoding",
            "revision",
            "create_revision",
            "version",
            "lease",
            "previous",
        ];
        assert_eq!(members(&second), expected);
        assert_eq!((&second["type"], &second["previous"]["value"]), (&"put".into(), &"1".into()));
        ok(etcd, &["coord", "del", "k"]);
        let third = next();
        assert_eq!((&third["type"], &third["value"]), (&"delete".into(), &Value::Null));
        assert_eq!(watch.wait().expect("it ends").code(), Some(0));
        ok(etcd, &["coord", "compact", &third["revision"].to_string()]);
        let late = etcd.moim(&["coord", "watch", "k", "--rev", &first.to_string()]);
        assert_eq!(late.status, 3, "{late:?}");
    }
}

#[test]
fn keys_of_the_cluster_are_read_only() {
    let etcd = Etcd::moim_node();
    let nodes = json(&etcd, &["coord", "get", "--prefix", "/moim/nodes/"]);
    assert_eq!(nodes["count"], 1);
    for args in [&["coord", "put", "/moim/x", "y"][..], &["coord", "del", "/moim/nodes/1"]] {
        let done = etcd.moim(args);
        assert_eq!(done.status, 5, "{args:?} {done:?}");
    }
    ok(&etcd, &["coord", "del", "--prefix", "", "--yes"]);
    assert_eq!(json(&etcd, &["coord", "get", "--prefix", "/moim/nodes/"])["count"], 1);
}

#[test]
fn restored_snapshot_has_keys_revisions_and_leases() {
    for etcd in &Etcd::all() {
        restore_from(etcd);
    }
}

fn restore_from(etcd: &Etcd) {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name).display().to_string();
    for round in 0..3 {
        for key in 0..200 {
            let (key, value) = (format!("k{key:03}"), format!("{round}"));
            if key.ends_with('7') || round == 0 {
                ok(etcd, &["coord", "put", &key, &value]);
            }
        }
    }
    let lease = json(etcd, &["coord", "lease", "grant", "100"])["id"].as_str().expect("text").to_owned();
    ok(etcd, &["coord", "put", "leased", "x", "--lease", &lease]);
    let before = json(etcd, &["coord", "get", "--prefix", ""]);
    ok(etcd, &["coord", "snapshot", "save", &at("ours.snap")]);
    assert_eq!(
        etcd.moim(&["coord", "snapshot", "save", &at("ours.snap")]).status,
        7,
        "nothing is overwritten"
    );
    let mut files = vec![at("ours.snap")];
    if let Some(etcdctl) = installed("etcdctl") {
        let saved = Command::new(etcdctl)
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &etcd.address, "snapshot", "save", &at("theirs.snap")])
            .output()
            .expect("etcdctl runs");
        assert!(saved.status.success(), "{saved:?}");
        files.push(at("theirs.snap"));
    }
    for file in files {
        let status = moim(&["coord", "snapshot", "status", &file, "-o", "json"]);
        assert_eq!((status.status, status.json()["keys"].as_i64()), (0, Some(201)), "{status:?}");
        let data = format!("{file}.data");
        let restored = moim(&["coord", "snapshot", "restore", &file, "--data", &data, "-o", "json"]);
        assert_eq!(restored.status, 0, "{restored:?}");
        assert_eq!(
            moim(&["coord", "snapshot", "restore", &file, "--data", &data]).status,
            7,
            "the directory is in use"
        );
        // Twice: the second start has a Raft log besides the snapshot.
        for start in 0..2 {
            let node = Node::start(data.as_ref(), &[]);
            assert!(
                node.ready.contains(restored.json()["cluster_id"].as_str().expect("text")),
                "{}",
                node.ready
            );
            let address = node.address("etcd").expect("an etcd port").to_owned();
            let ask = |args: &[&str]| moim(&[args, &["--etcd", &address, "-o", "json"]].concat());
            let mut after = ask(&["coord", "get", "--prefix", ""]).json();
            if start == 0 {
                assert_eq!(after, before);
                let past = ask(&["coord", "get", "k007", "--rev", "100"]);
                assert_eq!(past.json()["value"], "0", "history is restored too");
                assert_eq!(ask(&["coord", "lease", "ttl", &lease]).json()["granted_seconds"], 100);
                let put = ask(&["coord", "put", "new", "x"]);
                assert_eq!(put.json()["revision"].as_i64(), before["revision"].as_i64().map(|at| at + 1));
            } else {
                assert_eq!(after["count"].take().as_i64(), before["count"].as_i64().map(|count| count + 1));
            }
            let nodes = ask(&["coord", "get", "--prefix", "/moim/nodes/"]).json();
            assert_eq!(nodes["count"], 1, "{nodes}");
        }
    }
}

#[test]
fn damaged_snapshot_is_rejected() {
    let etcd = Etcd::moim_node();
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name).display().to_string();
    ok(&etcd, &["coord", "put", "k", "v"]);
    ok(&etcd, &["coord", "snapshot", "save", &at("whole")]);
    let whole = std::fs::read(at("whole")).expect("a file");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for (name, bytes) in [("flipped", &flipped[..]), ("cut", &whole[..whole.len() - 512]), ("empty", &[])] {
        std::fs::write(at(name), bytes).expect("a file");
        let done = moim(&["coord", "snapshot", "restore", &at(name), "--data", &at("data")]);
        assert_eq!(done.status, 1, "{name} {done:?}");
        assert!(!dir.path().join("data").exists(), "no data directory created");
    }
    assert_eq!(moim(&["coord", "snapshot", "status", &at("missing")]).status, 3);
}

#[test]
fn unreachable_server_does_not_hide_the_others() {
    let etcd = Etcd::moim_node();
    let both = format!("127.0.0.1:1,{}", etcd.address);
    let status = moim(&["coord", "status", "--etcd", &both, "-o", "json"]);
    assert_eq!(status.status, 4, "{status:?}");
    let servers = status.json();
    assert_eq!(
        (&servers["servers"][0]["reachable"], &servers["servers"][1]["is_leader"]),
        (&false.into(), &true.into())
    );
    assert_eq!(moim(&["coord", "put", "k", "v", "--etcd", &both]).status, 0, "the next server is used");
    assert_eq!(moim(&["coord", "get", "k", "--etcd", "127.0.0.1:1"]).status, 4);
}

#[test]
fn watch_resumes_after_a_server_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let address = node.address("etcd").expect("an etcd port").to_owned();
    let port = address.rsplit(':').next().expect("a port").to_owned();
    let mut watch = command(&["coord", "watch", "k", "-n", "2", "--etcd", &address])
        .stdout(Stdio::piped())
        .spawn()
        .expect("moim starts");
    let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
    let put = |value: &str| moim(&["coord", "put", "k", value, "--etcd", &address]).status == 0;
    // The watch may start after the first puts.
    let mut sent = 0;
    let first = std::thread::scope(|scope| {
        let line = scope.spawn(|| lines.next().expect("a line").expect("text"));
        eventually("the watch has begun", || {
            sent += 1;
            assert!(put(&sent.to_string()));
            line.is_finished()
        });
        line.join().expect("a line")
    });
    assert!(first.contains("put\tk"), "{first}");
    drop(node);
    let _node = Node::start(dir.path(), &["--etcd-port", &port]);
    eventually("it serves again", || put("again"));
    assert_eq!(watch.wait().expect("it ends").code(), Some(0));
}
