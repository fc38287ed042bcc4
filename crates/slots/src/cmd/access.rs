//! Key access flags of commands, as in COMMAND GETKEYSANDFLAGS of Redis 7.0.

use moim_wire_resp::Args;

use super::Spec;
use super::flag::WRITE;

/// Access flags of the first key, the second key and so on (the last entry applies to all further keys), with the
/// commands that use them. Commands not listed read (`RO access`) or modify (`RW update`) existing keys.
#[rustfmt::skip]
const ACCESS: &[(&str, &str)] = &[
    ("OW insert", "msetnx setnx"),
    ("OW update", "mset psetex restore restore-asking setex"),
    ("OW update;RO access", "bitop geosearchstore sdiffstore sunionstore zdiffstore zinterstore zrangestore zunionstore"),
    ("RM delete", "del unlink"),
    ("RO", "exists hexists hlen hstrlen llen memory|usage object|encoding object|freq object|idletime object|refcount scard sismember strlen touch type watch xlen zcard"),
    ("RO access;OW update", "copy georadius georadiusbymember sort"),
    ("RO access;RO access", "sort_ro"),
    ("RW access", "pfcount pfdebug"),
    ("RW access delete", "blmpop blpop brpop bzmpop bzpopmax bzpopmin getdel lmpop lpop migrate rpop spop zmpop zpopmax zpopmin"),
    ("RW access delete;OW insert", "renamenx"),
    ("RW access delete;OW update", "rename"),
    ("RW access delete;RW insert", "blmove brpoplpush lmove rpoplpush smove"),
    ("RW access insert;RO access", "pfmerge"),
    ("RW access update", "decr decrby eval evalsha fcall getex getset hincrby hincrbyfloat incr incrby incrbyfloat move setbit zincrby"),
    ("RW delete", "hdel lrem ltrim srem xautoclaim xdel xgroup|delconsumer xgroup|destroy xtrim zrem zremrangebylex zremrangebyrank zremrangebyscore"),
    ("RW insert", "append hsetnx linsert lpush lpushx pfadd rpush rpushx sadd xgroup|create xgroup|createconsumer"),
    ("RW update;RO access", "sinterstore"),
];

/// The access flags of the command's key with this index.
pub(super) fn words(spec: &Spec, args: &Args<'_>, key: usize) -> Vec<&'static str> {
    let has = |word: &str| args.iter().skip(2).any(|arg| arg.eq_ignore_ascii_case(word.as_bytes()));
    let access = match spec.name {
        "set" if has("GET") => "RW access update",
        "set" => "OW update",
        "bitfield" if has("SET") || has("INCRBY") => "RW access update",
        "bitfield" => "RO access",
        name => {
            let knows = |(_, names): &&(&str, &str)| names.split(' ').any(|known| known == name);
            let default = if spec.has(WRITE) { "RW update" } else { "RO access" };
            ACCESS.iter().find(knows).map_or(default, |(access, _)| access)
        }
    };
    let all: Vec<&str> = access.split(';').collect();
    all[key.min(all.len() - 1)].split(' ').collect()
}
