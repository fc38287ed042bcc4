//! The socket of a connection, with a write buffer that the connection's task flushes once a round.
//!
//! The HTTP/2 library flushes after each larger frame, so that a response takes two writes and sixty-four responses of
//! one round take a hundred and twenty-eight. Here its writes are collected, its flushes are ignored, and
//! [`Outbox::poll_flush`] writes everything when the task has nothing else to do: one write per round.
//!
//! Invariants:
//! - At most [`COLLECT_BYTES`] are collected. A larger write waits for the socket, and so does the library, which
//!   applies the backpressure of a slow client to its connection.
//! - An empty buffer holds no memory: there may be thousands of idle connections.
//! - Before the first round, and when the connection is shut down, a flush is a real flush.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

const COLLECT_BYTES: usize = 64 * 1024;

/// The side of the HTTP/2 library.
pub(super) struct Socket {
    /// Bytes that were read to detect the protocol.
    first: BytesMut,
    read: OwnedReadHalf,
    out: Outbox,
}

/// The side of the connection's task.
#[derive(Clone)]
pub(super) struct Outbox {
    inner: Arc<Mutex<Collected>>,
}

struct Collected {
    buffer: BytesMut,
    write: OwnedWriteHalf,
    /// Bytes the socket has taken so far.
    taken_bytes: u64,
    collects: bool,
}

impl Socket {
    pub(super) fn new(first: BytesMut, socket: TcpStream) -> (Self, Outbox) {
        let (read, write) = socket.into_split();
        let collected = Collected { buffer: BytesMut::new(), write, taken_bytes: 0, collects: false };
        let out = Outbox { inner: Arc::new(Mutex::new(collected)) };
        (Self { first, read, out: out.clone() }, out)
    }
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the connection's task calls [`Self::poll_flush`] after each round.
    pub(super) fn collect(&self) {
        self.lock().collects = true;
    }

    /// Writes the collected bytes.
    pub(super) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_empty(context)
    }

    /// Bytes the socket had taken when it blocked; `None` while nothing is pending.
    pub(super) fn blocked_at(&self) -> Option<u64> {
        let collected = self.lock();
        (!collected.buffer.is_empty()).then_some(collected.taken_bytes)
    }
}

impl Collected {
    fn poll_empty(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.buffer.is_empty() {
            let written = ready!(Pin::new(&mut self.write).poll_write(context, &self.buffer))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.buffer.advance(written);
            self.taken_bytes += written as u64;
        }
        self.buffer = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.read).poll_read(context, buffer);
        }
        let length = self.first.len().min(buffer.remaining());
        buffer.put_slice(&self.first[..length]);
        self.first.advance(length);
        if self.first.is_empty() {
            self.first = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut out = self.out.lock();
        let length = slices.iter().map(|slice| slice.len()).sum::<usize>();
        if out.buffer.len() + length > COLLECT_BYTES {
            ready!(out.poll_empty(context))?;
        }
        if length > COLLECT_BYTES {
            let written = ready!(Pin::new(&mut out.write).poll_write_vectored(context, slices))?;
            out.taken_bytes += written as u64;
            return Poll::Ready(Ok(written));
        }
        slices.iter().for_each(|slice| out.buffer.extend_from_slice(slice));
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut out = self.out.lock();
        if out.collects { Poll::Ready(Ok(())) } else { out.poll_empty(context) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut out = self.out.lock();
        ready!(out.poll_empty(context))?;
        Pin::new(&mut out.write).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn collected_writes_are_flushed_once_per_round_in_order() {
        run(async {
            let (mut client, server) = pair().await;
            let (mut socket, out) = Socket::new(BytesMut::from(&b"first"[..]), server);
            socket.write_all(b"greeting ").await.unwrap();
            socket.flush().await.unwrap();
            let mut greeting = [0; 9];
            client.read_exact(&mut greeting).await.unwrap();
            assert_eq!(&greeting, b"greeting ");
            out.collect();
            for piece in ["a", "b", "c"] {
                socket.write_all(piece.as_bytes()).await.unwrap();
                socket.flush().await.unwrap();
            }
            assert!(client.try_read(&mut [0; 9]).is_err(), "nothing goes out before the round ends");
            poll_fn(|context| out.poll_flush(context)).await.unwrap();
            let mut answers = [0; 3];
            client.read_exact(&mut answers).await.unwrap();
            assert_eq!(&answers, b"abc");
            client.write_all(b" second").await.unwrap();
            let mut read = [0; 12];
            socket.read_exact(&mut read).await.unwrap();
            assert_eq!(&read, b"first second");
            socket.write_all(b"last").await.unwrap();
            socket.shutdown().await.unwrap();
            let mut rest = Vec::new();
            client.read_to_end(&mut rest).await.unwrap();
            assert_eq!(rest, b"last");
        });
    }

    #[test]
    fn large_writes_keep_their_order_and_wait_for_a_full_socket() {
        run(async {
            let (mut client, server) = pair().await;
            let (mut socket, out) = Socket::new(BytesMut::new(), server);
            out.collect();
            let mut expected = Vec::new();
            for number in 0..200_u32 {
                let length = if number % 3 == 0 { 100_000 } else { 1_000 };
                expected.extend(std::iter::repeat_n((number % 251) as u8, length));
            }
            let send = async {
                let mut sent = 0;
                for number in 0..200_u32 {
                    let length = if number % 3 == 0 { 100_000 } else { 1_000 };
                    socket.write_all(&expected[sent..sent + length]).await.unwrap();
                    sent += length;
                    assert!(out.lock().buffer.len() <= COLLECT_BYTES);
                }
                socket.shutdown().await.unwrap();
            };
            let mut received = Vec::new();
            let receive = async { client.read_to_end(&mut received).await.unwrap() };
            tokio::join!(send, receive);
            assert!(received == expected);
        });
    }
}
