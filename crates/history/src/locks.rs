//! Locks: the guarantees for their holders.
//!
//! A lock holder has a fencing token. A paused holder may believe that it still holds the lock; it is harmless
//! because the guarded resource refuses tokens older than one it has seen. Therefore the guarantees concern tokens:
//! never assigned twice, always greater for a later holder. They concern time only while a holder is certain, that is
//! until the lease it last renewed can have expired.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One period in which a client held a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hold {
    /// The lock.
    pub lock: String,
    /// The client.
    pub client: u64,
    /// Its fencing token.
    pub token: i64,
    /// When it requested the lock.
    pub asked: u64,
    /// When it learned that it holds the lock.
    pub since: u64,
    /// Until when it was certain: it began to release, or its lease may have expired. `None`: to the end.
    pub until: Option<u64>,
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "client {} with token {} asked at {}, held from {}",
            self.client, self.token, self.asked, self.since
        )?;
        match self.until {
            Some(until) => write!(f, " to {until}"),
            None => f.write_str(" to the end"),
        }
    }
}

/// A violated guarantee.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LockViolation {
    /// The lock.
    pub lock: String,
    /// The violation.
    pub what: String,
}

impl fmt::Display for LockViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lock {}: {}", self.lock, self.what)
    }
}

impl std::error::Error for LockViolation {}

/// Records which client held which lock. Usable from many threads; time is a counter that advances at every call.
#[derive(Default)]
pub struct Locks {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    now: u64,
    holds: Vec<Hold>,
    /// Writes that a guarded resource accepted, in its order: lock, token.
    accepted: Vec<(String, i64)>,
}

impl Locks {
    /// Starts without holders.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tick(&self) -> u64 {
        let mut inner = self.inner();
        inner.now += 1;
        inner.now
    }

    /// A client is about to request a lock; the result is for [`Locks::held`].
    pub fn ask(&self) -> u64 {
        self.tick()
    }

    /// A client learned that it holds the lock; the result is for [`Locks::uncertain`].
    pub fn held(&self, lock: &str, client: u64, token: i64, asked: u64) -> usize {
        let since = self.tick();
        let mut inner = self.inner();
        inner.holds.push(Hold { lock: lock.to_owned(), client, token, asked, since, until: None });
        inner.holds.len() - 1
    }

    /// From here on the holder is no longer certain: call it before a release is sent, and not later than the lease
    /// can have expired by the holder's own clock.
    pub fn uncertain(&self, hold: usize) {
        let now = self.tick();
        self.inner().holds[hold].until.get_or_insert(now);
    }

    /// A guarded resource accepted a write with this token.
    pub fn accepted(&self, lock: &str, token: i64) {
        self.inner().accepted.push((lock.to_owned(), token));
    }

    /// All recorded holds.
    pub fn holds(&self) -> Vec<Hold> {
        self.inner().holds.clone()
    }

    /// Checks every guarantee.
    pub fn check(&self) -> Result<(), LockViolation> {
        let inner = self.inner();
        let mut by_lock: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
        for hold in &inner.holds {
            by_lock.entry(&hold.lock).or_default().push(hold);
        }
        for (lock, holds) in by_lock {
            check_holds(&holds).map_err(|what| LockViolation { lock: lock.to_owned(), what })?;
        }
        let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
        for (lock, token) in &inner.accepted {
            let newest = newest.entry(lock).or_insert(*token);
            if token < newest {
                let what = format!("a write with token {token} was taken after one with token {newest}");
                return Err(LockViolation { lock: lock.clone(), what });
            }
            *newest = *token;
        }
        Ok(())
    }
}

/// `holds` are of one lock, ordered by `since`.
fn check_holds(holds: &[&Hold]) -> Result<(), String> {
    for (at, later) in holds.iter().enumerate() {
        for earlier in &holds[..at] {
            if earlier.token == later.token {
                return Err(format!("the same token twice: {earlier}; {later}"));
            }
            if earlier.until.is_none_or(|until| until > later.since) {
                return Err(format!("two certain holders at once: {earlier}; {later}"));
            }
            if earlier.since < later.asked && earlier.token > later.token {
                return Err(format!("a later holder has an older token: {earlier}; {later}"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Client, token, asked, since, until.
    fn check(holds: &[(u64, i64, u64, u64, Option<u64>)]) -> Result<(), String> {
        let hold = |&(client, token, asked, since, until)| Hold {
            lock: "l".to_owned(),
            client,
            token,
            asked,
            since,
            until,
        };
        let holds: Vec<Hold> = holds.iter().map(hold).collect();
        check_holds(&holds.iter().collect::<Vec<_>>())
    }

    #[test]
    fn holders_one_after_the_other_are_fine() {
        check(&[(1, 5, 1, 2, Some(4)), (2, 6, 3, 5, Some(7)), (1, 9, 8, 9, None)]).unwrap();
    }

    #[test]
    fn two_certain_holders_are_found() {
        let error = check(&[(1, 5, 1, 2, Some(6)), (2, 6, 3, 5, None)]).unwrap_err();
        assert!(error.contains("two certain holders"), "{error}");
        let error = check(&[(1, 5, 1, 2, None), (2, 6, 3, 5, None)]).unwrap_err();
        assert!(error.contains("two certain holders"), "{error}");
    }

    #[test]
    fn an_old_token_for_a_later_holder_is_found() {
        let error = check(&[(1, 5, 1, 2, Some(3)), (2, 4, 4, 5, None)]).unwrap_err();
        assert!(error.contains("older token"), "{error}");
        let error = check(&[(1, 5, 1, 2, Some(3)), (2, 5, 4, 5, None)]).unwrap_err();
        assert!(error.contains("same token"), "{error}");
    }

    #[test]
    fn a_guarded_resource_must_not_go_back() {
        let locks = Locks::new();
        locks.accepted("l", 5);
        locks.accepted("m", 1);
        locks.accepted("l", 6);
        locks.check().unwrap();
        locks.accepted("l", 5);
        assert!(locks.check().unwrap_err().to_string().contains("token 5 was taken after"));
    }

    #[test]
    fn a_holder_that_says_so_in_time_makes_room() {
        let locks = Locks::new();
        let asked = locks.ask();
        let hold = locks.held("l", 1, 10, asked);
        locks.uncertain(hold);
        let asked = locks.ask();
        locks.held("l", 2, 11, asked);
        locks.check().unwrap();
        let asked = locks.ask();
        locks.held("l", 3, 12, asked);
        assert!(locks.check().is_err());
    }
}
