//! Power cuts while the store's own threads run: commit, bypass, write-behind and checkpoints interleave freely, and
//! acknowledged frames must survive. `crash.rs` crashes at every operation, but on one thread; this test finds races
//! between threads.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moim_base::SystemClock;
use moim_journal::disk::{Fault, Survival};
use moim_journal::{
    Append, AppendError, Durability, Framing, Journal, JournalId, JournalOptions, PlainFraming, ReadError,
    SimDisk, Store, StoreOptions,
};

const JOURNALS: u32 = 3;
/// A store that has not met its power cut by then has another problem.
const MOST_APPENDS: usize = 200_000;

fn open(disk: &SimDisk, dead: &Arc<AtomicBool>) -> Store {
    open_with(disk, dead, 64 << 20)
}

fn open_with(disk: &SimDisk, dead: &Arc<AtomicBool>, recent_bytes: usize) -> Store {
    let hook = Arc::clone(dead);
    let options = StoreOptions {
        commit_file_bytes: 64 << 10,
        first_commit_file_bytes: 64 << 10,
        bypass_bytes: 2 << 10,
        checkpoint_ms: 0,
        recent_bytes,
        min_free_bytes: 0,
        fatal: Arc::new(move |_, _| hook.store(true, Ordering::SeqCst)),
        ..StoreOptions::default()
    };
    Store::open(Path::new("/data"), Arc::new(disk.clone()), Arc::new(SystemClock::new()), options).unwrap()
}

fn journal(store: &Store, part: u32) -> Arc<Journal> {
    let options = JournalOptions {
        folder: format!("j/{part}"),
        framing: Arc::new(PlainFraming),
        durability: Durability::Fsync,
        segment_bytes: 32 << 10,
        tag: u64::from(part),
    };
    store.journal(JournalId { incarnation: 1, part }, options).unwrap()
}

/// Appends until the power is cut; returns what each journal had acknowledged by then.
fn load(disk: &SimDisk, cut_after: u64, random: &mut fastrand::Rng) -> Vec<i64> {
    let dead = Arc::new(AtomicBool::new(false));
    let store = open(disk, &dead);
    let journals: Vec<_> = (0..JOURNALS).map(|part| journal(&store, part)).collect();
    store.start();
    disk.set_fault(Some((disk.operations() + cut_after, Fault::PowerCut)));
    let mut acknowledged = vec![0; JOURNALS as usize];
    for _ in 0..MOST_APPENDS {
        if dead.load(Ordering::SeqCst) {
            break;
        }
        for (at, journal) in journals.iter().enumerate() {
            let end = journal.end();
            let size = if random.u8(..50) == 0 { 3 << 10 } else { random.usize(10..200) };
            let frame = PlainFraming::encode(end, end, 0, 0, &vec![7; size]);
            let append =
                Append { base: end, last: end, epoch: 0, max_timestamp_ms: 0, prefix: &[], body: &frame };
            // Refused when write-behind is behind, or the store is dead: both are fine here.
            let _ = journal.append(append);
            acknowledged[at] = journal.durable_end();
        }
    }
    for (at, journal) in journals.iter().enumerate() {
        acknowledged[at] = journal.durable_end();
    }
    assert!(dead.load(Ordering::SeqCst), "the power was never cut");
    acknowledged
}

fn check(disk: &SimDisk, acknowledged: &[i64], round: &str) {
    let dead = Arc::new(AtomicBool::new(false));
    let store = open(disk, &dead);
    for (part, acknowledged) in acknowledged.iter().enumerate() {
        let journal = journal(&store, part as u32);
        assert!(!journal.is_damaged(), "{round}, journal {part}: {:?}", store.recovery().damage);
        let end = journal.end();
        assert!(
            end >= *acknowledged,
            "{round}, journal {part}: ends at {end}, {acknowledged} were acknowledged"
        );
        let mut next = 0;
        let mut walk = |frame: &moim_journal::Frame, _: &[u8]| {
            assert_eq!(frame.base, next, "{round}, journal {part}");
            next += 1;
            true
        };
        journal.for_each_frame(0, end, &mut walk).unwrap();
        assert_eq!(next, end, "{round}, journal {part}");
    }
}

#[test]
fn power_cut_with_running_threads_loses_nothing_acknowledged() {
    let mut random = fastrand::Rng::with_seed(11);
    for run in 0..12 {
        let mut disk = SimDisk::new();
        for life in 0..3 {
            let acknowledged = load(&disk, random.u64(50..1_500), &mut random);
            let survival = [Survival::Nothing, Survival::Everything, Survival::Random][random.usize(..3)];
            disk = disk.crash(survival, random.u64(..));
            check(&disk, &acknowledged, &format!("run {run}, life {life}, {survival:?}"));
        }
    }
}

fn append(journal: &Journal, epoch: i32, size: usize) {
    let base = journal.end();
    let frame = PlainFraming::encode(base, base, epoch, 0, &vec![7; size]);
    let append = |body| Append { base, last: base, epoch, max_timestamp_ms: 0, prefix: &[], body };
    while let Err(AppendError::Busy) = journal.append(append(&frame)) {
        std::thread::yield_now();
    }
}

/// Reads until stopped: every frame is valid, and no truncation is taken for damage.
fn read_along(journal: &Journal, stop: &AtomicBool) -> u64 {
    let mut reads = 0;
    while !stop.load(Ordering::SeqCst) {
        let mut random = fastrand::Rng::with_seed(reads);
        let (start, end) = (journal.start(), journal.end());
        let from = random.i64(start.min(end)..=end);
        match journal.read(from, i64::MAX, random.usize(1..40_000)) {
            Ok(read) => {
                reads += 1;
                for chunk in read.chunks {
                    // A file may be truncated, and written again, after the lookup; frames in memory may not.
                    if let moim_journal::Chunk::Mem(bytes) = chunk {
                        assert!(PlainFraming.peek(&bytes).is_some());
                    }
                }
            }
            Err(ReadError::OutOfRange { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    reads
}

#[test]
fn truncations_during_reads_are_not_taken_for_damage() {
    let dead = Arc::new(AtomicBool::new(false));
    // Little is kept in memory: most reads access files.
    let store = open_with(&SimDisk::new(), &dead, 16 << 10);
    let journal = journal(&store, 0);
    store.start();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(|| read_along(&journal, &stop))).collect();
        let mut random = fastrand::Rng::with_seed(5);
        for round in 0..150 {
            for _ in 0..random.usize(10..120) {
                append(&journal, round, random.usize(10..1_500));
            }
            if random.u8(..4) == 0 {
                store.checkpoint().unwrap();
            }
            match random.u8(..10) {
                0 => journal.reset(random.i64(0..=journal.end() + 5), None).unwrap(),
                1..=2 => journal.set_start(random.i64(journal.start()..=journal.durable_end())).unwrap(),
                _ => journal.truncate(random.i64(journal.start()..=journal.end())).unwrap(),
            }
        }
        stop.store(true, Ordering::SeqCst);
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() > 0));
    });
    assert!(!journal.is_damaged());
    assert!(!dead.load(Ordering::SeqCst));
}
