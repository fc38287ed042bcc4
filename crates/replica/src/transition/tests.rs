//! Table of changes, each in the short form `isr=.. elr=.. last=.. leader=..`.

use super::*;

const ID: PartitionId = PartitionId { topic: moim_base::TopicId(1), index: 0 };

fn member(node: i32) -> InSync {
    (node, 100 + i64::from(node), node as u64).into()
}

fn start(isr: &[i32], eligible: &[i32], min_isr: u32) -> Versioned<PartitionState> {
    let mut state = PartitionState::new(vec![member(1), member(2), member(3)], min_isr, Durability::Fsync);
    state.isr = isr.iter().map(|node| member(*node)).collect();
    state.eligible = eligible.iter().map(|node| member(*node)).collect();
    state.leader = state.isr.first().map(|member| member.node);
    state.leader_epoch = LeaderEpoch(5);
    state.check().unwrap();
    Versioned { revision: 40, value: state }
}

fn show(state: &PartitionState) -> String {
    let nodes = |members: &[InSync]| members.iter().map(|m| m.node.to_string()).collect::<Vec<_>>().join(",");
    format!(
        "isr={} elr={} last={} leader={} epoch={}",
        nodes(&state.isr),
        nodes(&state.eligible),
        nodes(&state.last_known),
        state.leader.map_or("-".into(), |leader| leader.to_string()),
        state.leader_epoch
    )
}

fn check(from: &Versioned<PartitionState>, steps: impl FnOnce(&mut Draft), expected: &str) -> Change {
    let mut draft = Draft::new(from);
    steps(&mut draft);
    let change = draft.finish(ID).expect("something changes");
    assert_eq!(show(change.next.as_ref().unwrap()), expected);
    assert_eq!(change.expected, Expected::Revision(40));
    assert_eq!(change.next.as_ref().unwrap().version, from.value.version + 1);
    change
}

#[test]
fn replica_leaving_isr_above_minimum_is_not_eligible() {
    let from = start(&[1, 2, 3], &[], 2);
    check(&from, |d| d.lose(BrokerId(3)), "isr=1,2 elr= last= leader=1 epoch=5");
}

#[test]
fn replica_leaving_isr_below_minimum_is_eligible() {
    check(&start(&[1, 2], &[], 2), |d| d.lose(BrokerId(2)), "isr=1 elr=2 last= leader=1 epoch=5");
    let both = |d: &mut Draft| {
        d.lose(BrokerId(3));
        d.lose(BrokerId(2));
    };
    check(&start(&[1, 2, 3], &[], 2), both, "isr=1 elr=2,3 last= leader=1 epoch=5");
    // The last in-sync replica leaves too: a leader with a minimum of one may have committed alone.
    check(&start(&[1], &[], 1), |d| d.lose(BrokerId(1)), "isr= elr=1 last= leader=- epoch=5");
}

#[test]
fn isr_at_minimum_empties_the_eligible_set() {
    let change = check(
        &start(&[1], &[2, 3], 2),
        |d| d.join((3, 700, 3).into()),
        "isr=1,3 elr= last= leader=1 epoch=5",
    );
    assert_eq!(change.members, [(BrokerId(3), BrokerEpoch(700))], "the added member's run is compared");
}

#[test]
fn eligible_replica_is_elected_only_when_isr_is_empty() {
    let mut draft = Draft::new(&start(&[1], &[2, 3], 2));
    assert!(!draft.elect(BrokerId(2)), "node 1 may have more");
    let elect = |d: &mut Draft| {
        d.lose(BrokerId(1));
        assert!(d.elect(BrokerId(2)));
    };
    let change = check(&start(&[1], &[2, 3], 2), elect, "isr=2 elr=1,3 last= leader=2 epoch=6");
    assert_eq!(change.members, [(BrokerId(2), BrokerEpoch(102))], "the elected member's run is compared");
}

#[test]
fn replica_that_left_isr_above_minimum_is_never_elected() {
    let mut draft = Draft::new(&start(&[1, 2], &[], 2));
    draft.lose(BrokerId(1));
    draft.lose(BrokerId(2));
    assert!(!draft.elect(BrokerId(3)));
}

#[test]
fn lowering_min_isr_empties_the_eligible_set_in_the_same_write() {
    check(&start(&[1], &[2], 2), |d| d.set_min_isr(1), "isr=1 elr= last= leader=1 epoch=5");
    // Without an in-sync replica nothing was committed under the lower minimum yet.
    check(&start(&[], &[1, 2], 2), |d| d.set_min_isr(1), "isr= elr=1,2 last= leader=- epoch=5");
}

#[test]
fn leader_in_a_new_run_keeps_its_isr_entry_but_not_its_leadership() {
    let from = start(&[1, 2, 3], &[], 2);
    let change = check(&from, |d| d.restamp((1, 900, 1).into()), "isr=1,2,3 elr= last= leader=- epoch=5");
    assert_eq!(change.next.unwrap().in_sync(BrokerId(1)).unwrap().epoch, BrokerEpoch(900));
    let again = |d: &mut Draft| {
        d.restamp((1, 900, 1).into());
        assert!(d.elect(BrokerId(1)));
    };
    check(&from, again, "isr=1,2,3 elr= last= leader=1 epoch=6");
}

#[test]
fn distrusted_replicas_stay_last_known_until_commits_resume() {
    let from = start(&[], &[1, 2, 3], 2);
    let first = check(&from, |d| d.distrust((1, 900, 1).into()), "isr= elr=2,3 last=1 leader=- epoch=5");
    let mut next = Versioned { revision: 40, value: first.next.unwrap() };
    for node in [2, 3] {
        let mut draft = Draft::new(&next);
        draft.distrust((node, 900, node as u64).into());
        next.value = draft.finish(ID).unwrap().next.unwrap();
    }
    assert_eq!(show(&next.value), "isr= elr= last=3,2,1 leader=- epoch=5");
    let best = |d: &mut Draft| d.elect_out_of_sync((2, 900, 2).into(), false);
    let elected = check(&next, best, "isr=2 elr= last= leader=2 epoch=6");
    assert_eq!(elected.next.unwrap().unclean, None);
}

#[test]
fn replica_without_data_leaves_all_sets() {
    check(&start(&[1], &[2, 3], 3), |d| d.forget(BrokerId(2)), "isr=1 elr=3 last= leader=1 epoch=5");
    check(&start(&[1, 2], &[], 2), |d| d.forget(BrokerId(1)), "isr=2 elr= last= leader=- epoch=5");
}

#[test]
fn unclean_election_is_recorded() {
    let from = start(&[], &[1], 2);
    let change = check(&from, |d| d.elect_out_of_sync(member(3), true), "isr=3 elr= last= leader=3 epoch=6");
    assert_eq!(change.next.unwrap().unclean, Some(LeaderEpoch(6)));
}

#[test]
fn reassignment_adds_first_and_removes_once_target_is_in_sync() {
    let mut from = start(&[1, 2, 3], &[], 2);
    let target = [BrokerId(4), BrokerId(1)];
    let begun = check(&from, |d| assert!(d.begin_move(&target)), "isr=1,2,3 elr= last= leader=1 epoch=5");
    from.value = begun.next.unwrap();
    assert_eq!(from.value.replicas, [4, 1, 2, 3].map(BrokerId));
    assert_eq!((from.value.adding.len(), from.value.removing.len()), (1, 2));
    assert_eq!(from.value.effective_min(), 2, "the node that is added does not count yet");
    assert!(!Draft::new(&from).finish_move(1), "node 4 is not in sync");
    from.value.isr.push(member(4));
    let end = |d: &mut Draft| {
        assert!(d.finish_move(1));
        assert!(d.elect(BrokerId(4)));
    };
    let done = check(&from, end, "isr=1,4 elr= last= leader=4 epoch=6").next.unwrap();
    assert_eq!(done.replicas, [4, 1].map(BrokerId));
    assert!(!done.is_moving());
    assert_eq!(done.min_isr, 1);
}

#[test]
fn reassignment_can_be_cancelled_unless_only_new_replicas_are_in_sync() {
    let mut from = start(&[1, 2, 3], &[], 2);
    let mut draft = Draft::new(&from);
    assert!(draft.begin_move(&[BrokerId(4)]));
    from.value = draft.finish(ID).unwrap().next.unwrap();
    from.value.isr = vec![member(1), member(4)];
    let back = check(&from, |d| assert!(d.cancel_move()), "isr=1 elr= last= leader=1 epoch=6").next.unwrap();
    assert_eq!(back.replicas, [1, 2, 3].map(BrokerId));
    from.value.isr = vec![member(4)];
    from.value.leader = Some(BrokerId(4));
    assert!(!Draft::new(&from).cancel_move());
}

#[test]
fn leader_outside_the_reassignment_target_loses_leadership() {
    let mut from = start(&[1, 2, 3], &[], 2);
    let mut draft = Draft::new(&from);
    assert!(draft.begin_move(&[BrokerId(2), BrokerId(3)]));
    from.value = draft.finish(ID).unwrap().next.unwrap();
    check(&from, |d| assert!(d.finish_move(2)), "isr=2,3 elr= last= leader=- epoch=6");
}

#[test]
fn draft_without_changes_yields_no_change() {
    let from = start(&[1, 2, 3], &[], 2);
    assert_eq!(Draft::new(&from).finish(ID), None);
    let mut draft = Draft::new(&from);
    draft.set_min_isr(2);
    assert_eq!(draft.finish(ID), None);
}

#[test]
fn lost_leadership_changes_the_fence_key_unless_released() {
    let from = start(&[1, 2, 3], &[], 2);
    let taken = check(&from, |d| assert!(d.elect(BrokerId(2))), "isr=1,2,3 elr= last= leader=2 epoch=6");
    assert_eq!(taken.fence, Some(BrokerId(1)));
    assert!(!taken.next.unwrap().follows_a_release());
    let again = check(&from, |d| assert!(d.elect(BrokerId(1))), "isr=1,2,3 elr= last= leader=1 epoch=6");
    assert_eq!(again.fence, None, "the same node");
    let given = check(&from, |d| d.release(), "isr=1,2,3 elr= last= leader=- epoch=5");
    assert_eq!(given.fence, None);
    let next = Versioned { revision: 40, value: given.next.unwrap() };
    let taken = check(&next, |d| assert!(d.elect(BrokerId(3))), "isr=1,2,3 elr= last= leader=3 epoch=6");
    assert_eq!(taken.fence, None);
    assert!(taken.next.unwrap().follows_a_release());
}
