//! What the pipeline keeps in the store, and the scripts that change it.
//!
//! Everything about one client stands under its hash tag, everything about one message under the message's, so each
//! step is one atomic script on one slot. Scripts are idempotent: one whose answer was lost is run again.
//!
//! | key | holds |
//! |---|---|
//! | `producer:{cid}:state` | incarnation, attempt (who relays, in which round), sent, acked, stored, when it was last touched, the partition of its messages |
//! | `producer:{cid}:messages` | messages that are not known to be in the queue: rows of them by their first and last sequence number (see [`row`]), single ones by their own |
//! | `producer:{cid}:lines` | what was accepted of it: the digests of its messages, in rows and single ones like the messages; they stay |
//! | `producer:{cid}:stored_msg_sn_tmp_list` | delivery reports that came before an earlier one |
//! | `producer:index:{0..15}` | the clients there are |
//! | `consumer:{cid}:last_msg_sn`, `:msg_cnt` | the last message that was counted, and how many were |
//! | `consumer:{cid}:position` | where that message stands in the topic, who counted it, how many were dead-lettered, which one is missing, up to where messages were passed on by committed transactions (base) and by the last one (pass), and the last offset of that (upto) |
//! | `consumer:{aggregator}:state` | over how many partitions texts are spread |
//! | `message:{hash}:count`, `:text`, `:at` | how often a message was sent, its text, up to which place of which partition it was counted (see [`texts`]) |
//! | `consumer:{aggregator-p}:reading`, `:last` | up to where an aggregator has read a partition, and the last number of each client there (a sorted set) |
//!
//! Invariants: acked never goes back; nothing is deleted from `messages` before the queue has it; rows in `messages` lie at
//! or before `acked` and do not overlap; `last_msg_sn` grows by one at a time.
//!
//! Earlier versions kept every message on its own, which single messages still are, and with each text the last number of each
//! client: a sorted set `message:{hash}:last`, before that a hash `:by`. Texts that have one of them are counted by it as long
//! as they are there. Those versions do not read what this one writes: all gateways and aggregators are stopped before the first
//! new one starts, and there is no way back.

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
pub use self::texts::{Aggregated, CountedFor, Placed, ReadTo, Text};

/// A boxed future.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// An answer of the store.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Nothing there.
    Nil,
    /// A number.
    Int(i64),
    /// A string of any kind.
    Bytes(Bytes),
    /// Several.
    Array(Vec<Reply>),
}

impl Reply {
    /// As a number, also where it comes as digits.
    pub fn int(&self) -> Option<i64> {
        match self {
            Reply::Int(n) => Some(*n),
            Reply::Bytes(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
            Reply::Nil | Reply::Array(_) => None,
        }
    }

    /// As bytes.
    pub fn bytes(&self) -> Option<&Bytes> {
        match self {
            Reply::Bytes(bytes) => Some(bytes),
            Reply::Nil | Reply::Int(_) | Reply::Array(_) => None,
        }
    }

    /// As a list.
    pub fn list(&self) -> &[Reply] {
        match self {
            Reply::Array(list) => list,
            Reply::Nil | Reply::Int(_) | Reply::Bytes(_) => &[],
        }
    }
}

/// Why the store gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Not reachable, or no answer in time: what was asked may have been done, and may be asked again.
    #[error("the store does not answer: {0}")]
    Unavailable(String),
    /// It answered with an error.
    #[error("the store refused: {0}")]
    Refused(String),
    /// It answered something that was not expected.
    #[error("the store answered something strange: {0}")]
    Strange(String),
}

/// A client of a Redis Cluster.
pub trait Commands: Send + Sync + 'static {
    /// Runs a command; its first key says where.
    fn call<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Reply, StoreError>>;
    /// Runs a command on every primary.
    fn call_all<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Vec<Reply>, StoreError>>;
    /// Every key that matches, wherever it is; a key may come twice.
    fn keys<'a>(&'a self, pattern: &'a str) -> BoxFuture<'a, Result<Vec<Bytes>, StoreError>>;
}

/// So many messages go into one step where they go one by one: Lua has room for a few thousand arguments.
const SINGLES: usize = 1_024;

/// How many sets the names of clients are spread over.
const INDEX: u64 = 16;

/// The store as the pipeline sees it.
#[derive(Clone)]
pub struct Store {
    commands: Arc<dyn Commands>,
}

/// What is known of a client when a gateway begins to relay for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The gateway relays from now on, under this attempt.
    Yes {
        /// Whoever relays with an older one is refused.
        attempt: u64,
        /// Everything up to here is in the store or through.
        acked: u64,
        /// Everything up to here is in the queue.
        stored: u64,
    },
    /// A newer life of the client has been seen.
    Stale {
        /// That one.
        incarnation: u64,
    },
    /// Nothing is left to do, or another gateway is at it.
    Busy,
}

/// Somebody else has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced;

/// What to do with a message that was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was counted now: pass it on.
    Counted,
    /// It was counted before, by an attempt that may not have committed: pass it on, do not count it.
    Repeated,
    /// It was counted before, and passed on: leave it.
    Dropped,
    /// A message before it was not counted.
    Ahead,
}

/// What the store knows of a client whose messages are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The last message that was counted.
    pub last: u64,
    /// Where it stands; none when that is another partition, or nowhere.
    pub offset: Option<i64>,
    /// Up to where the gateway knows the queue to have everything. What is beyond is kept until it does.
    pub stored: u64,
    /// Up to where the gateway has kept messages.
    pub acked: u64,
}

/// Who shows messages to the store, and of which batch they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The generation under which the partition is counted.
    pub generation: u64,
    /// The partition.
    pub partition: i32,
    /// Where the batch begins there. It begins where the last committed one ended.
    pub from: i64,
}

/// What became of messages that were shown to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// One for each.
    pub verdicts: Vec<Verdict>,
    /// The client, after them.
    pub standing: Standing,
}

/// What the store says of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientObserved {
    /// The largest sequence number it has sent.
    pub sent: u64,
    /// Up to where messages were accepted.
    pub acked: u64,
    /// Up to where they are in the queue.
    pub stored: u64,
    /// The last that was counted.
    pub last: u64,
    /// How many were counted.
    pub counted: u64,
    /// How many went to the dead letters.
    pub dead: u64,
    /// The message whose absence keeps the next ones from being counted; 0 for none.
    pub blocked: u64,
    /// Up to where the client has said what it sent, and the digest of it.
    pub digest: Option<(u64, String)>,
}

/// A message as the counter shows it to the store.
#[derive(Clone, Copy, Debug)]
pub struct Counting {
    /// The client's sequence number.
    pub sn: u64,
    /// Where it stands in the topic.
    pub offset: i64,
    /// Whether it goes to the dead letters.
    pub dead: bool,
}

impl Counting {
    /// Whether the store can look at both as one row.
    fn is_followed_by(&self, next: &Counting) -> bool {
        next.sn == self.sn + 1 && next.offset > self.offset && next.dead == self.dead
    }
}

impl Store {
    /// Over a client.
    pub fn new(commands: Arc<dyn Commands>) -> Self {
        Self { commands }
    }

    /// The client, for commands that are not here.
    pub fn commands(&self) -> &dyn Commands {
        &*self.commands
    }

    async fn call(&self, command: &[&[u8]]) -> Result<Reply, StoreError> {
        self.commands.call(command).await
    }

    /// Makes a client known to sweepers and verifiers.
    pub async fn enrol(&self, client: &str) -> Result<(), StoreError> {
        self.call(&[b"SADD", index_of(client).as_bytes(), client.as_bytes()]).await.map(drop)
    }

    /// Every client there is.
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

    /// Begins to relay for a client that has connected.
    pub async fn take(&self, client: &str, incarnation: u64) -> Result<Taken, StoreError> {
        self.taken(client, &[&number(incarnation), "0"]).await
    }

    /// Begins to relay for a client that nobody has served for `idle_ms`, if it has messages waiting.
    pub async fn adopt(&self, client: &str, idle_ms: u64) -> Result<Taken, StoreError> {
        self.taken(client, &["0", &number(idle_ms)]).await
    }

    async fn taken(&self, client: &str, args: &[&str]) -> Result<Taken, StoreError> {
        let reply = script::TAKE.run(self, &[&state(client), &early(client)], args).await?;
        let field = |at: usize| reply.list().get(at).and_then(Reply::int).map(i64::unsigned_abs);
        match (word(&reply), field(1), field(2), field(3)) {
            (b"ok", Some(attempt), Some(acked), Some(stored)) => Ok(Taken::Yes { attempt, acked, stored }),
            (b"stale", Some(incarnation), ..) => Ok(Taken::Stale { incarnation }),
            (b"busy", ..) => Ok(Taken::Busy),
            _ => Err(StoreError::Strange(format!("{reply:?}"))),
        }
    }

    /// Keeps messages; answers up to where there is no gap.
    ///
    /// Those that follow what the store has, and each other, are one value: what a message costs there is paid for the row.
    pub async fn keep(
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
            let reply = script::KEEP_ROW.run_bytes(self, &keys, &args).await?;
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
            match fenced_or_number(&script::KEEP.run_bytes(self, &keys, &args).await?)? {
                Ok(number) => acked = number,
                Err(Fenced) => return Ok(Err(Fenced)),
            }
        }
        Ok(Ok(acked))
    }

    /// Notes what the client has sent in all, with its digest ([`digest_of_all`]).
    pub async fn note_sent(
        &self,
        client: &str,
        sent: u64,
        digest: Option<[u8; DIGEST]>,
    ) -> Result<(), StoreError> {
        let digest = digest.map_or_else(String::new, |digest| hex(&digest));
        script::SENT.run(self, &[&state(client)], &[&number(sent), &digest]).await.map(drop)
    }

    /// The digests of a client's lines that were accepted, by sequence number; those behind a gap are among them.
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
        // A row was kept after a single message of the same number.
        singles.append(&mut rows);
        Ok(singles)
    }

    /// What the store says of a client, all of one moment.
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
            _ => Err(StoreError::Strange(format!("{reply:?}"))),
        }
    }

    /// Messages from `from` to `until`, both included, as they were kept. One that is gone ends the list.
    pub async fn kept(&self, client: &str, from: u64, until: u64) -> Result<Vec<(u64, Bytes)>, StoreError> {
        if until < from {
            return Ok(Vec::new());
        }
        /// Rows are of half a megabyte and more.
        const AT_ONCE: usize = 32;
        let key = waiting(client);
        let fields = self.call(&[b"HKEYS", key.as_bytes()]).await?;
        let mut fields: Vec<(RangeInclusive<u64>, &Bytes)> = fields
            .list()
            .iter()
            .filter_map(|field| Some((row::numbers(field.bytes()?)?, field.bytes()?)))
            .filter(|(numbers, _)| *numbers.start() <= until && *numbers.end() >= from)
            .collect();
        // A row before a single message of the same number: it was kept later, and it is what the client was told.
        fields.sort_by_key(|(numbers, _)| (*numbers.start(), Reverse(*numbers.end())));
        let mut messages = Vec::new();
        for fields in fields.chunks(AT_ONCE) {
            let mut command: Vec<&[u8]> = vec![b"HMGET", key.as_bytes()];
            command.extend(fields.iter().map(|(_, field)| &field[..]));
            let reply = self.call(&command).await?;
            for ((numbers, field), value) in fields.iter().zip(reply.list()) {
                // It went through meanwhile: so did all before it.
                let Some(value) = value.bytes() else { continue };
                let unpacked = row::unpack(numbers, field, value)
                    .ok_or_else(|| StoreError::Strange(format!("{key}, {numbers:?}: not a row")))?;
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

    /// Notes that the queue has these messages; answers up to where it has all. They are deleted.
    pub async fn mark(
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
        let reply = script::MARK.run(self, &[&keys[0], &keys[1], &keys[2]], &args).await?;
        fenced_or_number(&reply)
    }

    /// Forgets reports of messages that will be sent again: the queue has them in the wrong order.
    pub async fn rewind(&self, client: &str, attempt: u64) -> Result<Result<u64, Fenced>, StoreError> {
        let keys = [state(client), early(client)];
        let reply = script::REWIND.run(self, &[&keys[0], &keys[1]], &[&number(attempt)]).await?;
        fenced_or_number(&reply)
    }

    /// A number for the owner of a partition, larger than that of every owner before it.
    pub async fn next_generation(&self, group: &str, partition: i32) -> Result<u64, StoreError> {
        let key = format!("consumer:{{{group}-{partition}}}:generation");
        let reply = self.call(&[b"INCR", key.as_bytes()]).await?;
        reply.int().map(i64::unsigned_abs).ok_or_else(|| StoreError::Strange(format!("{reply:?}")))
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
                None => Err(StoreError::Strange(format!("{} rows: {reply:?}", rows.len()))),
            },
            _ => Err(StoreError::Strange(format!("{reply:?}"))),
        }
    }

    /// Where a client stands, and in which partition its messages are; none when no gateway and no counter knows.
    pub async fn standing(&self, client: &str) -> Result<Option<(i32, Standing)>, StoreError> {
        let consumer = |part: &str| format!("consumer:{{{client}}}:{part}");
        let (last, position, state) = (consumer("last_msg_sn"), consumer("position"), state(client));
        let reply = script::STANDING.run(self, &[&last, &position, &state], &[]).await?;
        let numbers: Option<Vec<i64>> = reply.list().iter().skip(1).map(Reply::int).collect();
        match (word(&reply), numbers.as_deref()) {
            (b"ok", Some([partition, rest @ ..])) => {
                let partition = i32::try_from(*partition).ok().filter(|partition| *partition >= 0);
                Ok(partition.zip(standing(rest)))
            }
            _ => Err(StoreError::Strange(format!("{reply:?}"))),
        }
    }

    /// Notes that the counter of this generation has committed all that it passed on. Without that, what stood in the topic before
    /// its predecessor is taken for one that overtakes when both are read once more in one batch. Answers whether the client
    /// was counted by that counter last; of another one's work it knows nothing.
    pub async fn settle(&self, client: &str, partition: i32, generation: u64) -> Result<bool, StoreError> {
        let position = format!("consumer:{{{client}}}:position");
        let args = [number(generation), partition.to_string()];
        let reply = script::SETTLE.run(self, &[&position], &[&args[0], &args[1]]).await?;
        Ok(reply.list().get(1).and_then(Reply::int) == Some(1))
    }

    /// Notes that a client's message is missing, and what follows it not counted. Ends when the message is counted.
    pub async fn block(&self, client: &str, missing: u64) -> Result<(), StoreError> {
        let consumer = |part: &str| format!("consumer:{{{client}}}:{part}");
        let keys = [consumer("last_msg_sn"), consumer("position")];
        script::BLOCK.run(self, &[&keys[0], &keys[1]], &[&number(missing)]).await.map(drop)
    }

    /// The message whose absence keeps a client's messages from being counted; none as a rule.
    pub async fn blocked(&self, client: &str) -> Result<Option<u64>, StoreError> {
        let blocked = self.numbers(&format!("consumer:{{{client}}}:position"), &["blocked"]).await?;
        Ok(blocked.first().copied().filter(|missing| *missing > 0))
    }

    /// The partition of a client's messages, for as long as the store knows the client: the one that was chosen first. One that
    /// the topic does not have, because it was made anew with fewer, is chosen again.
    pub async fn pin(&self, client: &str, proposed: i32, partitions: i32) -> Result<i32, StoreError> {
        self.pinned(&state(client), proposed, partitions - 1).await
    }

    /// The number of partitions that texts are spread over, for as long as the run lasts: the one that was seen first.
    pub async fn pin_texts(&self, partitions: i32) -> Result<i32, StoreError> {
        self.pinned("consumer:{aggregator}:state", partitions, partitions).await
    }

    async fn pinned(&self, key: &str, proposed: i32, limit: i32) -> Result<i32, StoreError> {
        let args = [proposed.to_string(), limit.to_string()];
        let reply = script::PIN.run(self, &[key], &[&args[0], &args[1]]).await?;
        let pinned = reply.list().get(1).and_then(Reply::int).and_then(|n| i32::try_from(n).ok());
        pinned.ok_or_else(|| StoreError::Strange(format!("{reply:?}")))
    }

    /// Deletes everything a pipeline keeps; answers how many keys there were.
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

    /// Several fields of a hash, as numbers; 0 where there is none.
    pub async fn numbers(&self, key: &str, fields: &[&str]) -> Result<Vec<u64>, StoreError> {
        let mut command: Vec<&[u8]> = vec![b"HMGET", key.as_bytes()];
        command.extend(fields.iter().map(|field| field.as_bytes()));
        let reply = self.call(&command).await?;
        Ok(reply.list().iter().map(|field| field.int().map_or(0, i64::unsigned_abs)).collect())
    }

    /// A key's number; 0 when there is none.
    pub async fn number_at(&self, key: &str) -> Result<u64, StoreError> {
        let reply = self.call(&[b"GET", key.as_bytes()]).await?;
        Ok(reply.int().map_or(0, i64::unsigned_abs))
    }

    /// A key's value.
    pub async fn value_at(&self, key: &str) -> Result<Option<Bytes>, StoreError> {
        Ok(self.call(&[b"GET", key.as_bytes()]).await?.bytes().cloned())
    }
}

/// The state of a client.
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

/// The name a message goes by: the first half of its SHA-256, in hexadecimal digits.
pub fn hash_of(text: &[u8]) -> String {
    hex(&digest_of(text))
}

/// Bytes of a digest.
pub const DIGEST: usize = 16;

/// The same as bytes.
pub fn digest_of(text: &[u8]) -> [u8; DIGEST] {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&Sha256::digest(text)[..DIGEST]);
    digest
}

/// The digest of lines in their order: that of their digests.
pub fn digest_of_all<'a>(digests: impl IntoIterator<Item = &'a [u8; DIGEST]>) -> [u8; DIGEST] {
    let mut all = Sha256::new();
    digests.into_iter().for_each(|digest| all.update(digest));
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&all.finalize()[..DIGEST]);
    digest
}

/// Hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |n: u8| char::from(DIGITS[usize::from(n)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Numbers in any order as rows that have no gaps.
fn rows_of(numbers: &[u64]) -> Vec<RangeInclusive<u64>> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    let rows = numbers.chunk_by(|one, next| *next == one + 1);
    rows.filter_map(|row| Some(*row.first()?..=*row.last()?)).collect()
}

/// What the store's answer about rows means for each message. None when it is no such answer.
fn counted(rows: &[&[Counting]], answer: &[Reply]) -> Option<Counted> {
    let numbers: Vec<i64> = answer.iter().map(Reply::int).collect::<Option<_>>()?;
    let (standing_of, answer) = numbers.split_at_checked(4)?;
    let standing = standing(standing_of)?;
    if answer.len() != 3 * rows.len() {
        return None;
    }
    let mut verdicts = Vec::new();
    for (row, answer) in rows.iter().zip(answer.chunks_exact(3)) {
        let (old, new) = (usize::try_from(answer[0]).ok()?, usize::try_from(answer[1]).ok()?);
        let again = usize::try_from(answer[2]).ok()?;
        verdicts.extend(row.iter().enumerate().map(|(at, message)| match message {
            _ if (old..old + new).contains(&at) => Verdict::Counted,
            _ if (again..old).contains(&at) => Verdict::Repeated,
            // Behind a gap that the batch itself has closed, it was counted further on.
            message if message.sn > standing.last => Verdict::Ahead,
            _ => Verdict::Dropped,
        }));
    }
    Some(Counted { verdicts, standing })
}

fn standing(numbers: &[i64]) -> Option<Standing> {
    let [last, offset, stored, acked] = numbers else { return None };
    let (last, stored, acked) = (last.unsigned_abs(), stored.unsigned_abs(), acked.unsigned_abs());
    Some(Standing { last, offset: Some(*offset).filter(|offset| *offset >= 0), stored, acked })
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
        _ => Err(StoreError::Strange(format!("{reply:?}"))),
    }
}

#[cfg(test)]
pub(crate) mod tests;
