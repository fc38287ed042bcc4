//! The repository that keeps nothing: for tests, the simulator, and nodes that may forget.

use std::sync::Arc;
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::Scope;

use crate::engine::state::{Record, State};
use crate::engine::{Engine, Log};
use crate::repository::RepositoryError;

/// How often leases are looked at.
const TICK: Duration = Duration::from_millis(10);

/// A repository in memory alone.
pub type MemoryRepository = Engine<NoLog>;

/// A log that forgets: what it takes is at once as durable as it will ever be.
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
    /// An empty repository. Call [`tick`](Engine::tick) a few times a second if leases are used.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self::with(State::default(), NoLog, clock)
    }

    /// An empty repository whose leases end by themselves, in a task of this scope.
    pub fn started(clock: Arc<dyn Clock>, scope: &Scope) -> Arc<Self> {
        let repository = Arc::new(Self::new(clock));
        let (ticked, stop) = (Arc::clone(&repository), scope.shutdown().clone());
        scope.spawn("memory repository", async move {
            while !stop.is_stopped() {
                tokio::time::sleep(TICK).await;
                // Nothing can fail without a log.
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
