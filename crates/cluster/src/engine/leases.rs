//! When leases end. Deadlines are not part of the state: renewing one writes nothing, and after a restart every
//! lease starts with its whole time, so that nobody loses a lease because the server was away.
//!
//! Time comes in as milliseconds of a monotonic clock; a wall clock never decides about a lease.

use std::collections::HashMap;

use crate::repository::LeaseId;

/// The deadline of every lease.
#[derive(Default)]
pub(crate) struct Deadlines {
    by_lease: HashMap<LeaseId, Deadline>,
}

#[derive(Clone, Copy)]
struct Deadline {
    ttl_ms: u64,
    at_ms: u64,
}

impl Deadlines {
    /// The lease lives for its whole time from now on.
    pub(crate) fn on_grant(&mut self, id: LeaseId, ttl_ms: u64, now_ms: u64) {
        self.by_lease.insert(id, Deadline { ttl_ms, at_ms: now_ms.saturating_add(ttl_ms) });
    }

    /// The lease is gone.
    pub(crate) fn on_revoke(&mut self, id: LeaseId) {
        self.by_lease.remove(&id);
    }

    /// Gives the lease its whole time again and says how long it is; none when it has ended, revoked or not: it
    /// must not come back once somebody may have counted on its end.
    pub(crate) fn keep_alive(&mut self, id: LeaseId, now_ms: u64) -> Option<u64> {
        let deadline = self.by_lease.get_mut(&id).filter(|deadline| now_ms < deadline.at_ms)?;
        deadline.at_ms = now_ms.saturating_add(deadline.ttl_ms);
        Some(deadline.ttl_ms)
    }

    /// Whether the lease has not ended.
    pub(crate) fn is_alive(&self, id: LeaseId, now_ms: u64) -> bool {
        self.by_lease.get(&id).is_some_and(|deadline| now_ms < deadline.at_ms)
    }

    /// The leases that have ended, in the order of their ids.
    pub(crate) fn due(&self, now_ms: u64) -> Vec<LeaseId> {
        let ended = self.by_lease.iter().filter(|(_, deadline)| deadline.at_ms <= now_ms);
        let mut ids: Vec<LeaseId> = ended.map(|(id, _)| *id).collect();
        ids.sort();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_lives_until_its_deadline_and_not_on_it() {
        let mut deadlines = Deadlines::default();
        deadlines.on_grant(LeaseId(1), 10, 100);
        assert_eq!((deadlines.is_alive(LeaseId(1), 109), deadlines.is_alive(LeaseId(1), 110)), (true, false));
        assert_eq!(deadlines.keep_alive(LeaseId(1), 109), Some(10));
        assert_eq!(deadlines.due(118), []);
        assert_eq!(deadlines.due(119), [LeaseId(1)]);
        assert_eq!(deadlines.keep_alive(LeaseId(1), 119), None);
    }
}
