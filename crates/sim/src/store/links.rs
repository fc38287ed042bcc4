//! Streams between hosts, and the coordination core as a host reaches it: both can be cut.
//!
//! A cut loses no bytes by itself: they are delayed until it heals, like dropped packets of TCP. A host that crashes
//! closes its streams; the other end is notified once the link works.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::stream;
use moim_base::socket::{MemorySocket, Socket};
use moim_state::{
    BoxFuture, Entry, Lease, LeaseId, MemoryRepository, RepositoryError, StateRepository, Txn, TxnOutcome,
    Watch,
};

/// Timeout of a request to the core.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(300);

/// State of the links between hosts.
#[derive(Default)]
pub(crate) struct Links {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    cut: BTreeSet<(usize, usize)>,
    /// Hosts that are paused: they do not answer.
    unresponsive: BTreeSet<usize>,
    /// Hosts with a hung disk, as they report it.
    hung: BTreeSet<usize>,
    waiting: Vec<Waker>,
}

impl Links {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts both directions between two hosts.
    pub(crate) fn cut(&self, one: usize, other: usize) {
        self.inner().cut.insert((one.min(other), one.max(other)));
    }

    /// Restores every link.
    pub(crate) fn heal(&self) {
        let waiting = {
            let mut inner = self.inner();
            inner.cut.clear();
            std::mem::take(&mut inner.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.inner().cut.contains(&(one.min(other), one.max(other)))
    }

    pub(crate) fn set_unresponsive(&self, host: usize, unresponsive: bool) {
        let mut inner = self.inner();
        if unresponsive {
            inner.unresponsive.insert(host)
        } else {
            inner.unresponsive.remove(&host)
        };
    }

    pub(crate) fn is_unresponsive(&self, host: usize) -> bool {
        self.inner().unresponsive.contains(&host)
    }

    pub(crate) fn set_hung(&self, host: usize, hung: bool) {
        let mut inner = self.inner();
        if hung {
            inner.hung.insert(host)
        } else {
            inner.hung.remove(&host)
        };
    }

    pub(crate) fn is_hung(&self, host: usize) -> bool {
        self.inner().hung.contains(&host)
    }

    /// A stream between two hosts, as its two ends.
    pub(crate) fn stream(self: &Arc<Self>, one: usize, other: usize) -> (Box<dyn Socket>, Box<dyn Socket>) {
        let (left, right) = MemorySocket::pair();
        let end = |socket| -> Box<dyn Socket> {
            Box::new(End { socket, links: Arc::clone(self), ends: (one, other) })
        };
        (end(left), end(right))
    }
}

/// One end of a stream.
struct End {
    socket: MemorySocket,
    links: Arc<Links>,
    ends: (usize, usize),
}

impl Socket for End {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if self.links.is_cut(self.ends.0, self.ends.1) {
            self.links.inner().waiting.push(cx.waker().clone());
            return Poll::Pending;
        }
        self.socket.poll_read(cx, buf)
    }

    fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_write_ready(cx)
    }

    fn try_write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.try_write(bufs)
    }

    fn try_send_file(&mut self, file: BorrowedFd<'_>, pos: u64, len: usize) -> io::Result<usize> {
        self.socket.try_send_file(file, pos, len)
    }
}

/// The core as a host reaches it: replies are delayed, and there are none while the link is cut.
pub(crate) struct Remote {
    pub(crate) core: Arc<MemoryRepository>,
    pub(crate) links: Arc<Links>,
    /// The requesting host and the host of the core.
    pub(crate) ends: (usize, usize),
}

impl Remote {
    /// One transit; fails after a timeout while the link is cut.
    async fn transit(&self) -> Result<(), ()> {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(1..6))).await;
        if self.links.is_cut(self.ends.0, self.ends.1) {
            tokio::time::sleep(REQUEST_TIMEOUT).await;
            return Err(());
        }
        Ok(())
    }

    async fn request<T>(
        &self,
        operation: impl Future<Output = Result<T, RepositoryError>>,
    ) -> Result<T, RepositoryError> {
        self.transit().await.map_err(|()| RepositoryError::Unavailable("link cut".to_owned()))?;
        let reply = operation.await;
        self.transit().await.map_err(|()| RepositoryError::Unknown)?;
        reply
    }
}

impl StateRepository for Remote {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(self.request(self.core.get(key)))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(self.request(self.core.list(prefix)))
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(self.request(self.core.txn(txn)))
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(self.request(self.core.grant(ttl)))
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(self.request(self.core.keep_alive(lease)))
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(self.request(self.core.revoke(lease)))
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            let watch = self.request(self.core.watch(prefix, from_revision)).await?;
            let state = (watch, Arc::clone(&self.links), self.ends);
            Ok(Watch::new(stream::unfold(state, |(mut watch, links, ends)| async move {
                let event = watch.next().await?;
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
                while links.is_cut(ends.0, ends.1) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Some((event, (watch, links, ends)))
            })))
        })
    }
}
