//! The first records of new partitions, by the controller's rules, for the node that creates a topic.
//!
//! The node that receives the request creates the topic; the controller only repairs what a crash left incomplete.
//! Both place replicas with [`super::placement`] and initialize records identically, so that it does not matter which
//! of them did it.

use std::collections::BTreeMap;

use moim_base::BrokerId;
use moim_state::nodes::{LiveMember, NodeOrder, NodeRecord};

use super::min_isr_for;
use super::placement::{Load, PlacementNode, PlacementNodes};
use crate::restart::Member;
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{Durability, PartitionId};

/// Places the replicas of new partitions.
#[derive(Debug, Default)]
pub struct Maker {
    placement_nodes: PlacementNodes,
    /// Offline nodes of the cluster: they get replicas only if the running nodes are too few.
    offline: PlacementNodes,
    members: BTreeMap<BrokerId, Member>,
}

impl Maker {
    /// For a cluster of these nodes, of which `members` are running. Nodes with an order get no new replicas; offline
    /// nodes get only the replicas that exceed the number of running nodes.
    pub fn new(nodes: &[NodeRecord], members: &[LiveMember], orders: &BTreeMap<i32, NodeOrder>) -> Self {
        let members: BTreeMap<BrokerId, Member> =
            members.iter().map(|live| (BrokerId(live.record.node_id), Member::from_live(live))).collect();
        let usable = |runs: bool| {
            let (members, orders) = (&members, &orders);
            move |node: &&NodeRecord| {
                members.contains_key(&BrokerId(node.node_id)) == runs && !orders.contains_key(&node.node_id)
            }
        };
        let node_entry = |node: &NodeRecord| PlacementNode {
            node: BrokerId(node.node_id),
            zone: node.zone.clone(),
            load: Load::default(),
        };
        let placement_nodes = nodes.iter().filter(usable(true)).map(node_entry).collect();
        let offline = nodes.iter().filter(usable(false)).map(node_entry).collect();
        Self {
            placement_nodes: PlacementNodes::new(placement_nodes, 0),
            offline: PlacementNodes::new(offline, 0),
            members,
        }
    }

    /// Counts the replicas of an existing partition, so that new ones are placed elsewhere.
    pub fn count(&mut self, record: &PartitionState) {
        self.placement_nodes.count(record);
        self.offline.count(record);
    }

    /// The number of running nodes that may get replicas.
    pub fn nodes(&self) -> usize {
        self.placement_nodes.len()
    }

    /// The number of nodes that may get replicas, including offline nodes.
    pub fn registered(&self) -> usize {
        self.placement_nodes.len() + self.offline.len()
    }

    /// The replication factor of a topic without an explicit one.
    pub fn default_factor(&self) -> usize {
        super::ControllerTuning::default().default_factor.min(self.nodes()).max(1)
    }

    /// Replicas for the next partition, the preferred leader first; fewer than `factor` if there are not enough
    /// nodes. Offline nodes come last, and only if the running nodes are too few.
    pub fn place(&mut self, factor: usize) -> Vec<BrokerId> {
        let mut placed = self.placement_nodes.place(&[], factor);
        if placed.len() < factor && !self.offline.is_empty() {
            placed.extend(self.offline.place(&[], factor - placed.len()));
        }
        placed
    }

    /// Creates a partition: the running nodes of `replicas` are in sync, and the first of them leads. `None` if no
    /// node is running. `min_isr` is the setting, if there is one. The change compares that the partition has no
    /// record and that every in-sync node is still in the same run; the caller adds its own comparison of the topic
    /// record.
    pub fn create(
        &self,
        partition: PartitionId,
        replicas: Vec<BrokerId>,
        min_isr: Option<u32>,
        durability: Durability,
    ) -> Option<Change> {
        let alive: Vec<_> =
            replicas.iter().filter_map(|node| self.members.get(node)).map(Member::in_sync).collect();
        if alive.is_empty() {
            return None;
        }
        let mut state = PartitionState::new(alive, min_isr_for(min_isr, replicas.len()), durability);
        state.replicas = replicas;
        Some(Change::create(partition, state, None))
    }
}

#[cfg(test)]
mod tests {
    use moim_state::nodes::MemberRecord;

    use super::*;

    fn maker(orders: &[(i32, NodeOrder)]) -> Maker {
        let node = |node_id| NodeRecord { node_id, voter: node_id as u64, ..NodeRecord::default() };
        let live = |node_id: i32| LiveMember {
            record: MemberRecord { node_id, voter: 10 + node_id as u64, ..MemberRecord::default() },
            broker_epoch: 100 + i64::from(node_id),
        };
        let nodes: Vec<_> = (1..=4).map(node).collect();
        Maker::new(&nodes, &[live(1), live(2), live(3)], &orders.iter().copied().collect())
    }

    #[test]
    fn new_partitions_are_placed_on_running_serving_nodes() {
        let mut maker = maker(&[]);
        assert_eq!((maker.nodes(), maker.default_factor()), (3, 3));
        for _ in 0..6 {
            let placed = maker.place(2);
            assert!(placed.len() == 2 && !placed.contains(&BrokerId(4)), "{placed:?}");
        }
        let placed = maker.place(4);
        assert_eq!((placed.len(), placed[3]), (4, BrokerId(4)), "who does not run comes last");
        assert_eq!((maker.registered(), maker.place(9).len()), (4, 4));
        let mut drained = self::maker(&[(2, NodeOrder::Drain)]);
        assert_eq!(drained.default_factor(), 2);
        assert!(!drained.place(3).contains(&BrokerId(2)));
    }

    #[test]
    fn existing_replicas_count_for_placement() {
        let mut maker = maker(&[]);
        for _ in 0..3 {
            let there =
                PartitionState::new(vec![(1, 1, 1).into(), (2, 1, 1).into()], 1, Durability::default());
            maker.count(&there);
        }
        assert_eq!(maker.place(1), [BrokerId(3)]);
    }

    #[test]
    fn new_record_compares_the_runs_of_its_isr() {
        let maker = maker(&[]);
        let id = PartitionId::default();
        let replicas = vec![BrokerId(4), BrokerId(2), BrokerId(1)];
        let change = maker.create(id, replicas.clone(), None, Durability::Fsync).unwrap();
        let state = change.next.unwrap();
        assert_eq!(state.replicas, replicas);
        assert_eq!(state.leader, Some(BrokerId(2)), "who does not run does not lead");
        assert_eq!(state.isr, [(2, 102, 12).into(), (1, 101, 11).into()]);
        assert_eq!(state.min_isr, 2);
        assert_eq!(change.members.len(), 2);
        assert_eq!(maker.create(id, vec![BrokerId(4)], None, Durability::Fsync), None);
    }
}
