//! Snapshot files: written to a temporary file, synced, renamed, sent unchanged, and verified before use.
//!
//! Layout, little-endian: magic (8), version (u32), length and CRC32C of the header (u32, u32), header (log position
//! and members), then chunks of length, CRC32C and bytes (u32, u32, …) and at the end a chunk of length 0 whose
//! checksum covers the total of all lengths (u64), which follows it.
//!
//! Invariants: at most one `.snap` is current, and it never goes back; a `.snap` has been complete and durable since
//! it had that name; everything else in the directory is a leftover, removed at the next start. Nothing here is
//! async: the callers offload it.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use moim_journal::{Disk, DiskFile};

use crate::codec::{self, Input};
use crate::types::SnapshotMeta;

const MAGIC: &[u8; 8] = b"moimsnap";
const VERSION: u32 = 1;
const FIXED: usize = 20;
const MAX_HEADER: usize = 1 << 20;
const CHUNK: usize = 256 << 10;

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("snapshot: {what}"))
}

/// A snapshot on disk. An unpublished one is removed with its last handle.
pub(crate) struct SnapshotFile {
    dir: Arc<SnapshotDir>,
    path: PathBuf,
    file: Arc<dyn DiskFile>,
    len: u64,
    published: bool,
}

impl std::fmt::Debug for SnapshotFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotFile")
            .field("path", &self.path)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for SnapshotFile {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = self.dir.disk.remove(&self.path)
        {
            tracing::debug!(%error, path = %self.path.display(), "a snapshot that was not used stays behind");
        }
    }
}

/// The directory of one group's snapshots.
pub(crate) struct SnapshotDir {
    disk: Arc<dyn Disk>,
    /// The data directory; everything below it is created with the first snapshot.
    root: PathBuf,
    path: PathBuf,
    state: Mutex<DirState>,
}

#[derive(Default)]
struct DirState {
    current: Option<Current>,
    /// True if the directory is known to exist durably.
    made: bool,
    /// The number of temporary file names used so far.
    drafts: u64,
    /// True if the last snapshot write failed.
    failed: bool,
}

#[derive(Clone)]
struct Current {
    meta: SnapshotMeta,
    path: PathBuf,
    file: Arc<dyn DiskFile>,
    len: u64,
}

impl SnapshotDir {
    /// Opens the directory below `root`, removes leftovers and finds the current snapshot. A group without a snapshot
    /// has no directory yet: the first start of a node does not wait for directory syncs.
    pub(crate) fn open(disk: Arc<dyn Disk>, root: &Path, folder: &str) -> io::Result<Arc<Self>> {
        let path = root.join(folder);
        let entries = match disk.list(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            listed => listed?,
        };
        let mut newest: Option<Current> = None;
        let mut leftovers = Vec::new();
        for entry in entries {
            let at = path.join(&entry.name);
            if entry.name.ends_with(".tmp") {
                leftovers.push(at);
            } else if entry.name.ends_with(".snap") {
                let file = disk.open(&at)?;
                let (meta, _) = read_header(&*file)?;
                let found = Current { meta, path: at, len: file.len()?, file };
                let old = match &newest {
                    Some(best) if best.meta.last_log_id >= found.meta.last_log_id => Some(found),
                    Some(_) | None => newest.replace(found),
                };
                leftovers.extend(old.map(|old| old.path));
            }
        }
        for leftover in leftovers {
            disk.remove(&leftover)?;
        }
        let state = Mutex::new(DirState { current: newest, ..DirState::default() });
        Ok(Arc::new(Self { disk, root: root.to_path_buf(), path, state }))
    }

    /// Creates the directory if needed, and makes its name survive a power loss.
    fn make(&self) -> io::Result<()> {
        let mut path = self.root.clone();
        for part in self.path.strip_prefix(&self.root).map_err(io::Error::other)?.components() {
            let parent = path.clone();
            path.push(part);
            match self.disk.create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                // Also if it existed: its creator may not have synced it yet.
                Ok(()) | Err(_) => self.disk.sync_dir(&parent)?,
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, DirState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether the last snapshot was written.
    pub(crate) fn note(&self, failed: bool) {
        self.state().failed = failed;
    }

    /// True if the last snapshot write failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.state().failed
    }

    /// The current snapshot.
    pub(crate) fn current(self: &Arc<Self>) -> Option<(SnapshotMeta, SnapshotFile)> {
        let current = self.state().current.clone()?;
        let file = SnapshotFile {
            dir: Arc::clone(self),
            path: current.path,
            file: current.file,
            len: current.len,
            published: true,
        };
        Some((current.meta, file))
    }

    /// A snapshot of the state before the first entry, without a file: it takes no space.
    pub(crate) fn nothing(self: &Arc<Self>) -> (SnapshotMeta, SnapshotFile) {
        let (dir, path) = (Arc::clone(self), self.path.clone());
        let file = SnapshotFile { dir, path, file: Arc::new(Absent), len: 0, published: true };
        (SnapshotMeta::default(), file)
    }

    /// A temporary file for a snapshot under construction.
    pub(crate) fn draft(self: &Arc<Self>) -> io::Result<SnapshotFile> {
        let number = {
            let mut state = self.state();
            if !state.made {
                self.make()?;
                state.made = true;
            }
            state.drafts += 1;
            state.drafts
        };
        let path = self.path.join(format!("{number}.tmp"));
        // On any error the next draft checks the directory again.
        let file = self.disk.create(&path).inspect_err(|_| self.state().made = false)?;
        Ok(SnapshotFile { dir: Arc::clone(self), path, file, len: 0, published: false })
    }

    /// Writes a complete snapshot and makes it current.
    pub(crate) fn write(
        self: &Arc<Self>,
        meta: &SnapshotMeta,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut draft = self.draft()?;
        let header = encode_header(meta);
        draft.append(&header)?;
        let mut writer = ChunkWriter { draft: &mut draft, buffer: Vec::with_capacity(CHUNK), total: 0 };
        fill(&mut writer)?;
        writer.finish()?;
        self.publish(meta, draft)
    }

    /// Renames a complete snapshot into place, unless a newer one was published meanwhile.
    pub(crate) fn publish(self: &Arc<Self>, meta: &SnapshotMeta, draft: SnapshotFile) -> io::Result<()> {
        let mut draft = match (Arc::ptr_eq(&draft.dir, self), draft.published) {
            (true, true) => return Ok(()),
            (true, false) => draft,
            (false, _) => self.copy(&draft)?,
        };
        draft.file.sync_data()?;
        // Held over the rename: two publishers must not overtake each other.
        let mut state = self.state();
        if state.current.as_ref().is_some_and(|current| current.meta.last_log_id >= meta.last_log_id) {
            return Ok(());
        }
        let (term, index) = meta.last_log_id.map_or((0, 0), |at| (**at.committed_leader_id(), at.index));
        let path = self.path.join(format!("{index:020}-{term}.snap"));
        self.disk.rename(&draft.path, &path)?;
        draft.published = true;
        self.disk.sync_dir(&self.path)?;
        let current = Current { meta: meta.clone(), path, file: draft.file.clone(), len: draft.len };
        if let Some(old) = state.current.replace(current) {
            self.disk.remove(&old.path)?;
        }
        Ok(())
    }
}

impl SnapshotDir {
    /// A draft with the content of another directory's snapshot.
    fn copy(self: &Arc<Self>, from: &SnapshotFile) -> io::Result<SnapshotFile> {
        let mut draft = self.draft()?;
        while draft.len < from.len {
            let piece = from.piece(draft.len, CHUNK)?;
            draft.append(&piece)?;
        }
        Ok(draft)
    }
}

impl SnapshotFile {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Appends bytes.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.pwritev(self.len, &[IoSlice::new(bytes)])?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Raw bytes at `at`, at most `max`.
    pub(crate) fn piece(&self, at: u64, max: usize) -> io::Result<Bytes> {
        let left = usize::try_from(self.len.saturating_sub(at)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; left.min(max)];
        if self.file.pread(at, &mut bytes)? != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes.into())
    }

    /// Reads the whole file and returns its metadata.
    pub(crate) fn verify(&self) -> io::Result<SnapshotMeta> {
        let (meta, mut reader) = self.content()?;
        let mut sink = vec![0; CHUNK];
        while reader.read(&mut sink)? > 0 {}
        Ok(meta)
    }

    /// Its metadata and content. A reader that reaches the end without an error has verified everything.
    pub(crate) fn content(&self) -> io::Result<(SnapshotMeta, ChunkReader)> {
        let (meta, at) = read_header(&*self.file)?;
        let file = Arc::clone(&self.file);
        let reader =
            ChunkReader { file, at, end: self.len, chunk: Vec::new(), taken: 0, total: 0, done: false };
        Ok((meta, reader))
    }
}

/// A file that does not exist: empty to a reader, and not writable.
struct Absent;

impl DiskFile for Absent {
    fn pwritev(&self, _pos: u64, _bufs: &[IoSlice<'_>]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn pread(&self, _pos: u64, _buf: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, _pos: u64, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn raw(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn encode_header(meta: &SnapshotMeta) -> BytesMut {
    let mut header = BytesMut::new();
    codec::put_meta(&mut header, meta);
    let mut out = BytesMut::new();
    out.put_slice(MAGIC);
    out.put_u32_le(VERSION);
    out.put_u32_le(u32::try_from(header.len()).expect("a list of members is under 4 GiB"));
    out.put_u32_le(crc32c::crc32c(&header));
    out.put_slice(&header);
    out
}

/// The header and the position of the first chunk.
fn read_header(file: &dyn DiskFile) -> io::Result<(SnapshotMeta, u64)> {
    let mut fixed = [0; FIXED];
    if file.pread(0, &mut fixed)? != FIXED || &fixed[..8] != MAGIC {
        return Err(bad("this is not one"));
    }
    let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    if word(8) != VERSION {
        return Err(bad("written by another version of this program"));
    }
    let len =
        usize::try_from(word(12)).ok().filter(|len| *len <= MAX_HEADER).ok_or(bad("header too long"))?;
    let mut header = vec![0; len];
    if file.pread(FIXED as u64, &mut header)? != len || crc32c::crc32c(&header) != word(16) {
        return Err(bad("damaged header"));
    }
    let mut input = Input::new(header.into());
    let meta = codec::meta(&mut input)?;
    input.end()?;
    Ok((meta, (FIXED + len) as u64))
}

struct ChunkWriter<'a> {
    draft: &'a mut SnapshotFile,
    buffer: Vec<u8>,
    total: u64,
}

impl ChunkWriter<'_> {
    fn chunk(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let len = u32::try_from(self.buffer.len()).expect("a chunk is small");
        let mut head = [0; 8];
        head[..4].copy_from_slice(&len.to_le_bytes());
        head[4..].copy_from_slice(&crc32c::crc32c(&self.buffer).to_le_bytes());
        self.draft.append(&head)?;
        self.draft.append(&self.buffer)?;
        self.total += u64::from(len);
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        self.chunk()?;
        let total = self.total.to_le_bytes();
        let mut end = [0; 16];
        end[4..8].copy_from_slice(&crc32c::crc32c(&total).to_le_bytes());
        end[8..].copy_from_slice(&total);
        self.draft.append(&end)
    }
}

impl Write for ChunkWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == CHUNK {
            self.chunk()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads and verifies the content of a snapshot.
pub(crate) struct ChunkReader {
    file: Arc<dyn DiskFile>,
    at: u64,
    end: u64,
    chunk: Vec<u8>,
    taken: usize,
    total: u64,
    done: bool,
}

impl ChunkReader {
    fn exact(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        if self.file.pread(self.at, buffer)? != buffer.len() {
            return Err(bad("cut short"));
        }
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        let mut head = [0; 8];
        self.exact(&mut head)?;
        let [a, b, c, d, e, f, g, h] = head;
        let (len, crc) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let len = usize::try_from(len).ok().filter(|len| *len <= CHUNK).ok_or(bad("chunk too long"))?;
        if len == 0 {
            let mut total = [0; 8];
            self.exact(&mut total)?;
            if crc32c::crc32c(&total) != crc || u64::from_le_bytes(total) != self.total || self.at != self.end
            {
                return Err(bad("damaged end"));
            }
            self.done = true;
            return Ok(());
        }
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(len, 0);
        self.exact(&mut chunk)?;
        if crc32c::crc32c(&chunk) != crc {
            return Err(bad("damaged content"));
        }
        self.total += len as u64;
        self.taken = 0;
        self.chunk = chunk;
        Ok(())
    }
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.taken == self.chunk.len() && !self.done {
            self.next_chunk()?;
        }
        if self.done {
            return Ok(0);
        }
        let ready = &self.chunk[self.taken..];
        let taken = ready.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&ready[..taken]);
        self.taken += taken;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests;
