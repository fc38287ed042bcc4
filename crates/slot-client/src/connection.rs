//! One connection, shared by everybody who talks to a node: commands go out in the order they came, answers come back in
//! the same order.
//!
//! A caller puts its frame into the queue under a short lock and waits in a slot of the call table; one task owns the
//! socket, copies small frames together, writes them with one system call, and hands out all answers of a read under one
//! lock. Nothing is allocated for a command beyond its frame.
//!
//! The same task makes the connection again when it breaks: at once, then after 1, 2, 4 … ms up to the configured
//! maximum, for ever; the name is looked up at each try. A caller who wants the connection while it waits shortens the
//! wait to [`NUDGED`].
//!
//! Invariants:
//! - Commands are never kept for a connection that is down: the caller is told at once that nothing was sent, and looks for
//!   another way. A command whose caller has gone before it was written is never written.
//! - Whatever was handed to the socket counts as sent, even when the system call failed.
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

/// The longest wait between two attempts while somebody wants the connection.
const NUDGED: Duration = Duration::from_millis(50);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Commands of everybody.
    Shared,
    /// Reads of everybody, at a replica.
    Reads,
    /// One caller's own: it may wait in the server for as long as it likes.
    Exclusive,
}

/// Why a command was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue is full: wait for [`Connection::room`].
    Full,
    /// There is no connection at the moment.
    Down(Arc<str>),
    /// The connection is not used any more.
    Closed,
}

/// A command that will have no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    /// Whether the server may have got it.
    pub(crate) sent: bool,
    pub(crate) reason: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Nobody has wanted it yet.
    Idle,
    /// Being made for the first time, or after a success: commands may wait.
    Connecting,
    Up,
    /// The last attempt failed.
    Down(Arc<str>),
    /// Nothing more is taken; what is under way is finished.
    Closed,
}

/// A connection to a node, made when first used.
pub(crate) struct Connection {
    pub(crate) node: Address,
    kind: Kind,
    options: Arc<Options>,
    signals: Arc<Signals>,
    scope: Scope,
    shared: Mutex<Shared>,
    /// Told when the queue is no longer empty, and when the connection is closed.
    wake: Notify,
    /// Told when the queue has room again.
    room: Notify,
    /// Told when somebody wants the connection while it is down.
    nudge: Notify,
}

struct Shared {
    phase: Phase,
    calls: Calls,
    /// Calls whose frames are not yet with the socket.
    queue: VecDeque<CallKey>,
    /// Bytes of those frames.
    queued_bytes: usize,
    /// Whether a caller was refused for want of room since the last time there was some.
    full: bool,
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
            full: false,
        };
        Arc::new(Self {
            node,
            kind,
            options,
            signals,
            scope,
            shared: Mutex::new(shared),
            wake: Notify::new(),
            room: Notify::new(),
            nudge: Notify::new(),
        })
    }

    /// Puts a command into the queue.
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
        // A single frame larger than the bound must be able to pass.
        if shared.calls.len() >= self.options.queue_commands
            || (bytes > self.options.queue_bytes && shared.queued_bytes > 0)
        {
            shared.full = true;
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

    /// Waits until the queue may have room.
    pub(crate) async fn room(&self) {
        self.room.notified().await;
    }

    /// Whether commands are taken without having to connect first.
    pub(crate) fn is_up(&self) -> bool {
        self.lock().phase == Phase::Up
    }

    /// Whether the last attempt to connect failed.
    pub(crate) fn is_down(&self) -> bool {
        matches!(self.lock().phase, Phase::Down(_) | Phase::Closed)
    }

    /// Takes nothing more; what is under way is finished, then the connection ends.
    pub(crate) fn close(&self) {
        self.lock().phase = Phase::Closed;
        self.wake.notify_one();
        self.nudge.notify_one();
        self.room.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the connection until it is closed.
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

    /// Tells every caller that there will be no answer.
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
        self.room.notify_waiters();
    }
}

/// 2^(n-1) milliseconds, up to `max`.
fn reconnect_delay(attempt: u32, max: Duration) -> Duration {
    Duration::from_millis(1u64 << attempt.saturating_sub(1).min(30)).min(max)
}

/// The answer to a command. Dropping it says that nobody waits any more.
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
    fn the_watchdog_waits_twice_as_long_each_time() {
        let max = Duration::from_secs(30);
        let delays: Vec<_> = (1..=4).map(|attempt| reconnect_delay(attempt, max).as_millis()).collect();
        assert_eq!(delays, [1, 2, 4, 8]);
        assert_eq!(reconnect_delay(16, max), max);
        assert_eq!(reconnect_delay(u32::MAX, max), max);
    }
}
