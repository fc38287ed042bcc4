//! Stream values: entries, groups, trimming and memory.

use super::*;

fn id(ms: u64, seq: u64) -> Id {
    Id { ms, seq }
}

fn stream(count: u64, limits: &Limits) -> Stream {
    let mut stream = Stream::default();
    for ms in 1..=count {
        let value = (ms * 7).to_string();
        let second: &[u8] = if ms % 5 == 0 { b"other" } else { b"n" };
        stream.push(id(ms, ms % 3), &[(b"f", value.as_bytes()), (second, b"x")], limits);
    }
    stream
}

fn ids<'a>(entries: impl Iterator<Item = Entry<'a>>) -> Vec<u64> {
    entries.map(|entry| entry.id.ms).collect()
}

/// Checks the invariants and the contents of a stream.
fn check(stream: &Stream, wanted: &[u64]) {
    assert_eq!(ids(stream.range(Id::MIN, Id::MAX)), wanted);
    let mut back = ids(stream.range_back(Id::MIN, Id::MAX));
    back.reverse();
    assert_eq!(back, wanted);
    assert_eq!(stream.len(), wanted.len() as u64);
    assert!(stream.blocks().all(|(_, block)| block.live() > 0));
    assert_eq!(stream.heap, stream.blocks().map(|(_, block)| block.heap_size()).sum::<usize>());
}

#[test]
fn ranges_in_both_directions_across_blocks() {
    let limits = Limits { stream_entries: 4, ..Limits::default() };
    let stream = stream(30, &limits);
    assert_eq!(stream.blocks().len(), 8);
    check(&stream, &(1..=30).collect::<Vec<_>>());
    for start in 0..32 {
        for end in 0..32 {
            let wanted: Vec<u64> = (1..=30).filter(|ms| (start..=end).contains(ms)).collect();
            let (from, to) = (id(start, 0), id(end, u64::MAX));
            assert_eq!(ids(stream.range(from, to)), wanted, "{start} {end}");
            let back: Vec<u64> = wanted.into_iter().rev().collect();
            assert_eq!(ids(stream.range_back(from, to)), back, "{start} {end}");
        }
    }
    let entry = stream.get(id(10, 1)).unwrap();
    let pairs: Vec<_> =
        entry.pairs().map(|(f, v)| [f.as_bytes().to_vec(), v.as_bytes().to_vec()].concat()).collect();
    assert_eq!(pairs, [b"f70".to_vec(), b"otherx".to_vec()]);
    assert!(stream.get(id(10, 0)).is_none());
}

#[test]
fn delete_and_trim_keep_other_entries() {
    let limits = Limits { stream_entries: 4, ..Limits::default() };
    let mut stream = stream(20, &limits);
    assert!(stream.delete(id(6, 0)) && !stream.delete(id(6, 0)));
    for ms in 9..=12 {
        assert!(stream.delete(id(ms, ms % 3)));
    }
    let mut left: Vec<u64> = (1..=20).filter(|ms| *ms != 6 && !(9..=12).contains(ms)).collect();
    check(&stream, &left);
    assert_eq!(stream.max_deleted, id(12, 0));
    // Whole blocks only: 15 entries, of which the first four may be removed.
    assert_eq!(stream.trim(Keep::Newest(10), true, 0), 4);
    left.drain(..4);
    check(&stream, &left);
    assert_eq!(stream.trim(Keep::Newest(7), true, 2), 0);
    assert_eq!(stream.trim(Keep::Newest(7), false, 0), 4);
    left.drain(..4);
    check(&stream, &left);
    assert_eq!(stream.trim(Keep::From(id(16, 0)), false, 0), 2);
    left.drain(..2);
    check(&stream, &left);
    assert_eq!(stream.trim(Keep::Newest(0), false, 0), left.len() as u64);
    check(&stream, &[]);
    assert_eq!((stream.first_id(), stream.last_id, stream.added), (Id::MIN, id(20, 2), 20));
}

#[test]
fn next_and_previous_id_saturate_at_the_ends() {
    assert_eq!(id(1, u64::MAX).next(), Some(id(2, 0)));
    assert_eq!(id(2, 0).previous(), Some(id(1, u64::MAX)));
    assert_eq!((Id::MAX.next(), Id::MIN.previous()), (None, None));
}
