//! The transaction coordinator in scenarios, and under randomized requests, failures and crashes.

mod harness;
mod randomized;

use moim_wire_kafka::ErrorCode;

use super::*;
use harness::{Harness, WALL, add, add_at, end, end_at, init, init_at};

/// A harness where `x` has an open transaction on partitions 0 and 1.
fn ongoing() -> (Harness, (i64, i16)) {
    let mut w = Harness::new();
    let reply = w.ask(init("x", None));
    let producer = (reply.producer_id, reply.producer_epoch);
    assert_eq!(w.ask(add("x", producer, &[0, 1])).error, ErrorCode::None);
    assert_eq!(w.state("x"), "Ongoing");
    (w, producer)
}

/// Puts `x` into a state. Returns its producer.
fn in_state(state: State) -> (Harness, (i64, i16)) {
    let (mut w, producer) = ongoing();
    match state {
        State::Ongoing => {}
        State::PrepareCommit | State::CompleteCommit => {
            w.ask(end("x", producer, true));
        }
        State::PrepareAbort | State::CompleteAbort => {
            w.ask(end("x", producer, false));
        }
        State::Empty => {
            w.ask(end("x", producer, false));
            w.settle();
            let reply = w.ask(init("x", None));
            assert_eq!(w.state("x"), "Empty");
            return (w, (reply.producer_id, reply.producer_epoch));
        }
        State::Dead | State::PrepareEpochFence => unreachable!("never rests there"),
    }
    if matches!(state, State::CompleteCommit | State::CompleteAbort) {
        w.settle();
    }
    assert_eq!(w.state("x"), state.name());
    (w, producer)
}

const RESTING: [State; 6] = [
    State::Empty,
    State::Ongoing,
    State::PrepareCommit,
    State::PrepareAbort,
    State::CompleteCommit,
    State::CompleteAbort,
];

#[test]
fn transaction_commits() {
    let (mut w, producer) = ongoing();
    assert_eq!(producer, (101, 0));
    let token = w.send(end("x", producer, true));
    assert!(w.markers.is_empty(), "no marker before the decision is durable");
    assert_eq!(w.answers[&token], None);
    w.persist(Ok(()));
    assert_eq!(w.answers[&token].unwrap().error, ErrorCode::None);
    assert_eq!(w.state("x"), "PrepareCommit");
    let at: Vec<_> = w.markers.iter().map(|m| (m.at.partition, m.commit, m.producer)).collect();
    assert_eq!(at, [(0, true, producer), (1, true, producer)]);
    w.mark(1, Ok(()));
    assert!(w.writes.is_empty());
    w.mark(0, Ok(()));
    w.persist(Ok(()));
    assert_eq!(w.state("x"), "CompleteCommit");
    assert_eq!(w.ask(add("x", producer, &[5])).error, ErrorCode::None);
    assert_eq!(w.c.describe("x").unwrap().partitions, [("t".into(), vec![5])]);
}

#[test]
fn end_txn_by_state() {
    use ErrorCode::*;
    let table = [
        (State::Empty, InvalidTxnState, InvalidTxnState),
        (State::Ongoing, None, None),
        (State::PrepareCommit, ConcurrentTransactions, InvalidTxnState),
        (State::PrepareAbort, InvalidTxnState, ConcurrentTransactions),
        (State::CompleteCommit, None, InvalidTxnState),
        (State::CompleteAbort, InvalidTxnState, None),
    ];
    for (state, on_commit, on_abort) in table {
        for (commit, expected) in [(true, on_commit), (false, on_abort)] {
            let (mut w, producer) = in_state(state);
            assert_eq!(w.ask(end("x", producer, commit)).error, expected, "{state:?} commit={commit}");
        }
    }
}

#[test]
fn add_partitions_by_state() {
    for state in RESTING {
        let (mut w, producer) = in_state(state);
        let waits = matches!(state, State::PrepareCommit | State::PrepareAbort);
        let expected = if waits { ErrorCode::ConcurrentTransactions } else { ErrorCode::None };
        assert_eq!(w.ask(add("x", producer, &[3])).error, expected, "{state:?}");
    }
    let (mut w, producer) = ongoing();
    assert_eq!(w.ask(add("x", producer, &[1])).error, ErrorCode::None);
    assert_eq!(w.c.next_deadline(), Some(60_000), "an added partition does not extend the timeout");
    let input = |token, _| Input::AddOffsets {
        token,
        version: 3,
        transactional_id: "x".into(),
        producer_id: producer.0,
        producer_epoch: producer.1,
        offsets_partition: 9,
    };
    assert_eq!(w.ask(input).error, ErrorCode::None);
    assert!(w.c.transaction("x").unwrap().partitions.contains(&TopicPartition::new("__consumer_offsets", 9)));
}

#[test]
fn replaced_coordinator_cannot_confirm_an_unchanged_state() {
    let lost = Err(ErrorCode::NotLeaderOrFollower);
    let (mut w, producer) = ongoing();
    let token = w.send(add("x", producer, &[1]));
    assert_eq!(w.answers[&token], None, "not before a write has succeeded");
    w.persist(lost);
    assert_eq!(w.answers[&token].unwrap().error, ErrorCode::NotCoordinator);
    for (state, commit) in [(State::CompleteCommit, true), (State::CompleteAbort, false)] {
        let (mut w, producer) = in_state(state);
        let token = w.send(end("x", producer, commit));
        assert_eq!(w.answers[&token], None, "{state:?}");
        w.persist(lost);
        assert_eq!(w.answers[&token].unwrap().error, ErrorCode::NotCoordinator);
        assert_eq!(
            w.ask(end("x", producer, commit)).error,
            ErrorCode::None,
            "a coordinator that can write succeeds"
        );
        assert_eq!(w.state("x"), state.name());
    }
}

#[test]
fn fencing_errors_by_version() {
    use ErrorCode::*;
    let (mut w, (id, epoch)) = ongoing();
    let table = [
        ("x", (id, epoch + 1), 2, ProducerFenced),
        ("x", (id, epoch + 1), 1, InvalidProducerEpoch),
        ("x", (id, epoch - 1), 3, ProducerFenced),
        ("x", (id + 1, epoch), 3, InvalidProducerIdMapping),
        ("y", (id, epoch), 3, InvalidProducerIdMapping),
        ("", (id, epoch), 3, InvalidRequest),
    ];
    for (name, producer, version, expected) in table {
        assert_eq!(
            w.ask(add_at(version, name, producer, &[1])).error,
            expected,
            "{name} {producer:?} {version}"
        );
        assert_eq!(
            w.ask(end_at(version, name, producer, true)).error,
            expected,
            "{name} {producer:?} {version}"
        );
    }
    w.ask(end("x", (id, epoch), false));
    w.settle();
    let stale = Some((id, epoch + 5));
    assert_eq!(w.ask(init_at(4, "x", stale)).error, ProducerFenced);
    assert_eq!(w.ask(init_at(3, "x", stale)).error, InvalidProducerEpoch);
    assert_eq!(w.ask(init("", Option::None)).error, InvalidRequest);
    for timeout_ms in [0, -1, 900_001] {
        let input = |token, fresh_id| Input::InitProducerId {
            token,
            version: 4,
            transactional_id: Some("z".into()),
            timeout_ms,
            current: Option::None,
            fresh_id,
        };
        assert_eq!(w.ask(input).error, InvalidTransactionTimeout);
    }
    assert_eq!(w.c.len(), 1, "rejected ids leave no state");
}

#[test]
fn idempotent_producer_gets_a_producer_id() {
    let mut w = Harness::new();
    let input = |token, fresh_id| Input::InitProducerId {
        token,
        version: 4,
        transactional_id: None,
        timeout_ms: -1,
        current: Some((5, 5)),
        fresh_id,
    };
    let reply = w.ask(input);
    assert_eq!((reply.error, reply.producer_id, reply.producer_epoch), (ErrorCode::None, 101, 0));
    assert!(w.log.is_empty() && w.c.is_empty());
}

#[test]
fn init_by_state() {
    for state in RESTING {
        let (mut w, (id, epoch)) = in_state(state);
        let reply = w.ask(init("x", None));
        if state.is_running() {
            assert_eq!(reply.error, ErrorCode::ConcurrentTransactions, "{state:?}");
            w.settle();
            let reply = w.ask(init("x", None));
            let bumps = if state == State::Ongoing { 2 } else { 1 };
            assert_eq!((reply.producer_id, reply.producer_epoch), (id, epoch + bumps), "{state:?}");
        } else {
            assert_eq!((reply.producer_id, reply.producer_epoch), (id, epoch + 1), "{state:?}");
        }
        assert_eq!(w.ask(add("x", (id, epoch), &[1])).error, ErrorCode::ProducerFenced);
    }
}

#[test]
fn new_producer_aborts_the_open_transaction() {
    let (mut w, (id, epoch)) = ongoing();
    assert_eq!(w.ask(init("x", None)).error, ErrorCode::ConcurrentTransactions);
    assert!(w.markers.iter().all(|m| !m.commit && m.producer == (id, epoch + 1)));
    assert_eq!(w.ask(end("x", (id, epoch), true)).error, ErrorCode::ProducerFenced);
    assert_eq!(w.markers.len(), 2);
    w.settle();
    assert_eq!(w.state("x"), "CompleteAbort");
}

#[test]
fn epoch_bump_retry_succeeds_after_crash() {
    let (mut w, (id, epoch)) = in_state(State::CompleteAbort);
    for crash in [false, true, true] {
        let reply = w.ask(init("x", Some((id, epoch))));
        assert_eq!((reply.error, reply.producer_epoch), (ErrorCode::None, epoch + 1));
        if crash {
            w.restart();
        }
    }
    // Another producer instance starts: the retry is no longer possible.
    assert_eq!(w.ask(init("x", None)).producer_epoch, epoch + 2);
    assert_eq!(w.ask(init("x", Some((id, epoch)))).error, ErrorCode::ProducerFenced);
    assert_eq!(w.ask(init("x", Some((id, epoch + 1)))).error, ErrorCode::ProducerFenced);
}

#[test]
fn producer_that_bumps_within_its_transaction_continues() {
    let (mut w, (id, epoch)) = ongoing();
    assert_eq!(w.ask(init("x", Some((id, epoch)))).error, ErrorCode::ConcurrentTransactions);
    w.settle();
    let reply = w.ask(init("x", Some((id, epoch))));
    assert_eq!((reply.error, reply.producer_epoch), (ErrorCode::None, epoch + 1));
}

#[test]
fn zombie_bump_does_not_abort_its_successor() {
    let (mut w, (id, epoch)) = in_state(State::Empty);
    w.ask(add("x", (id, epoch), &[0]));
    assert_eq!(w.ask(init("x", Some((id, epoch - 1)))).error, ErrorCode::ProducerFenced);
    assert_eq!(w.state("x"), "Ongoing");
}

#[test]
fn exhausted_epochs_allocate_a_new_producer_id() {
    let mut w = Harness::new();
    let mut txn = Transaction::new(50, 60_000, WALL);
    txn.epoch = i16::MAX - 2;
    w.log.push((encode_key("x"), Some(encode_value(&txn))));
    w.restart();
    let last = w.ask(init("x", None));
    assert_eq!((last.producer_id, last.producer_epoch), (50, i16::MAX - 1));
    // Fencing may still use the one epoch that is left, and no client ever gets it.
    w.ask(add("x", (50, i16::MAX - 1), &[0]));
    assert_eq!(w.ask(init("x", Some((50, i16::MAX - 1)))).error, ErrorCode::ConcurrentTransactions);
    assert_eq!(w.markers[0].producer, (50, i16::MAX));
    w.settle();
    let fresh = w.ask(init("x", Some((50, i16::MAX - 1))));
    assert_eq!((fresh.error, fresh.producer_epoch), (ErrorCode::None, 0));
    assert_ne!(fresh.producer_id, 50);
    // The response was lost: the retry gets the same result, also after a crash.
    w.restart();
    assert_eq!(w.ask(init("x", Some((50, i16::MAX - 1)))), fresh);
    assert_eq!(w.ask(add("x", (50, i16::MAX), &[0])).error, ErrorCode::InvalidProducerIdMapping);
}

#[test]
fn unknown_recovering_producer_starts_anew() {
    let mut w = Harness::new();
    let reply = w.ask(init("x", Some((9, 4))));
    assert_eq!((reply.error, reply.producer_id, reply.producer_epoch), (ErrorCode::None, 101, 0));
}

#[test]
fn timed_out_transaction_is_aborted_and_its_producer_fenced() {
    let (mut w, (id, epoch)) = ongoing();
    w.advance(30_000);
    w.ask(add("x", (id, epoch), &[2]));
    assert_eq!(w.c.next_deadline(), Some(60_000), "more partitions do not extend the timeout");
    w.advance(29_999);
    assert!(w.writes.is_empty());
    w.advance(1);
    w.persist_all();
    assert_eq!(w.state("x"), "PrepareAbort");
    assert_eq!(w.markers.len(), 3);
    assert_eq!(w.ask(end("x", (id, epoch), true)).error, ErrorCode::ProducerFenced);
    w.settle();
    assert_eq!(w.ask(init("x", Some((id, epoch)))).error, ErrorCode::ProducerFenced);
    assert_eq!(w.ask(init("x", None)).producer_epoch, epoch + 2);
}

#[test]
fn restart_keeps_the_remaining_timeout() {
    let (mut w, _) = ongoing();
    w.advance(50_000);
    w.restart();
    assert_eq!(w.c.next_deadline(), Some(60_000));
    // A wall clock that moved back gives at most the whole timeout.
    let mut c = Coordinator::new(Config::default(), 7);
    c.set_wall_ms(0, 0);
    for (key, value) in &w.log {
        c.replay(key, value.as_deref()).unwrap();
    }
    c.start(0);
    assert_eq!(c.next_deadline(), Some(60_000));
}

#[test]
fn restart_completes_decided_transactions() {
    for commit in [true, false] {
        let (mut w, producer) = ongoing();
        w.ask(end("x", producer, commit));
        w.mark(0, Ok(()));
        w.restart();
        assert_eq!(w.markers.len(), 2, "all partitions again: unknown which have their marker");
        assert!(w.markers.iter().all(|m| m.commit == commit));
        w.settle();
        assert_eq!(w.state("x"), if commit { "CompleteCommit" } else { "CompleteAbort" });
    }
}

#[test]
fn only_failed_markers_are_resent() {
    let (mut w, producer) = ongoing();
    w.ask(end("x", producer, true));
    w.mark(0, Err(ErrorCode::NotLeaderOrFollower));
    assert_eq!(w.c.next_deadline(), None, "the other marker is still in flight");
    w.mark(0, Ok(()));
    for pause in [20, 40, 80, 160, 320, 640, 1_280, 2_000, 2_000] {
        assert_eq!(w.c.next_deadline(), Some(w.now + pause));
        w.advance(pause);
        assert_eq!(w.markers.len(), 1);
        assert_eq!(w.markers[0].at.partition, 0);
        w.mark(0, Err(ErrorCode::NotLeaderOrFollower));
    }
    w.advance(2_000);
    w.settle();
    assert_eq!(w.state("x"), "CompleteCommit");
}

#[test]
fn permanently_failed_markers_do_not_block_the_id() {
    for gone in [ErrorCode::UnknownTopicOrPartition, ErrorCode::InvalidProducerEpoch] {
        let (mut w, producer) = ongoing();
        w.ask(end("x", producer, true));
        w.mark(0, Err(gone));
        w.mark(0, Ok(()));
        w.persist_all();
        assert_eq!(w.state("x"), "CompleteCommit");
    }
    let (mut w, producer) = ongoing();
    w.ask(end("x", producer, true));
    w.mark(0, Err(ErrorCode::TransactionCoordinatorFenced));
    w.mark(0, Ok(()));
    assert!(w.writes.is_empty() && w.c.next_deadline().is_none(), "another coordinator owns the id");
}

#[test]
fn failed_write_changes_nothing_and_returns_an_error() {
    let (mut w, producer) = ongoing();
    let table = [
        (ErrorCode::NotEnoughReplicas, ErrorCode::CoordinatorNotAvailable),
        (ErrorCode::KafkaStorageError, ErrorCode::NotCoordinator),
        (ErrorCode::MessageTooLarge, ErrorCode::UnknownServerError),
    ];
    for (error, reported) in table {
        let before = w.c.transaction("x").cloned();
        let tokens = [w.send(end("x", producer, true))];
        w.persist(Err(error));
        let tokens = [tokens[0], w.send(add("x", producer, &[3]))];
        w.persist(Err(error));
        let tokens = [tokens[0], tokens[1], w.send(init("x", None))];
        w.persist(Err(error));
        for token in tokens {
            assert_eq!(w.answers[&token].unwrap().error, reported);
        }
        assert!(w.markers.is_empty());
        assert_eq!(w.c.transaction("x").cloned(), before);
    }
    let token = w.send(init("new", None));
    w.persist(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(w.answers[&token].unwrap().error, ErrorCode::CoordinatorNotAvailable);
    assert_eq!(w.c.len(), 1);
}

#[test]
fn writes_without_a_waiting_request_are_retried() {
    let (mut w, producer) = ongoing();
    w.ask(end("x", producer, true));
    w.mark(0, Ok(()));
    w.mark(0, Ok(()));
    w.persist(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(w.state("x"), "PrepareCommit");
    w.advance(20);
    assert!(w.markers.is_empty());
    w.persist(Ok(()));
    assert_eq!(w.state("x"), "CompleteCommit");

    let (mut w, _) = ongoing();
    w.advance(60_000);
    w.persist(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(w.state("x"), "Ongoing");
    assert_eq!(w.c.next_deadline(), Some(60_020));
    w.advance(20);
    w.settle();
    assert_eq!(w.state("x"), "CompleteAbort");
}

#[test]
fn requests_during_a_write_get_concurrent_transactions() {
    let (mut w, producer) = ongoing();
    w.send(end("x", producer, true));
    let tokens =
        [w.send(add("x", producer, &[1])), w.send(end("x", producer, false)), w.send(init("x", None))];
    for token in tokens {
        assert_eq!(w.answers[&token].unwrap().error, ErrorCode::ConcurrentTransactions);
    }
    assert_eq!(w.c.verify("x", producer.0, producer.1, "t", 0), Err(ErrorCode::ConcurrentTransactions));
}

#[test]
fn verify_checks_partition_membership() {
    use ErrorCode::*;
    let (w, (id, epoch)) = ongoing();
    let table = [
        ("x", id, epoch, 1, Ok(())),
        ("x", id, epoch, 2, Err(TransactionAbortable)),
        ("x", id, epoch + 1, 1, Err(ProducerFenced)),
        ("x", id + 1, epoch, 1, Err(InvalidProducerIdMapping)),
        ("y", id, epoch, 1, Err(InvalidProducerIdMapping)),
    ];
    for (name, id, epoch, partition, expected) in table {
        assert_eq!(w.c.verify(name, id, epoch, "t", partition), expected);
    }
    for (state, expected) in [
        (State::PrepareCommit, ConcurrentTransactions),
        (State::CompleteCommit, TransactionAbortable),
        (State::Empty, TransactionAbortable),
    ] {
        let (w, (id, epoch)) = in_state(state);
        assert_eq!(w.c.verify("x", id, epoch, "t", 1), Err(expected));
    }
    assert_eq!(verification_error(TransactionAbortable, false), InvalidTxnState);
    assert_eq!(verification_error(TransactionAbortable, true), TransactionAbortable);
    assert_eq!(verification_error(ConcurrentTransactions, true), NotEnoughReplicas);
    assert_eq!(verification_error(ProducerFenced, true), InvalidProducerEpoch);
}

#[test]
fn idle_ids_expire_and_leave_a_tombstone() {
    let week = Config::default().id_expiration_ms;
    let (mut w, producer) = in_state(State::CompleteCommit);
    w.advance(week - 1);
    assert!(w.writes.is_empty());
    w.advance(1);
    assert_eq!(w.state("x"), "-", "an id that is being deleted is not visible");
    let token = w.send(init("x", None));
    assert_eq!(w.answers[&token].unwrap().error, ErrorCode::ConcurrentTransactions);
    w.persist(Err(ErrorCode::NotEnoughReplicas));
    assert_eq!(w.state("x"), "CompleteCommit");
    w.advance(20);
    w.persist(Ok(()));
    assert_eq!(w.log.last().unwrap(), &(encode_key("x"), None));
    assert!(w.c.is_empty() && w.c.next_deadline().is_none());
    w.restart();
    assert_eq!(w.ask(add("x", producer, &[1])).error, ErrorCode::InvalidProducerIdMapping);
}

#[test]
fn listing_filters_by_state_producer_and_duration() {
    let (mut w, (id, _)) = ongoing();
    let other = w.ask(init("y", None)).producer_id;
    w.advance(5_000);
    let list = |filter: &ListFilter| {
        let (all, unknown) = w.c.list(w.now, filter).unwrap();
        (all.iter().map(|l| l.transactional_id.to_string()).collect::<Vec<_>>().join(" "), unknown)
    };
    let states = |names: &[&str]| ListFilter {
        states: names.iter().map(|s| s.to_string()).collect(),
        ..Default::default()
    };
    let ids = |ids: &[i64]| ListFilter { producer_ids: ids.to_vec(), ..Default::default() };
    let longer = |ms| ListFilter { min_duration_ms: Some(ms), ..Default::default() };
    let table = [
        (ListFilter::default(), "x y"),
        (states(&["Ongoing"]), "x"),
        (states(&["Empty", "Ongoing"]), "x y"),
        (states(&["Dead"]), ""),
        (ids(&[other]), "y"),
        (ids(&[id, other]), "x y"),
        (longer(-1), "x y"),
        (longer(4_999), "x"),
        (longer(5_000), ""),
    ];
    for (filter, expected) in table {
        assert_eq!(list(&filter), (expected.to_owned(), vec![]), "{filter:?}");
    }
    assert_eq!(list(&states(&["Nonsense"])), (String::new(), vec!["Nonsense".to_owned()]));
    assert_eq!(w.c.describe(""), Err(ErrorCode::InvalidRequest));
    assert_eq!(w.c.describe("z"), Err(ErrorCode::TransactionalIdNotFound));
    let described = w.c.describe("x").unwrap();
    assert_eq!((described.start_ms, described.timeout_ms), (WALL, 60_000));
}

#[test]
fn requests_before_the_load_completes_are_rejected() {
    let mut c = Coordinator::new(Config::default(), 0);
    let effects = c.step(0, end("x", (1, 1), true)(Token(1), 0));
    assert_eq!(effects, [Effect::Reply(Token(1), Reply::of(ErrorCode::CoordinatorLoadInProgress))]);
    assert_eq!(c.describe("x"), Err(ErrorCode::CoordinatorLoadInProgress));
    assert_eq!(c.verify("x", 1, 1, "t", 0), Err(ErrorCode::CoordinatorLoadInProgress));
}

#[test]
fn transactional_id_partition_matches_kafka() {
    for (id, partition) in [("", 0), ("a", 47), ("transactions", 19), ("ü", 2), ("polygenelubricants", 0)] {
        assert_eq!(partition_for(id, 50), partition);
    }
}

/// A transaction of a client that gets an epoch with every transaction.
fn ongoing_own_epoch() -> (Harness, (i64, i16)) {
    let mut w = Harness::new();
    let reply = w.ask(init("x", None));
    let producer = (reply.producer_id, reply.producer_epoch);
    assert_eq!(w.ask(add_at(5, "x", producer, &[0, 1])).error, ErrorCode::None);
    (w, producer)
}

fn end_own_epoch(w: &mut Harness, producer: (i64, i16), commit: bool) -> Reply {
    w.ask(end_at(5, "x", producer, commit))
}

#[test]
fn version_2_end_bumps_the_producer_epoch() {
    for commit in [true, false] {
        let (mut w, (id, epoch)) = ongoing_own_epoch();
        let reply = end_own_epoch(&mut w, (id, epoch), commit);
        let next = (id, epoch + 1);
        assert_eq!((reply.error, reply.producer_id, reply.producer_epoch), (ErrorCode::None, id, epoch + 1));
        let reported: Vec<_> = w.markers.iter().map(|m| (m.producer, m.commit, m.own_epoch)).collect();
        assert_eq!(reported, [(next, commit, true); 2], "the markers have the new epoch");
        // A retry because the response was lost.
        assert_eq!(end_own_epoch(&mut w, (id, epoch), commit).error, ErrorCode::ConcurrentTransactions);
        assert_eq!(end_own_epoch(&mut w, (id, epoch), !commit).error, ErrorCode::InvalidTxnState);
        // A request sent before the end arrives after it.
        let late = w.ask(add_at(5, "x", (id, epoch), &[2]));
        assert_eq!(late.error, ErrorCode::ProducerFenced);
        assert_eq!(w.ask(add_at(5, "x", next, &[2])).error, ErrorCode::ConcurrentTransactions);
        w.settle();
        w.restart();
        let again = end_own_epoch(&mut w, (id, epoch), commit);
        assert_eq!((again.error, again.producer_id, again.producer_epoch), (ErrorCode::None, id, epoch + 1));
        assert_eq!(w.ask(add_at(5, "x", (id, epoch), &[2])).error, ErrorCode::ProducerFenced);
        assert_eq!(w.ask(add_at(5, "x", next, &[2])).error, ErrorCode::None);
        assert_eq!(end_own_epoch(&mut w, (id, epoch), commit).error, ErrorCode::ProducerFenced);
        assert_eq!(end_own_epoch(&mut w, next, true).producer_epoch, epoch + 2);
    }
}

#[test]
fn version_2_ends_transactions_without_partitions() {
    let mut w = Harness::new();
    let reply = w.ask(init("x", None));
    let producer = (reply.producer_id, reply.producer_epoch);
    assert_eq!(end_own_epoch(&mut w, producer, true).error, ErrorCode::InvalidTxnState);
    assert_eq!(
        end_own_epoch(&mut w, producer, false).producer_epoch,
        1,
        "an abort without partitions succeeds"
    );
    w.settle();
    assert_eq!(w.state("x"), "CompleteAbort");
    assert_eq!(end_own_epoch(&mut w, (producer.0, 1), false).producer_epoch, 2);
}

#[test]
fn commit_after_timeout_abort_gets_invalid_producer_epoch() {
    let (mut w, (id, epoch)) = ongoing_own_epoch();
    w.advance(60_000);
    w.persist_all();
    assert_eq!(w.state("x"), "PrepareAbort");
    assert!(w.markers.iter().all(|m| m.own_epoch && m.producer == (id, epoch + 1)));
    assert_eq!(end_own_epoch(&mut w, (id, epoch), true).error, ErrorCode::InvalidProducerEpoch);
    assert_eq!(end_own_epoch(&mut w, (id, epoch), false).error, ErrorCode::ConcurrentTransactions);
    w.settle();
    assert_eq!(end_own_epoch(&mut w, (id, epoch), true).error, ErrorCode::InvalidProducerEpoch);
    // An abort succeeds, and the producer continues.
    let reply = end_own_epoch(&mut w, (id, epoch), false);
    assert_eq!((reply.error, reply.producer_id, reply.producer_epoch), (ErrorCode::None, id, epoch + 1));
    assert_eq!(w.ask(add_at(5, "x", (id, epoch + 1), &[0])).error, ErrorCode::None);
}

#[test]
fn exhausted_producer_continues_under_a_new_producer_id() {
    let (mut w, (id, _)) = ongoing_own_epoch();
    w.settle();
    let mut txn = w.c.transaction("x").unwrap().clone();
    txn.epoch = LAST_EPOCH;
    w.log.push((encode_key("x"), Some(encode_value(&txn))));
    w.restart();
    let reply = end_own_epoch(&mut w, (id, LAST_EPOCH), true);
    let next = (reply.producer_id, reply.producer_epoch);
    assert_eq!((reply.error, next.1), (ErrorCode::None, 0));
    assert_ne!(next.0, id);
    assert!(w.markers.iter().all(|m| m.producer == (id, i16::MAX)), "the markers have the old id");
    assert_eq!(w.ask(add_at(5, "x", next, &[0])).error, ErrorCode::ConcurrentTransactions);
    w.restart();
    w.settle();
    let again = end_own_epoch(&mut w, (id, LAST_EPOCH), true);
    assert_eq!((again.error, again.producer_id, again.producer_epoch), (ErrorCode::None, next.0, 0));
    assert_eq!(w.ask(add_at(5, "x", next, &[0])).error, ErrorCode::None);
    assert_eq!(end_own_epoch(&mut w, next, true).producer_epoch, 1);
}

#[test]
fn producer_may_switch_from_version_1_to_version_2() {
    let (mut w, producer) = ongoing();
    assert_eq!(w.ask(end("x", producer, true)).error, ErrorCode::None);
    assert!(w.markers.iter().all(|m| !m.own_epoch && m.producer == producer));
    w.settle();
    assert_eq!(w.ask(add_at(5, "x", producer, &[0])).error, ErrorCode::None);
    let reply = end_own_epoch(&mut w, producer, true);
    assert_eq!(reply.producer_epoch, producer.1 + 1);
    assert!(w.markers.iter().all(|m| m.own_epoch));
    w.settle();
    let next = (producer.0, reply.producer_epoch);
    assert_eq!(w.ask(add("x", next, &[0])).error, ErrorCode::None);
    assert_eq!(w.ask(end("x", next, false)).error, ErrorCode::None);
    assert!(w.markers.iter().all(|m| !m.own_epoch && m.producer == next));
}
