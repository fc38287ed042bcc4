//! Eviction (`maxmemory-policy`).
//!
//! The algorithm of Redis: sample a few keys, keep the best candidates of this and earlier samples in the eviction
//! pool, and evict the best of all until memory is below the limit. Evictions are effects (replicas and the journal
//! must agree), so they are propagated like deletions.
//!
//! Sampling must be uniform over the keys, regardless of their distribution over slots and of their expire times.
//! Otherwise hot keys would be sampled more often than others and evicted before them.

use crate::SLOTS;
use crate::effects::Effects;
use crate::events::{Events, class};
use crate::keyspace::Keyspace;
use crate::settings::Policy;
use crate::shared::Shared;

/// Size of the eviction pool.
const POOL: usize = 16;
/// Random samples for a key with an expire time before falling back to a scan.
const TRIES: usize = 512;
/// Samples drawn with the same cumulative slot sizes.
const MAX_DRAWN: usize = 4_096;

/// A candidate in the eviction pool.
struct Candidate {
    key: Vec<u8>,
    /// Eviction score: idle seconds, or the inverse of the access frequency.
    score: u32,
}

/// Eviction state of a keyspace.
#[derive(Default)]
pub struct Evictor {
    /// The eviction pool, best candidate last.
    pool: Vec<Candidate>,
    policy: Option<Policy>,
    sizes: Sizes,
}

/// Cumulative number of keys by slot. May be stale by some keys: sampling need not be exact.
#[derive(Default)]
struct Sizes {
    up_to: Vec<usize>,
    keys: usize,
    drawn: usize,
}

impl Sizes {
    /// Samples a key uniformly.
    fn sample(&mut self, db: &Keyspace) -> Option<Vec<u8>> {
        let changed = self.keys.abs_diff(db.len());
        if self.up_to.is_empty() || self.drawn >= MAX_DRAWN || changed * 16 > db.len() {
            let mut total = 0;
            self.up_to.clear();
            self.up_to.extend((0..SLOTS as u16).map(|slot| {
                total += db.slot_len(slot);
                total
            }));
            (self.keys, self.drawn) = (db.len(), 0);
        }
        self.drawn += 1;
        let total = self.up_to.last().copied().filter(|total| *total > 0)?;
        // A slot may be empty by now: the next sample hits another one.
        (0..64).find_map(|_| {
            let at = fastrand::usize(..total);
            let slot = self.up_to.partition_point(|up_to| *up_to <= at);
            db.random_key_of(slot as u16, |below| fastrand::usize(..below.max(1))).map(<[u8]>::to_vec)
        })
    }

    /// Samples a key with an expire time uniformly.
    fn sample_expiring(&mut self, db: &Keyspace) -> Option<Vec<u8>> {
        let expiring = db.expiring();
        if expiring == 0 {
            return None;
        }
        // If few keys expire, selecting one by index is cheaper than rejection sampling.
        if expiring > TRIES {
            for _ in 0..TRIES {
                let key = self.sample(db)?;
                if db.expiry(&key).flatten().is_some() {
                    return Some(key);
                }
            }
        }
        db.nth_expiring(fastrand::usize(..expiring)).map(<[u8]>::to_vec)
    }
}

impl Evictor {
    /// Evicts keys until `is_enough` returns true. Returns false if that was not possible.
    pub fn maybe_evict(
        &mut self,
        db: &mut Keyspace,
        fx: &mut Effects,
        events: &mut Events,
        shared: &Shared,
        now: i64,
        is_enough: impl Fn(&Keyspace) -> bool,
    ) -> bool {
        let policy = shared.settings.policy();
        if self.policy.replace(policy) != Some(policy) {
            self.pool.clear();
        }
        let samples = usize::try_from(shared.settings.number("maxmemory-samples")).unwrap_or(5).max(1);
        while !is_enough(db) {
            let Some(key) = self.next(db, policy, samples, now) else { return false };
            if !db.remove(&key) {
                continue;
            }
            fx.push_slices(&[b"DEL", &key]);
            events.hazards.mark(db.id_of(&key).hash);
            events.on_implicit_delete(&key);
            events.notify(class::EVICTED, "evicted", &key);
            shared.stats.evicted.inc();
        }
        true
    }

    fn next(&mut self, db: &Keyspace, policy: Policy, samples: usize, now: i64) -> Option<Vec<u8>> {
        let volatile = matches!(policy, Policy::VolatileLru | Policy::VolatileLfu);
        match policy {
            Policy::NoEviction => None,
            Policy::AllKeysRandom => self.sizes.sample(db),
            Policy::VolatileRandom => self.sizes.sample_expiring(db),
            Policy::VolatileTtl => db.next_to_expire().map(<[u8]>::to_vec),
            Policy::AllKeysLru | Policy::VolatileLru => {
                let clock = (now / 1_000) as u32 & 0xff_ffff;
                self.best(db, volatile, samples, |key| {
                    db.access(key).map(|access| clock.wrapping_sub(access) & 0xff_ffff)
                })
            }
            Policy::AllKeysLfu | Policy::VolatileLfu => self.best(db, volatile, samples, |key| {
                db.frequency(key).map(|frequency| u32::from(u8::MAX - frequency))
            }),
        }
    }

    /// Samples keys and returns the best candidate.
    fn best(
        &mut self,
        db: &Keyspace,
        volatile: bool,
        samples: usize,
        score: impl Fn(&[u8]) -> Option<u32>,
    ) -> Option<Vec<u8>> {
        for _ in 0..samples {
            let drawn = if volatile { self.sizes.sample_expiring(db) } else { self.sizes.sample(db) };
            let Some(key) = drawn else { break };
            if let Some(score) = score(&key) {
                self.remember(key, score);
            }
        }
        // A candidate that was accessed or deleted since it was sampled is reevaluated.
        while let Some(candidate) = self.pool.pop() {
            let is_eligible = !volatile || db.expiry(&candidate.key).flatten().is_some();
            if is_eligible && score(&candidate.key).is_some_and(|now| now >= candidate.score) {
                return Some(candidate.key);
            }
        }
        // Every candidate was accessed since: evict a random sample instead.
        if volatile { self.sizes.sample_expiring(db) } else { self.sizes.sample(db) }
    }

    fn remember(&mut self, key: Vec<u8>, score: u32) {
        if self.pool.iter().any(|known| known.key == key) {
            return;
        }
        let at = self.pool.partition_point(|known| known.score <= score);
        if self.pool.len() == POOL {
            if at == 0 {
                return;
            }
            self.pool.remove(0);
            self.pool.insert(at - 1, Candidate { key, score });
        } else {
            self.pool.insert(at, Candidate { key, score });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(shared: &Shared, policy: &str) {
        shared.settings.set_all(&[("maxmemory-policy".to_owned(), policy.to_owned())]).unwrap();
    }

    fn maybe_evict(db: &mut Keyspace, shared: &Shared, limit: usize, now: i64) -> (bool, usize) {
        let (mut fx, mut events) = (Effects::default(), Events::default());
        let done =
            Evictor::default().maybe_evict(db, &mut fx, &mut events, shared, now, |db| db.memory() <= limit);
        (done, fx.commands())
    }

    fn kept(db: &Keyspace, prefix: &str, count: u32) -> usize {
        (0..count).filter(|n| db.contains(format!("{prefix}{n}").as_bytes())).count()
    }

    /// 500 hot keys among 5,000, in few slots or many, with expire times far apart or close together.
    fn hot_and_cold(shared: &Shared, hot_in_one_slot: bool, expires: bool) -> Keyspace {
        let mut db = Keyspace::new(1);
        db.set_lfu(shared.settings.lfu(1));
        let hot = |n: u32| if hot_in_one_slot { format!("{{hot}}{n}") } else { format!("hot{n}") };
        db.set_access_clock(10);
        for n in 0..4_500u32 {
            let at = 10_000_000 + i64::from(n);
            db.set_str(format!("cold{n}").as_bytes(), &[0; 100], expires.then_some(at));
        }
        for n in 0..500u32 {
            // The expire times of hot keys span a year: sampling by time would return only them.
            let at = 20_000_000 + i64::from(n) * 60_000_000;
            db.set_str(hot(n).as_bytes(), &[0; 100], expires.then_some(at));
        }
        db.set_access_clock(70);
        for n in 0..500u32 {
            for _ in 0..50 {
                db.touch(hot(n).as_bytes());
            }
        }
        db
    }

    #[test]
    fn lru_keeps_hot_keys_and_random_evicts_uniformly() {
        for hot_in_one_slot in [false, true] {
            for (policy, expires, least, most) in [
                ("allkeys-lru", false, 499, 500),
                ("allkeys-lru", true, 499, 500),
                ("volatile-lru", true, 499, 500),
                ("allkeys-lfu", false, 495, 500),
                ("volatile-lfu", true, 495, 500),
                // About a fifth of the memory is evicted, so four in five keys remain.
                ("allkeys-random", false, 350, 450),
                ("volatile-random", true, 350, 450),
                ("volatile-ttl", true, 500, 500),
            ] {
                let shared = Shared::default();
                set(&shared, policy);
                let mut db = hot_and_cold(&shared, hot_in_one_slot, expires);
                let limit = db.memory() * 4 / 5;
                assert!(maybe_evict(&mut db, &shared, limit, 70_000).0, "{policy}");
                let left = kept(&db, if hot_in_one_slot { "{hot}" } else { "hot" }, 500);
                assert!((least..=most).contains(&left), "{policy}: {left} of 500 hot keys stay");
            }
        }
    }

    #[test]
    fn every_one_of_few_volatile_keys_is_sampled() {
        let shared = Shared::default();
        set(&shared, "volatile-random");
        let mut db = Keyspace::new(1);
        for n in 0..3_000u32 {
            db.set_str(format!("k{n}").as_bytes(), &[0; 100], (n < 10).then_some(90_000));
        }
        let before = db.len();
        assert_eq!(maybe_evict(&mut db, &shared, 0, 1_000), (false, 10));
        assert_eq!((db.len(), kept(&db, "k", 10)), (before - 10, 0));
    }

    #[test]
    fn evictions_follow_the_policy_and_are_propagated() {
        for (policy, expiring, possible) in [
            ("noeviction", false, false),
            ("allkeys-lru", false, true),
            ("allkeys-random", false, true),
            ("volatile-lru", false, false),
            ("volatile-ttl", true, true),
            ("volatile-random", true, true),
        ] {
            let shared = Shared::default();
            set(&shared, policy);
            let mut db = Keyspace::new(1);
            for n in 0..2_000u32 {
                db.set_access_clock(n / 100 + 1);
                db.set_str(format!("k{n}").as_bytes(), &[0; 100], expiring.then_some(10_000 + i64::from(n)));
            }
            let limit = db.memory() / 2;
            let (done, recorded) = maybe_evict(&mut db, &shared, limit, 25_000);
            assert_eq!(done, possible, "{policy}");
            assert_eq!(recorded, 2_000 - db.len(), "{policy}");
            if policy == "volatile-ttl" {
                assert!(!db.contains(b"k0") && db.contains(b"k1999"));
            }
            if policy == "allkeys-lru" {
                let young = (1_000..2_000).filter(|n| db.contains(format!("k{n}").as_bytes())).count();
                assert!(young * 10 > db.len() * 9, "{young} of {}", db.len());
            }
        }
    }

    #[test]
    fn lfu_keeps_frequently_used_keys() {
        let shared = Shared::default();
        set(&shared, "allkeys-lfu");
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
        let limit = db.memory() / 2;
        assert!(maybe_evict(&mut db, &shared, limit, 60_000).0);
        let often = kept(&db, "k", 200);
        assert!(often > 190 && db.len() < 1_200, "{often} of {}", db.len());
    }
}
