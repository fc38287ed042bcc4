//! Bit rot: one bit of one file flips while the store is down; checks after the next start.
//!
//! Either everything reads back exactly, or damage is reported: the store refuses to open, or the journal is marked
//! damaged. A wrong byte is never returned, and a journal never ends early silently. The table covers every kind of
//! file of the store, in three states of the directory: killed, killed after a checkpoint and more appends, clean stop.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use moim_base::ManualClock;
use moim_journal::disk::Survival;
use moim_journal::{
    Append, Disk, Durability, Journal, JournalId, JournalOptions, OpenError, PlainFraming, ReadError,
    Rewrite, SimDisk, Store, StoreOptions,
};

const JOURNALS: [(u32, Durability); 3] =
    [(0, Durability::Fsync), (1, Durability::Fsync), (2, Durability::Replicated)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Killed,
    KilledAfterCheckpoint,
    Clean,
}

/// The acknowledged state: the frames of each journal, and its epochs.
type Model = BTreeMap<u32, (Vec<(i64, Bytes)>, i64, Vec<(i32, i64)>)>;

fn open(disk: &SimDisk, clock: &Arc<ManualClock>) -> Result<Store, OpenError> {
    let options = StoreOptions {
        commit_file_bytes: 32 << 10,
        first_commit_file_bytes: 16 << 10,
        commit_files: 8,
        recent_bytes: 4 << 20,
        bypass_bytes: 3 << 10,
        min_free_bytes: 0,
        checkpoint_bytes: 64 << 20,
        checkpoint_ms: 1 << 40,
        open_files: 100,
        fatal: Arc::new(|what, error| panic!("{what}: {error}")),
    };
    Store::open(Path::new("/data"), Arc::new(disk.clone()), clock.clone(), options)
}

fn attach(store: &Store, part: u32, durability: Durability) -> Arc<Journal> {
    let options = JournalOptions {
        folder: format!("queue/t/Partition-{part}"),
        framing: Arc::new(PlainFraming),
        durability,
        segment_bytes: 6 << 10,
        tag: 0,
    };
    store.journal(JournalId { incarnation: 1, part }, options).unwrap()
}

fn append(journal: &Journal, epoch: i32, size: usize, serial: u64) -> Bytes {
    let base = journal.end();
    let payload = vec![u8::try_from(serial % 251).unwrap(); size];
    let time = 1_000 + i64::try_from(serial).unwrap();
    let body = PlainFraming::encode(base, base + 1, epoch, time, &payload);
    let append = Append { base, last: base + 1, epoch, max_timestamp_ms: time, prefix: &[], body: &body };
    journal.append(append).unwrap();
    body
}

fn base_of(frame: &[u8]) -> i64 {
    i64::from_le_bytes(frame[8..16].try_into().unwrap())
}

/// A closed directory with every kind of content.
fn build(stop: Stop) -> (SimDisk, Arc<ManualClock>, Model) {
    let disk = SimDisk::new();
    let clock = Arc::new(ManualClock::at(1_000_000));
    let store = open(&disk, &clock).unwrap();
    let mut model = Model::new();
    let journals: Vec<_> =
        JOURNALS.iter().map(|(part, durability)| attach(&store, *part, *durability)).collect();
    let mut serial = 0;
    let mut burst = |model: &mut Model, epoch: i32| {
        for round in 0..9 {
            for (journal, (part, _)) in journals.iter().zip(JOURNALS) {
                serial += 1;
                let size = if round % 4 == 3 { 4_000 } else { 200 + 100 * round };
                let base = journal.end();
                let frame = append(journal, epoch, size, serial);
                let (frames, end, epochs) = model.entry(part).or_default();
                frames.push((base, frame));
                *end = journal.end();
                if epochs.last().is_none_or(|last| last.0 != epoch) {
                    epochs.push((epoch, base));
                }
            }
            while store.pump() {}
        }
    };
    burst(&mut model, 1);
    if stop != Stop::Killed {
        store.checkpoint().unwrap();
        // Every third frame of the first journal is dropped; its sealed segments have gaps from now on.
        journals[0].put_snapshot(4, Bytes::from_static(b"snapshot"));
        let until = journals[0].end();
        let keep = |base: i64| base % 6 != 0;
        journals[0]
            .compact(until, &mut |frame| if keep(base_of(frame)) { Rewrite::Keep } else { Rewrite::Drop })
            .unwrap();
        let sealed = journals[0].segments().iter().filter(|segment| segment.sealed).map(|s| s.end).max();
        let sealed = sealed.unwrap_or(0);
        let (frames, ..) = model.get_mut(&0).unwrap();
        frames.retain(|(base, _)| keep(*base) || *base >= sealed);
        burst(&mut model, 2);
        store.checkpoint().unwrap();
    }
    if stop == Stop::KilledAfterCheckpoint {
        burst(&mut model, 3);
    }
    if stop == Stop::Clean {
        store.close().unwrap();
    }
    // Idle: the last group is sealed.
    clock.advance_ms(1_000);
    while store.pump() {}
    drop((store, journals));
    (disk.crash(Survival::Everything, 0), clock, model)
}

/// Reads a journal like a fetch; returns the frames by base offset, and whether a read was refused.
fn read_all(journal: &Journal) -> (BTreeMap<i64, Bytes>, bool) {
    let mut frames = BTreeMap::new();
    let (mut next, mut refused) = (journal.start(), false);
    while next < journal.end() {
        let read = match journal.read(next, i64::MAX, 3_000) {
            Ok(read) => read,
            Err(ReadError::Damaged { .. }) => {
                refused = true;
                next += 1;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let bytes: Vec<u8> = read.chunks.iter().flat_map(|chunk| chunk.bytes().unwrap()).collect();
        let mut rest = Bytes::from(bytes);
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize + 8;
            let frame = rest.split_to(len.min(rest.len()));
            frames.insert(base_of(&frame), frame);
        }
        if read.next <= next {
            break;
        }
        next = read.next;
    }
    (frames, refused)
}

/// Returns whether damage was reported; panics on silent damage.
fn check(disk: &SimDisk, clock: &Arc<ManualClock>, model: &Model, what: &str) -> bool {
    let store = match open(disk, clock) {
        Ok(store) => store,
        Err(OpenError::CommitLogDamaged { .. } | OpenError::Damaged { .. }) => return true,
        Err(error) => panic!("{what}: {error}"),
    };
    let mut reported = false;
    for (part, durability) in JOURNALS {
        let (frames, end, epochs) = &model[&part];
        let journal = attach(&store, part, durability);
        let (found, refused) = read_all(&journal);
        for (base, frame) in &found {
            let known = frames.iter().find(|(known, _)| known == base).map(|(_, frame)| frame);
            assert_eq!(Some(frame), known, "{what}: journal {part} gives out a wrong frame at {base}");
        }
        if !journal.is_damaged() {
            assert!(!refused, "{what}: journal {part}: a read is refused and no damage is noted");
            assert_eq!(journal.end(), *end, "{what}: journal {part} ends early silently");
            assert_eq!(found.len(), frames.len(), "{what}: journal {part} has lost frames silently");
            assert_eq!(&journal.epochs(), epochs, "{what}: journal {part}");
        }
        reported |= journal.is_damaged();
    }
    reported
}

fn kind(path: &Path) -> String {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let kind = name.rsplit_once('.').map_or(name.clone(), |(_, extension)| extension.to_owned());
    if path.starts_with("/data/commit") { "commit".into() } else { kind }
}

/// Flips bits of every file that matches `wanted`. Returns for each kind of file the number of flips, and how many of
/// them were reported as damage.
fn sweep(stop: Stop, stride: u64, wanted: impl Fn(&Path) -> bool) -> BTreeMap<String, (u64, u64)> {
    let (disk, clock, model) = build(stop);
    assert!(!check(&disk.crash(Survival::Everything, 0), &clock, &model, "untouched"));
    let mut counts: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let files: Vec<PathBuf> = disk.files().into_iter().filter(|path| wanted(path)).collect();
    let fresh = disk.crash(Survival::Everything, 0);
    for path in files {
        let bits = fresh.stat(&path).unwrap().unwrap().len * 8;
        // More flips at the beginning, where headers are, than in the rest.
        let sample = (0..bits)
            .filter(|bit| (*bit < 64 * 8 && bit.is_multiple_of(11)) || bit % stride == *bit / stride % 13);
        for bit in sample {
            let rotten = disk.crash(Survival::Everything, 0);
            rotten.rot(&path, bit);
            let what = format!("{stop:?}: {} bit {bit}", path.display());
            let reported = check(&rotten, &clock, &model, &what);
            let count = counts.entry(kind(&path)).or_default();
            count.0 += 1;
            count.1 += u64::from(reported);
        }
    }
    counts
}

#[test]
fn flipped_bit_in_the_commit_log_is_damage_and_never_its_end() {
    for stop in [Stop::Killed, Stop::KilledAfterCheckpoint] {
        let counts = sweep(stop, 401, |path| path.starts_with("/data/commit"));
        let (flips, reported) = counts["commit"];
        // Most of the files are zeros, padding, and records from before the checkpoint.
        assert!(flips > 500 && reported > 40, "{stop:?}: {counts:?}");
    }
}

/// Journals with an unsynced tail: a bit that flips there looks like a torn write.
fn is_unsynced(stop: Stop, path: &Path) -> bool {
    stop != Stop::Clean && path.starts_with("/data/queue/t/Partition-2")
}

#[test]
fn flipped_bit_in_any_other_file_is_never_served_and_never_silent() {
    for (stop, kinds) in [
        (Stop::Killed, &["log"][..]),
        (Stop::KilledAfterCheckpoint, &["checkpoint", "log"]),
        (Stop::Clean, &["checkpoint", "clean", "index", "log", "timeindex"]),
    ] {
        let wanted = |path: &Path| !path.starts_with("/data/commit") && !is_unsynced(stop, path);
        let counts = sweep(stop, 1_499, wanted);
        for kind in kinds {
            assert!(counts.get(*kind).is_some_and(|count| count.0 > 20), "{stop:?} {kind}: {counts:?}");
        }
        // Segment bytes are not redundant, unless the commit log still has them.
        let (flips, reported) = counts["log"];
        assert!(stop == Stop::Killed || reported > flips / 10, "{stop:?}: {counts:?}");
    }
}

#[test]
fn scrub_finds_a_flipped_bit_in_an_active_segment() {
    let (disk, clock, _) = build(Stop::Clean);
    let store = open(&disk, &clock).unwrap();
    let journals: Vec<_> = JOURNALS.iter().map(|(part, mode)| attach(&store, *part, *mode)).collect();
    let active = journals[1].segments().pop().unwrap();
    let rounds = |store: &Store| {
        let mut damage = Vec::new();
        for _ in 0..1_000 {
            let report = store.scrub_step(2_000);
            damage.extend(report.damage);
            if report.round_done {
                return damage;
            }
        }
        panic!("the scrub never ends");
    };
    assert_eq!(rounds(&store), [""; 0]);
    let path = format!("/data/queue/t/Partition-1/{:020}.log", active.base);
    // While the store runs, behind what it has verified: only a scrub can find it.
    disk.rot(Path::new(&path), 300 * 8);
    let damage = rounds(&store);
    assert_eq!(damage.len(), 1, "{damage:?}");
    assert!(journals[1].is_damaged() && !journals[0].is_damaged());
    assert_eq!((store.damages(), store.damaged().len()), (1, 1));
}

#[test]
fn frames_around_the_damage_are_served() {
    let (disk, clock, model) = build(Stop::Clean);
    let (frames, ..) = &model[&1];
    let path = Path::new("/data/queue/t/Partition-1/00000000000000000000.log");
    // In the payload, in the length, in the base offset of the second frame.
    let second = 64 + frames[0].1.len() as u64;
    for byte in [second + 100, second + 1, second + 10] {
        let rotten = disk.crash(Survival::Everything, 0);
        rotten.rot(path, byte * 8 + 3);
        let store = open(&rotten, &clock).unwrap();
        let journal = attach(&store, 1, Durability::Fsync);
        let (found, refused) = read_all(&journal);
        assert!(refused && journal.is_damaged());
        let bases = frames.iter().map(|(base, _)| *base);
        let missing: Vec<_> = bases.filter(|base| !found.contains_key(base)).collect();
        assert_eq!(missing, [frames[1].0], "byte {byte}");
        assert!(matches!(journal.read(frames[1].0, i64::MAX, 100), Err(ReadError::Damaged { .. })));
    }
}
