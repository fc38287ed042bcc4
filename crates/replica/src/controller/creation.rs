//! The first records of new partitions, by the controller's rules, for whoever makes a topic.
//!
//! A topic is made by the node that was asked to; the controller only heals what a crash left behind. Both place
//! replicas with [`super::placement`] and begin records alike, so that it does not matter who did it.

use std::collections::BTreeMap;

use moim_base::BrokerId;
use moim_cluster::nodes::{LiveMember, NodeOrder, NodeRecord};

use super::min_isr_for;
use super::placement::{Load, Spot, Spots};
use crate::restart::Member;
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{Durability, PartitionId};

/// Places new partitions.
#[derive(Debug, Default)]
pub struct Maker {
    spots: Spots,
    /// Nodes of the cluster that do not run now: they get what the others cannot take.
    offline: Spots,
    members: BTreeMap<BrokerId, Member>,
}

impl Maker {
    /// For a cluster of these nodes, of which these run. Nodes with an order get nothing new, and nodes that do not run only
    /// replicas that a topic asks for beyond the nodes that do.
    pub fn new(nodes: &[NodeRecord], members: &[LiveMember], orders: &BTreeMap<i32, NodeOrder>) -> Self {
        let members: BTreeMap<BrokerId, Member> =
            members.iter().map(|live| (BrokerId(live.record.node_id), Member::from_live(live))).collect();
        let usable = |runs: bool| {
            let (members, orders) = (&members, &orders);
            move |node: &&NodeRecord| {
                members.contains_key(&BrokerId(node.node_id)) == runs && !orders.contains_key(&node.node_id)
            }
        };
        let spot = |node: &NodeRecord| Spot {
            node: BrokerId(node.node_id),
            zone: node.zone.clone(),
            load: Load::default(),
        };
        let spots = nodes.iter().filter(usable(true)).map(spot).collect();
        let offline = nodes.iter().filter(usable(false)).map(spot).collect();
        Self { spots: Spots::new(spots, 0), offline: Spots::new(offline, 0), members }
    }

    /// Counts what a partition has already, so that new ones go elsewhere.
    pub fn count(&mut self, record: &PartitionState) {
        self.spots.count(record);
        self.offline.count(record);
    }

    /// How many nodes that run may get replicas.
    pub fn nodes(&self) -> usize {
        self.spots.len()
    }

    /// How many nodes may get replicas, those that do not run included.
    pub fn registered(&self) -> usize {
        self.spots.len() + self.offline.len()
    }

    /// The factor of a topic that did not ask for one.
    pub fn default_factor(&self) -> usize {
        super::ControllerTuning::default().default_factor.min(self.nodes()).max(1)
    }

    /// Replicas for the next partition, the preferred leader first; fewer than `factor` if there are not enough nodes. Nodes
    /// that do not run come last, and only where the others are too few.
    pub fn place(&mut self, factor: usize) -> Vec<BrokerId> {
        let mut placed = self.spots.place(&[], factor);
        if placed.len() < factor && !self.offline.is_empty() {
            placed.extend(self.offline.place(&[], factor - placed.len()));
        }
        placed
    }

    /// The creation of a partition: those of `replicas` that run are in sync, the first of them leads. `None` when
    /// nobody runs. `min_isr` is the setting, if there is one. The change compares that the partition has no record and
    /// that everybody in sync is still in the same run; whoever makes a topic adds its own comparison of the topic.
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
    use moim_cluster::nodes::MemberRecord;

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
    fn new_partitions_go_to_nodes_that_run_and_are_wanted() {
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
    fn what_is_there_counts() {
        let mut maker = maker(&[]);
        for _ in 0..3 {
            let there =
                PartitionState::new(vec![(1, 1, 1).into(), (2, 1, 1).into()], 1, Durability::default());
            maker.count(&there);
        }
        assert_eq!(maker.place(1), [BrokerId(3)]);
    }

    #[test]
    fn a_new_record_names_the_runs_it_counts_on() {
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
