//! Leases that are renewed, lost and paused, on every store.

use std::sync::Arc;

use moim_base::ManualClock;

use super::*;
use crate::scenario::{Faults, Flaky, everywhere, in_memory, until};

#[test]
fn session_outlives_its_ttl_and_ends_when_closed() {
    everywhere(async |store| {
        // Longer than elsewhere: a session that a slow disk keeps from being renewed ends, and rightly.
        let session = Session::open(&store.node("a"), store.ttl * 3).await.unwrap();
        let txn = crate::Txn::new().put_leased("k", "v", session.lease());
        store.repository.txn(txn).await.unwrap();
        tokio::time::sleep(session.ttl() * 2).await;
        assert!(session.is_valid(), "{}", store.name);
        assert!(store.repository.get("k").await.unwrap().is_some(), "{}", store.name);
        session.close().await.unwrap();
        assert_eq!(session.lost().await, SessionEnd::Closed);
        assert!(!session.is_valid());
        assert!(store.repository.get("k").await.unwrap().is_none(), "{}", store.name);
    });
}

#[test]
fn a_session_is_invalid_before_its_lease_is_revoked() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("a");
        context.repository = flaky.clone();
        let session = Session::open(&context, Duration::from_secs(60)).await.unwrap();
        // The reply to the revocation does not arrive: another holder may be in already.
        flaky.set(Faults { frozen: true, ..Faults::default() });
        let closed = tokio::time::timeout(Duration::from_millis(20), session.close()).await;
        assert!(closed.is_err(), "no reply arrived");
        assert!(!session.is_valid());
    });
}

#[test]
fn dropping_the_last_handle_ends_the_lease() {
    in_memory(async |store| {
        let session = Session::open(&store.node("a"), Duration::from_secs(60)).await.unwrap();
        store.repository.txn(crate::Txn::new().put_leased("k", "v", session.lease())).await.unwrap();
        let other = session.clone();
        drop(session);
        assert!(other.is_valid());
        drop(other);
        until("the key is deleted", async || {
            store.repository.get("k").await.unwrap().is_none().then_some(())
        })
        .await;
    });
}

#[test]
fn unreachable_store_ends_the_session_before_the_lease_expires() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("a");
        context.repository = flaky.clone();
        for faults in [
            Faults { unreachable: true, ..Faults::default() },
            Faults { loses_renewal_replies: true, ..Faults::default() },
        ] {
            let session = Session::open(&context, store.ttl).await.unwrap();
            store.repository.txn(crate::Txn::new().put_leased("k", "v", session.lease())).await.unwrap();
            flaky.set(faults);
            assert_eq!(session.lost().await, SessionEnd::Expired);
            assert!(store.repository.get("k").await.unwrap().is_some(), "no other holder can have it yet");
            flaky.set(Faults::default());
            assert!(!session.is_valid(), "the session stays ended");
        }
    });
}

#[test]
fn session_survives_a_short_store_outage() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut context = store.node("a");
        context.repository = flaky.clone();
        let session = Session::open(&context, store.ttl).await.unwrap();
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        tokio::time::sleep(store.ttl / 2).await;
        flaky.set(Faults::default());
        tokio::time::sleep(store.ttl).await;
        assert!(session.is_valid());
    });
}

#[test]
fn first_check_after_a_process_pause_is_invalid() {
    in_memory(async |store| {
        // A manual clock: no timer runs, as in a stopped process.
        let clock = Arc::new(ManualClock::at(1_000));
        let context = store.node("a").with_clock(clock.clone());
        let session = Session::open(&context, Duration::from_secs(10)).await.unwrap();
        clock.advance_ms(8_499);
        assert!(session.is_valid());
        clock.jump_wall_to_ms(0);
        assert!(session.is_valid(), "the wall clock decides no deadline");
        clock.advance_ms(2);
        assert!(!session.is_valid());
        assert_eq!(session.ended(), Some(SessionEnd::Expired));
        assert_eq!(session.time_left(), Duration::ZERO);
    });
}

#[test]
fn revoked_lease_ends_the_session() {
    everywhere(async |store| {
        // Longer than elsewhere: on a slow disk a revocation may take as long as a short lease TTL.
        let session = Session::open(&store.node("a"), store.ttl * 3).await.unwrap();
        store.repository.revoke(session.lease()).await.unwrap();
        assert_eq!(session.lost().await, SessionEnd::Revoked, "{}", store.name);
    });
}
