//! Lease deadlines. They are not part of the replicated state: a renewal writes nothing, and after a restart
//! every lease starts with its full TTL, so that no client loses a lease because the server was down.
//!
//! Time is an input, in milliseconds of a monotonic clock; a wall clock never decides about a lease.

use std::collections::HashMap;

use crate::repository::LeaseId;

/// Deadlines of all leases.
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
    /// Starts the lease with its full TTL.
    pub(crate) fn on_grant(&mut self, id: LeaseId, ttl_ms: u64, now_ms: u64) {
        self.by_lease.insert(id, Deadline { ttl_ms, at_ms: now_ms.saturating_add(ttl_ms) });
    }

    /// Removes the lease.
    pub(crate) fn on_revoke(&mut self, id: LeaseId) {
        self.by_lease.remove(&id);
    }

    /// Renews the lease for its full TTL and returns the TTL; `None` when it has expired, revoked or not: an
    /// expired lease must not be revived once another client may rely on its expiry.
    pub(crate) fn keep_alive(&mut self, id: LeaseId, now_ms: u64) -> Option<u64> {
        let deadline = self.by_lease.get_mut(&id).filter(|deadline| now_ms < deadline.at_ms)?;
        deadline.at_ms = now_ms.saturating_add(deadline.ttl_ms);
        Some(deadline.ttl_ms)
    }

    /// True if the lease has not expired.
    pub(crate) fn is_alive(&self, id: LeaseId, now_ms: u64) -> bool {
        self.by_lease.get(&id).is_some_and(|deadline| now_ms < deadline.at_ms)
    }

    /// The expired leases, in order of their ids.
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
    fn lease_is_alive_before_its_deadline_and_expired_at_it() {
        let mut deadlines = Deadlines::default();
        deadlines.on_grant(LeaseId(1), 10, 100);
        assert_eq!((deadlines.is_alive(LeaseId(1), 109), deadlines.is_alive(LeaseId(1), 110)), (true, false));
        assert_eq!(deadlines.keep_alive(LeaseId(1), 109), Some(10));
        assert_eq!(deadlines.due(118), []);
        assert_eq!(deadlines.due(119), [LeaseId(1)]);
        assert_eq!(deadlines.keep_alive(LeaseId(1), 119), None);
    }
}
