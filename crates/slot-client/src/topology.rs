//! The slot table: the node of each slot, used to route every command.
//!
//! Two tables of 16,384 entries: the primary of a slot, and the replicas of a slot. They are built from a
//! view and swapped atomically; a MOVED reply patches one entry of the live table immediately, before any
//! refresh.
//!
//! Invariant: an entry is an index into `nodes`, or `UNASSIGNED`. A patch never changes `nodes`; a
//! redirection to an unknown node makes a new topology.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use moim_wire_resp::Slot;

use crate::address::Address;
use crate::node::Node;
use crate::view::{NodeInfo, View};

const UNASSIGNED: u16 = u16::MAX;

/// The cluster topology of the router.
pub(crate) struct Topology {
    pub(crate) view: View,
    /// One for each node of the view, in its order, then those added by redirections.
    nodes: Vec<Arc<Node>>,
    /// The primary of each slot.
    primaries: Box<[AtomicU16]>,
    /// For each slot, the index of its primary in the view, whose replicas serve the slot.
    replica_sets: Box<[u16]>,
    /// The replicas of each node of the view.
    replicas: Vec<Vec<u16>>,
}

impl Topology {
    /// An empty topology.
    pub(crate) fn empty() -> Self {
        Self::build(View::default(), &mut |_| unreachable!("an empty view has no nodes"))
    }

    /// Builds the tables of `view`; `node` returns the node of an address.
    pub(crate) fn build(view: View, node: &mut dyn FnMut(&Address) -> Arc<Node>) -> Self {
        let nodes = view.nodes.iter().map(|info| node(&info.address)).collect();
        let mut primaries = vec![UNASSIGNED; Slot::COUNT.into()];
        for (index, info) in view.nodes.iter().enumerate().filter(|(_, info)| info.is_primary()) {
            for range in &info.slots {
                primaries[usize::from(*range.start())..=usize::from(*range.end())].fill(index as u16);
            }
        }
        let replicas = view.nodes.iter().map(|info| replicas_of(&view, info)).collect();
        Self {
            nodes,
            replica_sets: primaries.clone().into(),
            primaries: primaries.into_iter().map(AtomicU16::new).collect(),
            replicas,
            view,
        }
    }

    /// The primary of `slot`.
    pub(crate) fn primary(&self, slot: Slot) -> Option<&Arc<Node>> {
        self.nodes.get(usize::from(self.primaries[slot.index()].load(Ordering::Relaxed)))
    }

    /// The healthy replicas of `slot`; none when a patch has moved it since.
    pub(crate) fn replicas(&self, slot: Slot) -> impl ExactSizeIterator<Item = &Arc<Node>> + Clone {
        let owner = self.replica_sets[slot.index()];
        let current = self.primaries[slot.index()].load(Ordering::Relaxed) == owner;
        let replicas = if current { self.replicas.get(usize::from(owner)) } else { None };
        replicas.map_or(&[][..], Vec::as_slice).iter().map(|index| &self.nodes[usize::from(*index)])
    }

    /// All primaries with slots and all replicas (`all`), or only the primaries.
    pub(crate) fn members(&self, all: bool) -> Vec<Arc<Node>> {
        let wanted = |info: &NodeInfo| all && !info.failing || info.is_primary() && !info.slots.is_empty();
        let listed = self.view.nodes.iter().zip(&self.nodes).filter(|(info, _)| wanted(info));
        listed.map(|(_, node)| node.clone()).collect()
    }

    /// All nodes, including those from redirections.
    pub(crate) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    /// Records `to` as the owner of `slot`. False when `to` is not among the nodes.
    pub(crate) fn patch(&self, slot: Slot, to: &Address) -> bool {
        let Some(index) = self.nodes.iter().position(|node| node.address == *to) else { return false };
        self.primaries[slot.index()].store(index as u16, Ordering::Relaxed);
        true
    }

    /// A copy with one more node.
    pub(crate) fn with(&self, node: Arc<Node>) -> Self {
        let mut nodes = self.nodes.clone();
        nodes.push(node);
        let load = |entry: &AtomicU16| AtomicU16::new(entry.load(Ordering::Relaxed));
        Self {
            view: self.view.clone(),
            nodes,
            primaries: self.primaries.iter().map(load).collect(),
            replica_sets: self.replica_sets.clone(),
            replicas: self.replicas.clone(),
        }
    }

    /// Number of slots without a primary.
    pub(crate) fn uncovered(&self) -> usize {
        self.primaries.iter().filter(|entry| entry.load(Ordering::Relaxed) == UNASSIGNED).count()
    }

    /// The difference to `old`: added nodes, removed nodes, number of slots with another primary.
    pub(crate) fn difference(&self, old: &Self) -> (Vec<Address>, Vec<Address>, usize) {
        let addresses = |topology: &Self| -> HashSet<Address> {
            topology.nodes.iter().map(|node| node.address.clone()).collect()
        };
        let (new, before) = (addresses(self), addresses(old));
        let owner = |topology: &Self, slot| topology.primary(slot).map(|node| node.address.clone());
        let moved = Slot::all().filter(|slot| owner(self, *slot) != owner(old, *slot)).count();
        (new.difference(&before).cloned().collect(), before.difference(&new).cloned().collect(), moved)
    }
}

fn replicas_of(view: &View, primary: &NodeInfo) -> Vec<u16> {
    let of = |info: &NodeInfo| info.replica_of.as_deref() == Some(&primary.id) && !info.failing;
    (0..view.nodes.len()).filter(|index| of(&view.nodes[*index])).map(|index| index as u16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::tests::node;

    fn topology() -> Topology {
        let view = View::parse(
            "a h:1@2 master - 0 0 1 connected 0-9999\nb h:2@3 slave a 0 0 1 connected\nc h:3@4 slave,fail a 0 0 1 connected\n\
             d h:4@5 master - 0 0 2 connected 10000-16000\n",
            "h",
        );
        Topology::build(view.unwrap(), &mut node)
    }

    fn primary(topology: &Topology, slot: u16) -> Option<u16> {
        topology.primary(Slot::new(slot).unwrap()).map(|node| node.address.port)
    }

    #[test]
    fn slots_map_to_primary_and_replicas() {
        let topology = topology();
        assert_eq!(
            [0, 9999, 10000, 16001].map(|slot| primary(&topology, slot)),
            [Some(1), Some(1), Some(4), None]
        );
        let replicas = |slot| {
            topology.replicas(Slot::new(slot).unwrap()).map(|node| node.address.port).collect::<Vec<_>>()
        };
        assert_eq!((replicas(5), replicas(12000)), (vec![2], vec![]), "a failing replica is not read from");
        assert_eq!(topology.uncovered(), 383);
        let ports = |all| topology.members(all).iter().map(|node| node.address.port).collect::<Vec<_>>();
        assert_eq!((ports(false), ports(true)), (vec![1, 4], vec![1, 2, 4]));
    }

    #[test]
    fn patch_moves_one_slot() {
        let topology = topology();
        let slot = Slot::new(5).unwrap();
        assert!(topology.patch(slot, &Address::new("h", 4)));
        assert_eq!((primary(&topology, 5), primary(&topology, 6)), (Some(4), Some(1)));
        assert_eq!(topology.replicas(slot).len(), 0, "the replicas belong to the previous primary");
        assert!(!topology.patch(slot, &Address::new("h", 9)));
        let more = topology.with(node(&Address::new("h", 9)));
        assert!(more.patch(slot, &Address::new("h", 9)));
        assert_eq!((primary(&more, 5), primary(&topology, 5)), (Some(9), Some(4)));
        let (added, removed, moved) = more.difference(&topology);
        assert_eq!((added, removed, moved), (vec![Address::new("h", 9)], vec![], 1));
    }
}
