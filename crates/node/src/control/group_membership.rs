//! Membership of the coordination group: its leader reconciles the group's voters and learners with the cluster's
//! nodes.
//!
//! The node records define the nodes ([`super::records`]) and [`super::voters`] plans the voters; this task carries out
//! one step at a time. A step states the desired membership, so it is idempotent: after a leader failure the next
//! leader plans again from the current state. When the membership is as planned, this task also removes drained nodes,
//! deletes records of voters that left the group, and raises the feature level.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_coord::Coordinator;
use moim_raft::{Group, GroupError, GroupMetrics, Member, VoterId};
use moim_state::StateRepository;

use super::records::{self, SUPPORTED_LEVEL};
use super::view::{Partitions, View};
use super::voters::{self, Change, Situation};

/// Reconciliation interval.
const TICK: Duration = Duration::from_millis(250);
/// Maximum log lag, in entries, of a learner that may become a voter.
const MAX_LAG: u64 = 1_000;

/// Reconciles the membership while this node leads the group.
pub(crate) async fn run(coordinator: Coordinator, repository: Arc<dyn StateRepository>, shutdown: Shutdown) {
    loop {
        tokio::select! {
            () = shutdown.stopped() => return,
            () = rest(TICK) => {}
        }
        let group = coordinator.group();
        if !group.is_leader() {
            continue;
        }
        let view = View::of(&coordinator);
        if let Err(error) = step(&coordinator, repository.as_ref(), &view).await {
            // Another change may be in progress, or leadership moved: the next tick plans again.
            tracing::debug!(%error, "coordination group membership change failed; retrying");
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Record(#[from] records::RecordError),
}

async fn step(
    coordinator: &Coordinator,
    repository: &dyn StateRepository,
    view: &View,
) -> Result<(), StepError> {
    let group = coordinator.group();
    if view.next_voter.is_none() {
        return Ok(());
    }
    let metrics = group.metrics();
    if let Some(member) = changed_address(&metrics, view) {
        tracing::info!(voter = %member.id, address = member.address, "coordination group member address changed");
        return Ok(group.set_address(&member).await?);
    }
    match voters::plan(&situation(&metrics, view)) {
        Some(change) => Ok(apply(group, view, change).await?),
        None => {
            remove_drained(coordinator, repository, view).await?;
            clean_up(repository, &metrics, view).await
        }
    }
}

/// Removes the nodes whose members an etcd client removed, once they hold no replica.
async fn remove_drained(
    coordinator: &Coordinator,
    repository: &dyn StateRepository,
    view: &View,
) -> Result<(), StepError> {
    let leaving = view.nodes.iter().filter(|node| view.leaving.contains(&node.voter));
    let nodes: Vec<i32> = leaving.map(|node| node.node_id).collect();
    if nodes.is_empty() {
        return Ok(());
    }
    let partitions = Partitions::of(coordinator);
    for node in nodes.into_iter().filter(|node| partitions.load(*node).replicas == 0) {
        tracing::info!(node, "removed member drained; removing its node");
        records::remove(repository, node).await?;
    }
    Ok(())
}

async fn apply(group: &Group, view: &View, change: Change) -> Result<(), GroupError> {
    tracing::info!(?change, "coordination group membership change");
    match change {
        Change::Learn(voter) => {
            let Some(node) = view.nodes.iter().find(|node| node.voter == voter) else { return Ok(()) };
            group.add_learner(&Member { id: VoterId(voter), address: node.peer.clone() }).await
        }
        Change::Voters(voters) => group.set_voters(&voters.into_iter().map(VoterId).collect()).await,
        Change::Forget(voter) => group.remove(VoterId(voter)).await,
        Change::HandOver(voter) => group.transfer_leadership(VoterId(voter)).await,
    }
}

/// Deletes records of voters that left the group and raises the feature level.
async fn clean_up(
    repository: &dyn StateRepository,
    metrics: &GroupMetrics,
    view: &View,
) -> Result<(), StepError> {
    let is_member = |voter: u64| metrics.voters.iter().chain(&metrics.learners).any(|m| m.id.0 == voter);
    for voter in view.gone.iter().copied().filter(|voter| !is_member(*voter)) {
        records::delete_gone_voter(repository, voter).await?;
    }
    let supported = view.nodes.iter().map(|node| node.feature_level).min().unwrap_or(0).min(SUPPORTED_LEVEL);
    if let Some(level) = view.feature_level.filter(|level| *level < supported) {
        tracing::info!(from = level, to = supported, "feature level raise: every node supports it");
        records::raise_level(repository, level, supported).await?;
    }
    Ok(())
}

/// A member whose address differs from its node record.
fn changed_address(metrics: &GroupMetrics, view: &View) -> Option<Member> {
    metrics.voters.iter().chain(&metrics.learners).find_map(|member| {
        let node = view.nodes.iter().find(|node| node.voter == member.id.0)?;
        let differs = !node.peer.is_empty() && node.peer != member.address;
        differs.then(|| Member { id: member.id, address: node.peer.clone() })
    })
}

fn situation(metrics: &GroupMetrics, view: &View) -> Situation {
    let last = metrics.last_index.unwrap_or(0);
    let matched: BTreeMap<u64, Option<u64>> = metrics.matched.iter().map(|(id, at)| (id.0, *at)).collect();
    let running: BTreeSet<u64> =
        view.nodes.iter().filter(|node| view.is_running(node)).map(|node| node.voter).collect();
    let ready = |voter: u64| {
        let at = matched.get(&voter).copied().flatten();
        at.is_some_and(|at| last.saturating_sub(at) <= MAX_LAG) && running.contains(&voter)
    };
    Situation {
        voters: metrics.voters.iter().map(|member| member.id.0).collect(),
        unfinished: metrics.unfinished.as_ref().map(|goal| goal.iter().map(|voter| voter.0).collect()),
        learners: metrics.learners.iter().map(|member| (member.id.0, ready(member.id.0))).collect(),
        nodes: view.nodes.iter().map(|node| node.voter).filter(|voter| *voter != 0).collect(),
        gone: view.gone.iter().copied().collect(),
        leaving: view.leaving.iter().copied().collect(),
        count: view.nodes.iter().filter(|node| !view.leaving.contains(&node.voter)).count(),
        leader: metrics.voter.0,
    }
}
