//! Fetches against a broker whose disk syncs on request.

use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic};

use super::*;
use crate::testing::{TestBroker, append, batch};

/// A fetch of partition 0 of `t` that waits a minute, from a client without sessions.
fn pending(fixture: &TestBroker) -> DelayedFetch {
    let requested = FetchPartition { partition: 0, partition_max_bytes: 1 << 20, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![requested], ..Default::default() };
    let request = FetchRequest { topics: vec![topic], ..Default::default() };
    let Plan::Once(requested) = fixture.broker.fetch_sessions.plan(&fixture.broker.topics, &request, 6, 0)
    else {
        panic!("version 6 has no sessions");
    };
    DelayedFetch {
        call: Call { correlation_id: 1, version: 6 },
        plan: Target::Once(requested),
        request_frame: Bytes::from_static(b"\0\x01\0\x06\0\0\0\x01the question"),
        max_wait_ms: 60_000,
        deadline: Instant::now() + Duration::from_secs(60),
        retry_at: None,
        min_bytes: 1,
        max_bytes: 1 << 20,
        stable_only: false,
        rack: None,
        outcome: None,
        empty_response: None,
        watched: Vec::new(),
    }
}

fn memory(fixture: &TestBroker) -> ConnectionBudget {
    fixture.broker.responses.connection(usize::MAX)
}

/// The response bytes.
fn written(fetch: &mut DelayedFetch, fixture: &TestBroker) -> Bytes {
    let mut out = ResponseWriter::default();
    fetch.write(&fixture.broker, &mut out).unwrap();
    out.into_bytes()
}

#[test]
fn high_watermark_moved_between_read_and_watch_is_not_missed() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    let mut fetch = pending(&fixture);
    let Target::Once(requested) = std::mem::replace(&mut fetch.plan, Target::Once(Vec::new())) else {
        panic!("no session was requested");
    };
    let found = fetch.read_partitions(&fixture.broker, &requested, true, 0);
    assert_eq!(found.bytes, 0);
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    assert!(
        !fetch.watch_partitions(found.watched, &Wake::new(0, 1)),
        "the high watermark moved since the read"
    );
}

#[test]
fn expired_wait_without_new_data_returns_the_cached_empty_response() {
    let fixture = TestBroker::new();
    fixture.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let (now, mut fetch, mut fresh) = (Instant::now(), pending(&fixture), pending(&fixture));
    assert!(!fetch.poll(&fixture.broker, &wake, now, false, &memory(&fixture)));
    assert!(
        !fetch.poll(&fixture.broker, &wake, now, false, &memory(&fixture)),
        "the deadline has not passed"
    );
    assert!(fetch.poll(&fixture.broker, &wake, fetch.deadline, false, &memory(&fixture)));
    assert!(matches!(fetch.outcome, Some(Outcome::EmptyResponse)));
    fresh.deadline = now;
    assert!(fresh.poll(&fixture.broker, &wake, now, false, &memory(&fixture)));
    assert_eq!(written(&mut fetch, &fixture), written(&mut fresh, &fixture));
}

#[test]
fn records_appended_during_the_wait_replace_the_cached_empty_response() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let mut fetch = pending(&fixture);
    let now = Instant::now();
    assert!(!fetch.poll(&fixture.broker, &wake, now, false, &memory(&fixture)));
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    assert!(
        !fetch.poll(&fixture.broker, &wake, now, false, &memory(&fixture)),
        "it reads again after a wake-up"
    );
    assert!(fetch.poll(&fixture.broker, &wake, now, true, &memory(&fixture)));
    assert!(matches!(&fetch.outcome, Some(Outcome::Found(found)) if found.bytes > 0));
}

/// A fetch that had an empty response.
fn answered_empty(fixture: &TestBroker, wake: &Arc<Wake>) -> DelayedFetch {
    let mut fetch = pending(fixture);
    assert!(!fetch.poll(&fixture.broker, wake, Instant::now(), false, &memory(fixture)));
    assert!(fetch.poll(&fixture.broker, wake, fetch.deadline, false, &memory(fixture)));
    written(&mut fetch, fixture);
    assert!(fetch.can_resume());
    fetch
}

#[test]
fn identical_request_resumes_the_idle_fetch() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    let wake = Wake::new(0, 1);
    let (mut fetch, now) = (answered_empty(&fixture, &wake), Instant::now());
    for other in [&b"\0\x01\0\x06\0\0\0\x02another one"[..], b"\0\x01\0\x07\0\0\0\x02the question", b"\0\x01"]
    {
        assert!(!fetch.maybe_resume(other, &fixture.broker, now), "{other:?}");
    }
    let same = b"\0\x01\0\x06\0\0\x01\x02the question";
    assert!(fetch.maybe_resume(same, &fixture.broker, now));
    assert!(fetch.deadline >= now + Duration::from_secs(60));
    assert!(!fetch.poll(&fixture.broker, &wake, now, false, &memory(&fixture)));
    assert!(fetch.poll(&fixture.broker, &wake, fetch.deadline, false, &memory(&fixture)));
    assert_eq!(written(&mut fetch, &fixture)[CORRELATION], [0, 0, 1, 2]);
    // The watch was never removed.
    assert!(fetch.maybe_resume(same, &fixture.broker, now));
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    assert!(fetch.poll(&fixture.broker, &wake, now, true, &memory(&fixture)));
    assert!(matches!(&fetch.outcome, Some(Outcome::Found(found)) if found.bytes > 0));
    assert!(!fetch.can_resume(), "a fetch with records is not resumed");
}

#[test]
fn changed_offsets_prevent_resuming_the_idle_fetch() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    let wake = Wake::new(0, 1);
    let at_the_end = || {
        let mut fetch = pending(&fixture);
        let Target::Once(requested) = &mut fetch.plan else { panic!("no session was requested") };
        requested[0].fetch_offset = partition.high_watermark();
        assert!(!fetch.poll(&fixture.broker, &wake, Instant::now(), false, &memory(&fixture)));
        assert!(fetch.poll(&fixture.broker, &wake, fetch.deadline, false, &memory(&fixture)));
        fetch
    };
    let same = b"\0\x01\0\x06\0\0\0\x02the question";
    let mut fetch = at_the_end();
    assert!(fetch.maybe_resume(same, &fixture.broker, Instant::now()));
    partition.delete_records(-1).unwrap();
    assert!(!fetch.maybe_resume(same, &fixture.broker, Instant::now()), "the log start offset moved");
    let mut fetch = at_the_end();
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    assert!(!fetch.maybe_resume(same, &fixture.broker, Instant::now()), "a record was appended");
    let mut fetch = at_the_end();
    partition.close(ErrorCode::UnknownTopicOrPartition);
    assert!(!fetch.maybe_resume(same, &fixture.broker, Instant::now()), "the topic was deleted");
}

#[test]
fn long_waits_end_on_the_timer_grid_and_never_early() {
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
