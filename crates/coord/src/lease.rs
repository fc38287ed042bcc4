//! The leases and the keys attached to each.
//!
//! Invariant: a key is listed under a lease exactly when the newest version of the key names that lease, so a
//! revocation deletes all its keys. Deadlines are not here: the leader keeps them ([`LeaseClock`](crate::LeaseClock)),
//! because clocks of different machines do not agree.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;

use crate::range::SpaceId;
use crate::request::Origin;

/// The longest TTL that is granted: etcd's 9,000,000,000 seconds.
pub const MAX_LEASE_TTL_MS: i64 = 9_000_000_000_000;
/// The shortest TTL granted to a client; a shorter request is raised to it.
pub const MIN_CLIENT_TTL_MS: i64 = 1_000;
/// The shortest TTL granted to a node: failover of the cluster's own roles may be quicker than a second.
pub const MIN_NODE_TTL_MS: i64 = 100;

/// Id of a lease; 0 is no lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// No lease.
    pub const NONE: Self = Self(0);

    /// True for id 0.
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A lease as stored by the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// The granted TTL.
    pub ttl_ms: i64,
    /// The remaining TTL at the last checkpoint; 0 is the full TTL.
    pub remaining_ms: i64,
    /// Who granted it. Only nodes may revoke or renew a lease of a node.
    pub origin: Origin,
    /// The keys attached to it.
    pub(crate) keys: BTreeSet<(SpaceId, Bytes)>,
}

impl Lease {
    /// The attached keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Bytes> {
        self.keys.iter().map(|(_, key)| key)
    }

    /// The TTL that a new leader has to grant at least.
    pub fn remaining_ttl_ms(&self) -> i64 {
        if self.remaining_ms > 0 { self.remaining_ms.min(self.ttl_ms) } else { self.ttl_ms }
    }
}

/// All leases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Leases {
    pub(crate) by_id: BTreeMap<LeaseId, Lease>,
}

impl Leases {
    /// Attaches a key to a lease, and detaches it from its previous one.
    ///
    /// The caller has checked that the new lease exists; the old one exists by the invariant.
    pub(crate) fn move_key(&mut self, space: SpaceId, key: &Bytes, from: LeaseId, to: LeaseId) {
        if from == to {
            return;
        }
        if let Some(lease) = self.by_id.get_mut(&from) {
            // `BTreeSet::remove` needs an owned key here; the clone shares the bytes.
            let held = lease.keys.remove(&(space, key.clone()));
            assert!(held, "key missing in the key set of lease {from}");
        }
        if let Some(lease) = self.by_id.get_mut(&to) {
            lease.keys.insert((space, key.clone()));
        }
    }
}
