//! Where replicas go: evenly over nodes, and each copy of a partition in another zone while there are zones left.
//!
//! Each replica goes to the node that has the least, zones first; of a partition's nodes the one that is preferred least
//! becomes its preferred leader. Starting from even counts this keeps nodes within one replica and two leaderships of each other, and
//! starting from uneven ones it evens them out, without looking at more than the counts.

use moim_base::BrokerId;

use crate::state::PartitionState;

/// What a node has already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Replicas on it.
    pub replicas: usize,
    /// Partitions that prefer it as leader.
    pub preferred: usize,
    /// Partitions it leads now.
    pub leads: usize,
}

/// A node that may get replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spot {
    /// Which.
    pub node: BrokerId,
    /// Where it stands.
    pub zone: String,
    /// What it has.
    pub load: Load,
}

/// The nodes that may get replicas, with counts that follow what is placed.
#[derive(Clone, Debug, Default)]
pub struct Spots {
    spots: Vec<Spot>,
    /// Turns with every placement, so that equals take turns.
    turn: usize,
}

impl Spots {
    /// These nodes. `turn` only breaks ties.
    pub fn new(spots: Vec<Spot>, turn: usize) -> Self {
        Self { spots, turn }
    }

    /// Counts what a partition has on these nodes already.
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

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.spots.len()
    }

    /// How many of them are not among these.
    pub fn free(&self, taken: &[BrokerId]) -> usize {
        self.spots.iter().filter(|spot| !taken.contains(&spot.node)).count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// Replicas for a partition: all of `keep` and as many more as make `factor`, the preferred leader first. Fewer if
    /// there are not enough nodes. `keep` is counted on its nodes already, and its first as preferred.
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
            let free = self.spots.iter().enumerate().filter(|(_, spot)| !chosen.contains(&spot.node));
            let best = free.min_by_key(|(at, spot)| {
                let turn = (at + self.spots.len() - self.turn % self.spots.len()) % self.spots.len();
                (used(&spot.zone), spot.load.replicas, spot.load.preferred, turn)
            });
            let Some(node) = best.map(|(_, spot)| spot.node) else { break };
            self.change(node, |load| load.replicas += 1);
            chosen.push(node);
        }
        self.prefer_least(&mut chosen);
        self.turn += 1;
        chosen
    }

    /// Puts the node that is preferred least to the front, if that evens things out.
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
        let spot = self.spots.iter().find(|spot| spot.node == node)?;
        // Nodes without a zone are each their own.
        (!spot.zone.is_empty()).then_some(spot.zone.as_str())
    }

    fn load_of(&self, node: BrokerId) -> Option<Load> {
        self.spots.iter().find(|spot| spot.node == node).map(|spot| spot.load)
    }

    fn change(&mut self, node: BrokerId, change: impl FnOnce(&mut Load)) {
        if let Some(spot) = self.spots.iter_mut().find(|spot| spot.node == node) {
            change(&mut spot.load);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spots(zones: &[&str]) -> Spots {
        let spot = |(at, zone): (usize, &&str)| Spot {
            node: BrokerId(at as i32 + 1),
            zone: (*zone).to_owned(),
            load: Load::default(),
        };
        Spots::new(zones.iter().enumerate().map(spot).collect(), 0)
    }

    fn spread(counts: impl Iterator<Item = usize> + Clone) -> usize {
        counts.clone().max().unwrap_or(0) - counts.min().unwrap_or(0)
    }

    #[test]
    fn replicas_and_leaders_are_even_over_nodes() {
        for (nodes, partitions, factor) in [(3, 12, 3), (5, 100, 3), (7, 33, 2), (4, 1, 3), (3, 10, 1)] {
            let mut spots = spots(&vec![""; nodes]);
            for _ in 0..partitions {
                let placed = spots.place(&[], factor);
                assert_eq!(placed.len(), factor);
                assert!(placed.iter().enumerate().all(|(at, n)| !placed[..at].contains(n)));
            }
            let replicas = spots.spots.iter().map(|spot| spot.load.replicas);
            let preferred = spots.spots.iter().map(|spot| spot.load.preferred);
            assert!(spread(replicas.clone()) <= 1, "{nodes} {partitions} {factor}: {:?}", spots.spots);
            assert!(spread(preferred.clone()) <= 2, "{nodes} {partitions} {factor}: {:?}", spots.spots);
            assert_eq!(replicas.sum::<usize>(), partitions * factor);
            assert_eq!(preferred.sum::<usize>(), partitions);
        }
    }

    #[test]
    fn copies_stand_in_different_zones_while_there_are_any() {
        let zones = ["a", "a", "b", "b", "c", "c"];
        let mut spots = spots(&zones);
        for _ in 0..60 {
            let placed = spots.place(&[], 3);
            let mut seen: Vec<&str> = placed.iter().map(|n| zones[n.0 as usize - 1]).collect();
            seen.sort_unstable();
            assert_eq!(seen, ["a", "b", "c"]);
        }
        assert!(spread(spots.spots.iter().map(|spot| spot.load.replicas)) <= 1);
        let mut two = self::spots(&["a", "a", "b"]);
        let placed = two.place(&[], 3);
        assert_eq!(placed.len(), 3, "two copies in one zone rather than one copy less");
    }

    #[test]
    fn what_is_there_stays_and_leadership_spreads_over_new_nodes() {
        let mut spots = spots(&["", "", ""]);
        spots.spots[0].load = Load { replicas: 30, preferred: 30, leads: 30 };
        for _ in 0..30 {
            let placed = spots.place(&[BrokerId(1)], 3);
            assert!(placed.contains(&BrokerId(1)) && placed.len() == 3);
        }
        assert_eq!(spots.spots.iter().map(|s| s.load.preferred).collect::<Vec<_>>(), [10, 10, 10]);
        assert_eq!(spots.spots.iter().map(|s| s.load.replicas).collect::<Vec<_>>(), [30, 30, 30]);
    }

    #[test]
    fn too_few_nodes_give_fewer_copies() {
        assert_eq!(spots(&["", ""]).place(&[], 3).len(), 2);
        assert_eq!(spots(&[]).place(&[], 3).len(), 0);
    }
}
