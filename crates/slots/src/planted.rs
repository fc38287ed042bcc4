//! Known bugs that a test can switch on, to show that the simulator finds them. Compiled with the feature `planted`
//! alone, and asleep even then; no product has it.

use std::cell::Cell;

/// Which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Answers leave before what they show is committed.
    ReplyBeforeCommit,
    /// A primary answers although its right to has run out.
    ServePastRight,
    /// The source of a move serves its slots again although the slot map still lets the target have them.
    ThawWithoutAbort,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ReplyBeforeCommit, Self::ServePastRight, Self::ThawWithoutAbort];
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
