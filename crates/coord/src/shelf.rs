//! Where old values go: out of memory, into a file that is gone with the process.
//!
//! History is read rarely and never changes, and it can be many times the size of what lives. A [`Space`] gives
//! values that a later change of their key has replaced to its [`Shelf`], which packs them into blocks; one thread
//! writes full blocks to a file without a name. What is there follows from snapshot and log, so the file is never
//! synced and never opened again.
//!
//! Invariants: a value reads the same before, while and after its block is written, to the bit (each has a
//! checksum). Whoever gives a value waits for no disk: blocks that are not written yet, or could not be, stay in
//! memory. A block's place in the file is free again when its last value is dropped.
//!
//! Must never: be part of what the state means. With and without a shelf every answer is the same.
//!
//! [`Space`]: crate::space::Space

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;

/// The file is given out in pieces of this size, and a block is full when another value would pass it. Small in
/// tests, so that they see many.
const EXTENT_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// Shorter values stay where they are: a handle is hardly smaller.
const MIN_VALUE_BYTES: usize = 48;

/// What a shelf stands on: a file, in all but tests.
pub trait Ground: Send + Sync + 'static {
    /// Writes all of it at a place.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Fills the buffer from a place.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()>;
}

impl Ground for File {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }
}

/// See the top of the file. Clones are the same shelf.
#[derive(Clone)]
pub struct Shelf {
    place: Arc<Place>,
    feeder: Arc<Feeder>,
}

impl fmt::Debug for Shelf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shelf").finish_non_exhaustive()
    }
}

/// The file and which of its pieces are used.
struct Place {
    ground: Box<dyn Ground>,
    extents: Mutex<Extents>,
}

#[derive(Default)]
struct Extents {
    free: Vec<u32>,
    /// Pieces that were ever used: where the file ends.
    end: u32,
}

impl Place {
    fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pieces for so many bytes.
    fn take(&self, bytes: usize) -> Box<[u32]> {
        let mut extents = self.extents();
        let next = || {
            extents.free.pop().unwrap_or_else(|| {
                extents.end += 1;
                extents.end - 1
            })
        };
        std::iter::repeat_with(next).take(bytes.div_ceil(EXTENT_BYTES)).collect()
    }

    fn give_back(&self, pieces: &[u32]) {
        self.extents().free.extend_from_slice(pieces);
    }
}

fn offset_of(piece: u32) -> u64 {
    u64::from(piece) * EXTENT_BYTES as u64
}

/// Values that are written together, and forgotten when the last of them is.
struct Block {
    place: Arc<Place>,
    home: Mutex<Home>,
}

enum Home {
    /// Still being filled.
    Open(Vec<u8>),
    /// Full, and on its way to the file.
    Full(Bytes),
    File(Box<[u32]>),
}

impl Block {
    fn home(&self) -> MutexGuard<'_, Home> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a value and says where it is; `None` when it does not fit any more.
    fn add(&self, value: &[u8]) -> Option<usize> {
        let mut home = self.home();
        let Home::Open(bytes) = &mut *home else { return None };
        if !bytes.is_empty() && bytes.len() + value.len() > EXTENT_BYTES {
            return None;
        }
        let at = bytes.len();
        bytes.extend_from_slice(value);
        Some(at)
    }

    fn close(&self) {
        let mut home = self.home();
        if let Home::Open(bytes) = &mut *home {
            let bytes = std::mem::take(bytes);
            *home = Home::Full(bytes.into());
        }
    }

    fn read(&self, at: usize, length: usize) -> io::Result<Bytes> {
        let home = self.home();
        let pieces = match &*home {
            Home::Open(bytes) => return Ok(Bytes::copy_from_slice(&bytes[at..at + length])),
            // Copied: a slice would keep the block in memory.
            Home::Full(bytes) => return Ok(Bytes::copy_from_slice(&bytes[at..at + length])),
            Home::File(pieces) => pieces,
        };
        let mut value = vec![0; length];
        let mut done = 0;
        while done < length {
            let (piece, within) = ((at + done) / EXTENT_BYTES, (at + done) % EXTENT_BYTES);
            let part = (EXTENT_BYTES - within).min(length - done);
            let from = offset_of(pieces[piece]) + within as u64;
            self.place.ground.read_at(&mut value[done..done + part], from)?;
            done += part;
        }
        Ok(value.into())
    }

    /// Moves a full block into the file. It stays in memory when that fails, and can be read all the while.
    fn write(&self) -> io::Result<()> {
        let bytes = match &*self.home() {
            Home::Full(bytes) => bytes.clone(),
            Home::Open(_) | Home::File(_) => return Ok(()),
        };
        let pieces = self.place.take(bytes.len());
        let mut parts = pieces.iter().zip(bytes.chunks(EXTENT_BYTES));
        let written = parts.try_for_each(|(piece, part)| self.place.ground.write_at(part, offset_of(*piece)));
        match written {
            Ok(()) => *self.home() = Home::File(pieces),
            Err(_) => self.place.give_back(&pieces),
        }
        written
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Home::File(pieces) = self.home.get_mut().unwrap_or_else(PoisonError::into_inner) {
            self.place.give_back(pieces);
        }
    }
}

impl Shelf {
    /// A shelf on a file that nobody else uses, with the thread that writes to it. The thread ends with the last
    /// user of the shelf.
    pub fn new(ground: impl Ground) -> io::Result<Self> {
        let place = Arc::new(Place { ground: Box::new(ground), extents: Mutex::default() });
        let queue = Arc::new(Queue::default());
        let feeder = Arc::new(Feeder(Arc::clone(&queue)));
        std::thread::Builder::new().name("history".to_owned()).spawn(move || write_blocks(&queue))?;
        Ok(Self { place, feeder })
    }
}

/// Full blocks that are to be written. They are in memory anyhow, so however many there are, the queue makes it no
/// more; and those that are forgotten before their turn are not held.
#[derive(Default)]
struct Queue {
    blocks: Mutex<Waiting>,
    news: Condvar,
}

#[derive(Default)]
struct Waiting {
    blocks: VecDeque<Weak<Block>>,
    is_closed: bool,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next block, when there is one; `None` when there will be none.
    fn next(&self) -> Option<Weak<Block>> {
        let idle = |waiting: &mut Waiting| waiting.blocks.is_empty() && !waiting.is_closed;
        let waiting = self.news.wait_while(self.waiting(), idle);
        waiting.unwrap_or_else(PoisonError::into_inner).blocks.pop_front()
    }
}

/// The end of the queue that users hold.
struct Feeder(Arc<Queue>);

impl Feeder {
    fn feed(&self, block: &Arc<Block>) {
        block.close();
        self.0.waiting().blocks.push_back(Arc::downgrade(block));
        self.0.news.notify_one();
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        self.0.waiting().is_closed = true;
        self.0.news.notify_one();
    }
}

fn write_blocks(queue: &Queue) {
    let mut failing = false;
    while let Some(block) = queue.next() {
        match block.upgrade().map_or(Ok(()), |block| block.write()) {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(%error, "old values stay in memory: they could not be written to the data folder");
            }
            Err(_) => {}
        }
    }
}

/// One user of a shelf, with the block it fills.
#[derive(Default)]
pub(crate) struct Shelver {
    shelf: Option<Shelf>,
    open: Option<Arc<Block>>,
}

impl fmt::Debug for Shelver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shelver").finish_non_exhaustive()
    }
}

impl Shelver {
    pub(crate) fn new(shelf: Option<Shelf>) -> Self {
        Self { shelf, open: None }
    }

    pub(crate) fn shelf(&self) -> Option<&Shelf> {
        self.shelf.as_ref()
    }

    /// Takes a value out of memory, if that is worth it.
    pub(crate) fn lay_down(&mut self, value: &mut Value) {
        let Some(shelf) = &self.shelf else { return };
        let Value::Held(bytes) = &*value else { return };
        if bytes.len() < MIN_VALUE_BYTES {
            return;
        }
        let (Ok(length), crc) = (u32::try_from(bytes.len()), crc32c::crc32c(bytes)) else { return };
        let added = self.open.as_ref().and_then(|block| Some((Arc::clone(block), block.add(bytes)?)));
        let (block, at) = match added {
            Some(added) => added,
            None => {
                let home = Mutex::new(Home::Open(Vec::with_capacity(EXTENT_BYTES.max(bytes.len()))));
                let block = Arc::new(Block { place: Arc::clone(&shelf.place), home });
                let at = block.add(bytes).expect("a new block has room");
                if let Some(full) = self.open.replace(Arc::clone(&block)) {
                    shelf.feeder.feed(&full);
                }
                (block, at)
            }
        };
        let at = u32::try_from(at).expect("a block is shorter than 4 GiB");
        *value = Value::Laid(Laid { block, at, length, crc });
    }
}

/// What a key was set to: in memory, or laid down.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Held(Bytes),
    Laid(Laid),
}

/// Where a value that was laid down is.
#[derive(Clone)]
pub(crate) struct Laid {
    block: Arc<Block>,
    at: u32,
    length: u32,
    crc: u32,
}

impl fmt::Debug for Laid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Laid({} bytes)", self.length)
    }
}

impl Value {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Held(bytes) => bytes.len(),
            Self::Laid(laid) => laid.length as usize,
        }
    }

    /// The bytes.
    ///
    /// # Panics
    /// When the file does not give back what was written to it. A disk that does that to one file does it to others:
    /// the node stops, as it does after a sync that failed.
    pub(crate) fn bytes(&self) -> Bytes {
        match self {
            Self::Held(bytes) => bytes.clone(),
            Self::Laid(laid) => {
                let read = laid.block.read(laid.at as usize, laid.length as usize);
                let bytes = read.unwrap_or_else(|error| panic!("a value of history cannot be read: {error}"));
                assert_eq!(crc32c::crc32c(&bytes), laid.crc, "a value of history was damaged on disk");
                bytes
            }
        }
    }
}

impl From<Bytes> for Value {
    fn from(bytes: Bytes) -> Self {
        Self::Held(bytes)
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
