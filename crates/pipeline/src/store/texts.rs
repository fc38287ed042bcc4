//! Text counts in the store: the count of each text, and the position of each partition up to which it was counted.
//!
//! All messages of a text stand in one partition, in the order in which their clients sent them, and every aggregator
//! reads a partition in order: so the position of the last counted message decides for every other message whether it
//! was counted. A position is an offset; see [`crate::aggregator`] for the exception. The count and its position are
//! updated in one step.

use super::{Reply, Store, StoreError, number, script, word};

/// A message of a text, with its position in the partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionedMessage<'a> {
    /// The client that sent it.
    pub client: &'a str,
    /// The client's sequence number.
    pub sn: u64,
    /// Its position; strictly increasing.
    pub position: u64,
}

/// A text of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Hash of the text: [`super::hash_of`].
    pub hash: &'a str,
    /// The text itself.
    pub text: &'a [u8],
    /// Partition of all its messages.
    pub partition: i32,
    /// The last position it is known to be counted up to; none if unknown.
    pub counted_to: Option<u64>,
}

/// Outcome of counting messages of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregated {
    /// All of them are counted.
    Counted,
    /// The store has counted the text up to an earlier position than is known: it has lost writes. Nothing was
    /// counted.
    Behind,
}

/// Read position of a partition of counted messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTo {
    /// Added to an offset to get a position.
    pub shift: u64,
    /// The position after the last message.
    pub next: u64,
    /// End position of a rebuild of the partition; 0 if absent.
    pub rebuild: u64,
}

impl Store {
    /// Counts messages of a text, each position once.
    pub async fn aggregate(
        &self,
        text: Text<'_>,
        messages: &[PositionedMessage<'_>],
    ) -> Result<Aggregated, StoreError> {
        let keys = ["at", "count", "text", "last", "by"].map(|part| key(text.hash, part));
        let keys = keys.each_ref().map(String::as_str);
        let partition = text.partition.to_string();
        let known = text.counted_to.map_or_else(|| "-1".to_owned(), number);
        let mut new = messages;
        while let ([first, ..], [.., last]) = (new, new) {
            let numbers = [number(first.position), number(last.position), number(new.len() as u64)];
            let [first, last, many] = numbers.each_ref().map(|n| n.as_bytes());
            let args = [partition.as_bytes(), first, last, many, text.text, known.as_bytes()];
            let reply = script::AGGREGATE.run_bytes(self, &keys, &args).await?;
            match (word(&reply), reply.list().get(1).and_then(Reply::int)) {
                (b"ok", _) => return Ok(Aggregated::Counted),
                (b"behind", _) => return Ok(Aggregated::Behind),
                // Some of them were counted before.
                (b"apart", Some(at)) => {
                    let counted = new.partition_point(|message| message.position <= at.unsigned_abs());
                    new = &new[counted.max(1)..];
                }
                (b"old", _) => {
                    self.aggregate_old(text, new).await?;
                    return Ok(Aggregated::Counted);
                }
                _ => return Err(StoreError::UnexpectedReply(format!("{reply:?}"))),
            }
        }
        Ok(Aggregated::Counted)
    }

    /// Counts messages of a text that an earlier version has counted: that version kept the last sequence number of
    /// each client.
    async fn aggregate_old(
        &self,
        text: Text<'_>,
        messages: &[PositionedMessage<'_>],
    ) -> Result<(), StoreError> {
        let numbers: Vec<String> = messages.iter().map(|message| number(message.sn)).collect();
        let mut args: Vec<&[u8]> = Vec::with_capacity(1 + 2 * messages.len());
        args.push(text.text);
        for (message, sn) in messages.iter().zip(&numbers) {
            args.extend([sn.as_bytes(), message.client.as_bytes()]);
        }
        let keys = ["count", "last", "text", "by"].map(|part| key(text.hash, part));
        script::AGGREGATE_OLD.run_bytes(self, &keys.each_ref().map(String::as_str), &args).await.map(drop)
    }

    /// The read position of a partition, and the last sequence number read from it for each of these clients (0 for
    /// none). Both are read atomically, because another aggregator may be reading on.
    pub async fn read_to(&self, partition: i32, clients: &[&str]) -> Result<(ReadTo, Vec<u64>), StoreError> {
        let keys = [reading(partition, "reading"), reading(partition, "last")];
        let reply = script::READ_POSITION.run(self, &[&keys[0], &keys[1]], clients).await?;
        let found: Vec<u64> =
            reply.list().iter().skip(1).map(|n| n.int().map_or(0, i64::unsigned_abs)).collect();
        match (word(&reply), found.as_slice()) {
            (b"ok", [shift, next, rebuild, last @ ..]) if last.len() == clients.len() => {
                Ok((ReadTo { shift: *shift, next: *next, rebuild: *rebuild }, last.to_vec()))
            }
            _ => Err(StoreError::UnexpectedReply(format!("{} clients: {reply:?}", clients.len()))),
        }
    }

    /// Records the read position of a partition, and the new last sequence numbers of clients. No value decreases.
    pub async fn record_read(
        &self,
        partition: i32,
        to: ReadTo,
        clients: &[(&str, u64)],
    ) -> Result<(), StoreError> {
        let mut numbers = vec![number(to.shift), number(to.next)];
        numbers.extend(clients.iter().map(|(_, sn)| number(*sn)));
        let mut args: Vec<&str> = vec![&numbers[0], &numbers[1]];
        for ((client, _), sn) in clients.iter().zip(&numbers[2..]) {
            args.extend([sn.as_str(), client]);
        }
        let keys = [reading(partition, "reading"), reading(partition, "last")];
        script::RECORD_READ.run(self, &[&keys[0], &keys[1]], &args).await.map(drop)
    }

    /// Records the end position of a rebuild of a partition, or 0 once it is complete.
    pub async fn record_rebuild(&self, partition: i32, until: u64) -> Result<(), StoreError> {
        let key = reading(partition, "reading");
        self.call(&[b"HSET", key.as_bytes(), b"rebuild", number(until).as_bytes()]).await.map(drop)
    }

    /// The last position of a partition up to which a text is counted.
    pub async fn text_counted_to(&self, hash: &str, partition: i32) -> Result<Option<u64>, StoreError> {
        let partition = partition.to_string();
        let at = self.call(&[b"HGET", key(hash, "at").as_bytes(), partition.as_bytes()]).await?;
        Ok(at.int().map(i64::unsigned_abs))
    }

    /// The positions up to which a text was counted.
    pub async fn counted_for(&self, hash: &str) -> Result<CountedFor, StoreError> {
        let last = self.call(&[b"ZRANGE", key(hash, "last").as_bytes(), b"0", b"-1", b"WITHSCORES"]).await?;
        let by = self.call(&[b"HGETALL", key(hash, "by").as_bytes()]).await?;
        let text = |reply: &Reply| Some(String::from_utf8_lossy(reply.bytes()?).into_owned());
        let mut counted = CountedFor::default();
        for (client, sn) in pairs(&last).into_iter().chain(pairs(&by)) {
            if let (Some(client), Some(sn)) = (text(client), sn.int()) {
                counted.by.insert(client, sn.unsigned_abs());
            }
        }
        let at = self.call(&[b"HGETALL", key(hash, "at").as_bytes()]).await?;
        for (partition, position) in pairs(&at) {
            if let (Some(partition), Some(position)) = (partition.int(), position.int()) {
                let partition = i32::try_from(partition).unwrap_or(-1);
                let shift = self.read_to(partition, &[]).await?.0.shift;
                counted.at.insert(partition, position.saturating_sub_unsigned(shift));
            }
        }
        Ok(counted)
    }
}

/// The positions up to which a text was counted.
#[derive(Clone, Debug, Default)]
pub struct CountedFor {
    /// By partition: everything up to this offset.
    pub at: std::collections::BTreeMap<i32, i64>,
    /// By client: everything up to this sequence number, counted by an earlier version.
    pub by: std::collections::BTreeMap<String, u64>,
}

/// Field-value or member-score pairs: RESP3 returns them nested, RESP2 flat.
pub(super) fn pairs(reply: &Reply) -> Vec<(&Reply, &Reply)> {
    let flat = reply.list().iter().flat_map(|part| match part {
        Reply::Array(pair) => pair.as_slice(),
        other => std::slice::from_ref(other),
    });
    let flat: Vec<&Reply> = flat.collect();
    flat.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

fn key(hash: &str, part: &str) -> String {
    format!("message:{{{hash}}}:{part}")
}

fn reading(partition: i32, part: &str) -> String {
    format!("consumer:{{aggregator-{partition}}}:{part}")
}
