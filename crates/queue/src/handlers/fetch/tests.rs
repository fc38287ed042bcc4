//! A fetch against a broker whose disk works when told to.

use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic};

use super::*;
use crate::testing::{Still, append, batch};

/// A fetch of partition 0 of `t` that waits a minute, as a client without sessions sends it.
fn pending(still: &Still) -> PendingFetch {
    let wanted = FetchPartition { partition: 0, partition_max_bytes: 1 << 20, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![wanted], ..Default::default() };
    let request = FetchRequest { topics: vec![topic], ..Default::default() };
    let Plan::Once(wanted) = still.broker.fetch_sessions.plan(&still.broker.topics, &request, 6, 0) else {
        panic!("version 6 knows no sessions");
    };
    PendingFetch {
        call: Call { correlation_id: 1, version: 6 },
        plan: Target::Once(wanted),
        asked: Bytes::from_static(b"\0\x01\0\x06\0\0\0\x01the question"),
        max_wait_ms: 60_000,
        deadline: Instant::now() + Duration::from_secs(60),
        starved: None,
        min_bytes: 1,
        max_bytes: 1 << 20,
        stable_only: false,
        rack: None,
        answer: None,
        kept: None,
        waiting: Vec::new(),
    }
}

fn memory(still: &Still) -> ConnectionBudget {
    still.broker.responses.connection(usize::MAX)
}

/// What the client gets.
fn written(fetch: &mut PendingFetch, still: &Still) -> Bytes {
    let mut out = Writer::default();
    fetch.write(&still.broker, &mut out).unwrap();
    out.into_bytes()
}

#[test]
fn a_watermark_that_moves_between_the_look_and_the_wish_is_not_slept_through() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    let mut fetch = pending(&still);
    let Target::Once(wanted) = std::mem::replace(&mut fetch.plan, Target::Once(Vec::new())) else {
        panic!("no session was asked for");
    };
    let found = fetch.look(&still.broker, &wanted, true, 0);
    assert_eq!(found.bytes, 0);
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert!(!fetch.leave_wishes(found.seen, &Wake::new(0, 1)), "there is news since the look");
}

#[test]
fn a_wait_that_ends_without_news_gives_the_answer_of_its_first_look() {
    let still = Still::new();
    still.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let (now, mut fetch, mut fresh) = (Instant::now(), pending(&still), pending(&still));
    assert!(!fetch.poll(&still.broker, &wake, now, false, &memory(&still)));
    assert!(!fetch.poll(&still.broker, &wake, now, false, &memory(&still)), "time has not passed");
    assert!(fetch.poll(&still.broker, &wake, fetch.deadline, false, &memory(&still)));
    assert!(matches!(fetch.answer, Some(Answer::Kept)));
    fresh.deadline = now;
    assert!(fresh.poll(&still.broker, &wake, now, false, &memory(&still)));
    assert_eq!(written(&mut fetch, &still), written(&mut fresh, &still));
}

#[test]
fn records_that_come_during_the_wait_are_answered_with_and_not_what_was_kept() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let mut fetch = pending(&still);
    let now = Instant::now();
    assert!(!fetch.poll(&still.broker, &wake, now, false, &memory(&still)));
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert!(
        !fetch.poll(&still.broker, &wake, now, false, &memory(&still)),
        "it looks again when it is told of news"
    );
    assert!(fetch.poll(&still.broker, &wake, now, true, &memory(&still)));
    assert!(matches!(&fetch.answer, Some(Answer::Found(found)) if found.bytes > 0));
}

/// A fetch that was answered with nothing.
fn answered_empty(still: &Still, wake: &Arc<Wake>) -> PendingFetch {
    let mut fetch = pending(still);
    assert!(!fetch.poll(&still.broker, wake, Instant::now(), false, &memory(still)));
    assert!(fetch.poll(&still.broker, wake, fetch.deadline, false, &memory(still)));
    written(&mut fetch, still);
    assert!(fetch.can_repeat());
    fetch
}

#[test]
fn the_same_question_goes_on_with_the_fetch_before_it() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let (mut fetch, now) = (answered_empty(&still, &wake), Instant::now());
    for other in [&b"\0\x01\0\x06\0\0\0\x02another one"[..], b"\0\x01\0\x07\0\0\0\x02the question", b"\0\x01"]
    {
        assert!(!fetch.repeat(other, &still.broker, now), "{other:?}");
    }
    let same = b"\0\x01\0\x06\0\0\x01\x02the question";
    assert!(fetch.repeat(same, &still.broker, now));
    assert!(fetch.deadline >= now + Duration::from_secs(60));
    assert!(!fetch.poll(&still.broker, &wake, now, false, &memory(&still)));
    assert!(fetch.poll(&still.broker, &wake, fetch.deadline, false, &memory(&still)));
    assert_eq!(written(&mut fetch, &still)[CORRELATION], [0, 0, 1, 2]);
    // Its wish was there all the time.
    assert!(fetch.repeat(same, &still.broker, now));
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert!(fetch.poll(&still.broker, &wake, now, true, &memory(&still)));
    assert!(matches!(&fetch.answer, Some(Answer::Found(found)) if found.bytes > 0));
    assert!(!fetch.can_repeat(), "who got records asks for others");
}

#[test]
fn a_question_does_not_go_on_after_anything_changed_that_its_answer_tells() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    let wake = Wake::new(0, 1);
    let at_the_end = || {
        let mut fetch = pending(&still);
        let Target::Once(wanted) = &mut fetch.plan else { panic!("no session was asked for") };
        wanted[0].fetch_offset = partition.high_watermark();
        assert!(!fetch.poll(&still.broker, &wake, Instant::now(), false, &memory(&still)));
        assert!(fetch.poll(&still.broker, &wake, fetch.deadline, false, &memory(&still)));
        fetch
    };
    let same = b"\0\x01\0\x06\0\0\0\x02the question";
    let mut fetch = at_the_end();
    assert!(fetch.repeat(same, &still.broker, Instant::now()));
    partition.delete_records(-1).unwrap();
    assert!(!fetch.repeat(same, &still.broker, Instant::now()), "the log starts elsewhere");
    let mut fetch = at_the_end();
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert!(!fetch.repeat(same, &still.broker, Instant::now()), "there is a record");
    let mut fetch = at_the_end();
    partition.close(ErrorCode::UnknownTopicOrPartition);
    assert!(!fetch.repeat(same, &still.broker, Instant::now()), "the topic is gone");
}

#[test]
fn long_waits_end_together_and_never_early() {
    let started = Instant::now();
    let at = |now_ms: u64, wait_ms| {
        let now = started + Duration::from_millis(now_ms);
        (deadline(now, started, wait_ms) - started).as_millis() as u64
    };
    for (now_ms, wait_ms, expected) in [
        (3, 20, 23),
        (3, 99, 102),
        (3, 100, 110),
        (1, 500, 550),
        (50, 500, 550),
        (51, 500, 600),
        (7, 5000, 5050),
    ] {
        assert_eq!(at(now_ms, wait_ms), expected, "{wait_ms} ms from {now_ms}");
    }
}
