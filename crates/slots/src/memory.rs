//! Memory accounting over all shards of a node: `maxmemory` is one limit per node, not per shard replica.
//!
//! Every shard reports the memory of its keyspace when a turn ends. A primary evicts keys while the node exceeds the
//! limit and its own shard exceeds its share, an equal part for each shard replica on the node; replicas of other
//! shards follow their primaries, which do the same. If the node exceeds the limit although its own shards are within
//! their shares, it rejects writes instead of evicting keys that did not cause the excess.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// Memory usage of the shards of a node.
#[derive(Default)]
pub struct NodeMemory {
    used: AtomicI64,
    shards: AtomicUsize,
}

impl NodeMemory {
    /// Bytes of all keyspaces, as of their last turns.
    pub fn used(&self) -> u64 {
        u64::try_from(self.used.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// The part of a limit that one shard may use before it must evict.
    pub fn share(&self, limit: u64) -> u64 {
        limit / self.shards.load(Ordering::Relaxed).max(1) as u64
    }
}

/// Memory usage of one shard.
#[derive(Default)]
pub(crate) struct ShardMemory {
    node: Option<Arc<NodeMemory>>,
    reported: i64,
}

impl ShardMemory {
    /// Reports the current memory of the keyspace.
    #[inline]
    pub(crate) fn report(&mut self, node: &Arc<NodeMemory>, bytes: usize) {
        let bytes = bytes as i64;
        if self.node.is_none() {
            node.shards.fetch_add(1, Ordering::Relaxed);
            self.node = Some(Arc::clone(node));
        }
        if bytes != self.reported {
            node.used.fetch_add(bytes - self.reported, Ordering::Relaxed);
            self.reported = bytes;
        }
    }

    /// Bytes of all keyspaces of the node, counting this shard with its current `own` bytes.
    pub(crate) fn used_with(&self, node: &NodeMemory, own: usize) -> u64 {
        u64::try_from(node.used.load(Ordering::Relaxed) - self.reported + own as i64).unwrap_or(0)
    }
}

impl Drop for ShardMemory {
    fn drop(&mut self) {
        if let Some(node) = &self.node {
            node.used.fetch_sub(self.reported, Ordering::Relaxed);
            node.shards.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_share_the_maxmemory_of_their_node() {
        let node = Arc::new(NodeMemory::default());
        let (mut one, mut two) = (ShardMemory::default(), ShardMemory::default());
        assert_eq!(node.share(300), 300);
        one.report(&node, 100);
        two.report(&node, 50);
        assert_eq!((node.used(), node.share(300)), (150, 150));
        assert_eq!(one.used_with(&node, 120), 170);
        one.report(&node, 10);
        assert_eq!(node.used(), 60);
        drop(two);
        assert_eq!((node.used(), node.share(300)), (10, 300));
    }
}
