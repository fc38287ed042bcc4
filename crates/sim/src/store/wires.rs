//! Streams between machines, and the coordination core as a machine sees it: both can be cut.
//!
//! A cut loses nothing by itself: bytes wait until it heals, as they do when packets are dropped. A machine that dies closes its
//! streams, which the other end hears of once it can.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::stream;
use moim_base::socket::{MemorySocket, Socket};
use moim_cluster::{
    BoxFuture, Entry, Lease, LeaseId, MemoryRepository, RepositoryError, StateRepository, Txn, TxnOutcome,
    Watch,
};

/// How long a question to the core waits for its answer.
const PATIENCE: Duration = Duration::from_millis(300);

/// Which ways are open.
#[derive(Default)]
pub(crate) struct Wires {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    cut: BTreeSet<(usize, usize)>,
    /// Machines that stand still or are off: they hear nothing.
    deaf: BTreeSet<usize>,
    /// Machines whose disk hangs, as they say themselves.
    hung: BTreeSet<usize>,
    waiting: Vec<Waker>,
}

impl Wires {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts both ways between two machines.
    pub(crate) fn cut(&self, one: usize, other: usize) {
        self.inner().cut.insert((one.min(other), one.max(other)));
    }

    /// Every way is open again.
    pub(crate) fn mend(&self) {
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

    pub(crate) fn set_deaf(&self, host: usize, deaf: bool) {
        let mut inner = self.inner();
        if deaf {
            inner.deaf.insert(host)
        } else {
            inner.deaf.remove(&host)
        };
    }

    pub(crate) fn is_deaf(&self, host: usize) -> bool {
        self.inner().deaf.contains(&host)
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

    /// A stream between two machines: the end of each.
    pub(crate) fn stream(self: &Arc<Self>, one: usize, other: usize) -> (Box<dyn Socket>, Box<dyn Socket>) {
        let (left, right) = MemorySocket::pair();
        let end = |socket| -> Box<dyn Socket> {
            Box::new(End { socket, wires: Arc::clone(self), ends: (one, other) })
        };
        (end(left), end(right))
    }
}

/// One end of a stream.
struct End {
    socket: MemorySocket,
    wires: Arc<Wires>,
    ends: (usize, usize),
}

impl Socket for End {
    fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut BytesMut) -> Poll<io::Result<usize>> {
        if self.wires.is_cut(self.ends.0, self.ends.1) {
            self.wires.inner().waiting.push(cx.waker().clone());
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

/// The core, from a machine: answers take their time, and while the way is cut there are none.
pub(crate) struct Remote {
    pub(crate) core: Arc<MemoryRepository>,
    pub(crate) wires: Arc<Wires>,
    /// The machine that asks, and the one that answers.
    pub(crate) ends: (usize, usize),
}

impl Remote {
    /// One way; fails when it is cut.
    async fn way(&self) -> Result<(), ()> {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(1..6))).await;
        if self.wires.is_cut(self.ends.0, self.ends.1) {
            tokio::time::sleep(PATIENCE).await;
            return Err(());
        }
        Ok(())
    }

    async fn ask<T>(
        &self,
        question: impl Future<Output = Result<T, RepositoryError>>,
    ) -> Result<T, RepositoryError> {
        self.way().await.map_err(|()| RepositoryError::Unavailable("nobody answers".to_owned()))?;
        let answer = question.await;
        self.way().await.map_err(|()| RepositoryError::Unknown)?;
        answer
    }
}

impl StateRepository for Remote {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(self.ask(self.core.get(key)))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(self.ask(self.core.list(prefix)))
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(self.ask(self.core.txn(txn)))
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(self.ask(self.core.grant(ttl)))
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(self.ask(self.core.keep_alive(lease)))
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(self.ask(self.core.revoke(lease)))
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            let watch = self.ask(self.core.watch(prefix, from_revision)).await?;
            let heard = (watch, Arc::clone(&self.wires), self.ends);
            Ok(Watch::new(stream::unfold(heard, |(mut watch, wires, ends)| async move {
                let event = watch.next().await?;
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
                while wires.is_cut(ends.0, ends.1) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Some((event, (watch, wires, ends)))
            })))
        })
    }
}
