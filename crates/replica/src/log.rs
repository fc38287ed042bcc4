//! The state machines' view of a journal: log start, log end, durable end, epoch boundaries.

use moim_base::{LeaderEpoch, Offset};
use moim_journal::Journal;

use crate::types::Durability;

/// A read-only view of a log.
pub trait LogView {
    /// The log start offset.
    fn start(&self) -> Offset;
    /// The log end offset: the offset of the next record.
    fn end(&self) -> Offset;
    /// The written offset: everything below survives a process crash.
    fn written(&self) -> Offset;
    /// The durable offset: everything below survives a machine crash.
    fn durable(&self) -> Offset;
    /// The leader epoch of the newest record. Not an epoch that was noted at an election and has no record: a
    /// truncation could not remove it.
    fn last_epoch(&self) -> Option<LeaderEpoch>;
    /// The greatest known epoch at or below `epoch`, and its end offset.
    fn end_of_epoch(&self, epoch: LeaderEpoch) -> Option<(LeaderEpoch, Offset)>;
    /// The base offset of the batch that contains `offset`; `offset` itself if no batch does. It may lie below the
    /// log start: records are deleted one by one, batches are replicated whole.
    fn base_of(&self, offset: Offset) -> Offset {
        offset
    }
    /// Compaction may have removed tombstones and markers below this offset, here or in the logs this one was
    /// replicated from.
    fn cleaned_below(&self) -> Offset {
        Offset(0)
    }
}

/// A journal as a [`LogView`].
pub struct JournalView<'a> {
    /// The journal.
    pub journal: &'a Journal,
    /// The durability the journal is opened with: a journal has one durable end, and this gives its meaning.
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
            // The journal does not report what a checkpoint has synced, so no durable offset is claimed.
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
