//! Bugs that the search must find: each one is a line that somebody could get wrong. Outside of tests there are none.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A lease is believed for longer than it lives.
    LongLease,
    /// A lease's time counts from when the answer came.
    FromAnswer,
    /// The leader takes partitions from owners without comparing that they are gone.
    TakeFromLiving,
    /// A partition is let go without its hand-off.
    NoHandoff,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Whether a bug is planted on this thread.
#[cfg(test)]
pub(crate) fn is(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Whether a bug is planted: never.
#[cfg(not(test))]
pub(crate) const fn is(_bug: Bug) -> bool {
    false
}

/// Plants a bug on this thread, or takes it out.
#[cfg(test)]
pub(crate) fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}
