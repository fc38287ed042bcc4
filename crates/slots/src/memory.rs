//! The memory of all shards of a node together: `maxmemory` is one limit for the node, not for each shard replica.
//!
//! Every shard reports what its keyspace takes when a turn ends. A primary lets keys go while the node is above the limit and its
//! own shard above its share of it, an equal part for each shard replica here; the replicas of other shards follow their
//! primaries, which do the same. A node that is above the limit although its own shards are within their shares refuses
//! writes instead of deleting what did not cause it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// What the shards of a node take.
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

    /// What one shard may take of a limit before it has to give something up.
    pub fn share(&self, limit: u64) -> u64 {
        limit / self.shards.load(Ordering::Relaxed).max(1) as u64
    }
}

/// The part of one shard.
#[derive(Default)]
pub(crate) struct ShardMemory {
    node: Option<Arc<NodeMemory>>,
    reported: i64,
}

impl ShardMemory {
    /// Reports what the keyspace takes now.
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

    /// Bytes of all keyspaces of the node, with this one taking `own` by now.
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
    fn shards_share_the_memory_of_their_node() {
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
