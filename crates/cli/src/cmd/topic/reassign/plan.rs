//! Plans of reassignments: pure functions of the present replicas.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A partition and its present replicas.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seat {
    pub(super) topic: String,
    pub(super) partition: i32,
    /// The first is the preferred leader.
    pub(super) replicas: Vec<i32>,
}

impl Seat {
    pub(super) fn to(&self, to: Vec<i32>) -> Move {
        Move { seat: self.clone(), to }
    }
}

/// A partition and its target replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) seat: Seat,
    pub(super) to: Vec<i32>,
}

impl Move {
    pub(super) fn changes_something(&self) -> bool {
        self.seat.replicas != self.to
    }
}

/// A line of a plan.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Wanted {
    pub(super) topic: String,
    pub(super) partition: i32,
    pub(super) replicas: Vec<i32>,
}

/// Reads a plan as `kafka-reassign-partitions` writes it.
pub(super) fn parse(text: &str) -> Result<Vec<Wanted>, String> {
    #[derive(Deserialize)]
    struct Plan {
        partitions: Vec<Wanted>,
    }
    let plan: Plan = serde_json::from_str(text).map_err(|error| error.to_string())?;
    for one in &plan.partitions {
        let twice = (1..one.replicas.len()).find(|at| one.replicas[..*at].contains(&one.replicas[*at]));
        if twice.is_some() || one.replicas.is_empty() {
            return Err(format!("{}:{}: replicas must be different nodes", one.topic, one.partition));
        }
    }
    Ok(plan.partitions)
}

/// All partitions on these nodes, evenly, each with as many replicas as it has now (or as there are nodes). Where
/// several nodes would do, replicas stay.
pub(super) fn spread(seats: &[Seat], nodes: &[i32]) -> Vec<Move> {
    let mut load: BTreeMap<i32, (usize, usize)> = nodes.iter().map(|node| (*node, (0, 0))).collect();
    let mut moves = Vec::new();
    for seat in seats {
        let factor = seat.replicas.len().clamp(1, nodes.len().max(1));
        let mut chosen: Vec<i32> = Vec::new();
        while chosen.len() < factor {
            let free = nodes.iter().filter(|node| !chosen.contains(node));
            let best = free.min_by_key(|node| (load[node].0, !seat.replicas.contains(node)));
            let Some(node) = best.copied() else { break };
            chosen.push(node);
            load.entry(node).or_default().0 += 1;
        }
        // In their present order, so that unchanged replicas stay.
        let now = |node: &i32| seat.replicas.iter().position(|replica| replica == node);
        chosen.sort_by_key(|node| now(node).unwrap_or(usize::MAX));
        if let Some(at) = (0..chosen.len()).min_by_key(|at| load[&chosen[*at]].1) {
            chosen[..=at].rotate_right(1);
            load.entry(chosen[0]).or_default().1 += 1;
        }
        moves.push(seat.to(chosen));
    }
    moves
}

/// Everything off one node: each of its replicas goes to the node that has the fewest, of those that have none of the
/// partition. Says why not, if there is no such node.
pub(super) fn drain(seats: &[Seat], node: i32, brokers: &[i32]) -> Result<Vec<Move>, String> {
    let mut load: BTreeMap<i32, usize> =
        brokers.iter().filter(|broker| **broker != node).map(|b| (*b, 0)).collect();
    for replica in seats.iter().flat_map(|seat| &seat.replicas) {
        if let Some(count) = load.get_mut(replica) {
            *count += 1;
        }
    }
    let mut moves = Vec::new();
    for seat in seats.iter().filter(|seat| seat.replicas.contains(&node)) {
        let free = load.iter().filter(|(other, _)| !seat.replicas.contains(other));
        let Some(to) = free.min_by_key(|(_, count)| **count).map(|(other, _)| *other) else {
            return Err(format!(
                "{}:{} has replicas on every node; add a node, or take a replica away with --to",
                seat.topic, seat.partition
            ));
        };
        *load.entry(to).or_default() += 1;
        moves.push(seat.to(seat.replicas.iter().map(|old| if *old == node { to } else { *old }).collect()));
    }
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seats(all: &[&[i32]]) -> Vec<Seat> {
        let seat = |(at, replicas): (usize, &&[i32])| Seat {
            topic: "t".into(),
            partition: at as i32,
            replicas: replicas.to_vec(),
        };
        all.iter().enumerate().map(seat).collect()
    }

    fn targets(moves: &[Move]) -> Vec<Vec<i32>> {
        moves.iter().map(|one| one.to.clone()).collect()
    }

    #[test]
    fn spreading_is_even_and_keeps_what_it_can() {
        let there = seats(&[&[1, 2], &[1, 2], &[1, 2]]);
        let moves = spread(&there, &[1, 2, 3]);
        let mut counts = BTreeMap::new();
        let mut leads = BTreeMap::new();
        for to in targets(&moves) {
            assert!(to.len() == 2 && to[0] != to[1], "{to:?}");
            *leads.entry(to[0]).or_insert(0) += 1;
            to.iter().for_each(|node| *counts.entry(*node).or_insert(0) += 1);
        }
        assert_eq!(counts, [(1, 2), (2, 2), (3, 2)].into());
        assert_eq!(leads, [(1, 1), (2, 1), (3, 1)].into());
        let stays = seats(&[&[1, 2], &[2, 3], &[3, 1]]);
        assert!(spread(&stays, &[1, 2, 3]).iter().all(|one| !one.changes_something()));
        assert_eq!(targets(&spread(&seats(&[&[1, 2, 3]]), &[2])), [vec![2]], "fewer nodes, fewer replicas");
    }

    #[test]
    fn draining_replaces_one_node_and_leaves_the_rest() {
        let there = seats(&[&[1, 2], &[2, 1], &[2, 3]]);
        let moves = drain(&there, 1, &[1, 2, 3, 4]).unwrap();
        assert_eq!(targets(&moves), [vec![4, 2], vec![2, 3]]);
        assert!(drain(&there, 1, &[1, 2]).is_err());
    }

    #[test]
    fn plans_of_other_tools_are_read() {
        let text =
            r#"{"version":1,"partitions":[{"topic":"t","partition":0,"replicas":[3,1],"log_dirs":["any"]}]}"#;
        let wanted = [Wanted { topic: "t".into(), partition: 0, replicas: vec![3, 1] }];
        assert_eq!(parse(text).unwrap(), wanted);
        for wrong in ["{", r#"{"partitions":[{"topic":"t","partition":0,"replicas":[1,1]}]}"#] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
