//! Who should own what: balanced within one, then as few moves as that allows, then close to home.
//!
//! A pure function. With P partitions and N nodes every node gets P/N, and P mod N of them one more: those that own the
//! most already. So the moves are exactly the partitions without an owner plus what owners have above their share, which
//! is the least that a balanced plan can do with. Of what an owner must give, it gives first what has its home elsewhere;
//! of what is to be given out, each goes to a node of its home zone while one has room.
//!
//! Limits: partitions count the same, and among plans with the same moves the one with the most partitions at home is
//! approached, not searched for. Time is linear in partitions and nodes but for sorting the nodes.

use std::collections::HashMap;

/// A node that can own partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanNode {
    /// Who it is. Ids are unique.
    pub id: String,
    /// Where it is; empty for nowhere in particular.
    pub zone: String,
}

/// A partition to be owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanPartition {
    /// Who owns it, if anybody; one that is not among the nodes counts as nobody.
    pub owner: Option<String>,
    /// Where it is at home; empty for nowhere in particular.
    pub zone: String,
}

/// Who should own what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// For each partition the index of its node; empty when there are no nodes.
    pub owners: Vec<usize>,
    /// How many partitions have another owner than before, or one for the first time.
    pub moves: usize,
}

/// Makes the plan. The same input gives the same plan, on every machine.
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
        // What is at home stays longest.
        mine.sort_by_key(|at| is_abroad(&partitions[*at], &nodes[node]));
        let given = mine.split_off(mine.len().min(targets[node]));
        free.extend(given);
        for at in mine {
            owners[*at] = node;
        }
    }
    free.sort_unstable();
    let moves = free.len();
    let room: Vec<usize> = targets.iter().zip(&owned).map(|(target, mine)| target - mine.len()).collect();
    give(nodes, partitions, room, free, &mut owners);
    Plan { owners, moves }
}

fn is_abroad(partition: &PlanPartition, node: &PlanNode) -> bool {
    !partition.zone.is_empty() && partition.zone != node.zone
}

/// How many each node is to own: the larger shares to those that own the most.
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

/// Gives out what is free, home first.
fn give(
    nodes: &[PlanNode],
    partitions: &[PlanPartition],
    mut room: Vec<usize>,
    free: Vec<usize>,
    owners: &mut [usize],
) {
    let mut by_zone: HashMap<&str, Vec<usize>> = HashMap::new();
    for (node, left) in room.iter().enumerate() {
        if *left > 0 {
            by_zone.entry(nodes[node].zone.as_str()).or_default().push(node);
        }
    }
    let mut rest = Vec::new();
    for at in free {
        let zone = partitions[at].zone.as_str();
        let candidates = if zone.is_empty() { None } else { by_zone.get_mut(zone) };
        match candidates.and_then(|candidates| take(candidates, &mut room)) {
            Some(node) => owners[at] = node,
            None => rest.push(at),
        }
    }
    let mut anybody: Vec<usize> = (0..nodes.len()).filter(|node| room[*node] > 0).collect();
    for at in rest {
        owners[at] = take(&mut anybody, &mut room).expect("there is as much room as there are partitions");
    }
}

/// A node with room, in turn.
fn take(candidates: &mut Vec<usize>, room: &mut [usize]) -> Option<usize> {
    let node = candidates.pop()?;
    room[node] -= 1;
    if room[node] > 0 {
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

    /// The least moves of any plan that is balanced within one, by its own reasoning: an owner keeps at most a large
    /// share, and only so many may keep a large one.
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
    fn any_situation_is_balanced_with_the_least_moves() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2_000 {
            let (count, zones) = (random.usize(1..9), random.usize(1..4));
            let nodes = nodes(count, zones);
            let partitions: Vec<_> = (0..random.usize(0..60))
                .map(|_| PlanPartition {
                    // Some owners are gone.
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
            assert_eq!(super::plan(&nodes, &partitions), plan, "the same again");
        }
    }

    #[test]
    fn a_balanced_situation_stays() {
        let nodes = nodes(5, 2);
        let fresh = vec![PlanPartition { owner: None, zone: String::new() }; 23];
        let first = plan(&nodes, &fresh);
        let again = plan(&nodes, &owned_by(&first, &nodes));
        assert_eq!((again.moves, again.owners), (0, first.owners));
    }

    #[test]
    fn what_is_free_goes_home_and_what_is_abroad_is_given_first() {
        let nodes = nodes(4, 2);
        let fresh: Vec<_> =
            (0..40).map(|at| PlanPartition { owner: None, zone: format!("z{}", at % 2) }).collect();
        let first = plan(&nodes, &fresh);
        let at_home = |plan: &Plan| {
            let pairs = plan.owners.iter().zip(&fresh);
            pairs.filter(|(owner, one)| nodes[**owner].zone == one.zone).count()
        };
        assert_eq!(at_home(&first), 40);
        // Everything is on two nodes, half of it abroad; what moves is what was abroad.
        let crowded: Vec<_> = fresh
            .iter()
            .enumerate()
            .map(|(at, one)| PlanPartition { owner: Some(format!("n{}", at / 20)), zone: one.zone.clone() })
            .collect();
        let spread = plan(&nodes, &crowded);
        assert_eq!((spread.moves, at_home(&spread)), (20, 40));
    }

    #[test]
    fn nobody_gets_nothing() {
        assert!(plan(&[], &[]).owners.is_empty());
        assert_eq!(plan(&[], &[PlanPartition { owner: None, zone: String::new() }]).moves, 0);
        assert!(plan(&nodes(3, 1), &[]).owners.is_empty());
    }

    #[test]
    fn a_node_that_leaves_a_large_fleet_moves_only_its_own() {
        let nodes = nodes(1_000, 3);
        let fresh: Vec<_> =
            (0..100_000).map(|at| PlanPartition { owner: None, zone: format!("z{}", at % 3) }).collect();
        let first = plan(&nodes, &fresh);
        let after = plan(&nodes[1..], &owned_by(&first, &nodes));
        assert_eq!(after.moves, 100);
    }
}
