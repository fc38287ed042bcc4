//! The memory budget of a node: one total, a reserve per layer, a limit per connection.
//!
//! Everything that a client can make a node hold (input buffers, requests in flight, unsent responses, work buffers
//! of scripts and of decompression) is taken from the budget before it is allocated and returned when its [`Permit`]
//! is dropped. A permit travels inside the request or the response that holds the memory, so no error path can forget
//! it.
//!
//! ```text
//!   MemoryBudget   total = the layers' reserves + a common part
//!     LayerBudget  its reserve is its own; beyond it the layer takes from the common part, up to its limit
//!       ConnectionBudget  at most its limit, out of the layer's
//!         Permit   so many bytes
//! ```
//!
//! Invariants:
//! - the permits of a layer never exceed its limit, those of a connection never its own;
//! - a layer below its reserve is never refused on account of another layer;
//! - what all layers hold beyond their reserves never exceeds the common part.
//!
//! At the limit the requesting connection waits ([`ConnectionBudget::take`], or it polls after a pause) or is closed.
//! A request that can never fit is [`Exhausted::TooLarge`], so that no caller waits for it.
//!
//! One short lock per node guards the counts. A connection therefore leaves small allocations uncounted (its first
//! few KiB of buffers, bounded by the number of connections) and takes memory for large ones in steps, not per read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Why memory is not granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Exhausted {
    /// More than the limit of the connection or of the layer: waiting does not help.
    #[error("the memory limit is smaller than the request")]
    TooLarge,
    /// The connection is at its limit: it must release memory itself.
    #[error("the connection holds as much memory as it may")]
    Connection,
    /// The layer is at its limit, or the node is.
    #[error("the memory budget of the node is spent")]
    Layer,
}

/// The budget of a node.
#[derive(Clone, Debug)]
pub struct MemoryBudget {
    node: Arc<Node>,
}

#[derive(Debug)]
struct Node {
    total: usize,
    counts: Mutex<Counts>,
    /// Notified when memory is released while a take waits.
    freed: Notify,
}

#[derive(Debug)]
struct Counts {
    /// The memory that no layer has reserved.
    common: usize,
    /// The part of it that layers hold. Invariant: at most `common`.
    common_used: usize,
    layers: Vec<LayerCounts>,
    /// The number of takes that wait for memory.
    waiting: usize,
}

#[derive(Debug)]
struct LayerCounts {
    name: &'static str,
    reserve: usize,
    limit: usize,
    used: usize,
}

impl LayerCounts {
    fn beyond_reserve(&self) -> usize {
        self.used.saturating_sub(self.reserve)
    }
}

impl Node {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, layer: usize, bytes: usize) -> Result<(), Exhausted> {
        let mut counts = self.counts();
        let free = counts.common - counts.common_used;
        let layer = &mut counts.layers[layer];
        if bytes > layer.limit {
            return Err(Exhausted::TooLarge);
        }
        let before = layer.beyond_reserve();
        if bytes > layer.limit - layer.used {
            return Err(Exhausted::Layer);
        }
        let from_common = (layer.used + bytes).saturating_sub(layer.reserve) - before;
        if from_common > free {
            return Err(Exhausted::Layer);
        }
        layer.used += bytes;
        counts.common_used += from_common;
        Ok(())
    }

    fn release(&self, layer: usize, bytes: usize) {
        let mut counts = self.counts();
        let layer = &mut counts.layers[layer];
        let before = layer.beyond_reserve();
        layer.used -= bytes;
        let to_common = before - layer.beyond_reserve();
        counts.common_used -= to_common;
        let waiting = counts.waiting > 0;
        drop(counts);
        if waiting {
            self.freed.notify_waiters();
        }
    }

    async fn wait_for(
        &self,
        mut take: impl FnMut() -> Result<Permit, Exhausted>,
    ) -> Result<Permit, Exhausted> {
        let mut waiting = None;
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            // Before the check, so that no release between the two is missed.
            freed.as_mut().enable();
            match take() {
                Err(Exhausted::Layer | Exhausted::Connection) if waiting.is_some() => freed.await,
                Err(Exhausted::Layer | Exhausted::Connection) => waiting = Some(Waiting::new(self)),
                decided => return decided,
            }
        }
    }
}

/// Counted while it lives, so that a release knows whether to notify.
struct Waiting<'a>(&'a Node);

impl<'a> Waiting<'a> {
    fn new(node: &'a Node) -> Self {
        node.counts().waiting += 1;
        Self(node)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.counts().waiting -= 1;
    }
}

impl MemoryBudget {
    /// A budget of this many bytes, all of them common until layers reserve their part.
    pub fn new(total_bytes: usize) -> Self {
        let counts = Counts { common: total_bytes, common_used: 0, layers: Vec::new(), waiting: 0 };
        let node = Node { total: total_bytes, counts: Mutex::new(counts), freed: Notify::new() };
        Self { node: Arc::new(node) }
    }

    /// Adds a layer, while the node is assembled. The reserve is capped to what earlier layers and takes in flight
    /// have left; `limit_bytes` bounds the total of the layer.
    pub fn layer(&self, name: &'static str, reserve_bytes: usize, limit_bytes: usize) -> LayerBudget {
        let mut counts = self.node.counts();
        let reserve = reserve_bytes.min(counts.common - counts.common_used);
        counts.common -= reserve;
        let limit = limit_bytes.min(self.node.total);
        counts.layers.push(LayerCounts { name, reserve, limit, used: 0 });
        LayerBudget { node: Arc::clone(&self.node), layer: counts.layers.len() - 1 }
    }

    /// The total in bytes.
    pub fn total(&self) -> usize {
        self.node.total
    }

    /// The present use of each layer: name, bytes, limit.
    pub fn used(&self) -> Vec<(&'static str, usize, usize)> {
        self.node.counts().layers.iter().map(|layer| (layer.name, layer.used, layer.limit)).collect()
    }
}

/// The part of the budget that one layer takes from: queue, store, peers.
#[derive(Clone, Debug)]
pub struct LayerBudget {
    node: Arc<Node>,
    layer: usize,
}

impl LayerBudget {
    /// The share of one connection: at most `limit_bytes` at a time.
    pub fn connection(&self, limit_bytes: usize) -> ConnectionBudget {
        let limit = limit_bytes.min(self.limit());
        ConnectionBudget { layer: self.clone(), holder: Arc::new(Holder { limit, used: Mutex::new(0) }) }
    }

    /// Takes memory that belongs to no single connection.
    pub fn try_take(&self, bytes: usize) -> Result<Permit, Exhausted> {
        self.node.take(self.layer, bytes)?;
        Ok(Permit { layer: self.clone(), holder: None, bytes })
    }

    /// Waits for memory that belongs to no single connection. [`Exhausted::TooLarge`] if waiting cannot help.
    pub async fn take(&self, bytes: usize) -> Result<Permit, Exhausted> {
        self.node.wait_for(|| self.try_take(bytes)).await
    }

    /// The bytes held.
    pub fn used(&self) -> usize {
        self.node.counts().layers[self.layer].used
    }

    /// The limit in bytes.
    pub fn limit(&self) -> usize {
        self.node.counts().layers[self.layer].limit
    }

    /// How many takes of any layer wait for memory.
    pub fn waiting(&self) -> usize {
        self.node.counts().waiting
    }
}

/// The share of one connection.
#[derive(Clone, Debug)]
pub struct ConnectionBudget {
    layer: LayerBudget,
    holder: Arc<Holder>,
}

#[derive(Debug)]
struct Holder {
    limit: usize,
    /// Locked before the counts of the node, never after.
    used: Mutex<usize>,
}

impl Holder {
    fn used(&self) -> MutexGuard<'_, usize> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionBudget {
    /// Takes memory for this connection.
    pub fn try_take(&self, bytes: usize) -> Result<Permit, Exhausted> {
        take(&self.layer, Some(&self.holder), bytes)?;
        Ok(Permit { layer: self.layer.clone(), holder: Some(Arc::clone(&self.holder)), bytes })
    }

    /// Waits for memory for this connection. [`Exhausted::TooLarge`] if waiting cannot help.
    pub async fn take(&self, bytes: usize) -> Result<Permit, Exhausted> {
        self.layer.node.wait_for(|| self.try_take(bytes)).await
    }

    /// The bytes that the connection holds.
    pub fn used(&self) -> usize {
        *self.holder.used()
    }

    /// The limit in bytes.
    pub fn limit(&self) -> usize {
        self.holder.limit
    }
}

fn take(layer: &LayerBudget, holder: Option<&Arc<Holder>>, bytes: usize) -> Result<(), Exhausted> {
    let Some(holder) = holder else { return layer.node.take(layer.layer, bytes) };
    if bytes > holder.limit {
        return Err(Exhausted::TooLarge);
    }
    let mut used = holder.used();
    if bytes > holder.limit - *used {
        return Err(Exhausted::Connection);
    }
    layer.node.take(layer.layer, bytes)?;
    *used += bytes;
    Ok(())
}

/// A share of the budget; returned when it is dropped.
#[derive(Debug)]
pub struct Permit {
    layer: LayerBudget,
    holder: Option<Arc<Holder>>,
    bytes: usize,
}

impl Permit {
    /// The bytes of this permit.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes more. On error the permit is unchanged.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Exhausted> {
        take(&self.layer, self.holder.as_ref(), bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Returns all but `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let back = self.bytes.saturating_sub(bytes);
        if back > 0 {
            self.bytes -= back;
            // The holder first: a take that is notified of freed memory finds both counts lowered.
            if let Some(holder) = &self.holder {
                *holder.used() -= back;
            }
            self.layer.node.release(self.layer.layer, back);
        }
    }

    /// Merges another permit of the same layer and connection.
    pub fn absorb(&mut self, mut other: Self) {
        debug_assert!(
            Arc::ptr_eq(&self.layer.node, &other.layer.node) && self.layer.layer == other.layer.layer
        );
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Splits off a part, to travel with another object: at most the whole permit.
    #[must_use]
    pub fn split(&mut self, bytes: usize) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { layer: self.layer.clone(), holder: self.holder.clone(), bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_layer_below_its_reserve_is_not_refused_on_account_of_another() {
        let budget = MemoryBudget::new(10 * MIB);
        let (queue, store) =
            (budget.layer("queue", 3 * MIB, 10 * MIB), budget.layer("store", 4 * MIB, 10 * MIB));
        let greedy = queue.try_take(6 * MIB).unwrap();
        assert_eq!(queue.try_take(1).unwrap_err(), Exhausted::Layer, "the common part is spent");
        let own = store.try_take(4 * MIB).unwrap();
        assert_eq!(store.try_take(1).unwrap_err(), Exhausted::Layer);
        drop(greedy);
        let more = store.try_take(3 * MIB).unwrap();
        assert_eq!((store.used(), queue.used()), (7 * MIB, 0));
        assert_eq!(queue.try_take(4 * MIB).unwrap_err(), Exhausted::Layer);
        let reserve = queue.try_take(3 * MIB).unwrap();
        drop((own, more, reserve));
        assert_eq!(budget.used(), [("queue", 0, 10 * MIB), ("store", 0, 10 * MIB)]);
    }

    #[test]
    fn a_connection_stays_within_its_limit_and_leaves_the_rest_to_others() {
        let layer = MemoryBudget::new(10 * MIB).layer("queue", 0, 8 * MIB);
        let (one, other) = (layer.connection(5 * MIB), layer.connection(5 * MIB));
        let mut held = one.try_take(4 * MIB).unwrap();
        assert_eq!(held.grow(2 * MIB).unwrap_err(), Exhausted::Connection);
        assert_eq!(one.try_take(6 * MIB).unwrap_err(), Exhausted::TooLarge);
        held.grow(MIB).unwrap();
        let others = other.try_take(3 * MIB).unwrap();
        assert_eq!(other.try_take(1).unwrap_err(), Exhausted::Layer);
        let mut travels = held.split(MIB);
        travels.absorb(held.split(MIB));
        drop(held);
        assert_eq!((one.used(), other.used(), layer.used()), (2 * MIB, 3 * MIB, 5 * MIB));
        drop((travels, others));
        assert_eq!((one.used(), other.used(), layer.used()), (0, 0, 0));
    }

    #[test]
    fn request_larger_than_the_limit_is_not_waited_for() {
        let layer = MemoryBudget::new(10 * MIB).layer("queue", 0, 20 * MIB);
        assert_eq!(layer.limit(), 10 * MIB);
        assert_eq!(layer.try_take(10 * MIB + 1).unwrap_err(), Exhausted::TooLarge);
        assert_eq!(layer.connection(64 * MIB).limit(), 10 * MIB);
    }

    #[tokio::test]
    async fn a_take_waits_until_another_layer_gives_back_what_it_needs() {
        let budget = MemoryBudget::new(4 * MIB);
        let (queue, store) = (budget.layer("queue", 0, 4 * MIB), budget.layer("store", 0, 4 * MIB));
        let mut held = store.try_take(4 * MIB).unwrap();
        let connection = queue.connection(4 * MIB);
        let mut take = std::pin::pin!(connection.take(2 * MIB));
        let taken =
            std::future::poll_fn(|cx| std::task::Poll::Ready(take.as_mut().poll(cx).is_ready())).await;
        assert!(!taken);
        held.shrink_to(3 * MIB);
        let taken =
            std::future::poll_fn(|cx| std::task::Poll::Ready(take.as_mut().poll(cx).is_ready())).await;
        assert!(!taken, "half of it is not enough");
        held.shrink_to(2 * MIB);
        let permit = take.await.unwrap();
        assert_eq!((permit.bytes(), queue.used(), store.used()), (2 * MIB, 2 * MIB, 2 * MIB));
    }

    #[test]
    fn counts_are_consistent_after_concurrent_takes_and_releases() {
        let budget = MemoryBudget::new(64 * MIB);
        let layers = [budget.layer("queue", 8 * MIB, 48 * MIB), budget.layer("store", 16 * MIB, 48 * MIB)];
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let layer = &layers[thread % 2];
                scope.spawn(move || {
                    let connection = layer.connection(32 * MIB);
                    let mut held = Vec::new();
                    for round in 0..2_000usize {
                        let bytes = (round * 7919 + thread * 31) % (3 * MIB);
                        match connection.try_take(bytes) {
                            Ok(permit) => held.push(permit),
                            Err(_) => held.truncate(held.len() / 2),
                        }
                        assert!(connection.used() <= connection.limit());
                    }
                });
            }
        });
        assert!(budget.used().iter().all(|(_, used, _)| *used == 0));
        // The whole common part is available again.
        assert!(layers[0].try_take(48 * MIB).is_ok());
    }
}
