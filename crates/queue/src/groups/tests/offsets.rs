//! Offsets: commits, transactions, deletion, expiry.

use std::sync::Arc;

use super::harness::{Harness, commit_topics, config, join, simple_commit};
use crate::groups::*;

const DAY: u64 = 24 * 3_600_000;

fn fetch(harness: &Harness, topic: &str, partition: i32, require_stable: bool) -> FetchedOffset {
    let topics = Some(vec![(topic.into(), vec![partition])]);
    let mut fetched = harness.groups.offset_fetch(&OffsetFetch { group: "g".into(), topics, require_stable });
    fetched.topics.remove(0).partitions.remove(0)
}

fn offset(harness: &Harness, partition: i32) -> i64 {
    fetch(harness, "t", partition, false).offset
}

fn commit(harness: &mut Harness, offsets: &[(&str, i32, i64)]) -> ErrorCode {
    let response = harness.ask_now(|token| Input::OffsetCommit(token, simple_commit("g", offsets)));
    first_error(&response)
}

fn first_error(response: &Response) -> ErrorCode {
    let Response::OffsetCommit(topics) = response else { panic!("not a commit: {response:?}") };
    topics[0].partitions[0].1
}

const PRODUCER: TxnProducer = TxnProducer { id: 9, epoch: 1 };

fn txn_commit(offsets: &[(&str, i32, i64)]) -> TxnOffsetCommit {
    TxnOffsetCommit {
        producer: PRODUCER,
        group: "g".into(),
        generation: -1,
        member_id: Arc::default(),
        instance_id: None,
        topics: commit_topics(offsets),
    }
}

/// A stable group of one member that reads topic `t`; returns the member id.
fn stable(harness: &mut Harness, protocol_type: &str) -> Arc<str> {
    let mut request = join("g", "a", &Arc::default(), &["t"]);
    request.protocol_type = protocol_type.into();
    let Response::Join(joined) = harness.ask_now(|token| Input::Join(token, request)) else { panic!() };
    let sync = Sync {
        group: "g".into(),
        generation: joined.generation,
        member_id: joined.member_id.clone(),
        instance_id: None,
        protocol_type: None,
        protocol: None,
        assignments: Vec::new(),
    };
    harness.ask_now(|token| Input::Sync(token, sync));
    joined.member_id
}

fn leave(harness: &mut Harness, member_id: &Arc<str>) {
    let member = LeavingMember { member_id: member_id.clone(), instance_id: None, reason: None };
    let request = Leave { group: "g".into(), members: vec![member] };
    harness.ask_now(|token| Input::Leave(token, request));
}

fn assert_reloads(harness: &Harness) {
    assert_eq!(harness.reload().image(), harness.groups.image());
}

#[test]
fn commit_is_fetched_with_metadata_and_leader_epoch() {
    let mut harness = Harness::new(config());
    assert_eq!(commit(&mut harness, &[("t", 0, 5), ("t", 1, 6)]), ErrorCode::None);
    let fetched = fetch(&harness, "t", 1, true);
    assert_eq!((fetched.offset, fetched.leader_epoch, fetched.metadata.as_str()), (6, 3, "at 6"));
    let missing = fetch(&harness, "t", 2, true);
    assert_eq!((missing.offset, missing.leader_epoch, missing.error), (-1, -1, ErrorCode::None));
    assert_reloads(&harness);
}

#[test]
fn oversized_metadata_fails_only_its_partition() {
    let mut harness = Harness::new(Config { max_offset_metadata: 5, ..config() });
    let request = simple_commit("g", &[("t", 0, 7), ("t", 1, 100)]);
    let response = harness.ask_now(|token| Input::OffsetCommit(token, request));
    let Response::OffsetCommit(topics) = response else { panic!() };
    assert_eq!(topics[0].partitions, [(0, ErrorCode::None)]);
    assert_eq!(topics[1].partitions, [(1, ErrorCode::OffsetMetadataTooLarge)]);
    assert_eq!((offset(&harness, 0), offset(&harness, 1)), (7, -1));
}

#[test]
fn commit_is_invisible_and_unanswered_until_it_is_written() {
    let mut harness = Harness::new(config());
    let token = harness.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", 0, 5)])));
    assert_eq!((harness.take(token), offset(&harness, 0)), (None, -1));
    harness.write_all();
    assert!(harness.take(token).is_some());
    assert_eq!(offset(&harness, 0), 5);
}

#[test]
fn transaction_outcome_decides_its_offsets() {
    for commits in [true, false] {
        let mut harness = Harness::new(config());
        commit(&mut harness, &[("t", 0, 5)]);
        let response = harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
        assert_eq!(first_error(&response), ErrorCode::None);
        assert_eq!(offset(&harness, 0), 5);
        assert_eq!(fetch(&harness, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
        assert_eq!(fetch(&harness, "t", 1, true).error, ErrorCode::None);
        assert_reloads(&harness);
        harness.marker(PRODUCER, commits);
        harness.write_all();
        assert_eq!(offset(&harness, 0), if commits { 8 } else { 5 });
        assert_eq!(fetch(&harness, "t", 0, true).error, ErrorCode::None);
        assert_reloads(&harness);
    }
}

#[test]
fn later_plain_commit_wins_over_the_transaction() {
    let mut harness = Harness::new(config());
    harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    commit(&mut harness, &[("t", 0, 9)]);
    harness.marker(PRODUCER, true);
    harness.write_all();
    assert_eq!(offset(&harness, 0), 9);
    assert_reloads(&harness);
}

#[test]
fn marker_before_the_write_completion_is_applied() {
    for commits in [true, false] {
        let mut groups = Groups::new(config(), 1);
        let effects = groups.txn_offset_commit(0, Token(1), txn_commit(&[("t", 0, 8)]));
        let [Effect::Persist { then, .. }] = effects[..] else { panic!("{effects:?}") };
        let before = groups.begin_txn_marker();
        groups.on_txn_marker(PRODUCER.id, before, commits);
        assert_eq!(groups.on_persisted(0, then, Ok(())).len(), 1);
        let all = OffsetFetch { group: "g".into(), topics: None, require_stable: true };
        assert_eq!(groups.offset_fetch(&all).topics.len(), usize::from(commits));
        assert!(groups.txns.is_empty());
    }
}

#[test]
fn failed_transactional_write_leaves_nothing_open() {
    let mut harness = Harness::new(config());
    let token = harness.ask(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    assert_eq!(fetch(&harness, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
    harness.write_one(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(first_error(&harness.take(token).unwrap()), ErrorCode::CoordinatorNotAvailable);
    assert_eq!(fetch(&harness, "t", 0, true).error, ErrorCode::None);
    assert!(harness.groups.txns.is_empty());
}

#[test]
fn marker_of_another_partition_leaves_the_group_alone() {
    let mut harness = Harness::new(config());
    harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    let before = harness.groups.begin_txn_marker();
    harness.groups.on_txn_marker_in(PRODUCER.id, before, true, |group| group != "g");
    assert_eq!(offset(&harness, 0), -1);
    harness.groups.on_txn_marker_in(PRODUCER.id, before, true, |group| group == "g");
    assert_eq!(offset(&harness, 0), 8);
}

#[test]
fn late_marker_leaves_offsets_of_the_next_transaction_pending() {
    let mut harness = Harness::new(config());
    harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    // Sent twice; the next transaction begins when the second one is committed, before the first is reported.
    let first = harness.groups.begin_txn_marker();
    let second = harness.groups.begin_txn_marker();
    harness.groups.on_txn_marker(PRODUCER.id, second, true);
    assert_eq!(offset(&harness, 0), 8);
    harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 9)])));
    harness.groups.on_txn_marker(PRODUCER.id, first, true);
    assert_eq!(offset(&harness, 0), 8, "the next transaction is undecided");
    assert_eq!(fetch(&harness, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
}

#[test]
fn transactional_commit_checks_the_member_it_names() {
    let mut harness = Harness::new(config());
    let member = stable(&mut harness, "consumer");
    for (generation, member_id, expected) in [
        (-1, Arc::default(), ErrorCode::None),
        (1, member.clone(), ErrorCode::None),
        (2, member, ErrorCode::IllegalGeneration),
        (1, "stranger".into(), ErrorCode::UnknownMemberId),
    ] {
        let request = TxnOffsetCommit { generation, member_id, ..txn_commit(&[("t", 0, 1)]) };
        let response = harness.ask_now(|token| Input::TxnOffsetCommit(token, request));
        assert_eq!(first_error(&response), expected);
    }
}

fn offset_delete(harness: &mut Harness, topics: &[(&str, i32)]) -> OffsetDeleteResponse {
    let topics = topics.iter().map(|(topic, partition)| ((*topic).into(), vec![*partition])).collect();
    let request = OffsetDelete { group: "g".into(), topics };
    let response = harness.ask_now(|token| Input::OffsetDelete(token, request));
    let Response::OffsetDelete(response) = response else { panic!() };
    response
}

#[test]
fn offsets_of_subscribed_topics_cannot_be_deleted() {
    let mut harness = Harness::new(config());
    assert_eq!(offset_delete(&mut harness, &[("t", 0)]).error, ErrorCode::GroupIdNotFound);
    commit(&mut harness, &[("t", 0, 5), ("u", 0, 6)]);
    let member = stable(&mut harness, "consumer");
    let response = offset_delete(&mut harness, &[("t", 0), ("u", 0)]);
    assert_eq!(response.topics[0].partitions, [(0, ErrorCode::GroupSubscribedToTopic)]);
    assert_eq!(response.topics[1].partitions, [(0, ErrorCode::None)]);
    assert_eq!((offset(&harness, 0), fetch(&harness, "u", 0, false).offset), (5, -1));
    assert_reloads(&harness);
    leave(&mut harness, &member);
    assert_eq!(offset_delete(&mut harness, &[("t", 0)]).topics[0].partitions, [(0, ErrorCode::None)]);
    assert_eq!(offset(&harness, 0), -1);
    assert_reloads(&harness);
}

#[test]
fn offsets_of_live_non_consumer_group_are_kept() {
    let mut harness = Harness::new(config());
    stable(&mut harness, "connect");
    assert_eq!(offset_delete(&mut harness, &[("t", 0)]).error, ErrorCode::NonEmptyGroup);
}

#[test]
fn failed_deletion_write_deletes_nothing() {
    let mut harness = Harness::new(config());
    commit(&mut harness, &[("t", 0, 5)]);
    let delete = harness.ask(|token| Input::DeleteGroups(token, vec!["g".into(), "h".into()]));
    harness.write_one(Err(ErrorCode::KafkaStorageError));
    let expected = [("g".into(), ErrorCode::NotCoordinator), ("h".into(), ErrorCode::GroupIdNotFound)];
    assert_eq!(harness.take(delete), Some(Response::DeleteGroups(expected.into())));
    assert_eq!(offset(&harness, 0), 5);
    assert_reloads(&harness);
}

#[test]
fn deletion_covers_commits_in_flight_and_spares_later_ones() {
    let mut harness = Harness::new(config());
    for (before, after) in [(0, 1), (1, 0)] {
        harness.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", before, 5)])));
        harness.ask(|token| Input::DeleteGroups(token, vec!["g".into()]));
        harness.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", after, 6)])));
        harness.write_all();
        assert_eq!((offset(&harness, before), offset(&harness, after)), (-1, 6));
        assert_eq!(harness.unanswered(), 0);
        assert_reloads(&harness);
    }
}

#[test]
fn open_transaction_outlives_the_deletion_of_its_group() {
    let mut harness = Harness::new(config());
    commit(&mut harness, &[("t", 1, 5)]);
    harness.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    harness.ask_now(|token| Input::DeleteGroups(token, vec!["g".into()]));
    assert_reloads(&harness);
    harness.marker(PRODUCER, true);
    harness.write_all();
    assert_eq!((offset(&harness, 0), offset(&harness, 1)), (8, -1));
    assert_reloads(&harness);
}

#[test]
fn offsets_of_deleted_topic_are_removed() {
    let mut harness = Harness::new(config());
    commit(&mut harness, &[("t", 0, 5), ("u", 0, 6)]);
    harness.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", 1, 7)])));
    let token = harness.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("u", 1, 7)])));
    harness.topic_deleted("t");
    harness.write_all();
    assert!(harness.take(token).is_some());
    assert_eq!((offset(&harness, 0), offset(&harness, 1)), (-1, -1));
    assert_eq!(fetch(&harness, "u", 1, false).offset, 7);
    assert_reloads(&harness);
}

/// Advances time by days, with the sweeps and writes they trigger.
fn days(harness: &mut Harness, days: u64) {
    for _ in 0..days * 24 {
        harness.advance(DAY / 24);
        harness.write_all();
    }
}

#[test]
fn offsets_without_members_expire_by_their_own_age() {
    let mut harness = Harness::new(config());
    commit(&mut harness, &[("t", 0, 5)]);
    days(&mut harness, 4);
    commit(&mut harness, &[("t", 1, 6)]);
    days(&mut harness, 4);
    assert_eq!((offset(&harness, 0), offset(&harness, 1)), (-1, 6));
    assert_reloads(&harness);
    days(&mut harness, 4);
    assert!(harness.groups.is_empty());
    assert!(harness.reload().is_empty());
    assert_eq!(harness.groups.next_deadline(), None);
}

#[test]
fn offsets_of_an_empty_group_expire_from_the_day_it_became_empty() {
    let mut harness = Harness::new(config());
    let member = stable(&mut harness, "consumer");
    let request = OffsetCommit {
        generation: 1,
        member_id: member.clone(),
        ..simple_commit("g", &[("t", 0, 5), ("u", 0, 6)])
    };
    harness.ask_now(|token| Input::OffsetCommit(token, request));
    for _ in 0..8 * 24 * 3600 / 9 {
        harness.groups.heartbeat(harness.now, "g", 1, &member, None);
        harness.advance(9_000);
        harness.write_all();
    }
    // The group has a member: only the offset of the unsubscribed topic has expired.
    assert_eq!((offset(&harness, 0), fetch(&harness, "u", 0, false).offset), (5, -1));
    leave(&mut harness, &member);
    harness.restart();
    days(&mut harness, 6);
    assert_eq!(offset(&harness, 0), 5);
    days(&mut harness, 2);
    assert_eq!(offset(&harness, 0), -1);
    assert!(harness.groups.is_empty() && harness.reload().is_empty());
}

#[test]
fn client_retention_is_applied() {
    let mut harness = Harness::new(config());
    let request = OffsetCommit { retention_ms: Some(DAY as i64), ..simple_commit("g", &[("t", 0, 5)]) };
    harness.ask_now(|token| Input::OffsetCommit(token, request));
    commit(&mut harness, &[("t", 1, 6)]);
    days(&mut harness, 2);
    assert_eq!((offset(&harness, 0), offset(&harness, 1)), (-1, 6));
    assert_reloads(&harness);
}

#[test]
fn waiting_requests_get_not_coordinator_on_unload() {
    let mut harness = Harness::new(config());
    stable(&mut harness, "consumer");
    let joining = harness.ask(|token| Input::Join(token, join("g", "b", &Arc::default(), &["t"])));
    let committing = harness.ask(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 1)])));
    harness.unload();
    let Some(Response::Join(refusal)) = harness.take(joining) else { panic!("still waiting") };
    assert_eq!(refusal.error, ErrorCode::NotCoordinator);
    assert_eq!(first_error(&harness.take(committing).unwrap()), ErrorCode::NotCoordinator);
    harness.write_all();
    assert_eq!(harness.unanswered(), 0);
    assert!(harness.groups.is_empty() && harness.groups.txns.is_empty());
}

#[test]
fn listing_filters_by_state_and_type_without_case() {
    let mut harness = Harness::new(config());
    stable(&mut harness, "consumer");
    harness.ask_now(|token| Input::OffsetCommit(token, simple_commit("h", &[("t", 0, 1)])));
    let names = |states: &[&str], types: &[&str]| -> Vec<String> {
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let listed = harness.groups.list(&ListFilter { states: own(states), types: own(types) });
        listed.iter().map(|line| format!("{}:{}", line.group, line.state.name())).collect()
    };
    assert_eq!(names(&[], &[]), ["g:Stable", "h:Empty"]);
    assert_eq!(names(&["empty"], &["Classic"]), ["h:Empty"]);
    assert!(names(&[], &["consumer"]).is_empty());
    let unknown = harness.groups.describe(&"missing".into());
    assert_eq!((unknown.error, unknown.state), (ErrorCode::GroupIdNotFound, State::Dead));
}

#[test]
fn group_joined_during_its_deletion_is_kept() {
    let mut harness = Harness::new(config());
    let member = stable(&mut harness, "consumer");
    leave(&mut harness, &member);
    let delete = harness.ask(|token| Input::DeleteGroups(token, vec!["g".into()]));
    let joining = harness.ask(|token| Input::Join(token, join("g", "b", &Arc::default(), &["t"])));
    let Some(Response::Join(joined)) = harness.take(joining) else { panic!("still waiting") };
    assert_eq!(joined.generation, 3);
    leave(&mut harness, &joined.member_id);
    assert!(harness.take(delete).is_some());
    assert_eq!(harness.groups.describe(&"g".into()).state, State::Empty);
    assert!(!harness.groups.image().is_empty());
    assert_reloads(&harness);
}

#[test]
fn commit_after_deletion_survives_in_any_completion_order() {
    let mut groups = Groups::new(config(), 1);
    let write = |effects: Vec<Effect>| match effects[..] {
        [Effect::Persist { then, .. }] => then,
        _ => panic!("{effects:?}"),
    };
    let first = write(groups.offset_commit(0, Token(1), simple_commit("g", &[("t", 0, 5)])));
    groups.on_persisted(0, first, Ok(()));
    let delete = write(groups.delete_groups(0, Token(2), vec!["g".into()]));
    let second = write(groups.offset_commit(0, Token(3), simple_commit("g", &[("t", 0, 6)])));
    groups.on_persisted(0, second, Ok(()));
    groups.on_persisted(0, delete, Ok(()));
    let all = OffsetFetch { group: "g".into(), topics: None, require_stable: true };
    assert_eq!(groups.offset_fetch(&all).topics[0].partitions[0].offset, 6);
}

#[test]
fn rejected_requests_create_no_group() {
    let mut harness = Harness::new(config());
    let late = OffsetCommit { generation: 1, member_id: "m".into(), ..simple_commit("g", &[("t", 0, 5)]) };
    let response = harness.ask_now(|token| Input::OffsetCommit(token, late));
    assert_eq!(first_error(&response), ErrorCode::IllegalGeneration);
    let late = TxnOffsetCommit { generation: 1, member_id: "m".into(), ..txn_commit(&[("t", 0, 5)]) };
    let response = harness.ask_now(|token| Input::TxnOffsetCommit(token, late));
    assert_eq!(first_error(&response), ErrorCode::IllegalGeneration);
    let long = simple_commit(&"g".repeat(40_000), &[("t", 0, 5)]);
    let response = harness.ask_now(|token| Input::OffsetCommit(token, long));
    assert_eq!(first_error(&response), ErrorCode::InvalidGroupId);
    for (group, client, expected) in [
        ("", "c", ErrorCode::InvalidGroupId),
        (&*"g".repeat(40_000), "c", ErrorCode::InvalidGroupId),
        ("g", &*"c".repeat(40_000), ErrorCode::InvalidRequest),
    ] {
        let request = join(group, client, &Arc::default(), &["t"]);
        let Response::Join(refused) = harness.ask_now(|token| Input::Join(token, request)) else { panic!() };
        assert_eq!((refused.error, refused.generation), (expected, -1));
    }
    let request = Join { protocols: Vec::new(), ..join("g", "c", &Arc::default(), &["t"]) };
    let Response::Join(refused) = harness.ask_now(|token| Input::Join(token, request)) else { panic!() };
    assert_eq!(refused.error, ErrorCode::InconsistentGroupProtocol);
    assert!(harness.groups.is_empty());
}
