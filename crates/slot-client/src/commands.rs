//! The typed commands: one line each, for the client and for pipelines.
//!
//! `=> T` leaves the reply type to the caller; the others have a fixed type.

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
        /// Commands whose reply is converted to a type of the caller's choice.
        impl Client {
            $(
                $(#[$any_doc])*
                pub async fn $any<T: FromValue>(&self, $($any_arg: impl Arg),*) -> Result<T, Error> {
                    self.run(cmd($any_text)$(.arg($any_arg))*).await
                }
            )*
        }

        /// Commands whose reply has one type.
        impl Client {
            $(
                $(#[$doc])*
                pub async fn $name(&self, $($arg: impl Arg),*) -> Result<$type, Error> {
                    self.run(cmd($text)$(.arg($arg))*).await
                }
            )*
        }

        /// The same commands; [`Pipeline::run`] returns their replies.
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
        /// GETDEL: returns the value and deletes the key.
        getdel(key) = "GETDEL";
        /// The value of a key, and changes its expiry: `("PX", 100)`, `"PERSIST"`.
        getex(key, expiry) = "GETEX";
        /// Part of a value.
        getrange(key, start, end) = "GETRANGE";
        /// The values of keys in any slots, in order: `Vec<Option<String>>`.
        mget(keys) = "MGET";
        /// Sets a key with options; see [`SetOptions`]. `bool`, or with GET the previous value.
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
        /// The index of an element: `Option<u64>`.
        lpos(key, element) = "LPOS";
        /// Moves an element from one list to another: `("LEFT", "RIGHT")`.
        lmove(from, to, ends) = "LMOVE";
        /// The members of a set: `Vec<String>`.
        smembers(key) = "SMEMBERS";
        /// Removes and returns random members of a set.
        spop(key, count) = "SPOP";
        /// Random members of a set.
        srandmember(key, count) = "SRANDMEMBER";
        /// The intersection of sets.
        sinter(keys) = "SINTER";
        /// The union of sets.
        sunion(keys) = "SUNION";
        /// The difference of the first set and the others.
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
        /// Blocks until one of the lists has an element, up to a number of seconds (0: no limit):
        /// `Option<(String, String)>`.
        blpop(keys, seconds) = "BLPOP";
        /// BLPOP from the tail.
        brpop(keys, seconds) = "BRPOP";
        /// The keys that match the pattern, from all primaries.
        keys(pattern) = "KEYS";
        /// INFO of a node.
        info(section) = "INFO";
        /// The serialized value of a key.
        dump(key) = "DUMP";
    }
    fixed {
        /// Sets a key.
        set(key, value) -> () = "SET";
        /// Sets keys in any slots: a list of pairs. Not atomic across several slots.
        mset(pairs) -> () = "MSET";
        /// Sets a key if it does not exist.
        setnx(key, value) -> bool = "SETNX";
        /// Sets a key with an expiry in seconds.
        setex(key, seconds, value) -> () = "SETEX";
        /// Sets a key with an expiry in milliseconds.
        psetex(key, millis, value) -> () = "PSETEX";
        /// Appends to a value; returns its length.
        append(key, value) -> u64 = "APPEND";
        /// The length of a value.
        strlen(key) -> u64 = "STRLEN";
        /// Overwrites part of a value; returns its length.
        setrange(key, offset, value) -> u64 = "SETRANGE";
        /// Increments by 1.
        incr(key) -> i64 = "INCR";
        /// Increments by `by`.
        incrby(key, by) -> i64 = "INCRBY";
        /// Increments by a floating point number.
        incrbyfloat(key, by) -> f64 = "INCRBYFLOAT";
        /// Decrements by 1.
        decr(key) -> i64 = "DECR";
        /// Decrements by `by`.
        decrby(key, by) -> i64 = "DECRBY";
        /// Deletes keys in any slots; returns the number of deleted keys.
        del(keys) -> u64 = "DEL";
        /// Deletes keys in any slots; the server frees the memory asynchronously.
        unlink(keys) -> u64 = "UNLINK";
        /// How many of the keys exist.
        exists(keys) -> u64 = "EXISTS";
        /// Touches keys; returns the number of existing keys.
        touch(keys) -> u64 = "TOUCH";
        /// The type of a key's value; `none` for a missing key.
        key_type(key) -> String = "TYPE";
        /// Renames a key within its slot.
        rename(key, to) -> () = "RENAME";
        /// Renames a key if the target does not exist.
        renamenx(key, to) -> bool = "RENAMENX";
        /// Copies a key within its slot.
        copy(key, to) -> bool = "COPY";
        /// Sets the expiry in seconds.
        expire(key, seconds) -> bool = "EXPIRE";
        /// Sets the expiry in milliseconds.
        pexpire(key, millis) -> bool = "PEXPIRE";
        /// Sets the expiry as Unix time in seconds.
        expireat(key, at) -> bool = "EXPIREAT";
        /// Sets the expiry as Unix time in milliseconds.
        pexpireat(key, at) -> bool = "PEXPIREAT";
        /// Removes the expiry of a key.
        persist(key) -> bool = "PERSIST";
        /// TTL in seconds; -1 without expiry, -2 for a missing key.
        ttl(key) -> i64 = "TTL";
        /// TTL in milliseconds; -1 without expiry, -2 for a missing key.
        pttl(key) -> i64 = "PTTL";
        /// Sets fields of a hash: a list of pairs; returns the number of new fields.
        hset(key, pairs) -> u64 = "HSET";
        /// Sets a field if it does not exist.
        hsetnx(key, field, value) -> bool = "HSETNX";
        /// Deletes fields.
        hdel(key, fields) -> u64 = "HDEL";
        /// True if a field exists.
        hexists(key, field) -> bool = "HEXISTS";
        /// Increments a field.
        hincrby(key, field, by) -> i64 = "HINCRBY";
        /// Increments a field by a floating point number.
        hincrbyfloat(key, field, by) -> f64 = "HINCRBYFLOAT";
        /// The fields of a hash.
        hkeys(key) -> Vec<Bytes> = "HKEYS";
        /// Number of fields of a hash.
        hlen(key) -> u64 = "HLEN";
        /// The length of a field.
        hstrlen(key, field) -> u64 = "HSTRLEN";
        /// Prepends elements to a list; returns its length.
        lpush(key, elements) -> u64 = "LPUSH";
        /// Appends elements to a list; returns its length.
        rpush(key, elements) -> u64 = "RPUSH";
        /// Prepends elements to an existing list.
        lpushx(key, elements) -> u64 = "LPUSHX";
        /// Appends elements to an existing list.
        rpushx(key, elements) -> u64 = "RPUSHX";
        /// The length of a list.
        llen(key) -> u64 = "LLEN";
        /// Removes elements of a list.
        lrem(key, count, element) -> u64 = "LREM";
        /// Replaces an element.
        lset(key, index, element) -> () = "LSET";
        /// Trims a list.
        ltrim(key, start, stop) -> () = "LTRIM";
        /// Adds members; returns the number of new members.
        sadd(key, members) -> u64 = "SADD";
        /// Removes members.
        srem(key, members) -> u64 = "SREM";
        /// Number of members of a set.
        scard(key) -> u64 = "SCARD";
        /// True if a member is in a set.
        sismember(key, member) -> bool = "SISMEMBER";
        /// Membership of each member in a set.
        smismember(key, members) -> Vec<bool> = "SMISMEMBER";
        /// Moves a member.
        smove(from, to, member) -> bool = "SMOVE";
        /// Adds members with scores: options first if any, then pairs of score and member.
        zadd(key, pairs) -> u64 = "ZADD";
        /// Increments a score.
        zincrby(key, by, member) -> f64 = "ZINCRBY";
        /// Removes members.
        zrem(key, members) -> u64 = "ZREM";
        /// Number of members of a sorted set.
        zcard(key) -> u64 = "ZCARD";
        /// Number of members with a score in a range.
        zcount(key, min, max) -> u64 = "ZCOUNT";
        /// Removes members by score.
        zremrangebyscore(key, min, max) -> u64 = "ZREMRANGEBYSCORE";
        /// Removes members by rank.
        zremrangebyrank(key, start, stop) -> u64 = "ZREMRANGEBYRANK";
        /// Removes and returns the members with the lowest scores.
        zpopmin(key, count) -> Scored = "ZPOPMIN";
        /// Removes and returns the members with the highest scores.
        zpopmax(key, count) -> Scored = "ZPOPMAX";
        /// Publishes to all nodes; returns the number of receivers on that node.
        publish(channel, message) -> u64 = "PUBLISH";
        /// Publishes within the channel's shard.
        spublish(channel, message) -> u64 = "SPUBLISH";
        /// Number of keys on all primaries.
        dbsize() -> u64 = "DBSIZE";
        /// Deletes all keys.
        flushall() -> () = "FLUSHALL";
        /// PING to any node.
        ping() -> String = "PING";
        /// A node's time: seconds and microseconds.
        time() -> (u64, u64) = "TIME";
        /// Waits until replicas have acknowledged the writes of this connection; returns their number.
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

    /// Return the previous value.
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

    /// Expire at a Unix time in milliseconds.
    #[must_use]
    pub fn pxat(mut self, at: u64) -> Self {
        self.expiry = Some(("PXAT", at));
        self
    }

    /// Keep the current expiry of the key.
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
