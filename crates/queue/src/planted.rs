//! Known bugs that a test can enable, to show that the simulator finds them. Compiled only with the feature
//! `planted`, and disabled even then; no release build has it.

use std::cell::Cell;

/// A bug that was fixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Markers are appended after their caller has timed out, and also after newer attempts.
    LateMarker,
}

impl Bug {
    /// All planted bugs.
    pub const ALL: [Self; 1] = [Self::LateMarker];
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Enables one bug on this thread, or disables all.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this bug is enabled.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
