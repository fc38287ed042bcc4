//! Fault injection for the schedule search: bugs that the search must find, each a plausible one-line
//! mistake. Disabled outside of tests.

/// An injected bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A lease counts as valid for longer than its TTL.
    LongLease,
    /// A lease deadline counts from the arrival of the reply instead of the sending of the request.
    FromReply,
    /// The leader takes partitions from owners without comparing that their member records are deleted.
    TakeFromLiveOwner,
    /// A partition is released without its hand-off.
    NoHandoff,
}

#[cfg(test)]
thread_local! {
    static INJECTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// True if a bug is injected on this thread.
#[cfg(test)]
pub(crate) fn is_injected(bug: Bug) -> bool {
    INJECTED.get() == Some(bug)
}

/// True if a bug is injected: never.
#[cfg(not(test))]
pub(crate) const fn is_injected(_bug: Bug) -> bool {
    false
}

/// Injects a bug on this thread, or removes it.
#[cfg(test)]
pub(crate) fn inject(bug: Option<Bug>) {
    INJECTED.set(bug);
}
