//! Known bugs that a test can switch on, to show that the simulator finds them. Compiled only with the feature
//! `planted`, and off by default even then; no product has it.

use std::cell::Cell;

/// A bug that was fixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Frames of a segment are used without verifying their checksums.
    UnverifiedSegment,
    /// An unreadable commit-log record ends the log, although a later group proves that it was synced.
    BadRecordEndsLog,
}

impl Bug {
    /// All planted bugs.
    pub const ALL: [Self; 2] = [Self::UnverifiedSegment, Self::BadRecordEndsLog];
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Switches one bug on for this thread, or all off.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this bug is on.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
