//! SIGKILL in a loop under load: every acknowledged record is there, once, in order.
//!
//! `INTEROP_CRASH_ROUNDS` sets the number of rounds (CI: a few; the proof: a hundred), `INTEROP_SEED` repeats a run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::topic_partition_list::Offset;

use super::support::*;

const PARTITIONS: i32 = 3;

pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn acknowledged_records_survive_sigkill_without_duplicates() {
    let Some(mut server) = own_server() else { return };
    let rounds = number("INTEROP_CRASH_ROUNDS", 5);
    let seed = number("INTEROP_SEED", fastrand::u64(..1_000_000));
    eprintln!("INTEROP_SEED={seed} INTEROP_CRASH_ROUNDS={rounds}");
    let mut random = fastrand::Rng::with_seed(seed);
    let address = server.kafka().to_owned();
    let topic = topic(&address, "crash", PARTITIONS, &[]);
    let settings = [
        ("enable.idempotence", "true"),
        ("linger.ms", "1"),
        ("batch.num.messages", "50"),
        ("message.timeout.ms", "300000"),
        ("queue.buffering.max.messages", "100000"),
    ];
    let mut sender = Sender::new(&address, &settings);
    let mut homes = Vec::new();
    let mut commits: i64 = 0;
    for round in 0..rounds {
        // Load until the kill, which may hit any point: a batch, an fsync, a checkpoint.
        let moment = Instant::now() + Duration::from_millis(random.u64(20..400));
        while Instant::now() < moment {
            for _ in 0..random.usize(1..200) {
                let partition = random.i32(0..PARTITIONS);
                let filler = if random.u8(..100) == 0 { 300_000 } else { random.usize(0..500) };
                let text = format!("{} {}", homes.len(), "x".repeat(filler));
                homes.push(partition);
                sender.send(&topic, Some(partition), &Sample::value(text));
            }
        }
        server.kill().unwrap();
        server.restart().unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error:#}"));
        commits = commit_one_more(&address, &topic, commits);
    }
    let reports = sender.reports();
    assert!(reports.iter().all(Result::is_ok), "seed {seed}");
    check(&address, &topic, &homes, &reports, seed);
    assert_eq!(committed(&address, "crash", &topic, 0), Some(commits), "seed {seed}");
}

/// Checks the committed offset of the previous round, and commits the next one.
fn commit_one_more(address: &str, topic: &str, before: i64) -> i64 {
    if before > 0 {
        assert_eq!(committed(address, "crash", topic, 0), Some(before), "an acknowledged commit");
    }
    let consumer: BaseConsumer = client(address, &[("group.id", "crash")]).create().unwrap();
    consumer.commit(&partition(topic, 0, Offset::Offset(before + 1)), CommitMode::Sync).unwrap();
    before + 1
}

pub(crate) fn check(address: &str, topic: &str, homes: &[i32], reports: &[Report], seed: u64) {
    let mut expected: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (i, home) in homes.iter().enumerate() {
        expected.entry(*home).or_default().push(i);
    }
    let mut found: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for seen in read_all(address, topic, PARTITIONS, &[("check.crcs", "true")]) {
        let text = seen.text();
        let i: usize = text.split(' ').next().and_then(|number| number.parse().ok()).expect("a number");
        if let Ok((partition, offset)) = reports[i]
            && offset >= 0
        {
            assert_eq!((partition, offset), (seen.partition, seen.offset), "seed {seed}: record {i} moved");
        }
        found.entry(seen.partition).or_default().push(i);
    }
    for (partition, expected) in &expected {
        let found = found.get(partition).map(Vec::as_slice).unwrap_or_default();
        let differs = expected.iter().zip(found).position(|(a, b)| a != b);
        assert!(
            expected == found,
            "seed {seed}, partition {partition}: expected {} records, found {}; they differ from {differs:?}",
            expected.len(),
            found.len()
        );
    }
}

/// With `replicated` durability an acknowledged record is not necessarily on disk: the last replica reports its log
/// end, and leads again.
#[test]
fn only_replica_with_replicated_durability_leads_again_after_sigkill() {
    let Some(mut server) = own_server() else { return };
    let topic = topic(server.kafka(), "crash-replicated", 1, &[("durability", "replicated")]);
    for round in 0..3 {
        deliver(server.kafka(), &topic, &[&format!("round {round}")]);
        server.kill().unwrap();
        server.restart().unwrap();
        // The kernel survives, so the written data is there.
        assert_eq!(values(server.kafka(), &topic, &[]).len(), round + 1);
    }
}
