//! Commit hazards: which replies must wait for the journal.
//!
//! A write changes memory before it is committed, and nothing derived from it may be sent before the commit. The
//! hazard of a modified key is the journal end that must be committed first. A reply that accessed the key waits for
//! it, even if the key no longer exists and even if the reply is an error.
//!
//! Hazards are stored by key hash in a fixed table that needs no cleanup: a bucket holds the newest end of all keys
//! that share it, and a committed end is no hazard. Keys that share a bucket can delay a reply for an unrelated
//! write, by at most one sync and its group commit; they can never release a reply too early.

/// Buckets: with a hundred writes in flight, one read in 160 waits unnecessarily.
const BUCKETS: usize = 16_384;

/// The hazard table of a shard.
#[derive(Default)]
pub struct Hazards {
    buckets: Vec<i64>,
    /// The hazard of every key, after FLUSHALL.
    all: i64,
    /// The journal end that commits the current batch.
    pub batch: i64,
}

impl Hazards {
    fn bucket(hash: u64) -> usize {
        (hash >> 20) as usize % BUCKETS
    }

    /// Marks the key with this hash as modified by the current batch.
    #[inline]
    pub fn mark(&mut self, hash: u64) {
        if self.buckets.is_empty() {
            self.buckets = vec![0; BUCKETS];
        }
        self.buckets[Self::bucket(hash)] = self.batch;
    }

    /// Marks every key as modified by the current batch.
    pub fn mark_all(&mut self) {
        self.all = self.batch;
    }

    /// The journal end that a reply about this key waits for.
    #[inline]
    pub fn of(&self, hash: u64) -> i64 {
        self.buckets.get(Self::bucket(hash)).map_or(self.all, |end| self.all.max(*end))
    }

    /// Resets the table: the journal was truncated or replaced, so previous ends are meaningless.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_replies_about_modified_keys_wait_for_commit() {
        let mut hazards = Hazards { batch: 7, ..Hazards::default() };
        assert_eq!(hazards.of(5 << 20), 0);
        hazards.mark(5 << 20);
        assert_eq!((hazards.of(5 << 20), hazards.of(6 << 20)), (7, 0));
        hazards.batch = 9;
        hazards.mark_all();
        assert_eq!((hazards.of(5 << 20), hazards.of(6 << 20)), (9, 9));
    }
}
