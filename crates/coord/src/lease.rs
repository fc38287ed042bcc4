//! The leases that exist and the keys that hang on each.
//!
//! Invariant: a key is listed under a lease exactly when the newest version of the key names that lease, so a
//! lease is never ended without its keys. Deadlines are not here: they are the leader's
//! ([`LeaseClock`](crate::LeaseClock)), because clocks of different machines do not agree.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;

use crate::range::SpaceId;
use crate::request::Origin;

/// The longest time a lease may be granted for: etcd's 9,000,000,000 seconds.
pub const MAX_LEASE_TTL_MS: i64 = 9_000_000_000_000;
/// The shortest time a client is granted; a shorter wish is lengthened.
pub const MIN_CLIENT_TTL_MS: i64 = 1_000;
/// The shortest time a node is granted: failover of the cluster's own parts may be quicker than a second.
pub const MIN_NODE_TTL_MS: i64 = 100;

/// The name of a lease; 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// No lease.
    pub const NONE: Self = Self(0);

    /// Whether this is no lease.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A lease as the log knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// How long it lives without being kept alive.
    pub ttl_ms: i64,
    /// What was left at the last checkpoint; 0 is the whole time.
    pub remaining_ms: i64,
    /// Who made it. A node's lease is ended and kept alive by nodes alone.
    pub origin: Origin,
    /// The keys that go with it.
    pub(crate) keys: BTreeSet<(SpaceId, Bytes)>,
}

impl Lease {
    /// The keys that go with it, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Bytes> {
        self.keys.iter().map(|(_, key)| key)
    }

    /// What a new leader has to grant at least.
    pub fn rest_ms(&self) -> i64 {
        if self.remaining_ms > 0 { self.remaining_ms.min(self.ttl_ms) } else { self.ttl_ms }
    }
}

/// All leases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Leases {
    pub(crate) by_id: BTreeMap<LeaseId, Lease>,
}

impl Leases {
    /// Hangs a key on a lease, and off the one it was on.
    ///
    /// The caller has checked that the new lease exists; the old one does by the invariant.
    pub(crate) fn move_key(&mut self, space: SpaceId, key: &Bytes, from: LeaseId, to: LeaseId) {
        if from == to {
            return;
        }
        if let Some(lease) = self.by_id.get_mut(&from) {
            // The set must share the memory of the key, but a look-up needs no owner.
            let held = lease.keys.remove(&(space, key.clone()));
            assert!(held, "a key that names lease {from} is listed under it");
        }
        if let Some(lease) = self.by_id.get_mut(&to) {
            lease.keys.insert((space, key.clone()));
        }
    }
}
