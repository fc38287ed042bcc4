//! Who waits for the high watermark, in the order of the offsets waited for.

use std::collections::VecDeque;

use moim_base::Offset;

/// Why an acknowledgement will not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AckError {
    /// Too few in sync to begin with: nothing was appended.
    #[error("NOT_ENOUGH_REPLICAS")]
    NotEnoughReplicas,
    /// Appended, but the in-sync set fell below the minimum before it was committed. It may be committed yet.
    #[error("NOT_ENOUGH_REPLICAS_AFTER_APPEND")]
    NotEnoughReplicasAfterAppend,
    /// The leadership ended first. It may be committed yet, or not at all.
    #[error("NOT_LEADER_OR_FOLLOWER")]
    NotLeader,
}

/// A queue of waiters of any kind.
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
    /// Waits until everything below `end` is committed.
    pub fn push(&mut self, end: Offset, waiter: T) {
        // Almost always at the end: appends are in order. A retried batch waits for an offset in the middle.
        let at = match self.queue.back() {
            Some((last, _)) if *last > end => self.queue.partition_point(|(other, _)| *other <= end),
            _ => self.queue.len(),
        };
        self.queue.insert(at, (end, waiter));
    }

    /// Takes out everybody whose records are committed.
    pub fn committed(&mut self, high_watermark: Offset) -> impl Iterator<Item = T> {
        let count = self.queue.partition_point(|(end, _)| *end <= high_watermark);
        self.queue.drain(..count).map(|(_, waiter)| waiter)
    }

    /// Takes out everybody.
    pub fn fail(&mut self) -> impl Iterator<Item = T> {
        self.queue.drain(..).map(|(_, waiter)| waiter)
    }

    /// Takes out everybody, each with the offset waited for.
    pub fn drain(&mut self) -> impl Iterator<Item = (Offset, T)> {
        self.queue.drain(..)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_leave_in_the_order_of_their_offsets() {
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
