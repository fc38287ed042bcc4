//! Moving replicas: on request, when a node is to be emptied, and when the cluster has grown.
//!
//! A move is in the record: the new replicas are added first, and when all of the target is in sync the old ones go and,
//! if need be, the leader changes, in one write. The partition serves all the while. A move that is under way goes on
//! under any controller.

use moim_base::BrokerId;

use super::placement::Spots;
use super::plan::Budget;
use super::{Controller, Order, Topic};
use crate::transition::{Change, Draft};
use crate::types::PartitionId;

/// Why a move cannot begin or be given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MoveError {
    /// There is no such partition.
    #[error("the partition does not exist")]
    UnknownPartition,
    /// The target is empty, names a node twice, or one that does not exist.
    #[error("the replicas are not a set of known nodes")]
    InvalidReplicas,
    /// Nothing is being moved.
    #[error("no reassignment is in progress")]
    NoneInProgress,
    /// Somebody in sync would have to stay.
    #[error("no replica that would stay is in sync")]
    NobodyStays,
    /// A change is under way; the same request may succeed at once.
    #[error("the partition is being changed")]
    Busy,
}

impl Controller {
    /// The change that begins to move a partition, or (`None`) gives a move up. It counts as under way.
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
                    return Err(MoveError::NobodyStays);
                }
            }
            None if !draft.state().is_moving() => return Err(MoveError::NoneInProgress),
            None => {
                if !draft.cancel_move() {
                    return Err(MoveError::NobodyStays);
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

    /// Begins a move of the controller's own: away from a node that is to be emptied, or onto more nodes. Answers
    /// whether one is wanted and the budget is spent.
    pub(super) fn maybe_move(
        &self,
        topic: &Topic,
        draft: &mut Draft,
        spots: &mut Spots,
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
        let reachable = spots.free(&keep) + keep.len();
        if reachable < factor {
            // Every node that may take replicas has one already. Who is to go goes with a copy less if there are too few
            // nodes for good; a node that is away is waited for.
            let serving = self.nodes.values().filter(|node| node.node.order == Order::Serve).count();
            let in_vain = if leaves { reachable == 0 } else { reachable <= state.replicas.len() };
            if in_vain || (leaves && serving >= factor) {
                return false;
            }
        }
        if budget.moves == 0 {
            return true;
        }
        let target = spots.place(&keep, factor.min(reachable));
        budget.moves -= 1;
        // Who had to go without for lack of nodes gets it back when there are some, whatever the topic asked for.
        draft.begin_short_move(&target, factor);
        false
    }
}
