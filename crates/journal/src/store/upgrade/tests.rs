//! Directories of format version 1, made from current ones by the encoder of the release that wrote it, and their
//! upgrade: with all record kinds, with a torn write, interrupted at every disk operation, without space, of unknown
//! versions.

use std::collections::BTreeMap;
use std::path::PathBuf;

use moim_base::ManualClock;

use super::*;
use crate::checkpoint;
use crate::commit::previous_format::writer;
use crate::commit::{Kind, RECORD_HEADER, scan};
use crate::disk::{Fault, RealDisk, SimDisk, Survival, read_all, write_at};
use crate::framing::PlainFraming;
use crate::journal::Journal;
use crate::segment;
use crate::store::Store;
use crate::store::recover::clean_marker;
use crate::types::{Append, Durability, JournalId, JournalOptions, Rewrite};

const DIR: &str = "/data";
const PARTS: u32 = 5;
/// Size of a commit-log file of the previous version.
const OLD_FILE: usize = 64 << 10;

fn options() -> StoreOptions {
    StoreOptions {
        commit_file_bytes: 32 << 10,
        first_commit_file_bytes: 16 << 10,
        commit_files: 8,
        recent_bytes: 4 << 20,
        bypass_bytes: 3 << 10,
        min_free_bytes: 0,
        checkpoint_bytes: 64 << 20,
        checkpoint_ms: 1 << 40,
        open_files: 100,
        fatal: Arc::new(|_, _| {}),
    }
}

fn open(disk: &SimDisk) -> Result<Store, OpenError> {
    let clock = Arc::new(ManualClock::at(1_000_000));
    Store::open(Path::new(DIR), Arc::new(disk.clone()), clock, options())
}

fn id(part: u32) -> JournalId {
    JournalId { incarnation: 1, part }
}

fn attach(store: &Store, part: u32) -> Arc<Journal> {
    let durability = if part == 2 { Durability::Replicated } else { Durability::Fsync };
    let options = JournalOptions {
        folder: format!("queue/t/Partition-{part}"),
        framing: Arc::new(PlainFraming),
        durability,
        segment_bytes: 6 << 10,
        tag: 0,
    };
    store.journal(id(part), options).unwrap()
}

fn append(journal: &Journal, epoch: i32, size: usize) {
    let base = journal.end();
    let payload = vec![u8::try_from(base % 251).unwrap(); size];
    let body = PlainFraming::encode(base, base + 1, epoch, 1_000 + base, &payload);
    let append =
        Append { base, last: base + 1, epoch, max_timestamp_ms: 1_000 + base, prefix: &[], body: &body };
    journal.append(append).unwrap();
}

fn burst(store: &Store, journals: &[Arc<Journal>], epoch: i32) {
    for round in 0..9 {
        for journal in journals {
            // Frames of 4,000 bytes bypass the commit log, which has a pointer to them.
            append(journal, epoch, if round % 4 == 3 { 4_000 } else { 200 + 100 * round });
        }
        while store.pump() {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// Everything is in the commit log.
    Killed,
    /// A checkpoint, and past it records of every kind.
    KilledAfterCheckpoint,
    Clean,
}

/// A directory of the current version, closed.
fn build(stop: Stop) -> SimDisk {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let journals: Vec<_> = (0..PARTS).map(|part| attach(&store, part)).collect();
    burst(&store, &journals, 1);
    if stop != Stop::Killed {
        store.checkpoint().unwrap();
        burst(&store, &journals, 2);
        journals[0].put_snapshot(4, Bytes::from_static(b"snapshot"));
        let keep = |frame: &[u8]| if frame[8].is_multiple_of(6) { Rewrite::Drop } else { Rewrite::Keep };
        journals[0].compact(journals[0].end(), &mut |frame| keep(frame)).unwrap();
        journals[1].truncate(20).unwrap();
        journals[3].set_start(15).unwrap();
        journals[4].reset(500, Some(3)).unwrap();
        burst(&store, &journals[..4], 4);
    }
    if stop == Stop::Clean {
        store.close().unwrap();
    }
    while store.pump() {}
    drop((store, journals));
    disk.crash(Survival::Everything, 0)
}

/// A directory of the previous version, closed, and its content.
fn build_previous(stop: Stop, tail: impl Fn(&mut OldFile, u64)) -> (SimDisk, BTreeMap<u32, Shown>) {
    let built = build(stop);
    let expected = show(&open(&copy(&built)).unwrap());
    let disk = copy(&built);
    downgrade(&disk, tail);
    (disk, expected)
}

/// The same content on another disk; the first one is only copied further.
fn copy(disk: &SimDisk) -> SimDisk {
    disk.crash(Survival::Everything, 0)
}

/// The content of a journal as clients see it: start, end, epochs, snapshot, frames.
type Shown = (i64, i64, Vec<(i32, i64)>, Option<(i64, Bytes)>, Vec<u8>);

fn show(store: &Store) -> BTreeMap<u32, Shown> {
    let journals = (0..PARTS).map(|part| (part, attach(store, part)));
    let shown = journals.map(|(part, journal)| {
        assert!(!journal.is_damaged(), "journal {part}");
        let mut frames = Vec::new();
        journal
            .for_each_frame(journal.start(), journal.end(), &mut |_, frame| {
                frames.extend_from_slice(frame);
                true
            })
            .unwrap();
        (part, (journal.start(), journal.end(), journal.epochs(), journal.snapshot(), frames))
    });
    shown.collect()
}

fn write_file(disk: &dyn Disk, path: &Path, bytes: &[u8]) {
    let _ = disk.remove(path);
    let file = disk.create(path).unwrap();
    write_at(&*file, 0, bytes).unwrap();
    file.sync_data().unwrap();
    disk.sync_dir(path.parent().unwrap()).unwrap();
}

/// One commit-log file of version 1 in the making.
struct OldFile {
    generation: u64,
    bytes: Vec<u8>,
}

impl OldFile {
    fn new(generation: u64) -> Self {
        let header = writer::file_header(previous_format::VERSION, generation, OLD_FILE as u64);
        Self { generation, bytes: header }
    }

    fn push(&mut self, record: &Record, lsn: u64, payload: &[u8]) {
        self.bytes.extend(writer::record(record, self.generation, lsn, payload));
    }

    fn end_group(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK as usize), 0);
    }

    fn write(mut self, disk: &SimDisk, number: u64) {
        assert!(self.bytes.len() <= OLD_FILE);
        self.bytes.resize(OLD_FILE, 0);
        write_file(disk, &log::path_of(&Path::new(DIR).join("commit"), number), &self.bytes);
    }
}

/// Rewrites checkpoint and commit log of a directory as the previous release wrote them: in several files, with records
/// before the floor that the checkpoint covers, and with stale bytes of an earlier use behind the end.
fn downgrade(disk: &SimDisk, tail: impl Fn(&mut OldFile, u64)) {
    let (dir, folder) = (Path::new(DIR), Path::new(DIR).join("commit"));
    let path = dir.join("checkpoint");
    let known = match disk.open(&path) {
        Ok(file) => checkpoint::decode(&read_all(&*file).unwrap(), "checkpoint").unwrap(),
        Err(_) => {
            let floor = LogPoint { generation: 0, position: 0, next_lsn: 1 };
            Checkpoint { floor, ..Checkpoint::default() }
        }
    };
    let found = log::find(disk, &folder).unwrap();
    let mut entries = Vec::new();
    scan::scan(&found.files, known.floor, &mut |entry, payload| {
        entries.push((entry.lsn, entry.record, payload.to_vec()));
        Ok(())
    })
    .unwrap();
    remove(disk, &folder, &found.files).unwrap();
    remove(disk, &folder, &found.unused).unwrap();

    let control = Record::control(Kind::Epoch, id(0), 7);
    let mut file = OldFile::new(5);
    let mut floor = known.floor;
    if known.version.is_some() {
        // Two records that the checkpoint covers.
        file.push(&control, floor.next_lsn - 2, b"");
        file.push(&control, floor.next_lsn - 1, b"");
        file.end_group();
        floor = LogPoint { generation: 5, position: file.bytes.len() as u64, ..floor };
        write_file(
            disk,
            &path,
            &writer::checkpoint(previous_format::VERSION, floor, known.journals.values()),
        );
    }
    let mut number = 3;
    for group in entries.chunks(3) {
        let len: usize = group.iter().map(|(_, _, payload)| RECORD_HEADER + payload.len()).sum();
        if file.bytes.len() + len > OLD_FILE - (16 << 10) {
            let next = OldFile::new(file.generation + 1);
            std::mem::replace(&mut file, next).write(disk, number);
            number += 1;
        }
        for (lsn, record, payload) in group {
            file.push(record, *lsn, payload);
        }
        file.end_group();
    }
    let next_lsn = floor.next_lsn + entries.len() as u64;
    tail(&mut file, next_lsn);
    file.bytes.extend(writer::record(&control, 2, next_lsn, b""));
    file.write(disk, number);
    // A file below the floor that waits to be recycled, and one that was never used.
    OldFile::new(1).write(disk, number + 1);
    write_file(disk, &log::path_of(&folder, number + 2), &[0; 16 << 10]);
    if disk.stat(&dir.join("clean")).unwrap().is_some() {
        write_file(disk, &dir.join("clean"), &clean_marker(floor));
    }
}

/// Format versions of the checkpoint and of all commit-log files.
fn versions(disk: &SimDisk) -> Vec<u32> {
    let logs = disk.files().into_iter().filter(|path| path.starts_with("/data/commit"));
    let versions = logs.chain([PathBuf::from("/data/checkpoint")]).filter_map(|path| {
        let mut version = [0; 4];
        disk.open(&path).ok()?.pread(8, &mut version).unwrap();
        Some(u32::from_le_bytes(version)).filter(|version| *version != 0)
    });
    versions.collect()
}

/// Opens, compares, appends and opens again.
fn check(disk: &SimDisk, expected: &BTreeMap<u32, Shown>, what: &str) {
    let store = open(disk).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(&show(&store), expected, "{what}");
    assert!(versions(disk).iter().all(|version| *version == log::VERSION), "{what}: {:?}", versions(disk));
    append(&attach(&store, 0), 9, 100);
    while store.pump() {}
    let after = show(&store);
    drop(store);
    let disk = copy(disk);
    assert_eq!(show(&open(&disk).unwrap()), after, "{what}: opened again");
}

const STOPS: [Stop; 3] = [Stop::Killed, Stop::KilledAfterCheckpoint, Stop::Clean];

#[test]
fn previous_version_directory_opens_with_all_content() {
    for stop in STOPS {
        let (disk, expected) = build_previous(stop, |_, _| ());
        assert!(versions(&disk).iter().all(|version| *version == previous_format::VERSION));
        let clean = open(&copy(&disk)).unwrap().was_clean();
        assert_eq!(clean, stop == Stop::Clean, "{stop:?}");
        check(&copy(&disk), &expected, &format!("{stop:?}"));
    }
}

#[test]
fn torn_last_group_ends_the_previous_version_log() {
    // A torn frame: its header and a part of its payload.
    let frame = PlainFraming::encode(900, 900, 4, 0, &[7; 600]);
    let record = Record { len: 636, ..Record::control(Kind::Frame, id(1), 900) };
    let (disk, expected) = build_previous(Stop::KilledAfterCheckpoint, |file, next_lsn| {
        let torn = writer::record(&record, file.generation, next_lsn, &frame);
        file.bytes.extend(&torn[..300]);
        file.bytes.resize(file.bytes.len() + 3 * BLOCK as usize, 0);
    });
    check(&disk, &expected, "torn");
}

#[test]
fn crash_at_any_operation_of_the_upgrade_loses_nothing() {
    for stop in STOPS {
        let (disk, expected) = build_previous(stop, |_, _| ());
        let whole = copy(&disk);
        let begin = whole.operations();
        let store = open(&whole).unwrap();
        let end = whole.operations();
        drop(store);
        // The operation itself succeeds; the one after it fails.
        for operation in begin..end - 1 {
            for (survival, seed) in
                [(Survival::Nothing, 0), (Survival::Everything, 0), (Survival::Random, operation)]
            {
                let what = format!("{stop:?}: power cut at {operation}, {survival:?}");
                let cut = copy(&disk);
                cut.set_fault(Some((operation, Fault::PowerCut)));
                assert!(open(&cut).is_err(), "{what}");
                let after = cut.crash(survival, seed);
                // And once more, a step earlier or later.
                let again = copy(&after);
                again.set_fault(Some((operation.saturating_sub(1 + seed % 7), Fault::PowerCut)));
                drop(open(&again));
                check(&again.crash(survival, seed), &expected, &what);
                check(&copy(&after), &expected, &what);
            }
        }
    }
}

#[test]
fn upgrade_without_space_changes_nothing_and_succeeds_later() {
    let (disk, expected) = build_previous(Stop::KilledAfterCheckpoint, |_, _| ());
    disk.set_free_bytes(Some(20 << 10));
    assert!(matches!(open(&disk), Err(OpenError::Io { .. })));
    disk.set_free_bytes(None);
    check(&disk, &expected, "space is back");
}

#[test]
fn unsupported_format_versions_are_refused_by_name() {
    for (version, wanted) in [
        (0, "has format version 0, this program reads versions 1 and 2"),
        (3, "has format version 3, this program knows up to 2"),
    ] {
        let refuse = |path: &str, bytes: &[u8]| {
            let disk = build(Stop::Clean);
            write_file(&disk, Path::new(path), bytes);
            let Err(error) = open(&disk) else { panic!("version {version} of {path} is taken") };
            assert_eq!(error.to_string(), format!("{path} {wanted}"));
        };
        refuse("/data/commit/000077.log", &writer::file_header(version, 77, 4096));
        refuse("/data/checkpoint", &writer::checkpoint(version, LogPoint::default(), [].into_iter()));
    }
}

#[test]
fn missing_file_of_the_previous_version_is_damage() {
    let (disk, _) = build_previous(Stop::KilledAfterCheckpoint, |_, _| ());
    disk.remove(Path::new("/data/commit/000003.log")).unwrap();
    assert!(matches!(open(&disk), Err(OpenError::CommitLogDamaged { .. })));
}

#[test]
fn frame_over_256_mib_of_the_previous_version_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let folder = "slots/shard-0";
    std::fs::create_dir_all(dir.path().join(folder)).unwrap();
    std::fs::create_dir_all(dir.path().join("commit")).unwrap();
    let frame = PlainFraming::encode(0, 0, 1, 5, &vec![0x5a; 257 << 20]);
    let small = PlainFraming::encode(1, 1, 1, 6, b"behind it");
    // The large frame bypassed the commit log; the small one is only there.
    let path = segment::path_of(&dir.path().join(folder), 0, "log");
    write_file(&*disk, &path, &[&segment::encode_header(id(0), 0)[..], &frame].concat());
    let at = |kind, base: i64, len: usize, position: usize| Record {
        epoch: 1,
        max_timestamp_ms: 5 + base,
        position: position as u64,
        len: u32::try_from(len).unwrap(),
        ..Record::control(kind, id(0), base)
    };
    let header = usize::try_from(segment::HEADER).unwrap();
    let mut log_file = OldFile::new(1);
    log_file.push(&Record { epoch: 0, ..Record::control(Kind::Create, id(0), 0) }, 1, folder.as_bytes());
    log_file.push(&at(Kind::Pointer, 0, frame.len(), header), 2, b"");
    log_file.push(&at(Kind::Frame, 1, small.len(), header + frame.len()), 3, &small);
    write_file(&*disk, &dir.path().join("commit/000000.log"), &log_file.bytes);

    let clock = Arc::new(ManualClock::at(1_000_000));
    let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
    let store = Store::open(dir.path(), disk, clock, options).unwrap();
    let options = JournalOptions {
        folder: folder.to_owned(),
        framing: Arc::new(PlainFraming),
        durability: Durability::Fsync,
        segment_bytes: 1 << 30,
        tag: 0,
    };
    let journal = store.journal(id(0), options).unwrap();
    assert_eq!((journal.start(), journal.end(), journal.is_damaged()), (0, 2, false));
    let mut seen = Vec::new();
    journal
        .for_each_frame(0, 2, &mut |_, bytes| {
            seen.push(bytes == frame || bytes == small);
            true
        })
        .unwrap();
    assert_eq!(seen, [true, true]);
}
