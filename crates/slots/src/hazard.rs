//! Which answers must wait for the journal.
//!
//! A change is in memory before it is committed, and nothing derived from it may leave before. For every key that was
//! changed, its hazard is the journal end that must be committed first; an answer that looked at the key waits for it,
//! also when the key is gone by then, also when the answer is an error.
//!
//! Hazards are kept by hash in a table that forgets nothing and needs no cleaning: a place holds the newest end of all
//! keys that share it, and an end that is committed is no hazard. Two keys that share a place can make an answer wait for
//! somebody else's change, which takes no longer than one sync and what is gathered for it; they can never make it leave too early.

/// Places: with a hundred changes in flight, one read in 160 waits without need.
const PLACES: usize = 16_384;

/// The hazards of a shard.
#[derive(Default)]
pub struct Hazards {
    places: Vec<i64>,
    /// The hazard of every key: after FLUSHALL.
    all: i64,
    /// The end that commits the batch which is being made.
    pub batch: i64,
}

impl Hazards {
    fn place(hash: u64) -> usize {
        (hash >> 20) as usize % PLACES
    }

    /// The key with this hash changes with the batch that is being made.
    #[inline]
    pub fn mark(&mut self, hash: u64) {
        if self.places.is_empty() {
            self.places = vec![0; PLACES];
        }
        self.places[Self::place(hash)] = self.batch;
    }

    /// Every key changes with it.
    pub fn mark_all(&mut self) {
        self.all = self.batch;
    }

    /// The end that an answer about this key waits for.
    #[inline]
    pub fn of(&self, hash: u64) -> i64 {
        self.places.get(Self::place(hash)).map_or(self.all, |end| self.all.max(*end))
    }

    /// The journal was cut or is another one: ends of before mean nothing.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_key_waits_and_others_do_not() {
        let mut hazards = Hazards { batch: 7, ..Hazards::default() };
        assert_eq!(hazards.of(5 << 20), 0);
        hazards.mark(5 << 20);
        assert_eq!((hazards.of(5 << 20), hazards.of(6 << 20)), (7, 0));
        hazards.batch = 9;
        hazards.mark_all();
        assert_eq!((hazards.of(5 << 20), hazards.of(6 << 20)), (9, 9));
    }
}
