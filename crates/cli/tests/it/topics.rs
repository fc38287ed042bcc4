//! `moim topic …` against a node: exit statuses, tables, JSON, and produced records that are consumed unchanged.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::cluster::{Cluster, Running, eventually};
use crate::support::command;

#[test]
fn topic_create_alter_describe_and_delete() {
    let cluster = Cluster::start();
    let created = cluster.moim(&["topic", "create", "orders", "-p", "3", "-c", "retention.ms=60000"]);
    assert_eq!(
        (created.status, created.stdout.as_str()),
        (0, "NAME    RESULT\norders  created\n"),
        "{created:?}"
    );
    let again = cluster.moim(&["topic", "create", "orders"]);
    assert_eq!((again.status, again.stdout.as_str()), (7, ""), "{again:?}");
    assert!(again.stderr.contains("TOPIC_ALREADY_EXISTS"), "{again:?}");
    assert_eq!(cluster.moim(&["topic", "create", "orders", "--if-not-exists"]).status, 0);
    assert_eq!(cluster.moim(&["topic", "create", "ghost", "--dry-run"]).status, 0);
    // An invalid name does not affect the valid one, and both results are printed.
    let mixed = cluster.moim(&["topic", "create", "good", "no/good", "-o", "json"]);
    assert_eq!(mixed.status, 2, "{mixed:?}");
    let results = &mixed.json()["results"];
    let of = |name: &str| results.as_array().unwrap().iter().find(|one| one["name"] == name).unwrap().clone();
    assert_eq!((&of("good")["ok"], &of("no/good")["ok"]), (&json!(true), &json!(false)));
    assert_eq!(of("no/good")["error_code"], "INVALID_TOPIC_EXCEPTION");

    let listed = cluster.moim(&["topic", "list", "-o", "json"]).json();
    let topic = |name: &str, partitions| json!({ "name": name, "partitions": partitions, "replication_factor": 1, "internal": false });
    assert_eq!(listed, json!({ "topics": [topic("good", 1), topic("orders", 3)] }));

    let altered =
        cluster.moim(&["topic", "alter", "orders", "-c", "retention.ms=5000", "-c", "segment.bytes=1048576"]);
    assert_eq!(altered.status, 0, "{altered:?}");
    assert_eq!(cluster.moim(&["topic", "alter", "orders", "--unset", "segment.bytes"]).status, 0);
    assert_eq!(cluster.moim(&["topic", "alter", "orders", "-c", "no.such.key=1"]).status, 2);
    assert_eq!(cluster.moim(&["topic", "add-partitions", "orders", "-n", "1"]).status, 0);
    assert_eq!(cluster.moim(&["topic", "add-partitions", "orders", "--to", "2"]).status, 2);
    let described = cluster.moim(&["topic", "describe", "orders", "-o", "json"]).json();
    let described = &described["topics"][0];
    assert_eq!(described["partitions"].as_array().unwrap().len(), 4);
    assert_eq!(described["partitions"][3]["end_offset"], 0);
    let settings: Vec<(&str, &str)> = described["configs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), one["value"].as_str().unwrap()))
        .collect();
    assert_eq!(settings, [("retention.ms", "5000")]);

    let deleted = cluster.moim(&["topic", "delete", "orders", "good", "--yes"]);
    assert_eq!(deleted.status, 0, "{deleted:?}");
    for verb in [&["delete", "--yes"][..], &["describe"], &["consume", "-e"], &["add-partitions", "-n", "1"]]
    {
        let gone = cluster.moim(&[&["topic", verb[0], "orders"], &verb[1..]].concat());
        assert_eq!(gone.status, 3, "{verb:?} {gone:?}");
    }
    assert_eq!(cluster.moim(&["topic", "list"]).stdout, "NAME  PARTITIONS  REPLICAS\n");
}

#[test]
fn produced_lines_are_consumed_with_every_compression() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t", "-p", "4"]);
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let lines: String = (0..50).map(|n| format!("key{n},{codec} {n}\n")).collect();
        let produced = cluster.moim_with_input(
            &["topic", "produce", "t", "-f", "%k,%v\\n", "-z", codec, "-H", "a=1", "-H", "a=2"],
            &lines,
        );
        assert_eq!((produced.status, produced.stdout.as_str()), (0, ""), "{produced:?}");
        assert!(produced.stderr.starts_with("50 messages ("), "{produced:?}");
    }
    let read = cluster.ok(&["topic", "consume", "t", "-e", "-f", "%k|%p|%v|%h\\n"]);
    let mut partition_of: BTreeMap<&str, &str> = BTreeMap::new();
    let mut values = Vec::new();
    for line in read.stdout.lines() {
        let [key, partition, value, headers] = line.split('|').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        assert_eq!(headers, "a=1,a=2");
        assert_eq!(*partition_of.entry(key).or_insert(partition), partition, "{key} moved");
        values.push(value);
    }
    assert!(partition_of.values().collect::<std::collections::BTreeSet<_>>().len() > 1);
    let mut wanted: Vec<String> = ["none", "gzip", "snappy", "lz4", "zstd"]
        .iter()
        .flat_map(|codec| (0..50).map(move |n| format!("{codec} {n}")))
        .collect();
    wanted.sort();
    values.sort();
    assert_eq!(values, wanted);
}

#[test]
fn offset_option_selects_the_start_of_consumption() {
    let cluster = Cluster::start();
    let lines: String = (0..20).map(|n| format!("{n}\n")).collect();
    // The topic does not exist: producing creates it.
    let produced = cluster.moim_with_input(&["topic", "produce", "t", "-o", "json"], &lines).json();
    let partition = json!({ "partition": 0, "messages": 20, "first_offset": 0, "last_offset": 19 });
    assert_eq!((&produced["messages"], &produced["partitions"]), (&json!(20), &json!([partition])));
    let first_timestamp = cluster.ok(&["topic", "consume", "t", "-n", "1", "-f", "@%T"]).stdout;
    for (args, wanted) in [
        (&["--offset", "start"][..], (0..20).collect::<Vec<_>>()),
        (&["--offset", "end"], vec![]),
        (&["--offset", "17"], vec![17, 18, 19]),
        (&["--offset", "+18"], vec![18, 19]),
        (&["--offset", "-2"], vec![18, 19]),
        (&["--offset", "-200"], (0..20).collect()),
        (&["--offset", "@-1h", "-n", "1"], vec![0]),
        (&["--offset", &first_timestamp, "-n", "1"], vec![0]),
        (&["--offset", "@2100-01-01"], vec![]),
        (&["-p", "0", "-n", "2"], vec![0, 1]),
        (&["-n", "0"], vec![]),
    ] {
        let read = cluster.ok(&[&["topic", "consume", "t", "-e"], args].concat());
        let values: Vec<i32> = read.stdout.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(values, wanted, "{args:?}");
    }
    assert_eq!(cluster.moim(&["topic", "consume", "t", "-p", "7", "-e"]).status, 3);
    assert_eq!(cluster.moim_with_input(&["topic", "produce", "t", "-p", "7"], "x\n").status, 3);
}

#[test]
fn json_output_preserves_bytes_and_nulls() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t"]);
    let produced = cluster.moim_with_input(&["topic", "produce", "t", "-k", "k", "-Z"], "모임\n\n");
    assert_eq!(produced.status, 0, "{produced:?}");
    let read = cluster.ok(&["topic", "consume", "t", "-e", "-o", "json"]);
    let messages: Vec<Value> = read.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let essence: Vec<_> = messages
        .iter()
        .map(|one| (&one["offset"], &one["key"], &one["value"], &one["value_encoding"]))
        .collect();
    let (k, null) = (json!("k"), Value::Null);
    assert_eq!(essence, [(&json!(0), &k, &json!("모임"), &json!("utf8")), (&json!(1), &k, &null, &null),]);
    let keys: Vec<&String> = messages[1].as_object().unwrap().keys().collect();
    let wanted = [
        "topic",
        "partition",
        "offset",
        "timestamp",
        "key",
        "key_encoding",
        "value",
        "value_encoding",
        "headers",
    ];
    assert_eq!(keys, wanted);
}

#[test]
fn invalid_line_is_reported_and_preceding_lines_are_produced() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t"]);
    let produced =
        cluster.moim_with_input(&["topic", "produce", "t", "-f", "%k=%v"], "a=1\nb=2\noops\nc=3\n");
    assert_eq!(produced.status, 2, "{produced:?}");
    assert!(produced.stderr.contains("line 3: no `=`"), "{produced:?}");
    assert_eq!(cluster.ok(&["topic", "consume", "t", "-e"]).stdout, "1\n2\n");
}

#[test]
fn message_above_the_limit_is_rejected() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t", "-c", "max.message.bytes=1000"]);
    let produced = cluster.moim_with_input(&["topic", "produce", "t"], &format!("{}\n", "x".repeat(2000)));
    assert_eq!(produced.status, 1, "{produced:?}");
    assert!(produced.stderr.contains("MESSAGE_TOO_LARGE"), "{produced:?}");
}

#[test]
fn closed_reader_of_stdout_is_not_an_error() {
    let cluster = Cluster::start();
    let lines: String = (0..100_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(cluster.moim_with_input(&["topic", "produce", "t"], &lines).status, 0);
    let mut child = command(&["topic", "consume", "t", "--kafka", cluster.kafka()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 2];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"0\n");
    // stdout is closed; the next write fails.
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn consumer_and_producer_survive_kill_9_of_the_node() {
    let mut cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t"]);
    let reader = Running::start(&cluster, &["topic", "consume", "t"]);
    let member = Running::start(&cluster, &["topic", "consume", "t", "-g", "g"]);
    let mut writer = Running::start(&cluster, &["topic", "produce", "t"]);
    let mut sent = Vec::new();
    // One downtime is long enough for heartbeats and commits to fail.
    for downtime in [0, 5, 0].map(Duration::from_secs) {
        let line = format!("before {}", sent.len());
        writer.write(&line);
        sent.push(line);
        eventually("both have read it", || {
            reader.lines() == sent && member.lines().ends_with(&sent[sent.len() - 1..])
        });
        cluster.crash_and_restart(downtime);
    }
    writer.write("last");
    sent.push("last".to_owned());
    let (status, _) = writer.wait();
    assert_eq!(status, 0);
    eventually("both have read the last", || {
        reader.lines() == sent && member.lines().contains(&"last".to_owned())
    });
    member.signal(Signal::INT);
    let (status, seen) = member.wait();
    assert_eq!(status, 0);
    // A member may consume uncommitted records again after the crash, but misses none.
    assert!(sent.iter().all(|line| seen.contains(line)), "{seen:?}");
    assert_eq!(cluster.ok(&["topic", "consume", "t", "-e"]).stdout.lines().collect::<Vec<_>>(), sent);
}

#[test]
fn reassignment_to_an_unknown_node_is_rejected() {
    let cluster = Cluster::start();
    cluster.ok(&["topic", "create", "t"]);
    let moved = cluster.moim(&["topic", "reassign", "t", "-p", "0", "--to", "1,2"]);
    assert_eq!(moved.status, 3, "{moved:?}");
    assert!(moved.stderr.contains("there is no node 2; the cluster has 1"), "{moved:?}");
}
