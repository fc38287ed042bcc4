//! The waiters for the high watermark, ordered by offset.

use std::collections::VecDeque;

use moim_base::Offset;

/// Why an acknowledgement fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AckError {
    /// Too few in-sync replicas before the append: nothing was appended.
    #[error("NOT_ENOUGH_REPLICAS")]
    NotEnoughReplicas,
    /// Appended, but the in-sync set fell below the minimum before the commit. The records may still be committed.
    #[error("NOT_ENOUGH_REPLICAS_AFTER_APPEND")]
    NotEnoughReplicasAfterAppend,
    /// The leadership ended before the commit. The records may or may not be committed.
    #[error("NOT_LEADER_OR_FOLLOWER")]
    NotLeader,
}

/// A queue of waiters of any type.
#[derive(Debug)]
pub struct Waiting<T> {
    /// Invariant: ordered by offset, and by arrival among equals.
    queue: VecDeque<(Offset, T)>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { queue: VecDeque::new() }
    }
}

impl<T> Waiting<T> {
    /// Adds a waiter for the commit of everything below `end`.
    pub fn push(&mut self, end: Offset, waiter: T) {
        // Almost always at the back: appends are in order. A retried batch waits for an offset in the middle.
        let at = match self.queue.back() {
            Some((last, _)) if *last > end => self.queue.partition_point(|(other, _)| *other <= end),
            _ => self.queue.len(),
        };
        self.queue.insert(at, (end, waiter));
    }

    /// Removes every waiter whose records are committed.
    pub fn committed(&mut self, high_watermark: Offset) -> impl Iterator<Item = T> {
        let count = self.queue.partition_point(|(end, _)| *end <= high_watermark);
        self.queue.drain(..count).map(|(_, waiter)| waiter)
    }

    /// Removes every waiter.
    pub fn fail(&mut self) -> impl Iterator<Item = T> {
        self.queue.drain(..).map(|(_, waiter)| waiter)
    }

    /// Removes every waiter, with the offset it waited for.
    pub fn drain(&mut self) -> impl Iterator<Item = (Offset, T)> {
        self.queue.drain(..)
    }

    /// The number of waiters.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// True if there is no waiter.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_complete_in_offset_order() {
        let mut waiting = Waiting::default();
        for (end, name) in [(10, "a"), (20, "c"), (10, "b"), (30, "d")] {
            waiting.push(Offset(end), name);
        }
        assert_eq!(waiting.committed(Offset(9)).count(), 0);
        assert_eq!(waiting.committed(Offset(20)).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(waiting.fail().collect::<Vec<_>>(), ["d"]);
        assert!(waiting.is_empty());
    }
}
