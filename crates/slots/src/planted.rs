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
    /// Shard time stands still while it is ahead of the wall clock.
    FrozenTime,
    /// Replay applies effects at the wall clock of the replica, not at the time that they carry.
    ReplayAtLocalClock,
    /// Shard time takes any jump of the wall clock, whatever the other nodes' clocks show.
    UnconfirmedJump,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::ReplyBeforeCommit,
        Self::ServePastRight,
        Self::ThawWithoutAbort,
        Self::FrozenTime,
        Self::ReplayAtLocalClock,
        Self::UnconfirmedJump,
    ];
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
