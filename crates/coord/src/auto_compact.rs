//! Automatic compaction by retention time.
//!
//! The leader calls it on a timer and proposes the returned command. A new leader knows no times of old revisions and
//! starts over, so history is kept for up to twice the retention around a failover, never for less.

use std::collections::VecDeque;

use crate::range::SpaceId;
use crate::request::{Command, Op};
use crate::state::State;

/// Samples per retention time: the precision of compaction.
const SAMPLES: u64 = 10;

/// See the module comment.
#[derive(Debug)]
pub struct AutoCompactor {
    retention_ms: u64,
    /// Time, user revision and system revision, oldest first.
    samples: VecDeque<(u64, i64, i64)>,
}

impl AutoCompactor {
    /// Keeps history for `retention_ms` at least; 0 disables compaction.
    pub fn new(retention_ms: u64) -> Self {
        Self { retention_ms, samples: VecDeque::new() }
    }

    /// Drops all samples, for a new term as leader.
    pub fn on_become_leader(&mut self) {
        self.samples.clear();
    }

    /// Samples the current revisions, and returns the compaction to propose, if any.
    pub fn on_tick(&mut self, now_ms: u64, state: &State) -> Option<Command> {
        if self.retention_ms == 0 {
            return None;
        }
        let step_ms = (self.retention_ms / SAMPLES).max(1);
        if self.samples.back().is_none_or(|(at, ..)| now_ms.saturating_sub(*at) >= step_ms) {
            let revisions = (state.revision(SpaceId::User), state.revision(SpaceId::System));
            self.samples.push_back((now_ms, revisions.0, revisions.1));
        }
        let mut old = None;
        while let Some((at, user, system)) = self.samples.front().copied()
            && now_ms.saturating_sub(at) >= self.retention_ms
        {
            old = Some((user, system));
            self.samples.pop_front();
        }
        let (user, system) = old?;
        let is_due = user > state.compact_revision(SpaceId::User).max(1)
            || system > state.compact_revision(SpaceId::System).max(1);
        is_due.then(|| Command::node(Op::AutoCompact { user, system }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::PutRequest;

    #[test]
    fn history_is_kept_for_the_retention_and_not_much_longer() {
        let mut state = State::new();
        let mut compactor = AutoCompactor::new(1_000);
        let mut index = 0;
        let mut proposals = Vec::new();
        for now_ms in (0..3_000).step_by(100) {
            index += 1;
            state.apply(index, Command::client(Op::Put(PutRequest::new("k", "v"))));
            if let Some(command) = compactor.on_tick(now_ms, &state) {
                proposals.push((now_ms, command.clone()));
                index += 1;
                state.apply(index, command);
            }
        }
        // The put at time t makes revision 2 + t / 100.
        let (at, first) = &proposals[0];
        assert_eq!((*at, first), (1_000, &Command::node(Op::AutoCompact { user: 2, system: 1 })));
        let (at, last) = proposals.last().unwrap();
        assert_eq!((*at, last), (2_900, &Command::node(Op::AutoCompact { user: 2 + 19, system: 1 })));
        assert_eq!(state.compact_revision(SpaceId::User), 21);
    }

    #[test]
    fn unchanged_state_proposes_no_compaction() {
        let state = State::new();
        let mut compactor = AutoCompactor::new(10);
        assert!((0..100).all(|now_ms| compactor.on_tick(now_ms, &state).is_none()));
        let mut never = AutoCompactor::new(0);
        assert!(never.on_tick(1_000_000, &state).is_none());
    }
}
