//! Limits of HTTP clients: number of connections, idle time and lifetime.
//!
//! Invariant: at most one connection above the limit is open, and it is not served; further ones wait in the kernel's
//! backlog, not in our memory. Every connection ends, however slowly its client sends. At the limit, the connection
//! that has been stalled for the longest time is evicted: stalled clients do not affect others. The HTTP parser bounds
//! headers.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

/// Idle timeout: a connection without a byte in either direction is closed.
const IDLE: Duration = Duration::from_secs(15);
/// Stall time after which a connection may be evicted at the limit.
const STALLED: Duration = Duration::from_millis(500);
/// Maximum lifetime of a connection; scrapers and browsers reconnect.
const LIFETIME: Duration = Duration::from_secs(300);

/// The open connections.
#[derive(Default)]
struct OpenConnections {
    open: Mutex<OpenState>,
    /// Notified when a connection closes.
    freed: Notify,
}

#[derive(Default)]
struct OpenState {
    by_number: HashMap<u64, Connection>,
    next: u64,
}

struct Connection {
    /// Time of the last transferred byte.
    at: Instant,
    /// True if the connection must close.
    evicted: bool,
    waker: Option<Waker>,
}

/// Decision on one more connection.
enum Admission {
    Granted,
    /// At the limit: no connection can be evicted before this time.
    RetryAt(Instant),
}

impl OpenConnections {
    fn open(&self) -> MutexGuard<'_, OpenState> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>) -> ConnectionPermit {
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.by_number.insert(number, Connection { at: Instant::now(), evicted: false, waker: None });
        ConnectionPermit { connections: Arc::clone(self), number }
    }

    /// Grants one more connection below the limit; at the limit, evicts the connection with the longest stall.
    fn maybe_evict(&self, max: usize, stalled: Duration) -> Admission {
        let mut open = self.open();
        if open.by_number.len() < max {
            return Admission::Granted;
        }
        let staying = open.by_number.values_mut().filter(|connection| !connection.evicted);
        let Some(oldest) = staying.min_by_key(|connection| connection.at) else {
            return Admission::RetryAt(Instant::now() + stalled);
        };
        if oldest.at.elapsed() < stalled {
            return Admission::RetryAt(oldest.at + stalled);
        }
        oldest.evicted = true;
        if let Some(waker) = oldest.waker.take() {
            waker.wake();
        }
        Admission::RetryAt(Instant::now() + stalled)
    }
}

/// Permit of one open connection, released on drop.
struct ConnectionPermit {
    connections: Arc<OpenConnections>,
    number: u64,
}

impl ConnectionPermit {
    fn on_progress(&self) {
        if let Some(connection) = self.connections.open().by_number.get_mut(&self.number) {
            connection.at = Instant::now();
        }
    }

    /// True if the connection must close; otherwise the task is woken when it must.
    fn is_evicted(&self, cx: &Context<'_>) -> bool {
        let mut open = self.connections.open();
        let Some(connection) = open.by_number.get_mut(&self.number) else { return true };
        match &mut connection.waker {
            Some(known) => known.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        connection.evicted
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.open().by_number.remove(&self.number);
        self.connections.freed.notify_one();
    }
}

/// Listener with a limit of open connections.
pub(super) struct LimitedListener {
    inner: TcpListener,
    connections: Arc<OpenConnections>,
    max: usize,
    stalled: Duration,
}

impl LimitedListener {
    pub(super) fn new(inner: TcpListener, max_connections: u32) -> Self {
        Self { inner, connections: Arc::default(), max: max_connections as usize, stalled: STALLED }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, peer) = Listener::accept(&mut self.inner).await;
        while let Admission::RetryAt(moment) = self.connections.maybe_evict(self.max, self.stalled) {
            tokio::select! {
                () = self.connections.freed.notified() => {}
                () = tokio::time::sleep_until(moment) => {}
            }
        }
        (LimitedStream::new(stream, self.connections.take(), IDLE, LIFETIME), peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.inner.local_addr()
    }
}

/// Connection with an idle deadline, extended by every byte up to its lifetime.
pub(super) struct LimitedStream {
    inner: TcpStream,
    permit: ConnectionPermit,
    idle: Duration,
    end: Instant,
    deadline: Pin<Box<Sleep>>,
}

impl LimitedStream {
    fn new(inner: TcpStream, permit: ConnectionPermit, idle: Duration, lifetime: Duration) -> Self {
        let now = Instant::now();
        let deadline = Box::pin(tokio::time::sleep_until(now + idle));
        Self { inner, permit, idle, end: now + lifetime, deadline }
    }

    fn on_progress(&mut self) {
        self.permit.on_progress();
        let next = (Instant::now() + self.idle).min(self.end);
        self.deadline.as_mut().reset(next);
    }

    /// Maps the result of an I/O call: a pending one becomes a timeout after the deadline or an eviction.
    fn or_expired<T>(&mut self, cx: &mut Context<'_>, moved: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match moved {
            Poll::Ready(done) => {
                self.on_progress();
                Poll::Ready(done)
            }
            Poll::Pending if self.permit.is_evicted(cx) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
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
    use std::pin::pin;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    const PATIENCE: Duration = Duration::from_secs(30);

    async fn listen(max: u32, stalled: Duration) -> (LimitedListener, SocketAddr) {
        let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = inner.local_addr().unwrap();
        (LimitedListener { stalled, ..LimitedListener::new(inner, max) }, address)
    }

    #[tokio::test]
    async fn idle_connection_is_closed_and_releases_its_permit() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connections = Arc::<OpenConnections>::default();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let short = Duration::from_millis(20);
        let mut stream = LimitedStream::new(stream, connections.take(), short, short);
        let error = tokio::time::timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(connections.open().by_number.len(), 1);
        drop(stream);
        assert_eq!(connections.open().by_number.len(), 0);
    }

    #[tokio::test]
    async fn connection_above_the_limit_waits_while_none_is_stalled() {
        let (mut listener, address) = listen(1, PATIENCE).await;
        let _first = TcpStream::connect(address).await.unwrap();
        let _second = TcpStream::connect(address).await.unwrap();
        let (held, _) = listener.accept().await;
        let connections = Arc::clone(&listener.connections);
        let mut waiting = pin!(listener.accept());
        assert!(tokio::time::timeout(Duration::from_millis(50), waiting.as_mut()).await.is_err());
        assert!(!connections.open().by_number.values().any(|connection| connection.evicted));
        drop(held);
        let (_stream, _) = tokio::time::timeout(PATIENCE, waiting).await.unwrap();
    }

    #[tokio::test]
    async fn stalled_connections_are_evicted_at_the_limit() {
        let (mut listener, address) = listen(3, Duration::from_millis(50)).await;
        let (mut clients, mut served) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
            served.push(listener.accept().await.0);
        }
        // The first two stall in the middle of a request; the third is active.
        let mut tasks = tokio::task::JoinSet::new();
        for (number, mut stream) in served.into_iter().enumerate() {
            tasks.spawn(async move { (number, stream.read_to_end(&mut Vec::new()).await) });
        }
        let mut busy = clients.pop().unwrap();
        let talk = async {
            loop {
                busy.write_all(b"x").await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let late = async {
            for _ in 0..2 {
                clients.push(TcpStream::connect(address).await.unwrap());
                let (mut stream, _) = listener.accept().await;
                tasks.spawn(async move { (9, stream.read_to_end(&mut Vec::new()).await) });
                let (number, ended) = tasks.join_next().await.unwrap().unwrap();
                assert!(number < 2, "the active connection stays");
                assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
            }
        };
        tokio::select! {
            () = talk => {}
            done = tokio::time::timeout(PATIENCE, late) => done.expect("eviction in time"),
        }
    }
}
