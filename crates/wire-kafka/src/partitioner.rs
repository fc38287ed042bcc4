//! Which partition a keyed record goes to, as the Java client decides it.
//!
//! Owns the 32-bit murmur2 variant Kafka clients share. Invariant: the answer for a key and a partition count never
//! changes; a different answer would split a key's history over two partitions.

const SEED: u32 = 0x9747_b28c;
const MULTIPLIER: u32 = 0x5bd1_e995;
const SHIFT: u32 = 24;

/// The murmur2 hash of `data` with the seed of the Java client.
pub fn murmur2(data: &[u8]) -> u32 {
    // Lengths beyond 32 bits do not exist on the wire; the hash folds in the low half, as an `int` length would.
    let mut hash = SEED ^ data.len() as u32;
    let (words, tail) = data.as_chunks::<4>();
    for word in words {
        let mut mixed = u32::from_le_bytes(*word).wrapping_mul(MULTIPLIER);
        mixed ^= mixed >> SHIFT;
        hash = hash.wrapping_mul(MULTIPLIER) ^ mixed.wrapping_mul(MULTIPLIER);
    }
    if !tail.is_empty() {
        for (at, byte) in tail.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * at);
        }
        hash = hash.wrapping_mul(MULTIPLIER);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(MULTIPLIER);
    hash ^ (hash >> 15)
}

/// The partition of a keyed record in a topic of `partitions` partitions.
///
/// The sign bit is cleared, not negated: that is what the other clients do, and keys must land where theirs do.
///
/// # Panics
/// When `partitions` is not positive: a topic always has a partition.
pub fn partition_for_key(key: &[u8], partitions: i32) -> i32 {
    assert!(partitions > 0, "a topic has at least one partition");
    (murmur2(key) & 0x7fff_ffff) as i32 % partitions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn murmur2_gives_the_values_other_clients_give() {
        let cases: &[(&[u8], i32)] = &[
            (b"21", -973_932_308),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            (b"abc", 479_470_107),
            (b"", 275_646_681),
        ];
        for (key, want) in cases {
            assert_eq!(murmur2(key) as i32, *want, "{key:?}");
        }
    }

    #[test]
    fn a_negative_hash_loses_its_sign_bit() {
        assert_eq!(partition_for_key(b"foobar", 1000), (-790_332_482_i32 & 0x7fff_ffff) % 1000);
        assert_eq!(partition_for_key(b"abc", 1000), 107);
        assert_eq!(partition_for_key(b"abc", 1), 0);
    }
}
