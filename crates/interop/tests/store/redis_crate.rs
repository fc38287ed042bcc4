//! The `redis` crate, unmodified: its plain client on one node, its cluster client on three.

use std::collections::BTreeMap;
use std::time::Duration;

use moim_interop::cluster::Cluster;
use moim_interop::{Options, Server, until};
use redis::cluster::ClusterClient;
use redis::{Commands as _, Script, pipe};

const PATIENCE: Duration = Duration::from_secs(30);

/// Command families for every kind of connection of the crate. `tag` keeps the keys of one command in one slot.
fn families(connection: &mut impl redis::ConnectionLike, tag: &str) {
    let key = |name: &str| format!("{{{tag}}}{name}");
    let _: () = connection.set(key("s"), "v").unwrap();
    assert_eq!(connection.get::<_, Option<String>>(key("s")).unwrap().as_deref(), Some("v"));
    assert_eq!(connection.getset::<_, _, String>(key("s"), "w").unwrap(), "v");
    assert_eq!(connection.append::<_, _, i64>(key("s"), "xyz").unwrap(), 4);
    assert_eq!(connection.getrange::<_, String>(key("s"), 1, -1).unwrap(), "xyz");
    assert!(connection.expire::<_, bool>(key("s"), 100).unwrap());
    assert!((1..=100).contains(&connection.ttl::<_, i64>(key("s")).unwrap()));
    assert_eq!(connection.incr::<_, _, i64>(key("n"), 5).unwrap(), 5);
    assert_eq!(connection.decr::<_, _, i64>(key("n"), 7).unwrap(), -2);
    let _: () = connection.mset(&[(key("a"), 1), (key("b"), 2)]).unwrap();
    assert_eq!(connection.mget::<_, Vec<i64>>(&[key("a"), key("b")]).unwrap(), [1, 2]);

    let _: () = connection.hset_multiple(key("h"), &[("f", 1), ("g", 2)]).unwrap();
    let hash: BTreeMap<String, i64> = connection.hgetall(key("h")).unwrap();
    assert_eq!(hash, BTreeMap::from([("f".to_owned(), 1), ("g".to_owned(), 2)]));
    assert_eq!(connection.hincr::<_, _, _, i64>(key("h"), "f", 9).unwrap(), 10);

    assert_eq!(connection.rpush::<_, _, i64>(key("l"), &["a", "b", "c"]).unwrap(), 3);
    assert_eq!(connection.lrange::<_, Vec<String>>(key("l"), 0, -1).unwrap(), ["a", "b", "c"]);
    assert_eq!(connection.lpop::<_, Option<String>>(key("l"), None).unwrap().as_deref(), Some("a"));
    let popped: Option<(String, String)> = connection.blpop(key("l"), 1.0).unwrap();
    assert_eq!(popped, Some((key("l"), "b".to_owned())));

    assert_eq!(connection.sadd::<_, _, i64>(key("set"), &[1, 2, 3]).unwrap(), 3);
    assert_eq!(connection.sadd::<_, _, i64>(key("other"), &[2, 3, 4]).unwrap(), 3);
    let mut both: Vec<i64> = connection.sinter(&[key("set"), key("other")]).unwrap();
    both.sort_unstable();
    assert_eq!(both, [2, 3]);

    assert_eq!(connection.zadd_multiple::<_, _, _, i64>(key("z"), &[(1.5, "x"), (0.5, "y")]).unwrap(), 2);
    let scored: Vec<(String, f64)> = connection.zrange_withscores(key("z"), 0, -1).unwrap();
    assert_eq!(scored, [("y".to_owned(), 0.5), ("x".to_owned(), 1.5)]);
    assert_eq!(connection.zrank::<_, _, Option<i64>>(key("z"), "x").unwrap(), Some(1));

    let script = Script::new("return {redis.call('INCR', KEYS[1]), ARGV[1]}");
    let answer: (i64, String) = script.key(key("scripted")).arg("told").invoke(connection).unwrap();
    assert_eq!(answer, (1, "told".to_owned()));
    assert_eq!(connection.del::<_, i64>(&[key("s"), key("n"), key("missing")]).unwrap(), 2);
    let wrong = connection.hget::<_, _, Option<String>>(key("l"), "f").unwrap_err();
    assert_eq!(wrong.code(), Some("WRONGTYPE"));
}

#[test]
fn plain_client_on_one_node() {
    let server = Server::start(Options::new()).unwrap();
    let client = redis::Client::open(format!("redis://{}/", server.redis())).unwrap();
    let mut connection = client.get_connection().unwrap();
    families(&mut connection, "one");
    // A pipeline of several commands.
    let (first, second): (i64, i64) =
        pipe().cmd("INCR").arg("{p}n").cmd("INCR").arg("{p}n").query(&mut connection).unwrap();
    assert_eq!((first, second), (1, 2));
}

#[test]
fn cluster_client_on_three_nodes() {
    let cluster = Cluster::moim(3, &Options::new(), false).unwrap_or_else(|error| panic!("{error:#}"));
    let seeds: Vec<String> =
        (0..3).map(|node| format!("redis://{}/", cluster.server(node).unwrap().redis())).collect();
    let client = ClusterClient::new(seeds).unwrap();
    let mut connection = until(PATIENCE, "a cluster to connect to", || client.get_connection().ok());
    // Hash tags in the slots of every shard.
    for tag in ["a", "b", "c", "d", "e", "f"] {
        families(&mut connection, tag);
    }
    let answers: Vec<i64> = {
        let mut pipe = redis::cluster::cluster_pipe();
        for number in 0..30 {
            pipe.incr(format!("key:{number}"), number);
        }
        pipe.query(&mut connection).unwrap()
    };
    assert_eq!(answers, (0..30).collect::<Vec<_>>());
    // Keys in slots of different shards: CROSSSLOT, with the text of Redis.
    let crossed = redis::cmd("SMOVE").arg("x").arg("y").arg("m").query::<i64>(&mut connection).unwrap_err();
    assert_eq!(crossed.code(), Some("CROSSSLOT"), "{crossed}");
    let plain = redis::Client::open(format!("redis://{}/", cluster.server(0).unwrap().redis())).unwrap();
    let mut one_node = plain.get_connection().unwrap();
    let moved = (0..)
        .find_map(|number| {
            redis::cmd("GET").arg(format!("key:{number}")).query::<Option<i64>>(&mut one_node).err()
        })
        .unwrap();
    assert_eq!(moved.code(), Some("MOVED"));
    let (address, slot) = moved.redirect_node().unwrap();
    let there = redis::Client::open(format!("redis://{address}/")).unwrap();
    let mut there = there.get_connection().unwrap();
    let keys: Vec<String> =
        redis::cmd("CLUSTER").arg("GETKEYSINSLOT").arg(slot).arg(10).query(&mut there).unwrap();
    assert!(!keys.is_empty(), "the key is where MOVED says");
}
