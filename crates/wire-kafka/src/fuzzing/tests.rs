//! The fuzz entries over a corpus that a fixed seed makes: a guard for builds without a fuzzer.

use fastrand::Rng;

use super::*;
use crate::records::BatchBuilder;

const ROUNDS: usize = 3_000;

fn noise(rng: &mut Rng, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; rng.usize(..most)];
    rng.fill(&mut bytes);
    bytes
}

/// A batch as a producer would send it.
fn some_batch(rng: &mut Rng) -> Vec<u8> {
    let codec = Compression::ALL[rng.usize(..5)];
    let mut builder = BatchBuilder::new(codec).producer(rng.i64(..), rng.i16(..), rng.i32(..));
    if rng.bool() {
        builder = builder.transactional(true);
    }
    for _ in 0..rng.usize(..6) {
        let (key, value, name) = (noise(rng, 20), noise(rng, 120), noise(rng, 8));
        let headers = [(name.as_slice(), None), (name.as_slice(), Some(key.as_slice()))];
        let count = rng.usize(..3);
        builder.push(
            rng.i64(-1..1 << 40),
            rng.bool().then_some(&key),
            rng.bool().then_some(&value),
            &headers[..count],
        );
    }
    builder.build().to_vec()
}

/// Changes bytes the way a fuzzer does: flips, cuts, repeats, and values at the edges of their range.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..rng.usize(1..4) {
        if bytes.is_empty() {
            return;
        }
        let at = rng.usize(..bytes.len());
        match rng.u8(..6) {
            0 => bytes[at] ^= 1 << rng.u8(..8),
            1 => bytes[at] = rng.u8(..),
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][rng.usize(..5)],
            3 => bytes.truncate(at),
            4 => {
                bytes.remove(at);
            }
            _ => {
                let end = (at + rng.usize(..32)).min(bytes.len());
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
        }
    }
}

#[test]
fn record_batches_from_a_fixed_seed_never_panic() {
    let mut rng = Rng::with_seed(0x6d6f_696d);
    for _ in 0..ROUNDS {
        record_batch(&noise(&mut rng, 200));
        let mut batch = some_batch(&mut rng);
        record_batch(&batch);
        mutate(&mut rng, &mut batch);
        record_batch(&batch);
    }
}

#[test]
fn a_corpus_reaches_the_code_behind_the_checksum() {
    let mut rng = Rng::with_seed(1);
    let limits = ValidateLimits { max_decompressed_bytes: LIMIT, require_keys: false };
    let good =
        (0..200).filter(|_| records::validate_batch(&Bytes::from(some_batch(&mut rng)), &limits).is_ok());
    assert!(good.count() > 40, "a corpus of refused batches tests nothing");
}
