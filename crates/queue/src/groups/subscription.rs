//! Parses the topics of a consumer's subscription.
//!
//! The bytes come from clients and are opaque to the protocol; they are parsed only to know which topics a group
//! still subscribes to. Bytes that cannot be parsed mean "unknown", never "none".

use std::collections::BTreeSet;
use std::sync::Arc;

/// The topics of one member's subscription (any version: they all begin alike), or `None` if it cannot be parsed.
pub(super) fn topics(metadata: &[u8]) -> Option<BTreeSet<Arc<str>>> {
    let (version, rest) = metadata.split_first_chunk::<2>()?;
    if i16::from_be_bytes(*version) < 0 {
        return None;
    }
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let count = usize::try_from(i32::from_be_bytes(*count)).ok()?;
    let mut topics = BTreeSet::new();
    for _ in 0..count {
        let (len, tail) = rest.split_first_chunk::<2>()?;
        let len = usize::try_from(i16::from_be_bytes(*len)).ok()?;
        let (name, tail) = tail.split_at_checked(len)?;
        topics.insert(Arc::from(std::str::from_utf8(name).ok()?));
        rest = tail;
    }
    Some(topics)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_parsed_and_truncated_bytes_rejected() {
        let whole = b"\0\x01\0\0\0\x02\0\x01a\0\x02bc\xff\xff\xff\xff";
        let names: Vec<_> = topics(whole).unwrap().into_iter().collect();
        assert_eq!(names, [Arc::from("a"), Arc::from("bc")]);
        for cut in 0..13 {
            assert_eq!(topics(&whole[..cut]), None, "cut at {cut}");
        }
        assert_eq!(topics(b"\0\0\x7f\xff\xff\xff"), None);
        assert_eq!(topics(b"\0\0\0\0\0\0"), Some(BTreeSet::new()));
    }
}
