//! A place where a node is a member: the cluster's store, and the Raft group of each application that has one of its own.
//!
//! At a place stand a membership, the applications that live there, and the leaderships this node campaigns for. What is lost
//! at one place is lost there and nowhere else; each place brings its node back by itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;

use super::{Setup, info};
use crate::assignment::{AssignmentLeader, AssignmentWorker, HandoffStore, LeaderOptions};
use crate::backoff::Backoff;
use crate::context::Context;
#[cfg(any(test, feature = "raft"))]
use crate::groups::AppGroup;
use crate::leadership::{CasElection, ElectionOptions, LeaderElection};
use crate::membership::{JoinError, Membership};
use crate::repository::RepositoryError;

/// One place.
pub(super) struct Place {
    /// With the store of this place.
    pub(super) context: Context,
    /// The applications that live here.
    apps: Vec<String>,
    /// The group, at a place that is one.
    #[cfg(any(test, feature = "raft"))]
    pub(super) group: Option<AppGroup>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    membership: Option<Arc<Membership>>,
    workers: Vec<(String, AssignmentWorker)>,
    leaders: Vec<JoinHandle<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Place {
    /// The cluster's own store.
    pub(super) fn store(context: &Context, apps: Vec<String>) -> Self {
        Self {
            context: context.clone(),
            apps,
            #[cfg(any(test, feature = "raft"))]
            group: None,
            state: Mutex::default(),
        }
    }

    /// The group of one application.
    #[cfg(any(test, feature = "raft"))]
    pub(super) fn group(context: &Context, app: &str, group: AppGroup) -> Self {
        let mut context = context.clone();
        context.repository = group.repository();
        Self { context, apps: vec![app.to_owned()], group: Some(group), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins, campaigns, and stays.
    pub(super) async fn start(self: &Arc<Self>, setup: &Arc<Setup>) -> Result<(), JoinError> {
        let membership = Membership::join(&self.context, info(&setup.config), &setup.beats).await?;
        for name in &self.apps {
            self.lead(setup, name);
        }
        self.become_member(setup, membership).await;
        let (place, setup, stop) =
            (Arc::clone(self), Arc::clone(setup), self.context.scope.shutdown().clone());
        let keeper = self.context.scope.spawn("cluster", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = place.keep(&setup) => {}
            }
        });
        self.state().keeper = Some(keeper);
        Ok(())
    }

    /// Who leads an application here: the leader of its group, or whoever the store says.
    fn election(&self, setup: &Setup, name: &str) -> Arc<dyn LeaderElection> {
        #[cfg(any(test, feature = "raft"))]
        if let Some(group) = &self.group {
            return Arc::new(group.election(&self.context));
        }
        let options = ElectionOptions { ttl: setup.config.lease.duration.0, ..ElectionOptions::default() };
        Arc::new(CasElection::new(&self.context, name, options))
    }

    /// Campaigns for leading an application's assignment.
    fn lead(&self, setup: &Setup, name: &str) {
        let (Some(app), Some(specs)) = (setup.apps.get(name), setup.specs.get(name)) else { return };
        let options = LeaderOptions {
            interval: setup.config.assignments.rebalance_interval.0,
            role: setup.config.apps.get(name).map(|app| app.role.clone()).unwrap_or_default(),
            ..LeaderOptions::default()
        };
        let leader = AssignmentLeader::new(&self.context, name, specs.subscribe(), options);
        let election = app.election.clone().unwrap_or_else(|| self.election(setup, name));
        let stop = self.context.scope.shutdown().clone();
        let task = self.context.scope.spawn("cluster assignment leader", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = leader.run(election) => {}
            }
        });
        self.state().leaders.push(task);
    }

    /// Whether the application hears of what happens to the node here.
    #[cfg(any(test, feature = "raft"))]
    fn is_home(&self) -> bool {
        self.group.is_none()
    }

    /// Whether the application hears of what happens to the node here: there is no other place.
    #[cfg(not(any(test, feature = "raft")))]
    fn is_home(&self) -> bool {
        true
    }

    /// Starts what stands under the membership.
    async fn become_member(&self, setup: &Setup, membership: Membership) {
        let workers = self.apps.iter().filter_map(|name| {
            let app = setup.apps.get(name)?;
            let handoffs = HandoffStore::new(Arc::clone(&self.context.repository), setup.handoffs.clone());
            let handler = Arc::clone(&app.handler);
            let worker =
                AssignmentWorker::start(&self.context, &membership, name.as_str(), handoffs, handler);
            Some((name.clone(), worker))
        });
        let workers: Vec<_> = workers.collect();
        {
            let mut state = self.state();
            state.workers = workers;
            state.membership = Some(Arc::new(membership));
        }
        if let (true, Some(lifecycle)) = (self.is_home(), &setup.lifecycle) {
            lifecycle.on_joined().await;
        }
    }

    /// Joins again whenever the membership was lost.
    async fn keep(&self, setup: &Setup) {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            let membership = self.state().membership.clone();
            if let Some(membership) = membership {
                let end = membership.lost().await;
                tracing::warn!(%end, node = %self.context.node_id, "the membership was lost");
                let (workers, gone) = {
                    let mut state = self.state();
                    (std::mem::take(&mut state.workers), state.membership.take())
                };
                drop((workers, gone, membership));
                if let (true, Some(lifecycle)) = (self.is_home(), &setup.lifecycle) {
                    lifecycle.on_lost();
                }
            }
            match Membership::join(&self.context, info(&setup.config), &setup.beats).await {
                Ok(membership) => {
                    backoff.reset();
                    self.become_member(setup, membership).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "not joined yet");
                    backoff.pause().await;
                }
            }
        }
    }

    /// Whether the node is a member here.
    pub(super) fn is_member(&self) -> bool {
        self.state().membership.as_ref().is_some_and(|membership| membership.is_valid())
    }

    /// The worker of an application that lives here.
    pub(super) fn owned(&self, app: &str) -> Option<std::collections::BTreeMap<String, i64>> {
        let state = self.state();
        state.workers.iter().find(|(name, _)| name == app).map(|(_, worker)| worker.owned())
    }

    /// Partitions that the node owns here.
    pub(super) fn partitions(&self) -> usize {
        self.state().workers.iter().map(|(_, worker)| worker.owned().len()).sum()
    }

    /// Hands over what the node owns here, gives up what it leads, and says goodbye. From a store that does not answer it goes
    /// without a word: the lease ends by itself.
    pub(super) async fn stop(&self, setup: &Setup) -> Result<(), RepositoryError> {
        let keeper = self.state().keeper.take();
        if let Some(keeper) = keeper {
            keeper.abort();
            // Ended or aborted: either way it does not join again.
            let _ = keeper.await;
        }
        let (workers, leaders, membership) = {
            let mut state = self.state();
            let membership = state.membership.take();
            (std::mem::take(&mut state.workers), std::mem::take(&mut state.leaders), membership)
        };
        for (_, worker) in workers {
            worker.stop().await;
        }
        for leader in leaders {
            leader.abort();
            // Its leadership is given back when it is dropped.
            let _ = leader.await;
        }
        let patience = setup.beats.timeout * 2;
        let left = match membership {
            Some(membership) => tokio::time::timeout(patience, membership.leave()).await,
            None => Ok(Ok(())),
        };
        #[cfg(any(test, feature = "raft"))]
        if let Some(group) = &self.group {
            // One that nobody takes the leadership from stops all the same.
            let _ = tokio::time::timeout(patience, group.step_down()).await;
            group.stop().await;
        }
        left.unwrap_or_else(|_| Err(RepositoryError::Unavailable("nobody heard the goodbye".to_owned())))
    }
}
