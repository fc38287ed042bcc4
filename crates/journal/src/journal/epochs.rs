//! The leader-epoch table: the start offset of each epoch.
//!
//! Invariant: epochs and start offsets both ascend. Entries come from frames and from elections alike; where they
//! contradict each other the frame wins: that election came to nothing, and the log continued under another leader.

/// The epoch of a frame without leader epoch.
const NONE: i32 = -1;

/// The table of one journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Epochs {
    entries: Vec<(i32, i64)>,
}

impl Epochs {
    pub(crate) fn from_vec(entries: Vec<(i32, i64)>) -> Self {
        Self { entries }
    }

    pub(crate) fn to_vec(&self) -> Vec<(i32, i64)> {
        self.entries.clone()
    }

    /// Records that `epoch` was seen at `start`. Returns true if the table changed.
    ///
    /// An epoch below the newest is inserted only if that keeps offsets ascending (recovery reads frames after later
    /// elections); entries that a newer epoch overtakes at a smaller offset are dropped.
    pub(crate) fn note(&mut self, epoch: i32, start: i64) -> bool {
        if epoch < 0 {
            return false;
        }
        let at = self.entries.partition_point(|entry| entry.0 < epoch);
        match self.entries.get(at) {
            Some(entry) if entry.0 == epoch && entry.1 <= start => return false,
            Some(entry) if entry.0 > epoch && entry.1 <= start => return false,
            Some(entry) if entry.0 == epoch => {
                self.entries.remove(at);
            }
            _ => {}
        }
        let keep = self.entries[..at].partition_point(|entry| entry.1 < start);
        self.entries.drain(keep..at);
        self.entries.insert(keep, (epoch, start));
        true
    }

    /// Records a frame. An epoch that is newer than the frame and started at or before it has nothing in this log: left
    /// in the table it would make other replicas truncate the frame.
    pub(crate) fn note_frame(&mut self, epoch: i32, base: i64) {
        self.entries.retain(|entry| entry.0 <= epoch || entry.1 > base);
        self.note(epoch, base);
    }

    /// Drops entries that start at or past `end`.
    pub(crate) fn truncate(&mut self, end: i64) {
        self.entries.retain(|entry| entry.1 < end);
    }

    /// Drops entries wholly before `start`; the epoch in force there starts there.
    pub(crate) fn set_start(&mut self, start: i64) {
        let after = self.entries.partition_point(|entry| entry.1 <= start);
        if after > 0 {
            self.entries.drain(..after - 1);
            self.entries[0].1 = self.entries[0].1.max(start);
        }
    }

    /// True if a frame at this offset may have this epoch. Below the first entry any epoch is possible.
    pub(crate) fn agrees(&self, epoch: i32, base: i64) -> bool {
        let after = self.entries.partition_point(|entry| entry.1 <= base);
        epoch == NONE || after.checked_sub(1).is_none_or(|at| self.entries[at].0 == epoch)
    }

    /// The newest epoch that started before `offset`.
    pub(crate) fn before(&self, offset: i64) -> Option<i32> {
        let after = self.entries.partition_point(|entry| entry.1 < offset);
        Some(self.entries[after.checked_sub(1)?].0)
    }

    /// The greatest epoch at or below `epoch`, and its end offset.
    pub(crate) fn end_offset(&self, epoch: i32, end: i64) -> (i32, i64) {
        let after = self.entries.partition_point(|entry| entry.0 <= epoch);
        match after.checked_sub(1) {
            None => (-1, -1),
            Some(at) => (self.entries[at].0, self.entries.get(after).map_or(end, |next| next.1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(notes: &[(i32, i64)]) -> Epochs {
        let mut epochs = Epochs::default();
        for (epoch, start) in notes {
            epochs.note(*epoch, *start);
        }
        epochs
    }

    #[test]
    fn frame_epoch_overrides_a_contradicting_election() {
        let after = |notes: &[(i32, i64)], frame: (i32, i64)| {
            let mut epochs = table(notes);
            epochs.note_frame(frame.0, frame.1);
            epochs.to_vec()
        };
        // Led in epoch 2 without a record, then followed a leader whose log continued in epoch 0.
        assert_eq!(after(&[(0, 0), (2, 4)], (0, 4)), [(0, 0)]);
        assert_eq!(after(&[(0, 0), (2, 4), (3, 4)], (1, 4)), [(0, 0), (1, 4)]);
        assert_eq!(after(&[(0, 0), (2, 4)], (2, 4)), [(0, 0), (2, 4)]);
        assert_eq!(after(&[(0, 0), (2, 4)], (3, 4)), [(0, 0), (3, 4)]);
        // Recovery reads frames after later elections.
        assert_eq!(after(&[(0, 0), (2, 4)], (0, 3)), [(0, 0), (2, 4)]);
    }

    #[test]
    fn epochs_and_offsets_stay_ascending() {
        let check =
            |notes: &[(i32, i64)], want: &[(i32, i64)]| assert_eq!(table(notes).to_vec(), want, "{notes:?}");
        check(&[(0, 0), (0, 5), (2, 9)], &[(0, 0), (2, 9)]);
        check(&[(0, 0), (1, 5), (2, 5)], &[(0, 0), (2, 5)]);
        check(&[(5, 100), (3, 90)], &[(3, 90), (5, 100)]);
        check(&[(5, 100), (3, 100)], &[(5, 100)]);
        check(&[(5, 100), (5, 90)], &[(5, 90)]);
        check(&[(-1, 0)], &[]);
    }

    #[test]
    fn epoch_ends_where_the_next_starts() {
        let epochs = table(&[(1, 0), (3, 10), (4, 20)]);
        assert_eq!(epochs.end_offset(0, 30), (-1, -1));
        assert_eq!(epochs.end_offset(1, 30), (1, 10));
        assert_eq!(epochs.end_offset(2, 30), (1, 10));
        assert_eq!(epochs.end_offset(9, 30), (4, 30));
    }

    #[test]
    fn truncation_and_log_start_trim_the_table() {
        let mut epochs = table(&[(1, 0), (3, 10), (4, 20)]);
        epochs.truncate(20);
        assert_eq!(epochs.to_vec(), [(1, 0), (3, 10)]);
        epochs.set_start(5);
        assert_eq!(epochs.to_vec(), [(1, 5), (3, 10)]);
        epochs.set_start(15);
        assert_eq!(epochs.to_vec(), [(3, 15)]);
    }
}
