//! Clients of the store: registers, pairs of keys, counters and keys with a time to live. Every value is written
//! once, and no command is retried.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use moim_base::socket::Socket;
use moim_history::{Counters, Fate, Found, Op, Outcome, Recorder, Seen, Step};
use moim_slots::slot_of;
use moim_wire_resp::{ReplyDecoder, Value, command};

use super::time::{Expiries, RequestTimes};
use super::{Shared, StopFlag, locked};

const REGISTERS: usize = 4;
const PAIRS: usize = 2;
const COUNTERS: usize = 2;
/// Number of hash tags of keys with a time to live.
const TAGS: usize = 6;
/// Script that reads and writes a declared key.
const SWAP: &str = "local old = redis.call('GET', KEYS[1]) redis.call('SET', KEYS[1], ARGV[1]) return old";
/// Script that writes two undeclared keys.
const PUT_BOTH: &str = "redis.call('SET', ARGV[1], ARGV[3]) return redis.call('SET', ARGV[2], ARGV[3])";
const TTL_MS: std::ops::Range<u64> = 3_000..9_000;

/// The keys that clients use, one for each slot.
pub(super) fn keys(has_ttls: bool) -> impl Iterator<Item = String> {
    let registers = (0..REGISTERS).map(|number| format!("register-{number}"));
    let counters = (0..COUNTERS).map(|number| format!("counter-{number}"));
    let tags = (0..if has_ttls { TAGS } else { 0 }).map(|tag| format!("{{ttl-{tag}}}"));
    registers.chain(counters).chain(tags).chain((0..PAIRS).map(|pair| format!("{{pair-{pair}}}a")))
}

/// State shared by all clients, with their histories.
pub(super) struct ClientPool {
    shared: Arc<Shared>,
    host: usize,
    registers: Recorder,
    counters: Counters,
    pub(super) expiries: Mutex<Expiries>,
    has_ttls: bool,
    has_scripts: bool,
    stop: StopFlag,
    values: AtomicU64,
    pub(super) answered: AtomicU64,
    pub(super) unknown: AtomicU64,
    violations: Mutex<Vec<String>>,
}

/// Why a command has no reply.
enum RequestError {
    /// The command was rejected and had no effect.
    Rejected,
    /// The outcome is unknown.
    Unknown,
}

/// Location of a shard: host and shard number.
type ShardLocation = (usize, u16);

impl ClientPool {
    pub(super) fn new(shared: Arc<Shared>, host: usize, has_ttls: bool, has_scripts: bool) -> Arc<Self> {
        Arc::new(Self {
            shared,
            host,
            registers: Recorder::new(),
            counters: Counters::new(),
            expiries: Mutex::default(),
            has_ttls,
            has_scripts,
            stop: StopFlag::default(),
            values: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            violations: Mutex::default(),
        })
    }

    pub(super) fn stop(&self) {
        self.stop.stop();
    }

    pub(super) fn first_violation(&self) -> Option<String> {
        locked(&self.violations).first().cloned()
    }

    /// True if every node knows a primary for every slot.
    pub(super) fn is_every_slot_served(&self) -> bool {
        (0..self.shared.nodes).all(|host| {
            self.shared
                .node(host)
                .is_some_and(|node| node.service.shared().view.load().served() == moim_slots::SLOTS)
        })
    }

    /// Checks the histories of all clients.
    pub(super) fn check(&self) -> Result<(), String> {
        let history = self.registers.history();
        let unknown = history.entries.iter().filter(|entry| entry.fate == Fate::Unknown).count();
        self.unknown.fetch_add(unknown as u64, Ordering::Relaxed);
        moim_history::check(&history).map_err(|error| error.to_string())?;
        self.counters.check().map_err(|error| error.to_string())
    }

    /// Location of a key, according to a random node.
    fn locate(&self, key: &str) -> Option<ShardLocation> {
        let node = self.shared.node(fastrand::usize(..self.shared.nodes))?;
        let view = node.service.shared().view.load();
        let shard = view.owner(slot_of(key.as_bytes()))?;
        Some((host_named(&view.primary(shard)?.host)?, shard))
    }

    /// Sends commands to a node on one connection. Returns the first error reply, or the last reply.
    async fn request(&self, location: ShardLocation, commands: &[&[&str]]) -> Result<Value, RequestError> {
        let (host, shard) = location;
        let node = self.shared.node(host).ok_or(RequestError::Rejected)?;
        let (mut socket, theirs) = self.shared.links.stream(self.host, host);
        {
            let _context = node.handle.enter();
            node.service.adopt(shard, theirs);
        }
        drop(node);
        let mut request = BytesMut::new();
        commands.iter().for_each(|words| command::encode(&mut request, words));
        if socket.try_write(&[IoSlice::new(&request)]).is_err() {
            // The stream is closed: the node does not have the shard.
            return Err(RequestError::Rejected);
        }
        let timeout = Duration::from_millis(fastrand::u64(100..1_500));
        let reply = tokio::time::timeout(timeout, read(socket.as_mut(), commands.len())).await;
        match reply {
            Ok(Some(value)) => Ok(value),
            Ok(None) | Err(_) => Err(RequestError::Unknown),
        }
    }

    /// Sends a command to the primary of its key, and remembers the location.
    async fn send(
        &self,
        locations: &mut BTreeMap<u16, ShardLocation>,
        words: &[&str],
    ) -> Result<Value, RequestError> {
        self.send_all(locations, words[1], &[words]).await
    }

    /// Like [`Self::send`], with several commands on one connection.
    async fn send_all(
        &self,
        locations: &mut BTreeMap<u16, ShardLocation>,
        key: &str,
        commands: &[&[&str]],
    ) -> Result<Value, RequestError> {
        let slot = slot_of(key.as_bytes());
        let location = locations.get(&slot).copied().or_else(|| self.locate(key));
        let location = location.ok_or(RequestError::Rejected)?;
        let reply = self.request(location, commands).await;
        self.shared.trace.record(format_args!("{commands:?} at {location:?}: {}", describe(&reply)));
        match reply {
            Ok(Value::Error(text)) => {
                locations.remove(&slot);
                self.on_error(locations, slot, &String::from_utf8_lossy(&text))
            }
            Ok(value) => {
                locations.insert(slot, location);
                self.answered.fetch_add(1, Ordering::Relaxed);
                Ok(value)
            }
            Err(error) => {
                locations.remove(&slot);
                Err(error)
            }
        }
    }

    fn on_error(
        &self,
        locations: &mut BTreeMap<u16, ShardLocation>,
        slot: u16,
        text: &str,
    ) -> Result<Value, RequestError> {
        let mut words = text.split(' ');
        match words.next() {
            Some("MOVED") => {
                let location = words.nth(1).and_then(parse_location);
                locations.extend(location.map(|location| (slot, location)));
            }
            Some(
                "BUSY" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "LOADING" | "READONLY" | "MASTERDOWN"
                | "NOREPLICAS",
            ) => {}
            // Error of a script that accesses an undeclared key of another shard.
            Some("ERR") if text.contains("non local key") => {}
            _ => locked(&self.violations).push(format!("unexpected error reply: {text}")),
        }
        Err(RequestError::Rejected)
    }

    fn unique(&self) -> String {
        format!("v{}", self.values.fetch_add(1, Ordering::Relaxed))
    }
}

fn describe(reply: &Result<Value, RequestError>) -> String {
    match reply {
        Ok(value) => format!("{value:?}"),
        Err(RequestError::Rejected) => "rejected".to_owned(),
        Err(RequestError::Unknown) => "no reply".to_owned(),
    }
}

fn host_named(name: &str) -> Option<usize> {
    name.strip_prefix("host-")?.parse().ok()
}

/// `host-1:6380` is shard 1 on host 1.
fn parse_location(address: &str) -> Option<ShardLocation> {
    let (host, port) = address.split_once(':')?;
    Some((host_named(host)?, port.parse::<u16>().ok()?.checked_sub(6_379)?))
}

/// Reads this many replies; returns the first error among them, or the last reply.
async fn read(socket: &mut dyn Socket, replies: usize) -> Option<Value> {
    let (mut bytes, mut decoder) = (BytesMut::with_capacity(4096), ReplyDecoder::new(1 << 20));
    let (mut left, mut error) = (replies, None);
    loop {
        if let Some(value) = decoder.decode(&mut bytes).ok()? {
            left -= 1;
            error = error.or_else(|| error_in(&value));
            if left == 0 {
                return Some(error.unwrap_or(value));
            }
            continue;
        }
        bytes.reserve(4096);
        if poll_fn(|cx| socket.poll_read(cx, &mut bytes)).await.ok()? == 0 {
            return None;
        }
    }
}

/// The error of a reply, or the first error in the reply of an EXEC.
fn error_in(value: &Value) -> Option<Value> {
    match value {
        Value::Error(_) => Some(value.clone()),
        Value::Array(values) => values.iter().find(|value| matches!(value, Value::Error(_))).cloned(),
        _ => None,
    }
}

/// Sends commands until the end of fault injection.
pub(super) async fn client(pool: Arc<ClientPool>, number: u64) {
    let mut locations = BTreeMap::new();
    while !pool.stop.is_stopped() {
        let succeeded = run_operation(&pool, number, &mut locations).await;
        let delay_ms = if succeeded { fastrand::u64(1..30) } else { fastrand::u64(10..60) };
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
    }
}

async fn run_operation(pool: &ClientPool, number: u64, locations: &mut BTreeMap<u16, ShardLocation>) -> bool {
    if pool.has_ttls && fastrand::u8(..10) < 4 {
        return if fastrand::u8(..3) == 0 {
            set_ttl(pool, locations).await
        } else {
            get_ttl(pool, locations).await
        };
    }
    let kind = fastrand::u8(..100);
    if kind < 25 {
        let counter = format!("counter-{}", fastrand::usize(..COUNTERS));
        return run_counter(pool, number, locations, &counter, kind < 18).await;
    }
    let key = format!("register-{}", fastrand::usize(..REGISTERS));
    let pair = fastrand::usize(..PAIRS);
    let (one, two) = (format!("{{pair-{pair}}}a"), format!("{{pair-{pair}}}b"));
    let value = pool.unique();
    let op = match kind {
        25..50 => Op::get(key),
        50..58 => Op::delete(key),
        58..72 => Op::put(key, value),
        72..84 => Op { then: vec![Step::Get(key.clone()), Step::Put(key, value)], ..Op::default() },
        84..92 => Op { then: vec![Step::Put(one, value.clone()), Step::Put(two, value)], ..Op::default() },
        _ => Op { then: vec![Step::Get(one), Step::Get(two)], ..Op::default() },
    };
    run_register(pool, number, locations, op).await
}

async fn run_register(
    pool: &ClientPool,
    number: u64,
    locations: &mut BTreeMap<u16, ShardLocation>,
    op: Op,
) -> bool {
    let id = pool.registers.invoke(number, op.clone());
    let reply = match op.then.as_slice() {
        [Step::Get(key)] => pool.send(locations, &["GET", key]).await,
        [Step::Delete(key)] => pool.send(locations, &["DEL", key]).await,
        [Step::Put(key, value)] => pool.send(locations, &["SET", key, value]).await,
        [Step::Get(key), Step::Put(_, value)] if pool.has_scripts && fastrand::bool() => {
            pool.send_all(locations, key, &[&["EVAL", SWAP, "1", key, value]]).await
        }
        [Step::Get(key), Step::Put(_, value)] => pool.send(locations, &["SET", key, value, "GET"]).await,
        [Step::Put(one, value), Step::Put(two, _)] if pool.has_scripts && fastrand::u8(..3) > 0 => {
            let both: &[&[&str]] = match fastrand::bool() {
                true => &[&["SET", one, value], &["SET", two, value]],
                false => &[&["EVAL", PUT_BOTH, "0", one, two, value]],
            };
            let (multi, exec): (&[&str], &[&str]) = (&["MULTI"], &["EXEC"]);
            let commands: Vec<&[&str]> =
                [multi].into_iter().chain(both.iter().copied()).chain([exec]).collect();
            pool.send_all(locations, one, &commands).await
        }
        [Step::Put(one, value), Step::Put(two, _)] => {
            pool.send(locations, &["MSET", one, value, two, value]).await
        }
        [Step::Get(one), Step::Get(two)] => pool.send(locations, &["MGET", one, two]).await,
        _ => unreachable!("operation not generated"),
    };
    match reply {
        Ok(value) => {
            let seen = seen(&op, value);
            pool.registers.ok(id, Outcome { succeeded: true, revision: None, seen });
            true
        }
        Err(RequestError::Rejected) => {
            pool.registers.failed(id);
            false
        }
        Err(RequestError::Unknown) => false,
    }
}

/// The observations in a reply.
fn seen(op: &Op, value: Value) -> Vec<Seen> {
    match (op.then.as_slice(), value) {
        ([Step::Get(_)], value) => vec![got(&value)],
        ([Step::Delete(_)], value) => vec![Seen::Deleted(Some(value == Value::Integer(1)))],
        ([Step::Get(_), Step::Put(..)], value) => vec![got(&value), Seen::Put],
        ([Step::Get(_), Step::Get(_)], Value::Array(values)) => values.iter().map(got).collect(),
        (steps, _) => vec![Seen::Put; steps.len()],
    }
}

fn got(value: &Value) -> Seen {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Seen::Got(match value {
        Value::Bulk(bytes) | Value::Simple(bytes) => Some(Found { value: text(bytes), mod_revision: None }),
        _ => None,
    })
}

async fn run_counter(
    pool: &ClientPool,
    number: u64,
    locations: &mut BTreeMap<u16, ShardLocation>,
    counter: &str,
    add: bool,
) -> bool {
    let (id, reply) = if add {
        (pool.counters.increment(number, counter), pool.send(locations, &["INCR", counter]).await)
    } else {
        (pool.counters.read(number, counter), pool.send(locations, &["GET", counter]).await)
    };
    match reply {
        Ok(value) => {
            let value = match &value {
                Value::Integer(value) => u64::try_from(*value).unwrap_or(0),
                Value::Bulk(text) => String::from_utf8_lossy(text).parse().unwrap_or(0),
                _ => 0,
            };
            pool.counters.told(id, value);
            true
        }
        Err(RequestError::Rejected) => {
            pool.counters.failed(id);
            false
        }
        Err(RequestError::Unknown) => false,
    }
}

/// Reads every key, with retries, to complete the history.
pub(super) async fn read_all_keys(pool: Arc<ClientPool>) {
    let mut locations = BTreeMap::new();
    let single = (0..REGISTERS).map(|number| Op::get(format!("register-{number}")));
    let pairs = (0..PAIRS).map(|pair| Op {
        then: vec![Step::Get(format!("{{pair-{pair}}}a")), Step::Get(format!("{{pair-{pair}}}b"))],
        ..Op::default()
    });
    for op in single.chain(pairs) {
        while !run_register(&pool, 1_000, &mut locations, op.clone()).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for number in 0..COUNTERS {
        while !run_counter(&pool, 1_000, &mut locations, &format!("counter-{number}"), false).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Writes to every shard, so that its journal has a time from which shard time continues.
pub(super) async fn write_initial_keys(pool: Arc<ClientPool>) {
    let mut locations = BTreeMap::new();
    for tag in 0..TAGS {
        while pool.send(&mut locations, &["SET", &format!("{{ttl-{tag}}}"), "first"]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Writes a key with a time to live, with SET PX or with SET and PEXPIRE.
async fn set_ttl(pool: &ClientPool, locations: &mut BTreeMap<u16, ShardLocation>) -> bool {
    let value = pool.unique();
    let key = format!("{{ttl-{}}}{value}", fastrand::usize(..TAGS));
    let ttl_ms = fastrand::u64(TTL_MS);
    let ttl = ttl_ms.to_string();
    let in_two_steps = fastrand::u8(..4) == 0;
    let from_ms = pool.shared.now_ms();
    let reply = match in_two_steps {
        false => pool.send(locations, &["SET", &key, &value, "PX", &ttl]).await,
        true => pool.send(locations, &["SET", &key, &value]).await,
    };
    let times = RequestTimes { from_ms, until_ms: pool.shared.now_ms() };
    let set_ttl = (!in_two_steps).then_some(ttl_ms);
    match reply {
        Ok(_) => locked(&pool.expiries).on_set(&key, &value, set_ttl, Some(times)),
        Err(RequestError::Unknown) => locked(&pool.expiries).on_set(&key, &value, set_ttl, None),
        Err(RequestError::Rejected) => {}
    }
    if !in_two_steps || reply.is_err() {
        return reply.is_ok();
    }
    tokio::time::sleep(Duration::from_millis(fastrand::u64(1..200))).await;
    locked(&pool.expiries).before_expire(&key, ttl_ms, pool.shared.now_ms());
    match pool.send(locations, &["PEXPIRE", &key, &ttl]).await {
        Ok(Value::Integer(1)) => {
            locked(&pool.expiries).on_expire(&key, ttl_ms, pool.shared.now_ms());
            true
        }
        Ok(reply) => {
            locked(&pool.violations).push(format!("PEXPIRE of {key}, which was written: {reply:?}"));
            false
        }
        Err(_) => false,
    }
}

/// Reads a key with a time to live.
async fn get_ttl(pool: &ClientPool, locations: &mut BTreeMap<u16, ShardLocation>) -> bool {
    let key = locked(&pool.expiries).recent_key();
    match key {
        Some(key) => check_ttl(pool, locations, &key).await,
        None => false,
    }
}

async fn check_ttl(pool: &ClientPool, locations: &mut BTreeMap<u16, ShardLocation>, key: &str) -> bool {
    let from_ms = pool.shared.now_ms();
    let Ok(reply) = pool.send(locations, &["GET", key]).await else { return false };
    let times = RequestTimes { from_ms, until_ms: pool.shared.now_ms() };
    let found = match &reply {
        Value::Bulk(bytes) => Some(String::from_utf8_lossy(bytes)),
        _ => None,
    };
    if let Err(violation) = locked(&pool.expiries).on_get(key, found.as_deref(), times) {
        locked(&pool.violations).push(violation);
    }
    true
}

/// Reads every key that was written with a time to live.
pub(super) async fn read_ttls(pool: Arc<ClientPool>) {
    let mut locations = BTreeMap::new();
    let keys = locked(&pool.expiries).keys();
    for key in keys {
        while !check_ttl(&pool, &mut locations, &key).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
