//! Pipeline prefetch: looks up the keys of pipelined requests together, so that their memory accesses overlap.
//!
//! Must never outlive its turn: the cached key lookups are valid only under the shard's lock.

use moim_wire_resp::{Args, Decoder};

use crate::keyspace::PREFETCH_KEYS;
use crate::shard::{Scratch, Turn};

/// Longer keys are not prefetched: the argument may be a script or a value.
const MAX_KEY_BYTES: usize = 128;

/// The next requests of a pipeline: their keys are prefetched together before the first of them runs.
pub(super) struct Prefetch {
    scratch: Scratch,
    /// Start of the batch in the query buffer.
    from: usize,
    /// Index of the next request in the batch.
    next: usize,
}

impl Prefetch {
    pub(super) fn begin(turn: &mut Turn<'_>) -> Self {
        let scratch = std::mem::take(&mut turn.state.scratch);
        let mut prefetch = Self { scratch, from: 0, next: 0 };
        prefetch.discard();
        prefetch
    }

    /// Discards the prefetched batch.
    pub(super) fn discard(&mut self) {
        self.scratch.batch.clear();
        self.next = 0;
    }

    pub(super) fn finish(self, turn: &mut Turn<'_>) {
        // A delayed request has not run: no cached lookup may refer to bytes that will be overwritten.
        turn.state.db.clear_cached_id();
        turn.state.scratch = self.scratch;
    }

    /// The request at `at`, if it is complete and in plain form.
    pub(super) fn next<'a>(
        &'a mut self,
        turn: &mut Turn<'_>,
        decoder: &Decoder,
        input: &'a [u8],
        at: usize,
    ) -> Option<(Args<'a>, usize)> {
        let Scratch { batch, ids } = &mut self.scratch;
        if self.next == batch.len() {
            decoder.batch(&input[at..], PREFETCH_KEYS, batch);
            (self.from, self.next) = (at, 0);
            ids.clear();
            if batch.len() > 1 {
                // If the first argument is not a key, nothing is found and nothing is lost.
                let key =
                    |args: Args<'a>| args.get(1).filter(|key| key.len() <= MAX_KEY_BYTES).unwrap_or_default();
                let key_at =
                    |at: usize, index| batch.get(&input[at..], index).map_or(&[][..], |(args, _)| key(args));
                ids.extend((0..batch.len()).map(|index| turn.state.db.id_of(key_at(at, index))));
                turn.state.db.prefetch(ids);
            }
        }
        let (args, consumed) = batch.get(&input[self.from..], self.next)?;
        if let (Some(id), Some(key)) = (ids.get(self.next), args.get(1))
            && key.len() <= MAX_KEY_BYTES
        {
            turn.state.db.cache_id(key, *id);
        }
        self.next += 1;
        Some((args, consumed))
    }
}
