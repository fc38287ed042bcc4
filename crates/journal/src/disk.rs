//! The disk interface of the journal.
//!
//! All access to stable storage goes through [`Disk`] and [`DiskFile`], so that a test can crash it at any operation
//! and the simulator can own it. Rules for implementations: `pwritev` writes everything or fails; `pread` fills as much
//! as the file has; `sync_data` returns only when the file's bytes and length would survive a power cut; names survive
//! only after `sync_dir` of their folder (or `syncfs`).

mod real;
mod sim;

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use real::RealDisk;
pub use sim::{Fault, SimDisk, Survival};

/// One name in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskEntry {
    /// The file name, without its path.
    pub name: String,
    /// True for a folder.
    pub is_dir: bool,
}

/// Metadata of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskStat {
    /// Length in bytes.
    pub len: u64,
    /// True for a folder.
    pub is_dir: bool,
}

/// An open file.
pub trait DiskFile: Send + Sync + 'static {
    /// Writes all the buffers, back to back, at `pos`.
    fn pwritev(&self, pos: u64, bufs: &[IoSlice<'_>]) -> io::Result<()>;
    /// Reads up to `buf.len()` bytes at `pos`; fewer only at the end of the file.
    fn pread(&self, pos: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Makes content and length durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Preallocates space without changing the length.
    fn allocate(&self, pos: u64, len: u64) -> io::Result<()>;
    /// Truncates or extends the file; frees space preallocated past the end.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// True if the file is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Drops synced bytes that will hardly be read from the page cache. A hint that nothing depends on.
    fn drop_cache(&self, _pos: u64, _len: u64) {}
    /// The descriptor, if there is one (for sendfile).
    fn raw(&self) -> Option<BorrowedFd<'_>>;
}

/// A file system.
pub trait Disk: Send + Sync + 'static {
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// Creates a file; fails if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// Renames a file or a folder; replaces a file of that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates one folder; its parent must exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// The names in a folder, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>>;
    /// The metadata of a path, if it exists.
    fn stat(&self, path: &Path) -> io::Result<Option<DiskStat>>;
    /// Makes the names in a folder durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes everything durable.
    fn syncfs(&self, path: &Path) -> io::Result<()>;
    /// Free bytes for this process.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;
    /// Locks the file as long as the handle lives; `WouldBlock` if another process has it.
    fn lock(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
}

/// Creates `relative` under `root` level by level; returns the folders whose names changed.
pub(crate) fn create_dirs(disk: &dyn Disk, root: &Path, relative: &Path) -> io::Result<Vec<PathBuf>> {
    let mut path = root.to_path_buf();
    let mut changed = Vec::new();
    for part in relative.components() {
        let parent = path.clone();
        path.push(part);
        match disk.create_dir(&path) {
            Ok(()) => changed.push(parent),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(changed)
}

/// Writes one buffer.
pub(crate) fn write_at(file: &dyn DiskFile, pos: u64, bytes: &[u8]) -> io::Result<()> {
    file.pwritev(pos, &[IoSlice::new(bytes)])
}

/// Reads a whole small file.
pub(crate) fn read_all(file: &dyn DiskFile) -> io::Result<Vec<u8>> {
    let len = usize::try_from(file.len()?).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    let mut bytes = vec![0; len];
    let got = file.pread(0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// Replaces `path` atomically and durably: write a temporary file, sync, rename, sync the folder.
pub(crate) fn replace_file(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temp = path.with_extension("tmp");
    match disk.remove(&temp) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let file = disk.create(&temp)?;
    write_at(&*file, 0, bytes)?;
    file.sync_data()?;
    disk.rename(&temp, path)?;
    disk.sync_dir(path.parent().unwrap_or(Path::new(".")))
}
