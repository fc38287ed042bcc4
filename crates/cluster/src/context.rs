//! The context of every service of the library: store, clock, task scope, metrics, event bus and node id.

use std::sync::Arc;

use moim_base::Clock;
use moim_base::task::Scope;

use crate::clock::BootClock;
use crate::events::EventBus;
use crate::metrics::ClusterMetrics;
use crate::repository::StateRepository;

/// Shared context of a node's services. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// Id of this node.
    pub node_id: Arc<str>,
    /// The state repository.
    pub repository: Arc<dyn StateRepository>,
    /// Clock for deadlines.
    pub clock: Arc<dyn Clock>,
    /// Scope that runs and cancels the tasks.
    pub scope: Scope,
    /// Event bus.
    pub events: EventBus,
    /// Metrics.
    pub metrics: Arc<ClusterMetrics>,
}

impl Context {
    /// A context with the machine's clock and separate metrics.
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

    /// Replaces the clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }
}
