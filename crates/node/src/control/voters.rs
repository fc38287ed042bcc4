//! Who should vote, as a pure decision.
//!
//! The number of voters follows the number of nodes: one, three from three nodes, five from five, never two or four,
//! because an even number stands no more failures than the odd one below it. Voters change in one step from one set to
//! another, so the number is right at every moment: a single voter becomes three when two learners are ready, and a
//! replaced one leaves when its successor is.
//!
//! Must never: give a vote to a member that lags, take a working voter's place while enough of them work, or leave the
//! group with a set it did not choose.

use std::collections::{BTreeMap, BTreeSet};

/// What is known about the members of the group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Situation {
    /// The voters now.
    pub(crate) voters: BTreeSet<u64>,
    /// Who is to vote, if a change was begun and not brought to its end; `voters` are those of both sides then.
    pub(crate) unfinished: Option<BTreeSet<u64>>,
    /// Members without a vote, and whether each holds nearly everything and runs.
    pub(crate) learners: BTreeMap<u64, bool>,
    /// The voter ids the cluster's nodes have.
    pub(crate) nodes: BTreeSet<u64>,
    /// Voter ids of nodes that were removed or replaced. What is in neither set was added by an etcd client: it is left
    /// alone.
    pub(crate) gone: BTreeSet<u64>,
    /// Voter ids that an etcd client removed: they have no vote, and stay as learners until their nodes are empty.
    pub(crate) leaving: BTreeSet<u64>,
    /// How many nodes the cluster has, those that wait for a replacement included and those that leave not.
    pub(crate) count: usize,
    /// The one that leads.
    pub(crate) leader: u64,
}

/// A change of the group's members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A node that was let in becomes a member without a vote.
    Learn(u64),
    /// These vote from now on.
    Voters(BTreeSet<u64>),
    /// A member without a vote goes: its node was removed or replaced.
    Forget(u64),
    /// This member leads no longer: it is about to leave.
    HandOver(u64),
}

/// How many voters so many nodes have.
pub(crate) fn wanted(nodes: usize) -> usize {
    match nodes {
        0..=2 => 1,
        3..=4 => 3,
        _ => 5,
    }
}

/// The next change, if one is due.
pub(crate) fn plan(now: &Situation) -> Option<Change> {
    // Before anything else: until then the group needs a majority of both sides, so it may stand no failure at all.
    if let Some(goal) = &now.unfinished {
        return Some(Change::Voters(goal.clone()));
    }
    if let Some(old) = now.learners.keys().find(|id| now.gone.contains(id)) {
        return Some(Change::Forget(*old));
    }
    let is_member = |id: &u64| now.voters.contains(id) || now.learners.contains_key(id);
    if let Some(new) = now.nodes.iter().find(|id| !is_member(id)) {
        return Some(Change::Learn(*new));
    }
    let wanted = wanted(now.count);
    let stays = |id: &u64| !now.gone.contains(id) && !now.leaving.contains(id);
    let mut chosen: BTreeSet<u64> = now.voters.iter().copied().filter(stays).collect();
    let can_vote = |id: &u64| now.nodes.contains(id) && stays(id);
    let ready = now.learners.iter().filter(|(id, ready)| **ready && can_vote(id)).map(|(id, _)| *id);
    for learner in ready {
        if chosen.len() < wanted {
            chosen.insert(learner);
        }
    }
    while chosen.len() > wanted {
        // The leader stays: it is known to work.
        let last = chosen.iter().rev().copied().find(|id| *id != now.leader)?;
        chosen.remove(&last);
    }
    if chosen.len() < wanted || chosen == now.voters {
        // Not enough members are ready, or there is nothing to do.
        return None;
    }
    if !chosen.contains(&now.leader) {
        // A leader that leaves hands over first, if one of those that stay can lead already: nobody has to wait for an
        // election then.
        if let Some(to) = chosen.intersection(&now.voters).next() {
            return Some(Change::HandOver(*to));
        }
    }
    Some(Change::Voters(chosen))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ids: &[u64]) -> BTreeSet<u64> {
        ids.iter().copied().collect()
    }

    #[test]
    fn the_next_change() {
        let voters = |ids| Some(Change::Voters(set(ids)));
        type Case<'a> =
            (&'a str, &'a [u64], &'a [(u64, bool)], &'a [u64], &'a [u64], usize, u64, Option<Change>);
        let three = &[1, 2, 3];
        let cases: [Case<'_>; 17] = [
            ("one node", &[1], &[], &[1], &[], 1, 1, None),
            ("a second node is let in", &[1], &[], &[1, 2], &[], 2, 1, Some(Change::Learn(2))),
            ("a second node only learns", &[1], &[(2, true)], &[1, 2], &[], 2, 1, None),
            ("a third one lags", &[1], &[(2, true), (3, false)], three, &[], 3, 1, None),
            ("all at once", &[1], &[(2, true), (3, true)], three, &[], 3, 1, voters(three)),
            ("a fourth learns", three, &[(4, true)], &[1, 2, 3, 4], &[], 4, 1, None),
            ("five", three, &[(4, true), (5, true)], &[1, 2, 3, 4, 5], &[], 5, 1, voters(&[1, 2, 3, 4, 5])),
            ("replaced, nobody came", three, &[], &[1, 2], &[3], 3, 1, None),
            ("replaced, successor came", three, &[], &[1, 2, 4], &[3], 3, 1, Some(Change::Learn(4))),
            ("replaced, successor lags", three, &[(4, false)], &[1, 2, 4], &[3], 3, 1, None),
            ("replaced, successor ready", three, &[(4, true)], &[1, 2, 4], &[3], 3, 1, voters(&[1, 2, 4])),
            ("removed, two are left", three, &[], &[1, 2], &[3], 2, 2, voters(&[2])),
            ("the leader is removed", three, &[], &[2, 3], &[1], 2, 1, Some(Change::HandOver(2))),
            ("the only voter is removed", &[1], &[(2, true)], &[2], &[1], 1, 1, voters(&[2])),
            ("a removed learner", &[1], &[(9, true)], &[1], &[9], 1, 1, Some(Change::Forget(9))),
            ("an etcd client's learner", &[1], &[(9, true)], &[1], &[], 1, 1, None),
            (
                "an etcd client's learner gets no vote",
                &[1],
                &[(2, true), (9, true)],
                &[1, 2],
                &[],
                3,
                1,
                None,
            ),
        ];
        for (name, voters, learners, nodes, gone, count, leader, wanted) in cases {
            let now = Situation {
                voters: set(voters),
                unfinished: None,
                learners: learners.iter().copied().collect(),
                nodes: set(nodes),
                gone: set(gone),
                leaving: BTreeSet::new(),
                count,
                leader,
            };
            assert_eq!(plan(&now), wanted, "{name}");
        }
    }

    #[test]
    fn a_member_that_an_etcd_client_removed_has_no_vote_and_gets_none_again() {
        let mut now = Situation {
            voters: set(&[1, 2, 3]),
            nodes: set(&[1, 2, 3]),
            leaving: set(&[1]),
            count: 2,
            leader: 1,
            ..Situation::default()
        };
        assert_eq!(plan(&now), Some(Change::HandOver(2)), "a leader hands over first");
        now.leader = 2;
        assert_eq!(plan(&now), Some(Change::Voters(set(&[2]))));
        now.voters = set(&[2]);
        now.learners = [(1, true), (3, true)].into();
        assert_eq!(plan(&now), None, "it stays without a vote while its node is emptied");
        now.learners.insert(4, true);
        now.nodes.insert(4);
        now.count = 3;
        assert_eq!(plan(&now), Some(Change::Voters(set(&[2, 3, 4]))), "others get the vote");
        now.leaving = set(&[]);
        now.gone = set(&[1]);
        assert_eq!(plan(&now), Some(Change::Forget(1)), "until the node is empty");
    }

    #[test]
    fn a_change_that_was_begun_is_finished_first() {
        // One voter was to become three, and the leader died between the two steps: all three are told as voters, so
        // it looks as if there were nothing to do.
        let mut now = Situation {
            voters: set(&[1, 2, 3]),
            unfinished: Some(set(&[1, 2, 3])),
            nodes: set(&[1, 2, 3]),
            count: 3,
            leader: 1,
            ..Situation::default()
        };
        assert_eq!(plan(&now), Some(Change::Voters(set(&[1, 2, 3]))));
        // The same with 1, 2, 3 on the way to 1, 2, 4; it comes before another node's turn.
        now.voters = set(&[1, 2, 3, 4]);
        now.unfinished = Some(set(&[1, 2, 4]));
        now.nodes = set(&[1, 2, 4, 5]);
        now.gone = set(&[3]);
        assert_eq!(plan(&now), Some(Change::Voters(set(&[1, 2, 4]))));
        now.unfinished = None;
        assert_eq!(plan(&now), Some(Change::Learn(5)));
    }

    #[test]
    fn an_even_number_is_never_chosen() {
        for count in 1..20 {
            assert_eq!(wanted(count) % 2, 1, "{count}");
            assert!(wanted(count) <= count.max(1));
        }
    }
}
