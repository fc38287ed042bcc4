//! When a primary may speak.

use moim_base::ManualClock;
use moim_journal::Journal;

use super::*;
use crate::log::LogError;

pub(super) mod frames;
mod moving;
mod time;

/// Nothing here looks at a journal.
struct NoLog;

impl ShardLog for NoLog {
    fn append(&self, _base: i64, _epoch: i32, _time_ms: i64, _payload: &[u8]) -> Result<(), LogError> {
        Err(LogError::NotLeader)
    }

    fn journal(&self) -> &Arc<Journal> {
        unreachable!("there is none")
    }

    fn leads(&self) -> Option<i32> {
        None
    }

    fn replicas_with(&self, _end: i64) -> usize {
        0
    }
}

#[test]
fn a_new_primary_waits_unless_its_own_epoch_was_seen_to_be_free() {
    let (shard, clock) = (Shard::new(0, String::new(), Arc::new(NoLog), 1, None), ManualClock::at(0));
    let now = clock.monotonic_ms();
    shard.set_right(now + 10_000);
    shard.on_epoch(3, true);
    shard.set_right_from(3, now + 600);
    assert!(shard.may_answer(&clock), "the former primary had let go");
    // The driver heard of the next election before the record was looked at here.
    shard.set_right_from(5, now + 600);
    assert!(!shard.may_answer(&clock), "whoever led before may still answer");
    shard.on_epoch(5, false);
    // The former primary is taken off the record later: it may not know yet.
    shard.on_epoch(5, true);
    assert!(!shard.may_answer(&clock));
    clock.advance_ms(600);
    assert!(shard.may_answer(&clock));
    clock.advance_ms(9_400);
    assert!(!shard.may_answer(&clock), "its own right has run out");
}
