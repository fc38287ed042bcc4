//! Bounds on HTTP clients: so many connections, so long idle, so long at all.
//!
//! Invariant: at most one connection above the cap is open, and it is not served; the kernel's backlog, not our memory,
//! holds the rest. Every connection ends by itself, however slowly its peer dribbles, and at the cap the one that has
//! moved nothing for longest makes room: clients that stall cost others nothing. The HTTP parser bounds headers.

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

/// A connection without a byte in either direction for this long is closed.
const IDLE: Duration = Duration::from_secs(15);
/// At the cap, this long is enough.
const STALLED: Duration = Duration::from_millis(500);
/// No connection lives longer; scrapers and browsers open another one.
const LIFETIME: Duration = Duration::from_secs(300);

/// The connections that are open.
#[derive(Default)]
struct Slots {
    open: Mutex<Open>,
    /// One has closed.
    freed: Notify,
}

#[derive(Default)]
struct Open {
    by_number: HashMap<u64, Progress>,
    next: u64,
}

struct Progress {
    /// When it last moved a byte.
    at: Instant,
    /// It must close.
    evicted: bool,
    waker: Option<Waker>,
}

/// What to do about room for one more.
enum Room {
    Enough,
    /// Nobody has stalled for long enough before this moment.
    From(Instant),
}

impl Slots {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(self: &Arc<Self>) -> Slot {
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.by_number.insert(number, Progress { at: Instant::now(), evicted: false, waker: None });
        Slot { slots: Arc::clone(self), number }
    }

    /// Whether one more fits; if not, tells the one that has stalled for longest to close.
    fn make_room(&self, max: usize, stalled: Duration) -> Room {
        let mut open = self.open();
        if open.by_number.len() < max {
            return Room::Enough;
        }
        let staying = open.by_number.values_mut().filter(|progress| !progress.evicted);
        let Some(oldest) = staying.min_by_key(|progress| progress.at) else {
            return Room::From(Instant::now() + stalled);
        };
        if oldest.at.elapsed() < stalled {
            return Room::From(oldest.at + stalled);
        }
        oldest.evicted = true;
        if let Some(waker) = oldest.waker.take() {
            waker.wake();
        }
        Room::From(Instant::now() + stalled)
    }
}

/// The place of one connection.
struct Slot {
    slots: Arc<Slots>,
    number: u64,
}

impl Slot {
    fn on_progress(&self) {
        if let Some(progress) = self.slots.open().by_number.get_mut(&self.number) {
            progress.at = Instant::now();
        }
    }

    /// Whether it must close; otherwise the task is woken when it must.
    fn is_evicted(&self, cx: &Context<'_>) -> bool {
        let mut open = self.slots.open();
        let Some(progress) = open.by_number.get_mut(&self.number) else { return true };
        match &mut progress.waker {
            Some(known) => known.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        progress.evicted
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.open().by_number.remove(&self.number);
        self.slots.freed.notify_one();
    }
}

/// Serves so many connections at a time.
pub(super) struct LimitedListener {
    inner: TcpListener,
    slots: Arc<Slots>,
    max: usize,
    stalled: Duration,
}

impl LimitedListener {
    pub(super) fn new(inner: TcpListener, max_connections: u32) -> Self {
        Self { inner, slots: Arc::default(), max: max_connections as usize, stalled: STALLED }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, peer) = Listener::accept(&mut self.inner).await;
        while let Room::From(moment) = self.slots.make_room(self.max, self.stalled) {
            tokio::select! {
                () = self.slots.freed.notified() => {}
                () = tokio::time::sleep_until(moment) => {}
            }
        }
        (LimitedStream::new(stream, self.slots.take(), IDLE, LIFETIME), peer)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.inner.local_addr()
    }
}

/// A connection with a deadline that moves with every byte, up to its lifetime.
pub(super) struct LimitedStream {
    inner: TcpStream,
    slot: Slot,
    idle: Duration,
    end: Instant,
    deadline: Pin<Box<Sleep>>,
}

impl LimitedStream {
    fn new(inner: TcpStream, slot: Slot, idle: Duration, lifetime: Duration) -> Self {
        let now = Instant::now();
        let deadline = Box::pin(tokio::time::sleep_until(now + idle));
        Self { inner, slot, idle, end: now + lifetime, deadline }
    }

    fn on_progress(&mut self) {
        self.slot.on_progress();
        let next = (Instant::now() + self.idle).min(self.end);
        self.deadline.as_mut().reset(next);
    }

    /// What a call that moved nothing becomes: still pending, or too late.
    fn or_expired<T>(&mut self, cx: &mut Context<'_>, moved: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match moved {
            Poll::Ready(done) => {
                self.on_progress();
                Poll::Ready(done)
            }
            Poll::Pending if self.slot.is_evicted(cx) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
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
    async fn a_silent_connection_is_closed_and_gives_its_slot_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slots = Arc::<Slots>::default();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let short = Duration::from_millis(20);
        let mut stream = LimitedStream::new(stream, slots.take(), short, short);
        let error = tokio::time::timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(slots.open().by_number.len(), 1);
        drop(stream);
        assert_eq!(slots.open().by_number.len(), 0);
    }

    #[tokio::test]
    async fn at_the_cap_nobody_else_is_served_while_none_stalls() {
        let (mut listener, address) = listen(1, PATIENCE).await;
        let _first = TcpStream::connect(address).await.unwrap();
        let _second = TcpStream::connect(address).await.unwrap();
        let (held, _) = listener.accept().await;
        let slots = Arc::clone(&listener.slots);
        let mut waiting = pin!(listener.accept());
        assert!(tokio::time::timeout(Duration::from_millis(50), waiting.as_mut()).await.is_err());
        assert!(!slots.open().by_number.values().any(|progress| progress.evicted));
        drop(held);
        let (_stream, _) = tokio::time::timeout(PATIENCE, waiting).await.unwrap();
    }

    #[tokio::test]
    async fn at_the_cap_those_that_stall_make_room_and_the_others_stay() {
        let (mut listener, address) = listen(3, Duration::from_millis(50)).await;
        let (mut clients, mut served) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
            served.push(listener.accept().await.0);
        }
        // The first two stall in the middle of a request; the third is in use.
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
                assert!(number < 2, "the busy one stays");
                assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
            }
        };
        tokio::select! {
            () = talk => {}
            done = tokio::time::timeout(PATIENCE, late) => done.expect("room in time"),
        }
    }
}
