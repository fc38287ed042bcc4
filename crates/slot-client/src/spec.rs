//! Routing information of commands: key positions, read-only, idempotent, and fan-out to several nodes.
//! Commands that are not listed have their key first, write, and are not retried.

use crate::command::Cmd;

/// Routing information of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) keys: Keys,
    /// Read-only: a replica may serve it.
    pub(crate) reads: bool,
    /// A retry is not observable. Writes never qualify, not even idempotent ones: another client may have
    /// written in between.
    pub(crate) repeatable: bool,
    pub(crate) spread: Spread,
    /// May block in the server: it needs an exclusive connection.
    pub(crate) blocks: Block,
}

impl Default for Spec {
    fn default() -> Self {
        Self { keys: Keys::At(1), reads: false, repeatable: false, spread: Spread::No, blocks: Block::No }
    }
}

/// Key positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// No keys: any node.
    None,
    /// The first key is this argument.
    At(u8),
    /// Argument `count` holds the number of keys; the first key is `first`.
    Counted { count: u8, first: u8 },
    /// After the word STREAMS.
    Streams,
}

/// Target nodes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// The owner of one slot.
    No,
    /// Its keys may be in many slots; it is split. `step` is 2 when values alternate with the keys.
    Keys { step: usize, join: Join },
    /// All primaries.
    Primaries(Join),
    /// All nodes.
    AllNodes(Join),
}

/// How the replies of several nodes are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// Values in the order of the keys.
    InOrder,
    /// The sum.
    Sum,
    /// Concatenation.
    Concat,
    /// The first; all must have succeeded.
    Same,
    /// Element by element: true when true on all nodes.
    All,
}

/// Block time argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    /// Does not block.
    No,
    /// Seconds, in the last argument.
    Last,
    /// Seconds, in the first argument.
    First,
    /// Milliseconds, after the word BLOCK; does not block without it.
    Word,
    /// Milliseconds, in the last argument (WAIT).
    LastMillis,
}

impl Spec {
    pub(crate) fn of(cmd: &Cmd) -> Self {
        let mut args = cmd.args();
        let name = args.next().unwrap_or_default();
        let mut upper = [0; 20];
        let Some(upper) = upper.get_mut(..name.len()) else { return Self::default() };
        upper.copy_from_slice(name);
        upper.make_ascii_uppercase();
        let second = args.clone().next().unwrap_or_default();
        match &*upper {
            b"SCRIPT" if is(second, b"LOAD") => all_nodes(Join::Same, true),
            b"SCRIPT" if is(second, b"FLUSH") => all_nodes(Join::Same, false),
            b"SCRIPT" if is(second, b"EXISTS") => primaries(Join::All, true),
            b"FUNCTION"
                if [&b"LOAD"[..], b"DELETE", b"FLUSH", b"RESTORE"].iter().any(|word| is(second, word)) =>
            {
                primaries(Join::Same, false)
            }
            b"XREAD" | b"XREADGROUP" => {
                let waits =
                    args.clone().take_while(|word| !is(word, b"STREAMS")).any(|word| is(word, b"BLOCK"));
                Self {
                    keys: Keys::Streams,
                    reads: &*upper == b"XREAD",
                    repeatable: &*upper == b"XREAD",
                    blocks: if waits { Block::Word } else { Block::No },
                    ..Self::default()
                }
            }
            name => Self::by_name(name),
        }
    }

    fn by_name(name: &[u8]) -> Self {
        match name {
            // Many keys, any slots.
            b"MGET" => split(1, Join::InOrder, true),
            b"EXISTS" | b"TOUCH" => split(1, Join::Sum, true),
            b"DEL" | b"UNLINK" => split(1, Join::Sum, false),
            b"MSET" => split(2, Join::Same, false),
            // All primaries or all nodes.
            b"DBSIZE" => primaries(Join::Sum, true),
            b"KEYS" => primaries(Join::Concat, true),
            b"FLUSHALL" | b"FLUSHDB" => primaries(Join::Same, false),
            // Any node.
            b"PING" | b"ECHO" | b"INFO" | b"TIME" | b"COMMAND" | b"LASTSAVE" | b"ROLE" | b"PUBSUB"
            | b"LOLWUT" | b"SCAN" | b"RANDOMKEY" | b"READONLY" | b"READWRITE" => {
                Self { keys: Keys::None, repeatable: true, ..Self::default() }
            }
            b"PUBLISH" | b"MULTI" | b"EXEC" | b"DISCARD" | b"UNWATCH" | b"HELLO" | b"AUTH" | b"SELECT"
            | b"RESET" | b"ASKING" | b"CLUSTER" | b"CONFIG" | b"CLIENT" | b"ACL" | b"LATENCY"
            | b"SLOWLOG" | b"DEBUG" | b"FUNCTION" | b"MODULE" | b"SCRIPT" => {
                Self { keys: Keys::None, ..Self::default() }
            }
            b"WAIT" => {
                Self { keys: Keys::None, blocks: Block::LastMillis, repeatable: true, ..Self::default() }
            }
            // The key is not the first argument.
            b"OBJECT" | b"MEMORY" | b"XINFO" => Self { keys: Keys::At(2), ..read() },
            b"XGROUP" | b"BITOP" => Self { keys: Keys::At(2), ..Self::default() },
            b"EVAL" | b"EVALSHA" | b"FCALL" => {
                Self { keys: Keys::Counted { count: 2, first: 3 }, ..Self::default() }
            }
            b"EVAL_RO" | b"EVALSHA_RO" | b"FCALL_RO" => {
                Self { keys: Keys::Counted { count: 2, first: 3 }, ..read() }
            }
            b"ZUNION" | b"ZINTER" | b"ZDIFF" | b"SINTERCARD" | b"ZINTERCARD" => {
                Self { keys: Keys::Counted { count: 1, first: 2 }, ..read() }
            }
            b"LMPOP" | b"ZMPOP" => Self { keys: Keys::Counted { count: 1, first: 2 }, ..Self::default() },
            b"BLMPOP" | b"BZMPOP" => {
                Self { keys: Keys::Counted { count: 2, first: 3 }, blocks: Block::First, ..Self::default() }
            }
            b"BLPOP" | b"BRPOP" | b"BZPOPMIN" | b"BZPOPMAX" | b"BLMOVE" | b"BRPOPLPUSH" => {
                Self { blocks: Block::Last, ..Self::default() }
            }
            // Reads.
            b"GET"
            | b"STRLEN"
            | b"GETRANGE"
            | b"SUBSTR"
            | b"GETBIT"
            | b"BITCOUNT"
            | b"BITPOS"
            | b"BITFIELD_RO"
            | b"TTL"
            | b"PTTL"
            | b"EXPIRETIME"
            | b"PEXPIRETIME"
            | b"TYPE"
            | b"DUMP"
            | b"HGET"
            | b"HMGET"
            | b"HGETALL"
            | b"HKEYS"
            | b"HVALS"
            | b"HLEN"
            | b"HEXISTS"
            | b"HSTRLEN"
            | b"HRANDFIELD"
            | b"HSCAN"
            | b"LLEN"
            | b"LRANGE"
            | b"LINDEX"
            | b"LPOS"
            | b"SCARD"
            | b"SISMEMBER"
            | b"SMISMEMBER"
            | b"SMEMBERS"
            | b"SRANDMEMBER"
            | b"SSCAN"
            | b"SINTER"
            | b"SUNION"
            | b"SDIFF"
            | b"ZCARD"
            | b"ZSCORE"
            | b"ZMSCORE"
            | b"ZRANGE"
            | b"ZRANGEBYSCORE"
            | b"ZREVRANGE"
            | b"ZREVRANGEBYSCORE"
            | b"ZRANGEBYLEX"
            | b"ZREVRANGEBYLEX"
            | b"ZRANK"
            | b"ZREVRANK"
            | b"ZCOUNT"
            | b"ZLEXCOUNT"
            | b"ZSCAN"
            | b"ZRANDMEMBER"
            | b"SORT_RO"
            | b"LCS"
            | b"XLEN"
            | b"XRANGE"
            | b"XREVRANGE"
            | b"XPENDING"
            | b"GEOPOS"
            | b"GEODIST"
            | b"GEOHASH"
            | b"GEOSEARCH"
            | b"GEORADIUS_RO"
            | b"GEORADIUSBYMEMBER_RO"
            | b"PFCOUNT" => read(),
            _ => Self::default(),
        }
    }
}

fn is(word: &[u8], other: &[u8]) -> bool {
    word.eq_ignore_ascii_case(other)
}

fn read() -> Spec {
    Spec { reads: true, repeatable: true, ..Spec::default() }
}

fn split(step: usize, join: Join, reads: bool) -> Spec {
    Spec { reads, repeatable: reads, spread: Spread::Keys { step, join }, ..Spec::default() }
}

fn primaries(join: Join, reads: bool) -> Spec {
    Spec { keys: Keys::None, reads, repeatable: reads, spread: Spread::Primaries(join), ..Spec::default() }
}

fn all_nodes(join: Join, repeatable: bool) -> Spec {
    Spec { keys: Keys::None, repeatable, spread: Spread::AllNodes(join), ..Spec::default() }
}

#[cfg(test)]
mod tests {
    use crate::command::cmd;

    use super::*;

    #[test]
    fn non_idempotent_commands_are_not_retried() {
        let repeatable = |cmd: Cmd| Spec::of(&cmd).repeatable;
        for once in [
            cmd("INCR").arg("k"),
            cmd("set").arg(("k", "v", "nx")),
            cmd("ZADD").arg(("k", "INCR")).arg((1, "m")),
            cmd("LPUSH").arg(("k", "v")),
            cmd("EVAL").arg(("x", 0)),
            cmd("SOMETHINGNEW").arg("k"),
            // Idempotent, but another client may have set the key in between.
            cmd("SET").arg(("k", "v")),
            cmd("DEL").arg("k"),
            cmd("MSET").arg(("k", "v")),
            cmd("HSET").arg(("k", "f", "v")),
            cmd("EXPIRE").arg(("k", 10)),
            cmd("FLUSHALL"),
            cmd("SCRIPT").arg("FLUSH"),
            cmd("CONFIG").arg(("SET", "maxmemory", 0)),
            cmd("ANAMEMUCHLONGERTHANANYCOMMAND").arg("k"),
        ] {
            assert!(!repeatable(once.clone()), "{once:?}");
        }
        for again in [
            cmd("GET").arg("k"),
            cmd("MGET").arg(("k", "l")),
            cmd("XREAD").arg(("STREAMS", "k", 0)),
            cmd("KEYS").arg("*"),
            cmd("SCRIPT").arg(("LOAD", "return 1")),
            cmd("PING"),
        ] {
            assert!(repeatable(again.clone()), "{again:?}");
        }
    }

    #[test]
    fn blocking_commands_are_recognized() {
        let blocks = |cmd: Cmd| Spec::of(&cmd).blocks;
        assert_eq!(blocks(cmd("BLPOP").arg(("k", 0))), Block::Last);
        assert_eq!(blocks(cmd("XREAD").arg(("BLOCK", 5)).arg(("STREAMS", "k", "$"))), Block::Word);
        assert_eq!(blocks(cmd("XREAD").arg(("STREAMS", "BLOCK", "$"))), Block::No);
    }
}
