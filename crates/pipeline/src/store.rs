//! The pipeline's keys in the store, and the Lua scripts that change them.
//!
//! All keys of a client share the client's hash tag, all keys of a text share the text's, so each step is one atomic
//! script on one slot. Scripts are idempotent: a script whose reply was lost is run again.
//!
//! | key | holds |
//! |---|---|
//! | `producer:{cid}:state` | incarnation, attempt (the relaying gateway and its round), sent, acked, stored, last access time, the partition of its messages |
//! | `producer:{cid}:messages` | messages not yet confirmed by the queue: runs of messages by their first and last sequence number (see [`row`]), single ones by their own |
//! | `producer:{cid}:lines` | digests of the accepted messages, in rows and single ones like the messages; never deleted |
//! | `producer:{cid}:stored_msg_sn_tmp_list` | delivery reports that arrived before an earlier one |
//! | `producer:index:{0..15}` | the names of all clients |
//! | `consumer:{cid}:last_msg_sn`, `:msg_cnt` | the last counted message, and how many were counted |
//! | `consumer:{cid}:position` | the offset of that message, the counter's generation, the number of dead-lettered messages, the missing message, the sequence numbers up to which messages were forwarded by committed transactions (base) and by the last one (pass), and the last offset of that (upto) |
//! | `consumer:{aggregator}:state` | the partition count over which texts are spread |
//! | `message:{hash}:count`, `:text`, `:at` | the count of a text, the text, the position of each partition up to which it was counted (see [`texts`]) |
//! | `consumer:{aggregator-p}:reading`, `:last` | the position up to which a partition was read by aggregators, and the last sequence number of each client there (a sorted set) |
//!
//! Invariants: acked never decreases; nothing is deleted from `messages` before the queue has it; rows in `messages`
//! lie at or before `acked` and do not overlap; `last_msg_sn` grows by one at a time.
//!
//! Compatibility: earlier versions kept every message on its own, as single messages still are, and with each text
//! the last sequence number of each client: a sorted set `message:{hash}:last`, before that a hash `:by`. Texts with
//! one of these keys are counted by it as long as it exists. Earlier versions cannot read what this version writes:
//! stop all gateways and aggregators before the first new one starts. A downgrade is not possible.

mod row;
mod script;
mod slots;
mod texts;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use sha2::{Digest, Sha256};

pub use self::script::Script;
pub use self::slots::connect;
pub use self::texts::{Aggregated, CountedFor, PositionedMessage, ReadTo, Text};

/// A boxed future.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A reply of the store.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// No value.
    Nil,
    /// A number.
    Int(i64),
    /// A string, bulk or simple.
    Bytes(Bytes),
    /// A list of replies.
    Array(Vec<Reply>),
}

impl Reply {
    /// The reply as a number, also if it is a string of digits.
    pub fn int(&self) -> Option<i64> {
        match self {
            Reply::Int(n) => Some(*n),
            Reply::Bytes(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
            Reply::Nil | Reply::Array(_) => None,
        }
    }

    /// The reply as bytes.
    pub fn bytes(&self) -> Option<&Bytes> {
        match self {
            Reply::Bytes(bytes) => Some(bytes),
            Reply::Nil | Reply::Int(_) | Reply::Array(_) => None,
        }
    }

    /// The reply as a list.
    pub fn list(&self) -> &[Reply] {
        match self {
            Reply::Array(list) => list,
            Reply::Nil | Reply::Int(_) | Reply::Bytes(_) => &[],
        }
    }
}

/// Why a store call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Unreachable, or no reply in time: the command may have been executed, and may be retried.
    #[error("the store does not answer: {0}")]
    Unavailable(String),
    /// The store replied with an error.
    #[error("the store refused: {0}")]
    Refused(String),
    /// The store replied with an unexpected type or value.
    #[error("unexpected reply of the store: {0}")]
    UnexpectedReply(String),
}

/// A client of a Redis Cluster.
pub trait Commands: Send + Sync + 'static {
    /// Runs a command; its first key selects the node.
    fn call<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Reply, StoreError>>;
    /// Runs a command on every primary.
    fn call_all<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Vec<Reply>, StoreError>>;
    /// Every matching key on all nodes; a key may appear twice.
    fn keys<'a>(&'a self, pattern: &'a str) -> BoxFuture<'a, Result<Vec<Bytes>, StoreError>>;
}

/// Messages per script call where they are passed one by one: Lua accepts a few thousand arguments.
const SINGLES: usize = 1_024;

/// Number of sets that hold the client names.
const INDEX: u64 = 16;

/// The pipeline's access to the store.
#[derive(Clone)]
pub struct Store {
    commands: Arc<dyn Commands>,
}

/// Result of a gateway's attempt to relay for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeOver {
    /// The gateway relays from now on, under this attempt.
    Granted {
        /// Fences every gateway with an older attempt.
        attempt: u64,
        /// Everything up to this sequence number is in the store or the queue.
        acked: u64,
        /// Everything up to this sequence number is in the queue.
        stored: u64,
    },
    /// A newer incarnation of the client has connected.
    Stale {
        /// The newer incarnation.
        incarnation: u64,
    },
    /// Nothing is left to relay, or another gateway serves the client.
    Busy,
}

/// Another gateway or counter has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced;

/// Outcome of counting one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountOutcome {
    /// Counted now: forward it.
    Counted,
    /// Counted before, by an attempt that may not have committed: forward it, do not count it.
    Repeated,
    /// Counted before, and forwarded: skip it.
    Dropped,
    /// A predecessor was not counted.
    Ahead,
}

/// The store's state of a client whose messages are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CountState {
    /// Sequence number of the last counted message.
    pub last: u64,
    /// Offset of that message; none if it is in another partition, or if nothing was counted.
    pub offset: Option<i64>,
    /// Everything up to this sequence number is confirmed by the queue. Later messages are kept until it confirms
    /// them.
    pub stored: u64,
    /// Everything up to this sequence number is kept by the gateway.
    pub acked: u64,
}

/// Identifies the counter and the batch of counted messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The generation under which the partition is counted.
    pub generation: u64,
    /// The partition of the batch.
    pub partition: i32,
    /// Offset at which the batch begins: the committed offset of the previous one.
    pub from: i64,
}

/// Outcome of counting messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// One outcome per message.
    pub outcomes: Vec<CountOutcome>,
    /// The client's state after them.
    pub count_state: CountState,
}

/// The store's counts of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientObserved {
    /// The largest sequence number it has sent.
    pub sent: u64,
    /// Everything up to this sequence number was accepted.
    pub acked: u64,
    /// Everything up to this sequence number is in the queue.
    pub stored: u64,
    /// Sequence number of the last counted message.
    pub last: u64,
    /// How many were counted.
    pub counted: u64,
    /// How many were written to the dead-letter topic.
    pub dead: u64,
    /// Sequence number of the missing message that blocks the client's count; 0 if absent.
    pub blocked: u64,
    /// The sequence number up to which the client has declared what it sent, and the digest of those lines.
    pub digest: Option<(u64, String)>,
}

/// A message to be counted.
#[derive(Clone, Copy, Debug)]
pub struct Counting {
    /// The client's sequence number.
    pub sn: u64,
    /// Offset in the topic.
    pub offset: i64,
    /// True if it goes to the dead-letter topic.
    pub dead: bool,
}

impl Counting {
    /// True if both messages belong to one row.
    fn is_followed_by(&self, next: &Counting) -> bool {
        next.sn == self.sn + 1 && next.offset > self.offset && next.dead == self.dead
    }
}

impl Store {
    /// A store on top of a Redis Cluster client.
    pub fn new(commands: Arc<dyn Commands>) -> Self {
        Self { commands }
    }

    /// The underlying client, for other commands.
    pub fn commands(&self) -> &dyn Commands {
        &*self.commands
    }

    async fn call(&self, command: &[&[u8]]) -> Result<Reply, StoreError> {
        self.commands.call(command).await
    }

    /// Registers a client, so that the sweep and the verifier find it.
    pub async fn register_client(&self, client: &str) -> Result<(), StoreError> {
        self.call(&[b"SADD", index_of(client).as_bytes(), client.as_bytes()]).await.map(drop)
    }

    /// The names of all registered clients.
    pub async fn clients(&self) -> Result<Vec<String>, StoreError> {
        let keys: Vec<String> = (0..INDEX).map(|at| format!("producer:index:{{{at}}}")).collect();
        let names = keys.iter().map(|key| async move { self.call(&[b"SMEMBERS", key.as_bytes()]).await });
        let mut clients = Vec::new();
        for reply in futures_util::future::try_join_all(names).await? {
            let names = reply.list().iter().filter_map(Reply::bytes);
            clients.extend(names.map(|name| String::from_utf8_lossy(name).into_owned()));
        }
        clients.sort();
        Ok(clients)
    }

    /// Takes over the relay of a client that has connected.
    pub async fn take_over(&self, client: &str, incarnation: u64) -> Result<TakeOver, StoreError> {
        self.run_take_over(client, &[&number(incarnation), "0"]).await
    }

    /// Takes over the relay of a client that no gateway has served for `idle_ms`, if it has messages waiting.
    pub async fn adopt(&self, client: &str, idle_ms: u64) -> Result<TakeOver, StoreError> {
        self.run_take_over(client, &["0", &number(idle_ms)]).await
    }

    async fn run_take_over(&self, client: &str, args: &[&str]) -> Result<TakeOver, StoreError> {
        let reply = script::TAKE_OVER.run(self, &[&state(client), &early(client)], args).await?;
        let field = |at: usize| reply.list().get(at).and_then(Reply::int).map(i64::unsigned_abs);
        match (word(&reply), field(1), field(2), field(3)) {
            (b"ok", Some(attempt), Some(acked), Some(stored)) => {
                Ok(TakeOver::Granted { attempt, acked, stored })
            }
            (b"stale", Some(incarnation), ..) => Ok(TakeOver::Stale { incarnation }),
            (b"busy", ..) => Ok(TakeOver::Busy),
            _ => Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
        }
    }

    /// Persists messages; returns the sequence number up to which there is no gap.
    ///
    /// Messages that continue the stored sequence without a gap are one value: the cost per value is paid once per
    /// row.
    pub async fn persist(
        &self,
        client: &str,
        attempt: u64,
        messages: &[(u64, Bytes)],
    ) -> Result<Result<u64, Fenced>, StoreError> {
        let keys = [state(client), waiting(client), lines(client)];
        let keys = keys.each_ref().map(String::as_str);
        let attempt = number(attempt);
        let digests: Vec<u8> = messages.iter().flat_map(|(_, message)| digest_of(message)).collect();
        if let Some(row) = row::of(messages) {
            let (first, last) = (number(*row.numbers.start()), number(*row.numbers.end()));
            let args: [&[u8]; 5] =
                [attempt.as_bytes(), first.as_bytes(), last.as_bytes(), &row.packed, &digests];
            let reply = script::PERSIST_ROW.run_bytes(self, &keys, &args).await?;
            if word(&reply) != b"apart" {
                return fenced_or_number(&reply);
            }
        }
        let numbers: Vec<String> = messages.iter().map(|(sn, _)| number(*sn)).collect();
        let mut acked = 0;
        let singles: Vec<_> = messages.iter().zip(&numbers).zip(digests.chunks(DIGEST)).collect();
        for singles in singles.chunks(SINGLES) {
            let mut args: Vec<&[u8]> = vec![attempt.as_bytes()];
            for (((_, message), sn), digest) in singles {
                args.extend([sn.as_bytes(), &message[..], *digest]);
            }
            match fenced_or_number(&script::PERSIST.run_bytes(self, &keys, &args).await?)? {
                Ok(number) => acked = number,
                Err(Fenced) => return Ok(Err(Fenced)),
            }
        }
        Ok(Ok(acked))
    }

    /// Records the last sequence number that the client has sent, with the digest ([`digest_of_all`]).
    pub async fn record_sent(
        &self,
        client: &str,
        sent: u64,
        digest: Option<[u8; DIGEST]>,
    ) -> Result<(), StoreError> {
        let digest = digest.map_or_else(String::new, |digest| hex(&digest));
        script::SENT.run(self, &[&state(client)], &[&number(sent), &digest]).await.map(drop)
    }

    /// Digests of a client's accepted lines, by sequence number, including those behind a gap.
    pub async fn lines(&self, client: &str) -> Result<BTreeMap<u64, [u8; DIGEST]>, StoreError> {
        let key = lines(client);
        let reply = self.call(&[b"HGETALL", key.as_bytes()]).await?;
        let (mut rows, mut singles) = (BTreeMap::new(), BTreeMap::new());
        for (field, value) in texts::pairs(&reply) {
            let read = field.bytes().and_then(|field| row::numbers(field)).zip(value.bytes());
            let Some((numbers, digests)) = read else { continue };
            let into = if numbers.start() == numbers.end() { &mut singles } else { &mut rows };
            into.extend(
                numbers.zip(digests.chunks_exact(DIGEST).filter_map(|digest| digest.try_into().ok())),
            );
        }
        // A row overrides a single message of the same number, because it was written later.
        singles.append(&mut rows);
        Ok(singles)
    }

    /// Reads the store's counts of a client atomically.
    pub async fn observe(&self, client: &str) -> Result<ClientObserved, StoreError> {
        let consumer = |part: &str| format!("consumer:{{{client}}}:{part}");
        let keys = [state(client), consumer("last_msg_sn"), consumer("msg_cnt"), consumer("position")];
        let reply = script::OBSERVE.run(self, &keys.each_ref().map(String::as_str), &[]).await?;
        let number = |at: usize| reply.list().get(at).and_then(Reply::int).map(i64::unsigned_abs);
        let numbers: Option<Vec<u64>> = (1..=8).map(number).collect();
        match (word(&reply), numbers.as_deref()) {
            (b"ok", Some(&[sent, acked, stored, digest_to, last, counted, dead, blocked])) => {
                let digest = reply.list().get(9).and_then(Reply::bytes).filter(|digest| !digest.is_empty());
                let digest = digest.map(|digest| String::from_utf8_lossy(digest).into_owned());
                let digest = digest.map(|digest| (digest_to, digest));
                Ok(ClientObserved { sent, acked, stored, last, counted, dead, blocked, digest })
            }
            _ => Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
        }
    }

    /// Messages from `from` to `until`, inclusive, as they were persisted. The list ends at a missing message.
    pub async fn load_messages(
        &self,
        client: &str,
        from: u64,
        until: u64,
    ) -> Result<Vec<(u64, Bytes)>, StoreError> {
        if until < from {
            return Ok(Vec::new());
        }
        /// A row can have half a megabyte and more.
        const AT_ONCE: usize = 32;
        let key = waiting(client);
        let fields = self.call(&[b"HKEYS", key.as_bytes()]).await?;
        let mut fields: Vec<(RangeInclusive<u64>, &Bytes)> = fields
            .list()
            .iter()
            .filter_map(|field| Some((row::numbers(field.bytes()?)?, field.bytes()?)))
            .filter(|(numbers, _)| *numbers.start() <= until && *numbers.end() >= from)
            .collect();
        // A row comes before a single message of the same number: it was written later, and it is the one that was
        // acknowledged to the client.
        fields.sort_by_key(|(numbers, _)| (*numbers.start(), Reverse(*numbers.end())));
        let mut messages = Vec::new();
        for fields in fields.chunks(AT_ONCE) {
            let mut command: Vec<&[u8]> = vec![b"HMGET", key.as_bytes()];
            command.extend(fields.iter().map(|(_, field)| &field[..]));
            let reply = self.call(&command).await?;
            for ((numbers, field), value) in fields.iter().zip(reply.list()) {
                // The queue confirmed it meanwhile, and all messages before it.
                let Some(value) = value.bytes() else { continue };
                let unpacked = row::unpack(numbers, field, value)
                    .ok_or_else(|| StoreError::UnexpectedReply(format!("{key}, {numbers:?}: not a row")))?;
                messages.extend(unpacked);
            }
        }
        messages.retain(|(sn, _)| (from..=until).contains(sn));
        messages.sort_by_key(|(sn, _)| *sn);
        messages.dedup_by_key(|(sn, _)| *sn);
        let whole = messages.iter().zip(from..).take_while(|((sn, _), wanted)| sn == wanted).count();
        messages.truncate(whole);
        Ok(messages)
    }

    /// Marks messages as stored in the queue and deletes them; returns the sequence number up to which all are
    /// stored.
    pub async fn mark_stored(
        &self,
        client: &str,
        attempt: u64,
        reported: &[u64],
    ) -> Result<Result<u64, Fenced>, StoreError> {
        let mut numbers = vec![number(attempt)];
        for row in rows_of(reported) {
            numbers.extend([number(*row.start()), number(*row.end())]);
        }
        let args: Vec<&str> = numbers.iter().map(String::as_str).collect();
        let keys = [state(client), waiting(client), early(client)];
        let reply = script::MARK_STORED.run(self, &[&keys[0], &keys[1], &keys[2]], &args).await?;
        fenced_or_number(&reply)
    }

    /// Drops the delivery reports of messages that will be resent: the queue has them in the wrong order.
    pub async fn rewind(&self, client: &str, attempt: u64) -> Result<Result<u64, Fenced>, StoreError> {
        let keys = [state(client), early(client)];
        let reply = script::REWIND.run(self, &[&keys[0], &keys[1]], &[&number(attempt)]).await?;
        fenced_or_number(&reply)
    }

    /// The next generation of a partition's owner, larger than that of every earlier owner.
    pub async fn next_generation(&self, group: &str, partition: i32) -> Result<u64, StoreError> {
        let key = format!("consumer:{{{group}-{partition}}}:generation");
        let reply = self.call(&[b"INCR", key.as_bytes()]).await?;
        reply.int().map(i64::unsigned_abs).ok_or_else(|| StoreError::UnexpectedReply(format!("{reply:?}")))
    }

    /// Counts messages of one client, in their order in the topic.
    pub async fn count(
        &self,
        client: &str,
        by: Batch,
        messages: &[Counting],
    ) -> Result<Result<Counted, Fenced>, StoreError> {
        let mut args = vec![number(by.generation), by.partition.to_string(), by.from.max(0).to_string()];
        let rows: Vec<&[Counting]> = messages.chunk_by(Counting::is_followed_by).collect();
        for row in &rows {
            let (Some(first), Some(last)) = (row.first(), row.last()) else { continue };
            let kind = if first.dead { "d" } else { "m" };
            args.extend([number(first.sn), row.len().to_string(), last.offset.to_string(), kind.to_owned()]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let keys = ["last_msg_sn", "msg_cnt", "position"].map(|part| format!("consumer:{{{client}}}:{part}"));
        let state = state(client);
        let reply = script::COUNT.run(self, &[&keys[0], &keys[1], &keys[2], &state], &args).await?;
        match word(&reply) {
            b"fenced" => Ok(Err(Fenced)),
            b"ok" => match counted(&rows, &reply.list()[1..]) {
                Some(counted) => Ok(Ok(counted)),
                None => Err(StoreError::UnexpectedReply(format!("{} rows: {reply:?}", rows.len()))),
            },
            _ => Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
        }
    }

    /// A client's partition and counting state; none if no gateway and no counter knows the client.
    pub async fn count_state(&self, client: &str) -> Result<Option<(i32, CountState)>, StoreError> {
        let consumer = |part: &str| format!("consumer:{{{client}}}:{part}");
        let (last, position, state) = (consumer("last_msg_sn"), consumer("position"), state(client));
        let reply = script::COUNT_STATE.run(self, &[&last, &position, &state], &[]).await?;
        let numbers: Option<Vec<i64>> = reply.list().iter().skip(1).map(Reply::int).collect();
        match (word(&reply), numbers.as_deref()) {
            (b"ok", Some([partition, rest @ ..])) => {
                let partition = i32::try_from(*partition).ok().filter(|partition| *partition >= 0);
                Ok(partition.zip(count_state(rest)))
            }
            _ => Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
        }
    }

    /// Records that the counter of this generation has committed everything it forwarded. Otherwise, when both are
    /// re-read in one batch, a message that stood in the topic before its predecessor is taken for an overtaking one.
    /// Returns whether this counter was the last to count the client; about another counter's messages it has no
    /// information.
    pub async fn settle(&self, client: &str, partition: i32, generation: u64) -> Result<bool, StoreError> {
        let position = format!("consumer:{{{client}}}:position");
        let args = [number(generation), partition.to_string()];
        let reply = script::SETTLE.run(self, &[&position], &[&args[0], &args[1]]).await?;
        Ok(reply.list().get(1).and_then(Reply::int) == Some(1))
    }

    /// Records that a client's message is missing, which blocks the count of the messages after it. Cleared when the
    /// message is counted.
    pub async fn block(&self, client: &str, missing: u64) -> Result<(), StoreError> {
        let consumer = |part: &str| format!("consumer:{{{client}}}:{part}");
        let keys = [consumer("last_msg_sn"), consumer("position")];
        script::BLOCK.run(self, &[&keys[0], &keys[1]], &[&number(missing)]).await.map(drop)
    }

    /// Sequence number of the missing message that blocks a client's count; usually none.
    pub async fn blocked(&self, client: &str) -> Result<Option<u64>, StoreError> {
        let blocked = self.numbers(&format!("consumer:{{{client}}}:position"), &["blocked"]).await?;
        Ok(blocked.first().copied().filter(|missing| *missing > 0))
    }

    /// The partition of a client's messages, as chosen first, for as long as the store knows the client. A partition
    /// that the topic does not have, because it was recreated with fewer, is chosen again.
    pub async fn pin(&self, client: &str, proposed: i32, partitions: i32) -> Result<i32, StoreError> {
        self.pinned(&state(client), proposed, partitions - 1).await
    }

    /// The partition count over which texts are spread, as seen first in the run.
    pub async fn pin_texts(&self, partitions: i32) -> Result<i32, StoreError> {
        self.pinned("consumer:{aggregator}:state", partitions, partitions).await
    }

    async fn pinned(&self, key: &str, proposed: i32, limit: i32) -> Result<i32, StoreError> {
        let args = [proposed.to_string(), limit.to_string()];
        let reply = script::PIN.run(self, &[key], &[&args[0], &args[1]]).await?;
        let pinned = reply.list().get(1).and_then(Reply::int).and_then(|n| i32::try_from(n).ok());
        pinned.ok_or_else(|| StoreError::UnexpectedReply(format!("{reply:?}")))
    }

    /// Deletes all keys of the pipeline; returns how many there were.
    pub async fn wipe(&self) -> Result<u64, StoreError> {
        const AT_ONCE: usize = 256;
        let mut deleted = 0;
        for pattern in ["producer:*", "consumer:*", "message:{*}:*"] {
            let keys = self.commands.keys(pattern).await?;
            let gone = keys.iter().map(|key| async move { self.call(&[b"UNLINK", key]).await });
            let mut gone = futures_util::stream::iter(gone).buffer_unordered(AT_ONCE);
            while let Some(reply) = gone.next().await {
                deleted += reply?.int().map_or(0, i64::unsigned_abs);
            }
        }
        Ok(deleted)
    }

    /// Several fields of a hash, as numbers; 0 for a missing field.
    pub async fn numbers(&self, key: &str, fields: &[&str]) -> Result<Vec<u64>, StoreError> {
        let mut command: Vec<&[u8]> = vec![b"HMGET", key.as_bytes()];
        command.extend(fields.iter().map(|field| field.as_bytes()));
        let reply = self.call(&command).await?;
        Ok(reply.list().iter().map(|field| field.int().map_or(0, i64::unsigned_abs)).collect())
    }

    /// A key's value as a number; 0 for a missing key.
    pub async fn number_at(&self, key: &str) -> Result<u64, StoreError> {
        let reply = self.call(&[b"GET", key.as_bytes()]).await?;
        Ok(reply.int().map_or(0, i64::unsigned_abs))
    }

    /// A key's value.
    pub async fn value_at(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        Ok(self.call(&[b"GET", key.as_bytes()]).await?.bytes().cloned())
    }
}

/// The state key of a client.
pub fn state(client: &str) -> String {
    format!("producer:{{{client}}}:state")
}

fn waiting(client: &str) -> String {
    format!("producer:{{{client}}}:messages")
}

fn lines(client: &str) -> String {
    format!("producer:{{{client}}}:lines")
}

fn early(client: &str) -> String {
    format!("producer:{{{client}}}:stored_msg_sn_tmp_list")
}

fn index_of(client: &str) -> String {
    let bucket =
        client.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte))) % INDEX;
    format!("producer:index:{{{bucket}}}")
}

/// The hash of a text: the first half of its SHA-256, in hexadecimal.
pub fn hash_of(text: &[u8]) -> String {
    hex(&digest_of(text))
}

/// Length of a digest in bytes.
pub const DIGEST: usize = 16;

/// The hash of a text, as bytes.
pub fn digest_of(text: &[u8]) -> [u8; DIGEST] {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&Sha256::digest(text)[..DIGEST]);
    digest
}

/// The digest of a sequence of lines: the digest of their digests.
pub fn digest_of_all<'a>(digests: impl IntoIterator<Item = &'a [u8; DIGEST]>) -> [u8; DIGEST] {
    let mut all = Sha256::new();
    digests.into_iter().for_each(|digest| all.update(digest));
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&all.finalize()[..DIGEST]);
    digest
}

/// Hexadecimal encoding.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |n: u8| char::from(DIGITS[usize::from(n)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Groups numbers in any order into ranges without gaps.
fn rows_of(numbers: &[u64]) -> Vec<RangeInclusive<u64>> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    let rows = numbers.chunk_by(|one, next| *next == one + 1);
    rows.filter_map(|row| Some(*row.first()?..=*row.last()?)).collect()
}

/// Translates the reply of the count script into one outcome per message. None if the reply is malformed.
fn counted(rows: &[&[Counting]], answer: &[Reply]) -> Option<Counted> {
    let numbers: Vec<i64> = answer.iter().map(Reply::int).collect::<Option<_>>()?;
    let (standing_of, answer) = numbers.split_at_checked(4)?;
    let count_state = count_state(standing_of)?;
    if answer.len() != 3 * rows.len() {
        return None;
    }
    let mut outcomes = Vec::new();
    for (row, answer) in rows.iter().zip(answer.chunks_exact(3)) {
        let (old, new) = (usize::try_from(answer[0]).ok()?, usize::try_from(answer[1]).ok()?);
        let again = usize::try_from(answer[2]).ok()?;
        outcomes.extend(row.iter().enumerate().map(|(at, message)| match message {
            _ if (old..old + new).contains(&at) => CountOutcome::Counted,
            _ if (again..old).contains(&at) => CountOutcome::Repeated,
            // Behind a gap that the batch itself closes: it was counted further on.
            message if message.sn > count_state.last => CountOutcome::Ahead,
            _ => CountOutcome::Dropped,
        }));
    }
    Some(Counted { outcomes, count_state })
}

fn count_state(numbers: &[i64]) -> Option<CountState> {
    let [last, offset, stored, acked] = numbers else { return None };
    let (last, stored, acked) = (last.unsigned_abs(), stored.unsigned_abs(), acked.unsigned_abs());
    Some(CountState { last, offset: Some(*offset).filter(|offset| *offset >= 0), stored, acked })
}

fn number(n: u64) -> String {
    n.to_string()
}

fn word(reply: &Reply) -> &[u8] {
    reply.list().first().and_then(Reply::bytes).map_or(b"", |word| word)
}

fn fenced_or_number(reply: &Reply) -> Result<Result<u64, Fenced>, StoreError> {
    match (word(reply), reply.list().get(1).and_then(Reply::int)) {
        (b"fenced", _) => Ok(Err(Fenced)),
        (b"ok", Some(n)) => Ok(Ok(n.unsigned_abs())),
        _ => Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
    }
}

#[cfg(test)]
pub(crate) mod tests;
