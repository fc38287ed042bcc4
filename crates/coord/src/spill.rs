//! The spill file: superseded values move out of memory into an unlinked file that ends with the process.
//!
//! History is read rarely and never changes, and it can be many times the size of the live data. A [`Space`] gives
//! superseded values to its [`SpillFile`], which packs them into blocks; one thread writes full blocks to a file
//! without a name. The content follows from snapshot and log, so the file is never synced and never reopened.
//!
//! Invariants: a value reads the same before, during and after its block is written (each has a checksum). Spilling a
//! value never waits for the disk: blocks that are not written yet, or could not be written, stay in memory. The
//! extents of a block are free again when its last value is dropped.
//!
//! Must never: affect the state. With and without a spill file every reply is the same.
//!
//! [`Space`]: crate::space::Space

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;

/// The file is allocated in extents of this size, and a block is full when another value would exceed it. Small in
/// tests, so that tests have many.
const EXTENT_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// Shorter values stay in memory: a handle is hardly smaller.
const MIN_VALUE_BYTES: usize = 48;

/// The storage of a spill file: a file, except in tests.
pub trait SpillStorage: Send + Sync + 'static {
    /// Writes the whole buffer at an offset.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Fills the buffer from an offset.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
}

impl SpillStorage for File {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }
}

/// See the module comment. Clones share one file.
#[derive(Clone)]
pub struct SpillFile {
    file: Arc<ExtentFile>,
    queue: Arc<QueueHandle>,
}

impl fmt::Debug for SpillFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpillFile").finish_non_exhaustive()
    }
}

/// The file and its extent allocation.
struct ExtentFile {
    storage: Box<dyn SpillStorage>,
    extents: Mutex<ExtentAllocator>,
}

#[derive(Default)]
struct ExtentAllocator {
    free: Vec<u32>,
    /// Number of extents ever used: the end of the file.
    end: u32,
}

impl ExtentFile {
    fn extents(&self) -> MutexGuard<'_, ExtentAllocator> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates extents for this many bytes.
    fn allocate(&self, bytes: usize) -> Box<[u32]> {
        let mut extents = self.extents();
        let next = || {
            extents.free.pop().unwrap_or_else(|| {
                extents.end += 1;
                extents.end - 1
            })
        };
        std::iter::repeat_with(next).take(bytes.div_ceil(EXTENT_BYTES)).collect()
    }

    fn free(&self, extents: &[u32]) {
        self.extents().free.extend_from_slice(extents);
    }
}

fn offset_of(extent: u32) -> u64 {
    u64::from(extent) * EXTENT_BYTES as u64
}

/// Values that are written together; freed when the last of them is dropped.
struct Block {
    file: Arc<ExtentFile>,
    data: Mutex<BlockData>,
}

enum BlockData {
    /// Being filled.
    Open(Vec<u8>),
    /// Full, and queued for writing.
    Full(Bytes),
    File(Box<[u32]>),
}

impl Block {
    fn data(&self) -> MutexGuard<'_, BlockData> {
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a value and returns its position; `None` if it does not fit any more.
    fn add(&self, value: &[u8]) -> Option<usize> {
        let mut data = self.data();
        let BlockData::Open(bytes) = &mut *data else { return None };
        if !bytes.is_empty() && bytes.len() + value.len() > EXTENT_BYTES {
            return None;
        }
        let at = bytes.len();
        bytes.extend_from_slice(value);
        Some(at)
    }

    fn close(&self) {
        let mut data = self.data();
        if let BlockData::Open(bytes) = &mut *data {
            let bytes = std::mem::take(bytes);
            *data = BlockData::Full(bytes.into());
        }
    }

    fn read(&self, at: usize, length: usize) -> io::Result<Bytes> {
        let data = self.data();
        let extents = match &*data {
            BlockData::Open(bytes) => return Ok(Bytes::copy_from_slice(&bytes[at..at + length])),
            // Copied: a slice would keep the block in memory.
            BlockData::Full(bytes) => return Ok(Bytes::copy_from_slice(&bytes[at..at + length])),
            BlockData::File(extents) => extents,
        };
        let mut value = vec![0; length];
        let mut done = 0;
        while done < length {
            let (extent, within) = ((at + done) / EXTENT_BYTES, (at + done) % EXTENT_BYTES);
            let part = (EXTENT_BYTES - within).min(length - done);
            let from = offset_of(extents[extent]) + within as u64;
            self.file.storage.read_at(&mut value[done..done + part], from)?;
            done += part;
        }
        Ok(value.into())
    }

    /// Writes a full block to the file. It stays readable throughout, and stays in memory if the write fails.
    fn write(&self) -> io::Result<()> {
        let bytes = match &*self.data() {
            BlockData::Full(bytes) => bytes.clone(),
            BlockData::Open(_) | BlockData::File(_) => return Ok(()),
        };
        let extents = self.file.allocate(bytes.len());
        let mut parts = extents.iter().zip(bytes.chunks(EXTENT_BYTES));
        let written =
            parts.try_for_each(|(extent, part)| self.file.storage.write_at(part, offset_of(*extent)));
        match written {
            Ok(()) => *self.data() = BlockData::File(extents),
            Err(_) => self.file.free(&extents),
        }
        written
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let BlockData::File(extents) = self.data.get_mut().unwrap_or_else(PoisonError::into_inner) {
            self.file.free(extents);
        }
    }
}

impl SpillFile {
    /// A spill file on storage that has no other user, with the thread that writes to it. The thread ends with the last
    /// clone.
    pub fn new(storage: impl SpillStorage) -> io::Result<Self> {
        let file = Arc::new(ExtentFile { storage: Box::new(storage), extents: Mutex::default() });
        let queue = Arc::new(Queue::default());
        let handle = Arc::new(QueueHandle(Arc::clone(&queue)));
        std::thread::Builder::new().name("history".to_owned()).spawn(move || write_blocks(&queue))?;
        Ok(Self { file, queue: handle })
    }
}

/// Full blocks to be written. They are in memory in any case, so the queue adds no memory; blocks dropped before their
/// turn are not held.
#[derive(Default)]
struct Queue {
    blocks: Mutex<QueueState>,
    wake: Condvar,
}

#[derive(Default)]
struct QueueState {
    blocks: VecDeque<Weak<Block>>,
    is_closed: bool,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, QueueState> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next block; `None` when the queue is closed.
    fn next(&self) -> Option<Weak<Block>> {
        let idle = |waiting: &mut QueueState| waiting.blocks.is_empty() && !waiting.is_closed;
        let waiting = self.wake.wait_while(self.waiting(), idle);
        waiting.unwrap_or_else(PoisonError::into_inner).blocks.pop_front()
    }
}

/// The producer side of the queue; closes it on drop.
struct QueueHandle(Arc<Queue>);

impl QueueHandle {
    fn submit(&self, block: &Arc<Block>) {
        block.close();
        self.0.waiting().blocks.push_back(Arc::downgrade(block));
        self.0.wake.notify_one();
    }
}

impl Drop for QueueHandle {
    fn drop(&mut self) {
        self.0.waiting().is_closed = true;
        self.0.wake.notify_one();
    }
}

fn write_blocks(queue: &Queue) {
    let mut failing = false;
    while let Some(block) = queue.next() {
        match block.upgrade().map_or(Ok(()), |block| block.write()) {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(%error, "spill file write failed; superseded values stay in memory");
            }
            Err(_) => {}
        }
    }
}

/// One user of a spill file, with the block it fills.
#[derive(Default)]
pub(crate) struct SpillWriter {
    spill: Option<SpillFile>,
    open: Option<Arc<Block>>,
}

impl fmt::Debug for SpillWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpillWriter").finish_non_exhaustive()
    }
}

impl SpillWriter {
    pub(crate) fn new(spill: Option<SpillFile>) -> Self {
        Self { spill, open: None }
    }

    pub(crate) fn file(&self) -> Option<&SpillFile> {
        self.spill.as_ref()
    }

    /// Moves a value out of memory, if it is large enough.
    pub(crate) fn spill(&mut self, value: &mut Value) {
        let Some(spill) = &self.spill else { return };
        let Value::InMemory(bytes) = &*value else { return };
        if bytes.len() < MIN_VALUE_BYTES {
            return;
        }
        let (Ok(length), crc) = (u32::try_from(bytes.len()), crc32c::crc32c(bytes)) else { return };
        let added = self.open.as_ref().and_then(|block| Some((Arc::clone(block), block.add(bytes)?)));
        let (block, at) = match added {
            Some(added) => added,
            None => {
                let data = Mutex::new(BlockData::Open(Vec::with_capacity(EXTENT_BYTES.max(bytes.len()))));
                let block = Arc::new(Block { file: Arc::clone(&spill.file), data });
                let at = block.add(bytes).expect("a value fits into a new block");
                if let Some(full) = self.open.replace(Arc::clone(&block)) {
                    spill.queue.submit(&full);
                }
                (block, at)
            }
        };
        let at = u32::try_from(at).expect("a block is shorter than 4 GiB");
        *value = Value::Spilled(SpilledValue { block, at, length, crc });
    }
}

/// The value of a version: in memory, or spilled.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    InMemory(Bytes),
    Spilled(SpilledValue),
}

/// The location of a spilled value.
#[derive(Clone)]
pub(crate) struct SpilledValue {
    block: Arc<Block>,
    at: u32,
    length: u32,
    crc: u32,
}

impl fmt::Debug for SpilledValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spilled({} bytes)", self.length)
    }
}

impl Value {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InMemory(bytes) => bytes.len(),
            Self::Spilled(spilled) => spilled.length as usize,
        }
    }

    /// The bytes of the value.
    ///
    /// # Panics
    /// If the file returns other bytes than were written. Such a disk corrupts other files too: the node stops, as it
    /// does after a failed sync.
    pub(crate) fn bytes(&self) -> Bytes {
        match self {
            Self::InMemory(bytes) => bytes.clone(),
            Self::Spilled(spilled) => {
                let read = spilled.block.read(spilled.at as usize, spilled.length as usize);
                let bytes = read.unwrap_or_else(|error| panic!("cannot read spilled value: {error}"));
                assert_eq!(crc32c::crc32c(&bytes), spilled.crc, "spilled value checksum mismatch");
                bytes
            }
        }
    }
}

impl From<Bytes> for Value {
    fn from(bytes: Bytes) -> Self {
        Self::InMemory(bytes)
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.bytes() == other.bytes()
    }
}

impl Eq for Value {}

#[cfg(test)]
mod tests;
