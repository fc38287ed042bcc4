//! Letting keys go when memory is short.
//!
//! As Redis does it: draw a few keys, let the best candidate go, until there is room. Evictions are effects (replicas and
//! the journal must agree), so they are recorded like deletions.

use crate::effects::Effects;
use crate::events::{Events, class};
use crate::keyspace::Keyspace;
use crate::settings::Policy;
use crate::shared::Shared;

/// Frees memory until at most `limit` bytes are used. Answers whether that was possible.
pub fn make_room(
    db: &mut Keyspace,
    fx: &mut Effects,
    events: &mut Events,
    shared: &Shared,
    limit: u64,
    now: i64,
) -> bool {
    let policy = shared.settings.policy();
    let samples = usize::try_from(shared.settings.number("maxmemory-samples")).unwrap_or(5).max(1);
    while db.memory() as u64 > limit {
        let Some(key) = candidate(db, policy, samples, now) else { return false };
        db.remove(&key);
        fx.push_slices(&[b"DEL", &key]);
        events.hazards.mark(db.id_of(&key).hash);
        events.on_vanished(&key);
        events.notify(class::EVICTED, "evicted", &key);
        shared.stats.evicted.inc();
    }
    true
}

fn candidate(db: &Keyspace, policy: Policy, samples: usize, now: i64) -> Option<Vec<u8>> {
    let dice = |below: usize| fastrand::usize(..below.max(1));
    let clock = (now / 1_000) as u32 & 0xff_ffff;
    let idle = |key: &[u8]| clock.wrapping_sub(db.access(key).unwrap_or(0)) & 0xff_ffff;
    let oldest =
        |draw: &dyn Fn() -> Option<Vec<u8>>| (0..samples).filter_map(|_| draw()).max_by_key(|key| idle(key));
    let rarest = |draw: &dyn Fn() -> Option<Vec<u8>>| {
        (0..samples).filter_map(|_| draw()).min_by_key(|key| db.frequency(key).unwrap_or(0))
    };
    match policy {
        Policy::NoEviction => None,
        Policy::AllKeysRandom => db.random_key(dice).map(<[u8]>::to_vec),
        Policy::VolatileRandom => db.random_expiring(dice).map(|(key, _)| key.to_vec()),
        Policy::VolatileTtl => db.next_to_expire().map(<[u8]>::to_vec),
        Policy::AllKeysLru => oldest(&|| db.random_key(dice).map(<[u8]>::to_vec)),
        Policy::AllKeysLfu => rarest(&|| db.random_key(dice).map(<[u8]>::to_vec)),
        Policy::VolatileLru => oldest(&|| db.random_expiring(dice).map(|(key, _)| key.to_vec())),
        Policy::VolatileLfu => rarest(&|| db.random_expiring(dice).map(|(key, _)| key.to_vec())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(expiring: bool) -> (Keyspace, Effects, Events) {
        let mut db = Keyspace::new(1);
        for n in 0..2_000u32 {
            db.set_access_clock(n / 100 + 1);
            db.set_str(format!("k{n}").as_bytes(), &[0; 100], expiring.then_some(10_000 + i64::from(n)));
        }
        (db, Effects::default(), Events::default())
    }

    #[test]
    fn what_is_used_often_stays() {
        let shared = Shared::default();
        shared.settings.set_all(&[("maxmemory-policy".to_owned(), "allkeys-lfu".to_owned())]).unwrap();
        let mut db = Keyspace::new(1);
        db.set_lfu(shared.settings.lfu(1));
        db.set_access_clock(60);
        for n in 0..2_000u32 {
            db.set_str(format!("k{n}").as_bytes(), &[0; 100], None);
        }
        for n in 0..200u32 {
            let key = format!("k{n}");
            assert!((0..100).all(|_| db.touch(key.as_bytes()).is_some()));
        }
        let limit = db.memory() as u64 / 2;
        let (mut fx, mut events) = (Effects::default(), Events::default());
        assert!(make_room(&mut db, &mut fx, &mut events, &shared, limit, 60_000));
        let often = (0..200).filter(|n| db.contains(format!("k{n}").as_bytes())).count();
        assert!(often > 190 && db.len() < 1_200, "{often} of {}", db.len());
    }

    #[test]
    fn what_the_policy_allows_goes_and_is_recorded() {
        let pair = |policy: &str| [("maxmemory-policy".to_owned(), policy.to_owned())];
        for (policy, expiring, possible) in [
            ("noeviction", false, false),
            ("allkeys-lru", false, true),
            ("allkeys-random", false, true),
            ("volatile-lru", false, false),
            ("volatile-ttl", true, true),
            ("volatile-random", true, true),
        ] {
            let shared = Shared::default();
            shared.settings.set_all(&pair(policy)).unwrap();
            let (mut db, mut fx, mut events) = full(expiring);
            let limit = db.memory() as u64 / 2;
            assert_eq!(
                make_room(&mut db, &mut fx, &mut events, &shared, limit, 25_000),
                possible,
                "{policy}"
            );
            assert_eq!(fx.commands(), 2_000 - db.len(), "{policy}");
            if policy == "volatile-ttl" {
                assert!(!db.contains(b"k0") && db.contains(b"k1999"));
            }
            if policy == "allkeys-lru" {
                let young = (1_000..2_000).filter(|n| db.contains(format!("k{n}").as_bytes())).count();
                assert!(young * 2 > db.len(), "{young} of {}", db.len());
            }
        }
    }
}
