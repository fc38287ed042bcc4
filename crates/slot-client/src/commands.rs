//! The typed commands: one line each, for the client and for pipelines.
//!
//! `=> T` leaves the type of the answer to the caller; others have the one type that makes sense.

use bytes::Bytes;

use crate::client::Client;
use crate::command::{Arg, Cmd, cmd};
use crate::convert::{FromValue, Scored};
use crate::error::Error;
use crate::pipeline::Pipeline;

macro_rules! commands {
    (
        any { $($(#[$any_doc:meta])* $any:ident($($any_arg:ident),*) = $any_text:literal;)* }
        fixed { $($(#[$doc:meta])* $name:ident($($arg:ident),*) -> $type:ty = $text:literal;)* }
    ) => {
        /// Commands whose answer becomes the type the caller asks for.
        impl Client {
            $(
                $(#[$any_doc])*
                pub async fn $any<T: FromValue>(&self, $($any_arg: impl Arg),*) -> Result<T, Error> {
                    self.run(cmd($any_text)$(.arg($any_arg))*).await
                }
            )*
        }

        /// Commands whose answer has one type.
        impl Client {
            $(
                $(#[$doc])*
                pub async fn $name(&self, $($arg: impl Arg),*) -> Result<$type, Error> {
                    self.run(cmd($text)$(.arg($arg))*).await
                }
            )*
        }

        /// The same commands; their answers are what [`Pipeline::run`] returns.
        impl Pipeline {
            $(
                $(#[$any_doc])*
                pub fn $any(&mut self, $($any_arg: impl Arg),*) -> &mut Self {
                    self.add(cmd($any_text)$(.arg($any_arg))*)
                }
            )*
            $(
                $(#[$doc])*
                pub fn $name(&mut self, $($arg: impl Arg),*) -> &mut Self {
                    self.add(cmd($text)$(.arg($arg))*)
                }
            )*
        }
    };
}

commands! {
    any {
        /// The value of a key: `Option<String>`, `Option<Bytes>`.
        get(key) = "GET";
        /// The value of a key, which is deleted.
        getdel(key) = "GETDEL";
        /// The value of a key, whose expiry is changed: `("PX", 100)`, `"PERSIST"`.
        getex(key, expiry) = "GETEX";
        /// Part of a value.
        getrange(key, start, end) = "GETRANGE";
        /// The values of keys in any slots, in order: `Vec<Option<String>>`.
        mget(keys) = "MGET";
        /// Sets a key with options; see [`SetOptions`]. `bool`, or with GET the value before.
        set_with(key, value, options) = "SET";
        /// A field of a hash: `Option<String>`.
        hget(key, field) = "HGET";
        /// Fields of a hash: `Vec<Option<String>>`.
        hmget(key, fields) = "HMGET";
        /// A hash: `HashMap<String, String>`.
        hgetall(key) = "HGETALL";
        /// The values of a hash.
        hvals(key) = "HVALS";
        /// Random fields of a hash.
        hrandfield(key, count) = "HRANDFIELD";
        /// An element of a list.
        lindex(key, index) = "LINDEX";
        /// Elements of a list: `Vec<String>`.
        lrange(key, start, stop) = "LRANGE";
        /// The first element of a list, or with a count several.
        lpop(key, count) = "LPOP";
        /// The last element of a list, or with a count several.
        rpop(key, count) = "RPOP";
        /// The place of an element: `Option<u64>`.
        lpos(key, element) = "LPOS";
        /// Moves an element from one list to another: `("LEFT", "RIGHT")`.
        lmove(from, to, ends) = "LMOVE";
        /// The members of a set: `Vec<String>`.
        smembers(key) = "SMEMBERS";
        /// Random members of a set, which are removed.
        spop(key, count) = "SPOP";
        /// Random members of a set.
        srandmember(key, count) = "SRANDMEMBER";
        /// The members all sets have.
        sinter(keys) = "SINTER";
        /// The members any set has.
        sunion(keys) = "SUNION";
        /// The members only the first set has.
        sdiff(keys) = "SDIFF";
        /// Members of a sorted set by rank; options such as `"REV"` go last.
        zrange(key, start, stop, options) = "ZRANGE";
        /// Members of a sorted set by score.
        zrangebyscore(key, min, max, options) = "ZRANGEBYSCORE";
        /// The score of a member: `Option<f64>`.
        zscore(key, member) = "ZSCORE";
        /// The rank of a member: `Option<u64>`.
        zrank(key, member) = "ZRANK";
        /// The rank of a member from the end.
        zrevrank(key, member) = "ZREVRANK";
        /// The scores of members: `Vec<Option<f64>>`.
        zmscore(key, members) = "ZMSCORE";
        /// Waits for an element of one of the lists, for seconds (0: for ever): `Option<(String, String)>`.
        blpop(keys, seconds) = "BLPOP";
        /// The same from the other end.
        brpop(keys, seconds) = "BRPOP";
        /// The keys that match; walks over all keys of all nodes.
        keys(pattern) = "KEYS";
        /// What a node tells about itself.
        info(section) = "INFO";
        /// The serialized value of a key.
        dump(key) = "DUMP";
    }
    fixed {
        /// Sets a key.
        set(key, value) -> () = "SET";
        /// Sets keys in any slots: a list of pairs. Not as a whole, when there are several slots.
        mset(pairs) -> () = "MSET";
        /// Sets a key that does not exist.
        setnx(key, value) -> bool = "SETNX";
        /// Sets a key for some seconds.
        setex(key, seconds, value) -> () = "SETEX";
        /// Sets a key for some milliseconds.
        psetex(key, millis, value) -> () = "PSETEX";
        /// Appends to a value; its length.
        append(key, value) -> u64 = "APPEND";
        /// The length of a value.
        strlen(key) -> u64 = "STRLEN";
        /// Overwrites part of a value; its length.
        setrange(key, offset, value) -> u64 = "SETRANGE";
        /// Adds 1.
        incr(key) -> i64 = "INCR";
        /// Adds.
        incrby(key, by) -> i64 = "INCRBY";
        /// Adds a fraction.
        incrbyfloat(key, by) -> f64 = "INCRBYFLOAT";
        /// Subtracts 1.
        decr(key) -> i64 = "DECR";
        /// Subtracts.
        decrby(key, by) -> i64 = "DECRBY";
        /// Deletes keys in any slots; how many there were.
        del(keys) -> u64 = "DEL";
        /// Deletes keys in any slots, the memory later.
        unlink(keys) -> u64 = "UNLINK";
        /// How many of the keys exist.
        exists(keys) -> u64 = "EXISTS";
        /// Touches keys; how many exist.
        touch(keys) -> u64 = "TOUCH";
        /// The type of a key's value; `none` without one.
        key_type(key) -> String = "TYPE";
        /// Renames a key within its slot.
        rename(key, to) -> () = "RENAME";
        /// Renames a key if the other does not exist.
        renamenx(key, to) -> bool = "RENAMENX";
        /// Copies a key within its slot.
        copy(key, to) -> bool = "COPY";
        /// Lets a key expire after seconds.
        expire(key, seconds) -> bool = "EXPIRE";
        /// Lets a key expire after milliseconds.
        pexpire(key, millis) -> bool = "PEXPIRE";
        /// Lets a key expire at a second of the epoch.
        expireat(key, at) -> bool = "EXPIREAT";
        /// Lets a key expire at a millisecond of the epoch.
        pexpireat(key, at) -> bool = "PEXPIREAT";
        /// Takes a key's expiry away.
        persist(key) -> bool = "PERSIST";
        /// Seconds until a key expires; -1 never, -2 there is no key.
        ttl(key) -> i64 = "TTL";
        /// Milliseconds until a key expires.
        pttl(key) -> i64 = "PTTL";
        /// Sets fields of a hash: a list of pairs; how many are new.
        hset(key, pairs) -> u64 = "HSET";
        /// Sets a field that does not exist.
        hsetnx(key, field, value) -> bool = "HSETNX";
        /// Deletes fields.
        hdel(key, fields) -> u64 = "HDEL";
        /// Whether a field exists.
        hexists(key, field) -> bool = "HEXISTS";
        /// Adds to a field.
        hincrby(key, field, by) -> i64 = "HINCRBY";
        /// Adds a fraction to a field.
        hincrbyfloat(key, field, by) -> f64 = "HINCRBYFLOAT";
        /// The fields of a hash.
        hkeys(key) -> Vec<Bytes> = "HKEYS";
        /// How many fields a hash has.
        hlen(key) -> u64 = "HLEN";
        /// The length of a field.
        hstrlen(key, field) -> u64 = "HSTRLEN";
        /// Puts elements before a list; its length.
        lpush(key, elements) -> u64 = "LPUSH";
        /// Puts elements behind a list; its length.
        rpush(key, elements) -> u64 = "RPUSH";
        /// Puts elements before a list that exists.
        lpushx(key, elements) -> u64 = "LPUSHX";
        /// Puts elements behind a list that exists.
        rpushx(key, elements) -> u64 = "RPUSHX";
        /// The length of a list.
        llen(key) -> u64 = "LLEN";
        /// Removes elements of a list.
        lrem(key, count, element) -> u64 = "LREM";
        /// Replaces an element.
        lset(key, index, element) -> () = "LSET";
        /// Cuts a list.
        ltrim(key, start, stop) -> () = "LTRIM";
        /// Adds members; how many are new.
        sadd(key, members) -> u64 = "SADD";
        /// Removes members.
        srem(key, members) -> u64 = "SREM";
        /// How many members a set has.
        scard(key) -> u64 = "SCARD";
        /// Whether a member is in a set.
        sismember(key, member) -> bool = "SISMEMBER";
        /// Which members are in a set.
        smismember(key, members) -> Vec<bool> = "SMISMEMBER";
        /// Moves a member.
        smove(from, to, member) -> bool = "SMOVE";
        /// Adds members with scores: options first if any, then pairs of score and member.
        zadd(key, pairs) -> u64 = "ZADD";
        /// Adds to a score.
        zincrby(key, by, member) -> f64 = "ZINCRBY";
        /// Removes members.
        zrem(key, members) -> u64 = "ZREM";
        /// How many members a sorted set has.
        zcard(key) -> u64 = "ZCARD";
        /// How many members have a score in a range.
        zcount(key, min, max) -> u64 = "ZCOUNT";
        /// Removes members by score.
        zremrangebyscore(key, min, max) -> u64 = "ZREMRANGEBYSCORE";
        /// Removes members by rank.
        zremrangebyrank(key, start, stop) -> u64 = "ZREMRANGEBYRANK";
        /// Takes the members with the lowest scores.
        zpopmin(key, count) -> Scored = "ZPOPMIN";
        /// Takes the members with the highest scores.
        zpopmax(key, count) -> Scored = "ZPOPMAX";
        /// Publishes to everybody; how many heard it at that node.
        publish(channel, message) -> u64 = "PUBLISH";
        /// Publishes within the channel's shard.
        spublish(channel, message) -> u64 = "SPUBLISH";
        /// How many keys all primaries have.
        dbsize() -> u64 = "DBSIZE";
        /// Deletes everything.
        flushall() -> () = "FLUSHALL";
        /// Whether some node answers.
        ping() -> String = "PING";
        /// A node's time: seconds and microseconds.
        time() -> (u64, u64) = "TIME";
        /// Waits until replicas have what this connection wrote; how many.
        wait(replicas, millis) -> u64 = "WAIT";
    }
}

/// The options of SET.
///
/// ```
/// use moim_slot_client::{SetOptions, cmd};
/// let command = cmd("SET").arg(("k", "v")).arg(SetOptions::new().px(1500).nx());
/// assert_eq!(format!("{command:?}"), r#"["SET", "k", "v", "NX", "PX", "1500"]"#);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SetOptions {
    when: Option<&'static str>,
    get: bool,
    expiry: Option<(&'static str, u64)>,
    keep: bool,
}

impl SetOptions {
    /// No options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only if the key does not exist.
    #[must_use]
    pub fn nx(mut self) -> Self {
        self.when = Some("NX");
        self
    }

    /// Only if the key exists.
    #[must_use]
    pub fn xx(mut self) -> Self {
        self.when = Some("XX");
        self
    }

    /// Return the value before.
    #[must_use]
    pub fn get(mut self) -> Self {
        self.get = true;
        self
    }

    /// Expire after seconds.
    #[must_use]
    pub fn ex(mut self, seconds: u64) -> Self {
        self.expiry = Some(("EX", seconds));
        self
    }

    /// Expire after milliseconds.
    #[must_use]
    pub fn px(mut self, millis: u64) -> Self {
        self.expiry = Some(("PX", millis));
        self
    }

    /// Expire at a millisecond of the epoch.
    #[must_use]
    pub fn pxat(mut self, at: u64) -> Self {
        self.expiry = Some(("PXAT", at));
        self
    }

    /// Keep the expiry the key has.
    #[must_use]
    pub fn keep_ttl(mut self) -> Self {
        self.keep = true;
        self
    }
}

impl Arg for SetOptions {
    fn write_to(&self, cmd: &mut Cmd) {
        self.when.write_to(cmd);
        self.get.then_some("GET").write_to(cmd);
        self.expiry.write_to(cmd);
        self.keep.then_some("KEEPTTL").write_to(cmd);
    }
}
