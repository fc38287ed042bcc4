//! What the state machines see of a journal: where it starts, where it ends, which epoch ends where.

use moim_base::{LeaderEpoch, Offset};
use moim_journal::Journal;

use crate::types::Durability;

/// A log, looked at. Nothing here changes it.
pub trait LogView {
    /// The first offset it has.
    fn start(&self) -> Offset;
    /// The offset the next record gets.
    fn end(&self) -> Offset;
    /// Everything below survives a crash of the process.
    fn written(&self) -> Offset;
    /// Everything below survives a crash of the machine.
    fn durable(&self) -> Offset;
    /// The leader epoch of its newest record. Not one that was noted at an election and has no record: a cut could not
    /// take it away.
    fn last_epoch(&self) -> Option<LeaderEpoch>;
    /// The greatest known epoch at or below `epoch`, and the offset where it ends.
    fn end_of_epoch(&self, epoch: LeaderEpoch) -> Option<(LeaderEpoch, Offset)>;
    /// Where the batch that holds `offset` begins; `offset` itself where none does. It may lie below the log start: records
    /// are deleted one by one, batches travel as a whole.
    fn base_of(&self, offset: Offset) -> Offset {
        offset
    }
    /// Below this offset compaction may have removed tombstones and markers, here or in the logs this one was copied from.
    fn cleaned_below(&self) -> Offset {
        Offset(0)
    }
}

/// A journal as a log view.
pub struct JournalView<'a> {
    /// The journal.
    pub journal: &'a Journal,
    /// How it is opened now: a journal has one durable end, and this says what it means.
    pub durability: Durability,
}

impl LogView for JournalView<'_> {
    fn start(&self) -> Offset {
        Offset(self.journal.start())
    }

    fn end(&self) -> Offset {
        Offset(self.journal.end())
    }

    fn base_of(&self, offset: Offset) -> Offset {
        Offset(self.journal.base_of(offset.0))
    }

    fn cleaned_below(&self) -> Offset {
        Offset(self.journal.cleaned_below())
    }

    fn written(&self) -> Offset {
        Offset(self.journal.durable_end())
    }

    fn durable(&self) -> Offset {
        match self.durability {
            Durability::Fsync => Offset(self.journal.durable_end()),
            // What a checkpoint has synced is not told, so nothing is claimed.
            Durability::Replicated => self.start(),
        }
    }

    fn last_epoch(&self) -> Option<LeaderEpoch> {
        self.journal.epoch_before(self.journal.end()).map(LeaderEpoch)
    }

    fn end_of_epoch(&self, epoch: LeaderEpoch) -> Option<(LeaderEpoch, Offset)> {
        match self.journal.end_offset_for_epoch(epoch.0) {
            (-1, _) => None,
            (epoch, end) => Some((LeaderEpoch(epoch), Offset(end))),
        }
    }
}
