//! A follower on node 2 of a leader on node 1.

use bytes::Bytes;

use super::*;
use crate::machine::Snapshot;
use crate::toy::{Entry, ToyLog};
use crate::types::{BrokerEpoch, DirectoryId};

const LEADER: (BrokerId, LeaderEpoch) = (BrokerId(1), LeaderEpoch(7));

fn log(epochs: &[i32]) -> ToyLog {
    let mut log = ToyLog::default();
    for epoch in epochs {
        log.append(Entry { epoch: LeaderEpoch(*epoch), value: 0 });
    }
    log.sync(log.end());
    log
}

fn follow(log: &ToyLog, hw: i64, policy: ResetPolicy) -> (Follower, Vec<Effect>) {
    let me = Sender { node: BrokerId(2), epoch: BrokerEpoch(102), directory: DirectoryId(2) };
    let how = FollowerParams {
        me,
        policy,
        tuning: FollowerTuning::default(),
        mutants: Mutants::default(),
        record: 1,
        next_id: 1,
        rebuilding: false,
    };
    let mut effects = Vec::new();
    let follower = Follower::become_follower(how, LEADER, log, Offset(hw), 0, &mut effects);
    (follower, effects)
}

/// The only fetch in these effects: (id, offset, last epoch).
fn fetched(effects: &[Effect]) -> (u64, i64, Option<i32>) {
    match effects {
        [Effect::Fetch { to: BrokerId(1), id, fetch }] => {
            (*id, fetch.offset.0, fetch.last_epoch.map(|epoch| epoch.0))
        }
        other => panic!("not one fetch: {other:?}"),
    }
}

/// The only fetch in these effects, and its id.
fn fetch_in(effects: &[Effect]) -> (u64, Fetch) {
    match effects {
        [Effect::Fetch { id, fetch, .. }] => (*id, *fetch),
        other => panic!("not one fetch: {other:?}"),
    }
}

fn records(high_watermark: i64, log_start: i64) -> Answer {
    Answer::Records {
        high_watermark: Offset(high_watermark),
        log_start: Offset(log_start),
        log_end: Offset(100),
    }
}

#[test]
fn fetch_carries_log_end_and_answer_advances_high_watermark() {
    let mut log = log(&[1, 1, 4]);
    let (mut follower, effects) = follow(&log, 1, ResetPolicy::LogStart);
    let (id, offset, epoch) = fetched(&effects);
    assert_eq!((offset, epoch), (3, Some(4)));
    assert!(follower.accepts(id) && !follower.accepts(id + 1));
    log.append(Entry { epoch: LeaderEpoch(7), value: 1 });
    let mut effects = Vec::new();
    follower.on_answer(id, records(50, 0), &log, 0, &mut effects);
    assert_eq!(effects[0], Effect::HighWatermark(Offset(4)), "not past what it has");
    assert_eq!(fetched(&effects[1..]).1, 4);
    effects.clear();
    follower.on_answer(id, records(60, 0), &log, 0, &mut effects);
    assert_eq!(effects, [], "an answer that is not awaited");
}

#[test]
fn truncation_offset_is_where_epochs_diverge() {
    let check = |ours: &[i32], epoch: Option<i32>, end: i64, to: i64| {
        let mut log = log(ours);
        let (mut follower, effects) = follow(&log, 0, ResetPolicy::LogStart);
        let (id, ..) = fetched(&effects);
        let answer = Answer::Diverging { epoch: epoch.map(LeaderEpoch), end: Offset(end) };
        let mut effects = Vec::new();
        follower.on_answer(id, answer, &log, 0, &mut effects);
        assert_eq!(effects, [Effect::Truncate { to: Offset(to) }], "{ours:?} {epoch:?} {end}");
        log.truncate(Offset(to));
        effects.clear();
        follower.on_changed(&log, 0, &mut effects);
        assert_eq!(fetched(&effects).1, to);
    };
    // The leader's epoch ends before ours: keep the common part.
    check(&[1, 1, 1, 1], Some(1), 2, 2);
    // Ours ends before the leader's.
    check(&[1, 1, 3, 3], Some(1), 9, 2);
    // We do not know the leader's epoch 2: keep the older epochs, and ask about them next.
    check(&[1, 1, 3, 3], Some(2), 4, 2);
    // The leader knows none of our epochs.
    check(&[5, 5], Some(4), 2, 0);
    check(&[5, 5], None, 0, 0);
}

#[test]
fn follower_advances_log_start_and_resets_when_out_of_range() {
    let log5 = log(&[1, 1, 1, 1, 1]);
    let (mut follower, effects) = follow(&log5, 5, ResetPolicy::LogStart);
    let (id, ..) = fetched(&effects);
    let mut effects = Vec::new();
    follower.on_answer(id, records(5, 3), &log5, 0, &mut effects);
    assert_eq!(effects[0], Effect::SetStart { start: Offset(3) });
    let (id, ..) = fetched(&effects[1..]);
    effects.clear();
    follower.on_answer(id, Answer::OutOfRange { log_start: Offset(40) }, &log5, 0, &mut effects);
    assert_eq!(effects, [Effect::Reset { start: Offset(40) }]);
    let mut fresh = ToyLog::default();
    fresh.reset(Offset(40));
    effects.clear();
    follower.on_changed(&fresh, 0, &mut effects);
    assert_eq!(fetched(&effects), (3, 40, None));
    assert_eq!(follower.high_watermark(), Offset(40));
}

#[test]
fn snapshot_based_log_does_not_follow_the_leaders_log_start() {
    let log5 = log(&[1, 1, 1, 1, 1]);
    let (mut follower, effects) = follow(&log5, 5, ResetPolicy::InstallSnapshot);
    let (id, ..) = fetched(&effects);
    let mut effects = Vec::new();
    follower.on_answer(id, records(5, 3), &log5, 0, &mut effects);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::SetStart { .. })), "{effects:?}");
}

#[test]
fn nothing_is_reported_before_the_log_matched() {
    let mut log = log(&[1]);
    let (mut follower, effects) = follow(&log, 0, ResetPolicy::LogStart);
    let (id, ..) = fetched(&effects);
    log.append(Entry { epoch: LeaderEpoch(1), value: 0 });
    log.sync(Offset(2));
    let mut effects = Vec::new();
    follower.on_durable(&log, &mut effects);
    assert_eq!(effects, []);
    follower.on_answer(id, records(0, 0), &log, 0, &mut effects);
    log.append(Entry { epoch: LeaderEpoch(7), value: 0 });
    log.sync(Offset(3));
    effects.clear();
    follower.on_durable(&log, &mut effects);
    assert!(matches!(&effects[..], [Effect::Report { report, .. }] if report.durable == Offset(3)));
    effects.clear();
    follower.on_durable(&log, &mut effects);
    assert_eq!(effects, [], "nothing new");
}

#[test]
fn fetch_failures_back_off_exponentially() {
    let log = log(&[1]);
    let (mut follower, effects) = follow(&log, 0, ResetPolicy::LogStart);
    let (mut id, ..) = fetched(&effects);
    let mut now = 0;
    for pause in [20, 40, 80, 160, 320, 640, 1_000, 1_000] {
        follower.on_failed(id, now);
        let mut effects = Vec::new();
        follower.on_tick(&log, now + pause - 1, &mut effects);
        assert_eq!(effects, []);
        now += pause;
        follower.on_tick(&log, now, &mut effects);
        (id, ..) = fetched(&effects);
    }
    // A missing answer is a failure too.
    let mut effects = Vec::new();
    follower.on_tick(&log, now + 3_001, &mut effects);
    assert!(!follower.accepts(id));
}

#[test]
fn refusal_with_newer_knowledge_refreshes_the_record() {
    let log = log(&[1]);
    for (refusal, reads) in [
        (Refusal::FencedEpoch(LeaderEpoch(9)), true),
        (Refusal::NotLeader, true),
        (Refusal::UnknownEpoch(LeaderEpoch(3)), false),
    ] {
        let (mut follower, effects) = follow(&log, 0, ResetPolicy::LogStart);
        let (id, ..) = fetched(&effects);
        let mut effects = Vec::new();
        follower.on_refused(id, refusal, 0, &mut effects);
        assert_eq!(effects.contains(&Effect::Refresh), reads, "{refusal}");
        assert!(!follower.accepts(id));
    }
}

#[test]
fn snapshot_transfer_restarts_when_the_leader_took_a_new_snapshot() {
    let log = log(&[1]);
    let (mut follower, effects) = follow(&log, 0, ResetPolicy::InstallSnapshot);
    let (id, ..) = fetched(&effects);
    let mut effects = Vec::new();
    follower.on_answer(id, Answer::OutOfRange { log_start: Offset(40) }, &log, 0, &mut effects);
    let asked = |effects: &[Effect]| match effects {
        [Effect::FetchSnapshot { fetch, .. }] => (fetch.snapshot.map(|end| end.0), fetch.position),
        other => panic!("not one fetch: {other:?}"),
    };
    assert_eq!(asked(&effects), (None, 0));
    let chunk = |end, position, bytes: &'static str| Chunk {
        end: Offset(end),
        last_epoch: LeaderEpoch(6),
        total: 6,
        position,
        bytes: Bytes::from_static(bytes.as_bytes()),
    };
    let mut step = |chunk| {
        let mut effects = Vec::new();
        follower.on_chunk(chunk, 0, &mut effects);
        effects
    };
    assert_eq!(asked(&step(chunk(45, 0, "abcd"))), (Some(45), 4));
    assert_eq!(asked(&step(chunk(45, 0, "abcd"))), (Some(45), 4), "repeated");
    assert_eq!(asked(&step(chunk(50, 0, "uvw"))), (Some(50), 3), "another snapshot");
    let snapshot =
        Snapshot { end: Offset(50), last_epoch: LeaderEpoch(6), bytes: Bytes::from_static(b"uvwxyz") };
    assert_eq!(step(chunk(50, 3, "xyz")), [Effect::Install(snapshot)]);
    assert_eq!(follower.high_watermark(), Offset(50), "what a snapshot holds is committed");
}

#[test]
fn log_ending_below_compaction_boundary_is_rebuilt_once() {
    let mut log = log(&[1; 4]);
    let (mut follower, mut effects) = follow(&log, 0, ResetPolicy::LogStart);
    let (id, fetch) = fetch_in(&effects);
    assert_eq!(fetch.cleaned_below, Offset(0));
    effects.clear();
    let cleaned = Answer::Cleaned { below: Offset(9), log_start: Offset(2) };
    follower.on_answer(id, cleaned, &log, 1, &mut effects);
    assert_eq!(effects, [Effect::Rebuild { below: Offset(9), start: Offset(2) }]);
    // The driver notes it and resets the log: from then on the log may end below.
    log.reset(Offset(2));
    log.note_cleaned(Offset(9));
    effects.clear();
    follower.on_changed(&log, 2, &mut effects);
    let (id, fetch) = fetch_in(&effects);
    assert_eq!((fetch.offset, fetch.cleaned_below), (Offset(2), Offset(9)));
    // After a truncation it is like any other log that ends too early.
    effects.clear();
    let apart = Answer::Diverging { epoch: None, end: Offset(2) };
    follower.on_answer(id, apart, &log, 3, &mut effects);
    effects.clear();
    follower.on_changed(&log, 4, &mut effects);
    assert_eq!(fetch_in(&effects).1.cleaned_below, Offset(0));
}

#[test]
fn log_reaching_compaction_boundary_only_notes_it() {
    let mut log = log(&[1; 4]);
    let (mut follower, mut effects) = follow(&log, 0, ResetPolicy::LogStart);
    let (id, _) = fetch_in(&effects);
    effects.clear();
    follower.on_answer(id, Answer::Cleaned { below: Offset(4), log_start: Offset(0) }, &log, 1, &mut effects);
    assert_eq!(effects, [Effect::NoteCleaned { below: Offset(4) }]);
    log.note_cleaned(Offset(4));
    effects.clear();
    follower.on_changed(&log, 2, &mut effects);
    assert_eq!(fetch_in(&effects).1.cleaned_below, Offset(4));
}
