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

/// The header of a request frame, without a client id.
fn frame_header(key: ApiKey, version: i16) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend_from_slice(&(key as i16).to_be_bytes());
    frame.extend_from_slice(&version.to_be_bytes());
    frame.extend_from_slice(&[0, 0, 0, 7, 0xff, 0xff]);
    if key.request_header_version(version) >= 2 {
        frame.push(0);
    }
    frame
}

/// A request frame whose body is mostly small numbers, which pass for lengths, flags and tags. It is cut where it makes
/// a whole request, if there is such a place: bytes left over are refused, and random ones always leave some.
fn some_frame(rng: &mut Rng, key: ApiKey, version: i16) -> Vec<u8> {
    // Null is 0 in one encoding, empty is 1 in the other.
    let (quiet, filler) = (rng.u8(..10), rng.u8(..2));
    let mut body: Vec<u8> = (0..rng.usize(8..70))
        .map(|_| match rng.u8(..10) {
            roll if roll < quiet => filler,
            9 => rng.u8(..),
            _ => rng.u8(..4),
        })
        .collect();
    let whole = Bytes::copy_from_slice(&body);
    let fits = |end: &usize| recode_request(key, version, whole.slice(..*end)).is_ok();
    if let Some(end) = (0..body.len()).rev().find(fits) {
        body.truncate(end);
    }
    let mut frame = frame_header(key, version);
    frame.append(&mut body);
    frame
}

/// Calls `f` with frames of every API in every version.
fn for_each_frame(seed: u64, rounds: usize, mut f: impl FnMut(&mut Rng, Vec<u8>)) {
    let mut rng = Rng::with_seed(seed);
    for key in ApiKey::ALL {
        for version in key.versions() {
            for _ in 0..rounds {
                let frame = some_frame(&mut rng, *key, version);
                f(&mut rng, frame);
            }
        }
    }
}

#[test]
fn requests_from_a_fixed_seed_never_panic() {
    for_each_frame(0x6b61_666b, 40, |rng, mut frame| {
        request_decoder(&frame);
        mutate(rng, &mut frame);
        request_decoder(&frame);
    });
    let mut rng = Rng::with_seed(2);
    for _ in 0..ROUNDS {
        request_decoder(&noise(&mut rng, 200));
    }
}

#[test]
fn lengths_at_the_edge_of_their_range_never_allocate() {
    // A count of 2^31 - 1, in both spellings, at every place of a short body.
    let edges: [&[u8]; 3] =
        [&[0x7f, 0xff, 0xff, 0xff], &[0xff, 0xff, 0xff, 0xff, 0x07], &[0xff, 0xff, 0xff, 0xff, 0x0f]];
    for key in ApiKey::ALL {
        for version in key.versions() {
            for (edge, zeros) in edges.iter().flat_map(|edge| (0..24).map(move |zeros| (edge, zeros))) {
                let mut frame = frame_header(*key, version);
                frame.resize(frame.len() + zeros, 0);
                frame.extend_from_slice(edge);
                frame.resize(frame.len() + 16, 0);
                request_decoder(&frame);
            }
        }
    }
}

#[test]
fn a_corpus_of_requests_reaches_every_api() {
    let mut read = std::collections::BTreeSet::new();
    for_each_frame(0x6b61_666b, 40, |_, frame| {
        let mut decoder = Decoder::new(Bytes::copy_from_slice(&frame));
        let header = RequestHeader::decode(&mut decoder).unwrap();
        let key = ApiKey::try_from(header.api_key).unwrap();
        let body = Bytes::copy_from_slice(&frame[frame.len() - decoder.remaining()..]);
        if recode_request(key, header.api_version, body).is_ok() {
            read.insert(key);
        }
    });
    let missed: Vec<_> = ApiKey::ALL.iter().filter(|key| !read.contains(key)).collect();
    assert!(missed.is_empty(), "never decoded: {missed:?}");
}
