//! Offsets: commits, transactions, deletion, expiry.

use std::sync::Arc;

use super::world::{World, commit_topics, config, join, simple_commit};
use crate::groups::*;

const DAY: u64 = 24 * 3_600_000;

fn fetch(world: &World, topic: &str, partition: i32, require_stable: bool) -> FetchedOffset {
    let topics = Some(vec![(topic.into(), vec![partition])]);
    let mut fetched = world.groups.offset_fetch(&OffsetFetch { group: "g".into(), topics, require_stable });
    fetched.topics.remove(0).partitions.remove(0)
}

fn offset(world: &World, partition: i32) -> i64 {
    fetch(world, "t", partition, false).offset
}

fn commit(world: &mut World, offsets: &[(&str, i32, i64)]) -> ErrorCode {
    let response = world.ask_now(|token| Input::OffsetCommit(token, simple_commit("g", offsets)));
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

/// A stable group of one member that reads topic `t`; returns the member.
fn stable(world: &mut World, protocol_type: &str) -> Arc<str> {
    let mut request = join("g", "a", &Arc::default(), &["t"]);
    request.protocol_type = protocol_type.into();
    let Response::Join(joined) = world.ask_now(|token| Input::Join(token, request)) else { panic!() };
    let sync = Sync {
        group: "g".into(),
        generation: joined.generation,
        member_id: joined.member_id.clone(),
        instance_id: None,
        protocol_type: None,
        protocol: None,
        assignments: Vec::new(),
    };
    world.ask_now(|token| Input::Sync(token, sync));
    joined.member_id
}

fn leave(world: &mut World, member_id: &Arc<str>) {
    let member = LeavingMember { member_id: member_id.clone(), instance_id: None, reason: None };
    let request = Leave { group: "g".into(), members: vec![member] };
    world.ask_now(|token| Input::Leave(token, request));
}

fn assert_reloads(world: &World) {
    assert_eq!(world.reload().image(), world.groups.image());
}

#[test]
fn commit_comes_back_with_its_text_and_epoch() {
    let mut world = World::new(config());
    assert_eq!(commit(&mut world, &[("t", 0, 5), ("t", 1, 6)]), ErrorCode::None);
    let fetched = fetch(&world, "t", 1, true);
    assert_eq!((fetched.offset, fetched.leader_epoch, fetched.metadata.as_str()), (6, 3, "at 6"));
    let missing = fetch(&world, "t", 2, true);
    assert_eq!((missing.offset, missing.leader_epoch, missing.error), (-1, -1, ErrorCode::None));
    assert_reloads(&world);
}

#[test]
fn text_that_is_too_long_is_refused_for_its_partition_alone() {
    let mut world = World::new(Config { max_offset_metadata: 5, ..config() });
    let request = simple_commit("g", &[("t", 0, 7), ("t", 1, 100)]);
    let response = world.ask_now(|token| Input::OffsetCommit(token, request));
    let Response::OffsetCommit(topics) = response else { panic!() };
    assert_eq!(topics[0].partitions, [(0, ErrorCode::None)]);
    assert_eq!(topics[1].partitions, [(1, ErrorCode::OffsetMetadataTooLarge)]);
    assert_eq!((offset(&world, 0), offset(&world, 1)), (7, -1));
}

#[test]
fn commit_is_invisible_and_unanswered_until_it_is_written() {
    let mut world = World::new(config());
    let token = world.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", 0, 5)])));
    assert_eq!((world.take(token), offset(&world, 0)), (None, -1));
    world.write_all();
    assert!(world.take(token).is_some());
    assert_eq!(offset(&world, 0), 5);
}

#[test]
fn transaction_decides_over_its_offsets() {
    for commits in [true, false] {
        let mut world = World::new(config());
        commit(&mut world, &[("t", 0, 5)]);
        let response = world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
        assert_eq!(first_error(&response), ErrorCode::None);
        assert_eq!(offset(&world, 0), 5);
        assert_eq!(fetch(&world, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
        assert_eq!(fetch(&world, "t", 1, true).error, ErrorCode::None);
        assert_reloads(&world);
        world.marker(PRODUCER, commits);
        world.write_all();
        assert_eq!(offset(&world, 0), if commits { 8 } else { 5 });
        assert_eq!(fetch(&world, "t", 0, true).error, ErrorCode::None);
        assert_reloads(&world);
    }
}

#[test]
fn later_plain_commit_beats_the_transaction_it_overtook() {
    let mut world = World::new(config());
    world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    commit(&mut world, &[("t", 0, 9)]);
    world.marker(PRODUCER, true);
    world.write_all();
    assert_eq!(offset(&world, 0), 9);
    assert_reloads(&world);
}

#[test]
fn marker_that_arrives_before_the_news_of_the_write_still_counts() {
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
    let mut world = World::new(config());
    let token = world.ask(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    assert_eq!(fetch(&world, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
    world.write_one(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(first_error(&world.take(token).unwrap()), ErrorCode::CoordinatorNotAvailable);
    assert_eq!(fetch(&world, "t", 0, true).error, ErrorCode::None);
    assert!(world.groups.txns.is_empty());
}

#[test]
fn marker_of_another_partition_leaves_the_group_alone() {
    let mut world = World::new(config());
    world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    let before = world.groups.begin_txn_marker();
    world.groups.on_txn_marker_in(PRODUCER.id, before, true, |group| group != "g");
    assert_eq!(offset(&world, 0), -1);
    world.groups.on_txn_marker_in(PRODUCER.id, before, true, |group| group == "g");
    assert_eq!(offset(&world, 0), 8);
}

#[test]
fn marker_committed_late_leaves_the_offsets_of_the_next_transaction_open() {
    let mut world = World::new(config());
    world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    // Sent twice; the next transaction begins when the second one is committed, before the news of the first.
    let first = world.groups.begin_txn_marker();
    let second = world.groups.begin_txn_marker();
    world.groups.on_txn_marker(PRODUCER.id, second, true);
    assert_eq!(offset(&world, 0), 8);
    world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 9)])));
    world.groups.on_txn_marker(PRODUCER.id, first, true);
    assert_eq!(offset(&world, 0), 8, "nothing has decided over the next transaction");
    assert_eq!(fetch(&world, "t", 0, true).error, ErrorCode::UnstableOffsetCommit);
}

#[test]
fn transactional_commit_checks_the_member_it_names() {
    let mut world = World::new(config());
    let member = stable(&mut world, "consumer");
    for (generation, member_id, expected) in [
        (-1, Arc::default(), ErrorCode::None),
        (1, member.clone(), ErrorCode::None),
        (2, member, ErrorCode::IllegalGeneration),
        (1, "stranger".into(), ErrorCode::UnknownMemberId),
    ] {
        let request = TxnOffsetCommit { generation, member_id, ..txn_commit(&[("t", 0, 1)]) };
        let response = world.ask_now(|token| Input::TxnOffsetCommit(token, request));
        assert_eq!(first_error(&response), expected);
    }
}

fn offset_delete(world: &mut World, topics: &[(&str, i32)]) -> OffsetDeleteResponse {
    let topics = topics.iter().map(|(topic, partition)| ((*topic).into(), vec![*partition])).collect();
    let request = OffsetDelete { group: "g".into(), topics };
    let response = world.ask_now(|token| Input::OffsetDelete(token, request));
    let Response::OffsetDelete(response) = response else { panic!() };
    response
}

#[test]
fn offsets_of_subscribed_topics_cannot_be_deleted() {
    let mut world = World::new(config());
    assert_eq!(offset_delete(&mut world, &[("t", 0)]).error, ErrorCode::GroupIdNotFound);
    commit(&mut world, &[("t", 0, 5), ("u", 0, 6)]);
    let member = stable(&mut world, "consumer");
    let response = offset_delete(&mut world, &[("t", 0), ("u", 0)]);
    assert_eq!(response.topics[0].partitions, [(0, ErrorCode::GroupSubscribedToTopic)]);
    assert_eq!(response.topics[1].partitions, [(0, ErrorCode::None)]);
    assert_eq!((offset(&world, 0), fetch(&world, "u", 0, false).offset), (5, -1));
    assert_reloads(&world);
    leave(&mut world, &member);
    assert_eq!(offset_delete(&mut world, &[("t", 0)]).topics[0].partitions, [(0, ErrorCode::None)]);
    assert_eq!(offset(&world, 0), -1);
    assert_reloads(&world);
}

#[test]
fn offsets_of_a_live_group_that_is_no_consumer_stay() {
    let mut world = World::new(config());
    stable(&mut world, "connect");
    assert_eq!(offset_delete(&mut world, &[("t", 0)]).error, ErrorCode::NonEmptyGroup);
}

#[test]
fn deletion_that_is_not_written_deletes_nothing() {
    let mut world = World::new(config());
    commit(&mut world, &[("t", 0, 5)]);
    let delete = world.ask(|token| Input::DeleteGroups(token, vec!["g".into(), "h".into()]));
    world.write_one(Err(ErrorCode::KafkaStorageError));
    let expected = [("g".into(), ErrorCode::NotCoordinator), ("h".into(), ErrorCode::GroupIdNotFound)];
    assert_eq!(world.take(delete), Some(Response::DeleteGroups(expected.into())));
    assert_eq!(offset(&world, 0), 5);
    assert_reloads(&world);
}

#[test]
fn deletion_takes_commits_that_were_on_their_way_and_spares_those_after_it() {
    let mut world = World::new(config());
    for (before, after) in [(0, 1), (1, 0)] {
        world.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", before, 5)])));
        world.ask(|token| Input::DeleteGroups(token, vec!["g".into()]));
        world.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", after, 6)])));
        world.write_all();
        assert_eq!((offset(&world, before), offset(&world, after)), (-1, 6));
        assert_eq!(world.unanswered(), 0);
        assert_reloads(&world);
    }
}

#[test]
fn open_transaction_outlives_the_deletion_of_its_group() {
    let mut world = World::new(config());
    commit(&mut world, &[("t", 1, 5)]);
    world.ask_now(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 8)])));
    world.ask_now(|token| Input::DeleteGroups(token, vec!["g".into()]));
    assert_reloads(&world);
    world.marker(PRODUCER, true);
    world.write_all();
    assert_eq!((offset(&world, 0), offset(&world, 1)), (8, -1));
    assert_reloads(&world);
}

#[test]
fn offsets_of_a_deleted_topic_go() {
    let mut world = World::new(config());
    commit(&mut world, &[("t", 0, 5), ("u", 0, 6)]);
    world.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("t", 1, 7)])));
    let token = world.ask(|token| Input::OffsetCommit(token, simple_commit("g", &[("u", 1, 7)])));
    world.topic_deleted("t");
    world.write_all();
    assert!(world.take(token).is_some());
    assert_eq!((offset(&world, 0), offset(&world, 1)), (-1, -1));
    assert_eq!(fetch(&world, "u", 1, false).offset, 7);
    assert_reloads(&world);
}

/// Lets days pass with the sweeps and writes they bring.
fn days(world: &mut World, days: u64) {
    for _ in 0..days * 24 {
        world.advance(DAY / 24);
        world.write_all();
    }
}

#[test]
fn offsets_without_members_expire_by_their_own_age() {
    let mut world = World::new(config());
    commit(&mut world, &[("t", 0, 5)]);
    days(&mut world, 4);
    commit(&mut world, &[("t", 1, 6)]);
    days(&mut world, 4);
    assert_eq!((offset(&world, 0), offset(&world, 1)), (-1, 6));
    assert_reloads(&world);
    days(&mut world, 4);
    assert!(world.groups.is_empty());
    assert!(world.reload().is_empty());
    assert_eq!(world.groups.next_deadline(), None);
}

#[test]
fn offsets_of_an_empty_group_expire_from_the_day_it_became_empty() {
    let mut world = World::new(config());
    let member = stable(&mut world, "consumer");
    let request = OffsetCommit {
        generation: 1,
        member_id: member.clone(),
        ..simple_commit("g", &[("t", 0, 5), ("u", 0, 6)])
    };
    world.ask_now(|token| Input::OffsetCommit(token, request));
    for _ in 0..8 * 24 * 3600 / 9 {
        world.groups.heartbeat(world.now, "g", 1, &member, None);
        world.advance(9_000);
        world.write_all();
    }
    // The member lives: only what it does not read has expired.
    assert_eq!((offset(&world, 0), fetch(&world, "u", 0, false).offset), (5, -1));
    leave(&mut world, &member);
    world.restart();
    days(&mut world, 6);
    assert_eq!(offset(&world, 0), 5);
    days(&mut world, 2);
    assert_eq!(offset(&world, 0), -1);
    assert!(world.groups.is_empty() && world.reload().is_empty());
}

#[test]
fn retention_that_the_client_asked_for_counts() {
    let mut world = World::new(config());
    let request = OffsetCommit { retention_ms: Some(DAY as i64), ..simple_commit("g", &[("t", 0, 5)]) };
    world.ask_now(|token| Input::OffsetCommit(token, request));
    commit(&mut world, &[("t", 1, 6)]);
    days(&mut world, 2);
    assert_eq!((offset(&world, 0), offset(&world, 1)), (-1, 6));
    assert_reloads(&world);
}

#[test]
fn whoever_waits_is_told_when_the_groups_move_away() {
    let mut world = World::new(config());
    stable(&mut world, "consumer");
    let joining = world.ask(|token| Input::Join(token, join("g", "b", &Arc::default(), &["t"])));
    let committing = world.ask(|token| Input::TxnOffsetCommit(token, txn_commit(&[("t", 0, 1)])));
    world.unload();
    let Some(Response::Join(refusal)) = world.take(joining) else { panic!("still waiting") };
    assert_eq!(refusal.error, ErrorCode::NotCoordinator);
    assert_eq!(first_error(&world.take(committing).unwrap()), ErrorCode::NotCoordinator);
    world.write_all();
    assert_eq!(world.unanswered(), 0);
    assert!(world.groups.is_empty() && world.groups.txns.is_empty());
}

#[test]
fn listing_filters_by_state_and_type_without_case() {
    let mut world = World::new(config());
    stable(&mut world, "consumer");
    world.ask_now(|token| Input::OffsetCommit(token, simple_commit("h", &[("t", 0, 1)])));
    let names = |states: &[&str], types: &[&str]| -> Vec<String> {
        let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let listed = world.groups.list(&ListFilter { states: own(states), types: own(types) });
        listed.iter().map(|line| format!("{}:{}", line.group, line.state.name())).collect()
    };
    assert_eq!(names(&[], &[]), ["g:Stable", "h:Empty"]);
    assert_eq!(names(&["empty"], &["Classic"]), ["h:Empty"]);
    assert!(names(&[], &["consumer"]).is_empty());
    let unknown = world.groups.describe(&"nobody".into());
    assert_eq!((unknown.error, unknown.state), (ErrorCode::GroupIdNotFound, State::Dead));
}

#[test]
fn group_that_lived_on_while_it_was_being_deleted_stays() {
    let mut world = World::new(config());
    let member = stable(&mut world, "consumer");
    leave(&mut world, &member);
    let delete = world.ask(|token| Input::DeleteGroups(token, vec!["g".into()]));
    let joining = world.ask(|token| Input::Join(token, join("g", "b", &Arc::default(), &["t"])));
    let Some(Response::Join(joined)) = world.take(joining) else { panic!("still waiting") };
    assert_eq!(joined.generation, 3);
    leave(&mut world, &joined.member_id);
    assert!(world.take(delete).is_some());
    assert_eq!(world.groups.describe(&"g".into()).state, State::Empty);
    assert!(!world.groups.image().is_empty());
    assert_reloads(&world);
}

#[test]
fn commit_after_a_deletion_survives_it_in_whatever_order_their_ends_are_told() {
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
fn refused_requests_leave_no_group_behind() {
    let mut world = World::new(config());
    let late = OffsetCommit { generation: 1, member_id: "m".into(), ..simple_commit("g", &[("t", 0, 5)]) };
    let response = world.ask_now(|token| Input::OffsetCommit(token, late));
    assert_eq!(first_error(&response), ErrorCode::IllegalGeneration);
    let late = TxnOffsetCommit { generation: 1, member_id: "m".into(), ..txn_commit(&[("t", 0, 5)]) };
    let response = world.ask_now(|token| Input::TxnOffsetCommit(token, late));
    assert_eq!(first_error(&response), ErrorCode::IllegalGeneration);
    let long = simple_commit(&"g".repeat(40_000), &[("t", 0, 5)]);
    let response = world.ask_now(|token| Input::OffsetCommit(token, long));
    assert_eq!(first_error(&response), ErrorCode::InvalidGroupId);
    for (group, client, expected) in [
        ("", "c", ErrorCode::InvalidGroupId),
        (&*"g".repeat(40_000), "c", ErrorCode::InvalidGroupId),
        ("g", &*"c".repeat(40_000), ErrorCode::InvalidRequest),
    ] {
        let request = join(group, client, &Arc::default(), &["t"]);
        let Response::Join(refused) = world.ask_now(|token| Input::Join(token, request)) else { panic!() };
        assert_eq!((refused.error, refused.generation), (expected, -1));
    }
    let request = Join { protocols: Vec::new(), ..join("g", "c", &Arc::default(), &["t"]) };
    let Response::Join(refused) = world.ask_now(|token| Input::Join(token, request)) else { panic!() };
    assert_eq!(refused.error, ErrorCode::InconsistentGroupProtocol);
    assert!(world.groups.is_empty());
}
