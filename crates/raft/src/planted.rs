//! Known bugs that a test can switch on, to show that the simulator finds them. Compiled with the feature `planted`
//! alone, and asleep even then; no product has it.
//!
//! Each is a mistake that somebody could make in good faith: it works in every test without faults.

use std::cell::Cell;

/// Which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Entries are reported as written before they are synced.
    AckBeforeSync,
    /// A vote is given before it is on disk.
    VoteBeforeSync,
    /// A read trusts this node's own state, without asking whether it still is the newest.
    StaleRead,
    /// A command whose outcome is unknown is sent again.
    SendTwice,
    /// A new leader counts the time of leases from before it led.
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

/// Switches one on for this thread, or all off.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Whether this one is on.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
