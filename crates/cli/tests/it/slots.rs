//! Slot migration: `moim slots …` against real nodes under load, and with nodes killed during a migration.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders};
use crate::support::{Done, PATIENCE, moim};

/// Number of keys of the writers.
const KEYS: usize = 60;

/// A minimal cluster client: follows redirects, and records the errors before the final reply.
pub(crate) struct Client {
    seeds: Vec<String>,
    at: String,
    stream: Option<TcpStream>,
    redirects: usize,
    others: Vec<String>,
}

impl Client {
    pub(crate) fn new(seeds: &[String]) -> Self {
        Self { seeds: seeds.to_vec(), at: seeds[0].clone(), stream: None, redirects: 0, others: Vec::new() }
    }

    /// The node that replied last.
    pub(crate) fn address(&self) -> &str {
        &self.at
    }

    /// Sends one command and reads a one-line reply or a bulk string; `None` if the connection broke.
    fn once(&mut self, words: &[&str]) -> Option<String> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(&self.at).ok()?;
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            stream.set_nodelay(true).ok()?;
            self.stream = Some(stream);
        }
        let stream = self.stream.as_mut()?;
        let mut request = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| request.push_str(&format!("${}\r\n{word}\r\n", word.len())));
        stream.write_all(request.as_bytes()).ok()?;
        let line = read_line(stream)?;
        match line.strip_prefix('$') {
            Some("-1") | None => Some(line),
            Some(_) => read_line(stream),
        }
    }

    /// Like `once`, following up to five redirects.
    fn redirected(&mut self, words: &[&str]) -> Option<String> {
        for _ in 0..5 {
            let line = self.once(words)?;
            let Some(moved) = line.strip_prefix("-MOVED ") else { return Some(line) };
            self.redirects += 1;
            self.at = moved.rsplit(' ').next().expect("an address").to_owned();
            self.stream = None;
        }
        Some("-too many redirections".to_owned())
    }

    /// Sends a command with retries until a node replies without an error.
    pub(crate) fn run(&mut self, words: &[&str]) -> String {
        let mut answer = String::new();
        eventually("a reply without an error", || {
            match self.redirected(words) {
                Some(line) if line.starts_with('-') => self.others.push(line),
                Some(line) => {
                    answer = line;
                    return true;
                }
                None => self.others.push("gone".to_owned()),
            }
            self.stream = None;
            let next = self.others.len() % self.seeds.len();
            self.at = self.seeds[next].clone();
            false
        });
        answer
    }
}

pub(crate) fn read_line(stream: &mut TcpStream) -> Option<String> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).ok()?;
        line.push(byte[0]);
    }
    line.truncate(line.len() - 2);
    String::from_utf8(line).ok()
}

/// Writes increasing numbers to its keys until `stop`; returns the last acknowledged values and the client.
fn write_until(
    seeds: Vec<String>,
    keys: Vec<String>,
    stop: Arc<AtomicBool>,
) -> std::thread::JoinHandle<(BTreeMap<String, u64>, Client)> {
    std::thread::spawn(move || {
        let (mut client, mut written, mut number) = (Client::new(&seeds), BTreeMap::new(), 0u64);
        while !stop.load(Ordering::Relaxed) {
            for key in &keys {
                number += 1;
                assert_eq!(client.run(&["SET", key, &number.to_string()]), "+OK");
                written.insert(key.clone(), number);
            }
        }
        (written, client)
    })
}

fn slots(peers: &[Peer], args: &[&str]) -> Done {
    let admin = peers.iter().map(Peer::admin_address).collect::<Vec<_>>().join(",");
    moim(&[&["slots"], args, &["--admin", &admin, "--timeout", "60s"]].concat())
}

pub(crate) fn json(peers: &[Peer], args: &[&str]) -> Value {
    let done = slots(peers, &[args, &["-o", "json"]].concat());
    assert_eq!(done.status, 0, "{done:?}");
    serde_json::from_str(&done.stdout).expect("JSON")
}

/// Addresses of all primaries.
pub(crate) fn addresses(peers: &[Peer]) -> Vec<String> {
    let mut found = Vec::new();
    eventually("every shard has a primary", || {
        let map = json(peers, &["map"]);
        let shards = map["shards"].as_array().expect("shards");
        found = shards.iter().filter_map(|shard| shard["primary"].as_str()).map(str::to_owned).collect();
        found.len() == shards.len() && found.len() >= peers.len()
    });
    found
}

/// The first [`KEYS`] keys with a slot in this range.
fn keys_of(first: u16, last: u16) -> Vec<String> {
    let names = (0..).map(|n: u32| format!("key:{n}"));
    names.filter(|name| (first..=last).contains(&moim_slots::slot_of(name.as_bytes()))).take(KEYS).collect()
}

/// Checks that every acknowledged write is read.
fn check(seeds: &[String], written: &BTreeMap<String, u64>) {
    let mut client = Client::new(seeds);
    for (key, number) in written {
        assert_eq!(client.run(&["GET", key]), number.to_string(), "{key}");
    }
}

#[test]
fn slot_migration_under_load_causes_only_moved_redirects() {
    let (peers, _) = founders();
    let seeds = addresses(&peers);
    assert_eq!(seeds.len(), 3);
    let stop = Arc::new(AtomicBool::new(false));
    let keys = keys_of(0, 999);
    // A list in a slot that stays migrated: the client blocked on it gets a MOVED redirect.
    let migrated = keys.iter().find(|key| moim_slots::slot_of(key.as_bytes()) >= 100).expect("a key");
    let list = format!("list:{{{migrated}}}");
    let mut blocked = Client::new(&seeds[..1]);
    let blocked = std::thread::spawn(move || blocked.once(&["BLPOP", &list, "0"]));
    let writer = write_until(seeds.clone(), keys, Arc::clone(&stop));
    let moved = json(&peers, &["move", "--from", "0", "--to", "1", "--slots", "0-999"]);
    let states: Vec<_> = moved["moves"].as_array().expect("moves").iter().map(|one| &one["state"]).collect();
    assert_eq!(states, ["moved"], "{moved}");
    let back = slots(&peers, &["move", "--from", &seeds[1], "--to", &seeds[0], "--slots", "0-99"]);
    assert_eq!(back.status, 0, "{back:?}");
    stop.store(true, Ordering::Relaxed);
    let (written, client) = writer.join().expect("the writer ends");
    assert_eq!(client.others, [""; 0], "nothing but redirections");
    assert!(client.redirects > 0);
    let reply = blocked.join().expect("it ends").expect("a reply");
    assert!(reply.starts_with("-MOVED ") && reply.ends_with(&seeds[1]), "{reply}");
    check(&seeds, &written);

    let map = json(&peers, &["map"]);
    assert_eq!((&map["assigned"], &map["moves"]), (&16_384.into(), &0.into()));
    assert_eq!(map["shards"][0]["slots"], "0-99,1000-5460");
    let of = |key: &str| json(&peers, &["where", key])["shard"].clone();
    let slot = |key: &str| moim_slots::slot_of(key.as_bytes());
    for key in written.keys().step_by(12) {
        assert_eq!(of(key), if slot(key) < 100 { 0 } else { 1 }, "{key}");
    }
    // The former owner has no keys left in the migrated slots.
    let mut old = Client::new(&seeds[..1]);
    for key in written.keys().filter(|key| slot(key) >= 100) {
        assert_eq!(old.once(&["CLUSTER", "COUNTKEYSINSLOT", &slot(key).to_string()]).as_deref(), Some(":0"));
    }
    let refused = slots(&peers, &["move", "--from", "0", "--to", "2", "--slots", "200"]);
    assert_eq!(refused.status, 7, "{refused:?}");
    assert_eq!(slots(&peers, &["move", "--from", "9", "--to", "2", "--count", "1"]).status, 3);
    assert_eq!(slots(&peers, &["move", "--from", "0", "--to", "2", "--slots", "x"]).status, 2);
    assert_eq!(slots(&peers, &["rebalance"]).status, 0);
    let map = json(&peers, &["map"]);
    let counts: Vec<_> = map["shards"].as_array().expect("shards").iter().map(|s| &s["slot_count"]).collect();
    assert_eq!(counts, [5461, 5462, 5461].map(Value::from).iter().collect::<Vec<_>>());
    check(&seeds, &written);
}

#[test]
fn pubsub_reaches_subscribers_of_every_node_and_wait_returns() {
    let (peers, _) = founders();
    let seeds = addresses(&peers);
    let mut listener = Client::new(&seeds[2..]);
    assert_eq!(listener.once(&["SUBSCRIBE", "news"]).as_deref(), Some("*3"));
    let stream = listener.stream.as_mut().expect("a connection");
    let mut lines =
        |count: usize| -> Vec<String> { (0..count).map(|_| read_line(stream).expect("a line")).collect() };
    assert_eq!(lines(5), ["$9", "subscribe", "$4", "news", ":1"]);
    let mut speaker = Client::new(&seeds[..1]);
    assert_eq!(
        speaker.once(&["PUBLISH", "news", "one"]).as_deref(),
        Some(":0"),
        "no subscriber on this node"
    );
    assert_eq!(speaker.once(&["PUBLISH", "news", "two"]).as_deref(), Some(":0"));
    for text in ["one", "two"] {
        assert_eq!(lines(7), ["*3", "$7", "message", "$4", "news", "$3", text]);
    }

    // WAIT after a write, and a command after WAIT, in one pipeline.
    let key = keys_of(0, 5_460).remove(0);
    let stream = speaker.stream.as_mut().expect("a connection");
    let set = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n$1\r\nv\r\n", key.len());
    let rest = "*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$1\r\n0\r\n*1\r\n$4\r\nPING\r\n";
    stream.write_all(format!("{set}{rest}").as_bytes()).expect("it reads");
    let answers: Vec<_> = (0..3).map(|_| read_line(stream).expect("a line")).collect();
    assert_eq!(answers, ["+OK", ":2", "+PONG"]);
}

/// Reply of one node, without following redirects.
pub(crate) fn ask(address: &str, words: &[&str]) -> String {
    let mut client = Client::new(&[address.to_owned()]);
    client.once(words).unwrap_or_else(|| "gone".to_owned())
}

#[test]
fn cluster_failover_returns_ok_and_setslot_requires_the_owner_and_an_empty_slot() {
    let (peers, _) = founders();
    let seeds = addresses(&peers);
    let shard = |index: usize| json(&peers, &["map"])["shards"][index].clone();

    // CLUSTER FAILOVER on a replica returns after the election.
    let replica = shard(0)["replicas"][0].as_str().expect("a replica").to_owned();
    eventually("the replica is in sync", || !ask(&replica, &["PING"]).starts_with("-LOADING"));
    assert_eq!(ask(&replica, &["CLUSTER", "FAILOVER"]), "+OK");
    eventually("the replica is the primary", || shard(0)["primary"] == replica.as_str());
    eventually("its own role is updated", || {
        ask(&replica, &["CLUSTER", "FAILOVER"]) == "-ERR You should send CLUSTER FAILOVER to a replica"
    });

    // A slot of the second shard, with and without a key.
    let (owner, target, third) = (seeds[1].clone(), seeds[2].clone(), replica);
    let key = keys_of(5_461, 10_922).remove(0);
    let slot = moim_slots::slot_of(key.as_bytes()).to_string();
    assert_eq!(Client::new(&seeds).run(&["SET", &key, "v"]), "+OK");
    let to = ask(&target, &["CLUSTER", "MYID"]);
    let assign = ["CLUSTER", "SETSLOT", &slot, "NODE", &to];
    for (address, why) in [
        (&owner, "I still hold keys"),
        (&target, "its owner still holds keys"),
        (&third, "I'm not the owner"),
    ] {
        let refused = ask(address, &assign);
        assert!(refused.contains(why), "{address}: {refused}");
    }
    for (address, why) in
        [(&owner, "I still hold keys"), (&target, "I'm not the owner"), (&third, "I'm not the owner")]
    {
        let refused = ask(address, &["CLUSTER", "DELSLOTS", &slot]);
        assert!(refused.contains(why), "{address}: {refused}");
    }
    assert_eq!(Client::new(&seeds).run(&["GET", &key]), "v", "unchanged");
    assert_eq!(Client::new(&seeds).run(&["DEL", &key]), ":1");
    assert_eq!(ask(&target, &assign), "+OK");
    assert_eq!(ask(&owner, &assign), "+OK", "again at the former owner, as redis-cli does");
    assert_eq!(Client::new(&seeds).run(&["SET", &key, "w"]), "+OK");
    assert_eq!(ask(&target, &["GET", &key]), "w");
    assert_eq!(ask(&target, &["DEL", &key]), ":1");
    assert_eq!(ask(&target, &["CLUSTER", "DELSLOTS", &slot]), "+OK");
}

#[test]
fn slot_migration_survives_kill_9_of_either_primary() {
    let (mut peers, list) = founders();
    let seeds = addresses(&peers);
    let map = json(&peers, &["map"]);
    let node_of = |shard: usize| map["shards"][shard]["primary_node"].as_i64().expect("a node") as i32;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write_until(seeds.clone(), keys_of(0, 399), Arc::clone(&stop));
    for (victim, range) in [(node_of(0), "0-199"), (node_of(1), "200-399")] {
        let begun = slots(&peers, &["move", "--from", "0", "--to", "1", "--slots", range, "--no-wait"]);
        assert_eq!(begun.status, 0, "{begun:?}");
        let at = peers.iter().position(|peer| peer.id == victim).expect("a node");
        peers[at].kill();
        let others: Vec<&Peer> = peers.iter().filter(|peer| peer.id != victim).collect();
        let admin = others.iter().map(|peer| peer.admin_address()).collect::<Vec<_>>().join(",");
        eventually("the migration ends without the node", || {
            let done = moim(&["slots", "map", "-o", "json", "--admin", &admin]);
            serde_json::from_str::<Value>(&done.stdout).is_ok_and(|map| map["moves"] == 0)
        });
        peers[at].start_ready(&["--initial-cluster", &list]);
    }
    stop.store(true, Ordering::Relaxed);
    let (written, _) = writer.join().expect("the writer ends");
    check(&addresses(&peers), &written);
    let map = json(&peers, &["map"]);
    assert_eq!(map["shards"][0]["slots"], "400-5460");
}

#[test]
fn joined_nodes_get_a_shard_and_their_share_of_the_slots() {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    peers[0].start_ready(&[]);
    let seeds = addresses(&peers[..1]);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write_until(seeds, keys_of(0, 16_383), Arc::clone(&stop));
    let first = peers[0].peer_address();
    for nodes in 2..=3u64 {
        peers[nodes as usize - 1].start_ready(&["--join", &first]);
        let map = || serde_json::from_str::<Value>(&slots(&peers, &["map", "-o", "json"]).stdout);
        let shards = |map: &Value| map["shards"].as_array().cloned().unwrap_or_default();
        eventually("a shard for every node", || map().is_ok_and(|map| shards(&map).len() as u64 == nodes));
        eventually("an even number of slots per shard", || {
            let share = 16_384 / nodes;
            let even = |shard: &Value| {
                shard["slot_count"].as_u64().is_some_and(|count| (share..=share + 1).contains(&count))
            };
            map().is_ok_and(|map| map["moves"] == 0 && shards(&map).iter().all(even))
        });
    }
    stop.store(true, Ordering::Relaxed);
    let (written, client) = writer.join().expect("the writer ends");
    assert_eq!(client.others, [""; 0], "nothing but redirections");
    let map = json(&peers, &["map"]);
    let mut leaders: Vec<_> =
        map["shards"].as_array().expect("shards").iter().filter_map(|s| s["primary_node"].as_i64()).collect();
    leaders.sort_unstable();
    assert_eq!(leaders, [1, 2, 3]);
    check(&addresses(&peers), &written);
}
