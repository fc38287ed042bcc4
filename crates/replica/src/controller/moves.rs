//! Partition reassignment: on request, when a node is drained of replicas, and when the cluster has grown.
//!
//! A reassignment is part of the partition record: the new replicas are added first. When the whole target is in
//! sync, one write removes the old replicas and, if needed, changes the leader. The partition serves throughout. A
//! reassignment in progress continues under any controller.

use moim_base::BrokerId;

use super::placement::PlacementNodes;
use super::plan::Budget;
use super::{Controller, Order, Topic};
use crate::transition::{Change, Draft};
use crate::types::PartitionId;

/// Why a reassignment cannot begin or be cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MoveError {
    /// The partition does not exist.
    #[error("the partition does not exist")]
    UnknownPartition,
    /// The target is empty, contains a duplicate, or an unknown node.
    #[error("the replica list is empty, has duplicates or names unknown nodes")]
    InvalidReplicas,
    /// No reassignment is in progress.
    #[error("no reassignment is in progress")]
    NoneInProgress,
    /// No in-sync replica would stay.
    #[error("no replica that would stay is in sync")]
    NoInSyncReplicaStays,
    /// A change is in flight; a retry may succeed at once.
    #[error("the partition is being changed")]
    Busy,
}

impl Controller {
    /// The change that starts a reassignment or (`None`) cancels it. It counts as in flight.
    pub fn reassign(
        &mut self,
        id: PartitionId,
        target: Option<&[BrokerId]>,
    ) -> Result<Option<Change>, MoveError> {
        let (topic, view) = self.view(id).ok_or(MoveError::UnknownPartition)?;
        if view.busy {
            return Err(MoveError::Busy);
        }
        let mut draft = Draft::new(&view.record);
        match target {
            Some(target) => {
                let distinct = target.iter().enumerate().all(|(at, node)| !target[..at].contains(node));
                let known = target.iter().all(|node| self.nodes.contains_key(node));
                if target.is_empty() || !distinct || !known {
                    return Err(MoveError::InvalidReplicas);
                }
                if !draft.begin_move(target) {
                    return Err(MoveError::NoInSyncReplicaStays);
                }
            }
            None if !draft.state().is_moving() => return Err(MoveError::NoneInProgress),
            None => {
                if !draft.cancel_move() {
                    return Err(MoveError::NoInSyncReplicaStays);
                }
            }
        }
        let fenced = topic.fenced;
        let mut change = draft.finish(id);
        if let Some(change) = &mut change {
            change.fence = change.fence.filter(|_| fenced);
        }
        if change.is_some()
            && let Some(view) = self.partitions.get_mut(&id)
        {
            view.busy = true;
        }
        Ok(change)
    }

    /// Starts a reassignment on the controller's own initiative: away from a node that is removed, or onto more
    /// nodes. Returns true if one is wanted but the budget is spent.
    pub(super) fn maybe_move(
        &self,
        topic: &Topic,
        draft: &mut Draft,
        placement_nodes: &mut PlacementNodes,
        budget: &mut Budget,
    ) -> bool {
        let state = draft.state();
        if state.is_moving() || state.leader.is_none() {
            return false;
        }
        let removes = |node: &BrokerId| self.order(*node) == Order::Remove;
        let leaves = state.replicas.iter().any(removes);
        let factor = match topic.factor {
            None => state.replicas.len().max(self.wanted_factor()),
            Some(_) => state.replicas.len(),
        };
        let factor = factor.max(state.wanted.map_or(0, |wanted| wanted as usize));
        if !leaves && factor == state.replicas.len() {
            return false;
        }
        let keep: Vec<BrokerId> = state.replicas.iter().copied().filter(|node| !removes(node)).collect();
        let reachable = placement_nodes.free(&keep) + keep.len();
        if reachable < factor {
            // Every usable node already has a replica. A removed node's replica is dropped without replacement if
            // there are too few nodes for good; an offline node is waited for.
            let serving = self.nodes.values().filter(|node| node.node.order == Order::Serve).count();
            let in_vain = if leaves { reachable == 0 } else { reachable <= state.replicas.len() };
            if in_vain || (leaves && serving >= factor) {
                return false;
            }
        }
        if budget.moves == 0 {
            return true;
        }
        let target = placement_nodes.place(&keep, factor.min(reachable));
        budget.moves -= 1;
        // A partition that lost a replica for lack of nodes regains it when nodes are available, regardless of the
        // topic's setting.
        draft.begin_short_move(&target, factor);
        false
    }
}
