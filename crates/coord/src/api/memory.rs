//! The memory of the etcd API, taken from the budget of the node in two layers.
//!
//! - `etcd messages`: beginnings of requests, and answers until the socket has taken them;
//! - `etcd calls`: calls that are open beyond the first few of a connection, and watches with their keys.
//!
//! Each connection has a share of both, so that no client can hold all of a layer. Small messages (up to
//! [`UNCOUNTED_BYTES`]) and the first [`FREE_CALLS`] calls of a connection are not counted: they are bounded by the number
//! of connections, and a put or a range of a few KiB never comes here.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moim_base::{ConnectionBudget, LayerBudget, MemoryBudget, Permit};
use moim_wire_grpc::Status;

use crate::engine::CoordError;

/// What no other layer can take from the messages of the etcd API, and the most they may hold.
const MESSAGES_RESERVE: usize = 128 << 20;
const MESSAGES_BYTES: usize = 256 << 20;
/// The same for calls and watches.
const CALLS_RESERVE: usize = 64 << 20;
const CALLS_BYTES: usize = 256 << 20;
/// What the etcd API reserves of the node's budget.
pub const MEMORY_RESERVE: usize = MESSAGES_RESERVE + CALLS_RESERVE;

/// One connection may hold so much of a layer: one part of so many.
const SHARES: usize = 4;
/// Messages up to this size are not counted.
pub(super) const UNCOUNTED_BYTES: usize = 4 << 10;
/// The beginning of a message is counted in steps, not piece by piece.
const STEP_BYTES: usize = 16 << 10;
/// Calls of a connection that are not counted.
pub(super) const FREE_CALLS: usize = 64;
/// What an open call holds: its future, its stream in the HTTP/2 library, and a small message.
const CALL_BYTES: usize = 4 << 10;
/// Calls are counted in steps, not one by one.
const CALLS_STEP: usize = 64;
/// What a watch holds beside its key.
const WATCH_BYTES: usize = 512;

/// The layers of the etcd API.
pub(super) struct Budget {
    messages: LayerBudget,
    calls: LayerBudget,
    /// Bytes of answers that wait for room. Most of them are not made yet.
    queued: AtomicUsize,
    stall: Duration,
}

/// Bytes in [`Budget::queued`].
struct Queued<'a>(&'a AtomicUsize, usize);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Budget {
    /// Layers of the node's budget, or of one of its own.
    pub(super) fn new(node: Option<&MemoryBudget>, stall: Duration) -> Self {
        let own = || MemoryBudget::new(MESSAGES_BYTES + CALLS_BYTES);
        let node = node.cloned().unwrap_or_else(own);
        // A budget that is smaller than a node's, as tests have, is shared out in the same way.
        let (messages, calls) = (MESSAGES_RESERVE.min(node.total() / 2), CALLS_RESERVE.min(node.total() / 4));
        Self {
            messages: node.layer("etcd messages", messages, MESSAGES_BYTES),
            calls: node.layer("etcd calls", calls, CALLS_BYTES),
            queued: AtomicUsize::new(0),
            stall,
        }
    }
}

/// The share of one connection.
pub(super) struct Share {
    all: Arc<Budget>,
    messages: ConnectionBudget,
    calls: ConnectionBudget,
}

impl Share {
    pub(super) fn new(all: &Arc<Budget>) -> Arc<Self> {
        let share = |layer: &LayerBudget| layer.connection(layer.limit() / SHARES);
        let (messages, calls) = (share(&all.messages), share(&all.calls));
        Arc::new(Self { all: Arc::clone(all), messages, calls })
    }

    /// How long a client may keep memory without doing anything.
    pub(super) fn stall(&self) -> Duration {
        self.all.stall
    }

    /// Whether messages of other clients may have to wait for memory.
    pub(super) fn is_short(&self) -> bool {
        self.all.messages.used() > self.all.messages.limit() / 2
            || self.messages.used() > self.messages.limit() / 2
    }

    /// Whether messages of this connection hold memory.
    pub(super) fn holds_messages(&self) -> bool {
        self.messages.used() > 0
    }

    /// Waits for room for an answer, unless as much as there is room for waits already. A single answer larger than
    /// the share of a connection takes all of it.
    pub(super) async fn room(&self, bytes: usize) -> Result<Permit, Status> {
        let bytes = bytes.min(self.messages.limit());
        if let Ok(room) = self.messages.try_take(bytes) {
            return Ok(room);
        }
        let waiting = self.all.queued.fetch_add(bytes, Ordering::Relaxed);
        let _queued = Queued(&self.all.queued, bytes);
        if waiting > self.all.messages.limit() {
            return Err(CoordError::TooManyRequests.into());
        }
        self.messages.take(bytes).await.map_err(|_| CoordError::TooManyRequests.into())
    }

    /// Has memory for so many bytes of a message that has begun.
    pub(super) fn hold(&self, held: &mut Option<Permit>, bytes: usize) -> Result<(), Status> {
        let had = held.as_ref().map_or(UNCOUNTED_BYTES, Permit::bytes);
        if bytes <= had {
            return Ok(());
        }
        let wanted = bytes.next_multiple_of(STEP_BYTES);
        let taken = match held {
            Some(permit) => permit.grow(wanted - had),
            None => self.messages.try_take(wanted).map(|permit| *held = Some(permit)),
        };
        taken.map_err(|_| CoordError::TooManyRequests.into())
    }

    /// Has memory for one more watch, which is then counted in `held`. Answers how much.
    pub(super) fn hold_watch(&self, held: &mut Option<Permit>, key_bytes: usize) -> Result<usize, Status> {
        let bytes = WATCH_BYTES + key_bytes;
        let taken = match held {
            Some(permit) => permit.grow(bytes),
            None => self.calls.try_take(bytes).map(|permit| *held = Some(permit)),
        };
        taken.map(|()| bytes).map_err(|_| CoordError::TooManyRequests.into())
    }
}

/// The open calls of a connection.
pub(super) struct OpenCalls {
    share: Arc<Share>,
    held: Option<Permit>,
}

impl OpenCalls {
    pub(super) fn new(share: Arc<Share>) -> Self {
        Self { share, held: None }
    }

    fn counted(&self) -> usize {
        FREE_CALLS + self.held.as_ref().map_or(0, |held| held.bytes() / CALL_BYTES)
    }

    /// Whether there is memory for one more call beside `open` others.
    pub(super) fn admit(&mut self, open: usize) -> bool {
        if open < self.counted() {
            return true;
        }
        let taken = match &mut self.held {
            Some(held) => held.grow(CALLS_STEP * CALL_BYTES),
            none => self.share.calls.try_take(CALLS_STEP * CALL_BYTES).map(|held| *none = Some(held)),
        };
        taken.is_ok()
    }

    /// Gives memory back when only `open` calls are left.
    pub(super) fn on_ended(&mut self, open: usize) {
        if let Some(held) = &mut self.held
            && open + 2 * CALLS_STEP < FREE_CALLS + held.bytes() / CALL_BYTES
        {
            held.shrink_to(open.saturating_sub(FREE_CALLS).next_multiple_of(CALLS_STEP) * CALL_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_grpc::Code;

    use super::*;

    const STALL: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn answers_that_wait_for_room_are_bounded_too() {
        let budget = Arc::new(Budget::new(None, STALL));
        let all = MESSAGES_BYTES / SHARES;
        let shares: Vec<_> = (0..SHARES).map(|_| Share::new(&budget)).collect();
        let mut held = Vec::new();
        for share in &shares {
            held.push(share.room(all).await.unwrap());
        }
        let other = Share::new(&budget);
        let mut waiting = Vec::new();
        for _ in 0..=SHARES {
            let mut room = Box::pin(other.room(all));
            assert!(futures_util::poll!(room.as_mut()).is_pending());
            waiting.push(room);
        }
        let refused = other.room(1).await.err().map(|status| status.code);
        assert_eq!(refused, Some(Code::ResourceExhausted));
        // Whoever gives up leaves the queue, and whoever is done makes room.
        waiting.clear();
        let mut next = Box::pin(other.room(1));
        assert!(futures_util::poll!(next.as_mut()).is_pending());
        held.pop();
        assert!(next.await.is_ok());
    }

    #[tokio::test]
    async fn the_reserve_of_the_etcd_api_is_there_when_another_layer_has_taken_the_rest() {
        let node = MemoryBudget::new(2 * MEMORY_RESERVE);
        let budget = Arc::new(Budget::new(Some(&node), STALL));
        let other = node.layer("queue requests", 0, usize::MAX);
        let _greedy = other.try_take(MEMORY_RESERVE).unwrap();
        assert!(other.try_take(1).is_err());
        let shares = [Share::new(&budget), Share::new(&budget)];
        let rooms = [shares[0].room(MESSAGES_RESERVE / 2).await, shares[1].room(MESSAGES_RESERVE / 2).await];
        assert!(rooms.iter().all(Result::is_ok));
        let mut begun = None;
        assert!(Share::new(&budget).hold(&mut begun, UNCOUNTED_BYTES + 1).is_err(), "the reserve is spent");
        drop(rooms);
        assert!(Share::new(&budget).hold(&mut begun, UNCOUNTED_BYTES + 1).is_ok());
        assert_eq!(node.used().iter().map(|(_, used, _)| used).sum::<usize>(), MEMORY_RESERVE + STEP_BYTES);
    }

    #[test]
    fn calls_of_one_connection_have_a_limit_and_give_back_what_they_took() {
        let budget = Arc::new(Budget::new(None, STALL));
        let share = Share::new(&budget);
        let mut calls = OpenCalls::new(Arc::clone(&share));
        let admitted = (0..).take_while(|open| calls.admit(*open)).count();
        assert_eq!(admitted, FREE_CALLS + CALLS_BYTES / SHARES / CALL_BYTES);
        assert!(share.hold_watch(&mut None, 10).is_err(), "watches and calls are one share");
        assert!(Share::new(&budget).hold_watch(&mut None, 10).is_ok(), "another connection has its own");
        for (open, counted) in
            [(1_000, 1_024), (1_000, 1_024), (900, 1_024), (FREE_CALLS, FREE_CALLS), (0, FREE_CALLS)]
        {
            calls.on_ended(open);
            assert_eq!(calls.counted(), counted, "{open} open");
        }
        assert_eq!(share.calls.used(), 0);
    }
}
