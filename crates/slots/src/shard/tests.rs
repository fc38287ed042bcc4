//! When a primary holds the serving right.

use moim_base::Clock;

use self::frames::Fixture;

pub(super) mod frames;
mod migration;
mod time;

#[test]
fn a_new_primary_waits_for_the_serving_right_unless_its_epoch_is_uncontested() {
    let fixture = Fixture::new();
    let (shard, clock) = (&fixture.shard, fixture.clock.as_ref());
    let now = clock.monotonic_ms();
    shard.set_serving_right_until(now + 10_000);
    shard.on_epoch(3, true);
    shard.set_serving_right_from(3, now + 600);
    assert!(shard.holds_serving_right(clock), "the previous primary had released the shard");
    // The replica driver learned of the next election before the record was read here.
    shard.set_serving_right_from(5, now + 600);
    assert!(!shard.holds_serving_right(clock), "the previous primary may still hold the right");
    shard.on_epoch(5, false);
    // The previous primary is removed from the record later: it may not know yet.
    shard.on_epoch(5, true);
    assert!(!shard.holds_serving_right(clock));
    clock.advance_ms(600);
    assert!(shard.holds_serving_right(clock));
    clock.advance_ms(9_400);
    assert!(!shard.holds_serving_right(clock), "the serving right of this node has expired");
}
