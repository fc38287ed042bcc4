//! Clients of the store: registers, pairs of keys, counters and keys with a time to live, every value written once, every
//! question sent once.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use moim_base::socket::Socket;
use moim_history::{Counters, Fate, Found, Op, Outcome, Recorder, Seen, Step, check};
use moim_slots::slot_of;
use moim_wire_resp::{ReplyDecoder, Value, command};

use super::time::{Asked, Expiries};
use super::{Shared, Switch, locked};

const REGISTERS: usize = 4;
const PAIRS: usize = 2;
const COUNTERS: usize = 2;
/// Slots of keys with a time to live.
const TAGS: usize = 6;
/// Reads and writes a key that it declares.
const SWAP: &str = "local old = redis.call('GET', KEYS[1]) redis.call('SET', KEYS[1], ARGV[1]) return old";
/// Writes two keys that it does not declare.
const PUT_BOTH: &str = "redis.call('SET', ARGV[1], ARGV[3]) return redis.call('SET', ARGV[2], ARGV[3])";
const TTL_MS: std::ops::Range<u64> = 3_000..9_000;

/// Every key that clients use, one for each slot.
pub(super) fn keys(has_ttls: bool) -> impl Iterator<Item = String> {
    let registers = (0..REGISTERS).map(|number| format!("register-{number}"));
    let counters = (0..COUNTERS).map(|number| format!("counter-{number}"));
    let tags = (0..if has_ttls { TAGS } else { 0 }).map(|tag| format!("{{ttl-{tag}}}"));
    registers.chain(counters).chain(tags).chain((0..PAIRS).map(|pair| format!("{{pair-{pair}}}a")))
}

/// All clients and what they saw.
pub(super) struct Crowd {
    shared: Arc<Shared>,
    host: usize,
    registers: Recorder,
    counters: Counters,
    pub(super) expiries: Mutex<Expiries>,
    has_ttls: bool,
    has_scripts: bool,
    over: Switch,
    values: AtomicU64,
    pub(super) answered: AtomicU64,
    pub(super) unknown: AtomicU64,
    violations: Mutex<Vec<String>>,
}

/// How a question ended that has no answer.
enum Lost {
    /// It certainly had no effect.
    Refused,
    /// Nobody knows.
    Unknown,
}

/// Where a shard is: the machine, and the shard's number.
type Place = (usize, u16);

impl Crowd {
    pub(super) fn new(shared: Arc<Shared>, host: usize, has_ttls: bool, has_scripts: bool) -> Arc<Self> {
        Arc::new(Self {
            shared,
            host,
            registers: Recorder::new(),
            counters: Counters::new(),
            expiries: Mutex::default(),
            has_ttls,
            has_scripts,
            over: Switch::default(),
            values: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            violations: Mutex::default(),
        })
    }

    pub(super) fn stop(&self) {
        self.over.off();
    }

    pub(super) fn first_violation(&self) -> Option<String> {
        locked(&self.violations).first().cloned()
    }

    /// Whether every node knows a primary for every slot.
    pub(super) fn serves(&self) -> bool {
        (0..self.shared.nodes).all(|host| {
            self.shared
                .node(host)
                .is_some_and(|node| node.service.shared().view.load().served() == moim_slots::SLOTS)
        })
    }

    /// What everybody saw, judged.
    pub(super) fn judge(&self) -> Result<(), String> {
        let history = self.registers.history();
        let unknown = history.entries.iter().filter(|entry| entry.fate == Fate::Unknown).count();
        self.unknown.fetch_add(unknown as u64, Ordering::Relaxed);
        check(&history).map_err(|error| error.to_string())?;
        self.counters.check().map_err(|error| error.to_string())
    }

    /// Where a key is, as some node believes.
    fn place(&self, key: &str) -> Option<Place> {
        let node = self.shared.node(fastrand::usize(..self.shared.nodes))?;
        let view = node.service.shared().view.load();
        let shard = view.owner(slot_of(key.as_bytes()))?;
        Some((host_named(&view.primary(shard)?.host)?, shard))
    }

    /// Asks a node once: commands on one connection. The first error, or the last answer.
    async fn ask(&self, place: Place, commands: &[&[&str]]) -> Result<Value, Lost> {
        let (host, shard) = place;
        let node = self.shared.node(host).ok_or(Lost::Refused)?;
        let (mut socket, theirs) = self.shared.wires.stream(self.host, host);
        {
            let _there = node.handle.enter();
            node.service.adopt(shard, theirs);
        }
        drop(node);
        let mut request = BytesMut::new();
        commands.iter().for_each(|words| command::encode(&mut request, words));
        if socket.try_write(&[IoSlice::new(&request)]).is_err() {
            // Nobody is at the other end: the node does not have the shard.
            return Err(Lost::Refused);
        }
        let patience = Duration::from_millis(fastrand::u64(100..1_500));
        let answer = tokio::time::timeout(patience, read(socket.as_mut(), commands.len())).await;
        match answer {
            Ok(Some(value)) => Ok(value),
            Ok(None) | Err(_) => Err(Lost::Unknown),
        }
    }

    /// Asks whoever has the key, and remembers where that is.
    async fn send(&self, known: &mut BTreeMap<u16, Place>, words: &[&str]) -> Result<Value, Lost> {
        self.send_all(known, words[1], &[words]).await
    }

    /// The same with several commands on one connection.
    async fn send_all(
        &self,
        known: &mut BTreeMap<u16, Place>,
        key: &str,
        commands: &[&[&str]],
    ) -> Result<Value, Lost> {
        let slot = slot_of(key.as_bytes());
        let believed = known.get(&slot).copied().or_else(|| self.place(key));
        let place = believed.ok_or(Lost::Refused)?;
        let answer = self.ask(place, commands).await;
        self.shared.trace.note(format_args!("{commands:?} at {place:?}: {}", described(&answer)));
        match answer {
            Ok(Value::Error(text)) => {
                known.remove(&slot);
                self.on_error(known, slot, &String::from_utf8_lossy(&text))
            }
            Ok(value) => {
                known.insert(slot, place);
                self.answered.fetch_add(1, Ordering::Relaxed);
                Ok(value)
            }
            Err(lost) => {
                known.remove(&slot);
                Err(lost)
            }
        }
    }

    fn on_error(&self, known: &mut BTreeMap<u16, Place>, slot: u16, text: &str) -> Result<Value, Lost> {
        let mut words = text.split(' ');
        match words.next() {
            Some("MOVED") => {
                let place = words.nth(1).and_then(place_named);
                known.extend(place.map(|place| (slot, place)));
            }
            Some(
                "BUSY" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "LOADING" | "READONLY" | "MASTERDOWN"
                | "NOREPLICAS",
            ) => {}
            // A script finds out where it touches a key.
            Some("ERR") if text.contains("non local key") => {}
            _ => locked(&self.violations).push(format!("a client heard: {text}")),
        }
        Err(Lost::Refused)
    }

    fn unique(&self) -> String {
        format!("v{}", self.values.fetch_add(1, Ordering::Relaxed))
    }
}

fn described(answer: &Result<Value, Lost>) -> String {
    match answer {
        Ok(value) => format!("{value:?}"),
        Err(Lost::Refused) => "nobody is there".to_owned(),
        Err(Lost::Unknown) => "nothing".to_owned(),
    }
}

fn host_named(name: &str) -> Option<usize> {
    name.strip_prefix("host-")?.parse().ok()
}

/// `host-1:6380` is shard 1 on machine 1.
fn place_named(address: &str) -> Option<Place> {
    let (host, port) = address.split_once(':')?;
    Some((host_named(host)?, port.parse::<u16>().ok()?.checked_sub(6_379)?))
}

/// Reads so many answers; the first error among them, or the last one.
async fn read(socket: &mut dyn Socket, answers: usize) -> Option<Value> {
    let (mut bytes, mut decoder) = (BytesMut::with_capacity(4096), ReplyDecoder::new(1 << 20));
    let (mut left, mut error) = (answers, None);
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

/// An error, or the first one of those that an EXEC answered.
fn error_in(value: &Value) -> Option<Value> {
    match value {
        Value::Error(_) => Some(value.clone()),
        Value::Array(values) => values.iter().find(|value| matches!(value, Value::Error(_))).cloned(),
        _ => None,
    }
}

/// Works until the faults are over.
pub(super) async fn client(crowd: Arc<Crowd>, number: u64) {
    let mut known = BTreeMap::new();
    while !crowd.over.is_off() {
        let went_well = one(&crowd, number, &mut known).await;
        let nap = if went_well { fastrand::u64(1..30) } else { fastrand::u64(10..60) };
        tokio::time::sleep(Duration::from_millis(nap)).await;
    }
}

async fn one(crowd: &Crowd, number: u64, known: &mut BTreeMap<u16, Place>) -> bool {
    if crowd.has_ttls && fastrand::u8(..10) < 4 {
        return if fastrand::u8(..3) == 0 {
            set_ttl(crowd, known).await
        } else {
            get_ttl(crowd, known).await
        };
    }
    let kind = fastrand::u8(..100);
    if kind < 25 {
        let counter = format!("counter-{}", fastrand::usize(..COUNTERS));
        return count(crowd, number, known, &counter, kind < 18).await;
    }
    let key = format!("register-{}", fastrand::usize(..REGISTERS));
    let pair = fastrand::usize(..PAIRS);
    let (one, two) = (format!("{{pair-{pair}}}a"), format!("{{pair-{pair}}}b"));
    let value = crowd.unique();
    let op = match kind {
        25..50 => Op::get(key),
        50..58 => Op::delete(key),
        58..72 => Op::put(key, value),
        72..84 => Op { then: vec![Step::Get(key.clone()), Step::Put(key, value)], ..Op::default() },
        84..92 => Op { then: vec![Step::Put(one, value.clone()), Step::Put(two, value)], ..Op::default() },
        _ => Op { then: vec![Step::Get(one), Step::Get(two)], ..Op::default() },
    };
    register(crowd, number, known, op).await
}

async fn register(crowd: &Crowd, number: u64, known: &mut BTreeMap<u16, Place>, op: Op) -> bool {
    let id = crowd.registers.invoke(number, op.clone());
    let answer = match op.then.as_slice() {
        [Step::Get(key)] => crowd.send(known, &["GET", key]).await,
        [Step::Delete(key)] => crowd.send(known, &["DEL", key]).await,
        [Step::Put(key, value)] => crowd.send(known, &["SET", key, value]).await,
        [Step::Get(key), Step::Put(_, value)] if crowd.has_scripts && fastrand::bool() => {
            crowd.send_all(known, key, &[&["EVAL", SWAP, "1", key, value]]).await
        }
        [Step::Get(key), Step::Put(_, value)] => crowd.send(known, &["SET", key, value, "GET"]).await,
        [Step::Put(one, value), Step::Put(two, _)] if crowd.has_scripts && fastrand::u8(..3) > 0 => {
            let both: &[&[&str]] = match fastrand::bool() {
                true => &[&["SET", one, value], &["SET", two, value]],
                false => &[&["EVAL", PUT_BOTH, "0", one, two, value]],
            };
            let (multi, exec): (&[&str], &[&str]) = (&["MULTI"], &["EXEC"]);
            let commands: Vec<&[&str]> =
                [multi].into_iter().chain(both.iter().copied()).chain([exec]).collect();
            crowd.send_all(known, one, &commands).await
        }
        [Step::Put(one, value), Step::Put(two, _)] => {
            crowd.send(known, &["MSET", one, value, two, value]).await
        }
        [Step::Get(one), Step::Get(two)] => crowd.send(known, &["MGET", one, two]).await,
        _ => unreachable!("no such operation"),
    };
    match answer {
        Ok(value) => {
            let seen = seen(&op, value);
            crowd.registers.ok(id, Outcome { succeeded: true, revision: None, seen });
            true
        }
        Err(Lost::Refused) => {
            crowd.registers.failed(id);
            false
        }
        Err(Lost::Unknown) => false,
    }
}

/// What an answer shows.
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

async fn count(
    crowd: &Crowd,
    number: u64,
    known: &mut BTreeMap<u16, Place>,
    counter: &str,
    add: bool,
) -> bool {
    let (id, answer) = if add {
        (crowd.counters.increment(number, counter), crowd.send(known, &["INCR", counter]).await)
    } else {
        (crowd.counters.read(number, counter), crowd.send(known, &["GET", counter]).await)
    };
    match answer {
        Ok(value) => {
            let value = match &value {
                Value::Integer(value) => u64::try_from(*value).unwrap_or(0),
                Value::Bulk(text) => String::from_utf8_lossy(text).parse().unwrap_or(0),
                _ => 0,
            };
            crowd.counters.told(id, value);
            true
        }
        Err(Lost::Refused) => {
            crowd.counters.failed(id);
            false
        }
        Err(Lost::Unknown) => false,
    }
}

/// Reads every key, however often that has to be tried: what was acknowledged is there.
pub(super) async fn read_everything(crowd: Arc<Crowd>) {
    let mut known = BTreeMap::new();
    let single = (0..REGISTERS).map(|number| Op::get(format!("register-{number}")));
    let pairs = (0..PAIRS).map(|pair| Op {
        then: vec![Step::Get(format!("{{pair-{pair}}}a")), Step::Get(format!("{{pair-{pair}}}b"))],
        ..Op::default()
    });
    for op in single.chain(pairs) {
        while !register(&crowd, 1_000, &mut known, op.clone()).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for number in 0..COUNTERS {
        while !count(&crowd, 1_000, &mut known, &format!("counter-{number}"), false).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Every shard has a write in its journal: shard time goes on from there.
pub(super) async fn write_first(crowd: Arc<Crowd>) {
    let mut known = BTreeMap::new();
    for tag in 0..TAGS {
        while crowd.send(&mut known, &["SET", &format!("{{ttl-{tag}}}"), "first"]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Writes a key with a time to live, at once or in two steps.
async fn set_ttl(crowd: &Crowd, known: &mut BTreeMap<u16, Place>) -> bool {
    let value = crowd.unique();
    let key = format!("{{ttl-{}}}{value}", fastrand::usize(..TAGS));
    let ttl_ms = fastrand::u64(TTL_MS);
    let ttl = ttl_ms.to_string();
    let in_two_steps = fastrand::u8(..4) == 0;
    let from_ms = crowd.shared.now_ms();
    let answer = match in_two_steps {
        false => crowd.send(known, &["SET", &key, &value, "PX", &ttl]).await,
        true => crowd.send(known, &["SET", &key, &value]).await,
    };
    let asked = Asked { from_ms, until_ms: crowd.shared.now_ms() };
    let set_ttl = (!in_two_steps).then_some(ttl_ms);
    match answer {
        Ok(_) => locked(&crowd.expiries).on_set(&key, &value, set_ttl, Some(asked)),
        Err(Lost::Unknown) => locked(&crowd.expiries).on_set(&key, &value, set_ttl, None),
        Err(Lost::Refused) => {}
    }
    if !in_two_steps || answer.is_err() {
        return answer.is_ok();
    }
    tokio::time::sleep(Duration::from_millis(fastrand::u64(1..200))).await;
    locked(&crowd.expiries).before_expire(&key, ttl_ms, crowd.shared.now_ms());
    match crowd.send(known, &["PEXPIRE", &key, &ttl]).await {
        Ok(Value::Integer(1)) => {
            locked(&crowd.expiries).on_expire(&key, ttl_ms, crowd.shared.now_ms());
            true
        }
        Ok(answer) => {
            locked(&crowd.violations).push(format!("PEXPIRE of {key}, which was written: {answer:?}"));
            false
        }
        Err(_) => false,
    }
}

/// Reads a key with a time to live.
async fn get_ttl(crowd: &Crowd, known: &mut BTreeMap<u16, Place>) -> bool {
    let key = locked(&crowd.expiries).any();
    match key {
        Some(key) => check_ttl(crowd, known, &key).await,
        None => false,
    }
}

async fn check_ttl(crowd: &Crowd, known: &mut BTreeMap<u16, Place>, key: &str) -> bool {
    let from_ms = crowd.shared.now_ms();
    let Ok(answer) = crowd.send(known, &["GET", key]).await else { return false };
    let asked = Asked { from_ms, until_ms: crowd.shared.now_ms() };
    let found = match &answer {
        Value::Bulk(bytes) => Some(String::from_utf8_lossy(bytes)),
        _ => None,
    };
    if let Err(what) = locked(&crowd.expiries).on_get(key, found.as_deref(), asked) {
        locked(&crowd.violations).push(what);
    }
    true
}

/// Reads every key that had a time to live.
pub(super) async fn read_ttls(crowd: Arc<Crowd>) {
    let mut known = BTreeMap::new();
    let keys = locked(&crowd.expiries).keys();
    for key in keys {
        while !check_ttl(&crowd, &mut known, &key).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
