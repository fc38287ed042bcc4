//! What every service of the library needs: the store, the clock, a scope for tasks, metrics, the event bus, and who
//! we are.

use std::sync::Arc;

use moim_base::Clock;
use moim_base::task::Scope;

use crate::clock::BootClock;
use crate::events::EventBus;
use crate::metrics::ClusterMetrics;
use crate::repository::StateRepository;

/// The surroundings of a node's services. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// Who we are.
    pub node_id: Arc<str>,
    /// Where state is kept.
    pub repository: Arc<dyn StateRepository>,
    /// What deadlines are judged by.
    pub clock: Arc<dyn Clock>,
    /// Where tasks run, and what ends them.
    pub scope: Scope,
    /// What happened, for whoever wants to know.
    pub events: EventBus,
    /// How often and how long.
    pub metrics: Arc<ClusterMetrics>,
}

impl Context {
    /// A node's surroundings with the machine's clock and metrics of their own.
    pub fn new(node_id: impl Into<Arc<str>>, repository: Arc<dyn StateRepository>, scope: &Scope) -> Self {
        Self {
            node_id: node_id.into(),
            repository,
            clock: Arc::new(BootClock),
            scope: scope.clone(),
            events: EventBus::new(),
            metrics: Arc::default(),
        }
    }

    /// The same, by another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }
}
