//! The verifier: reads what the store and the topics hold and says whether every message was counted once.
//!
//! It compares identities, not sums. The sources (what gateways accepted of each client, line by line, and what the client says
//! it sent) and the sinks (every client's count, every text's) must agree one by one; a message that is missing is on its way
//! only if it stands somewhere. Reading and judging are apart: [`judge()`] is a pure function, so the verifier itself can be tested
//! with losses and duplicates that are known.
//!
//! | file | owns |
//! |---|---|
//! | `verify/judge.rs` | the verdict |
//! | `verify/unread.rs` | what the topics hold that is not through |
//! | `verify/trace.rs` | where a message went wrong |

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

/// What the store says of one client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientCounts {
    /// The largest sequence number it has sent.
    pub sent: u64,
    /// How many were counted.
    pub counted: u64,
    /// How many went to the dead letters.
    pub dead_lettered: u64,
    /// Up to where the store acknowledged.
    pub acked: u64,
    /// Up to where the queue has them.
    pub relayed: u64,
    /// The last that was counted.
    pub last: u64,
    /// The message whose absence keeps the next ones from being counted; 0 for none.
    pub blocked: u64,
    /// Up to where the client has said what it sent, and the digest of it.
    #[serde(skip)]
    pub digest: Option<(u64, String)>,
}

impl ClientCounts {
    /// Sent and not through.
    pub fn in_flight(&self) -> u64 {
        self.sent.saturating_sub(self.counted + self.dead_lettered)
    }

    /// How many have to be counted in the end.
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

/// The texts of a client's lines, by their hashes.
pub type Lines = BTreeMap<u64, String>;

/// What is known of everything.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// By client.
    pub clients: BTreeMap<String, ClientCounts>,
    /// What gateways accepted of each client.
    pub lines: BTreeMap<String, Lines>,
    /// How often each message was counted, by its hash.
    pub messages: BTreeMap<String, u64>,
    /// What is on its way in the topics; none when it was not read, or has moved while the store was.
    pub unread: Option<Unread>,
}

impl Observed {
    /// Clients of which messages were accepted that the store has no lines of.
    pub fn unknown(&self) -> std::collections::BTreeSet<String> {
        let is_unknown = |(client, counts): &(&String, &ClientCounts)| {
            let known = self.lines.get(*client).map_or(0, |lines| lines.range(1..=counts.acked).count());
            (known as u64) < counts.acked.max(counts.last)
        };
        self.clients.iter().filter(is_unknown).map(|(client, _)| client.clone()).collect()
    }
}

/// The digest of a client's first lines; none when one of them is not known.
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
    /// Its name.
    pub client: String,
    /// How many were counted.
    pub counted: u64,
    /// How many should be.
    pub expected: u64,
    /// In words.
    pub detail: String,
}

/// A message with the wrong count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WrongMessage {
    /// Its name in the store.
    pub hash: String,
    /// Its text, where the store has it.
    pub text: Option<String>,
    /// How often it was counted.
    pub count: u64,
    /// How often it was sent.
    pub expected: u64,
}

/// Counts of messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Messages {
    /// Different ones.
    pub distinct: u64,
    /// How often each was sent, where that is known.
    pub expected_each: Option<u64>,
    /// Those with another count; at most [`MAX_WRONG`].
    pub wrong: Vec<WrongMessage>,
}

/// How it came out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// By client.
    pub clients: BTreeMap<String, ClientCounts>,
    /// Clients whose counts are wrong; at most [`MAX_WRONG`].
    pub wrong_clients: Vec<WrongClient>,
    /// By message.
    pub messages: Messages,
    /// Sent in all.
    pub sent: u64,
    /// Counted in all.
    pub counted: u64,
    /// Sent, not counted, and known to be on their way.
    pub in_flight: u64,
    /// Sent, and neither counted nor on their way nor among the dead letters.
    pub lost: u64,
    /// Counted more often than sent.
    pub duplicated: u64,
    /// Set aside with their origin: they cannot be processed.
    pub dead_lettered: u64,
    /// Set aside with their origin: a message before them is missing. They count as lost until they are counted.
    pub parked: u64,
    /// `ok`, `pending` or `failed`.
    pub verdict: &'static str,
    /// The first record that went wrong, and where.
    pub first_wrong: Option<Finding>,
}

/// Questions to the store at a time.
const AT_ONCE: usize = 128;

impl Verdict {
    /// Whether every message was counted once.
    pub fn is_ok(&self) -> bool {
        self.verdict == "ok"
    }

    /// Whether nothing is wrong, and messages are on their way.
    pub fn is_pending(&self) -> bool {
        self.verdict == "pending"
    }
}

/// Reads everything from the store: the sinks before the sources, so that nothing looks counted that was not sent.
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

/// Reads what the store says of the clients.
pub async fn observe_clients(store: &Store) -> Result<BTreeMap<String, ClientCounts>, StoreError> {
    let clients = store.clients().await?.into_iter();
    let counts =
        clients.map(|client| async move { store.observe(&client).await.map(|seen| (client, seen.into())) });
    futures_util::stream::iter(counts).buffer_unordered(AT_ONCE).try_collect().await
}

/// Adds the texts of wrong messages, for people.
pub async fn name_wrong(store: &Store, verdict: &mut Verdict) -> Result<(), StoreError> {
    for wrong in &mut verdict.messages.wrong {
        let text = store.value_at(&format!("message:{{{}}}:text", wrong.hash)).await?;
        wrong.text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
