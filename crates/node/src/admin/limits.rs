//! Bounds on HTTP clients: so many connections, so long idle, so long at all.
//!
//! Invariant: at the cap nothing is accepted, so that the kernel's backlog, not our memory, holds the rest;
//! every connection ends by itself, however slowly its peer dribbles. The HTTP parser bounds headers.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

/// A connection without a byte in either direction for this long is closed.
const IDLE: Duration = Duration::from_secs(15);
/// No connection lives longer; scrapers and browsers open another one.
const LIFETIME: Duration = Duration::from_secs(300);

/// Accepts while fewer than the permitted connections are open.
pub(super) struct LimitedListener {
    inner: TcpListener,
    slots: Arc<Semaphore>,
}

impl LimitedListener {
    pub(super) fn new(inner: TcpListener, max_connections: u32) -> Self {
        Self { inner, slots: Arc::new(Semaphore::new(max_connections as usize)) }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // The semaphore is never closed, so that without a permit there is nothing to do but wait.
        let permit = loop {
            if let Ok(permit) = self.slots.clone().acquire_owned().await {
                break permit;
            }
        };
        let (stream, peer) = Listener::accept(&mut self.inner).await;
        (LimitedStream::new(stream, permit, IDLE, LIFETIME), peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.inner.local_addr()
    }
}

/// A connection with a deadline that moves with every byte, up to its lifetime.
pub(super) struct LimitedStream {
    inner: TcpStream,
    _permit: OwnedSemaphorePermit,
    idle: Duration,
    end: Instant,
    deadline: Pin<Box<Sleep>>,
}

impl LimitedStream {
    fn new(inner: TcpStream, permit: OwnedSemaphorePermit, idle: Duration, lifetime: Duration) -> Self {
        let deadline = Box::pin(tokio::time::sleep(idle));
        let end = deadline.deadline() - idle + lifetime;
        Self { inner, _permit: permit, idle, end, deadline }
    }

    fn on_progress(&mut self) {
        // `sleep` is how tokio tells its time; the runtime's clock stays the only one here.
        let next = tokio::time::sleep(self.idle).deadline().min(self.end);
        self.deadline.as_mut().reset(next);
    }

    /// What a call that moved nothing becomes: still pending, or too late.
    fn or_expired<T>(&mut self, cx: &mut Context<'_>, moved: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match moved {
            Poll::Ready(done) => {
                self.on_progress();
                Poll::Ready(done)
            }
            Poll::Pending => match self.deadline.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
                Poll::Pending => Poll::Pending,
            },
        }
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let moved = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.or_expired(cx, moved)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let moved = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.or_expired(cx, moved)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt as _;

    #[tokio::test]
    async fn a_silent_connection_is_closed_and_gives_its_slot_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slots = Arc::new(Semaphore::new(1));
        let permit = slots.clone().acquire_owned().await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let short = Duration::from_millis(20);
        let mut stream = LimitedStream::new(stream, permit, short, short);
        let patience = Duration::from_secs(30);
        let error = tokio::time::timeout(patience, stream.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(slots.available_permits(), 0);
        drop(stream);
        assert_eq!(slots.available_permits(), 1);
    }

    #[tokio::test]
    async fn at_the_cap_nobody_else_is_accepted() {
        let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = inner.local_addr().unwrap();
        let mut listener = LimitedListener::new(inner, 1);
        let _first = TcpStream::connect(address).await.unwrap();
        let _second = TcpStream::connect(address).await.unwrap();
        let (held, _) = listener.accept().await;
        let waiting = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(waiting.is_err());
        drop(held);
        let (_stream, _) = listener.accept().await;
    }
}
