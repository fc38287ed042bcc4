//! Fsync latency, from which a watchdog judges the disk.
//!
//! Counted are the fsyncs that clients wait for (group commits of the commit log, which carry votes of Raft groups too)
//! and the probe of an idle store. Checkpoints, write-behind, new commit-log files and large frames are not counted:
//! they may take long on a healthy disk. A write that hangs before its fsync counts as a part of it.
//!
//! One thread commits and one probes at a time, so each has one start time. Nothing here takes a lock: the watchdog
//! must observe a disk on which every other thread hangs.

use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use moim_base::Clock;

use crate::disk::{Disk, DiskFile};

/// The file that a probe writes to.
const PROBE_FILE: &str = "probe";
const PROBE: [u8; 512] = [0; 512];

/// Fsync latency since the last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SyncReport {
    /// Age of the oldest fsync in progress; zero without one.
    pub pending_ms: u64,
    /// The slowest fsync that ended since the last report.
    pub slowest_ms: u64,
    /// Fsyncs that ended since the store was opened.
    pub syncs: u64,
    /// Time since the last fsync ended.
    pub idle_ms: u64,
}

/// Start times and counters of fsyncs.
#[derive(Debug, Default)]
pub(crate) struct DiskWatch {
    commit: StartTime,
    probe: StartTime,
    slowest_ns: AtomicU64,
    syncs: AtomicU64,
    ended_ns: AtomicU64,
    probing: Mutex<Option<ProbeFile>>,
}

/// Start time of the fsync in progress, plus one; 0 without one.
#[derive(Debug, Default)]
struct StartTime(AtomicU64);

struct ProbeFile(Arc<dyn DiskFile>);

impl std::fmt::Debug for ProbeFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProbeFile")
    }
}

impl StartTime {
    fn pending_ns(&self, now_ns: u64) -> u64 {
        match self.0.load(Ordering::Relaxed) {
            0 => 0,
            begun => now_ns.saturating_sub(begun - 1),
        }
    }
}

impl DiskWatch {
    /// Runs a group commit.
    pub(crate) fn commit<T>(&self, clock: &dyn Clock, sync: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.timed(&self.commit, clock, sync)
    }

    fn timed<T>(
        &self,
        start_time: &StartTime,
        clock: &dyn Clock,
        sync: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let begun_ns = clock.monotonic_ns();
        start_time.0.store(begun_ns + 1, Ordering::Relaxed);
        let done = sync();
        let now_ns = clock.monotonic_ns();
        start_time.0.store(0, Ordering::Relaxed);
        if done.is_ok() {
            self.slowest_ns.fetch_max(now_ns.saturating_sub(begun_ns), Ordering::Relaxed);
            self.ended_ns.store(now_ns, Ordering::Relaxed);
            self.syncs.fetch_add(1, Ordering::Relaxed);
        }
        done
    }

    /// Writes a block and syncs it. Blocks as long as the disk hangs.
    pub(crate) fn probe(&self, disk: &dyn Disk, dir: &Path, clock: &dyn Clock) -> io::Result<()> {
        let mut probing = self.probing.lock().unwrap_or_else(PoisonError::into_inner);
        self.timed(&self.probe, clock, || {
            let file = match &*probing {
                Some(ProbeFile(file)) => Arc::clone(file),
                None => {
                    let path = dir.join(PROBE_FILE);
                    let file = match disk.open(&path) {
                        Err(error) if error.kind() == io::ErrorKind::NotFound => disk.create(&path)?,
                        opened => opened?,
                    };
                    *probing = Some(ProbeFile(Arc::clone(&file)));
                    file
                }
            };
            file.pwritev(0, &[IoSlice::new(&PROBE)])?;
            file.sync_data()
        })
    }

    /// The latency report; the slowest fsync is reported once.
    pub(crate) fn report(&self, now_ns: u64) -> SyncReport {
        let pending_ns = self.commit.pending_ns(now_ns).max(self.probe.pending_ns(now_ns));
        let ended_ns = self.ended_ns.load(Ordering::Relaxed);
        SyncReport {
            pending_ms: pending_ns / 1_000_000,
            slowest_ms: self.slowest_ns.swap(0, Ordering::Relaxed) / 1_000_000,
            syncs: self.syncs.load(Ordering::Relaxed),
            idle_ms: now_ns.saturating_sub(ended_ns) / 1_000_000,
        }
    }
}

#[cfg(test)]
mod tests {
    use moim_base::ManualClock;

    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn pending_fsync_is_reported_and_the_slowest_once() {
        let (watch, clock) = (DiskWatch::default(), ManualClock::at(1_000));
        let pass = |ms: u64| clock.advance_ms(ms);
        let now = || clock.monotonic_ns();
        watch
            .commit(&clock, || {
                pass(1_200);
                let seen = watch.report(now());
                assert_eq!((seen.pending_ms, seen.slowest_ms, seen.syncs), (1_200, 0, 0));
                pass(300);
                Ok(())
            })
            .unwrap();
        pass(50);
        let seen = watch.report(now());
        assert_eq!(seen, SyncReport { pending_ms: 0, slowest_ms: 1_500, syncs: 1, idle_ms: 50 });
        assert_eq!(watch.report(now()).slowest_ms, 0);
    }

    #[test]
    fn probe_reuses_one_file() {
        let (watch, clock, disk) = (DiskWatch::default(), ManualClock::at(1_000), SimDisk::new());
        disk.create_dir(Path::new("/d")).unwrap();
        for count in 1..4 {
            watch.probe(&disk, Path::new("/d"), &clock).unwrap();
            assert_eq!(watch.report(clock.monotonic_ns()).syncs, count);
        }
        let names: Vec<_> = disk.list(Path::new("/d")).unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["probe"]);
    }
}
