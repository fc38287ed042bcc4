//! Planted bugs, to show that the checkers catch them. In a product build none can be enabled, and the tests for them
//! compile to `false`.

/// A known way to lose data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// A follower truncates at its high watermark instead of at the epoch boundary.
    TruncateByHighWatermark,
    /// The leader commits what it has itself, without waiting for the in-sync set.
    AckBeforeIsr,
    /// A replica that may have lost written data keeps its place in the in-sync set.
    TrustUncleanReplica,
    /// Fetches and answers of another leader epoch are accepted.
    IgnoreEpoch,
    /// A proposed addition is forgotten when its outcome is unknown.
    ForgetPendingIsr,
    /// The high watermark advances with fewer in-sync replicas than the minimum, while the eligible set is kept.
    CommitUnderMinIsr,
    /// A restarted leader continues to append under its old leader epoch.
    ReuseLeaderEpoch,
    /// A leader waits for a follower whose disk hangs. Loses nothing, and stalls every commit.
    KeepStalledFollower,
    /// A leader treats a repeated record of an idempotent producer as a new one.
    ForgetProducers,
}

/// The planted bug. At most one: the checkers must catch each alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutants {
    #[cfg(any(test, feature = "testing"))]
    planted: Option<Mutant>,
}

impl Mutants {
    /// Plants one bug.
    #[cfg(any(test, feature = "testing"))]
    pub fn plant(mutant: Mutant) -> Self {
        Self { planted: Some(mutant) }
    }

    /// True if this bug is planted.
    #[cfg(any(test, feature = "testing"))]
    pub fn has(self, mutant: Mutant) -> bool {
        self.planted == Some(mutant)
    }

    /// True if this bug is planted: never.
    #[cfg(not(any(test, feature = "testing")))]
    pub fn has(self, _mutant: Mutant) -> bool {
        false
    }
}
