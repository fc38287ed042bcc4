//! The same random commands to our commands and to a real redis-server, answers compared; and what was recorded,
//! replayed on an empty keyspace, gives the same values.
//!
//! Skipped, with a word about it, where there is no `redis-server`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use bytes::BytesMut;
use moim_wire_resp::{OwnedArgs, ReplyDecoder, Value, command};

use super::trial::{Trial, show};

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
            if let Some(answer) = self.decoder.decode(&mut self.buffer).unwrap() {
                return answer;
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

/// Words of a template: `K` a key, `Z` a key of a sorted set with equal scores, `H` one of a HyperLogLog, `F` a field or member, `V` a value, `I` an integer, `N` a small index, `S` a score,
/// `B` a score bound, `L` a bound of members, `C` a small count; `a|b` one of several; `?x` perhaps `x`; a trailing `*`
/// repeats the words since the last `(`.
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
        other => other.to_string(),
    }
    .into_bytes()
}

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

fn sorted(answer: Value) -> Value {
    match answer {
        Value::Array(parts) => {
            let mut parts: Vec<Value> = parts.into_iter().map(sorted).collect();
            parts.sort_by_key(show);
            Value::Array(parts)
        }
        other => other,
    }
}

/// Everything in the keyspace, in words.
fn dump(trial: &mut Trial) -> Vec<String> {
    let mut lines = Vec::new();
    for key in (0..6).map(|n| format!("k{n}")) {
        let kind = trial.run(&format!("type {key}"));
        let command = match kind.as_str() {
            "string" => "get K",
            "list" => "lrange K 0 -1",
            "hash" => "hgetall K",
            "set" => "smembers K",
            "zset" => "zrange K 0 -1 withscores",
            _ => "exists K",
        };
        let args = OwnedArgs::from_slices(command.replace('K', &key).split(' '));
        let answer = trial.run_args(&args).unwrap();
        lines.push(format!(
            "{key} {kind} {}",
            show(&if kind == "zset" || kind == "list" { answer } else { sorted(answer) })
        ));
    }
    lines
}

/// Takes every value from us to Redis and from there to another of us, by DUMP and RESTORE.
fn carry_over(ours: &mut Trial, redis: &mut Redis, copy: &mut Trial) {
    for key in (0..6).map(|n| format!("k{n}").into_bytes()) {
        let Some(Value::Bulk(payload)) = ours.run_args(&OwnedArgs::from_slices([b"dump", &key[..]])) else {
            continue;
        };
        let restore =
            [b"restore".to_vec(), b"carried".to_vec(), b"0".to_vec(), payload.to_vec(), b"replace".to_vec()];
        assert_eq!(show(&redis.run(&restore)), "OK");
        let Value::Bulk(payload) = redis.run(&[b"dump".to_vec(), b"carried".to_vec()]) else {
            panic!("no payload")
        };
        let restore = [b"restore", &key[..], b"0", &payload, b"replace"];
        assert_eq!(show(&copy.run_args(&OwnedArgs::from_slices(restore)).unwrap()), "OK");
    }
}

#[test]
fn answers_are_those_of_redis() {
    let Some(mut redis) = Redis::start() else {
        eprintln!("skipped: no redis-server here");
        return;
    };
    let rounds = std::env::var("MOIM_DIFFERENTIAL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(4_000);
    let seed = std::env::var("MOIM_DIFFERENTIAL_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(42);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut ours, mut copy) = (Trial::new(), Trial::new());
    for round in 0..rounds {
        let template = TEMPLATES[random.usize(..TEMPLATES.len())];
        let (unordered, template) = match template.strip_prefix('~') {
            Some(rest) => (true, rest),
            None => (false, template),
        };
        let args = fill(template, &mut random);
        let words: Vec<_> = args.iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        let words = words.join(" ");
        let answer = ours.run_args(&OwnedArgs::from_slices(&args)).unwrap_or(Value::Null);
        let wanted = redis.run(&args);
        let (answer, wanted) = match unordered {
            true => (sorted(answer), sorted(wanted)),
            false => (answer, wanted),
        };
        assert_eq!(show(&answer), show(&wanted), "round {round}: {words}");
        if round % 500 == 499 {
            if !ours.fx.is_empty() {
                ours.replay(&mut copy);
            }
            assert_eq!(dump(&mut ours), dump(&mut copy), "after round {round}");
            carry_over(&mut ours, &mut redis, &mut copy);
            assert_eq!(dump(&mut ours), dump(&mut copy), "carried over after round {round}");
        }
    }
}

#[test]
fn scripts_answer_as_in_redis() {
    let Some(mut redis) = Redis::start() else {
        eprintln!("skipped: no redis-server here");
        return;
    };
    let mut ours = Trial::new();
    let mut wrong = Vec::new();
    for script in include_str!("scripts.txt").lines() {
        let command = ["eval", script, "3", "{k}1", "{k}2", "{k}3", "first", "second"];
        let answer = show(&ours.run_args(&OwnedArgs::from_slices(command)).unwrap());
        let wanted = show(&redis.run(&command.map(|word| word.as_bytes().to_vec())));
        if answer != wanted {
            wrong.push(format!("{script}\n   ours {answer}\n  redis {wanted}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
