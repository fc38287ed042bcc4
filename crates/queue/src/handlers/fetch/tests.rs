//! A fetch against a broker whose disk works when told to.

use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic};

use super::*;
use crate::testing::{Still, append, batch};

#[test]
fn a_watermark_that_moves_between_the_look_and_the_wish_is_not_slept_through() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    let wanted = FetchPartition { partition: 0, partition_max_bytes: 1 << 20, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![wanted], ..Default::default() };
    let request = FetchRequest { topics: vec![topic], ..Default::default() };
    let Plan::Once(wanted) = still.broker.fetch_sessions.plan(&still.broker.topics, &request, 6, 0) else {
        panic!("version 6 knows no sessions");
    };
    let mut fetch = PendingFetch {
        call: Call { correlation_id: 1, version: 6 },
        plan: Target::Once(Vec::new()),
        deadline: Instant::now() + Duration::from_secs(60),
        min_bytes: 1,
        max_bytes: 1 << 20,
        stable_only: false,
        answer: None,
        waiting: Vec::new(),
    };
    let found = fetch.look(&still.broker, &wanted, true, 0);
    assert_eq!(found.bytes, 0);
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert!(!fetch.leave_wishes(found.seen, &Wake::new(0, 1)), "there is news since the look");
}
