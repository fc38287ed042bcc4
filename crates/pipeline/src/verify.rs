//! The verifier: reads what the store holds and says whether every message was counted once.
//!
//! The law it checks, per client: sent = counted + dead-lettered + in flight, and at the end nothing is in flight. Over
//! all messages: the counts by text add up to the counts by client; and where every client sent the same lines, each
//! line was counted once per client. Reading and judging are apart: [`judge`] is a pure function, so the verifier itself
//! can be tested with losses and duplicates that are known.

mod trace;

use std::collections::BTreeMap;

use futures_util::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::store::{Store, StoreError, state};

pub use self::trace::{Finding, Passed, Seen, Stage, locate, locate_text, trace, trace_text};

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
}

impl ClientCounts {
    /// Sent and not through.
    pub fn in_flight(&self) -> u64 {
        self.sent.saturating_sub(self.counted + self.dead_lettered)
    }
}

/// What the store says of everything.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// By client.
    pub clients: BTreeMap<String, ClientCounts>,
    /// How often each message was counted, by its hash.
    pub messages: BTreeMap<String, u64>,
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
    /// By message.
    pub messages: Messages,
    /// Sent in all.
    pub sent: u64,
    /// Counted in all.
    pub counted: u64,
    /// Sent, and neither counted nor among the dead letters.
    pub lost: u64,
    /// Counted more often than sent.
    pub duplicated: u64,
    /// Set aside with their origin.
    pub dead_lettered: u64,
    /// `ok` or `failed`.
    pub verdict: &'static str,
    /// The first record that went wrong, and where.
    pub first_wrong: Option<Finding>,
}

/// Questions to the store at a time.
const AT_ONCE: usize = 128;
/// At most so many messages are named.
pub const MAX_WRONG: usize = 100;

impl Verdict {
    /// Whether every message was counted once.
    pub fn is_ok(&self) -> bool {
        self.verdict == "ok"
    }
}

/// Judges. `expected_each` is how often every message was sent; without it, it is worked out where all clients sent the
/// same number of lines and as many different ones.
pub fn judge(observed: &Observed, expected_each: Option<u64>) -> Verdict {
    let clients = &observed.clients;
    let total = |of: fn(&ClientCounts) -> u64| clients.values().map(of).sum::<u64>();
    let (sent, counted, dead) = (total(|c| c.sent), total(|c| c.counted), total(|c| c.dead_lettered));
    let aggregated: u64 = observed.messages.values().sum();
    let expected_each = expected_each.or_else(|| same_lines(observed));
    let mut lost = total(ClientCounts::in_flight);
    let mut duplicated = total(|c| (c.counted + c.dead_lettered).saturating_sub(c.sent));
    let mut wrong = Vec::new();
    match expected_each {
        Some(expected) => {
            for (hash, count) in observed.messages.iter().filter(|(_, count)| **count != expected) {
                duplicated += count.saturating_sub(expected);
                wrong.push(WrongMessage { hash: hash.clone(), text: None, count: *count, expected });
            }
            // A client that lost a message also lacks it in its text's count: it is one loss.
            lost = lost.max((counted + lost).saturating_sub(aggregated.min(counted + lost)));
        }
        None => {
            lost += counted.saturating_sub(aggregated);
            duplicated += aggregated.saturating_sub(counted);
        }
    }
    wrong.truncate(MAX_WRONG);
    let ok = lost == 0 && duplicated == 0 && wrong.is_empty() && aggregated == counted;
    Verdict {
        messages: Messages { distinct: observed.messages.len() as u64, expected_each, wrong },
        clients: clients.clone(),
        sent,
        counted,
        lost,
        duplicated,
        dead_lettered: dead,
        verdict: if ok { "ok" } else { "failed" },
        first_wrong: None,
    }
}

/// Every client sent as many lines as there are different messages: then it was the same lines.
fn same_lines(observed: &Observed) -> Option<u64> {
    let distinct = observed.messages.len() as u64;
    let all = observed.clients.values().all(|client| client.sent == distinct && client.dead_lettered == 0);
    (all && distinct > 0).then_some(observed.clients.len() as u64)
}

/// Reads everything from the store.
pub async fn observe(store: &Store) -> Result<Observed, StoreError> {
    let mut observed = Observed { clients: observe_clients(store).await?, ..Observed::default() };
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
    Ok(observed)
}

/// Reads what the store says of the clients.
pub async fn observe_clients(store: &Store) -> Result<BTreeMap<String, ClientCounts>, StoreError> {
    let clients = store.clients().await?.into_iter();
    let counts = clients
        .map(|client| async move { observe_client(store, &client).await.map(|counts| (client, counts)) });
    futures_util::stream::iter(counts).buffer_unordered(AT_ONCE).try_collect().await
}

async fn observe_client(store: &Store, client: &str) -> Result<ClientCounts, StoreError> {
    let produced = store.numbers(&state(client), &["sent", "acked", "stored"]).await?;
    let position = store.numbers(&format!("consumer:{{{client}}}:position"), &["dead"]).await?;
    let counted = store.number_at(&format!("consumer:{{{client}}}:msg_cnt")).await?;
    let last = store.number_at(&format!("consumer:{{{client}}}:last_msg_sn")).await?;
    let field = |list: &[u64], at: usize| list.get(at).copied().unwrap_or(0);
    Ok(ClientCounts {
        sent: field(&produced, 0),
        acked: field(&produced, 1),
        relayed: field(&produced, 2),
        counted,
        dead_lettered: field(&position, 0),
        last,
    })
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
