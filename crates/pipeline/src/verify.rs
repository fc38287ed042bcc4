//! The verifier: reads the store and the topics and decides whether every message was counted exactly once.
//!
//! It compares identities, not sums. Sources (the lines that gateways accepted of each client, and what the client
//! says it sent) and sinks (every client's count, every text's count) must agree one by one. A missing message is in
//! flight only if it is found at a known stage. Reading and judging are separate: [`judge()`] is a pure function, so
//! the verifier itself is tested with known losses and duplicates.
//!
//! | file | owns |
//! |---|---|
//! | `verify/judge.rs` | the verdict |
//! | `verify/unread.rs` | records of the topics that are not yet processed |
//! | `verify/trace.rs` | the stage at which a message was lost or duplicated |

mod judge;
mod trace;
mod unread;

use std::collections::BTreeMap;

use futures_util::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::store::{ClientObserved, DIGEST, Store, StoreError, digest_of_all, hex};

pub use self::judge::{MAX_WRONG, judge};
pub use self::trace::{Finding, Passed, Seen, Stage, locate, locate_text, trace, trace_text};
pub use self::unread::{Committed, Unread, committed, unread};

/// The store's counts of one client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientCounts {
    /// The largest sequence number it has sent.
    pub sent: u64,
    /// How many were counted.
    pub counted: u64,
    /// How many were written to the dead-letter topic.
    pub dead_lettered: u64,
    /// Everything up to this sequence number was acknowledged by the store.
    pub acked: u64,
    /// Everything up to this sequence number is in the queue.
    pub relayed: u64,
    /// Sequence number of the last counted message.
    pub last: u64,
    /// Sequence number of the missing message that blocks the client's count; 0 if absent.
    pub blocked: u64,
    /// The sequence number up to which the client has declared what it sent, and the digest of those lines.
    #[serde(skip)]
    pub digest: Option<(u64, String)>,
}

impl ClientCounts {
    /// Messages sent and not yet processed.
    pub fn in_flight(&self) -> u64 {
        self.sent.saturating_sub(self.counted + self.dead_lettered)
    }

    /// How many messages must be counted at the end.
    fn expected(&self) -> u64 {
        self.sent.saturating_sub(self.dead_lettered)
    }
}

impl From<ClientObserved> for ClientCounts {
    fn from(seen: ClientObserved) -> Self {
        Self {
            sent: seen.sent,
            counted: seen.counted,
            dead_lettered: seen.dead,
            acked: seen.acked,
            relayed: seen.stored,
            last: seen.last,
            blocked: seen.blocked,
            digest: seen.digest,
        }
    }
}

/// Hashes of a client's lines, by sequence number.
pub type Lines = BTreeMap<u64, String>;

/// Everything that was read from the store and the topics.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Counts by client.
    pub clients: BTreeMap<String, ClientCounts>,
    /// Lines that gateways accepted, by client.
    pub lines: BTreeMap<String, Lines>,
    /// Count of each text, by its hash.
    pub messages: BTreeMap<String, u64>,
    /// Unprocessed records of the topics. None if they were not read, or if offsets were committed while the store
    /// was read.
    pub unread: Option<Unread>,
}

impl Observed {
    /// Clients with accepted messages whose lines the store does not have.
    pub fn unknown(&self) -> std::collections::BTreeSet<String> {
        let is_unknown = |(client, counts): &(&String, &ClientCounts)| {
            let known = self.lines.get(*client).map_or(0, |lines| lines.range(1..=counts.acked).count());
            (known as u64) < counts.acked.max(counts.last)
        };
        self.clients.iter().filter(is_unknown).map(|(client, _)| client.clone()).collect()
    }
}

/// The digest of a client's first lines. None if one of them is unknown.
fn digest_of_lines(lines: &Lines, until: u64) -> Option<String> {
    let mut digests = Vec::new();
    for sn in 1..=until {
        digests.push(parse(lines.get(&sn)?)?);
    }
    Some(hex(&digest_of_all(&digests)))
}

fn parse(hash: &str) -> Option<[u8; DIGEST]> {
    let mut digest = [0; DIGEST];
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hash.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    (hash.len() == 2 * DIGEST).then_some(digest)
}

/// A client with a wrong count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WrongClient {
    /// Name of the client.
    pub client: String,
    /// How many were counted.
    pub counted: u64,
    /// How many should have been counted.
    pub expected: u64,
    /// Description of the difference.
    pub detail: String,
}

/// A message with the wrong count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WrongMessage {
    /// Hash of the text.
    pub hash: String,
    /// The text, if the store has it.
    pub text: Option<String>,
    /// How often it was counted.
    pub count: u64,
    /// How often it was sent.
    pub expected: u64,
}

/// Counts of messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Messages {
    /// Number of distinct texts.
    pub distinct: u64,
    /// How often each text was sent, if that is known.
    pub expected_each: Option<u64>,
    /// Texts with a wrong count; at most [`MAX_WRONG`].
    pub wrong: Vec<WrongMessage>,
}

/// The result of a verification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Counts by client.
    pub clients: BTreeMap<String, ClientCounts>,
    /// Clients whose counts are wrong; at most [`MAX_WRONG`].
    pub wrong_clients: Vec<WrongClient>,
    /// Counts by text.
    pub messages: Messages,
    /// Total messages sent.
    pub sent: u64,
    /// Total messages counted.
    pub counted: u64,
    /// Messages sent, not counted, and found in flight.
    pub in_flight: u64,
    /// Messages sent that are neither counted nor in flight nor dead-lettered.
    pub lost: u64,
    /// Messages counted more often than they were sent.
    pub duplicated: u64,
    /// Messages in the dead-letter topic that cannot be processed.
    pub dead_lettered: u64,
    /// Messages in the dead-letter topic whose predecessor is missing. They are lost until they are counted.
    pub parked: u64,
    /// `ok`, `pending` or `failed`.
    pub verdict: &'static str,
    /// The first wrong record, and its stage.
    pub first_wrong: Option<Finding>,
}

/// Concurrent requests to the store.
const AT_ONCE: usize = 128;

impl Verdict {
    /// True if every message was counted exactly once.
    pub fn is_ok(&self) -> bool {
        self.verdict == "ok"
    }

    /// True if nothing is wrong and messages are in flight.
    pub fn is_pending(&self) -> bool {
        self.verdict == "pending"
    }
}

/// Reads everything from the store: the sinks before the sources, so that no message appears counted but not sent.
pub async fn observe(store: &Store) -> Result<Observed, StoreError> {
    let mut observed = Observed::default();
    let mut keys = store.commands().keys("message:{*}:count").await?;
    keys.sort();
    keys.dedup();
    let counts = keys.into_iter().map(|key| async move {
        let key = String::from_utf8_lossy(&key).into_owned();
        store.number_at(&key).await.map(|count| (key, count))
    });
    let mut counts = futures_util::stream::iter(counts).buffer_unordered(AT_ONCE);
    while let Some(count) = counts.next().await {
        let (key, count) = count?;
        let hash = key.trim_start_matches("message:{").trim_end_matches("}:count").to_owned();
        observed.messages.insert(hash, count);
    }
    observed.clients = observe_clients(store).await?;
    let lines = observed.clients.keys().map(|client| async move {
        let lines = store.lines(client).await?;
        let lines = lines.into_iter().map(|(sn, digest)| (sn, hex(&digest))).collect();
        Ok::<_, StoreError>((client.clone(), lines))
    });
    observed.lines = futures_util::stream::iter(lines).buffer_unordered(AT_ONCE).try_collect().await?;
    Ok(observed)
}

/// Reads the store's counts of all clients.
pub async fn observe_clients(store: &Store) -> Result<BTreeMap<String, ClientCounts>, StoreError> {
    let clients = store.clients().await?.into_iter();
    let counts =
        clients.map(|client| async move { store.observe(&client).await.map(|seen| (client, seen.into())) });
    futures_util::stream::iter(counts).buffer_unordered(AT_ONCE).try_collect().await
}

/// Adds the texts of messages with a wrong count, for display.
pub async fn name_wrong(store: &Store, verdict: &mut Verdict) -> Result<(), StoreError> {
    for wrong in &mut verdict.messages.wrong {
        let text = store.value_at(&format!("message:{{{}}}:text", wrong.hash)).await?;
        wrong.text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
