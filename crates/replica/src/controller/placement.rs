//! Replica placement: evenly over nodes, and each replica of a partition in another zone while there are zones left.
//!
//! Each replica goes to the node with the fewest replicas, zones first. Of a partition's nodes, the one with the
//! fewest preferred leaderships becomes its preferred leader. Starting from even counts this keeps nodes within one
//! replica and two leaderships of each other; starting from uneven counts it evens them out. It uses only the counts.

use moim_base::BrokerId;

use crate::state::PartitionState;

/// The present load of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Its replicas.
    pub replicas: usize,
    /// Partitions whose preferred leader it is.
    pub preferred: usize,
    /// Partitions that it leads now.
    pub leads: usize,
}

/// A node that may get replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacementNode {
    /// The node id.
    pub node: BrokerId,
    /// Its zone (rack).
    pub zone: String,
    /// Its present load.
    pub load: Load,
}

/// The nodes that may get replicas, with counts that include new placements.
#[derive(Clone, Debug, Default)]
pub struct PlacementNodes {
    placement_nodes: Vec<PlacementNode>,
    /// Advances with every placement, so that equal nodes alternate.
    turn: usize,
}

impl PlacementNodes {
    /// These nodes. `turn` only breaks ties.
    pub fn new(placement_nodes: Vec<PlacementNode>, turn: usize) -> Self {
        Self { placement_nodes, turn }
    }

    /// Counts the replicas of an existing partition on these nodes.
    pub fn count(&mut self, record: &PartitionState) {
        for (at, node) in record.replicas.iter().enumerate() {
            self.change(*node, |load| {
                load.replicas += 1;
                load.preferred += usize::from(at == 0);
                load.leads += usize::from(record.leader == Some(*node));
            });
        }
        self.turn += 1;
    }

    /// The number of nodes.
    pub fn len(&self) -> usize {
        self.placement_nodes.len()
    }

    /// The number of nodes that are not in `taken`.
    pub fn free(&self, taken: &[BrokerId]) -> usize {
        self.placement_nodes.iter().filter(|node_entry| !taken.contains(&node_entry.node)).count()
    }

    /// True if there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.placement_nodes.is_empty()
    }

    /// Replicas for a partition: all of `keep` and as many more as `factor` requires, the preferred leader first.
    /// Fewer if there are not enough nodes. `keep` is already counted on its nodes, and its first node as preferred.
    pub fn place(&mut self, keep: &[BrokerId], factor: usize) -> Vec<BrokerId> {
        let mut chosen = keep.to_vec();
        if let Some(first) = keep.first() {
            self.change(*first, |load| load.preferred = load.preferred.saturating_sub(1));
        }
        while chosen.len() < factor {
            let used = |zone: &str| {
                let there = |node: &&BrokerId| self.zone_of(**node) == Some(zone);
                chosen.iter().filter(there).count()
            };
            let free = self
                .placement_nodes
                .iter()
                .enumerate()
                .filter(|(_, node_entry)| !chosen.contains(&node_entry.node));
            let best = free.min_by_key(|(at, node_entry)| {
                let turn = (at + self.placement_nodes.len() - self.turn % self.placement_nodes.len())
                    % self.placement_nodes.len();
                (used(&node_entry.zone), node_entry.load.replicas, node_entry.load.preferred, turn)
            });
            let Some(node) = best.map(|(_, node_entry)| node_entry.node) else { break };
            self.change(node, |load| load.replicas += 1);
            chosen.push(node);
        }
        self.prefer_least(&mut chosen);
        self.turn += 1;
        chosen
    }

    /// Moves the node with the fewest preferred leaderships to the front, if that evens out the counts.
    fn prefer_least(&mut self, chosen: &mut [BrokerId]) {
        let preferred = |node: &BrokerId| self.load_of(*node).map(|load| load.preferred);
        let least = (0..chosen.len())
            .filter(|at| preferred(&chosen[*at]).is_some())
            .min_by_key(|at| preferred(&chosen[*at]));
        if let Some(least) = least {
            chosen[..=least].rotate_right(1);
        }
        if let Some(first) = chosen.first().copied() {
            self.change(first, |load| load.preferred += 1);
        }
    }

    fn zone_of(&self, node: BrokerId) -> Option<&str> {
        let node_entry = self.placement_nodes.iter().find(|node_entry| node_entry.node == node)?;
        // Each node without a zone is its own zone.
        (!node_entry.zone.is_empty()).then_some(node_entry.zone.as_str())
    }

    fn load_of(&self, node: BrokerId) -> Option<Load> {
        self.placement_nodes
            .iter()
            .find(|node_entry| node_entry.node == node)
            .map(|node_entry| node_entry.load)
    }

    fn change(&mut self, node: BrokerId, change: impl FnOnce(&mut Load)) {
        if let Some(node_entry) = self.placement_nodes.iter_mut().find(|node_entry| node_entry.node == node) {
            change(&mut node_entry.load);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement_nodes(zones: &[&str]) -> PlacementNodes {
        let node_entry = |(at, zone): (usize, &&str)| PlacementNode {
            node: BrokerId(at as i32 + 1),
            zone: (*zone).to_owned(),
            load: Load::default(),
        };
        PlacementNodes::new(zones.iter().enumerate().map(node_entry).collect(), 0)
    }

    fn spread(counts: impl Iterator<Item = usize> + Clone) -> usize {
        counts.clone().max().unwrap_or(0) - counts.min().unwrap_or(0)
    }

    #[test]
    fn replicas_and_leaders_are_balanced_over_nodes() {
        for (nodes, partitions, factor) in [(3, 12, 3), (5, 100, 3), (7, 33, 2), (4, 1, 3), (3, 10, 1)] {
            let mut placement_nodes = placement_nodes(&vec![""; nodes]);
            for _ in 0..partitions {
                let placed = placement_nodes.place(&[], factor);
                assert_eq!(placed.len(), factor);
                assert!(placed.iter().enumerate().all(|(at, n)| !placed[..at].contains(n)));
            }
            let replicas = placement_nodes.placement_nodes.iter().map(|node_entry| node_entry.load.replicas);
            let preferred =
                placement_nodes.placement_nodes.iter().map(|node_entry| node_entry.load.preferred);
            assert!(
                spread(replicas.clone()) <= 1,
                "{nodes} {partitions} {factor}: {:?}",
                placement_nodes.placement_nodes
            );
            assert!(
                spread(preferred.clone()) <= 2,
                "{nodes} {partitions} {factor}: {:?}",
                placement_nodes.placement_nodes
            );
            assert_eq!(replicas.sum::<usize>(), partitions * factor);
            assert_eq!(preferred.sum::<usize>(), partitions);
        }
    }

    #[test]
    fn replicas_are_placed_in_different_zones() {
        let zones = ["a", "a", "b", "b", "c", "c"];
        let mut placement_nodes = placement_nodes(&zones);
        for _ in 0..60 {
            let placed = placement_nodes.place(&[], 3);
            let mut seen: Vec<&str> = placed.iter().map(|n| zones[n.0 as usize - 1]).collect();
            seen.sort_unstable();
            assert_eq!(seen, ["a", "b", "c"]);
        }
        assert!(
            spread(placement_nodes.placement_nodes.iter().map(|node_entry| node_entry.load.replicas)) <= 1
        );
        let mut two = self::placement_nodes(&["a", "a", "b"]);
        let placed = two.place(&[], 3);
        assert_eq!(placed.len(), 3, "two replicas in one zone rather than one replica less");
    }

    #[test]
    fn existing_replicas_stay_and_leadership_spreads_to_new_nodes() {
        let mut placement_nodes = placement_nodes(&["", "", ""]);
        placement_nodes.placement_nodes[0].load = Load { replicas: 30, preferred: 30, leads: 30 };
        for _ in 0..30 {
            let placed = placement_nodes.place(&[BrokerId(1)], 3);
            assert!(placed.contains(&BrokerId(1)) && placed.len() == 3);
        }
        assert_eq!(
            placement_nodes.placement_nodes.iter().map(|s| s.load.preferred).collect::<Vec<_>>(),
            [10, 10, 10]
        );
        assert_eq!(
            placement_nodes.placement_nodes.iter().map(|s| s.load.replicas).collect::<Vec<_>>(),
            [30, 30, 30]
        );
    }

    #[test]
    fn too_few_nodes_give_fewer_replicas() {
        assert_eq!(placement_nodes(&["", ""]).place(&[], 3).len(), 2);
        assert_eq!(placement_nodes(&[]).place(&[], 3).len(), 0);
    }
}
