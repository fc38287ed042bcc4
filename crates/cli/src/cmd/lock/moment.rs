//! Time that also passes while the machine sleeps (CLOCK_BOOTTIME). Leases end on servers that do not sleep
//! with us.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment, in nanoseconds since the machine was started. The same for every process on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(pub(super) u64);

/// A wait looks at the clock this often: timers do not run while the machine sleeps.
const STEP: Duration = Duration::from_millis(250);

impl Moment {
    pub(super) fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        let nanos = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        Self(u64::try_from(nanos).unwrap_or(0))
    }

    pub(super) fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long it is until then.
    pub(super) fn left(self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(Self::now().0))
    }

    pub(super) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Returns then. Cancel-safe.
    pub(super) async fn reached(self) {
        while !self.is_over() {
            tokio::time::sleep(self.left().min(STEP)).await;
        }
    }
}
