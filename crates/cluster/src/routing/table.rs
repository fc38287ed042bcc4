//! The routing table: key ranges in order, each with its server.
//!
//! Keys are compared as bytes. Invariant of a valid table: entries are sorted by their start, no two
//! overlap, ids are unique, and no range is empty. Ranges need not cover the whole key space.
//!
//! Entries are shared between versions: a table of 100,000 entries is copied for every change, and unchanged
//! entries are neither copied with it nor compared again by the delta computation.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use moim_wire_grpc::routing::{Delta, Route};
use serde::{Deserialize, Serialize};

/// Status of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum NodeStatus {
    /// Not registered yet.
    #[default]
    Waiting = 0,
    /// Serves its ranges.
    Active = 1,
    /// Serves, and its ranges are being migrated away.
    Draining = 2,
    /// Its registration has expired.
    Failed = 3,
}

impl NodeStatus {
    /// Decodes the number; numbers of newer versions count as waiting.
    pub fn from_i32(number: i32) -> Self {
        match number {
            1 => Self::Active,
            2 => Self::Draining,
            3 => Self::Failed,
            _ => Self::Waiting,
        }
    }

    /// Display name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Failed => "failed",
        }
    }
}

/// A key range and its server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteEntry {
    /// Partition id.
    pub partition_id: String,
    /// First key of the range.
    pub key_range_start: String,
    /// End of the range, exclusive; empty for no end.
    pub key_range_end: String,
    /// Server id; empty for none.
    pub node_id: String,
    /// Address of the server.
    #[serde(default)]
    pub node_address: String,
    /// Status of the server: [`NodeStatus`] as a number.
    #[serde(default)]
    pub node_status: i32,
}

impl RouteEntry {
    /// True if the range contains the key.
    pub fn contains(&self, key: &str) -> bool {
        key >= self.key_range_start.as_str()
            && (self.key_range_end.is_empty() || key < self.key_range_end.as_str())
    }

    /// Encodes to the wire type.
    pub fn to_wire(&self) -> Route {
        Route {
            partition_id: self.partition_id.clone(),
            key_range_start: self.key_range_start.clone(),
            key_range_end: self.key_range_end.clone(),
            node_id: self.node_id.clone(),
            node_address: self.node_address.clone(),
            node_status: self.node_status,
        }
    }

    /// Decodes from the wire type.
    pub fn from_wire(route: Route) -> Self {
        Self {
            partition_id: route.partition_id,
            key_range_start: route.key_range_start,
            key_range_end: route.key_range_end,
            node_id: route.node_id,
            node_address: route.node_address,
            node_status: route.node_status,
        }
    }
}

/// An invalid table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// Two entries have the same partition id.
    #[error("partition {0} is there twice")]
    Duplicate(String),
    /// A partition id is empty.
    #[error("a partition has no name")]
    NoName,
    /// A range ends at or before its start.
    #[error("the range of partition {0} is empty")]
    EmptyRange(String),
    /// Two ranges overlap.
    #[error("the ranges of partitions {0} and {1} overlap")]
    Overlap(String, String),
    /// The base version of a delta does not match.
    #[error("a change from version {from} does not fit to version {have}")]
    WrongBase {
        /// Base version of the delta.
        from: i64,
        /// Version of the table.
        have: i64,
    },
}

/// One version of the routing table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingTable {
    /// Incarnation of the table under this key; versions restart in each.
    pub incarnation: i64,
    /// Version; grows by one with every change.
    pub version: i64,
    entries: Vec<Arc<RouteEntry>>,
}

impl RoutingTable {
    /// A table of these entries, sorted and validated.
    pub fn new(version: i64, entries: Vec<RouteEntry>) -> Result<Self, TableError> {
        Self::shared(version, entries.into_iter().map(Arc::new).collect())
    }

    /// The same, from shared entries.
    pub fn shared(version: i64, mut entries: Vec<Arc<RouteEntry>>) -> Result<Self, TableError> {
        entries.sort_by(|a, b| a.key_range_start.cmp(&b.key_range_start));
        let mut ids = HashSet::with_capacity(entries.len());
        for entry in &entries {
            check(entry)?;
            if !ids.insert(entry.partition_id.as_str()) {
                return Err(TableError::Duplicate(entry.partition_id.clone()));
            }
        }
        drop(ids);
        check_order(&entries)?;
        Ok(Self { incarnation: 0, version, entries })
    }

    /// Sets the incarnation.
    #[must_use]
    pub fn of(mut self, incarnation: i64) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// The entries, sorted by their start.
    pub fn entries(&self) -> &[Arc<RouteEntry>] {
        &self.entries
    }

    /// The entry whose range contains the key.
    pub fn lookup(&self, key: &str) -> Option<&RouteEntry> {
        let after = self.entries.partition_point(|entry| entry.key_range_start.as_str() <= key);
        self.entries[..after].last().map(|entry| &**entry).filter(|entry| entry.contains(key))
    }

    /// The entry of a partition.
    pub fn get(&self, partition: &str) -> Option<&RouteEntry> {
        self.entries.iter().find(|entry| entry.partition_id == partition).map(|entry| &**entry)
    }

    /// The next version, with the entries changed by `change`. Unchanged entries stay shared.
    pub fn next(&self, change: impl FnOnce(&mut Vec<Arc<RouteEntry>>)) -> Result<Self, TableError> {
        let mut entries = self.entries.clone();
        change(&mut entries);
        let next = match self.same_partitions(&entries) {
            true => Self { incarnation: 0, version: 0, entries },
            false => Self::shared(0, entries)?,
        };
        Ok(Self { incarnation: self.incarnation, version: self.version + 1, ..next })
    }

    /// True if the entries are those of this table at the same positions, except for their servers:
    /// partition ids need not be checked for duplicates then.
    fn same_partitions(&self, entries: &[Arc<RouteEntry>]) -> bool {
        let is_same = |(old, new): (&Arc<RouteEntry>, &Arc<RouteEntry>)| {
            Arc::ptr_eq(old, new)
                || (old.partition_id == new.partition_id
                    && old.key_range_start == new.key_range_start
                    && old.key_range_end == new.key_range_end)
        };
        self.entries.len() == entries.len() && self.entries.iter().zip(entries).all(is_same)
    }

    /// The delta from this table to `next`.
    pub fn delta(&self, next: &Self) -> Delta {
        let (mut removed, mut new) = (BTreeMap::new(), Vec::new());
        let (mut olds, mut news) = (self.entries.iter().peekable(), next.entries.iter().peekable());
        // Both are sorted. Equal entries are skipped; the rest is matched by partition id.
        loop {
            let order = match (olds.peek(), news.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(old), Some(new)) if Arc::ptr_eq(old, new) => std::cmp::Ordering::Equal,
                (Some(old), Some(new)) => old.key_range_start.cmp(&new.key_range_start),
            };
            let old = if order.is_le() { olds.next() } else { None };
            let latest = if order.is_ge() { news.next() } else { None };
            if let (Some(old), Some(latest)) = (old, latest)
                && (Arc::ptr_eq(old, latest) || old == latest)
            {
                continue;
            }
            removed.extend(old.map(|old| (old.partition_id.as_str(), old)));
            new.extend(latest);
        }
        let mut upserts = Vec::new();
        for entry in new {
            if removed.remove(entry.partition_id.as_str()) != Some(entry) {
                upserts.push(entry.to_wire());
            }
        }
        let removes = removed.into_keys().map(str::to_owned).collect();
        Delta { incarnation: next.incarnation, from: self.version, to: next.version, upserts, removes }
    }

    /// Applies a delta whose base is this table.
    pub fn apply(&self, delta: Delta) -> Result<Self, TableError> {
        if delta.from != self.version || delta.incarnation != self.incarnation {
            return Err(TableError::WrongBase { from: delta.from, have: self.version });
        }
        let mut upserts: BTreeMap<String, RouteEntry> = BTreeMap::new();
        for route in delta.upserts {
            upserts.insert(route.partition_id.clone(), RouteEntry::from_wire(route));
        }
        let removes: HashSet<String> = delta.removes.into_iter().collect();
        let next = self.next(|entries| {
            if !removes.is_empty() {
                entries.retain(|entry| !removes.contains(&entry.partition_id));
            }
            for entry in entries.iter_mut() {
                if upserts.is_empty() {
                    break;
                }
                if let Some(upsert) = upserts.remove(&entry.partition_id) {
                    *entry = Arc::new(upsert);
                }
            }
            entries.extend(upserts.into_values().map(Arc::new));
        })?;
        Ok(Self { version: delta.to, ..next })
    }
}

/// Validates a single entry.
fn check(entry: &RouteEntry) -> Result<(), TableError> {
    if entry.partition_id.is_empty() {
        return Err(TableError::NoName);
    }
    if !entry.key_range_end.is_empty() && entry.key_range_end <= entry.key_range_start {
        return Err(TableError::EmptyRange(entry.partition_id.clone()));
    }
    Ok(())
}

/// Validates that sorted entries do not overlap.
fn check_order(entries: &[Arc<RouteEntry>]) -> Result<(), TableError> {
    for pair in entries.windows(2) {
        let (low, high) = (&pair[0], &pair[1]);
        if low.key_range_end.is_empty() || low.key_range_end > high.key_range_start {
            return Err(TableError::Overlap(low.partition_id.clone(), high.partition_id.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn entry(id: &str, start: &str, end: &str, node: &str) -> RouteEntry {
        RouteEntry {
            partition_id: id.to_owned(),
            key_range_start: start.to_owned(),
            key_range_end: end.to_owned(),
            node_id: node.to_owned(),
            ..RouteEntry::default()
        }
    }

    #[test]
    fn lookup_finds_the_range_of_a_key() {
        let table = RoutingTable::new(
            1,
            vec![entry("c", "t", "", "3"), entry("a", "", "g", "1"), entry("b", "g", "p", "2")],
        )
        .unwrap();
        let cases = [("", "a"), ("f\u{ffff}", "a"), ("g", "b"), ("o", "b"), ("t", "c"), ("zzz", "c")];
        for (key, partition) in cases {
            assert_eq!(table.lookup(key).map(|entry| entry.partition_id.as_str()), Some(partition), "{key}");
        }
        assert_eq!(table.lookup("p"), None, "a gap between ranges");
        assert_eq!(RoutingTable::default().lookup("x"), None);
    }

    #[test]
    fn invalid_tables_are_rejected() {
        let cases = [
            (vec![entry("a", "", "g", ""), entry("a", "g", "", "")], TableError::Duplicate("a".into())),
            (vec![entry("", "", "", "")], TableError::NoName),
            (vec![entry("a", "g", "g", "")], TableError::EmptyRange("a".into())),
            (
                vec![entry("a", "", "h", ""), entry("b", "g", "", "")],
                TableError::Overlap("a".into(), "b".into()),
            ),
            (
                vec![entry("a", "", "", ""), entry("b", "g", "", "")],
                TableError::Overlap("a".into(), "b".into()),
            ),
        ];
        for (entries, expected) in cases {
            assert_eq!(RoutingTable::new(1, entries), Err(expected));
        }
    }

    #[test]
    fn applied_delta_gives_the_next_table() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut table = RoutingTable::new(1, vec![entry("p0", "", "", "n0")]).unwrap().of(5);
        for step in 1..200 {
            let next = table.next(|entries| {
                let at = random.usize(0..entries.len());
                match random.u8(0..3) {
                    0 => {
                        let start = entries[at].key_range_start.clone();
                        let middle = format!("{start}{}", random.alphabetic());
                        let fits = entries[at].key_range_end.is_empty() || middle < entries[at].key_range_end;
                        if fits {
                            let mut upper = entry(&format!("p{step}"), &middle, "", "n1");
                            upper.key_range_end.clone_from(&entries[at].key_range_end);
                            Arc::make_mut(&mut entries[at]).key_range_end = middle;
                            entries.push(Arc::new(upper));
                        }
                    }
                    1 if entries.len() > 1 => drop(entries.swap_remove(at)),
                    _ => Arc::make_mut(&mut entries[at]).node_id = format!("n{}", random.u8(0..5)),
                }
            });
            let next = next.unwrap();
            let delta = table.delta(&next);
            assert_eq!(table.apply(delta.clone()).unwrap(), next);
            let stranger =
                RoutingTable::new(next.version, next.entries().iter().map(|one| (**one).clone()).collect());
            assert_eq!(table.delta(&stranger.unwrap().of(5)), delta, "also without shared entries");
            assert!(next.apply(delta).is_err(), "base version mismatch");
            table = next;
        }
    }
}
