//! Plan of the coordination group's voters: a pure function.
//!
//! The number of voters follows the number of nodes: one, three from three nodes on, five from five on. It is never
//! even, because an even number tolerates no more failures than the odd number below it. Voters change in one step from
//! one set to another (joint consensus), so the number is right at every moment: one voter becomes three when two
//! learners are ready, and a replaced voter leaves when its successor is ready.
//!
//! Must never: promote a learner that lags, demote a working voter while enough voters work, or leave a membership
//! change unfinished.

use std::collections::{BTreeMap, BTreeSet};

/// Members of the group and nodes of the cluster: the input of the plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Situation {
    /// Current voters.
    pub(crate) voters: BTreeSet<u64>,
    /// Target voters of an unfinished membership change; `voters` then contains the voters of both configurations.
    pub(crate) unfinished: Option<BTreeSet<u64>>,
    /// Learners, with true for one that is live and nearly caught up.
    pub(crate) learners: BTreeMap<u64, bool>,
    /// Voter ids of the cluster's nodes.
    pub(crate) nodes: BTreeSet<u64>,
    /// Voter ids of nodes that were removed or replaced. A member in neither set was added by an etcd client and stays
    /// unchanged.
    pub(crate) gone: BTreeSet<u64>,
    /// Voter ids that an etcd client removed: they lose their vote and stay learners until their nodes are drained.
    pub(crate) leaving: BTreeSet<u64>,
    /// Number of nodes, including nodes that wait for a replacement, without nodes that leave.
    pub(crate) count: usize,
    /// Voter id of the leader.
    pub(crate) leader: u64,
}

/// A membership change of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Adds an admitted node as a learner.
    Learn(u64),
    /// Sets the voters.
    Voters(BTreeSet<u64>),
    /// Removes a learner whose node was removed or replaced.
    Forget(u64),
    /// Transfers the leadership to this voter, because the leader leaves.
    HandOver(u64),
}

/// Number of voters for a number of nodes.
pub(crate) fn wanted(nodes: usize) -> usize {
    match nodes {
        0..=2 => 1,
        3..=4 => 3,
        _ => 5,
    }
}

/// The next change, if one is due.
pub(crate) fn plan(now: &Situation) -> Option<Change> {
    // First: an unfinished change needs a majority of both configurations, so it may tolerate no failure at all.
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
        // The leader stays, because it is known to work.
        let last = chosen.iter().rev().copied().find(|id| *id != now.leader)?;
        chosen.remove(&last);
    }
    if chosen.len() < wanted || chosen == now.voters {
        // Not enough learners are ready, or the voters are as planned.
        return None;
    }
    if !chosen.contains(&now.leader) {
        // A leader that leaves transfers the leadership first, if a remaining voter can lead already: this avoids the
        // wait for an election.
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
    fn next_membership_change() {
        let voters = |ids| Some(Change::Voters(set(ids)));
        type Case<'a> =
            (&'a str, &'a [u64], &'a [(u64, bool)], &'a [u64], &'a [u64], usize, u64, Option<Change>);
        let three = &[1, 2, 3];
        let cases: [Case<'_>; 17] = [
            ("one node", &[1], &[], &[1], &[], 1, 1, None),
            ("a second node is admitted", &[1], &[], &[1, 2], &[], 2, 1, Some(Change::Learn(2))),
            ("a second node stays a learner", &[1], &[(2, true)], &[1, 2], &[], 2, 1, None),
            ("a third node lags", &[1], &[(2, true), (3, false)], three, &[], 3, 1, None),
            ("three voters at once", &[1], &[(2, true), (3, true)], three, &[], 3, 1, voters(three)),
            ("a fourth node stays a learner", three, &[(4, true)], &[1, 2, 3, 4], &[], 4, 1, None),
            ("five", three, &[(4, true), (5, true)], &[1, 2, 3, 4, 5], &[], 5, 1, voters(&[1, 2, 3, 4, 5])),
            ("replaced, no successor", three, &[], &[1, 2], &[3], 3, 1, None),
            ("replaced, successor admitted", three, &[], &[1, 2, 4], &[3], 3, 1, Some(Change::Learn(4))),
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
    fn member_removed_by_an_etcd_client_loses_its_vote_for_good() {
        let mut now = Situation {
            voters: set(&[1, 2, 3]),
            nodes: set(&[1, 2, 3]),
            leaving: set(&[1]),
            count: 2,
            leader: 1,
            ..Situation::default()
        };
        assert_eq!(plan(&now), Some(Change::HandOver(2)), "the leader transfers its leadership first");
        now.leader = 2;
        assert_eq!(plan(&now), Some(Change::Voters(set(&[2]))));
        now.voters = set(&[2]);
        now.learners = [(1, true), (3, true)].into();
        assert_eq!(plan(&now), None, "it stays a learner while its node is drained");
        now.learners.insert(4, true);
        now.nodes.insert(4);
        now.count = 3;
        assert_eq!(plan(&now), Some(Change::Voters(set(&[2, 3, 4]))), "other learners become voters");
        now.leaving = set(&[]);
        now.gone = set(&[1]);
        assert_eq!(plan(&now), Some(Change::Forget(1)), "removed once its node is drained");
    }

    #[test]
    fn unfinished_membership_change_is_completed_first() {
        // One voter was to become three, and the leader failed in the joint configuration: it reports all three as
        // voters, as if the change were complete.
        let mut now = Situation {
            voters: set(&[1, 2, 3]),
            unfinished: Some(set(&[1, 2, 3])),
            nodes: set(&[1, 2, 3]),
            count: 3,
            leader: 1,
            ..Situation::default()
        };
        assert_eq!(plan(&now), Some(Change::Voters(set(&[1, 2, 3]))));
        // The same for 1, 2, 3 to 1, 2, 4; it comes before the admission of another node.
        now.voters = set(&[1, 2, 3, 4]);
        now.unfinished = Some(set(&[1, 2, 4]));
        now.nodes = set(&[1, 2, 4, 5]);
        now.gone = set(&[3]);
        assert_eq!(plan(&now), Some(Change::Voters(set(&[1, 2, 4]))));
        now.unfinished = None;
        assert_eq!(plan(&now), Some(Change::Learn(5)));
    }

    #[test]
    fn number_of_voters_is_always_odd() {
        for count in 1..20 {
            assert_eq!(wanted(count) % 2, 1, "{count}");
            assert!(wanted(count) <= count.max(1));
        }
    }
}
