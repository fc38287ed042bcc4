//! Behaviour of journals, one situation at a time, on a simulated disk and without threads.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use moim_base::ManualClock;
use moim_journal::disk::{Disk, Fault, Survival};
use moim_journal::{
    Append, AppendError, Durability, Framing, Journal, JournalError, JournalId, JournalOptions, PlainFraming,
    ReadError, Retain, Rewrite, SimDisk, Store, StoreOptions,
};

const DIR: &str = "/data";

fn id(part: u32) -> JournalId {
    JournalId { incarnation: 9, part }
}

struct Fixture {
    disk: SimDisk,
    clock: Arc<ManualClock>,
    fatal: Arc<AtomicUsize>,
    options: StoreOptions,
}

impl Fixture {
    fn new() -> Self {
        let fatal = Arc::new(AtomicUsize::new(0));
        let count = fatal.clone();
        let options = StoreOptions {
            commit_file_bytes: 256 << 10,
            first_commit_file_bytes: 64 << 10,
            recent_bytes: 1 << 20,
            bypass_bytes: 32 << 10,
            min_free_bytes: 0,
            fatal: Arc::new(move |_, _| {
                count.fetch_add(1, Ordering::SeqCst);
            }),
            ..StoreOptions::default()
        };
        Self { disk: SimDisk::new(), clock: Arc::new(ManualClock::at(1_000_000)), fatal, options }
    }

    fn open(&self) -> Store {
        self.try_open().unwrap()
    }

    fn try_open(&self) -> Result<Store, moim_journal::OpenError> {
        Store::open(Path::new(DIR), Arc::new(self.disk.clone()), self.clock.clone(), self.options.clone())
    }

    fn crash(&mut self, survival: Survival) {
        self.disk = self.disk.crash(survival, 1);
    }
}

fn journal_of(store: &Store, part: u32, durability: Durability, segment_bytes: u64) -> Arc<Journal> {
    let options = JournalOptions {
        folder: format!("queue/t/Partition-{part}"),
        framing: Arc::new(PlainFraming),
        durability,
        segment_bytes,
        tag: 0,
    };
    store.journal(id(part), options).unwrap()
}

fn fsync(store: &Store) -> Arc<Journal> {
    journal_of(store, 0, Durability::Fsync, 64 << 10)
}

fn try_append(journal: &Journal, size: usize, time: i64) -> Result<(), AppendError> {
    let base = journal.end();
    let frame = PlainFraming::encode(base, base, 1, time, &vec![base as u8; size]);
    let body = frame.slice(16..);
    journal.append(Append {
        base,
        last: base,
        epoch: 1,
        max_timestamp_ms: time,
        prefix: &frame[..16],
        body: &body,
    })
}

fn append(journal: &Journal, count: usize, size: usize) {
    for _ in 0..count {
        try_append(journal, size, 1_000 + journal.end()).unwrap();
    }
}

fn offsets(journal: &Journal) -> Vec<i64> {
    let mut found = Vec::new();
    let walk = &mut |frame: &moim_journal::Frame, _: &[u8]| {
        found.push(frame.base);
        true
    };
    journal.for_each_frame(journal.start(), journal.end(), walk).unwrap();
    found
}

fn range(from: i64, to: i64) -> Vec<i64> {
    (from..to).collect()
}

/// Frames of at most 100 bytes.
struct Short;

impl Framing for Short {
    fn header_len(&self) -> usize {
        PlainFraming.header_len()
    }

    fn peek(&self, header: &[u8]) -> Option<moim_journal::Frame> {
        PlainFraming.peek(header).filter(|frame| frame.len <= self.max_len())
    }

    fn max_len(&self) -> usize {
        100
    }

    fn verify(&self, frame: &[u8]) -> bool {
        PlainFraming.verify(frame)
    }
}

#[test]
fn frame_over_the_framing_limit_is_refused() {
    for durability in [Durability::Fsync, Durability::Replicated] {
        let store = Fixture::new().open();
        store.start();
        let options = JournalOptions {
            folder: format!("short/{durability:?}"),
            framing: Arc::new(Short),
            durability,
            segment_bytes: 64 << 10,
            tag: 0,
        };
        let journal = store.journal(id(9 + durability as u32), options).unwrap();
        let payload = 100 - PlainFraming.header_len();
        for size in [1, payload - 1, payload] {
            try_append(&journal, size, 1).unwrap();
        }
        for size in [payload + 1, 1 << 20] {
            let refused = try_append(&journal, size, 1);
            assert!(matches!(refused, Err(AppendError::TooLarge { max: 100, .. })), "{size}: {refused:?}");
        }
        try_append(&journal, payload, 1).unwrap();
        assert_eq!(offsets(&journal), range(0, 4));
        store.close().unwrap();
    }
}

#[test]
fn large_frame_survives_a_log_start_past_earlier_small_ones() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 1, 40_000 - 8_000);
    append(&journal, 1, 40_000);
    while store.journal(id(0), opts()).unwrap().durable_end() < 2 {
        store.pump();
    }
    journal.set_start(1).unwrap();
    store.close().unwrap();
    bed.crash(Survival::Nothing);
    let store = bed.open();
    assert_eq!(offsets(&fsync(&store)), [1]);
}

fn opts() -> JournalOptions {
    JournalOptions {
        folder: "queue/t/Partition-0".into(),
        framing: Arc::new(PlainFraming),
        durability: Durability::Fsync,
        segment_bytes: 64 << 10,
        tag: 0,
    }
}

#[test]
fn idle_journal_has_no_file_and_no_entry() {
    let bed = Fixture::new();
    let store = bed.open();
    for part in 0..100 {
        journal_of(&store, part, Durability::Replicated, 1 << 20);
    }
    store.close().unwrap();
    let files: Vec<_> = bed.disk.files().into_iter().filter(|path| path.starts_with("/data/queue")).collect();
    assert!(files.is_empty(), "{files:?}");
    drop(store);
    assert!(bed.open().journals().is_empty());
}

#[test]
fn nothing_is_durable_before_the_fsync() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 3, 100);
    assert_eq!((journal.end(), journal.durable_end()), (3, 0));
    assert_eq!(offsets(&journal), range(0, 3), "visible at once");
    store.pump();
    assert_eq!(journal.durable_end(), 3);
    append(&journal, 1, 100);
    bed.crash(Survival::Nothing);
    assert_eq!(offsets(&fsync(&bed.open())), range(0, 3));
}

#[test]
fn repeated_kills_before_the_first_checkpoint_do_not_fill_the_commit_log() {
    let mut bed = Fixture::new();
    for _ in 0..20 {
        let store = bed.open();
        fsync(&store);
        store.pump();
        bed.crash(Survival::Everything);
    }
    let store = bed.open();
    let journal = fsync(&store);
    store.pump();
    append(&journal, 3, 100);
    store.pump();
    assert_eq!(journal.durable_end(), 3);
    assert!(store.stats().commit_files <= bed.options.commit_files as u64, "{:?}", store.stats());
}

#[test]
fn failed_fsync_is_fatal_and_acknowledges_nothing() {
    let bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 1, 100);
    bed.disk.set_fault(Some((bed.disk.operations() + 1, Fault::Io)));
    store.pump();
    assert_eq!((bed.fatal.load(Ordering::SeqCst), journal.durable_end()), (1, 0));
    store.pump();
    assert_eq!(journal.durable_end(), 0, "never retried");
    assert!(matches!(try_append(&journal, 10, 0), Err(AppendError::Closed)));
}

#[test]
fn full_disk_refuses_appends_serves_reads_and_recovers() {
    let mut bed = Fixture::new();
    bed.options.min_free_bytes = 100_000;
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 5, 1_000);
    store.pump();
    bed.disk.set_free_bytes(Some(50_000));
    bed.clock.advance_ms(600);
    store.pump();
    assert!(store.is_full() && store.stats().full);
    assert!(matches!(try_append(&journal, 10, 0), Err(AppendError::Full)));
    assert_eq!(offsets(&journal), range(0, 5));
    journal.set_start(2).unwrap();
    bed.disk.set_free_bytes(Some(500_000));
    bed.clock.advance_ms(600);
    store.pump();
    append(&journal, 1, 10);
    assert_eq!(offsets(&journal), range(2, 6));
}

#[test]
fn priority_journals_may_use_most_of_the_reserved_space() {
    let mut bed = Fixture::new();
    bed.options.min_free_bytes = 100_000;
    let store = bed.open();
    let first = fsync(&store);
    let other = journal_of(&store, 1, Durability::Fsync, 64 << 10);
    assert!(first.set_priority(true));
    let free = |bytes| {
        bed.disk.set_free_bytes(Some(bytes));
        bed.clock.advance_ms(600);
        store.pump();
    };
    free(50_000);
    assert!(store.is_full() && !store.is_exhausted());
    assert!(matches!(try_append(&other, 10, 0), Err(AppendError::Full)));
    append(&first, 1, 10);
    store.pump();
    assert_eq!(first.durable_end(), 1);
    free(20_000);
    assert!(store.is_exhausted());
    assert!(matches!(try_append(&first, 10, 0), Err(AppendError::Full)));
    free(500_000);
    append(&first, 1, 10);
    append(&other, 1, 10);
}

#[test]
fn no_space_during_write_behind_loses_nothing() {
    let mut bed = Fixture::new();
    bed.options.recent_bytes = 16 << 10;
    let store = bed.open();
    let journal = fsync(&store);
    bed.disk.set_free_bytes(Some(0));
    let mut taken = 0;
    for _ in 0..200 {
        match try_append(&journal, 1_000, 5) {
            Ok(()) => taken += 1,
            Err(AppendError::Full | AppendError::Busy) => {}
            Err(error) => panic!("{error}"),
        }
        store.pump();
    }
    assert!(taken > 3 && taken < 200, "{taken}");
    assert_eq!(bed.fatal.load(Ordering::SeqCst), 0);
    assert_eq!(offsets(&journal), range(0, taken));
    bed.disk.set_free_bytes(Some(1 << 30));
    bed.clock.advance_ms(10_000);
    store.pump();
    store.pump();
    append(&journal, 1, 10);
    store.pump();
    store.checkpoint().unwrap();
    assert_eq!(offsets(&journal), range(0, taken + 1));
    bed.crash(Survival::Nothing);
    assert_eq!(offsets(&fsync(&bed.open())), range(0, taken + 1));
}

#[test]
fn callers_wait_for_a_slow_disk_and_are_refused_on_a_full_one() {
    let mut bed = Fixture::new();
    bed.options.recent_bytes = 16 << 10;
    let store = bed.open();
    let journal = fsync(&store);
    assert!(!store.is_behind());
    append(&journal, 26, 1_000);
    assert!(store.is_behind(), "the ring holds {}", store.stats().ring_bytes);
    bed.disk.set_free_bytes(Some(0));
    bed.clock.advance_ms(600);
    store.pump();
    assert!(store.is_full() && store.stats().ring_bytes > 24 << 10, "{:?}", store.stats());
    assert!(!store.is_behind(), "waiting does not help when the disk is full");
    assert!(matches!(try_append(&journal, 10, 0), Err(AppendError::Full)));
}

#[test]
fn damage_below_the_synced_point_is_reported_for_its_journal_only() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    let other = journal_of(&store, 1, Durability::Fsync, 64 << 10);
    append(&journal, 20, 1_000);
    append(&other, 20, 1_000);
    store.pump();
    store.close().unwrap();
    drop(store);
    let path = Path::new("/data/queue/t/Partition-0/00000000000000000000.log");
    bed.disk.flip_bit(path, 5_000);
    let store = bed.open();
    let journal = fsync(&store);
    let walked = journal.for_each_frame(0, 20, &mut |_, _| true);
    assert!(matches!(walked, Err(ReadError::Damaged { .. })));
    assert!(journal.is_damaged());
    assert!(matches!(try_append(&journal, 1, 1), Err(AppendError::Damaged)));
    append(&journal_of(&store, 1, Durability::Fsync, 64 << 10), 1, 10);
    // A segment that lost its tail below the synced point is detected at once.
    bed.disk.open(path).unwrap().set_len(3_000).unwrap();
    bed.crash(Survival::Everything);
    let store = bed.open();
    assert!(fsync(&store).is_damaged());
    let damage = store.recovery().damage;
    assert_eq!(damage.len(), 1, "{damage:?}");
}

#[test]
fn scrub_finds_a_flipped_bit_in_a_sealed_segment() {
    let bed = Fixture::new();
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Fsync, 10_000);
    append(&journal, 60, 1_000);
    store.pump();
    store.checkpoint().unwrap();
    let mut rounds = 0;
    let clean = loop {
        let report = store.scrub_step(5_000);
        assert!(report.damage.is_empty(), "{:?}", report.damage);
        rounds += 1;
        if report.round_done {
            break report;
        }
    };
    assert!(rounds > 5 && clean.round_done);
    store.close().unwrap();
    drop((journal, store));
    bed.disk.flip_bit(Path::new("/data/queue/t/Partition-0/00000000000000000009.log"), 4_000);
    let store = bed.open();
    journal_of(&store, 0, Durability::Fsync, 10_000);
    let mut damage = Vec::new();
    for _ in 0..100 {
        let report = store.scrub_step(5_000);
        damage.extend(report.damage);
        if report.round_done {
            break;
        }
    }
    assert_eq!(damage.len(), 1, "{damage:?}");
}

#[test]
fn unknown_files_are_moved_aside_never_deleted() {
    let bed = Fixture::new();
    for path in ["/data", "/data/queue", "/data/queue/t", "/data/queue/t/Partition-0"] {
        bed.disk.create_dir(Path::new(path)).unwrap();
    }
    for name in ["00000000000000000000.log", "notes.txt"] {
        let file = bed.disk.create(&Path::new("/data/queue/t/Partition-0").join(name)).unwrap();
        file.pwritev(0, &[std::io::IoSlice::new(b"precious")]).unwrap();
    }
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 1, 10);
    store.pump();
    store.checkpoint().unwrap();
    let files = bed.disk.files();
    let lost: Vec<_> = files.iter().filter(|path| path.starts_with("/data/lost+found")).collect();
    assert_eq!(lost.len(), 1, "{files:?}");
    assert!(files.contains(&"/data/queue/t/Partition-0/notes.txt".into()));
    assert_eq!(store.recovery().moved_aside.len(), 1);
}

#[test]
fn retention_drops_whole_segments_by_age_or_size() {
    let bed = Fixture::new();
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Fsync, 10_000);
    append(&journal, 95, 1_000);
    store.pump();
    let all = journal.segments();
    let reader = journal.read(0, 9, 100_000).unwrap();
    let by_time = Retain { older_than_ms: Some(1_020), max_bytes: None, below: 95 };
    assert_eq!(journal.retain(by_time).unwrap(), all[2].base);
    let by_size = Retain { older_than_ms: None, max_bytes: Some(30_000), below: 95 };
    let start = journal.retain(by_size).unwrap();
    assert!(journal.size_bytes() <= 40_000, "{}", journal.size_bytes());
    assert_eq!(offsets(&journal), range(start, 95));
    let held = Retain { older_than_ms: Some(i64::MAX), max_bytes: None, below: start + 1 };
    assert_eq!(journal.retain(held).unwrap(), start, "never past `below`");
    let bytes: usize = reader.chunks.iter().map(|chunk| chunk.bytes().unwrap().len()).sum();
    assert_eq!(bytes, reader.bytes, "a reader keeps what it was given");
}

#[test]
fn compaction_rewrites_merges_and_survives_a_restart() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Fsync, 10_000);
    append(&journal, 95, 1_000);
    store.pump();
    let old = journal.read(0, 5, 1 << 20).unwrap();
    let rewrite = &mut |frame: &[u8]| {
        let base = PlainFraming.peek(frame).unwrap().base;
        match base % 5 {
            0 => Rewrite::Keep,
            1 => Rewrite::Replace(PlainFraming::encode(base, base, 1, 1_000 + base, b"short")),
            _ => Rewrite::Drop,
        }
    };
    let report = journal.compact(95, rewrite).unwrap();
    assert!(report.bytes_after < report.bytes_before / 3, "{report:?}");
    let again = journal.compact(95, rewrite).unwrap();
    assert!(again.segments_after < again.segments_before, "small neighbours are merged: {again:?}");
    let sealed =
        journal.segments().iter().filter(|segment| segment.sealed).map(|segment| segment.end).max().unwrap();
    let want: Vec<i64> = (0..95).filter(|base| *base >= sealed || base % 5 < 2).collect();
    assert_eq!(offsets(&journal), want);
    let replaced = journal.read(6, 7, 1 << 20).unwrap().chunks[0].bytes().unwrap();
    assert_eq!(PlainFraming::payload(&replaced), b"short");
    assert_eq!(journal.read(7, 95, 1).unwrap().next, 11, "an offset in a gap finds the next frame");
    assert_eq!(old.chunks[0].bytes().unwrap().len(), old.bytes.min(old.chunks[0].bytes().unwrap().len()));
    assert_eq!(journal.offset_for_timestamp(1_007).unwrap(), Some(10));
    bed.crash(Survival::Nothing);
    let store = bed.open();
    assert_eq!(offsets(&journal_of(&store, 0, Durability::Fsync, 10_000)), want);
}

#[test]
fn offset_for_timestamp_with_out_of_order_timestamps() {
    let bed = Fixture::new();
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Fsync, 300_000);
    let times: Vec<i64> = (0..900).map(|n: i64| n * 10 + if n % 7 == 3 { 500 } else { 0 }).collect();
    for time in &times {
        try_append(&journal, 1_000, *time).unwrap();
        store.pump();
    }
    store.checkpoint().unwrap();
    for ts in [0, 5, 10, 499, 530, 531, 4_321, 8_999, 9_400, 20_000] {
        let want = times.iter().position(|time| *time >= ts).map(|at| at as i64);
        assert_eq!(journal.offset_for_timestamp(ts).unwrap(), want, "ts {ts}");
    }
    let most = times.iter().max().copied().unwrap();
    let at = times.iter().position(|time| *time == most).unwrap() as i64;
    assert_eq!(journal.max_timestamp().unwrap(), Some((most, at)));
    journal.truncate(at).unwrap();
    let most = times[..usize::try_from(at).unwrap()].iter().max().copied().unwrap();
    assert_eq!(journal.max_timestamp().unwrap().unwrap().0, most);
}

#[test]
fn epochs_and_snapshots_are_kept_and_truncated() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 5, 10);
    journal.note_epoch(3, 5);
    journal.put_snapshot(5, Bytes::from_static(b"five"));
    store.pump();
    store.checkpoint().unwrap();
    bed.crash(Survival::Nothing);
    let store = bed.open();
    let journal = fsync(&store);
    assert_eq!(journal.epochs(), [(1, 0), (3, 5)]);
    assert_eq!(journal.end_offset_for_epoch(2), (1, 5));
    assert_eq!(journal.snapshot(), Some((5, Bytes::from_static(b"five"))));
    journal.truncate(4).unwrap();
    assert_eq!((journal.epochs(), journal.snapshot()), (vec![(1, 0)], None));
    assert!(matches!(journal.truncate(-1), Err(JournalError::OutOfRange { .. })));
}

#[test]
fn snapshot_of_lost_frames_is_not_recovered() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 5, 10);
    store.pump();
    append(&journal, 3, 10);
    journal.put_snapshot(8, Bytes::from_static(b"of frames that are not durable"));
    store.checkpoint().unwrap();
    assert_eq!(journal.durable_end(), 5, "a checkpoint does not wait for the commit log");
    bed.crash(Survival::Nothing);
    let store = bed.open();
    let journal = fsync(&store);
    assert_eq!((journal.end(), journal.snapshot()), (5, None));
    append(&journal, 5, 10);
    store.pump();
    bed.crash(Survival::Nothing);
    let journal = fsync(&bed.open());
    assert_eq!((journal.end(), journal.snapshot()), (10, None));
}

#[test]
fn folder_of_a_deleted_journal_can_be_reused_at_once() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let old = fsync(&store);
    append(&old, 3, 10);
    store.pump();
    store.checkpoint().unwrap();
    let reader = old.read(0, 3, 1_000).unwrap();
    store.delete(id(0)).unwrap();
    assert!(matches!(try_append(&old, 1, 1), Err(AppendError::Closed)));
    let options = JournalOptions { folder: "queue/t/Partition-0".into(), ..opts() };
    let new_id = JournalId { incarnation: 10, part: 0 };
    let new = store.journal(new_id, options).unwrap();
    append(&new, 2, 10);
    store.pump();
    assert_eq!(reader.chunks.iter().map(|chunk| chunk.bytes().unwrap().len()).sum::<usize>(), reader.bytes);
    bed.crash(Survival::Nothing);
    let store = bed.open();
    assert_eq!(store.journals(), [(new_id, "queue/t/Partition-0".to_owned())]);
    while store.pump() {}
    assert!(!bed.disk.files().iter().any(|path| path.starts_with("/data/trash")));
}

#[test]
fn folders_that_leave_the_data_directory_are_refused() {
    let bed = Fixture::new();
    let store = bed.open();
    for folder in ["", "/etc", "../x", "a/../../b"] {
        let options = JournalOptions { folder: folder.into(), ..opts() };
        assert!(matches!(store.journal(id(1), options), Err(JournalError::Folder(_))), "{folder}");
    }
}

#[test]
fn files_of_unsupported_versions_are_refused_by_name() {
    let bed = Fixture::new();
    let store = bed.open();
    append(&fsync(&store), 1, 10);
    store.pump();
    drop(store);
    // The version of a commit-log file is the low byte at 8.
    let path = bed.disk.files().into_iter().find(|path| path.starts_with("/data/commit")).unwrap();
    let file = bed.disk.open(&path).unwrap();
    for (version, says) in
        [(7, "7, this program knows up to 2"), (0, "0, this program reads versions 1 and 2")]
    {
        let mut header = [0; 36];
        file.pread(0, &mut header).unwrap();
        header[8] = version;
        let crc = crc32c::crc32c(&header[..32]);
        header[32..].copy_from_slice(&crc.to_le_bytes());
        file.pwritev(0, &[std::io::IoSlice::new(&header)]).unwrap();
        let error = bed.try_open().err().unwrap().to_string();
        assert!(error.ends_with(&format!("has format version {says}")), "{error}");
    }
}

#[test]
fn many_journals_share_few_descriptors() {
    let mut bed = Fixture::new();
    bed.options.open_files = 8;
    let store = bed.open();
    let journals: Vec<_> =
        (0..50).map(|part| journal_of(&store, part, Durability::Replicated, 1 << 20)).collect();
    for _ in 0..3 {
        for journal in &journals {
            append(journal, 1, 100);
        }
    }
    assert!(store.stats().open_files <= 9, "{}", store.stats().open_files);
    for journal in &journals {
        assert_eq!(offsets(journal), range(0, 3));
    }
}

#[test]
fn priority_journal_goes_first_and_does_not_wait_for_large_frames() {
    let bed = Fixture::new();
    let store = bed.open();
    let raft = journal_of(&store, 7, Durability::Fsync, 1 << 20);
    assert!(raft.set_priority(true));
    let other = fsync(&store);
    append(&other, 3, 20_000);
    append(&raft, 2, 50_000);
    assert!(!raft.set_priority(false), "not while appends are pending");
    store.pump();
    assert_eq!((raft.durable_end(), other.durable_end()), (2, 3));
    assert_eq!(store.stats().bypass_bytes, 0, "its large frames go through the commit log too");
}

#[test]
fn stale_frames_behind_a_hole_never_follow_new_ones() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Replicated, 1 << 20);
    append(&journal, 3, 1_000);
    bed.crash(Survival::Everything);
    // The second of three frames is torn; the third is valid, and unreachable.
    bed.disk.flip_bit(Path::new("/data/queue/t/Partition-0/00000000000000000000.log"), 64 + 1_036 + 500);
    let store = bed.open();
    let journal = journal_of(&store, 0, Durability::Replicated, 1 << 20);
    assert_eq!(journal.end(), 1);
    try_append(&journal, 1_000, 7).unwrap();
    for seed in 0..40 {
        let disk = bed.disk.crash(Survival::Random, seed);
        let after = Fixture { disk, ..Fixture::new() };
        let store = after.open();
        let end = journal_of(&store, 0, Durability::Replicated, 1 << 20).end();
        assert!(end <= 2, "seed {seed}: a frame from before the hole is back");
    }
}

#[test]
fn journal_switched_to_replicated_leaves_the_commit_log_at_once() {
    let mut bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 3, 100);
    store.pump();
    journal.set_options(Durability::Replicated, 64 << 10);
    append(&journal, 1, 100);
    assert_eq!(journal.durable_end(), 4, "written, without another group commit");
    journal.set_options(Durability::Fsync, 64 << 10);
    append(&journal, 1, 100);
    assert_eq!(journal.durable_end(), 4);
    store.pump();
    assert_eq!(journal.durable_end(), 5);
    bed.crash(Survival::Nothing);
    assert_eq!(
        offsets(&fsync(&bed.open())),
        range(0, 5),
        "the replicated frame was synced before the next one"
    );
}

#[test]
fn failed_group_commit_leaves_later_groups_unacknowledged() {
    for fault in 0..30 {
        let mut bed = Fixture::new();
        let store = bed.open();
        let journal = fsync(&store);
        // More than one group: a group is at most half a commit-log file.
        append(&journal, 12, 30_000);
        bed.disk.set_fault(Some((bed.disk.operations() + fault, Fault::Io)));
        store.pump();
        let durable = journal.durable_end();
        bed.crash(Survival::Nothing);
        let end = fsync(&bed.open()).end();
        assert!(end >= durable, "fault {fault}: {durable} acknowledged, {end} there");
    }
}

#[test]
fn interrupted_deletion_is_finished() {
    let mut finished = 0;
    for cut in 0..12 {
        let mut bed = Fixture::new();
        let store = bed.open();
        append(&fsync(&store), 3, 100);
        store.pump();
        store.checkpoint().unwrap();
        bed.disk.set_fault(Some((bed.disk.operations() + cut, Fault::PowerCut)));
        let _ = store.delete(id(0));
        bed.crash(Survival::Nothing);
        let store = bed.open();
        if store.journals().is_empty() {
            while store.pump() {}
            let files = bed.disk.files();
            let left: Vec<_> =
                files.iter().filter(|path| path.to_string_lossy().contains("0000.log")).collect();
            assert!(!left.iter().any(|path| path.starts_with("/data/queue")), "cut {cut}: {left:?}");
            finished += 1;
        } else {
            assert_eq!(offsets(&fsync(&store)), range(0, 3));
        }
    }
    assert!(finished > 3, "{finished}");
}

#[test]
fn ring_keeps_frames_not_yet_in_their_segment() {
    let mut bed = Fixture::new();
    bed.options.recent_bytes = 4 << 10;
    let store = bed.open();
    let journal = fsync(&store);
    append(&journal, 6, 1_000);
    bed.disk.set_free_bytes(Some(0));
    store.pump();
    store.pump();
    assert!(store.stats().ring_bytes > 4 << 10, "nothing could be written behind");
    assert_eq!((offsets(&journal), bed.fatal.load(Ordering::SeqCst)), (range(0, 6), 0));
}

#[test]
fn frames_of_an_uncached_journal_leave_memory_once_written() {
    let mut bed = Fixture::new();
    bed.options.recent_bytes = 16 << 20;
    let store = bed.open();
    let (uncached, cached) = (fsync(&store), journal_of(&store, 1, Durability::Fsync, 4 << 20));
    uncached.set_uncached(true);
    append(&cached, 10, 1_000);
    append(&uncached, 100, 1_000);
    store.pump();
    let little = store.stats().ring_bytes;
    assert!(little > 110_000, "too little to be worth a write: {little}");
    append(&uncached, 1_100, 1_000);
    store.pump();
    store.pump();
    let left = store.stats().ring_bytes;
    assert!((10_000..50_000).contains(&left), "the others stay, these do not: {left}");
    assert_eq!((offsets(&uncached), offsets(&cached)), (range(0, 1_200), range(0, 10)));

    drop((store, uncached, cached));
    bed.crash(Survival::Nothing);
    let store = bed.open();
    assert_eq!(offsets(&fsync(&store)), range(0, 1_200));
}

#[test]
fn frames_about_to_be_read_stay_cached_in_an_uncached_journal() {
    let mut bed = Fixture::new();
    bed.options.recent_bytes = 4 << 20;
    let store = bed.open();
    let journal = fsync(&store);
    journal.set_uncached(true);
    journal.set_cached_from(1_000);
    let ring = || store.stats().ring_bytes;
    append(&journal, 1_200, 1_000);
    store.pump();
    store.pump();
    assert!((200_000..300_000).contains(&ring()), "those from 1,000 on: {}", ring());
    append(&journal, 3_500, 1_000);
    while store.pump() {}
    assert!(ring() < 4 << 20, "they stay while memory allows: {}", ring());
    journal.set_cached_from(journal.end());
    append(&journal, 1_100, 1_000);
    while store.pump() {}
    assert!(ring() < 1_300_000, "they were read: {}", ring());
    assert_eq!(offsets(&journal), range(0, 5_800));
}

#[test]
fn large_frame_of_an_uncached_journal_reads_back_from_its_file() {
    let bed = Fixture::new();
    let store = bed.open();
    let journal = fsync(&store);
    journal.set_uncached(true);
    append(&journal, 3, 40_000);
    append(&journal, 1_100, 1_000);
    while store.pump() {}
    assert_eq!(offsets(&journal), range(0, 1_103));
}
