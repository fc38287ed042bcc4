//! The response writer: encoded responses on their way to the socket.
//!
//! Small responses are encoded back to back into one buffer and sent in one write. The records of a fetch are never
//! copied into it: they stay shared memory or ranges of segment files, which go from the page cache to the socket by
//! `sendfile`. A range that is not in the page cache is handed back to be read on another thread first, because
//! `sendfile` would block the whole event loop on the disk.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes, BytesMut};

use moim_journal::{Chunk, FileRange};
use moim_wire_kafka::{Message, encode_response};

use moim_base::Permit;
use moim_base::socket::Socket;

/// The request fields that its response needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) correlation_id: i32,
    pub(crate) version: i16,
}

enum Piece {
    Mem(Bytes),
    File(FileRange),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Mem(bytes) => bytes.len(),
            Self::File(range) => range.len,
        }
    }
}

/// Maximum number of pieces of one vectored write.
const GATHER: usize = 64;
/// Step size of sending a file, and of reading it into the page cache.
const FILE_STEP: usize = 1 << 20;

/// The unsent responses of a connection.
#[derive(Default)]
pub(crate) struct ResponseWriter {
    /// Invariant: everything in here comes before `tail`.
    pieces: VecDeque<Piece>,
    tail: BytesMut,
    queued: usize,
    /// Memory permit of in-memory records that are not sent yet.
    records: Option<Permit>,
    /// Number of bytes of the front file that are known to be in the page cache.
    warm: usize,
}

/// The result of a flush.
pub(crate) enum Flushed {
    /// Everything is sent, or the socket takes no more.
    Done,
    /// This range must be read into the page cache first; then call [`ResponseWriter::on_warm`].
    Cold(FileRange),
}

impl ResponseWriter {
    pub(crate) fn len(&self) -> usize {
        self.queued + self.tail.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// An empty writer with this capacity.
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { tail: BytesMut::with_capacity(bytes), ..Self::default() }
    }

    /// Encodes a response without record chunks.
    pub(crate) fn push(&mut self, call: Call, response: &impl Message) -> io::Result<()> {
        self.push_with_chunks(call, response, Vec::new())
    }

    /// Takes over the memory permit of the records that are pushed next.
    pub(crate) fn hold(&mut self, permit: Permit) {
        match &mut self.records {
            Some(held) => held.absorb(permit),
            none => *none = Some(permit),
        }
    }

    /// True if unsent records hold memory of the budget.
    pub(crate) fn holds_records(&self) -> bool {
        self.records.is_some()
    }

    /// Releases the memory of records that were sent.
    fn release_sent(&mut self) {
        let left = self.len();
        if left == 0 {
            self.records = None;
        } else if let Some(permit) = &mut self.records {
            permit.shrink_to(left);
        }
    }

    /// Encodes a response and fills its gaps, in order, with `chunks`.
    pub(crate) fn push_with_chunks(
        &mut self,
        call: Call,
        response: &impl Message,
        chunks: Vec<Vec<Chunk>>,
    ) -> io::Result<()> {
        let tail = std::mem::take(&mut self.tail);
        // An encoding failure is a bug of a handler; it ends this connection, not the broker.
        let (mut buf, gaps) = encode_response(tail, call.correlation_id, call.version, response)
            .map_err(|e| io::Error::other(format!("response encoding failed: {e}")))?;
        assert_eq!(gaps.len(), chunks.len(), "every gap of a response has its records");
        let mut done = 0;
        for (gap, chunks) in gaps.iter().zip(chunks) {
            self.piece(Piece::Mem(buf.split_to(gap.at - done).freeze()));
            done = gap.at;
            for chunk in chunks {
                self.piece(match chunk {
                    Chunk::Mem(bytes) => Piece::Mem(bytes),
                    Chunk::File(range) => Piece::File(range),
                });
            }
        }
        self.tail = buf;
        Ok(())
    }

    fn piece(&mut self, piece: Piece) {
        self.queued += piece.len();
        self.pieces.push_back(piece);
    }

    /// Appends an encoded response.
    pub(crate) fn push_encoded(&mut self, response: Bytes) {
        if self.tail.is_empty() {
            self.tail = response.into();
        } else {
            self.tail.extend_from_slice(&response);
        }
    }

    /// Appends a copy of an encoded response with the bytes at `place` replaced.
    pub(crate) fn push_copy_with(&mut self, response: &[u8], place: std::ops::Range<usize>, there: &[u8]) {
        let start = self.tail.len();
        self.tail.extend_from_slice(response);
        self.tail[start..][place].copy_from_slice(there);
    }

    /// The whole content, for a response without files.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        if self.pieces.is_empty() {
            return self.tail.freeze();
        }
        let mut all = BytesMut::with_capacity(self.len());
        for piece in self.pieces.drain(..) {
            if let Piece::Mem(bytes) = piece {
                all.extend_from_slice(&bytes);
            }
        }
        all.extend_from_slice(&self.tail);
        all.freeze()
    }

    /// Writes until everything is sent, the socket takes no more, or a disk read is needed.
    pub(crate) fn flush(&mut self, socket: &mut dyn Socket) -> io::Result<Flushed> {
        let flushed = self.write(socket);
        if self.records.is_some() {
            self.release_sent();
        }
        flushed
    }

    fn write(&mut self, socket: &mut dyn Socket) -> io::Result<Flushed> {
        loop {
            let result = match self.pieces.front() {
                None if self.tail.is_empty() => return Ok(Flushed::Done),
                Some(Piece::File(range)) => {
                    if self.warm == 0 {
                        let step = FileRange {
                            file: range.file.clone(),
                            pos: range.pos,
                            len: range.len.min(FILE_STEP),
                        };
                        if !is_in_memory(&step) {
                            return Ok(Flushed::Cold(step));
                        }
                        self.warm = step.len;
                    }
                    self.send_file(socket)
                }
                _ => self.send_memory(socket),
            };
            match result {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Flushed::Done),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The cold range was read into the page cache.
    pub(crate) fn on_warm(&mut self) {
        if let Some(Piece::File(range)) = self.pieces.front() {
            self.warm = range.len.min(FILE_STEP);
        }
    }

    fn send_memory(&mut self, socket: &mut dyn Socket) -> io::Result<()> {
        if self.pieces.is_empty() {
            let n = socket.try_write(&[IoSlice::new(&self.tail)])?;
            self.tail.advance(n);
            return Ok(());
        }
        let mut slices = [IoSlice::new(&[]); GATHER];
        let mut count = 0;
        let mut only_memory = true;
        for piece in self.pieces.iter().take(GATHER - 1) {
            let Piece::Mem(bytes) = piece else {
                only_memory = false;
                break;
            };
            slices[count] = IoSlice::new(bytes);
            count += 1;
        }
        if only_memory && count == self.pieces.len() && !self.tail.is_empty() {
            slices[count] = IoSlice::new(&self.tail);
            count += 1;
        }
        let mut sent = socket.try_write(&slices[..count])?;
        while sent > 0 {
            let Some(Piece::Mem(bytes)) = self.pieces.front_mut() else {
                self.tail.advance(sent);
                return Ok(());
            };
            let n = sent.min(bytes.len());
            bytes.advance(n);
            self.queued -= n;
            sent -= n;
            if bytes.is_empty() {
                self.pieces.pop_front();
            }
        }
        while matches!(self.pieces.front(), Some(Piece::Mem(bytes)) if bytes.is_empty()) {
            self.pieces.pop_front();
        }
        Ok(())
    }

    fn send_file(&mut self, socket: &mut dyn Socket) -> io::Result<()> {
        let Some(Piece::File(range)) = self.pieces.front_mut() else { return Ok(()) };
        let Some(file) = range.file.raw() else {
            // A simulated disk has no file descriptor.
            let bytes = range.read()?;
            self.pieces[0] = Piece::Mem(bytes);
            self.warm = 0;
            return Ok(());
        };
        let n = socket.try_send_file(file, range.pos, range.len.min(self.warm))?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "segment file shorter than its index"));
        }
        range.pos += n as u64;
        range.len -= n;
        self.queued -= n;
        self.warm -= n;
        if range.len == 0 {
            self.warm = 0;
            self.pieces.pop_front();
        }
        Ok(())
    }
}

/// True if both ends of a range are in the page cache. Readahead usually brings in the rest; where it does not, the
/// loop blocks on the disk as it would without this check.
fn is_in_memory(range: &FileRange) -> bool {
    let Some(file) = range.file.raw() else { return true };
    let there = |at: u64| {
        let mut byte = [0];
        let mut buffers = [io::IoSliceMut::new(&mut byte)];
        let read = rustix::io::preadv2(file, &mut buffers, at, rustix::io::ReadWriteFlags::NOWAIT);
        // Only EAGAIN means "not in the page cache"; a file system that does not support the check counts as cached.
        !matches!(read, Err(rustix::io::Errno::AGAIN))
    };
    let last = range.pos + (range.len as u64).saturating_sub(1);
    there(range.pos) && there(last)
}
