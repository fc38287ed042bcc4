//! One connection to a node, shared by all callers: commands are sent in order, replies arrive in the same
//! order.
//!
//! A caller queues its frame under a short lock and waits in a slot of the call table; one task owns the
//! socket, coalesces small frames, writes them with one system call, and delivers all replies of a read
//! under one lock. A command allocates nothing beyond its frame.
//!
//! The same task reconnects after a failure: immediately, then after 1, 2, 4 … ms up to the configured
//! maximum, without limit; the name is resolved on each attempt. A caller that needs the connection during
//! the backoff shortens it to [`NUDGED`].
//!
//! Invariants:
//!
//! - Commands are never queued for a connection that is down: the caller gets an immediate error that
//!   nothing was sent, and retries elsewhere. A command whose caller was cancelled before the write is never
//!   written.
//! - Every byte passed to the socket counts as sent, even when the system call failed.
//! - Calls and bytes in the queue are bounded.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use moim_base::task::Scope;
use moim_wire_resp::Value;
use tokio::sync::Notify;

use crate::address::Address;
use crate::command::Request;
use crate::options::Options;
use crate::signals::{Event, Signals, Trigger, count};

mod calls;
mod io;
mod open;

use calls::{CallKey, Calls};
pub(crate) use open::{Wire, open};

/// Maximum backoff while a caller needs the connection.
const NUDGED: Duration = Duration::from_millis(50);

/// Use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Commands of all callers.
    Shared,
    /// Reads of all callers, at a replica.
    Reads,
    /// Exclusive to one caller: for blocking commands.
    Exclusive,
}

/// A rejected command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue is full: wait for [`Connection::wait_for_capacity`].
    Full,
    /// The connection is down.
    Down(Arc<str>),
    /// The connection is closed.
    Closed,
}

/// A command without a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    /// True if the server may have received it.
    pub(crate) sent: bool,
    pub(crate) reason: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Not used yet.
    Idle,
    /// First connection attempt, or the first after a success: commands may be queued.
    Connecting,
    Up,
    /// The last attempt failed.
    Down(Arc<str>),
    /// No new commands; commands in flight complete.
    Closed,
}

/// A connection to a node, opened on first use.
pub(crate) struct Connection {
    pub(crate) node: Address,
    kind: Kind,
    options: Arc<Options>,
    signals: Arc<Signals>,
    scope: Scope,
    shared: Mutex<Shared>,
    /// Notified when the queue is no longer empty, and when the connection is closed.
    wake: Notify,
    /// Notified when the queue has capacity again.
    capacity: Notify,
    /// Notified when a caller needs the connection while it is down.
    nudge: Notify,
}

struct Shared {
    phase: Phase,
    calls: Calls,
    /// Calls whose frames are not yet passed to the socket.
    queue: VecDeque<CallKey>,
    /// Bytes of those frames.
    queued_bytes: usize,
    /// True if a caller was rejected because the queue was full since the last capacity notification.
    has_rejected: bool,
}

impl Connection {
    pub(crate) fn new(
        node: Address,
        kind: Kind,
        options: Arc<Options>,
        signals: Arc<Signals>,
        scope: Scope,
    ) -> Arc<Self> {
        let shared = Shared {
            phase: Phase::Idle,
            calls: Calls::default(),
            queue: VecDeque::new(),
            queued_bytes: 0,
            has_rejected: false,
        };
        Arc::new(Self {
            node,
            kind,
            options,
            signals,
            scope,
            shared: Mutex::new(shared),
            wake: Notify::new(),
            capacity: Notify::new(),
            nudge: Notify::new(),
        })
    }

    /// Queues a command.
    pub(crate) fn send(self: &Arc<Self>, request: &Request) -> Result<Reply, Refused> {
        let mut shared = self.lock();
        match &shared.phase {
            Phase::Up | Phase::Connecting => {}
            Phase::Idle => {
                shared.phase = Phase::Connecting;
                let connection = self.clone();
                self.scope.spawn("slot-client connection", async move { connection.supervise().await });
            }
            Phase::Down(reason) => {
                let reason = reason.clone();
                self.nudge.notify_one();
                return Err(Refused::Down(reason));
            }
            Phase::Closed => return Err(Refused::Closed),
        }
        let bytes = shared.queued_bytes + request.frame.len();
        // A single frame larger than the limit must be accepted.
        if shared.calls.len() >= self.options.queue_commands
            || (bytes > self.options.queue_bytes && shared.queued_bytes > 0)
        {
            shared.has_rejected = true;
            return Err(Refused::Full);
        }
        let key = shared.calls.insert(request.frame.clone(), request.replies);
        shared.queued_bytes = bytes;
        shared.queue.push_back(key);
        let first = shared.queue.len() == 1;
        drop(shared);
        if first {
            self.wake.notify_one();
        }
        Ok(Reply { connection: self.clone(), key, done: false })
    }

    /// Waits until the queue may have capacity.
    pub(crate) async fn wait_for_capacity(&self) {
        self.capacity.notified().await;
    }

    /// True if the connection is established.
    pub(crate) fn is_up(&self) -> bool {
        self.lock().phase == Phase::Up
    }

    /// True if the last connection attempt failed.
    pub(crate) fn is_down(&self) -> bool {
        matches!(self.lock().phase, Phase::Down(_) | Phase::Closed)
    }

    /// Accepts no new commands; commands in flight complete, then the connection closes.
    pub(crate) fn close(&self) {
        self.lock().phase = Phase::Closed;
        self.wake.notify_one();
        self.nudge.notify_one();
        self.capacity.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects and reconnects until the connection is closed.
    async fn supervise(self: Arc<Self>) {
        let mut attempt: u32 = 0;
        loop {
            let opened = tokio::time::timeout(
                self.options.connect_timeout,
                open(&self.node, self.kind, &self.options),
            );
            let reason = match opened.await {
                Ok(Ok(wire)) => {
                    attempt = 0;
                    if !self.enter(Phase::Up) {
                        self.fail_all("the connection was closed");
                        return;
                    }
                    count(&self.signals.metrics.connects);
                    self.signals.emit(Event::Connected(self.node.clone()));
                    let Some(reason) = self.run(wire).await else { return };
                    count(&self.signals.metrics.disconnects);
                    self.signals
                        .emit(Event::Disconnected { node: self.node.clone(), reason: reason.clone() });
                    reason
                }
                Ok(Err(error)) => error,
                Err(_) => format!("no connection within {:?}", self.options.connect_timeout),
            };
            let reason: Arc<str> = reason.into();
            attempt = attempt.saturating_add(1);
            let down = self.enter(Phase::Down(reason.clone()));
            self.fail_all(&reason);
            self.signals.changed.notify_waiters();
            if !down || self.kind == Kind::Exclusive {
                return;
            }
            if attempt.is_multiple_of(self.options.reconnects_until_refresh) {
                self.signals.trigger(Trigger::PersistentReconnects);
            }
            let delay = reconnect_delay(attempt, self.options.reconnect_max);
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = async {
                    tokio::time::sleep(delay.min(NUDGED)).await;
                    self.nudge.notified().await;
                } => {}
            }
            if self.lock().phase == Phase::Closed {
                return;
            }
        }
    }

    /// Changes the phase; false when the connection was closed meanwhile.
    fn enter(&self, phase: Phase) -> bool {
        let mut shared = self.lock();
        if shared.phase == Phase::Closed {
            return false;
        }
        shared.phase = phase;
        true
    }

    /// Fails every call.
    fn fail_all(&self, reason: &str) {
        let reason: Arc<str> = reason.into();
        let mut wakers = Vec::new();
        let mut shared = self.lock();
        let queue = std::mem::take(&mut shared.queue);
        shared.queued_bytes = 0;
        for key in &queue {
            let lost = Lost { sent: false, reason: reason.clone() };
            wakers.extend(shared.calls.complete(*key, Err(lost)));
        }
        for key in shared.calls.waiting() {
            let lost = Lost { sent: true, reason: reason.clone() };
            wakers.extend(shared.calls.complete(key, Err(lost)));
        }
        drop(shared);
        wakers.into_iter().for_each(std::task::Waker::wake);
        self.capacity.notify_waiters();
    }
}

/// 2^(n-1) milliseconds, up to `max`.
fn reconnect_delay(attempt: u32, max: Duration) -> Duration {
    Duration::from_millis(1u64 << attempt.saturating_sub(1).min(30)).min(max)
}

/// The pending reply of a command. Dropping it cancels the wait.
pub(crate) struct Reply {
    connection: Arc<Connection>,
    key: CallKey,
    done: bool,
}

impl Future for Reply {
    type Output = Result<Value, Lost>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut shared = self.connection.lock();
        match shared.calls.poll(self.key, context.waker()) {
            Some(result) => {
                drop(shared);
                self.done = true;
                Poll::Ready(result)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.done {
            self.connection.lock().calls.abandon(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnect_delay_doubles() {
        let max = Duration::from_secs(30);
        let delays: Vec<_> = (1..=4).map(|attempt| reconnect_delay(attempt, max).as_millis()).collect();
        assert_eq!(delays, [1, 2, 4, 8]);
        assert_eq!(reconnect_delay(16, max), max);
        assert_eq!(reconnect_delay(u32::MAX, max), max);
    }
}
