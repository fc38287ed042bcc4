//! The machine's own file system, through safe calls only.
//!
//! Invariant: every kernel error is returned; only an interrupted call is retried.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::{Disk, DiskEntry, DiskFile, DiskStat};

/// The kernel takes at most this many buffers in one call.
const MAX_BUFFERS: usize = 1024;

/// Page size of the page cache.
const PAGE: u64 = 4096;

/// The machine's own file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

struct RealFile(File);

impl DiskFile for RealFile {
    fn pwritev(&self, mut pos: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        for part in bufs.chunks(MAX_BUFFERS) {
            let total: usize = part.iter().map(|buf| buf.len()).sum();
            let wrote = loop {
                match rustix::io::pwritev(&self.0, part, pos) {
                    Ok(wrote) => break wrote,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            };
            if wrote < total {
                self.finish_short_write(pos, part, wrote)?;
            }
            pos += total as u64;
        }
        Ok(())
    }

    fn pread(&self, pos: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buf.len() {
            match self.0.read_at(&mut buf[filled..], pos + filled as u64) {
                Ok(0) => break,
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.0)?)
    }

    fn allocate(&self, pos: u64, len: u64) -> io::Result<()> {
        match rustix::fs::fallocate(&self.0, rustix::fs::FallocateFlags::KEEP_SIZE, pos, len) {
            // A file system without preallocation still stores written bytes.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn drop_cache(&self, pos: u64, len: u64) {
        // Whole pages only: the rest of the last page is written next, and would have to be read for that.
        let (from, until) = (pos & !(PAGE - 1), (pos + len) & !(PAGE - 1));
        if let Some(len) = NonZeroU64::new(until.saturating_sub(from)) {
            let _ = rustix::fs::fadvise(&self.0, from, Some(len), rustix::fs::Advice::DontNeed);
        }
    }

    fn raw(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

impl RealFile {
    /// A short write is rare (a signal, a nearly full disk): the rest is written buffer by buffer.
    fn finish_short_write(&self, pos: u64, bufs: &[IoSlice<'_>], wrote: usize) -> io::Result<()> {
        let mut at = 0;
        for buf in bufs {
            let skip = wrote.saturating_sub(at).min(buf.len());
            self.0.write_all_at(&buf[skip..], pos + (at + skip) as u64)?;
            at += buf.len();
        }
        Ok(())
    }
}

impl Disk for RealDisk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(RealFile(OpenOptions::new().read(true).write(true).open(path)?)))
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(RealFile(OpenOptions::new().read(true).write(true).create_new(true).open(path)?)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_dir(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            // A name that is not UTF-8 is not one of ours.
            if let Ok(name) = entry.file_name().into_string() {
                entries.push(DiskEntry { name, is_dir: entry.file_type()?.is_dir() });
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn stat(&self, path: &Path) -> io::Result<Option<DiskStat>> {
        match std::fs::metadata(path) {
            Ok(meta) => Ok(Some(DiskStat { len: meta.len(), is_dir: meta.is_dir() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn syncfs(&self, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(path)?)?)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(path)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn lock(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
        Ok(Arc::new(RealFile(file)))
    }
}
