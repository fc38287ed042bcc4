//! Shards whose primary is stuck, in a command or in a script: a replica on another node is elected, and the stuck node is not
//! elected again before it answers.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::Duration;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders};
use crate::slots::{Client, addresses, ask, json, read_line};
use crate::support::PATIENCE;

/// The shard of this key gets stuck.
const KEY: &str = "key:1";

fn request(words: &[&str]) -> String {
    let head = format!("*{}\r\n", words.len());
    words.iter().fold(head, |request, word| request + &format!("${}\r\n{word}\r\n", word.len()))
}

/// Sends a request and does not wait for its answer.
fn send(address: &str, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the primary accepts connections");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.write_all(request.as_bytes()).expect("the request is sent");
    stream
}

/// Index of the shard that serves [`KEY`], its primary and one of its replicas.
fn shard_of_key(peers: &[Peer]) -> (usize, String, String) {
    let seeds = addresses(peers);
    let mut client = Client::new(&seeds);
    assert_eq!(client.run(&["SET", KEY, "before"]), "+OK");
    let map = json(peers, &["map"]);
    let shards = map["shards"].as_array().expect("shards");
    let index = shards.iter().position(|shard| shard["primary"] == client.address()).expect("the shard");
    let replica = shards[index]["replicas"][0].as_str().expect("a replica").to_owned();
    eventually("the replica is in sync", || !ask(&replica, &["PING"]).starts_with("-LOADING"));
    (index, client.address().to_owned(), replica)
}

#[test]
fn shard_of_a_stalled_event_loop_is_handed_over() {
    let (peers, _) = founders();
    let (index, stuck, _) = shard_of_key(&peers);
    let other = format!("other{{{KEY}}}");
    let text = "abcdefgh".repeat(1_000);
    let mut client = Client::new(std::slice::from_ref(&stuck));
    assert_eq!(client.run(&["SET", &other, &text]), "+OK");
    assert_eq!(client.run(&["SET", KEY, &text]), "+OK");
    // One transaction of a thousand commands of a tenth of a second and more each: it cannot be interrupted.
    let lcs = request(&["LCS", KEY, &other, "LEN"]).repeat(1_000);
    let _busy = send(&stuck, &(request(&["MULTI"]) + &lcs + &request(&["EXEC"])));
    eventually("another node leads the shard", || {
        let primary = json(&peers, &["map"])["shards"][index]["primary"].clone();
        primary.is_string() && primary != stuck.as_str()
    });
    let primary = json(&peers, &["map"])["shards"][index]["primary"].as_str().expect("a primary").to_owned();
    assert_eq!(Client::new(&[primary]).run(&["SET", KEY, "after"]), "+OK");
    let mut unanswered = send(&stuck, &request(&["PING"]));
    unanswered.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    assert_eq!(read_line(&mut unanswered), None, "the event loop was stalled all the time");
}

#[test]
fn node_of_a_script_that_has_written_is_not_elected_before_the_script_has_ended() {
    let (peers, _) = founders();
    let (index, former, replica) = shard_of_key(&peers);
    let script = "redis.call('SET', KEYS[1], 'not committed') while true do end";
    let mut busy = send(&former, &request(&["EVAL", script, "1", KEY]));
    eventually("the script is busy", || ask(&former, &["GET", KEY]).starts_with("-BUSY"));
    assert!(ask(&former, &["SCRIPT", "KILL"]).starts_with("-UNKILLABLE"));
    assert_eq!(ask(&replica, &["CLUSTER", "FAILOVER"]), "+OK");
    let primary = || json(&peers, &["map"])["shards"][index]["primary"].clone();
    eventually("the replica leads", || primary() == replica.as_str());
    let mut has_returned = false;
    eventually("the script has ended", || {
        let answer = ask(&former, &["PING"]);
        has_returned |= primary() == former.as_str() && answer != "+PONG";
        answer == "+PONG"
    });
    assert!(!has_returned, "a busy replica was elected although another one is healthy");
    let answer = read_line(&mut busy);
    assert!(answer.as_ref().is_none_or(|line| line.starts_with('-')), "{answer:?}");
    assert_eq!(
        Client::new(&[replica]).run(&["GET", KEY]),
        "before",
        "what the script wrote was not committed"
    );
}
