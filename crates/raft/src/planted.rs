//! Known bugs that a test can enable, to show that the simulator finds them. Compiled only with the feature
//! `planted`, and inactive by default; no product has it.
//!
//! Each is a plausible mistake: it passes every test without faults.

use std::cell::Cell;

/// A planted bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Appended entries are acknowledged before they are synced.
    AckBeforeSync,
    /// A vote is granted before it is on disk.
    VoteBeforeSync,
    /// A read trusts this node's own state, without confirming that it is the newest.
    StaleRead,
    /// A command whose outcome is unknown is sent again.
    SendTwice,
    /// A new leader counts lease time from before it led.
    LeaseEarly,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::AckBeforeSync, Self::VoteBeforeSync, Self::StaleRead, Self::SendTwice, Self::LeaseEarly];
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Enables one for this thread, or disables all.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this one is enabled.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
