//! The socket abstraction: non-blocking reads and writes.
//!
//! TCP is one implementation; [`MemorySocket`] is another, for tests and the simulator, so that the code that serves
//! a client or another node is the same over both.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::TcpStream;

/// The listen backlog; the kernel caps it to `net.core.somaxconn`. When a thousand clients reconnect at once, a short
/// backlog drops handshakes and resets connections without a reason.
const BACKLOG: i32 = 16 << 10;

/// The buffer that [`read_until`] reserves at a time.
const READ_STEP: usize = 64 << 10;

/// Listens on an address, port 0 for any free port. Non-blocking: for `TcpListener::from_std`.
pub fn listen(address: SocketAddr) -> io::Result<StdListener> {
    let listener = StdListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // It listens already; this only raises the backlog.
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// One end of a byte stream. Nothing here blocks: an operation that cannot proceed returns `Pending` or `WouldBlock`.
pub trait Socket: Send {
    /// Reads available bytes into the spare capacity of `buf`; 0 is the end of the stream.
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>>;
    /// Ready when a write may make progress.
    fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Writes from memory; returns the number of bytes written.
    fn try_write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Writes `len` bytes of a file from `pos`; returns the number of bytes sent.
    fn try_send_file(&mut self, file: BorrowedFd<'_>, pos: u64, len: usize) -> io::Result<usize>;
}

/// Writes everything, waiting as needed.
pub async fn write_all(socket: &mut dyn Socket, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        poll_fn(|cx| socket.poll_write_ready(cx)).await?;
        match socket.try_write(&[IoSlice::new(bytes)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads until `buf` holds this many bytes. Memory is reserved as they arrive.
pub async fn read_until(socket: &mut dyn Socket, buf: &mut BytesMut, bytes: usize) -> io::Result<()> {
    while buf.len() < bytes {
        buf.reserve((bytes - buf.len()).min(READ_STEP));
        if poll_fn(|cx| socket.poll_read(cx, buf)).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

impl Socket for TcpStream {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        pin!(self.read_buf(buf)).poll(cx)
    }

    fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        TcpStream::poll_write_ready(self, cx)
    }

    fn try_write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match bufs {
            // A single buffer uses `send`, which costs less than `writev`: most answers are one buffer.
            [one] => TcpStream::try_write(self, one),
            many => self.try_write_vectored(many),
        }
    }

    fn try_send_file(&mut self, file: BorrowedFd<'_>, mut pos: u64, len: usize) -> io::Result<usize> {
        let stream = &*self;
        stream.try_io(Interest::WRITABLE, || {
            rustix::fs::sendfile(stream, file, Some(&mut pos), len).map_err(io::Error::from)
        })
    }
}

/// One end of an in-memory connection; the peer is another `MemorySocket`.
pub struct MemorySocket {
    reads: Arc<Mutex<Pipe>>,
    writes: Arc<Mutex<Pipe>>,
}

fn lock(pipe: &Mutex<Pipe>) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The maximum number of bytes in flight in one direction.
const IN_MEMORY: usize = 256 << 10;

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    closed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl MemorySocket {
    /// Two ends of one connection.
    pub fn pair() -> (Self, Self) {
        let (one, two) = (Arc::<Mutex<Pipe>>::default(), Arc::<Mutex<Pipe>>::default());
        let left = Self { reads: Arc::clone(&one), writes: Arc::clone(&two) };
        (left, Self { reads: two, writes: one })
    }
}

impl Drop for MemorySocket {
    fn drop(&mut self) {
        for pipe in [&self.reads, &self.writes] {
            let mut pipe = lock(pipe);
            pipe.closed = true;
            pipe.reader.take().into_iter().chain(pipe.writer.take()).for_each(Waker::wake);
        }
    }
}

impl Socket for MemorySocket {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        let mut pipe = lock(&self.reads);
        if pipe.bytes.is_empty() && !pipe.closed {
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = pipe.bytes.len().min(buf.capacity() - buf.len());
        buf.extend(pipe.bytes.drain(..count));
        pipe.writer.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(count))
    }

    fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = lock(&self.writes);
        if pipe.bytes.len() >= IN_MEMORY && !pipe.closed {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn try_write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pipe = lock(&self.writes);
        if pipe.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = IN_MEMORY.saturating_sub(pipe.bytes.len());
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut written = 0;
        for buf in bufs {
            let count = buf.len().min(room - written);
            pipe.bytes.extend(&buf[..count]);
            written += count;
        }
        pipe.reader.take().into_iter().for_each(Waker::wake);
        Ok(written)
    }

    fn try_send_file(&mut self, file: BorrowedFd<'_>, pos: u64, len: usize) -> io::Result<usize> {
        let mut bytes = vec![0; len.min(IN_MEMORY)];
        let count = rustix::io::pread(file, &mut bytes, pos)?;
        self.try_write(&[IoSlice::new(&bytes[..count])])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll<T>(f: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        f(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn what_one_end_writes_the_other_reads_until_it_is_gone() {
        let (mut left, mut right) = MemorySocket::pair();
        let mut buf = BytesMut::with_capacity(3);
        assert!(poll(|cx| right.poll_read(cx, &mut buf)).is_pending());
        assert_eq!(left.try_write(&[IoSlice::new(b"ab"), IoSlice::new(b"cd")]).unwrap(), 4);
        let room = buf.capacity();
        assert!(matches!(poll(|cx| right.poll_read(cx, &mut buf)), Poll::Ready(Ok(n)) if n == room.min(4)));
        drop(left);
        buf.reserve(16);
        while !matches!(poll(|cx| right.poll_read(cx, &mut buf)), Poll::Ready(Ok(0))) {}
        assert_eq!(&buf[..], b"abcd");
        assert!(right.try_write(&[IoSlice::new(b"x")]).is_err());
    }

    #[test]
    fn a_full_pipe_takes_no_more() {
        let (mut left, _right) = MemorySocket::pair();
        let much = vec![7; IN_MEMORY + 1];
        assert_eq!(left.try_write(&[IoSlice::new(&much)]).unwrap(), IN_MEMORY);
        assert_eq!(left.try_write(&[IoSlice::new(b"x")]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(poll(|cx| left.poll_write_ready(cx)).is_pending());
    }
}
