//! The assignment plan: balanced within one partition, then the fewest moves, then zone affinity.
//!
//! A pure function. With P partitions and N nodes every node gets P/N partitions, and P mod N nodes get one
//! more: the nodes that own the most already. The moves are therefore exactly the partitions without an
//! owner plus the partitions of owners above their target, which is the minimum for a balanced plan. An
//! owner above its target releases partitions of other zones first; each unassigned partition goes to a node
//! of its home zone while such a node has capacity.
//!
//! Limits: all partitions have the same weight. Among plans with the same number of moves, the plan with the
//! most partitions in their home zone is approximated, not searched for. Time is linear in partitions and
//! nodes, except for sorting the nodes.

use std::collections::HashMap;

/// A node that can own partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanNode {
    /// Node id. Unique within the plan.
    pub id: String,
    /// Zone of the node; empty for none.
    pub zone: String,
}

/// A partition to be assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanPartition {
    /// Current owner; an owner that is not among the nodes counts as none.
    pub owner: Option<String>,
    /// Home zone; empty for none.
    pub zone: String,
}

/// The assignment of partitions to nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Node index for each partition; empty when there are no nodes.
    pub owners: Vec<usize>,
    /// Number of partitions with a new owner, or with their first owner.
    pub moves: usize,
}

/// Computes the plan. Deterministic: the same input gives the same plan on every machine.
pub fn plan(nodes: &[PlanNode], partitions: &[PlanPartition]) -> Plan {
    if nodes.is_empty() {
        return Plan { owners: Vec::new(), moves: 0 };
    }
    let index: HashMap<&str, usize> =
        nodes.iter().enumerate().map(|(at, node)| (node.id.as_str(), at)).collect();
    let mut owned: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    let mut free = Vec::new();
    for (at, partition) in partitions.iter().enumerate() {
        match partition.owner.as_deref().and_then(|owner| index.get(owner)) {
            Some(node) => owned[*node].push(at),
            None => free.push(at),
        }
    }
    let targets = targets(&owned, partitions.len());
    let mut owners = vec![usize::MAX; partitions.len()];
    for (node, mine) in owned.iter_mut().enumerate() {
        // Keep the partitions of the node's own zone longest.
        mine.sort_by_key(|at| is_outside_home_zone(&partitions[*at], &nodes[node]));
        let released = mine.split_off(mine.len().min(targets[node]));
        free.extend(released);
        for at in mine {
            owners[*at] = node;
        }
    }
    free.sort_unstable();
    let moves = free.len();
    let capacity: Vec<usize> = targets.iter().zip(&owned).map(|(target, mine)| target - mine.len()).collect();
    assign_free(nodes, partitions, capacity, free, &mut owners);
    Plan { owners, moves }
}

fn is_outside_home_zone(partition: &PlanPartition, node: &PlanNode) -> bool {
    !partition.zone.is_empty() && partition.zone != node.zone
}

/// Target partition count of each node: the nodes that own the most get the larger share.
fn targets(owned: &[Vec<usize>], partitions: usize) -> Vec<usize> {
    let (share, larger) = (partitions / owned.len(), partitions % owned.len());
    let mut order: Vec<usize> = (0..owned.len()).collect();
    order.sort_by_key(|node| std::cmp::Reverse(owned[*node].len()));
    let mut targets = vec![share; owned.len()];
    for node in &order[..larger] {
        targets[*node] += 1;
    }
    targets
}

/// Assigns the unassigned partitions, home zone first.
fn assign_free(
    nodes: &[PlanNode],
    partitions: &[PlanPartition],
    mut capacity: Vec<usize>,
    free: Vec<usize>,
    owners: &mut [usize],
) {
    let mut by_zone: HashMap<&str, Vec<usize>> = HashMap::new();
    for (node, left) in capacity.iter().enumerate() {
        if *left > 0 {
            by_zone.entry(nodes[node].zone.as_str()).or_default().push(node);
        }
    }
    let mut rest = Vec::new();
    for at in free {
        let zone = partitions[at].zone.as_str();
        let candidates = if zone.is_empty() { None } else { by_zone.get_mut(zone) };
        match candidates.and_then(|candidates| next_with_capacity(candidates, &mut capacity)) {
            Some(node) => owners[at] = node,
            None => rest.push(at),
        }
    }
    let mut any_zone: Vec<usize> = (0..nodes.len()).filter(|node| capacity[*node] > 0).collect();
    for at in rest {
        owners[at] = next_with_capacity(&mut any_zone, &mut capacity)
            .expect("total capacity equals the number of partitions");
    }
}

/// The next node with capacity, round robin.
fn next_with_capacity(candidates: &mut Vec<usize>, capacity: &mut [usize]) -> Option<usize> {
    let node = candidates.pop()?;
    capacity[node] -= 1;
    if capacity[node] > 0 {
        candidates.push(node);
    }
    Some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize, zones: usize) -> Vec<PlanNode> {
        (0..count).map(|at| PlanNode { id: format!("n{at}"), zone: format!("z{}", at % zones) }).collect()
    }

    fn owned_by(plan: &Plan, nodes: &[PlanNode]) -> Vec<PlanPartition> {
        let own = |node: &usize| PlanPartition { owner: Some(nodes[*node].id.clone()), zone: String::new() };
        plan.owners.iter().map(own).collect()
    }

    fn counts(plan: &Plan, nodes: usize) -> Vec<usize> {
        let mut counts = vec![0; nodes];
        plan.owners.iter().for_each(|owner| counts[*owner] += 1);
        counts
    }

    /// Lower bound of moves for a plan that is balanced within one, computed independently: an owner keeps
    /// at most a large share, and only P mod N owners may keep a large share.
    fn least_moves(nodes: usize, partitions: &[PlanPartition]) -> usize {
        let (share, larger) = (partitions.len() / nodes, partitions.len() % nodes);
        let mut have: Vec<usize> = (0..nodes)
            .map(|at| {
                let id = format!("n{at}");
                partitions.iter().filter(|one| one.owner.as_deref() == Some(id.as_str())).count()
            })
            .collect();
        have.sort_unstable_by(|a, b| b.cmp(a));
        let kept: usize =
            have.iter().enumerate().map(|(at, have)| (*have).min(share + usize::from(at < larger))).sum();
        partitions.len() - kept
    }

    #[test]
    fn plan_is_balanced_with_fewest_moves() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2_000 {
            let (count, zones) = (random.usize(1..9), random.usize(1..4));
            let nodes = nodes(count, zones);
            let partitions: Vec<_> = (0..random.usize(0..60))
                .map(|_| PlanPartition {
                    // Some owners have failed.
                    owner: random.bool().then(|| format!("n{}", random.usize(0..count + 2))),
                    zone: if random.bool() { format!("z{}", random.usize(0..4)) } else { String::new() },
                })
                .collect();
            let plan = plan(&nodes, &partitions);
            assert!(plan.owners.iter().all(|owner| *owner < count));
            let counts = counts(&plan, count);
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
            assert_eq!(plan.moves, least_moves(count, &partitions));
            let moved = plan.owners.iter().zip(&partitions);
            let moved = moved.filter(|(owner, one)| one.owner.as_deref() != Some(nodes[**owner].id.as_str()));
            assert_eq!(moved.count(), plan.moves);
            assert_eq!(super::plan(&nodes, &partitions), plan, "plan is deterministic");
        }
    }

    #[test]
    fn balanced_assignment_is_unchanged() {
        let nodes = nodes(5, 2);
        let fresh = vec![PlanPartition { owner: None, zone: String::new() }; 23];
        let first = plan(&nodes, &fresh);
        let again = plan(&nodes, &owned_by(&first, &nodes));
        assert_eq!((again.moves, again.owners), (0, first.owners));
    }

    #[test]
    fn free_partitions_go_to_home_zone_and_foreign_partitions_move_first() {
        let nodes = nodes(4, 2);
        let fresh: Vec<_> =
            (0..40).map(|at| PlanPartition { owner: None, zone: format!("z{}", at % 2) }).collect();
        let first = plan(&nodes, &fresh);
        let at_home = |plan: &Plan| {
            let pairs = plan.owners.iter().zip(&fresh);
            pairs.filter(|(owner, one)| nodes[**owner].zone == one.zone).count()
        };
        assert_eq!(at_home(&first), 40);
        // All partitions are on two nodes, half of them outside of their home zone; those move.
        let crowded: Vec<_> = fresh
            .iter()
            .enumerate()
            .map(|(at, one)| PlanPartition { owner: Some(format!("n{}", at / 20)), zone: one.zone.clone() })
            .collect();
        let spread = plan(&nodes, &crowded);
        assert_eq!((spread.moves, at_home(&spread)), (20, 40));
    }

    #[test]
    fn no_nodes_or_no_partitions_gives_an_empty_plan() {
        assert!(plan(&[], &[]).owners.is_empty());
        assert_eq!(plan(&[], &[PlanPartition { owner: None, zone: String::new() }]).moves, 0);
        assert!(plan(&nodes(3, 1), &[]).owners.is_empty());
    }

    #[test]
    fn node_departure_moves_only_its_partitions() {
        let nodes = nodes(1_000, 3);
        let fresh: Vec<_> =
            (0..100_000).map(|at| PlanPartition { owner: None, zone: format!("z{}", at % 3) }).collect();
        let first = plan(&nodes, &fresh);
        let after = plan(&nodes[1..], &owned_by(&first, &nodes));
        assert_eq!(after.moves, 100);
    }
}
