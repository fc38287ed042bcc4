//! The serving right of a shard: the lease under which a primary replies from memory
//! (docs/decisions/0012-serving-right.md).
//!
//! The service renews the right by reading this node's fence key; a new primary waits until the right of its
//! predecessor has expired, unless there is none. Invariant: at most one node holds the serving right of a shard at a
//! time.

use std::sync::atomic::Ordering;

use moim_base::Clock;

use super::{NO_EPOCH, Shard};

impl Shard {
    /// True if this node may reply for the shard: it holds the serving right, and no earlier primary still holds one.
    pub fn holds_serving_right(&self, clock: &dyn Clock) -> bool {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ServePastRight) {
            return true;
        }
        let until = self.serving_right_until_ms.load(Ordering::Acquire);
        if until == u64::MAX {
            return true;
        }
        let now = clock.monotonic_ms();
        let epoch = self.leading_epoch.load(Ordering::Acquire);
        let is_uncontested = epoch != NO_EPOCH && epoch == self.uncontested_epoch.load(Ordering::Acquire);
        now < until && (is_uncontested || now >= self.serving_right_from_ms.load(Ordering::Acquire))
    }

    /// Extends the serving right to `until_ms` of the monotonic clock.
    pub fn set_serving_right_until(&self, until_ms: u64) {
        self.serving_right_until_ms.store(until_ms, Ordering::Release);
    }

    /// This node became leader in `epoch`. The previous primary may hold the serving right until `from_ms`.
    pub fn set_serving_right_from(&self, epoch: i32, from_ms: u64) {
        self.serving_right_from_ms.store(from_ms, Ordering::Release);
        self.leading_epoch.store(i64::from(epoch), Ordering::Release);
    }

    /// The record of the shard shows this leader epoch. `is_uncontested`: no other node can hold a serving right in it.
    /// The first record of an epoch decides: a later one may show the other replicas removed although they still hold
    /// the right.
    pub fn on_epoch(&self, epoch: i32, is_uncontested: bool) {
        let epoch = i64::from(epoch);
        if self.recorded_epoch.swap(epoch, Ordering::AcqRel) != epoch {
            self.uncontested_epoch.store(if is_uncontested { epoch } else { NO_EPOCH }, Ordering::Release);
        }
    }
}
