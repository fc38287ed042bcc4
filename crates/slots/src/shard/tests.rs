//! When a primary may speak.

use moim_base::Clock;

use self::frames::Bed;

pub(super) mod frames;
mod moving;
mod time;

#[test]
fn a_new_primary_waits_unless_its_own_epoch_was_seen_to_be_free() {
    let bed = Bed::new();
    let (shard, clock) = (&bed.shard, bed.clock.as_ref());
    let now = clock.monotonic_ms();
    shard.set_right(now + 10_000);
    shard.on_epoch(3, true);
    shard.set_right_from(3, now + 600);
    assert!(shard.may_answer(clock), "the former primary had let go");
    // The driver heard of the next election before the record was looked at here.
    shard.set_right_from(5, now + 600);
    assert!(!shard.may_answer(clock), "the former primary may still answer");
    shard.on_epoch(5, false);
    // The former primary is taken off the record later: it may not know yet.
    shard.on_epoch(5, true);
    assert!(!shard.may_answer(clock));
    clock.advance_ms(600);
    assert!(shard.may_answer(clock));
    clock.advance_ms(9_400);
    assert!(!shard.may_answer(clock), "its own right has run out");
}
