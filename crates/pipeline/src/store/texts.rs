//! What the store holds of texts: how often each was counted, and up to which place of which partition.
//!
//! All messages of a text stand in one partition, in the order in which their clients sent them, and every aggregator reads a
//! partition from its beginning to its end: so the place of the last one that counted says of every other whether it did. A
//! place is an offset, see [`crate::aggregator`] for when it is another number. What was counted, and up to where, is one step.

use super::{Reply, Store, StoreError, number, script, word};

/// A message of a text, where it stands in its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed<'a> {
    /// Who sent it.
    pub client: &'a str,
    /// The client's sequence number.
    pub sn: u64,
    /// Its place; each one is larger than the one before.
    pub place: u64,
}

/// A text of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Its name: [`super::hash_of`].
    pub hash: &'a str,
    /// Itself.
    pub text: &'a [u8],
    /// Where all of its messages stand.
    pub partition: i32,
    /// The last place that it is known to be counted up to; none when nothing is known.
    pub counted_to: Option<u64>,
}

/// What became of messages of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregated {
    /// All of them are counted.
    Counted,
    /// The text is counted up to an earlier place than is known: the store went back. None was counted.
    Behind,
}

/// Up to where a partition of counted messages has been read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTo {
    /// What is added to an offset to make a place of it.
    pub shift: u64,
    /// The place after the last message.
    pub next: u64,
    /// The partition is counted again from its beginning up to this place; 0 as a rule.
    pub rebuild: u64,
}

impl Store {
    /// Counts messages of a text, each place once.
    pub async fn aggregate(&self, text: Text<'_>, messages: &[Placed<'_>]) -> Result<Aggregated, StoreError> {
        let keys = ["at", "count", "text", "last", "by"].map(|part| key(text.hash, part));
        let keys = keys.each_ref().map(String::as_str);
        let partition = text.partition.to_string();
        let known = text.counted_to.map_or_else(|| "-1".to_owned(), number);
        let mut new = messages;
        while let ([first, ..], [.., last]) = (new, new) {
            let numbers = [number(first.place), number(last.place), number(new.len() as u64)];
            let [first, last, many] = numbers.each_ref().map(|n| n.as_bytes());
            let args = [partition.as_bytes(), first, last, many, text.text, known.as_bytes()];
            let reply = script::AGGREGATE.run_bytes(self, &keys, &args).await?;
            match (word(&reply), reply.list().get(1).and_then(Reply::int)) {
                (b"ok", _) => return Ok(Aggregated::Counted),
                (b"behind", _) => return Ok(Aggregated::Behind),
                // Some of them were counted before.
                (b"apart", Some(at)) => {
                    let counted = new.partition_point(|message| message.place <= at.unsigned_abs());
                    new = &new[counted.max(1)..];
                }
                (b"old", _) => {
                    self.aggregate_old(text, new).await?;
                    return Ok(Aggregated::Counted);
                }
                _ => return Err(StoreError::Strange(format!("{reply:?}"))),
            }
        }
        Ok(Aggregated::Counted)
    }

    /// The same for a text that an earlier version has counted: that one kept the last number of each client.
    async fn aggregate_old(&self, text: Text<'_>, messages: &[Placed<'_>]) -> Result<(), StoreError> {
        let numbers: Vec<String> = messages.iter().map(|message| number(message.sn)).collect();
        let mut args: Vec<&[u8]> = Vec::with_capacity(1 + 2 * messages.len());
        args.push(text.text);
        for (message, sn) in messages.iter().zip(&numbers) {
            args.extend([sn.as_bytes(), message.client.as_bytes()]);
        }
        let keys = ["count", "last", "text", "by"].map(|part| key(text.hash, part));
        script::AGGREGATE_OLD.run_bytes(self, &keys.each_ref().map(String::as_str), &args).await.map(drop)
    }

    /// Up to where a partition has been read, and the last sequence number of each of these clients that was read from it (0 for
    /// none), both of the same moment: another one may be reading on.
    pub async fn read_to(&self, partition: i32, clients: &[&str]) -> Result<(ReadTo, Vec<u64>), StoreError> {
        let keys = [reading(partition, "reading"), reading(partition, "last")];
        let reply = script::LOOK.run(self, &[&keys[0], &keys[1]], clients).await?;
        let found: Vec<u64> =
            reply.list().iter().skip(1).map(|n| n.int().map_or(0, i64::unsigned_abs)).collect();
        match (word(&reply), found.as_slice()) {
            (b"ok", [shift, next, rebuild, last @ ..]) if last.len() == clients.len() => {
                Ok((ReadTo { shift: *shift, next: *next, rebuild: *rebuild }, last.to_vec()))
            }
            _ => Err(StoreError::Strange(format!("{} clients: {reply:?}", clients.len()))),
        }
    }

    /// Notes up to where a partition has been read, and the last numbers of clients that are new. Nothing goes back.
    pub async fn note_read(
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
        script::READ.run(self, &[&keys[0], &keys[1]], &args).await.map(drop)
    }

    /// Notes that a partition is counted again up to this place, or with 0 that it was.
    pub async fn note_rebuild(&self, partition: i32, until: u64) -> Result<(), StoreError> {
        let key = reading(partition, "reading");
        self.call(&[b"HSET", key.as_bytes(), b"rebuild", number(until).as_bytes()]).await.map(drop)
    }

    /// The last place of a partition that a text is counted up to.
    pub async fn text_counted_to(&self, hash: &str, partition: i32) -> Result<Option<u64>, StoreError> {
        let partition = partition.to_string();
        let at = self.call(&[b"HGET", key(hash, "at").as_bytes(), partition.as_bytes()]).await?;
        Ok(at.int().map(i64::unsigned_abs))
    }

    /// What a text was counted for.
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
        for (partition, place) in pairs(&at) {
            if let (Some(partition), Some(place)) = (partition.int(), place.int()) {
                let partition = i32::try_from(partition).unwrap_or(-1);
                let shift = self.read_to(partition, &[]).await?.0.shift;
                counted.at.insert(partition, place.saturating_sub_unsigned(shift));
            }
        }
        Ok(counted)
    }
}

/// What a text was counted for.
#[derive(Clone, Debug, Default)]
pub struct CountedFor {
    /// Everything up to this offset of a partition.
    pub at: std::collections::BTreeMap<i32, i64>,
    /// Everything up to this number of a client, by an earlier version.
    pub by: std::collections::BTreeMap<String, u64>,
}

/// Keys or members and what belongs to them: they come as pairs, or one after the other.
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
