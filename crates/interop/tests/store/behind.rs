//! A follower that was down until its leader's log start offset passed its own log end: it gets a snapshot.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use moim_interop::cluster::Cluster;
use moim_interop::net::listens;
use moim_interop::{Options, until};
use moim_slot_client::{Client, Slot};

use super::load::ask;

const PATIENCE: Duration = Duration::from_secs(60);
/// All keys are in one slot, so one shard is affected.
const KEPT: usize = 50;
const LARGE: usize = 1 << 20;

/// The names of the snapshots below a node's data directory.
fn snapshots(data: &Path) -> BTreeSet<String> {
    let files = |folder: std::fs::DirEntry| std::fs::read_dir(folder.path()).into_iter().flatten();
    let folders = std::fs::read_dir(data.join("slots")).into_iter().flatten().filter_map(Result::ok);
    let names = folders.flat_map(files).filter_map(|file| file.ok()?.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".snap")).collect()
}

/// The node of the primary of a slot, and the ports of its replicas.
fn shape(cluster: &Cluster, address: &str, slot: u16) -> Option<(usize, Vec<u16>)> {
    let nodes = ask(address, &["CLUSTER", "NODES"])?;
    let owns = |words: &[&str]| {
        words.iter().skip(8).any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            first.parse().is_ok_and(|first: u16| first <= slot)
                && last.parse().is_ok_and(|last: u16| slot <= last)
        })
    };
    let lines: Vec<Vec<&str>> = nodes.lines().map(|line| line.split(' ').collect()).collect();
    let primary = lines.iter().find(|words| owns(words))?;
    let port = |words: &[&str]| words[1].split('@').next()?.rsplit(':').next()?.parse::<u16>().ok();
    let replicas = lines.iter().filter(|words| words[3] == primary[0]).filter_map(|words| port(words));
    let primary_port = port(primary)?;
    let node = (0..cluster.len()).find(|node| {
        cluster.server(*node).and_then(|server| server.pid()).is_some_and(|pid| listens(pid, primary_port))
    })?;
    Some((node, replicas.collect()))
}

#[test]
fn follower_behind_the_log_start_installs_a_snapshot() {
    let mut cluster = Cluster::moim(3, &Options::new(), false).unwrap_or_else(|error| panic!("{error:#}"));
    let seeds: Vec<String> = (0..3).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let connect = Client::builder(&seeds.join(",")).timeout(PATIENCE).hung_after(PATIENCE / 4).connect();
    let client = runtime.block_on(connect).unwrap();
    let key = |number: usize| format!("{{behind}}kept:{number}");
    let slot = Slot::of(b"{behind}").get();
    let (leader, _) = until(PATIENCE, "the shard's primary", || shape(&cluster, &seeds[0], slot));
    for number in 0..KEPT / 2 {
        runtime.block_on(client.set(key(number), number)).unwrap();
    }
    let away = (leader + 1) % 3;
    cluster.kill(away).unwrap();
    for number in KEPT / 2..KEPT {
        runtime.block_on(client.set(key(number), number)).unwrap();
    }
    // The same few keys repeatedly: the journal grows and the keyspace does not.
    let data = cluster.server(leader).unwrap().data();
    let mut written = 0usize;
    let deadline = moim_interop::Deadline::after(2 * PATIENCE);
    while snapshots(&data).is_empty() {
        let value = letter(written).repeat(LARGE);
        runtime.block_on(client.set(format!("{{behind}}large:{}", written % 3), value)).unwrap();
        written += 1;
        assert!(!deadline.is_over(), "no snapshot after {written} MiB\n{}", cluster.log_tails());
    }
    cluster.restart(away).unwrap();
    let of_follower = cluster.server(away).unwrap().data();
    let installed = until(PATIENCE, "a snapshot at the follower", || {
        let have = snapshots(&of_follower);
        (!have.is_empty()).then_some(have)
    });
    assert!(written >= 60, "a snapshot after {written} MiB only");
    // The follower was down when all of this was written, so it cannot have created the snapshot itself.
    assert!(installed.is_subset(&snapshots(&data)), "{installed:?} is not the leader's");
    // It replicates from there on.
    runtime.block_on(client.set("{behind}after", "x")).unwrap();
    let pid = cluster.server(away).unwrap().pid().unwrap();
    let port = until(PATIENCE, "the follower's address", || {
        let (_, replicas) = shape(&cluster, &seeds[leader], slot)?;
        replicas.into_iter().find(|port| listens(pid, *port))
    });
    until(PATIENCE, "the follower to have everything", || {
        let mut connection = reader(port)?;
        let after: Option<String> = redis::cmd("GET").arg("{behind}after").query(&mut connection).ok()?;
        after.map(drop)
    });
    let mut connection = reader(port).expect("a connection to the follower");
    for number in 0..KEPT {
        let found: Option<usize> = redis::cmd("GET").arg(key(number)).query(&mut connection).unwrap();
        assert_eq!(found, Some(number));
    }
    // After the leader crashes nothing is missing.
    cluster.kill(leader).unwrap();
    for number in 0..KEPT {
        let found: Option<usize> = runtime.block_on(client.get(key(number))).unwrap();
        assert_eq!(found, Some(number));
    }
    for number in 0..3 {
        let last = (0..written).rev().find(|round| round % 3 == number).unwrap();
        let found: String = runtime.block_on(client.get(format!("{{behind}}large:{number}"))).unwrap();
        assert!(found.len() == LARGE && found.starts_with(&letter(last)), "large value {number}");
    }
}

/// The letter that the n-th large value consists of.
fn letter(number: usize) -> String {
    char::from(b'a' + (number % 26) as u8).to_string()
}

/// A READONLY connection to a replica.
fn reader(port: u16) -> Option<redis::Connection> {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).ok()?;
    let mut connection = client.get_connection_with_timeout(Duration::from_secs(5)).ok()?;
    redis::cmd("READONLY").query::<()>(&mut connection).ok()?;
    Some(connection)
}
