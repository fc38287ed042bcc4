//! Memory of the etcd API, taken from the node's budget in two layers.
//!
//! - `etcd messages`: incomplete requests, and responses until the socket has taken them;
//! - `etcd calls`: open calls beyond the first few of a connection, and watches with their keys.
//!
//! Each connection has a share of both, so that no client can hold all of a layer. Small messages (up to
//! [`UNCOUNTED_BYTES`]) and the first [`FREE_CALLS`] calls of a connection are not counted: they are bounded by the
//! number of connections, and a put or a range of a few KiB never comes here.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moim_base::{ConnectionBudget, LayerBudget, MemoryBudget, Permit};
use moim_wire_grpc::Status;

use crate::engine::CoordError;

/// Reserved for the messages of the etcd API, and their maximum.
const MESSAGES_RESERVE: usize = 128 << 20;
const MESSAGES_BYTES: usize = 256 << 20;
/// The same for calls and watches.
const CALLS_RESERVE: usize = 64 << 20;
const CALLS_BYTES: usize = 256 << 20;
/// The etcd API's reserve in the node's budget.
pub const MEMORY_RESERVE: usize = MESSAGES_RESERVE + CALLS_RESERVE;

/// One connection may hold one part of a layer divided by this number.
const SHARES: usize = 4;
/// Messages up to this size are not counted.
pub(super) const UNCOUNTED_BYTES: usize = 4 << 10;
/// An incomplete message is counted in steps of this size.
const STEP_BYTES: usize = 16 << 10;
/// Open calls of a connection that are not counted.
pub(super) const FREE_CALLS: usize = 64;
/// Memory of an open call: its future, its stream in the HTTP/2 library, and a small message.
const CALL_BYTES: usize = 4 << 10;
/// Calls are counted in steps of this many.
const CALLS_STEP: usize = 64;
/// Memory of a watch beside its key.
const WATCH_BYTES: usize = 512;

/// The memory layers of the etcd API.
pub(super) struct Budget {
    messages: LayerBudget,
    calls: LayerBudget,
    /// Bytes of responses that wait for memory. Most of them are not encoded yet.
    queued: AtomicUsize,
    stall: Duration,
}

/// Bytes counted in [`Budget::queued`].
struct Queued<'a>(&'a AtomicUsize, usize);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Budget {
    /// Layers of the node's budget, or of a separate one.
    pub(super) fn new(node: Option<&MemoryBudget>, stall: Duration) -> Self {
        let own = || MemoryBudget::new(MESSAGES_BYTES + CALLS_BYTES);
        let node = node.cloned().unwrap_or_else(own);
        // A budget smaller than a node's, as in tests, is divided in the same proportion.
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

    /// The stall timeout of a client that holds memory.
    pub(super) fn stall(&self) -> Duration {
        self.all.stall
    }

    /// True if messages of other clients may have to wait for memory.
    pub(super) fn is_short(&self) -> bool {
        self.all.messages.used() > self.all.messages.limit() / 2
            || self.messages.used() > self.messages.limit() / 2
    }

    /// True if messages of this connection hold memory.
    pub(super) fn holds_messages(&self) -> bool {
        self.messages.used() > 0
    }

    /// Waits for memory for a response, unless a whole layer's worth is waiting already. A single response larger than
    /// the share of a connection takes all of it.
    pub(super) async fn reserve(&self, bytes: usize) -> Result<Permit, Status> {
        let bytes = bytes.min(self.messages.limit());
        if let Ok(permit) = self.messages.try_take(bytes) {
            return Ok(permit);
        }
        let waiting = self.all.queued.fetch_add(bytes, Ordering::Relaxed);
        let _queued = Queued(&self.all.queued, bytes);
        if waiting > self.all.messages.limit() {
            return Err(CoordError::TooManyRequests.into());
        }
        self.messages.take(bytes).await.map_err(|_| CoordError::TooManyRequests.into())
    }

    /// Reserves memory for the bytes of an incomplete message.
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

    /// Reserves memory for one more watch, counted in `held`. Returns its size.
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

    /// True if there is memory for one more call beside `open` others.
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

    /// Releases memory when only `open` calls are left.
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
    async fn responses_that_wait_for_memory_are_bounded() {
        let budget = Arc::new(Budget::new(None, STALL));
        let all = MESSAGES_BYTES / SHARES;
        let shares: Vec<_> = (0..SHARES).map(|_| Share::new(&budget)).collect();
        let mut held = Vec::new();
        for share in &shares {
            held.push(share.reserve(all).await.unwrap());
        }
        let other = Share::new(&budget);
        let mut waiting = Vec::new();
        for _ in 0..=SHARES {
            let mut reserve = Box::pin(other.reserve(all));
            assert!(futures_util::poll!(reserve.as_mut()).is_pending());
            waiting.push(reserve);
        }
        let refused = other.reserve(1).await.err().map(|status| status.code);
        assert_eq!(refused, Some(Code::ResourceExhausted));
        // A waiter that gives up leaves the queue, and a finished one releases memory.
        waiting.clear();
        let mut next = Box::pin(other.reserve(1));
        assert!(futures_util::poll!(next.as_mut()).is_pending());
        held.pop();
        assert!(next.await.is_ok());
    }

    #[tokio::test]
    async fn etcd_reserve_is_available_when_another_layer_has_taken_the_rest() {
        let node = MemoryBudget::new(2 * MEMORY_RESERVE);
        let budget = Arc::new(Budget::new(Some(&node), STALL));
        let other = node.layer("queue requests", 0, usize::MAX);
        let _greedy = other.try_take(MEMORY_RESERVE).unwrap();
        assert!(other.try_take(1).is_err());
        let shares = [Share::new(&budget), Share::new(&budget)];
        let rooms =
            [shares[0].reserve(MESSAGES_RESERVE / 2).await, shares[1].reserve(MESSAGES_RESERVE / 2).await];
        assert!(rooms.iter().all(Result::is_ok));
        let mut begun = None;
        assert!(Share::new(&budget).hold(&mut begun, UNCOUNTED_BYTES + 1).is_err(), "the reserve is spent");
        drop(rooms);
        assert!(Share::new(&budget).hold(&mut begun, UNCOUNTED_BYTES + 1).is_ok());
        assert_eq!(node.used().iter().map(|(_, used, _)| used).sum::<usize>(), MEMORY_RESERVE + STEP_BYTES);
    }

    #[test]
    fn calls_of_one_connection_are_limited_and_release_memory() {
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
