//! The scripts, and how one is run: by its digest, and with its text where the node does not know it yet.
//!
//! Numbers are sequence numbers and times in milliseconds, all far below 2^53, which Lua counts exactly.

use std::sync::OnceLock;

use super::{Reply, Store, StoreError};

/// A script of the store.
pub struct Script {
    text: &'static str,
    sha1: OnceLock<String>,
}

/// KEYS state, early; ARGV incarnation, idle: with an incarnation the client has connected, with an idle time it is adopted.
/// What the queue has is acknowledged, even where a store that loses messages in a failover has forgotten that it was.
pub(super) static TAKE: Script = Script::new(
    r"local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local had = redis.call('HMGET', KEYS[1], 'incarnation', 'acked', 'stored', 'attempt', 'seen')
local incarnation, acked = tonumber(had[1] or '0'), tonumber(had[2] or '0')
local stored, attempt, seen = tonumber(had[3] or '0'), tonumber(had[4] or '0'), tonumber(had[5] or '0')
local mine, idle = tonumber(ARGV[1]), tonumber(ARGV[2])
if stored > acked then
  acked = stored
  redis.call('HSET', KEYS[1], 'acked', acked)
end
if idle > 0 then
  if acked <= stored or now - seen < idle then return {'busy'} end
else
  if mine < incarnation then return {'stale', incarnation} end
  incarnation = mine
end
attempt = attempt + 1
redis.call('HSET', KEYS[1], 'incarnation', incarnation, 'attempt', attempt, 'seen', now)
redis.call('DEL', KEYS[2])
return {'ok', attempt, acked, stored}",
);

/// KEYS state, messages; ARGV attempt, the first and the last sequence number of a row, the row. A row that does not begin
/// where the store's messages end is apart: its messages have to come one by one. One that is there already is not kept
/// again.
pub(super) static KEEP_ROW: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'acked', 'sent')
if had[1] ~= ARGV[1] then return {'fenced'} end
local acked, sent = tonumber(had[2] or '0'), tonumber(had[3] or '0')
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
if last > acked then
  if first ~= acked + 1 then return {'apart'} end
  redis.call('HSET', KEYS[2], ARGV[2] .. '-' .. ARGV[3], ARGV[4])
  acked = last
  while redis.call('HEXISTS', KEYS[2], acked + 1) == 1 do acked = acked + 1 end
end
if acked > sent then sent = acked end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'acked', acked, 'sent', sent, 'seen', time[1] * 1000 + math.floor(time[2] / 1000))
return {'ok', acked}",
);

/// KEYS state, messages; ARGV attempt, then sequence number and message in turn: messages that come twice or leave gaps.
pub(super) static KEEP: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'acked', 'sent')
if had[1] ~= ARGV[1] then return {'fenced'} end
local acked, sent, put = tonumber(had[2] or '0'), tonumber(had[3] or '0'), {}
for at = 2, #ARGV, 2 do
  local sn = tonumber(ARGV[at])
  if sn > sent then sent = sn end
  if sn > acked then
    put[#put + 1] = ARGV[at]
    put[#put + 1] = ARGV[at + 1]
    if sn == acked + 1 then acked = sn end
  end
end
if #put > 0 then
  redis.call('HSET', KEYS[2], unpack(put))
  while redis.call('HEXISTS', KEYS[2], acked + 1) == 1 do acked = acked + 1 end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'acked', acked, 'sent', sent, 'seen', time[1] * 1000 + math.floor(time[2] / 1000))
return {'ok', acked}",
);

/// KEYS state; ARGV sent.
pub(super) static SENT: Script = Script::new(
    r"local sent = tonumber(redis.call('HGET', KEYS[1], 'sent') or '0')
if tonumber(ARGV[1]) > sent then redis.call('HSET', KEYS[1], 'sent', ARGV[1]) end
return {'ok', sent}",
);

/// KEYS state, messages, early; ARGV attempt, then the first and the last of each row of sequence numbers that were reported.
/// What is through is deleted: single messages, and rows once all of them is.
pub(super) static MARK: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'stored')
if had[1] ~= ARGV[1] then return {'fenced'} end
local before = tonumber(had[2] or '0')
local stored = before
for at = 2, #ARGV, 2 do
  local first, last = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  if first <= stored + 1 then
    if last > stored then stored = last end
  else
    for sn = first, last do redis.call('ZADD', KEYS[3], sn, sn) end
  end
end
while stored > before do
  local first = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if not first or tonumber(first) > stored + 1 then break end
  redis.call('ZREM', KEYS[3], first)
  if tonumber(first) == stored + 1 then stored = stored + 1 end
end
if stored > before then
  local gone = {}
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    if tonumber(string.match(field, '%d+$')) <= stored then gone[#gone + 1] = field end
  end
  for at = 1, #gone, 1000 do
    redis.call('HDEL', KEYS[2], unpack(gone, at, math.min(at + 999, #gone)))
  end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'stored', stored, 'seen', time[1] * 1000 + math.floor(time[2] / 1000))
return {'ok', stored}",
);

/// KEYS state, early; ARGV attempt.
pub(super) static REWIND: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'stored')
if had[1] ~= ARGV[1] then return {'fenced'} end
redis.call('DEL', KEYS[2])
return {'ok', tonumber(had[2] or '0')}",
);

/// KEYS last, count, position; ARGV generation, partition, then for each row of messages whose sequence numbers follow one by
/// one: the first number, how many, the offset of the last, and their kind. Answers for each row how many had been counted
/// before, how many are counted now, and up to which offset those before are repeats.
pub(super) static COUNT: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[3], 'generation', 'partition', 'offset', 'dead')
if tonumber(had[1] or '0') > tonumber(ARGV[1]) then return {'fenced'} end
local was = redis.call('MGET', KEYS[1], KEYS[2])
local last, counted, offset = tonumber(was[1] or '0'), tonumber(was[2] or '0'), tonumber(had[3] or '-1')
local dead, same = tonumber(had[4] or '0'), had[2] == ARGV[2]
local answer, moved = {'ok'}, false
for at = 3, #ARGV, 4 do
  local first, many = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local old, new = math.max(0, math.min(many, last + 1 - first)), 0
  local limit = same and offset or 9007199254740991
  if old < many and first + old == last + 1 then
    new = many - old
    last, offset, same, moved = last + new, tonumber(ARGV[at + 2]), true, true
    if ARGV[at + 3] == 'd' then dead = dead + new else counted = counted + new end
  end
  answer[#answer + 1] = old
  answer[#answer + 1] = new
  answer[#answer + 1] = limit
end
if moved then
  redis.call('MSET', KEYS[1], last, KEYS[2], counted)
  redis.call('HSET', KEYS[3], 'generation', ARGV[1], 'partition', ARGV[2], 'offset', offset, 'dead', dead)
elseif had[1] ~= ARGV[1] then
  redis.call('HSET', KEYS[3], 'generation', ARGV[1])
end
return answer",
);

/// KEYS at, count, text, last, by; ARGV partition, the first and the last place of the messages there, how many they are, the
/// text. Counts all of them or none: when some were counted before, it says up to where. `last` and `by` are of earlier versions.
pub(super) static AGGREGATE: Script = Script::new(
    r"local at = redis.call('HGET', KEYS[1], ARGV[1])
if at then
  at = tonumber(at)
  if at >= tonumber(ARGV[3]) then return {'ok', 0} end
  if at >= tonumber(ARGV[2]) then return {'apart', at} end
elseif redis.call('EXISTS', KEYS[4], KEYS[5]) > 0 then
  return {'old'}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local many = tonumber(ARGV[4])
if redis.call('INCRBY', KEYS[2], many) == many then redis.call('SET', KEYS[3], ARGV[5]) end
return {'ok', many}",
);

/// KEYS reading, last; ARGV clients. All of one moment: answers shift and next, and the last number of each client.
pub(super) static LOOK: Script = Script::new(
    r"local to = redis.call('HMGET', KEYS[1], 'shift', 'next')
local found = {'ok', tonumber(to[1] or '0'), tonumber(to[2] or '0')}
for from = 1, #ARGV, 1000 do
  local last = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, from, math.min(from + 999, #ARGV)))
  for at = 1, #last do found[#found + 1] = tonumber(last[at] or '0') end
end
return found",
);

/// KEYS reading, last; ARGV shift, next, then sequence number and client in turn.
pub(super) static READ: Script = Script::new(
    r"for from = 3, #ARGV, 2000 do
  redis.call('ZADD', KEYS[2], 'GT', unpack(ARGV, from, math.min(from + 1999, #ARGV)))
end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[1], 'next') or '0') then
  redis.call('HSET', KEYS[1], 'shift', ARGV[1], 'next', ARGV[2])
end
return {'ok'}",
);

/// KEYS count, last, text, by; ARGV text, then sequence number and client in turn. A client may come more than once: each
/// number above its last one counts. `by` is where a still
/// earlier version had the last numbers, as a hash.
pub(super) static AGGREGATE_OLD: Script = Script::new(
    r"if redis.call('EXISTS', KEYS[4]) == 1 then
  local had = redis.call('HGETALL', KEYS[4])
  for at = 1, #had, 2 do redis.call('ZADD', KEYS[2], 'GT', had[at + 1], had[at]) end
  redis.call('DEL', KEYS[4])
end
local new = 0
for from = 2, #ARGV, 2000 do
  new = new + redis.call('ZADD', KEYS[2], 'GT', 'CH', unpack(ARGV, from, math.min(from + 1999, #ARGV)))
end
if new > 0 and redis.call('INCRBY', KEYS[1], new) == new then redis.call('SET', KEYS[3], ARGV[1]) end
return {'ok', new}",
);

impl Script {
    const fn new(text: &'static str) -> Self {
        Self { text, sha1: OnceLock::new() }
    }

    /// Runs it with text arguments.
    pub(super) async fn run(&self, store: &Store, keys: &[&str], args: &[&str]) -> Result<Reply, StoreError> {
        let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
        self.run_bytes(store, keys, &args).await
    }

    /// Runs it.
    pub(super) async fn run_bytes(
        &self,
        store: &Store,
        keys: &[&str],
        args: &[&[u8]],
    ) -> Result<Reply, StoreError> {
        if let Some(sha1) = self.sha1.get() {
            match store.call(&command(b"EVALSHA", sha1.as_bytes(), keys, args)).await {
                Err(StoreError::Refused(why)) if why.starts_with("NOSCRIPT") => {}
                other => return other,
            }
        }
        let reply = store.call(&command(b"EVAL", self.text.as_bytes(), keys, args)).await?;
        if self.sha1.get().is_none() {
            // The store says what it is called. Without it, the text goes along every time.
            if let Ok(replies) = store.commands().call_all(&[b"SCRIPT", b"LOAD", self.text.as_bytes()]).await
                && let Some(Reply::Bytes(sha1)) = replies.first()
            {
                let _ = self.sha1.set(String::from_utf8_lossy(sha1).into_owned());
            }
        }
        Ok(reply)
    }
}

fn command<'a>(verb: &'a [u8], script: &'a [u8], keys: &'a [&str], args: &'a [&'a [u8]]) -> Vec<&'a [u8]> {
    const COUNTS: [&[u8]; 6] = [b"0", b"1", b"2", b"3", b"4", b"5"];
    let mut command = Vec::with_capacity(3 + keys.len() + args.len());
    command.extend([verb, script, COUNTS[keys.len()]]);
    command.extend(keys.iter().map(|key| key.as_bytes()));
    command.extend(args);
    command
}
