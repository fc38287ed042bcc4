//! A membership domain of a node: the cluster's store, and the Raft group of each application that has one.
//!
//! A domain has a membership, the applications that belong to it, and the leaderships that this node
//! campaigns for. A loss in one domain does not affect the others; each domain rejoins by itself.

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

/// One membership domain.
pub(super) struct Domain {
    /// Context with the store of this domain.
    pub(super) context: Context,
    /// The applications of this domain.
    apps: Vec<String>,
    /// The Raft group, if the domain is one.
    #[cfg(any(test, feature = "raft"))]
    pub(super) group: Option<AppGroup>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    membership: Option<Arc<Membership>>,
    workers: Vec<(String, AssignmentWorker)>,
    leaders: Vec<JoinHandle<()>>,
    membership_task: Option<JoinHandle<()>>,
}

impl Domain {
    /// The domain of the cluster's store.
    pub(super) fn store(context: &Context, apps: Vec<String>) -> Self {
        Self {
            context: context.clone(),
            apps,
            #[cfg(any(test, feature = "raft"))]
            group: None,
            state: Mutex::default(),
        }
    }

    /// The domain of an application's Raft group.
    #[cfg(any(test, feature = "raft"))]
    pub(super) fn group(context: &Context, app: &str, group: AppGroup) -> Self {
        let mut context = context.clone();
        context.repository = group.repository();
        Self { context, apps: vec![app.to_owned()], group: Some(group), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins, campaigns, and keeps the membership.
    pub(super) async fn start(self: &Arc<Self>, setup: &Arc<Setup>) -> Result<(), JoinError> {
        let membership = Membership::join(&self.context, info(&setup.config), &setup.beats).await?;
        for name in &self.apps {
            self.lead(setup, name);
        }
        self.become_member(setup, membership).await;
        let (domain, setup, stop) =
            (Arc::clone(self), Arc::clone(setup), self.context.scope.shutdown().clone());
        let membership_task = self.context.scope.spawn("cluster", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = domain.keep_member(&setup) => {}
            }
        });
        self.state().membership_task = Some(membership_task);
        Ok(())
    }

    /// Leader election of an application: the leader of its group, or an election in the store.
    fn election(&self, setup: &Setup, name: &str) -> Arc<dyn LeaderElection> {
        #[cfg(any(test, feature = "raft"))]
        if let Some(group) = &self.group {
            return Arc::new(group.election(&self.context));
        }
        let options = ElectionOptions { ttl: setup.config.lease.duration.0, ..ElectionOptions::default() };
        Arc::new(CasElection::new(&self.context, name, options))
    }

    /// Campaigns for the assignment leadership of an application.
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

    /// True if the application gets lifecycle callbacks of this domain.
    #[cfg(any(test, feature = "raft"))]
    fn has_lifecycle_callbacks(&self) -> bool {
        self.group.is_none()
    }

    /// True if the application gets lifecycle callbacks of this domain: the only one.
    #[cfg(not(any(test, feature = "raft")))]
    fn has_lifecycle_callbacks(&self) -> bool {
        true
    }

    /// Starts the services under the membership.
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
        if let (true, Some(lifecycle)) = (self.has_lifecycle_callbacks(), &setup.lifecycle) {
            lifecycle.on_joined().await;
        }
    }

    /// Joins again after every loss of the membership.
    async fn keep_member(&self, setup: &Setup) {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            let membership = self.state().membership.clone();
            if let Some(membership) = membership {
                let end = membership.lost().await;
                tracing::warn!(%end, node = %self.context.node_id, "membership lost; joining again");
                let (workers, lost) = {
                    let mut state = self.state();
                    (std::mem::take(&mut state.workers), state.membership.take())
                };
                drop((workers, lost, membership));
                if let (true, Some(lifecycle)) = (self.has_lifecycle_callbacks(), &setup.lifecycle) {
                    lifecycle.on_lost();
                }
            }
            match Membership::join(&self.context, info(&setup.config), &setup.beats).await {
                Ok(membership) => {
                    backoff.reset();
                    self.become_member(setup, membership).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "membership join failed; retrying");
                    backoff.pause().await;
                }
            }
        }
    }

    /// True while the node is a member in this domain.
    pub(super) fn is_member(&self) -> bool {
        self.state().membership.as_ref().is_some_and(|membership| membership.is_valid())
    }

    /// The owned partitions of an application of this domain.
    pub(super) fn owned(&self, app: &str) -> Option<std::collections::BTreeMap<String, i64>> {
        let state = self.state();
        state.workers.iter().find(|(name, _)| name == app).map(|(_, worker)| worker.owned())
    }

    /// Number of owned partitions in this domain.
    pub(super) fn partitions(&self) -> usize {
        self.state().workers.iter().map(|(_, worker)| worker.owned().len()).sum()
    }

    /// Hands over the owned partitions, resigns the leaderships, and leaves. If the store does not respond
    /// the node stops without leaving: its lease expires.
    pub(super) async fn stop(&self, setup: &Setup) -> Result<(), RepositoryError> {
        let membership_task = self.state().membership_task.take();
        if let Some(membership_task) = membership_task {
            membership_task.abort();
            // Ended or aborted: either way it does not join again.
            let _ = membership_task.await;
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
            // Dropping the task resigns its leadership.
            let _ = leader.await;
        }
        let patience = setup.beats.timeout * 2;
        let left = match membership {
            Some(membership) => tokio::time::timeout(patience, membership.leave()).await,
            None => Ok(Ok(())),
        };
        #[cfg(any(test, feature = "raft"))]
        if let Some(group) = &self.group {
            // Stop also if no member takes over the leadership.
            let _ = tokio::time::timeout(patience, group.step_down()).await;
            group.stop().await;
        }
        left.unwrap_or_else(|_| {
            Err(RepositoryError::Unavailable("leave timed out; the lease will expire".to_owned()))
        })
    }
}
