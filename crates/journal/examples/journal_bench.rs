//! Throughput of the journal on this disk, each figure beside the raw probe that bounds it.
//!
//! `cargo run --release -p moim-journal --example journal_bench -- DIR [SECONDS [open]]`. Slices of the journal and of
//! the probe alternate, because the machine is shared and its speed varies.
#![allow(clippy::disallowed_methods, clippy::print_stdout, clippy::unwrap_used)] // a measuring tool, not a library

use std::io::{IoSlice, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use moim_base::SystemClock;
use moim_journal::{
    Append, AppendError, Durability, DurableSink, Frame, Framing, Journal, JournalId, JournalOptions,
    RealDisk, Store, StoreOptions,
};

/// Frames of 16 bytes of header (length, base, padding) and a body: cheap to build, so that the journal is measured.
struct BenchFraming;

impl Framing for BenchFraming {
    fn header_len(&self) -> usize {
        16
    }

    fn peek(&self, header: &[u8]) -> Option<Frame> {
        let len = u32::from_le_bytes(header.get(..4)?.try_into().ok()?);
        let base = i64::from_le_bytes(header.get(4..12)?.try_into().ok()?);
        let sound = len >= 16 && base >= 0;
        sound.then_some(Frame { len: len as usize, base, last: base, epoch: 0, max_timestamp_ms: base })
    }

    fn verify(&self, frame: &[u8]) -> bool {
        // What checking a record batch costs.
        crc32c::crc32c(&frame[16..]) != 1
    }
}

#[derive(Default)]
struct Wake {
    groups: Mutex<u64>,
    bell: Condvar,
}

impl DurableSink for Wake {
    fn on_durable(&self, _advanced: &[(u64, i64)]) {
        *self.groups.lock().unwrap() += 1;
        self.bell.notify_one();
    }
}

struct Bench {
    store: Store,
    wake: Arc<Wake>,
    journals: Vec<Arc<Journal>>,
    body: Bytes,
}

impl Bench {
    fn new(dir: &Path, name: &str, count: u32, size: usize, durability: Durability) -> Self {
        let store =
            Store::open(dir, Arc::new(RealDisk), Arc::new(SystemClock::new()), StoreOptions::default())
                .unwrap();
        let wake = Arc::new(Wake::default());
        store.set_sink(wake.clone());
        store.start();
        let journals = (0..count).map(|part| {
            let options = JournalOptions {
                folder: format!("bench/{name}/Partition-{part}"),
                framing: Arc::new(BenchFraming),
                durability,
                segment_bytes: 1 << 30,
                tag: u64::from(part),
            };
            store.journal(JournalId { incarnation: 1, part }, options).unwrap()
        });
        let journals = journals.collect();
        Self { store, wake, journals, body: vec![7; size].into() }
    }

    fn append(&self, journal: &Journal) -> bool {
        let base = journal.end();
        let mut prefix = [0; 16];
        prefix[..4].copy_from_slice(&(self.body.len() as u32 + 16).to_le_bytes());
        prefix[4..12].copy_from_slice(&base.to_le_bytes());
        let append =
            Append { base, last: base, epoch: 0, max_timestamp_ms: base, prefix: &prefix, body: &self.body };
        match journal.append(append) {
            Ok(()) => true,
            Err(AppendError::Busy) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// One frame of each journal in flight at any time; returns frames acknowledged per second.
    fn closed_loop(&self, slice: Duration) -> f64 {
        let began = Instant::now();
        let before: i64 = self.journals.iter().map(|journal| journal.durable_end()).sum();
        while began.elapsed() < slice {
            let seen = *self.wake.groups.lock().unwrap();
            let mut sent = false;
            for journal in &self.journals {
                if journal.durable_end() == journal.end() {
                    sent |= self.append(journal);
                }
            }
            if !sent {
                let groups = self.wake.groups.lock().unwrap();
                let limit = Duration::from_millis(5);
                drop(self.wake.bell.wait_timeout_while(groups, limit, |groups| *groups == seen).unwrap());
            }
        }
        let after: i64 = self.journals.iter().map(|journal| journal.durable_end()).sum();
        (after - before) as f64 / began.elapsed().as_secs_f64()
    }

    /// Appends as fast as they are accepted.
    fn open_loop(&self, slice: Duration) -> f64 {
        let began = Instant::now();
        let mut taken = 0_u64;
        while began.elapsed() < slice {
            for journal in &self.journals {
                if self.append(journal) {
                    taken += 1;
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        taken as f64 / began.elapsed().as_secs_f64()
    }
}

/// Groups of `count` frames into a prewritten file, one fdatasync each.
fn probe_group(dir: &Path, count: usize, size: usize, slice: Duration) -> f64 {
    let path = dir.join("probe");
    let mut file =
        std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
    let length = 64 << 20;
    for _ in 0..64 {
        file.write_all(&vec![0; 1 << 20]).unwrap();
    }
    file.sync_all().unwrap();
    let frame = vec![7; size];
    let bufs: Vec<IoSlice<'_>> = (0..count).map(|_| IoSlice::new(&frame)).collect();
    let (began, mut position, mut done) = (Instant::now(), 0, 0);
    while began.elapsed() < slice {
        if position + (count * size) as u64 > length {
            position = 0;
        }
        rustix::io::pwritev(&file, &bufs, position).unwrap();
        rustix::fs::fdatasync(&file).unwrap();
        position += ((count * size) as u64).next_multiple_of(4096);
        done += count;
    }
    std::fs::remove_file(path).unwrap();
    done as f64 / began.elapsed().as_secs_f64()
}

/// Checksum and write into growing files, without fsync (or one per frame).
fn probe_growing(dir: &Path, count: usize, size: usize, sync: bool, slice: Duration) -> f64 {
    let paths: Vec<_> = (0..count).map(|at| dir.join(format!("probe-{at}"))).collect();
    let open = |path| std::fs::File::options().create(true).truncate(true).write(true).open(path).unwrap();
    let files: Vec<_> = paths.iter().map(open).collect();
    let frame = vec![7; size];
    let (began, mut position, mut done, mut crc) = (Instant::now(), 0, 0, 0);
    while began.elapsed() < slice {
        for file in &files {
            crc ^= crc32c::crc32c(&frame);
            file.write_all_at(&frame, position).unwrap();
            if sync {
                file.sync_data().unwrap();
            }
            done += 1;
        }
        position += size as u64;
    }
    assert_ne!(crc, 1);
    let rate = f64::from(done) / began.elapsed().as_secs_f64();
    paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    rate
}

fn report(name: &str, size: usize, pairs: &mut [(f64, f64)]) {
    pairs.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let (ours, probe) = pairs[pairs.len() / 2];
    let mib = |rate: f64| rate * size as f64 / (1 << 20) as f64;
    println!(
        "{name:<34} {ours:>10.0}/s {:>7.0} MiB/s   probe {probe:>10.0}/s {:>7.0} MiB/s   ratio {:.2}",
        mib(ours),
        mib(probe),
        ours / probe
    );
}

/// Time until a directory is open again after a stop without `close`, as after kill -9.
fn recovery(dir: &Path) {
    let home = dir.join("data");
    let bench = Bench::new(&home, "run", 4, 64 << 10, Durability::Replicated);
    let mut frames = 0;
    while frames < (1 << 30) / (64 << 10) {
        for journal in &bench.journals {
            while !bench.append(journal) {
                std::thread::sleep(Duration::from_millis(1));
            }
            frames += 1;
        }
    }
    drop(bench);
    let began = Instant::now();
    let bench = Bench::new(&home, "run", 4, 64 << 10, Durability::Replicated);
    let took = began.elapsed();
    let report = bench.store.recovery();
    let whole: i64 = bench.journals.iter().map(|journal| journal.end()).sum();
    println!(
        "recovery of {frames} frames (1 GiB): {took:?}, {} MiB read, {whole} frames there",
        report.bytes >> 20
    );
    drop(bench);
    std::fs::remove_dir_all(&home).unwrap();
}

/// Time until a directory with many small journals is open again, after a clean stop and without one.
fn many(dir: &Path, count: u32) {
    let home = dir.join("data");
    let mut bench = Bench::new(&home, "run", count, 100, Durability::Fsync);
    for clean in [true, false] {
        for journal in &bench.journals {
            while !bench.append(journal) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        while bench.journals.iter().any(|journal| journal.durable_end() < journal.end()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        if clean {
            bench.store.close().unwrap();
        }
        let closing = began.elapsed();
        drop(bench);
        let began = Instant::now();
        bench = Bench::new(&home, "run", count, 100, Durability::Fsync);
        println!("{count} journals, clean {clean}: close {closing:?}, open {:?}", began.elapsed());
    }
    drop(bench);
    std::fs::remove_dir_all(&home).unwrap();
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().expect("a directory to measure in");
    let seconds: f64 = arguments.next().map_or(1.0, |text| text.parse().unwrap());
    let dir = Path::new(&dir);
    let slice = Duration::from_secs_f64(seconds);
    std::fs::create_dir_all(dir).unwrap();
    let scenarios = [
        ("fsync, 32 journals x 4 KiB", 32, 4 << 10, Durability::Fsync),
        ("fsync, 1 journal x 4 KiB", 1, 4 << 10, Durability::Fsync),
        ("fsync, 4 journals x 1 MB", 4, 1_000_000, Durability::Fsync),
        ("replicated, 4 journals x 64 KiB", 4, 64 << 10, Durability::Replicated),
    ];
    let only_open = arguments.next().is_some_and(|text| text == "open");
    for (name, count, size, durability) in scenarios.into_iter().filter(|_| !only_open) {
        let home = dir.join("data");
        let bench = Bench::new(&home, "run", count, size, durability);
        let fsync = durability == Durability::Fsync;
        let ours = |slice| if fsync { bench.closed_loop(slice) } else { bench.open_loop(slice) };
        ours(slice / 2);
        let mut pairs: Vec<(f64, f64)> = (0..5)
            .map(|_| {
                let rate = ours(slice);
                let probe = match (fsync, size < 256 << 10) {
                    (true, true) => probe_group(dir, count as usize, size, slice),
                    (true, false) => probe_growing(dir, count as usize, size, true, slice),
                    (false, _) => probe_growing(dir, count as usize, size, false, slice),
                };
                (rate, probe)
            })
            .collect();
        report(name, size, &mut pairs);
        let stats = bench.store.stats();
        println!("    {} syncs, {} records, {} checkpoints", stats.syncs, stats.records, stats.checkpoints);
        bench.store.close().unwrap();
        drop(bench);
        std::fs::remove_dir_all(&home).unwrap();
    }
    recovery(dir);
    many(dir, 10_000);
}
