//! The in-memory repository: for tests, the simulator, and nodes without durable state.

use std::sync::Arc;
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::Scope;

use crate::engine::state::{Record, State};
use crate::engine::{Engine, Log};
use crate::repository::RepositoryError;

/// Interval of the lease expiry check.
const TICK: Duration = Duration::from_millis(10);

/// A repository without durable storage.
pub type MemoryRepository = Engine<NoLog>;

/// A log without storage: a record is durable as soon as it is appended.
pub struct NoLog;

impl Log for NoLog {
    fn append(&self, _record: &Record) -> Result<(), RepositoryError> {
        Ok(())
    }

    fn on_applied(&self, _state: &State) {}

    fn end(&self) -> i64 {
        0
    }

    fn durable_end(&self) -> i64 {
        0
    }

    fn maybe_trim(&self) {}
}

impl MemoryRepository {
    /// An empty repository. Call [`tick`](Engine::tick) a few times per second if leases are used.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self::with(State::default(), NoLog, clock)
    }

    /// An empty repository with automatic lease expiry, in a task of this scope.
    pub fn started(clock: Arc<dyn Clock>, scope: &Scope) -> Arc<Self> {
        let repository = Arc::new(Self::new(clock));
        let (ticked, stop) = (Arc::clone(&repository), scope.shutdown().clone());
        scope.spawn("memory repository", async move {
            while !stop.is_stopped() {
                tokio::time::sleep(TICK).await;
                // A tick cannot fail without a log.
                let _ = ticked.tick();
            }
        });
        repository
    }
}

#[cfg(test)]
mod tests {
    use moim_base::ManualClock;

    use super::*;
    use crate::testing::Fixture;

    fn fixture() -> Fixture {
        let clock = Arc::new(ManualClock::at(1_000));
        let repository = Arc::new(MemoryRepository::new(clock.clone()));
        let ticked = repository.clone();
        Fixture {
            repository,
            advance_ms: Box::new(move |ms| {
                clock.advance_ms(ms);
                ticked.tick().unwrap();
            }),
            restart: None,
        }
    }

    crate::conformance_tests!(fixture);
}
