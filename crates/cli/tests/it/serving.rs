//! `moim serve`: ready line, admin port, signals, and what it refuses.

use rustix::process::Signal;

use crate::support::{Node, command, moim};

#[test]
fn node_prints_its_ready_line_and_stops_on_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Node::start(dir.path(), &["--zone", "attic"]);
        assert!(node.ready.starts_with("ready node=1 cluster="), "{}", node.ready);
        assert_eq!(node.get("/livez"), (200, "ok\n".into()));
        assert_eq!(node.get("/readyz"), (200, "ready\n".into()));
        assert!(node.get("/metrics").1.ends_with("# EOF\n"));
        let facts: serde_json::Value = serde_json::from_str(&node.get("/api/v1/node").1).unwrap();
        assert_eq!(facts["node_id"], 1);
        assert_eq!(facts["zone"], "attic");
        assert_eq!(facts["pid"], node.pid());
        assert_eq!(facts["ready"], true);
        assert!(node.ready.contains(&format!("cluster={} ", facts["cluster_id"].as_str().unwrap())));
        node.signal(signal);
        let (status, more) = node.wait();
        assert_eq!(status.code(), Some(0));
        assert!(more.is_empty(), "stdout has the ready line alone, not {more:?}");
    }
}

#[test]
fn identity_survives_kill_9_and_the_data_directory_has_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let mut node = Node::start(dir.path(), &[]);
    let cluster = node.address("cluster").unwrap().to_owned();

    let refused = moim(&[
        "serve",
        "--data",
        data,
        "--kafka-port",
        "0",
        "--admin-port",
        "0",
        "--etcd-port",
        "0",
        "--peer-port",
        "0",
        "--redis-port",
        "0",
    ]);
    assert_eq!(refused.status, 7, "{refused:?}");
    assert!(
        refused.stderr.contains(&format!("in use by another moim (process {})", node.pid())),
        "{refused:?}"
    );
    assert_eq!(refused.stdout, "");

    node.signal(Signal::KILL);
    node.wait();
    let node = Node::start(dir.path(), &[]);
    assert_eq!(node.address("cluster"), Some(cluster.as_str()));
    drop(node);

    let refused = moim(&[
        "serve",
        "--data",
        data,
        "--node-id",
        "2",
        "--kafka-port",
        "0",
        "--admin-port",
        "0",
        "--etcd-port",
        "0",
        "--peer-port",
        "0",
        "--redis-port",
        "0",
    ]);
    assert_eq!(refused.status, 7, "{refused:?}");
    assert!(refused.stderr.contains("belongs to node 1"), "{refused:?}");
}

#[test]
fn unsafe_or_invalid_options_are_rejected_before_the_data_directory_is_created() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    for (args, status, wanted) in [
        (&["--host", "0.0.0.0"][..], 5, "can be reached from other machines"),
        (
            &["--redis-replica-ports", "9-1"],
            2,
            "`redis.replica_ports` (--redis-replica-ports): must be FIRST-LAST, or 0",
        ),
        (&["--join", "nowhere"], 2, "`cluster.join` (--join): must be HOST:PORT"),
        (&["--initial-cluster", "2=127.0.0.1:1"], 2, "must name this node (node.id) too"),
        (&["--coord", "etcd://127.0.0.1:2379"], 2, "is not part of this build yet"),
        (&["--config", "/nonexistent/moim.toml"], 2, "cannot read /nonexistent/moim.toml"),
        (&["--log-level", "[["], 2, "`node.log_level` (--log-level)"),
        (&["--frobnicate"], 2, "unexpected argument"),
    ] {
        let refused = moim(&[&["serve", "--data", data], args].concat());
        assert_eq!(refused.status, status, "{args:?} {refused:?}");
        assert!(refused.stderr.contains(wanted), "{args:?} {refused:?}");
        assert_eq!(refused.stdout, "");
        assert!(!std::path::Path::new(data).exists(), "{args:?}");
    }
}

#[test]
fn port_in_use_is_a_conflict() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let dir = tempfile::tempdir().unwrap();
    let refused =
        moim(&["serve", "--data", dir.path().to_str().unwrap(), "--kafka-port", "0", "--admin-port", &port]);
    assert_eq!(refused.status, 7, "{refused:?}");
    assert!(refused.stderr.contains("--admin-port"), "{refused:?}");
}

#[test]
fn config_show_names_the_origin_of_each_value() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("moim.toml");
    std::fs::write(&file, "[log]\nretention_ms = \"1h\"\n").unwrap();
    let file = file.to_str().unwrap();
    let shown = moim(&["config", "show", "--config", file, "--kafka-port", "1", "-o", "json"]);
    assert_eq!(shown.status, 0, "{shown:?}");
    let shown: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap();
    let entry = |key: &str| {
        let entries = shown["entries"].as_array().unwrap();
        entries.iter().find(|entry| entry["key"] == key).unwrap().clone()
    };
    assert_eq!(
        entry("log.retention_ms"),
        serde_json::json!({
            "key": "log.retention_ms", "value": 3_600_000, "origin": format!("{file}:2"),
        })
    );
    assert_eq!(entry("kafka.port")["origin"], "--kafka-port");

    std::fs::write(file, "[log]\nretention = 1\n").unwrap();
    let wrong = moim(&["config", "check", "--config", file]);
    assert_eq!(wrong.status, 2);
    assert!(wrong.stderr.contains("did you mean `log.retention_ms`?"), "{wrong:?}");
}

#[test]
fn closed_stdout_is_not_an_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(&["config", "show"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn version_and_completion_have_text_and_json_output() {
    assert!(moim(&["version"]).stdout.starts_with("moim"));
    let version: serde_json::Value = serde_json::from_str(&moim(&["version", "-o", "json"]).stdout).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert!(moim(&["completion", "bash"]).stdout.contains("complete -F"));
    let help = moim(&[]);
    assert_eq!((help.status, help.stdout.as_str()), (2, ""));
}
