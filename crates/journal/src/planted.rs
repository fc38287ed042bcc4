//! Known bugs that a test can switch on, to show that the simulator finds them. Compiled with the feature `planted`
//! alone, and switched off even then; no product has it.

use std::cell::Cell;

/// A bug that was fixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Frames of a segment are used without a look at their checksums.
    UnverifiedSegment,
    /// A commit-log record that cannot be read ends the log, although a later group vouches for it.
    BadRecordEndsLog,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::UnverifiedSegment, Self::BadRecordEndsLog];
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Switches one on for this thread, or all off.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Whether this one is on.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
