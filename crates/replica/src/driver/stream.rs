//! Frames over a socket, both ways, in one task.
//!
//! Small frames are encoded back to back into one buffer. Records are never copied into it: they stay shared memory
//! or ranges of segment files, which go from the page cache to the socket by `sendfile`. A range that is not in the
//! page cache is first loaded by a helper thread, because `sendfile` would block the whole thread.
//!
//! The caller checks [`Stream::unsent`] before a push; the queue itself has no limit.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use moim_base::socket::Socket;
use moim_base::task::offload;
use moim_journal::{Chunk, FileRange};

use super::frame::{self, Frame};

enum Piece {
    Mem(Bytes),
    File(FileRange),
}

/// The maximum number of pieces that one write gathers.
const GATHER: usize = 64;
/// How much of a file is sent, or warmed, at a time.
const FILE_STEP: usize = 1 << 20;
/// The read buffer reserved when no larger frame is known to follow.
const READ_STEP: usize = 64 << 10;

type Warming = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

/// The result of a turn.
pub(super) enum Turn {
    /// A complete frame.
    Frame(Frame),
    /// Fewer bytes are unsent than the caller's limit.
    Drained,
}

/// One connection.
pub(super) struct Stream {
    socket: Box<dyn Socket>,
    input: BytesMut,
    /// Invariant: every piece precedes `tail`.
    pieces: VecDeque<Piece>,
    tail: BytesMut,
    queued: usize,
    /// The number of bytes of the file at the front that are known to be in memory.
    warm: usize,
    warming: Option<Warming>,
}

impl Stream {
    pub(super) fn new(socket: Box<dyn Socket>) -> Self {
        Self {
            socket,
            input: BytesMut::new(),
            pieces: VecDeque::new(),
            tail: BytesMut::new(),
            queued: 0,
            warm: 0,
            warming: None,
        }
    }

    /// The number of pushed bytes that are not sent yet.
    pub(super) fn unsent(&self) -> usize {
        self.queued + self.tail.len()
    }

    /// The buffer into which frames are encoded.
    pub(super) fn out(&mut self) -> &mut BytesMut {
        &mut self.tail
    }

    /// Appends these chunks after the encoded bytes: the body of the last frame.
    pub(super) fn push_chunks(&mut self, chunks: Vec<Chunk>) {
        if chunks.is_empty() {
            return;
        }
        let head = self.tail.split().freeze();
        self.push_piece(Piece::Mem(head));
        for chunk in chunks {
            self.push_piece(match chunk {
                Chunk::Mem(bytes) => Piece::Mem(bytes),
                Chunk::File(range) => Piece::File(range),
            });
        }
    }

    fn push_piece(&mut self, piece: Piece) {
        self.queued += match &piece {
            Piece::Mem(bytes) => bytes.len(),
            Piece::File(range) => range.len,
        };
        self.pieces.push_back(piece);
    }

    /// Sends the queued bytes and waits for the next frame, or until less than `drain_below` is unsent. Cancel-safe.
    pub(super) async fn turn(&mut self, drain_below: Option<usize>) -> io::Result<Turn> {
        poll_fn(|cx| self.poll_turn(cx, drain_below)).await
    }

    /// The next frame that was already received. Reads nothing, so its work is bounded by the last read.
    pub(super) fn arrived(&mut self) -> io::Result<Option<Frame>> {
        frame::split(&mut self.input)
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>, drain_below: Option<usize>) -> Poll<io::Result<Turn>> {
        self.poll_flush(cx)?;
        if drain_below.is_some_and(|low| self.unsent() < low) {
            return Poll::Ready(Ok(Turn::Drained));
        }
        loop {
            if let Some(frame) = frame::split(&mut self.input)? {
                return Poll::Ready(Ok(Turn::Frame(frame)));
            }
            self.input.reserve(
                frame::missing(&self.input).clamp(READ_STEP, READ_STEP.max(self.input.len()).max(1 << 20)),
            );
            match self.socket.poll_read(cx, &mut self.input)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Poll::Ready(_) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Writes until everything is sent, the socket accepts no more, or the disk is waited for.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.unsent() > 0 {
            if let Some(warming) = &mut self.warming {
                match warming.as_mut().poll(cx) {
                    Poll::Pending => return Ok(()),
                    Poll::Ready(done) => done?,
                }
                self.warming = None;
                self.warm = self.step();
            }
            match self.socket.poll_write_ready(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(ready) => ready?,
            }
            match self.write_some() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn step(&self) -> usize {
        match self.pieces.front() {
            Some(Piece::File(range)) => range.len.min(FILE_STEP),
            _ => 0,
        }
    }

    fn write_some(&mut self) -> io::Result<()> {
        let Some(Piece::File(range)) = self.pieces.front() else { return self.send_memory() };
        if self.warm == 0 {
            let step = FileRange { file: range.file.clone(), pos: range.pos, len: self.step() };
            if !is_in_memory(&step) {
                self.warming = Some(Box::pin(offload(move || step.read().map(drop))));
                return Ok(());
            }
            self.warm = step.len;
        }
        self.send_file()
    }

    fn send_memory(&mut self) -> io::Result<()> {
        let mut slices = [IoSlice::new(&[]); GATHER];
        let mut count = 0;
        for piece in self.pieces.iter().take(GATHER - 1) {
            let Piece::Mem(bytes) = piece else { break };
            slices[count] = IoSlice::new(bytes);
            count += 1;
        }
        if count == self.pieces.len() {
            slices[count] = IoSlice::new(&self.tail);
            count += 1;
        }
        let mut sent = self.socket.try_write(&slices[..count])?;
        loop {
            let Some(Piece::Mem(bytes)) = self.pieces.front_mut() else {
                self.tail.advance(sent);
                return Ok(());
            };
            let some = sent.min(bytes.len());
            bytes.advance(some);
            self.queued -= some;
            sent -= some;
            if !bytes.is_empty() {
                return Ok(());
            }
            self.pieces.pop_front();
            if sent == 0 && !matches!(self.pieces.front(), Some(Piece::Mem(bytes)) if bytes.is_empty()) {
                return Ok(());
            }
        }
    }

    fn send_file(&mut self) -> io::Result<()> {
        let Some(Piece::File(range)) = self.pieces.front_mut() else { return Ok(()) };
        let Some(file) = range.file.raw() else {
            // A simulated disk has no descriptor.
            let bytes = range.read()?;
            self.pieces[0] = Piece::Mem(bytes);
            self.warm = 0;
            return Ok(());
        };
        let sent = self.socket.try_send_file(file, range.pos, range.len.min(self.warm))?;
        if sent == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "segment shorter than its index"));
        }
        range.pos += sent as u64;
        range.len -= sent;
        self.queued -= sent;
        self.warm -= sent;
        if range.len == 0 {
            self.warm = 0;
            self.pieces.pop_front();
        }
        Ok(())
    }
}

/// True if the ends of a range are in the page cache; readahead loads what lies between them in most cases.
fn is_in_memory(range: &FileRange) -> bool {
    let Some(file) = range.file.raw() else { return true };
    let there = |at: u64| {
        let mut byte = [0];
        let mut buffers = [io::IoSliceMut::new(&mut byte)];
        let read = rustix::io::preadv2(file, &mut buffers, at, rustix::io::ReadWriteFlags::NOWAIT);
        // Only "would block" means that it is not cached; a file system that cannot tell is treated as cached.
        !matches!(read, Err(rustix::io::Errno::AGAIN))
    };
    let last = range.pos + (range.len as u64).saturating_sub(1);
    there(range.pos) && there(last)
}
