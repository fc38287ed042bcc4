//! Runs the scripts in a Lua interpreter over a minimal in-memory store, and compares the results with plain models,
//! message by message.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use mlua::{Lua, MultiValue, Table, Value};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// The commands that the scripts use, in memory.
#[derive(Clone, Default)]
pub(crate) struct Fake {
    strings: HashMap<Vec<u8>, Vec<u8>>,
    hashes: HashMap<Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>>,
    /// Scores by member.
    sets: HashMap<Vec<u8>, BTreeMap<Vec<u8>, i64>>,
}

fn parse(bytes: &[u8]) -> i64 {
    std::str::from_utf8(bytes).unwrap().parse().unwrap()
}

fn optional(value: Option<&Vec<u8>>) -> Reply {
    value.map_or(Reply::Nil, |value| Reply::Bytes(value.clone().into()))
}

impl Fake {
    fn run(&mut self, words: &[Vec<u8>]) -> Reply {
        let key = words.get(1).cloned().unwrap_or_default();
        let more = words.get(2..).unwrap_or_default();
        let done = Reply::Bytes(Bytes::from_static(b"OK"));
        match &words[0][..] {
            b"TIME" => Reply::Array(vec![Reply::Bytes("1700000000".into()), Reply::Bytes("0".into())]),
            b"GET" => optional(self.strings.get(&key)),
            b"SET" => {
                self.strings.insert(key, more[0].clone());
                done
            }
            b"MGET" => Reply::Array(words[1..].iter().map(|key| optional(self.strings.get(key))).collect()),
            b"MSET" => {
                let pairs = words[1..].chunks(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                self.strings.extend(pairs);
                done
            }
            b"INCRBY" => {
                let sum = self.strings.get(&key).map_or(0, |value| parse(value)) + parse(&more[0]);
                self.strings.insert(key, sum.to_string().into_bytes());
                Reply::Int(sum)
            }
            b"HMGET" => {
                let hash = self.hashes.entry(key).or_default();
                Reply::Array(more.iter().map(|field| optional(hash.get(field))).collect())
            }
            b"HSET" => {
                assert_eq!(more.len() % 2, 0, "wrong number of arguments");
                let pairs = more.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone()));
                self.hashes.entry(key).or_default().extend(pairs);
                Reply::Int(0)
            }
            b"HGET" => optional(self.hashes.get(&key).and_then(|hash| hash.get(&more[0]))),
            b"HEXISTS" => {
                Reply::Int(i64::from(self.hashes.get(&key).is_some_and(|hash| hash.contains_key(&more[0]))))
            }
            b"HDEL" => {
                let hash = self.hashes.entry(key).or_default();
                more.iter().for_each(|field| drop(hash.remove(field)));
                Reply::Int(0)
            }
            b"HKEYS" => {
                let fields = self.hashes.get(&key).into_iter().flat_map(BTreeMap::keys);
                Reply::Array(fields.map(|field| Reply::Bytes(field.clone().into())).collect())
            }
            b"HGETALL" => {
                let flat =
                    self.hashes.get(&key).into_iter().flatten().flat_map(|(field, value)| [field, value]);
                Reply::Array(flat.map(|part| Reply::Bytes(part.clone().into())).collect())
            }
            b"INCR" => {
                let sum = self.strings.get(&key).map_or(0, |value| parse(value)) + 1;
                self.strings.insert(key, sum.to_string().into_bytes());
                Reply::Int(sum)
            }
            b"SADD" => {
                more.iter().for_each(|member| {
                    self.sets.entry(key.clone()).or_default().insert(member.clone(), 0);
                });
                Reply::Int(0)
            }
            b"SMEMBERS" => {
                let members = self.sets.get(&key).into_iter().flat_map(BTreeMap::keys);
                Reply::Array(members.map(|member| Reply::Bytes(member.clone().into())).collect())
            }
            b"EXISTS" => Reply::Int(words[1..].iter().filter(|key| self.has(key)).count() as i64),
            b"ZMSCORE" => {
                let set = self.sets.get(&key);
                let score =
                    |member| set.and_then(|set| set.get(member)).copied().map_or(Reply::Nil, Reply::Int);
                Reply::Array(more.iter().map(score).collect())
            }
            b"ZADD" => self.zadd(key, more),
            b"ZRANGE" => {
                assert_eq!(more, [b"0", b"0"]);
                let first = self.sets.get(&key).and_then(|set| set.iter().min_by_key(|(_, score)| **score));
                Reply::Array(
                    first.into_iter().map(|(member, _)| Reply::Bytes(member.clone().into())).collect(),
                )
            }
            b"ZREM" => {
                self.sets.entry(key).or_default().remove(&more[0]);
                Reply::Int(0)
            }
            b"DEL" => {
                self.strings.remove(&key);
                self.hashes.remove(&key);
                self.sets.remove(&key);
                Reply::Int(0)
            }
            other => panic!("unsupported command: {}", String::from_utf8_lossy(other)),
        }
    }
}

impl Fake {
    fn has(&self, key: &[u8]) -> bool {
        self.strings.contains_key(key)
            || self.hashes.get(key).is_some_and(|hash| !hash.is_empty())
            || self.sets.contains_key(key)
    }

    fn zadd(&mut self, key: Vec<u8>, words: &[Vec<u8>]) -> Reply {
        let options = words.iter().take_while(|word| matches!(&word[..], b"GT" | b"CH")).count();
        let has = |option: &[u8]| words[..options].iter().any(|word| word == option);
        let pairs = &words[options..];
        assert!(!pairs.is_empty() && pairs.len().is_multiple_of(2), "syntax error");
        let (set, mut changed) = (self.sets.entry(key).or_default(), 0);
        for pair in pairs.chunks(2) {
            let (score, old) = (parse(&pair[0]), set.get(&pair[1]).copied());
            if old.is_none_or(|old| if has(b"GT") { score > old } else { score != old }) {
                set.insert(pair[1].clone(), score);
                changed += i64::from(old.is_none() || has(b"CH"));
            }
        }
        Reply::Int(changed)
    }
}

fn to_lua(lua: &Lua, reply: &Reply) -> mlua::Result<Value> {
    Ok(match reply {
        Reply::Nil => Value::Boolean(false),
        Reply::Int(n) => Value::Number(*n as f64),
        Reply::Bytes(bytes) => Value::String(lua.create_string(bytes)?),
        Reply::Array(list) => {
            let table = lua.create_table()?;
            for part in list {
                table.push(to_lua(lua, part)?)?;
            }
            Value::Table(table)
        }
    })
}

fn from_lua(value: &Value) -> Reply {
    match value {
        Value::Integer(n) => Reply::Int(*n),
        Value::Number(n) => Reply::Int(*n as i64),
        Value::String(text) => Reply::Bytes(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Table(table) => {
            Reply::Array(table.sequence_values::<Value>().map(|part| from_lua(&part.unwrap())).collect())
        }
        _ => Reply::Nil,
    }
}

fn word_of(value: &Value) -> Vec<u8> {
    match value {
        Value::Integer(n) => n.to_string().into_bytes(),
        Value::Number(n) => format!("{n}").into_bytes(),
        Value::String(text) => text.as_bytes().to_vec(),
        other => panic!("unsupported argument: {other:?}"),
    }
}

#[derive(Default)]
pub(crate) struct Machine {
    fake: Mutex<Fake>,
    /// Number of scripts after which the store stops answering; unlimited if none.
    pub(crate) scripts_left: Mutex<Option<u32>>,
}

impl Machine {
    /// Deletes all keys.
    pub(crate) fn wipe(&self) {
        *self.fake.lock().unwrap() = Fake::default();
    }

    /// A copy of all keys.
    pub(crate) fn snapshot(&self) -> Fake {
        self.fake.lock().unwrap().clone()
    }

    /// Reverts the matching keys to a snapshot.
    pub(crate) fn restore(&self, snapshot: &Fake, of: impl Fn(&str) -> bool) {
        let of = |key: &Vec<u8>| of(std::str::from_utf8(key).unwrap());
        let mut fake = self.fake.lock().unwrap();
        fake.strings.retain(|key, _| !of(key));
        fake.hashes.retain(|key, _| !of(key));
        fake.sets.retain(|key, _| !of(key));
        let Fake { strings, hashes, sets } = snapshot.clone();
        fake.strings.extend(strings.into_iter().filter(|(key, _)| of(key)));
        fake.hashes.extend(hashes.into_iter().filter(|(key, _)| of(key)));
        fake.sets.extend(sets.into_iter().filter(|(key, _)| of(key)));
    }

    fn is_dead(&self) -> bool {
        let mut left = self.scripts_left.lock().unwrap();
        match &mut *left {
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }

    fn eval(&self, words: &[&[u8]]) -> mlua::Result<Reply> {
        let lua = Lua::new();
        let keys = usize::try_from(parse(words[2])).unwrap();
        let table = |words: &[&[u8]]| -> mlua::Result<Table> {
            lua.create_sequence_from(words.iter().map(|word| lua.create_string(word).unwrap()))
        };
        lua.globals().set("KEYS", table(&words[3..3 + keys])?)?;
        lua.globals().set("ARGV", table(&words[3 + keys..])?)?;
        lua.scope(|scope| {
            let call = scope.create_function(|lua, args: MultiValue| {
                let words: Vec<_> = args.iter().map(word_of).collect();
                to_lua(lua, &self.fake.lock().unwrap().run(&words))
            })?;
            let redis = lua.create_table()?;
            redis.set("call", call)?;
            lua.globals().set("redis", redis)?;
            lua.load(words[1]).eval::<Value>().map(|value| from_lua(&value))
        })
    }
}

impl Commands for Arc<Machine> {
    fn call<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let reply = match command[0] {
            b"EVAL" if self.is_dead() => Err(StoreError::Refused("it is dead".into())),
            b"EVAL" => self.eval(command).map_err(|error| StoreError::Refused(error.to_string())),
            b"EVALSHA" => Err(StoreError::Refused("NOSCRIPT".into())),
            b"SCRIPT" => Ok(Reply::Nil),
            _ => {
                let words: Vec<_> = command.iter().map(|word| word.to_vec()).collect();
                Ok(self.fake.lock().unwrap().run(&words))
            }
        };
        Box::pin(std::future::ready(reply))
    }

    fn call_all<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Vec<Reply>, StoreError>> {
        let called = self.call(command);
        Box::pin(async move { Ok(vec![called.await?]) })
    }

    fn keys<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Bytes>, StoreError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}

pub(crate) fn store() -> (Store, Arc<Machine>) {
    let machine = Arc::new(Machine::default());
    (Store::new(Arc::new(Arc::clone(&machine))), machine)
}

/// Resolves a future at once: the fake store never blocks.
pub(crate) fn now<T>(future: impl Future<Output = Result<T, StoreError>>) -> T {
    futures_util::FutureExt::now_or_never(future).unwrap().unwrap()
}

/// Model of a client's counting state.
#[derive(Default)]
struct Model {
    generation: u64,
    at: Option<(i32, i64)>,
    last: u64,
    counted: u64,
    dead: u64,
    /// Forwarded by committed transactions, and by the current one.
    base: u64,
    pass: u64,
    upto: Option<(i32, i64)>,
}

impl Model {
    fn judge(&mut self, partition: i32, message: &Counting) -> CountOutcome {
        if message.sn == self.last + 1 && self.pass >= self.last {
            (self.last, self.at) = (message.sn, Some((partition, message.offset)));
            self.pass = self.pass.max(self.last);
            *(if message.dead { &mut self.dead } else { &mut self.counted }) += 1;
            return CountOutcome::Counted;
        }
        if message.sn > self.last {
            return CountOutcome::Ahead;
        }
        if message.sn == self.pass + 1 {
            self.pass = message.sn;
            return CountOutcome::Repeated;
        }
        CountOutcome::Dropped
    }

    fn count(&mut self, by: Batch, messages: &[Counting]) -> Result<Vec<CountOutcome>, Fenced> {
        if self.generation > by.generation {
            return Err(Fenced);
        }
        self.generation = by.generation;
        if self.upto.is_some_and(|(partition, upto)| partition == by.partition && by.from > upto) {
            self.base = self.pass;
        }
        let upto = messages.last().map(|message| (by.partition, message.offset));
        (self.pass, self.upto) = (self.base, upto);
        let mut outcomes: Vec<_> = messages.iter().map(|message| self.judge(by.partition, message)).collect();
        for (message, outcome) in messages.iter().zip(&mut outcomes) {
            // The batch itself closed the gap before it.
            if *outcome == CountOutcome::Ahead && message.sn <= self.last {
                *outcome = CountOutcome::Dropped;
            }
        }
        Ok(outcomes)
    }
}

fn model_after(model: &mut Model, by: Batch, messages: &[Counting]) -> Vec<CountOutcome> {
    model.count(by, messages).unwrap()
}

/// Runs of consecutive numbers, as a topic has them after a resend.
fn batch() -> impl Strategy<Value = Vec<Counting>> {
    let row = (1u64..14, 1u64..7, prop::bool::weighted(0.2));
    (0i64..60, vec(row, 1..5), vec(1i64..4, 30)).prop_map(|(mut offset, rows, steps)| {
        let mut steps = steps.into_iter().cycle();
        let mut messages = Vec::new();
        for (first, many, dead) in rows {
            for sn in first..first + many {
                offset += steps.next().unwrap_or(1);
                messages.push(Counting { sn, offset, dead });
            }
        }
        messages
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn row_counts_as_its_single_messages(
        batches in vec((1u64..4, 0i32..2, 0i64..90, batch()), 1..8),
    ) {
        let (store, machine) = store();
        let mut model = Model::default();
        for (generation, partition, from, messages) in &batches {
            let by = Batch { generation: *generation, partition: *partition, from: *from };
            let counted = now(store.count("c", by, messages));
            if let Ok(counted) = &counted {
                let here = model_after(&mut model, by, messages);
                prop_assert_eq!(&counted.outcomes, &here);
                let offset = model.at.filter(|(there, _)| *there == by.partition).map(|(_, offset)| offset);
                let count_state = CountState { last: model.last, offset, stored: 0, acked: 0 };
                prop_assert_eq!(counted.count_state, count_state);
            } else {
                prop_assert_eq!(model.count(by, messages), Err(Fenced));
            }
        }
        let text = |key: &str| machine.fake.lock().unwrap().strings.get(key.as_bytes()).map(|n| parse(n));
        let number = |n: u64| (model.last > 0).then_some(n.cast_signed());
        prop_assert_eq!(text("consumer:{c}:last_msg_sn"), number(model.last));
        prop_assert_eq!(text("consumer:{c}:msg_cnt"), number(model.counted));
        let dead = now(store.numbers("consumer:{c}:position", &["dead"]));
        prop_assert_eq!(dead, vec![model.dead]);
    }

    #[test]
    fn persisted_messages_have_no_gap_and_marked_ones_are_deleted(
        steps in vec((any::<bool>(), 1u64..20, vec(prop::bool::weighted(0.9), 1..8)), 1..30),
    ) {
        let (store, machine) = store();
        let TakeOver::Granted { attempt, .. } = now(store.take_over("c", 1)) else { panic!("refused without a competitor") };
        let (mut kept, mut reported) = (BTreeMap::new(), std::collections::BTreeSet::new());
        let (mut acked, mut stored) = (0, 0);
        for (keeps, first, which) in steps {
            let numbers: Vec<u64> = (first..).zip(which).filter(|(_, is)| *is).map(|(sn, _)| sn).collect();
            if numbers.is_empty() {
                continue;
            }
            if keeps {
                let messages: Vec<_> = numbers.iter().map(|sn| (*sn, Bytes::from(format!("m{sn}")))).collect();
                kept.extend(messages.iter().filter(|(sn, _)| *sn > acked).cloned());
                acked = (acked + 1..).take_while(|sn| kept.contains_key(sn)).last().unwrap_or(acked);
                prop_assert_eq!(now(store.persist("c", attempt, &messages)), Ok(acked));
                let lines = now(store.lines("c"));
                let digest = |sn: u64| digest_of(format!("m{sn}").as_bytes());
                prop_assert!((1..=acked).all(|sn| lines.get(&sn) == Some(&digest(sn))), "{:?}", lines);
            } else {
                // The queue reports only on messages it received, in any order, and possibly more than once.
                let numbers: Vec<u64> = numbers.into_iter().rev().filter(|sn| *sn <= acked).collect();
                reported.extend(numbers.iter().copied());
                stored = (stored + 1..).take_while(|sn| reported.contains(sn)).last().unwrap_or(stored);
                prop_assert_eq!(now(store.mark_stored("c", attempt, &numbers)), Ok(stored));
            }
            let left: BTreeMap<u64, Bytes> = kept.range(stored + 1..).map(|(sn, m)| (*sn, m.clone())).collect();
            let fields = machine.fake.lock().unwrap().hashes.get(&b"producer:{c}:messages"[..]).cloned();
            let mut held = BTreeMap::new();
            for (field, value) in fields.unwrap_or_default() {
                let numbers = row::numbers(&field).unwrap();
                prop_assert!(*numbers.end() > stored, "what is through is gone: {:?}", numbers);
                held.extend(row::unpack(&numbers, &field, &value.into()).unwrap());
            }
            held.retain(|sn, _| *sn > stored);
            prop_assert_eq!(&held, &left);
            let next: Vec<_> = left.into_iter().take_while(|(sn, _)| *sn <= acked).collect();
            prop_assert_eq!(now(store.load_messages("c", stored + 1, acked)), next);
        }
        prop_assert_eq!(now(store.persist("c", attempt - 1, &[(acked + 1, Bytes::new())])), Err(Fenced));
        prop_assert_eq!(now(store.mark_stored("c", attempt - 1, &[stored + 1])), Err(Fenced));
    }
}

fn text(partition: i32) -> Text<'static> {
    Text { hash: "h", text: b"text", partition, counted_to: None }
}

/// Messages of one client whose positions are their sequence numbers.
fn placed(client: &str, numbers: impl Iterator<Item = u64>) -> Vec<PositionedMessage<'_>> {
    numbers.map(|sn| PositionedMessage { client, sn, position: sn }).collect()
}

#[test]
fn text_counts_once_per_position() {
    let (store, _) = store();
    for (partition, places, count) in [
        (1, 3..=3, 1),
        (1, 3..=3, 1),
        (1, 4..=9, 7),
        (1, 2..=7, 7),
        (1, 8..=12, 10),
        (2, 1..=2, 12),
        (1, 1..=12, 12),
        (2, 0..=3, 13),
    ] {
        now(store.aggregate(text(partition), &placed("c", places.clone())));
        assert_eq!(now(store.number_at("message:{h}:count")), count, "{partition}: {places:?}");
    }
    assert_eq!(now(store.value_at("message:{h}:text")), Some(Bytes::from_static(b"text")));
}

#[test]
fn text_counted_by_an_earlier_version_continues() {
    for key in ["message:{h}:by", "message:{h}:last"] {
        let (store, machine) = store();
        {
            let mut fake = machine.fake.lock().unwrap();
            fake.strings.insert(b"message:{h}:count".to_vec(), b"2".to_vec());
            let by = [("a", 5), ("b", 9)].map(|(client, sn)| (client.as_bytes().to_vec(), sn));
            if key.ends_with("by") {
                let by = by.map(|(client, sn)| (client, sn.to_string().into_bytes()));
                fake.hashes.insert(key.into(), by.into());
            } else {
                fake.sets.insert(key.into(), by.into());
            }
        }
        let by: Vec<PositionedMessage<'_>> = [("a", 5), ("a", 6), ("b", 7), ("c", 1)]
            .iter()
            .zip(100..)
            .map(|((client, sn), position)| PositionedMessage { client, sn: *sn, position })
            .collect();
        now(store.aggregate(text(1), &by[..2]));
        now(store.aggregate(text(1), &by));
        now(store.aggregate(text(1), &by));
        assert_eq!(now(store.number_at("message:{h}:count")), 4, "{key}");
        assert!(!machine.fake.lock().unwrap().hashes.contains_key(&b"message:{h}:by"[..]));
    }
}

#[test]
fn partition_with_thousands_of_clients_fits_into_script_arguments() {
    let (store, _) = store();
    let names: Vec<String> = (0..3_500).map(|n| format!("client-{n}")).collect();
    let clients: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 7)).collect();
    let to = ReadTo { shift: 2, next: 9, rebuild: 0 };
    now(store.record_read(3, to, &clients));
    // A reader that is behind changes nothing.
    now(store.record_read(3, ReadTo { shift: 0, next: 8, rebuild: 0 }, &[("client-0", 6), ("other", 1)]));
    let some = ["client-0", "client-3499", "other", "unknown"];
    assert_eq!(now(store.read_to(3, &some)), (to, vec![7, 7, 1, 0]));
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(now(store.read_to(3, &all)), (to, vec![7; 3_500]));
    assert_eq!(now(store.read_to(4, &["client-0"])), (ReadTo::default(), vec![0]));
}

#[test]
fn retried_row_is_persisted_once_and_a_row_behind_a_gap_is_split() {
    let (store, machine) = store();
    let TakeOver::Granted { attempt, .. } = now(store.take_over("c", 1)) else {
        panic!("refused without a competitor")
    };
    let row = |numbers: RangeInclusive<u64>| -> Vec<_> {
        numbers.map(|sn| (sn, Bytes::from(format!("m{sn}")))).collect()
    };
    let fields = || -> Vec<String> {
        let fake = machine.fake.lock().unwrap();
        let fields = fake.hashes[&b"producer:{c}:messages"[..]].keys();
        fields.map(|field| String::from_utf8(field.clone()).unwrap()).collect()
    };
    assert_eq!(now(store.persist("c", attempt, &row(1..=4))), Ok(4));
    assert_eq!(now(store.persist("c", attempt, &row(1..=4))), Ok(4));
    assert_eq!(now(store.persist("c", attempt, &row(7..=8))), Ok(4), "5 and 6 are missing");
    assert_eq!(fields(), ["1-4", "7", "8"]);
    assert_eq!(now(store.persist("c", attempt, &row(5..=6))), Ok(8), "the gap is closed");
    assert_eq!(now(store.mark_stored("c", attempt, &[1, 2, 3])), Ok(3));
    assert_eq!(fields(), ["1-4", "5-6", "7", "8"]);
    assert_eq!(now(store.load_messages("c", 4, 8)), row(4..=8));
    assert_eq!(now(store.mark_stored("c", attempt, &[4, 5, 6, 7])), Ok(7));
    assert_eq!(fields(), ["8"]);
}

#[test]
fn messages_in_the_queue_are_acknowledged_after_store_data_loss() {
    let (store, _) = store();
    let TakeOver::Granted { attempt, .. } = now(store.take_over("c", 1)) else {
        panic!("refused without a competitor")
    };
    assert_eq!(now(store.mark_stored("c", attempt, &[1, 2, 3])), Ok(3));
    assert!(matches!(now(store.take_over("c", 1)), TakeOver::Granted { acked: 3, stored: 3, .. }));
    let message = [(4, Bytes::from_static(b"four"))];
    assert_eq!(now(store.persist("c", attempt + 1, &message)), Ok(4));
}
