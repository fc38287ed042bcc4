//! Planted bugs that a test can activate, to show that the simulator finds them. Compiled with the feature `planted`
//! only, and inactive by default; no product has it.

use std::cell::Cell;

/// A planted bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Replies are sent before the changes that they show are committed.
    ReplyBeforeCommit,
    /// A primary replies although its serving right has expired.
    ServePastRight,
    /// The source of a slot migration serves its slots again although the slot map still allows the flip to the target.
    ThawWithoutAbort,
    /// Shard time stands still while it is ahead of the wall clock.
    FrozenTime,
    /// Replay applies effects at the wall clock of the replica, not at the time that they carry.
    ReplayAtLocalClock,
    /// Shard time follows any jump of the wall clock, whatever the other nodes' clocks show.
    UnconfirmedJump,
}

impl Bug {
    /// All planted bugs.
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

/// Activates one bug for this thread; `None` deactivates all.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this bug is active on this thread.
pub fn is_on(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}
