//! `moim bench …` against a node: its output, and that it deletes its topics and keys.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use rustix::process::Signal;
use serde_json::Value;

use crate::cluster::{Cluster, Running, eventually};
use crate::support::{Node, moim};

const SHORT: [&str; 4] = ["--duration", "300ms", "-o", "json"];

fn phases(printed: &Value) -> Vec<&str> {
    printed["phases"]
        .as_array()
        .expect("a list of objects")
        .iter()
        .map(|phase| phase["phase"].as_str().expect("a name"))
        .collect()
}

fn topics(cluster: &Cluster) -> usize {
    cluster.ok(&["topic", "list", "-o", "json"]).json()["topics"].as_array().expect("a list of objects").len()
}

#[test]
fn queue_bench_reads_what_it_wrote_and_deletes_its_topic() {
    let cluster = Cluster::start();
    let small = ["bench", "queue", "--clients", "2", "--size", "100", "--batch", "1000", "-z", "lz4"];
    let measured = cluster.ok(&[&small[..], &SHORT].concat()).json();
    assert_eq!(phases(&measured), ["write", "read"]);
    let [written, read] = [0, 1].map(|at| measured["phases"][at]["operations"].as_u64().unwrap());
    assert!(written > 0 && written == read && written.is_multiple_of(10), "{measured}");
    assert_eq!(measured["phases"][0]["failed"], 0);
    eventually("the topic is gone", || topics(&cluster) == 0);
    let table = cluster.ok(&["bench", "queue", "--clients", "1", "--duration", "100ms", "--rate", "100"]);
    assert!(table.stdout.starts_with("PHASE  OPERATIONS  FAILED"), "{table:?}");
    assert_eq!(cluster.moim(&["bench", "queue", "-z", "best"]).status, 2);
}

#[test]
fn interrupted_bench_deletes_its_topic() {
    let cluster = Cluster::start();
    let load = Running::start(&cluster, &["bench", "queue", "--duration", "10m", "--clients", "1"]);
    eventually("there is a topic", || topics(&cluster) == 1);
    load.signal(Signal::INT);
    let (status, printed) = load.wait();
    assert_eq!((status, printed.len()), (0, 2), "{printed:?}");
    eventually("the topic is gone", || topics(&cluster) == 0);
}

#[test]
fn slots_and_coord_bench_delete_their_keys() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), &[]);
    let redis = node.address("redis").unwrap();
    let small = ["bench", "slots", "--clients", "4", "--keys", "50", "--redis", redis];
    let measured = moim(&[&small[..], &SHORT].concat());
    assert_eq!(measured.status, 0, "{measured:?}");
    assert_eq!(phases(&measured.json()), ["SET", "GET"]);
    let mut stream = TcpStream::connect(redis).unwrap();
    stream.write_all(b"DBSIZE\r\n").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b":0\r\n");

    let etcd = node.address("etcd").unwrap();
    let small = ["bench", "coord", "--clients", "2", "--keys", "10", "--etcd", etcd];
    let measured = moim(&[&small[..], &SHORT].concat());
    assert_eq!(measured.status, 0, "{measured:?}");
    assert_eq!(phases(&measured.json()), ["put", "get", "watch"]);
    for phase in measured.json()["phases"].as_array().unwrap() {
        assert!(phase["operations"].as_u64().unwrap() > 0, "{phase}");
    }
    let left =
        moim(&["coord", "get", "--prefix", "moim-bench", "--count-only", "-o", "json", "--etcd", etcd]);
    assert_eq!(left.json()["count"], 0, "{left:?}");
}
