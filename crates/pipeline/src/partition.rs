//! The partition of a key, computed with murmur2 as Kafka's default partitioner does: a partition chosen here is the
//! one that an ordinary producer chooses with the same partition count.
//!
//! The choice is made once and kept (see [`crate::store::Store::pin`]). Otherwise a growing partition count would
//! move a client's messages in the middle of its run, away from its unread messages.

/// The partition of a key, given the partition count.
pub fn of(key: &[u8], partitions: i32) -> i32 {
    // Kafka's `toPositive`: clears the sign bit.
    (murmur2(key).cast_signed() & 0x7fff_ffff) % partitions.max(1)
}

fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    const SEED: u32 = 0x9747_b28c;
    let mut h = SEED ^ (data.len() as u32);
    let mut chunks = data.chunks_exact(4);
    for chunk in &mut chunks {
        let mut k = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]).wrapping_mul(M);
        k ^= k >> 24;
        h = h.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    let rest = chunks.remainder();
    if !rest.is_empty() {
        for (at, byte) in rest.iter().enumerate() {
            h ^= u32::from(*byte) << (8 * at);
        }
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^ (h >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn murmur2_matches_kafka() {
        for (key, hash) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()).cast_signed(), hash, "{key}");
        }
    }

    #[test]
    fn every_key_has_a_partition() {
        for n in 0..1_000 {
            let key = format!("client-{n}");
            assert!((0..7).contains(&of(key.as_bytes(), 7)));
            assert_eq!(of(key.as_bytes(), 0), 0);
        }
    }
}
