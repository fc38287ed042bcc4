//! Differential tests: the same random commands run here and on a real redis-server, and the replies are compared.
//! The propagated effects, replayed on an empty keyspace, must give the same values.
//!
//! Skipped with a message if there is no `redis-server`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use bytes::BytesMut;
use moim_wire_resp::{OwnedArgs, ReplyDecoder, Value, command};

use super::harness::{Harness, show};

struct Redis {
    process: Child,
    stream: UnixStream,
    decoder: ReplyDecoder,
    buffer: BytesMut,
    _folder: tempfile::TempDir,
}

impl Redis {
    fn start() -> Option<Redis> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut tries = 0;
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(error) => {
                    tries += 1;
                    assert!(tries < 500, "redis-server does not listen: {error}");
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            }
        };
        let decoder = ReplyDecoder::new(usize::MAX);
        Some(Redis { process, stream, decoder, buffer: BytesMut::new(), _folder: folder })
    }

    fn run(&mut self, args: &[Vec<u8>]) -> Value {
        let mut request = BytesMut::new();
        command::encode(&mut request, args);
        self.stream.write_all(&request).unwrap();
        loop {
            if let Some(reply) = self.decoder.decode(&mut self.buffer).unwrap() {
                return reply;
            }
            let mut chunk = [0; 65536];
            let count = self.stream.read(&mut chunk).unwrap();
            assert!(count > 0, "redis-server closed the connection");
            self.buffer.extend_from_slice(&chunk[..count]);
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Placeholders of a template: `K` a key, `Z` a key of a sorted set with equal scores, `H` a HyperLogLog key, `F` a
/// field or member, `V` a value, `I` an integer, `N` a small index, `S` a score, `B` a score bound, `L` a
/// lexicographic bound, `C` a small count; `a|b` is one of several; `?x` is optional; a trailing `*` repeats the
/// words since the last `(`.
fn fill(template: &str, random: &mut fastrand::Rng) -> Vec<Vec<u8>> {
    let mut args = Vec::new();
    let words: Vec<&str> = template.split(' ').collect();
    let mut group = 0;
    let mut again = 0;
    let mut at = 0;
    while at < words.len() {
        let word = words[at];
        at += 1;
        match word {
            "(" => {
                group = at;
                again = random.u8(..4);
                continue;
            }
            ")*" => {
                if again > 0 {
                    again -= 1;
                    at = group;
                }
                continue;
            }
            _ => {}
        }
        let word = match word.strip_prefix('?') {
            Some(rest) if random.bool() => rest,
            Some(_) => continue,
            None => word,
        };
        let choices: Vec<&str> = word.split('|').collect();
        let chosen = choices[random.usize(..choices.len())];
        args.extend(chosen.split('_').map(|part| value(part, random)));
    }
    args
}

fn value(kind: &str, random: &mut fastrand::Rng) -> Vec<u8> {
    let pick = |random: &mut fastrand::Rng, from: &[&str]| from[random.usize(..from.len())].to_string();
    match kind {
        "K" => format!("k{}", random.u8(..6)),
        "H" => format!("h{}", random.u8(..3)),
        "Z" => format!("z{}", random.u8(..2)),
        "F" => format!("f{}", random.u8(..12)),
        "V" => match random.u8(..6) {
            0 => random.i32(-50..50).to_string(),
            1 => "x".repeat(random.usize(..100)),
            2 => format!("{}.5", random.i8(..)),
            _ => format!("f{}", random.u8(..12)),
        },
        "I" => pick(random, &["1", "-1", "5", "100", "0", "x", "1.5", "9223372036854775807", "-20"]),
        "N" => random.i8(-8..9).to_string(),
        "C" => random.u8(..5).to_string(),
        "S" => pick(random, &["1", "2", "3.5", "-1", "0", "inf", "-inf", "1e3", "0.1", "x", "5", "7"]),
        "B" => pick(random, &["1", "(1", "2", "(3.5", "-inf", "+inf", "0", "(x", "5"]),
        "L" => pick(random, &["-", "+", "[f1", "(f1", "[f5", "(f9", "[", "f1"]),
        "T" => pick(random, &["0", "1", "7", "8", "31", "100", "-1", "x"]),
        "Y" => pick(random, &["u8", "i8", "u4", "i16", "u63", "i64", "u1", "u64", "x8", "i0"]),
        "O" => pick(random, &["0", "3", "#1", "17", "100", "-1", "#x"]),
        "P" => pick(random, &["0.25", "-1.1", "3", "inf", "nan", "x", "1e2"]),
        "X" => format!("x{}", random.u8(..3)),
        "G" => format!("g{}", random.u8(..2)),
        "M" => format!("c{}", random.u8(..3)),
        "A" => match random.u8(..8) {
            0 => random.u8(..60).to_string(),
            1 => pick(random, &["0-0", "x", "5-x", "18446744073709551615-0", "+"]),
            _ => format!("{}-{}", random.u8(..60), random.u8(..3)),
        },
        "E" => match random.u8(..4) {
            0 => pick(
                random,
                &["-", "+", "(5-1", "(0-0", "(", "(-", "x", "(18446744073709551615-18446744073709551615"],
            ),
            1 => random.u8(..60).to_string(),
            2 => "-".to_owned(),
            _ => format!("{}-{}", random.u8(..60), random.u8(..3)),
        },
        "W" => format!("w{}", random.u8(..2)),
        "J" => match random.u8(..40) {
            0 => pick(random, &["181", "x", "-180", "180"]),
            1..10 => format!("{:.3}", random.f64() * 360.0 - 180.0),
            _ => format!("{:.4}", 10.0 + random.f64() * 10.0),
        },
        "Q" => match random.u8(..40) {
            0 => pick(random, &["86", "x", "-85.05112878", "85.05112878"]),
            1..10 => format!("{:.3}", random.f64() * 170.0 - 85.0),
            _ => format!("{:.4}", 35.0 + random.f64() * 10.0),
        },
        "D" => pick(random, &["0", "10", "150.5", "900", "5000", "30000", "-1", "x"]),
        "U" => pick(random, &["m", "km", "km", "km", "KM", "ft", "mi", "x"]),
        other => other.to_string(),
    }
    .into_bytes()
}

/// Streams with explicit ids, because the two clocks differ.
const STREAMS: &[&str] = &[
    "xadd X A F V ( F V )*",
    "xadd X A F V ( F V )*",
    "xadd X A F V F V",
    "xadd X nomkstream A F V",
    "xadd X maxlen ?=|~ C A F V",
    "xadd X minid ?=|~ A A F V",
    "xadd X maxlen ~ 1 limit C A F V",
    "xadd X maxlen 1 limit 2 A F V",
    "xadd X maxlen 1 minid 2 A F V",
    "xadd X limit 2 A F V",
    "xadd X maxlen -1 A F V",
    "xadd X 7-* F V",
    "xadd X A F",
    "xtrim X maxlen|minid ?=|~ C ?limit_C",
    "xtrim X maxlen N",
    "xtrim X minid A",
    "xtrim X x 5",
    "xdel X A A",
    "xlen X",
    "xrange X E E ?count_N",
    "xrange X - + x",
    "xrevrange X + - ?count_N",
    "xrevrange X E E",
    "xread count C streams X X A A",
    "xread streams X A",
    "xread streams X $|>",
    "xread streams X X A",
    "xread block x streams X A",
    "xread block 1 streams X 59-5",
    "xread group G M streams X A",
    "xgroup create X G A|$|0 ?mkstream ?entriesread_N",
    "xgroup create X G 0 mkstream",
    "xgroup setid X G A|$ ?entriesread_C",
    "xgroup destroy X G",
    "xgroup createconsumer X G M",
    "xgroup delconsumer X G M",
    "xgroup nothing X G",
    "xreadgroup group G M ?count_C ?noack streams X >",
    "xreadgroup group G M count 2 streams X >",
    "xreadgroup group G M ?count_C streams X A|0|$",
    "xreadgroup group G M block 1 streams X >",
    "xreadgroup group G M streams X X > >",
    "xreadgroup count 1 noack streams X X > >",
    "xack X G A A",
    "xack X G A",
    "xpending X G",
    "xpending X G E E C ?M",
    "xpending X G idle 0 - + 10 ?M",
    "xpending X G - +",
    "xclaim X G M 0 A A ?justid ?force ?retrycount_C",
    "xclaim X G M 0 A ?lastid_A",
    "xclaim X G M x A",
    "xclaim X G M 0 A x",
    "xautoclaim X G M 0 E ?count_N ?justid",
    "xautoclaim X G M 0 - count 1",
    "xinfo stream X",
    "xinfo stream X full ?count_C",
    "xinfo stream X x",
    "xinfo groups X",
    "xinfo consumers X G",
    "xinfo help",
    "xgroup help",
    "xsetid X A ?entriesadded_N ?maxdeletedid_A",
    "type X",
    "object encoding X",
    "copy X X",
    "del X",
    "set X v",
];

/// Geo commands.
const GEO: &[&str] = &[
    "geoadd W ?nx|xx ?ch J Q F ( J Q F )*",
    "geoadd W J Q F",
    "geoadd W J Q F J",
    "geoadd W nx xx J Q F",
    "geopos W F F",
    "geohash W F F",
    "geodist W F F ?U",
    "geodist W F F m x",
    "georadius W J Q D U ?withdist ?withcoord ?withhash",
    "georadius W J Q D U asc|desc ?withdist ?count_N",
    "georadius W J Q D U ?asc count C any x",
    "georadius W J Q D U store W ?withdist",
    "georadius_ro W J Q D U store W",
    "georadiusbymember W F D U ?withdist ?withhash",
    "georadiusbymember W F D U asc withcoord",
    "georadiusbymember W F D U storedist W",
    "georadiusbymember_ro W F D U desc",
    "geosearch W fromlonlat J Q byradius D U ?withdist ?withcoord",
    "geosearch W fromlonlat J Q bybox D D U asc ?count_C",
    "geosearch W frommember F bybox D D U desc withhash",
    "geosearch W frommember F byradius D U ?asc count 2 ?any",
    "geosearch W frommember F fromlonlat J Q byradius D U",
    "geosearch W byradius D U asc desc",
    "geosearch W fromlonlat J Q asc count 3 any",
    "geosearchstore W W fromlonlat J Q byradius D U ?storedist",
    "geosearchstore W W frommember F bybox D D U asc count 3",
    "geosearchstore W W frommember F bybox D D U withdist",
    "zrange W 0 -1 withscores",
    "zrem W F",
    "del W",
];

const TEMPLATES: &[&str] = &[
    "set K V",
    "get K",
    "del K",
    "type K",
    "exists K K",
    "hset K F V ( F V )*",
    "hset K F",
    "hmset K F V",
    "hsetnx K F V",
    "hget K F",
    "hmget K F F",
    "~hgetall K",
    "~hkeys K",
    "~hvals K",
    "hlen K",
    "hstrlen K F",
    "hexists K F",
    "hdel K F ( F )*",
    "hincrby K F I",
    "hincrbyfloat K p1|p2 P",
    "hrandfield K 0",
    "hrandfield K I x",
    "~hscan K 0 count 1000",
    "~hscan K 0 match f1* count 1000",
    "hscan K x",
    "lpush K V ( V )*",
    "rpush K V ( V )*",
    "lpushx K V",
    "rpushx K V V",
    "lpop K ?C",
    "rpop K ?C",
    "lpop K -1",
    "llen K",
    "lindex K N",
    "lindex K x",
    "lset K N V",
    "linsert K before|after F V",
    "linsert K x F V",
    "lrange K N N",
    "ltrim K N N",
    "lrem K N F",
    "lpos K F",
    "lpos K F rank N ?count_C ?maxlen_N",
    "lpos K F count N",
    "lmove K K left|right left|right|x",
    "rpoplpush K K",
    "lmpop 2 K K left|right ?count_N",
    "lmpop N K left",
    "blpop K K 0.01",
    "brpop K 0.01",
    "blmove K K left right 0.01",
    "brpoplpush K K 0.01",
    "blmpop 0.01 1 K left",
    "blpop K -1",
    "blpop K x",
    "sadd K V ( F )*",
    "sadd K N ( N )*",
    "srem K F ( F )*",
    "smove K K F",
    "scard K",
    "sismember K F",
    "smismember K F F",
    "~smembers K",
    "srandmember K 0",
    "~spop K 1000",
    "~sinter K K",
    "~sunion K K ?K",
    "~sdiff K K ?K",
    "sinterstore K K K",
    "sunionstore K K K",
    "sdiffstore K K K",
    "sintercard 2 K K ?limit_C",
    "sintercard N K",
    "~sscan K 0 count 1000",
    "sscan K 0 count 0",
    "zadd K ?nx|xx ?gt|lt ?ch S F ( S F )*",
    "zadd K incr ?nx|xx ?gt S F",
    "zadd K S F S",
    "zincrby K S F",
    "zrem K F ( F )*",
    "zcard K",
    "zadd Z 0 F ( 0 F )*",
    "zrem Z F",
    "zscore K F",
    "zmscore K F F",
    "zrank K F",
    "zrevrank K F",
    "zpopmin K ?C",
    "zpopmax K ?C",
    "zpopmin K -1",
    "zmpop 2 K K min|max|x ?count_N",
    "zrandmember K 0",
    "zrandmember K 1 x",
    "~zscan K 0 count 1000",
    "bzpopmin K K 0.01",
    "bzpopmax K 0.01",
    "bzmpop 0.01 2 K K min",
    "zrange K N N ?rev ?withscores",
    "zrange K B B byscore ?withscores ?limit_N_N",
    "zrange K B B byscore rev ?limit_C_C",
    "zrange Z L L bylex ?limit_C_N",
    "zrange Z L L bylex ?rev ?withscores",
    "zrange K N N limit 1 2",
    "zrevrange K N N ?withscores",
    "zrangebyscore K B B ?withscores ?limit_N_N",
    "zrevrangebyscore K B B ?withscores ?limit_C_C",
    "zrangebylex Z L L ?limit_C_N",
    "zrevrangebylex Z L L",
    "zcount K B B",
    "zlexcount Z L L",
    "zremrangebyrank K N N",
    "zremrangebyscore K B B",
    "zremrangebylex Z L L",
    "zrangestore K K N N ?rev",
    "zrangestore K K B B byscore ?limit_C_C",
    "zunion 2 K K ?withscores",
    "zunion 2 K K weights S S ?aggregate_sum|aggregate_min|aggregate_max ?withscores",
    "zinter 2 K K ?withscores",
    "zinter 2 K K weights 2 S aggregate max withscores",
    "zdiff 2 K K ?withscores",
    "zdiff 2 K K weights 1 2",
    "zunionstore K 2 K K ?weights_1_S",
    "zinterstore K 2 K K ?aggregate_min",
    "pfadd H F ( V )*",
    "pfcount H",
    "pfcount H H",
    "pfmerge H H",
    "pfcount K",
    "setbit K T 0|1|x",
    "getbit K T",
    "bitcount K",
    "bitcount K N N ?bit|byte|x",
    "bitpos K 0|1|2",
    "bitpos K 0|1 N",
    "bitpos K 0|1 N N ?bit|byte",
    "bitop and|or|xor|x K K K ?K",
    "bitop not K K ?K",
    "bitfield K get Y O",
    "bitfield K set Y O I",
    "bitfield K overflow sat|fail|wrap|x incrby Y O I set Y O I get Y O",
    "bitfield_ro K get u8 0",
    "bitfield_ro K set u8 0 1",
    "sort K",
    "sort K alpha ?desc",
    "sort K alpha limit N N",
    "sort K by nosort ?desc limit C C store K",
    "sort K alpha store K",
    "sort_ro K alpha store K",
    "lcs K K ?len",
    "lcs K K idx ?withmatchlen ?minmatchlen_C",
    "lcs K K len idx",
    "zdiffstore K 2 K K",
    "zintercard 2 K K ?limit_C",
    "zintercard N K",
    "zunionstore K N K",
];

fn sorted(reply: Value) -> Value {
    match reply {
        Value::Array(parts) => {
            let mut parts: Vec<Value> = parts.into_iter().map(sorted).collect();
            parts.sort_by_key(show);
            Value::Array(parts)
        }
        other => other,
    }
}

/// A textual dump of the keyspace.
fn dump(harness: &mut Harness, keys: &[String]) -> Vec<String> {
    let mut lines = Vec::new();
    for key in keys {
        let kind = harness.run(&format!("type {key}"));
        let command = match kind.as_str() {
            "string" => "get K",
            "list" => "lrange K 0 -1",
            "hash" => "hgetall K",
            "set" => "smembers K",
            "zset" => "zrange K 0 -1 withscores",
            "stream" => "xinfo stream K full count 0",
            _ => "exists K",
        };
        let args = OwnedArgs::from_slices(command.replace('K', key).split(' '));
        let reply = harness.run_args(&args).unwrap();
        let is_ordered = matches!(kind.as_str(), "zset" | "list" | "stream");
        lines.push(format!("{key} {kind} {}", show(&if is_ordered { reply } else { sorted(reply) })));
    }
    lines
}

/// Copies every value to Redis and from there to another keyspace of ours, by DUMP and RESTORE.
fn copy_through_dump(ours: &mut Harness, redis: &mut Redis, copy: &mut Harness, keys: &[String]) {
    for key in keys.iter().map(String::as_bytes) {
        let Some(Value::Bulk(payload)) = ours.run_args(&OwnedArgs::from_slices([b"dump", key])) else {
            continue;
        };
        let restore =
            [b"restore".to_vec(), b"carried".to_vec(), b"0".to_vec(), payload.to_vec(), b"replace".to_vec()];
        assert_eq!(show(&redis.run(&restore)), "OK");
        let Value::Bulk(payload) = redis.run(&[b"dump".to_vec(), b"carried".to_vec()]) else {
            panic!("no payload")
        };
        let restore = [b"restore", key, b"0", &payload, b"replace"];
        assert_eq!(show(&copy.run_args(&OwnedArgs::from_slices(restore)).unwrap()), "OK");
    }
}

/// Removes the parts of a reply that depend on the clock or on the internal representation.
fn without_times(words: &str, reply: Value) -> Value {
    let is_pending = words.starts_with("xpending");
    match reply {
        Value::Array(parts) if words.starts_with('x') => {
            let is_about = |at: usize| {
                let name = at.checked_sub(1).and_then(|at| parts.get(at));
                matches!(name, Some(Value::Bulk(name)) if matches!(&name[..], b"radix-tree-nodes" | b"idle" | b"seen-time"))
            };
            let elapsed = is_pending && parts.len() == 4 && matches!(parts[0], Value::Bulk(_));
            let told: Vec<bool> = (0..parts.len()).map(|at| is_about(at) || elapsed && at == 2).collect();
            let parts = parts.into_iter().zip(told).map(|(part, told)| match part {
                Value::Integer(number) if told || number >= 1_000_000 => Value::Integer(0),
                part => without_times(words, part),
            });
            Value::Array(parts.collect())
        }
        other => other,
    }
}

/// Runs the same commands on both, and periodically replays the effects and copies all values.
fn compare(templates: &[&str], keys: &[String], rounds: usize) {
    let Some(mut redis) = Redis::start() else {
        moim_base::require::skip("redis", "redis-server is not on PATH");
        return;
    };
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let rounds = number("MOIM_DIFFERENTIAL_ROUNDS").map_or(rounds, |rounds| rounds as usize);
    let mut random = fastrand::Rng::with_seed(number("MOIM_DIFFERENTIAL_SEED").unwrap_or(42));
    let (mut ours, mut copy) = (Harness::new(), Harness::new());
    let mut wrong = Vec::new();
    for round in 0..rounds {
        let template = templates[random.usize(..templates.len())];
        let (unordered, template) = match template.strip_prefix('~') {
            Some(rest) => (true, rest),
            None => (false, template),
        };
        let args = fill(template, &mut random);
        let words: Vec<_> = args.iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let words = words.join(" ");
        let reply = ours.run_args(&OwnedArgs::from_slices(&args)).unwrap_or(Value::Null);
        let wanted = redis.run(&args);
        let (reply, wanted) = match unordered {
            true => (sorted(reply), sorted(wanted)),
            false => (without_times(&words, reply), without_times(&words, wanted)),
        };
        let (reply, wanted) = (show(&reply), show(&wanted));
        if reply != wanted {
            wrong.push(format!("round {round}: {words}\n   ours {reply}\n  redis {wanted}"));
        }
        // One difference leads to others: the first few identify the problem.
        if wrong.len() == 8 {
            break;
        }
        if round % 500 == 499 && wrong.is_empty() {
            if !ours.fx.is_empty() {
                ours.replay(&mut copy);
            }
            assert_eq!(dump(&mut ours, keys), dump(&mut copy, keys), "after round {round}");
            copy_through_dump(&mut ours, &mut redis, &mut copy, keys);
            assert_eq!(
                dump(&mut ours, keys),
                dump(&mut copy, keys),
                "copied by DUMP and RESTORE after round {round}"
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn replies_match_redis() {
    compare(TEMPLATES, &["k0", "k1", "k2", "k3", "k4", "k5"].map(String::from), 4_000);
}

#[test]
fn stream_replies_match_redis() {
    compare(STREAMS, &["x0", "x1", "x2"].map(String::from), 2_000);
}

#[test]
fn geo_replies_match_redis() {
    compare(GEO, &["w0", "w1"].map(String::from), 1_500);
}

#[test]
fn edge_case_replies_match_redis() {
    let Some(mut redis) = Redis::start() else {
        moim_base::require::skip("redis", "redis-server is not on PATH");
        return;
    };
    let mut ours = Harness::new();
    let mut wrong = Vec::new();
    for line in include_str!("edges.txt").lines() {
        let args: Vec<Vec<u8>> = line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
        let reply = ours.run_args(&OwnedArgs::from_slices(&args)).map_or("(waits)".into(), |a| show(&a));
        let wanted = show(&redis.run(&args));
        if reply != wanted {
            wrong.push(format!("{line}\n   ours {reply}\n  redis {wanted}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// First key, last key and step of every command, as COMMAND shows them.
#[test]
fn command_key_positions_match_redis() {
    let Some(mut redis) = Redis::start() else {
        moim_base::require::skip("redis", "redis-server is not on PATH");
        return;
    };
    let mut ours = Harness::new();
    let mut wrong = Vec::new();
    for spec in super::all() {
        let args = [b"command".to_vec(), b"info".to_vec(), spec.name.as_bytes().to_vec()];
        let positions = |reply: Value| match reply {
            Value::Array(found) => match found.first() {
                Some(Value::Array(parts)) => Some([3, 4, 5].map(|at| show(&parts[at]))),
                _ => None,
            },
            _ => None,
        };
        let reply = positions(ours.run_args(&OwnedArgs::from_slices(&args)).unwrap());
        let wanted = positions(redis.run(&args));
        if wanted.is_some() && reply != wanted {
            wrong.push(format!("{}: ours {reply:?}, redis {wanted:?}", spec.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn script_replies_match_redis() {
    let Some(mut redis) = Redis::start() else {
        moim_base::require::skip("redis", "redis-server is not on PATH");
        return;
    };
    let mut ours = Harness::new();
    let mut wrong = Vec::new();
    for script in include_str!("scripts.txt").lines() {
        let command = ["eval", script, "3", "{k}1", "{k}2", "{k}3", "first", "second"];
        let reply = show(&ours.run_args(&OwnedArgs::from_slices(command)).unwrap());
        let wanted = show(&redis.run(&command.map(|word| word.as_bytes().to_vec())));
        if reply != wanted {
            wrong.push(format!("{script}\n   ours {reply}\n  redis {wanted}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
