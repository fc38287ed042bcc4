//! The journal on the machine's own disk, with its threads running.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)] // tests may ask the machine for the time

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use moim_base::SystemClock;
use moim_journal::{
    Append, AppendError, Durability, DurableSink, Framing, Journal, JournalId, JournalOptions, PlainFraming,
    ReadError, RealDisk, Store, StoreOptions,
};

fn id(part: u32) -> JournalId {
    JournalId { incarnation: 77, part }
}

fn open(dir: &std::path::Path) -> Store {
    let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
    Store::open(dir, Arc::new(RealDisk), Arc::new(SystemClock::new()), options).unwrap()
}

fn options(part: u32, durability: Durability) -> JournalOptions {
    JournalOptions {
        folder: format!("queue/orders/Partition-{part}"),
        framing: Arc::new(PlainFraming),
        durability,
        segment_bytes: 1 << 20,
        tag: u64::from(part),
    }
}

fn frame(offset: i64, size: usize) -> Bytes {
    PlainFraming::encode(offset, offset, 1, 1_000 + offset, &vec![offset as u8; size])
}

fn append(journal: &Journal, offset: i64, size: usize) -> Result<(), AppendError> {
    let frame = frame(offset, size);
    let (prefix, body) = (frame.slice(..16), frame.slice(16..));
    journal.append(Append {
        base: offset,
        last: offset,
        epoch: 1,
        max_timestamp_ms: 1_000 + offset,
        prefix: &prefix,
        body: &body,
    })
}

fn wait_durable(journal: &Journal, end: i64) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while journal.durable_end() < end {
        assert!(Instant::now() < deadline, "durable end stays at {}", journal.durable_end());
        std::thread::yield_now();
    }
}

fn contents(journal: &Journal) -> Vec<(i64, usize)> {
    let mut found = Vec::new();
    journal
        .for_each_frame(journal.start(), journal.end(), &mut |frame, bytes| {
            assert!(PlainFraming.verify(bytes));
            found.push((frame.base, frame.len - 36));
            true
        })
        .unwrap();
    found
}

#[test]
fn appends_survive_a_clean_and_an_unclean_stop() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = |offset: i64| [100, 5_000, 400_000, 20][usize::try_from(offset).unwrap() % 4];
    let mut end = 0;
    for round in 0..4 {
        let store = open(dir.path());
        assert_eq!(store.was_clean(), round == 1 || round == 3, "round {round}");
        store.start();
        let fsync = store.journal(id(0), options(0, Durability::Fsync)).unwrap();
        let replicated = store.journal(id(1), options(1, Durability::Replicated)).unwrap();
        for journal in [&fsync, &replicated] {
            assert_eq!(
                (journal.start(), journal.end(), journal.durable_end()),
                (0, end, end),
                "round {round}"
            );
            let want: Vec<_> = (0..end).map(|offset| (offset, sizes(offset))).collect();
            assert_eq!(contents(journal), want, "round {round}");
            for offset in end..end + 40 {
                append(journal, offset, sizes(offset)).unwrap();
                assert_eq!(journal.end(), offset + 1);
            }
        }
        end += 40;
        wait_durable(&fsync, end);
        assert_eq!(replicated.durable_end(), end);
        assert_eq!(contents(&fsync).len(), contents(&replicated).len());
        assert!(fsync.segments().len() > 1, "a roll happened");
        assert!(store.recovery().damage.is_empty(), "{:?}", store.recovery());
        if round % 2 == 0 {
            store.close().unwrap();
        }
    }
}

#[test]
fn second_process_is_locked_out() {
    let dir = tempfile::tempdir().unwrap();
    let _store = open(dir.path());
    let again =
        Store::open(dir.path(), Arc::new(RealDisk), Arc::new(SystemClock::new()), StoreOptions::default());
    assert_eq!(again.err().unwrap().to_string(), "the data directory is in use by another process");
}

#[derive(Default)]
struct RecordingSink {
    ends: Mutex<std::collections::HashMap<u64, i64>>,
    wake: Condvar,
}

impl DurableSink for RecordingSink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        let mut ends = self.ends.lock().unwrap();
        for (tag, end) in advanced {
            let old = ends.insert(*tag, *end).unwrap_or(0);
            assert!(old < *end, "tag {tag} went from {old} to {end}");
        }
        self.wake.notify_all();
    }
}

#[test]
fn sink_is_notified_of_every_journal_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let sink = Arc::new(RecordingSink::default());
    store.set_sink(sink.clone());
    store.start();
    let journals: Vec<_> =
        (0..8).map(|part| store.journal(id(part), options(part, Durability::Fsync)).unwrap()).collect();
    for offset in 0..50 {
        for journal in &journals {
            append(journal, offset, if offset % 10 == 3 { 300_000 } else { 200 }).unwrap();
        }
    }
    let ends = sink.ends.lock().unwrap();
    let (ends, timeout) = sink
        .wake
        .wait_timeout_while(ends, Duration::from_secs(20), |ends| {
            ends.len() < 8 || ends.values().any(|end| *end < 50)
        })
        .unwrap();
    assert!(!timeout.timed_out(), "{ends:?}");
}

#[test]
fn truncate_log_start_and_delete_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(dir.path());
        store.start();
        for part in 0..3 {
            let journal = store.journal(id(part), options(part, Durability::Fsync)).unwrap();
            for offset in 0..500 {
                append(&journal, offset, 5_000).unwrap();
            }
            assert_eq!(append(&journal, 7, 1).unwrap_err().to_string(), "expected offset 500");
        }
        let cut = store.journal(id(0), options(0, Durability::Fsync)).unwrap();
        cut.truncate(300).unwrap();
        assert_eq!((cut.end(), cut.durable_end()), (300, 300));
        append(&cut, 300, 9).unwrap();
        wait_durable(&cut, 301);
        store.journal(id(1), options(1, Durability::Fsync)).unwrap().set_start(450).unwrap();
        store.delete(id(2)).unwrap();
    }
    let store = open(dir.path());
    let found: Vec<_> = store.journals().into_iter().map(|(id, _)| id.part).collect();
    assert_eq!(found, [0, 1]);
    let cut = store.journal(id(0), options(0, Durability::Fsync)).unwrap();
    assert_eq!(contents(&cut).last(), Some(&(300, 9)));
    assert_eq!(cut.end(), 301);
    let started = store.journal(id(1), options(1, Durability::Fsync)).unwrap();
    assert_eq!((started.start(), started.end()), (450, 500));
    assert!(matches!(started.read(10, 500, 10), Err(ReadError::OutOfRange { start: 450, end: 500 })));
    assert!(started.segments()[0].base > 0, "whole segments below the start are gone");
    assert!(!dir.path().join("queue/orders/Partition-2").exists());
    assert!(store.recovery().damage.is_empty());
}
