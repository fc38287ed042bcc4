//! Which keys a request means, and which of the two spaces they are in.
//!
//! Invariant: the start of a range alone decides its space. A range that starts outside of [`SYSTEM_PREFIX`]
//! never reaches a system key, however wide it is; one that starts inside never leaves it.

use std::ops::Bound;

use bytes::Bytes;

/// Keys that begin with this are the cluster's own.
pub const SYSTEM_PREFIX: &[u8] = b"/moim/";

/// One of the two key spaces; each counts its own revisions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SpaceId {
    /// Keys of users.
    User,
    /// Keys of the cluster itself, written by nodes alone.
    System,
}

impl SpaceId {
    /// The space of a key, or of a range that starts with it.
    pub fn of(key: &[u8]) -> Self {
        if key.starts_with(SYSTEM_PREFIX) { Self::System } else { Self::User }
    }
}

/// A range as ordered maps take it.
pub(crate) type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// Where a range ends.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum RangeEnd {
    /// It is the start key alone.
    Single,
    /// Before this key.
    Before(Bytes),
    /// Nowhere.
    Open,
}

/// A set of neighbouring keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KeyRange {
    /// The first key.
    pub start: Bytes,
    /// Where it ends.
    pub end: RangeEnd,
}

impl KeyRange {
    /// The range of a request: an empty end is the single key, an end of one zero byte is every key from the
    /// start on.
    pub fn new(key: Bytes, range_end: Bytes) -> Self {
        let end = match &range_end[..] {
            [] => RangeEnd::Single,
            [0] => RangeEnd::Open,
            _ => RangeEnd::Before(range_end),
        };
        Self { start: key, end }
    }

    /// The range of one key.
    pub fn single(key: Bytes) -> Self {
        Self { start: key, end: RangeEnd::Single }
    }

    /// The space it is in.
    pub fn space(&self) -> SpaceId {
        SpaceId::of(&self.start)
    }

    /// Whether the key is in it.
    pub fn contains(&self, key: &[u8]) -> bool {
        match &self.end {
            RangeEnd::Single => key == self.start,
            RangeEnd::Before(end) => key >= &self.start[..] && key < &end[..],
            RangeEnd::Open => key >= &self.start[..],
        }
    }

    /// Whether no key can be in it.
    pub fn is_empty(&self) -> bool {
        matches!(&self.end, RangeEnd::Before(end) if *end <= self.start)
    }

    /// The bounds for an ordered map; `None` when the range is empty, on which such a map would panic.
    pub(crate) fn bounds(&self) -> Option<Bounds<'_>> {
        let end = match &self.end {
            RangeEnd::Single => Bound::Included(&self.start[..]),
            RangeEnd::Before(end) => Bound::Excluded(&end[..]),
            RangeEnd::Open => Bound::Unbounded,
        };
        (!self.is_empty()).then_some((Bound::Included(&self.start[..]), end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(key: &'static str, end: &'static [u8]) -> KeyRange {
        KeyRange::new(Bytes::from_static(key.as_bytes()), Bytes::from_static(end))
    }

    #[test]
    fn a_range_holds_its_start_and_not_its_end() {
        let cases: [(&str, &[u8], &str, bool); 8] = [
            ("a", b"", "a", true),
            ("a", b"", "aa", false),
            ("a", b"c", "b", true),
            ("a", b"c", "c", false),
            ("b", b"\0", "zz", true),
            ("b", b"\0", "a", false),
            ("b", b"a", "b", false),
            ("b", b"b", "b", false),
        ];
        for (start, end, key, expected) in cases {
            assert_eq!(range(start, end).contains(key.as_bytes()), expected, "{key} in {start}..{end:?}");
        }
        assert!(range("b", b"a").bounds().is_none());
    }

    #[test]
    fn the_start_decides_the_space() {
        assert_eq!(range("/", b"\0").space(), SpaceId::User);
        assert_eq!(range("/moim", b"").space(), SpaceId::User);
        assert_eq!(range("/moim/", b"\0").space(), SpaceId::System);
        assert_eq!(range("/moim/x", b"").space(), SpaceId::System);
    }
}
