//! History, compaction and reclamation of a key space.

use super::*;

fn put(space: &mut Space, key: &'static str, value: &'static str) {
    space.put(key.as_bytes(), Bytes::from_static(value.as_bytes()), LeaseId::NONE);
    space.commit();
}

fn delete(space: &mut Space, key: &'static str) {
    assert!(space.delete(key.as_bytes()).is_some());
    space.commit();
}

fn value_at(space: &Space, key: &str, revision: i64) -> Option<String> {
    let value = space.get_at(key.as_bytes(), revision)?.version.value.as_ref()?.bytes();
    Some(String::from_utf8(value.to_vec()).unwrap())
}

#[test]
fn reads_after_compaction_do_not_depend_on_reclamation() {
    let mut space = Space::new();
    for round in 0..40 {
        put(&mut space, "hot", ["a", "b", "c"][round % 3]);
        if round % 4 == 0 {
            put(&mut space, "gone", "x");
            delete(&mut space, "gone");
        }
        if round == 3 {
            put(&mut space, "cold", "y");
        }
    }
    let end = space.revision();
    let facts = |space: &Space, from: i64| -> Vec<_> {
        let at = |revision| ["hot", "gone", "cold"].map(|key| value_at(space, key, revision));
        (from..=end).map(at).collect()
    };
    for compact in [3, 17, 18, end - 1, end] {
        let expected = facts(&space, compact);
        space.compact(compact);
        loop {
            let more = space.reclaim(1);
            assert_eq!(facts(&space, compact), expected, "compacted at {compact}");
            if !more {
                break;
            }
        }
        assert!(space.log().iter().all(|change| change.version.revision >= compact));
    }
}

#[test]
fn deleted_key_is_removed_once_compacted() {
    let mut space = Space::new();
    put(&mut space, "a", "value"); // 2
    delete(&mut space, "a"); // 3
    put(&mut space, "b", "value"); // 4
    space.compact(3);
    while space.reclaim(16) {}
    assert!(space.find(b"a").is_some(), "a watch may start at the deletion");
    space.compact(4);
    while space.reclaim(16) {}
    assert_eq!(space.keys.iter().count(), 1);
    assert_eq!(space.live_keys(), 1);
    assert_eq!(space.bytes(), 1 + 5 + OVERHEAD_BYTES);
}

#[test]
fn size_counts_retained_versions() {
    let mut space = Space::new();
    for _ in 0..100 {
        put(&mut space, "k", "0123456789");
    }
    let one = 1 + 10 + OVERHEAD_BYTES;
    assert_eq!(space.bytes(), 100 * one);
    space.compact(space.revision());
    while space.reclaim(7) {}
    assert_eq!(space.bytes(), 2 * one, "the newest, and the one before it that a log end leaves behind");
}

#[test]
fn changes_within_a_revision_keep_their_order() {
    let mut space = Space::new();
    space.put(b"a", Bytes::from_static(b"1"), LeaseId::NONE);
    space.delete(b"a");
    space.put(b"b", Bytes::from_static(b"2"), LeaseId::NONE);
    assert_eq!((space.revision(), space.view_revision()), (1, 2));
    space.commit();
    assert_eq!(space.revision(), 2);
    let subs: Vec<_> =
        space.log().iter().map(|change| (change.version.revision, change.version.sub)).collect();
    assert_eq!(subs, [(2, 0), (2, 1), (2, 2)]);
    assert!(space.current(b"a").is_none());
    space.commit();
    assert_eq!(space.revision(), 2, "an empty group has no revision");
}
