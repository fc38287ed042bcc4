//! Key ranges of requests, and the key space they belong to.
//!
//! Invariant: the start of a range alone decides its key space. A range that starts outside [`SYSTEM_PREFIX`] never
//! contains a system key, however wide it is; one that starts inside never leaves it.

use std::ops::Bound;

use bytes::Bytes;

/// Prefix of the system keys.
pub const SYSTEM_PREFIX: &[u8] = b"/moim/";

/// One of the two key spaces; each has its own revisions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SpaceId {
    /// Keys of users.
    User,
    /// Keys of the cluster itself, written only by nodes.
    System,
}

impl SpaceId {
    /// The key space of a key, or of a range that starts with it.
    pub fn of(key: &[u8]) -> Self {
        if key.starts_with(SYSTEM_PREFIX) { Self::System } else { Self::User }
    }
}

/// Bounds of a range in an ordered map.
pub(crate) type Bounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// The end of a range.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum RangeEnd {
    /// The range is the start key alone.
    Single,
    /// Exclusive end key.
    Before(Bytes),
    /// Unbounded.
    Open,
}

/// A range of keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KeyRange {
    /// The first key.
    pub start: Bytes,
    /// The end of the range.
    pub end: RangeEnd,
}

impl KeyRange {
    /// The range of a request: an empty `range_end` is the single key, a `range_end` of one zero byte is every key from
    /// `key` on.
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

    /// The key space of the range.
    pub fn space(&self) -> SpaceId {
        SpaceId::of(&self.start)
    }

    /// True if the range contains the key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match &self.end {
            RangeEnd::Single => key == self.start,
            RangeEnd::Before(end) => key >= &self.start[..] && key < &end[..],
            RangeEnd::Open => key >= &self.start[..],
        }
    }

    /// True if the range contains no key.
    pub fn is_empty(&self) -> bool {
        matches!(&self.end, RangeEnd::Before(end) if *end <= self.start)
    }

    /// The bounds for an ordered map; `None` for an empty range, on which such a map would panic.
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
    fn range_includes_its_start_and_excludes_its_end() {
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
    fn range_start_decides_the_key_space() {
        assert_eq!(range("/", b"\0").space(), SpaceId::User);
        assert_eq!(range("/moim", b"").space(), SpaceId::User);
        assert_eq!(range("/moim/", b"\0").space(), SpaceId::System);
        assert_eq!(range("/moim/x", b"").space(), SpaceId::System);
    }
}
