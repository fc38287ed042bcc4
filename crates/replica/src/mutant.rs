//! Bugs planted on purpose, to see that the checks catch them. In a product build none can be switched on, and the
//! questions compile to `false`.

/// A known way to lose data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// A follower cuts its log at its high watermark instead of asking where epochs end.
    TruncateByHighWatermark,
    /// The leader commits what it has itself, without waiting for the in-sync set.
    AckBeforeIsr,
    /// A replica that may have lost written data keeps its place in the in-sync set.
    TrustUncleanReplica,
    /// Fetches and answers of another leader epoch are taken.
    IgnoreEpoch,
    /// A proposed addition is forgotten when its outcome is unknown.
    ForgetPendingIsr,
    /// The high watermark moves with fewer in-sync replicas than the minimum, while the eligible set is kept.
    CommitUnderMinIsr,
    /// A restarted leader goes on appending under its old leader epoch.
    ReuseLeaderEpoch,
    /// A leader waits for a follower whose disk hangs. Loses nothing, and stalls everything.
    KeepStalledFollower,
    /// A leader takes the repeat of a record for a new one.
    ForgetProducers,
}

/// Which bugs are planted. At most one: the checks are to catch each on its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutants {
    #[cfg(any(test, feature = "testing"))]
    planted: Option<Mutant>,
}

impl Mutants {
    /// With one bug.
    #[cfg(any(test, feature = "testing"))]
    pub fn plant(mutant: Mutant) -> Self {
        Self { planted: Some(mutant) }
    }

    /// Whether this bug is planted.
    #[cfg(any(test, feature = "testing"))]
    pub fn has(self, mutant: Mutant) -> bool {
        self.planted == Some(mutant)
    }

    /// Whether this bug is planted: never.
    #[cfg(not(any(test, feature = "testing")))]
    pub fn has(self, _mutant: Mutant) -> bool {
        false
    }
}
