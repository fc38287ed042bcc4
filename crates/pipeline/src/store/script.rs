//! The Lua scripts, and how they are run: with EVALSHA, and with EVAL where the node does not know the script yet.
//!
//! Numbers are sequence numbers and times in milliseconds, all far below 2^53, which Lua represents exactly.

use std::sync::OnceLock;

use super::{Reply, Store, StoreError};

/// A script of the store.
pub struct Script {
    text: &'static str,
    sha1: OnceLock<String>,
}

/// KEYS state, early; ARGV incarnation, idle: with an incarnation the client has connected, with an idle time it is
/// adopted. Messages in the queue count as acknowledged, even where a store that loses writes in a failover has lost
/// the acknowledgement.
pub(super) static TAKE_OVER: Script = Script::new(
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

/// KEYS state, messages, lines; ARGV attempt, the first and the last sequence number of a row, the row, the digests
/// of its messages. A row that does not continue the store's messages is answered with `apart`: its messages must be
/// passed one by one. A row that exists already is not written again.
pub(super) static PERSIST_ROW: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'acked', 'sent')
if had[1] ~= ARGV[1] then return {'fenced'} end
local acked, sent = tonumber(had[2] or '0'), tonumber(had[3] or '0')
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
if last > acked then
  if first ~= acked + 1 then return {'apart'} end
  redis.call('HSET', KEYS[2], ARGV[2] .. '-' .. ARGV[3], ARGV[4])
  redis.call('HSET', KEYS[3], ARGV[2] .. '-' .. ARGV[3], ARGV[5])
  acked = last
  while redis.call('HEXISTS', KEYS[2], acked + 1) == 1 do acked = acked + 1 end
end
if acked > sent then sent = acked end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'acked', acked, 'sent', sent, 'seen', time[1] * 1000 + math.floor(time[2] / 1000))
return {'ok', acked}",
);

/// KEYS state, messages, lines; ARGV attempt, then alternating sequence number, message and digest: messages that are
/// duplicates or leave gaps.
pub(super) static PERSIST: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'attempt', 'acked', 'sent')
if had[1] ~= ARGV[1] then return {'fenced'} end
local acked, sent, put, lines = tonumber(had[2] or '0'), tonumber(had[3] or '0'), {}, {}
for at = 2, #ARGV, 3 do
  local sn = tonumber(ARGV[at])
  if sn > sent then sent = sn end
  if sn > acked then
    put[#put + 1] = ARGV[at]
    put[#put + 1] = ARGV[at + 1]
    lines[#lines + 1] = ARGV[at]
    lines[#lines + 1] = ARGV[at + 2]
    if sn == acked + 1 then acked = sn end
  end
end
if #put > 0 then
  redis.call('HSET', KEYS[2], unpack(put))
  redis.call('HSET', KEYS[3], unpack(lines))
  while redis.call('HEXISTS', KEYS[2], acked + 1) == 1 do acked = acked + 1 end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'acked', acked, 'sent', sent, 'seen', time[1] * 1000 + math.floor(time[2] / 1000))
return {'ok', acked}",
);

/// KEYS state; ARGV sent, and the digest of everything sent, or an empty string.
pub(super) static SENT: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'sent', 'digest_to')
local sent, digest_to = tonumber(had[1] or '0'), tonumber(had[2] or '0')
local mine = tonumber(ARGV[1])
if mine > sent then redis.call('HSET', KEYS[1], 'sent', ARGV[1]) end
if ARGV[2] ~= '' and mine >= digest_to then
  redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'digest_to', ARGV[1])
end
return {'ok', sent}",
);

/// KEYS state, last, count, position. Reads atomically: answers sent, acked, stored, digest_to, last, counted, dead,
/// blocked, and the digest.
pub(super) static OBSERVE: Script = Script::new(
    r"local source = redis.call('HMGET', KEYS[1], 'sent', 'acked', 'stored', 'digest_to', 'digest')
local at = redis.call('HMGET', KEYS[4], 'dead', 'blocked')
local last, counted = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])
local found = {'ok'}
for _, n in ipairs({source[1] or '0', source[2] or '0', source[3] or '0', source[4] or '0',
    last or '0', counted or '0', at[1] or '0', at[2] or '0'}) do
  found[#found + 1] = tonumber(n)
end
found[#found + 1] = source[5] or ''
return found",
);

/// KEYS state, messages, early; ARGV attempt, then the first and the last of each range of reported sequence numbers.
/// Stored messages are deleted: single messages at once, a row when all of it is stored.
pub(super) static MARK_STORED: Script = Script::new(
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

/// KEYS last, count, position, state; ARGV generation, partition, the offset at which the batch begins, then for each
/// run of messages with consecutive sequence numbers: the first number, the length, the offset of the last, and their
/// kind. Answers the client's state after them (last, offset in this partition or -1, stored, acked), then for each
/// run how many were counted before, how many are counted now, and the first of the earlier ones that is forwarded
/// again.
///
/// A batch begins where the last committed one ended. So a batch that begins after the client's last message of the
/// previous batch (`upto`) proves that the messages forwarded then (`pass`) are committed (`base`). A batch that
/// begins earlier re-reads the same messages: counted messages are forwarded again, each number once and in order,
/// and nothing is counted before that is done. Otherwise a message that stood behind a gap the first time would
/// overtake its predecessors.
///
/// Limit: a store that reverts to a state between an aborted transaction and the committed part of its repetition
/// takes all of the first for forwarded. The verifier then names the texts whose counts are too low.
pub(super) static COUNT: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[3], 'generation', 'partition', 'offset', 'dead', 'blocked', 'base', 'pass', 'upto')
if tonumber(had[1] or '0') > tonumber(ARGV[1]) then return {'fenced'} end
local was = redis.call('MGET', KEYS[1], KEYS[2])
local last, counted, offset = tonumber(was[1] or '0'), tonumber(was[2] or '0'), tonumber(had[3] or '-1')
local dead, same = tonumber(had[4] or '0'), had[2] == ARGV[2]
local base, pass = tonumber(had[6] or last), tonumber(had[7] or last)
local before = had[8] and string.match(had[8], '^' .. ARGV[2] .. ':(%d+)$')
if before and tonumber(ARGV[3]) > tonumber(before) then base = pass end
pass = base
local answer, moved = {'ok', 0, 0, 0, 0}, false
for at = 4, #ARGV, 4 do
  local first, many = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local old, new = math.max(0, math.min(many, last + 1 - first)), 0
  local again = old
  if first <= pass + 1 and pass + 1 < first + old then
    again = pass + 1 - first
    pass = first + old - 1
  end
  if old < many and first + old == last + 1 and pass >= last then
    new = many - old
    last, offset, same, moved = last + new, tonumber(ARGV[at + 2]), true, true
    pass = math.max(pass, last)
    if ARGV[at + 3] == 'd' then dead = dead + new else counted = counted + new end
  end
  answer[#answer + 1] = old
  answer[#answer + 1] = new
  answer[#answer + 1] = again
end
if moved then
  redis.call('MSET', KEYS[1], last, KEYS[2], counted)
  redis.call('HSET', KEYS[3], 'partition', ARGV[2], 'offset', offset, 'dead', dead)
  if had[5] then redis.call('HDEL', KEYS[3], 'blocked') end
end
redis.call('HSET', KEYS[3], 'generation', ARGV[1], 'base', base, 'pass', pass, 'upto', ARGV[2] .. ':' .. ARGV[#ARGV - 1])
local source = redis.call('HMGET', KEYS[4], 'stored', 'acked')
answer[2], answer[3] = last, same and offset or -1
answer[4], answer[5] = tonumber(source[1] or '0'), tonumber(source[2] or '0')
return answer",
);

/// KEYS last, position, state. Answers the partition of a client's messages (-1 if unknown), the last counted number,
/// its offset in that partition (or -1), stored, acked.
pub(super) static COUNT_STATE: Script = Script::new(
    r"local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local at = redis.call('HMGET', KEYS[2], 'partition', 'offset')
local source = redis.call('HMGET', KEYS[3], 'partition', 'stored', 'acked')
local partition = source[1] or at[1] or '-1'
local offset = partition == at[1] and tonumber(at[2] or '-1') or -1
return {'ok', tonumber(partition), last, offset, tonumber(source[2] or '0'), tonumber(source[3] or '0')}",
);

/// KEYS position; ARGV generation, partition. The counter of this generation of the partition has committed
/// everything it forwarded. Answers 1 if this counter was the last to count the client.
pub(super) static SETTLE: Script = Script::new(
    r"local had = redis.call('HMGET', KEYS[1], 'generation', 'pass', 'upto')
if had[1] ~= ARGV[1] or not had[2] or not had[3] then return {'ok', 0} end
if string.match(had[3], '^(%d+):') ~= ARGV[2] then return {'ok', 0} end
redis.call('HSET', KEYS[1], 'base', had[2])
return {'ok', 1}",
);

/// KEYS last, position; ARGV the number of the missing message.
pub(super) static BLOCK: Script = Script::new(
    r"if tonumber(redis.call('GET', KEYS[1]) or '0') + 1 == tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[2], 'blocked', ARGV[1])
end
return {'ok'}",
);

/// KEYS state; ARGV a partition, and the partition count as its limit. Keeps an existing valid value.
pub(super) static PIN: Script = Script::new(
    r"local pinned = tonumber(redis.call('HGET', KEYS[1], 'partition') or '-1')
local limit = tonumber(ARGV[2])
if pinned < 0 or pinned > limit then
  pinned = tonumber(ARGV[1])
  redis.call('HSET', KEYS[1], 'partition', pinned)
end
return {'ok', pinned}",
);

/// KEYS at, count, text, last, by; ARGV partition, the first and the last position of the messages there, their
/// number, the text, the last position known to be counted (or -1). Counts all messages or none: if some were counted
/// before, it answers up to which position; if the text is behind the known position, it answers so. `last` and `by`
/// are keys of earlier versions.
pub(super) static AGGREGATE: Script = Script::new(
    r"local at = redis.call('HGET', KEYS[1], ARGV[1])
if tonumber(at or '-1') < tonumber(ARGV[6]) and redis.call('EXISTS', KEYS[4], KEYS[5]) == 0 then return {'behind'} end
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

/// KEYS reading, last; ARGV clients. Reads atomically: answers shift, next and rebuild, and the last number of each
/// client.
pub(super) static READ_POSITION: Script = Script::new(
    r"local to = redis.call('HMGET', KEYS[1], 'shift', 'next', 'rebuild')
local found = {'ok', tonumber(to[1] or '0'), tonumber(to[2] or '0'), tonumber(to[3] or '0')}
for from = 1, #ARGV, 1000 do
  local last = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, from, math.min(from + 999, #ARGV)))
  for at = 1, #last do found[#found + 1] = tonumber(last[at] or '0') end
end
return found",
);

/// KEYS reading, last; ARGV shift, next, then alternating sequence number and client.
pub(super) static RECORD_READ: Script = Script::new(
    r"for from = 3, #ARGV, 2000 do
  redis.call('ZADD', KEYS[2], 'GT', unpack(ARGV, from, math.min(from + 1999, #ARGV)))
end
if tonumber(ARGV[2]) > tonumber(redis.call('HGET', KEYS[1], 'next') or '0') then
  redis.call('HSET', KEYS[1], 'shift', ARGV[1], 'next', ARGV[2])
end
return {'ok'}",
);

/// KEYS count, last, text, by; ARGV text, then alternating sequence number and client. A client may appear more than
/// once: each number above its last one counts. `by` is where a still earlier version kept the last numbers, as a
/// hash.
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

    /// Runs the script with text arguments.
    pub(super) async fn run(&self, store: &Store, keys: &[&str], args: &[&str]) -> Result<Reply, StoreError> {
        let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
        self.run_bytes(store, keys, &args).await
    }

    /// Runs the script with binary arguments.
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
            // SCRIPT LOAD returns the digest. Without it, the script text is sent every time.
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
