//! Deadlines, keepalives and the grants of a new leader.

use super::*;
use crate::reply::Reply;

const CONFIG: LeaseClockConfig = LeaseClockConfig { checkpoint_interval_ms: 60_000, retry_ms: 500 };

fn revoke(id: i64) -> Command {
    Command::node(Op::LeaseRevoke { id: LeaseId(id) })
}

fn renewed(ttl_ms: i64) -> Renewal {
    Renewal::Renewed { ttl_ms, checkpoint: None }
}

#[test]
fn lease_expires_at_its_deadline_and_not_before() {
    let mut clock = LeaseClock::new(CONFIG);
    clock.on_granted(LeaseId(1), 1_000, 0);
    clock.on_granted(LeaseId(2), 3_000, 0);
    assert_eq!(clock.next_expiry_ms(), Some(1_000));
    assert_eq!(clock.expired(999, 10), []);
    assert_eq!(clock.expired(1_000, 10), [revoke(1)]);
    assert_eq!(clock.expired(1_499, 10), [], "proposed once, for now");
    assert_eq!(clock.expired(1_500, 10), [revoke(1)], "the proposal may have been lost");
    clock.on_revoked(LeaseId(1));
    assert_eq!(clock.expired(2_999, 10), []);
    assert_eq!(clock.expired(3_000, 10), [revoke(2)]);
    clock.on_revoked(LeaseId(2));
    assert_eq!(clock.next_expiry_ms(), None);
}

#[test]
fn expiries_are_proposed_in_bounded_batches() {
    let mut clock = LeaseClock::new(CONFIG);
    for id in 1..=5 {
        clock.on_granted(LeaseId(id), 1_000, 0);
    }
    assert_eq!(clock.expired(1_000, 2), [revoke(1), revoke(2)]);
    assert_eq!(clock.expired(1_000, 2), [revoke(3), revoke(4)]);
    assert_eq!(clock.expired(1_000, 2), [revoke(5)]);
}

#[test]
fn renewal_restores_full_ttl_until_expiry_is_proposed() {
    let mut clock = LeaseClock::new(CONFIG);
    assert_eq!(clock.renew(LeaseId(1), 0), Renewal::NotFound);
    clock.on_granted(LeaseId(1), 1_000, 0);
    assert_eq!(clock.renew(LeaseId(1), 900), renewed(1_000));
    assert_eq!(clock.remaining_ms(LeaseId(1), 1_000), Some(900));
    assert_eq!(clock.expired(1_899, 10), []);
    assert_eq!(clock.renew(LeaseId(1), 1_900), Renewal::Expiring);
    assert_eq!(clock.expired(1_900, 10), [revoke(1)]);
    assert_eq!(clock.renew(LeaseId(1), 1_901), Renewal::Expiring);
    clock.on_revoked(LeaseId(1));
    assert_eq!(clock.renew(LeaseId(1), 1_902), Renewal::NotFound);
    assert_eq!(clock.remaining_ms(LeaseId(1), 1_902), None);
}

fn state_with(leases: &[(i64, i64, i64)]) -> State {
    let mut state = State::new();
    let mut index = 0;
    for (id, ttl_ms, remaining_ms) in leases {
        let id = LeaseId(*id);
        let remaining = vec![(id, *remaining_ms)];
        for op in [Op::LeaseGrant { id, ttl_ms: *ttl_ms }, Op::LeaseCheckpoint { remaining }] {
            index += 1;
            assert!(!matches!(state.apply(index, Command::node(op)), Reply::Error(_)));
        }
    }
    state
}

#[test]
fn new_leader_grants_remaining_ttl_plus_election_timeout() {
    let state = state_with(&[(1, 10_000, 0), (2, 600_000, 40_000)]);
    let mut clock = LeaseClock::new(CONFIG);
    clock.on_granted(LeaseId(9), 5, 0); // of another time
    clock.on_become_leader(&state, 1_000_000, 1_000);
    assert_eq!(clock.remaining_ms(LeaseId(9), 1_000_000), None);
    assert_eq!(clock.remaining_ms(LeaseId(1), 1_000_000), Some(11_000));
    assert_eq!(clock.remaining_ms(LeaseId(2), 1_000_000), Some(41_000));
    // The log says that 40 s remain; the next leader must not use that after a renewal.
    let clear = Command::node(Op::LeaseCheckpoint { remaining: vec![(LeaseId(2), 0)] });
    let expected = Renewal::Renewed { ttl_ms: 600_000, checkpoint: Some(clear) };
    assert_eq!(clock.renew(LeaseId(2), 1_000_000), expected);
    assert_eq!(clock.renew(LeaseId(2), 1_000_001), expected, "until it is committed");
    clock.on_checkpoint(&[(LeaseId(2), 0)]);
    assert_eq!(clock.renew(LeaseId(2), 1_000_002), renewed(600_000));
    clock.on_lose_leadership();
    assert_eq!(clock.renew(LeaseId(2), 1_000_003), Renewal::NotFound);
    assert_eq!(clock.next_expiry_ms(), None);
}

#[test]
fn long_leases_are_checkpointed_periodically() {
    let mut clock = LeaseClock::new(CONFIG);
    clock.on_granted(LeaseId(1), 30_000, 0); // too short to checkpoint
    clock.on_granted(LeaseId(2), 200_000, 0);
    assert_eq!(clock.checkpoint(59_999), None);
    let checkpoint = |rest| Some(Command::node(Op::LeaseCheckpoint { remaining: vec![(LeaseId(2), rest)] }));
    assert_eq!(clock.checkpoint(60_000), checkpoint(140_000));
    assert_eq!(clock.checkpoint(60_001), None);
    assert_eq!(clock.checkpoint(120_000), checkpoint(80_000));
    clock.on_checkpoint(&[(LeaseId(2), 80_000)]);
    assert!(matches!(clock.renew(LeaseId(2), 150_000), Renewal::Renewed { checkpoint: Some(_), .. }));
    assert_eq!(clock.checkpoint(180_000), None, "a renewal starts the interval over");
    assert_eq!(clock.checkpoint(210_000), checkpoint(140_000));
    assert_eq!(clock.checkpoint(350_000), None, "no remaining TTL to checkpoint");
}

#[test]
fn renewal_resets_a_pending_checkpoint() {
    let mut clock = LeaseClock::new(CONFIG);
    clock.on_granted(LeaseId(1), 400_000, 0);
    let checkpoint = clock.checkpoint(300_000);
    assert!(checkpoint.is_some(), "the remaining TTL is proposed and not applied yet");
    let Renewal::Renewed { checkpoint, .. } = clock.renew(LeaseId(1), 300_001) else { panic!("it lives") };
    assert_eq!(checkpoint, Some(Command::node(Op::LeaseCheckpoint { remaining: vec![(LeaseId(1), 0)] })));
}
