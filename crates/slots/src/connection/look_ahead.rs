//! Look-ahead over the requests of a pipeline: their keys are looked up together, so that the memory accesses of one do not
//! wait for those of another.
//!
//! Must never outlive its turn: what it remembers of keys is valid under the shard's lock only.

use moim_wire_resp::{Args, Decoder};

use crate::keyspace::LOOK_AHEAD;
use crate::shard::{Scratch, Turn};

/// A longer key is not looked for ahead: it may be a script, or a value.
const LOOK_AHEAD_BYTES: usize = 128;

/// The requests of a pipeline that come next: their keys are looked for together before the first of them runs.
pub(super) struct Ahead {
    scratch: Scratch,
    /// Where the batch begins in the input.
    from: usize,
    /// Which request of it comes next.
    next: usize,
}

impl Ahead {
    pub(super) fn take(turn: &mut Turn<'_>) -> Self {
        let scratch = std::mem::take(&mut turn.state.scratch);
        let mut ahead = Self { scratch, from: 0, next: 0 };
        ahead.forget();
        ahead
    }

    /// What was found ahead is not to be trusted any more.
    pub(super) fn forget(&mut self) {
        self.scratch.batch.clear();
        self.next = 0;
    }

    pub(super) fn give_back(self, turn: &mut Turn<'_>) {
        // A request that was held back has not run: nothing may be remembered about bytes that will be others.
        turn.state.db.forget();
        turn.state.scratch = self.scratch;
    }

    /// The request at `at`, if it is a plain one that is here whole.
    pub(super) fn next<'a>(
        &'a mut self,
        turn: &mut Turn<'_>,
        decoder: &Decoder,
        input: &'a [u8],
        at: usize,
    ) -> Option<(Args<'a>, usize)> {
        let Scratch { batch, ids } = &mut self.scratch;
        if self.next == batch.len() {
            decoder.batch(&input[at..], LOOK_AHEAD, batch);
            (self.from, self.next) = (at, 0);
            ids.clear();
            if batch.len() > 1 {
                // Where the first argument is no key, nothing is found and nothing is lost.
                let key = |args: Args<'a>| {
                    args.get(1).filter(|key| key.len() <= LOOK_AHEAD_BYTES).unwrap_or_default()
                };
                let key_at =
                    |at: usize, index| batch.get(&input[at..], index).map_or(&[][..], |(args, _)| key(args));
                ids.extend((0..batch.len()).map(|index| turn.state.db.id_of(key_at(at, index))));
                turn.state.db.look_ahead(ids);
            }
        }
        let (args, consumed) = batch.get(&input[self.from..], self.next)?;
        if let (Some(id), Some(key)) = (ids.get(self.next), args.get(1))
            && key.len() <= LOOK_AHEAD_BYTES
        {
            turn.state.db.remember(key, *id);
        }
        self.next += 1;
        Some((args, consumed))
    }
}
