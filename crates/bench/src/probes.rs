//! The limits of the machine, measured in the same run as the brokers.
//!
//! Owns the raw loops (checksum and write, write and sync), and in its modules the minimal servers that do only what
//! a broker cannot avoid ([`floor`], [`waiting`]) or that send a file without reading any request ([`blast`]). A
//! probe is a limit, not a competitor: it keeps no index, validates no request, and must never grow features.

pub mod blast;
pub mod floor;
pub mod waiting;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::procfs;
use crate::slices::{Work, latencies};

/// File size at which the growing probes start a new file: a broker's segment size.
const ROLL_BYTES: u64 = 1 << 30;
/// Size of the preallocated file that the recycling probes overwrite cyclically.
pub(crate) const RECYCLED_BYTES: u64 = 64 << 20;

/// The file that a sync probe writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A growing file: every fsync also writes metadata.
    Growing,
    /// A preallocated file, overwritten cyclically: an fdatasync writes data only.
    Recycled,
}

/// A file that is removed when the probe is dropped.
pub(crate) struct Scratch {
    pub(crate) file: File,
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn create(dir: &Path, name: &str) -> io::Result<Scratch> {
        fs::create_dir_all(dir)?;
        let path = dir.join(name);
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path)?;
        Ok(Scratch { file, path })
    }

    /// A file whose blocks are allocated, written and synced.
    pub(crate) fn prewritten(dir: &Path, name: &str, bytes: u64) -> io::Result<Scratch> {
        let scratch = Scratch::create(dir, name)?;
        let chunk = vec![0x5a_u8; 1 << 20];
        let mut at = 0;
        while at < bytes {
            scratch.file.write_all_at(&chunk, at)?;
            at += chunk.len() as u64;
        }
        scratch.file.sync_all()?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Checksums a batch and writes it to a growing file in a loop: the minimum a broker does with a produced batch when
/// it acknowledges from the page cache.
pub fn crc_and_write(dir: &Path, batch: usize, slice: Duration) -> Result<Work> {
    let bytes = random_bytes(batch);
    let mut segment = Scratch::create(dir, "crc-and-write")?;
    let mut at = 0;
    timed(slice, batch, move || {
        std::hint::black_box(crc32c::crc32c(&bytes));
        segment.file.write_all_at(&bytes, at)?;
        at += bytes.len() as u64;
        if at >= ROLL_BYTES {
            segment = Scratch::create(segment.path.parent().unwrap_or(Path::new(".")), "crc-and-write")?;
            at = 0;
        }
        Ok(1)
    })
}

/// Writes `group` batches with one call and syncs them with one fdatasync (group commit), in a loop. The latency is
/// that of a group.
pub fn write_and_sync(
    dir: &Path,
    target: Target,
    batch: usize,
    group: usize,
    slice: Duration,
) -> Result<Work> {
    let bytes = random_bytes(batch * group);
    let limit = if target == Target::Recycled { RECYCLED_BYTES } else { ROLL_BYTES };
    let scratch = match target {
        Target::Recycled => Scratch::prewritten(dir, "write-and-sync", RECYCLED_BYTES)?,
        Target::Growing => Scratch::create(dir, "write-and-sync")?,
    };
    let mut at = 0;
    timed(slice, batch, move || {
        if at + bytes.len() as u64 > limit {
            at = 0;
            if target == Target::Growing {
                scratch.file.set_len(0)?;
            }
        }
        scratch.file.write_all_at(&bytes, at)?;
        scratch.file.sync_data()?;
        at += bytes.len() as u64;
        Ok(group as u64)
    })
}

/// Repeats `step`, which returns its number of operations, until the slice is over.
fn timed(slice: Duration, op_bytes: usize, mut step: impl FnMut() -> io::Result<u64>) -> Result<Work> {
    let mut latency = latencies()?;
    // The wall time encloses the CPU time, never the other way: a thread cannot use more CPU than the elapsed time.
    let started = Instant::now();
    let cpu = procfs::cpu_of_thread();
    let (mut ops, mut last) = (0, started);
    while last - started < slice {
        ops += step()?;
        let now = Instant::now();
        latency.saturating_record(u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX));
        last = now;
    }
    let cpu = procfs::cpu_of_thread() - cpu;
    Ok(Work {
        ops,
        bytes: ops * op_bytes as u64,
        refused: 0,
        elapsed: started.elapsed(),
        latency: Some(latency),
        cpu: Some(cpu),
    })
}

/// Incompressible bytes.
pub(crate) fn random_bytes(len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(42);
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch_dir(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("moim-bench-{name}-{}", std::process::id()))
    }

    #[test]
    fn raw_probes_count_their_writes_and_remove_their_files() {
        let dir = scratch_dir("raw");
        let slice = Duration::from_millis(20);
        for work in [
            crc_and_write(&dir, 4096, slice).unwrap(),
            write_and_sync(&dir, Target::Growing, 4096, 8, slice).unwrap(),
            write_and_sync(&dir, Target::Recycled, 4096, 8, slice).unwrap(),
        ] {
            assert!(work.ops > 0 && work.elapsed >= slice);
            assert_eq!(work.bytes, work.ops * 4096);
            assert!(work.cpu.unwrap() <= work.elapsed);
            assert!(work.latency.unwrap().value_at_quantile(0.5) > 100, "no write takes under 100 ns");
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        fs::remove_dir(&dir).unwrap();
    }
}
