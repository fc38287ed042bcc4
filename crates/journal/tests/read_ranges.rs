//! Any read of any log returns exactly the frames of its range, whether in memory, on disk, sealed or dropped.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use moim_base::ManualClock;
use moim_journal::{
    Append, Durability, Journal, JournalId, JournalOptions, PlainFraming, ReadError, SimDisk, Store,
    StoreOptions,
};
use proptest::prelude::*;

/// One appended frame: how many offsets, how many bytes, and whether to flush or switch mode after it.
#[derive(Clone, Debug)]
struct Op {
    span: i64,
    size: usize,
    then: u8,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (1_i64..4, prop_oneof![1_usize..200, 1_000_usize..3_000, 20_000_usize..40_000], 0_u8..12);
    prop::collection::vec(op.prop_map(|(span, size, then)| Op { span, size, then }), 1..60)
}

fn build(ops: &[Op]) -> (Store, Arc<Journal>, Vec<(i64, i64, Bytes)>) {
    let options = StoreOptions {
        commit_file_bytes: 1 << 20,
        first_commit_file_bytes: 1 << 20,
        recent_bytes: 64 << 10,
        bypass_bytes: 24 << 10,
        min_free_bytes: 0,
        ..StoreOptions::default()
    };
    let clock = Arc::new(ManualClock::at(0));
    let store = Store::open(Path::new("/d"), Arc::new(SimDisk::new()), clock, options).unwrap();
    let id = JournalId { incarnation: 1, part: 0 };
    let journal = store
        .journal(
            id,
            JournalOptions {
                folder: "j".into(),
                framing: Arc::new(PlainFraming),
                durability: Durability::Fsync,
                segment_bytes: 100_000,
                tag: 0,
            },
        )
        .unwrap();
    let mut frames = Vec::new();
    for (at, op) in ops.iter().enumerate() {
        let base = journal.end();
        let last = base + op.span - 1;
        let frame = PlainFraming::encode(base, last, 0, base, &vec![at as u8; op.size]);
        let body = frame.slice(16..);
        let append =
            Append { base, last, epoch: 0, max_timestamp_ms: base, prefix: &frame[..16], body: &body };
        while journal.append(Append { ..append }).is_err() {
            store.pump();
            store.checkpoint().unwrap();
        }
        frames.push((base, last, frame));
        match op.then {
            0..=3 => {
                store.pump();
            }
            4 => store.checkpoint().unwrap(),
            5 => journal.set_options(Durability::Replicated, 100_000),
            6 => journal.set_options(Durability::Fsync, 100_000),
            7 => journal.set_start(journal.durable_end().min(base).max(journal.start())).unwrap(),
            _ => {}
        }
    }
    (store, journal, frames)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn read_returns_the_frames_of_its_range(
        ops in ops(), reads in prop::collection::vec((0.0_f64..1.0, 0.0_f64..1.0, 1_usize..200_000), 20)
    ) {
        let (_store, journal, frames) = build(&ops);
        let (start, end) = (journal.start(), journal.end());
        for (from, until, max_bytes) in reads {
            let from = (from * (end + 1) as f64) as i64;
            let until = (until * (end + 2) as f64) as i64;
            let read = match journal.read(from, until, max_bytes) {
                Err(ReadError::OutOfRange { .. }) => {
                    prop_assert!(from < start);
                    continue;
                }
                other => other.unwrap(),
            };
            prop_assert!(from >= start);
            let mut want = Vec::new();
            let mut next = from;
            for (_, last, frame) in frames.iter().filter(|(_, last, _)| *last >= from) {
                let fits = want.is_empty() || want.len() + frame.len() <= max_bytes;
                if !fits || *last >= until {
                    break;
                }
                want.extend_from_slice(frame);
                next = last + 1;
            }
            let got: Vec<u8> = read.chunks.iter().flat_map(|chunk| chunk.bytes().unwrap().to_vec()).collect();
            prop_assert_eq!(read.bytes, got.len());
            prop_assert_eq!((read.next, got.len()), (next, want.len()), "{}..{} max {}", from, until, max_bytes);
            prop_assert!(got == want);
        }
    }
}
