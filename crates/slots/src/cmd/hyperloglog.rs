//! HyperLogLog: PFADD, PFCOUNT, PFMERGE.
//!
//! The value is a string in the layout of Redis: `HYLL`, the encoding, the cached cardinality, then 16,384 registers.
//! The dense encoding has six bits per register; the sparse encoding has runs of equal registers and is used while it
//! is short (`hll-sparse-max-bytes`) and no register exceeds 32. A value never returns from dense to sparse.

use super::flag::{ADMIN, DENYOOM, FAST, MAY_REPLICATE, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;

const GROUP: &str = "hyperloglog";

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("pfadd", -2, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Adds elements to a HyperLogLog key.", pfadd),
    Spec::new("pfcount", -2, READONLY | MAY_REPLICATE, Keys::ALL, GROUP, "Returns the approximated cardinality of the set(s) observed by the HyperLogLog key(s).", pfcount),
    Spec::new("pfmerge", -2, WRITE | DENYOOM, Keys::ALL, GROUP, "Merges one or more HyperLogLog values into a single key.", pfmerge),
    Spec::new("pfdebug", 3, WRITE | DENYOOM | ADMIN, Keys::Range { first: 2, last: 2, step: 1 }, GROUP, "Internal commands for debugging HyperLogLog values.", pfdebug),
    Spec::new("pfselftest", 1, ADMIN, Keys::None, GROUP, "An internal command for testing HyperLogLog values.", pfselftest),
];

const REGISTERS: usize = 1 << 14;
const HEADER: usize = 16;
const DENSE_BYTES: usize = HEADER + REGISTERS * 6 / 8;
/// Maximum value of a register.
const RANKS: usize = 64 - 14 + 1;

/// Maximum register value of the sparse encoding.
const SPARSE_RANKS: u8 = 32;

/// The registers, one byte each.
struct Counter {
    registers: Box<[u8; REGISTERS]>,
    is_dense: bool,
}

impl Counter {
    fn new() -> Counter {
        Counter { registers: Box::new([0; REGISTERS]), is_dense: false }
    }

    /// Decodes a value in either encoding.
    fn read(bytes: &[u8]) -> Result<Counter, Error> {
        let wrong = || Error::coded("WRONGTYPE Key is not a valid HyperLogLog string value.");
        let broken = || Error::coded("INVALIDOBJ Corrupted HLL object detected");
        let (header, body) = bytes.split_at_checked(HEADER).ok_or_else(wrong)?;
        if &header[..4] != b"HYLL" || header[4] > 1 {
            return Err(wrong());
        }
        let mut counter = Counter::new();
        counter.is_dense = header[4] == 0;
        if counter.is_dense {
            if bytes.len() != DENSE_BYTES {
                return Err(wrong());
            }
            for (at, register) in counter.registers.iter_mut().enumerate() {
                let (byte, shift) = (at * 6 / 8, at * 6 % 8);
                let next = body.get(byte + 1).copied().unwrap_or(0);
                *register = ((u16::from_le_bytes([body[byte], next]) >> shift) & 0x3f) as u8;
            }
            return Ok(counter);
        }
        let (mut at, mut body) = (0, body.iter().copied());
        while let Some(code) = body.next() {
            let (run, value) = match code >> 6 {
                0 => (usize::from(code & 0x3f) + 1, 0),
                1 => {
                    let low = body.next().ok_or_else(broken)?;
                    ((usize::from(code & 0x3f) << 8 | usize::from(low)) + 1, 0)
                }
                _ => (usize::from(code & 3) + 1, (code >> 2 & 0x1f) + 1),
            };
            counter.registers.get_mut(at..at + run).ok_or_else(broken)?.fill(value);
            at += run;
        }
        if at == REGISTERS { Ok(counter) } else { Err(broken()) }
    }

    /// Encodes as sparse if that takes at most `sparse_max` bytes, otherwise dense. The cached cardinality is marked
    /// stale.
    fn write(&self, sparse_max: usize) -> Vec<u8> {
        match self.sparse(sparse_max) {
            Some(bytes) if !self.is_dense => bytes,
            _ => self.dense(),
        }
    }

    /// The sparse encoding: up to 64 zero registers in one byte, up to 16,384 in two, up to four of another value in
    /// one.
    fn sparse(&self, most: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; HEADER];
        bytes[..5].copy_from_slice(b"HYLL\x01");
        bytes[15] = 0x80;
        for run in self.registers.chunk_by(|a, b| a == b) {
            match (run[0], run.len()) {
                (0, length @ ..=64) => bytes.push(length as u8 - 1),
                (0, length) => {
                    bytes.extend_from_slice(&[0x40 | ((length - 1) >> 8) as u8, (length - 1) as u8])
                }
                (value @ ..=SPARSE_RANKS, _) => {
                    bytes.extend(run.chunks(4).map(|part| 0x80 | (value - 1) << 2 | (part.len() - 1) as u8));
                }
                _ => return None,
            }
            if bytes.len() > most {
                return None;
            }
        }
        Some(bytes)
    }

    fn dense(&self) -> Vec<u8> {
        let mut bytes = vec![0; DENSE_BYTES];
        bytes[..4].copy_from_slice(b"HYLL");
        bytes[15] = 0x80;
        for (at, &register) in self.registers.iter().enumerate() {
            let (byte, shift) = (HEADER + at * 6 / 8, at * 6 % 8);
            let bits = u16::from(register) << shift;
            bytes[byte] |= bits as u8;
            if shift > 2 {
                bytes[byte + 1] |= (bits >> 8) as u8;
            }
        }
        bytes
    }

    /// Adds an element; returns true if a register changed.
    fn add(&mut self, element: &[u8]) -> bool {
        let (at, rank) = register_of(element);
        let register = &mut self.registers[at];
        let higher = rank > *register;
        if higher {
            *register = rank;
        }
        higher
    }

    fn merge(&mut self, other: &Counter) {
        for (own, other) in self.registers.iter_mut().zip(other.registers.iter()) {
            *own = (*own).max(*other);
        }
    }

    /// Cardinality by Ertl's estimator, which needs no bias correction for small or large counts.
    fn count(&self) -> u64 {
        let mut histogram = [0u32; RANKS + 1];
        for &register in self.registers.iter() {
            histogram[usize::from(register).min(RANKS)] += 1;
        }
        let all = REGISTERS as f64;
        let mut sum = all * tau((all - f64::from(histogram[RANKS])) / all);
        for rank in (1..RANKS).rev() {
            sum = 0.5 * (sum + f64::from(histogram[rank]));
        }
        sum += all * sigma(f64::from(histogram[0]) / all);
        (0.721_347_520_444_481_7 * all * all / sum).round() as u64
    }
}

/// Register index and rank of an element.
fn register_of(element: &[u8]) -> (usize, u8) {
    let hash = murmur(element);
    (hash as usize & (REGISTERS - 1), ((hash >> 14 | 1 << 50).trailing_zeros() + 1) as u8)
}

/// A register of the dense encoding.
fn dense_register(bytes: &[u8], at: usize) -> u8 {
    let (byte, shift) = (HEADER + at * 6 / 8, at * 6 % 8);
    let next = bytes.get(byte + 1).copied().unwrap_or(0);
    ((u16::from_le_bytes([bytes[byte], next]) >> shift) & 0x3f) as u8
}

fn set_dense_register(bytes: &mut [u8], at: usize, rank: u8) {
    let (byte, shift) = (HEADER + at * 6 / 8, at * 6 % 8);
    let (mask, bits) = (0x3fu16 << shift, u16::from(rank) << shift);
    bytes[byte] = bytes[byte] & !(mask as u8) | bits as u8;
    if shift > 2 {
        bytes[byte + 1] = bytes[byte + 1] & !((mask >> 8) as u8) | (bits >> 8) as u8;
    }
}

fn is_dense(bytes: &[u8]) -> bool {
    bytes.len() == DENSE_BYTES && bytes.starts_with(b"HYLL\0")
}

fn sigma(mut x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    let (mut weight, mut sum) = (1.0, x);
    loop {
        x *= x;
        let before = sum;
        sum += x * weight;
        weight += weight;
        if sum == before {
            return sum;
        }
    }
}

fn tau(mut x: f64) -> f64 {
    if x == 0.0 || x == 1.0 {
        return 0.0;
    }
    let (mut weight, mut sum) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = sum;
        weight *= 0.5;
        sum -= (1.0 - x) * (1.0 - x) * weight;
        if sum == before {
            return sum / 3.0;
        }
    }
}

/// MurmurHash64A with the seed of Redis: the registers must mean the same everywhere.
fn murmur(data: &[u8]) -> u64 {
    const M: u64 = 0xc6a4_a793_5bd1_e995;
    let mut hash = 0xadc8_3b19u64 ^ (data.len() as u64).wrapping_mul(M);
    let mut words = data.chunks_exact(8);
    for word in words.by_ref() {
        let mut k = word.try_into().map_or(0, u64::from_le_bytes).wrapping_mul(M);
        k ^= k >> 47;
        hash = (hash ^ k.wrapping_mul(M)).wrapping_mul(M);
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        hash = (hash ^ u64::from_le_bytes(last)).wrapping_mul(M);
    }
    hash ^= hash >> 47;
    hash = hash.wrapping_mul(M);
    hash ^ hash >> 47
}

fn pfadd(ctx: &mut Ctx<'_>) -> Done {
    let (key, elements) = (ctx.arg(1), ctx.args);
    let stored = typed::peek_string(ctx.db, key)?;
    if let Some(bytes) = stored.filter(|bytes| is_dense(bytes)) {
        let places = elements.iter().skip(2).map(register_of);
        let higher: Vec<_> = places.filter(|(at, rank)| *rank > dense_register(bytes, *at)).collect();
        return raise(ctx, key, &higher);
    }
    let new = stored.is_none();
    let mut counter = stored.map_or_else(|| Ok(Counter::new()), Counter::read)?;
    let changed = elements.iter().skip(2).fold(new, |changed, element| counter.add(element) | changed);
    if changed {
        let bytes = counter.write(sparse_max(ctx));
        let expires_at = ctx.db.expiry(key).flatten();
        ctx.db.set_str(key, &bytes, expires_at);
        ctx.changed_with(key, class::STRING, "pfadd");
    }
    ctx.out.integer(i64::from(changed));
    Ok(())
}

/// Raises registers of a dense value in place.
fn raise(ctx: &mut Ctx<'_>, key: &[u8], higher: &[(usize, u8)]) -> Done {
    if !higher.is_empty() {
        ctx.db.edit_str(key, |bytes| {
            for (at, rank) in higher {
                let rank = (*rank).max(dense_register(bytes, *at));
                set_dense_register(bytes, *at, rank);
            }
            bytes[15] |= 0x80;
        });
        ctx.changed_with(key, class::STRING, "pfadd");
    }
    ctx.out.integer(i64::from(!higher.is_empty()));
    Ok(())
}

fn sparse_max(ctx: &Ctx<'_>) -> usize {
    usize::try_from(ctx.shared.settings.number("hll-sparse-max-bytes")).unwrap_or(0)
}

/// The union of the HyperLogLogs at the keys.
fn merged(ctx: &Ctx<'_>) -> Result<Counter, Error> {
    let mut all = Counter::new();
    for key in ctx.args.iter().skip(1) {
        if let Some(bytes) = typed::peek_string(ctx.db, key)? {
            let one = Counter::read(bytes)?;
            all.merge(&one);
            all.is_dense |= one.is_dense;
        }
    }
    Ok(all)
}

fn pfcount(ctx: &mut Ctx<'_>) -> Done {
    let count = merged(ctx)?.count();
    ctx.out.integer(count as i64);
    Ok(())
}

fn pfmerge(ctx: &mut Ctx<'_>) -> Done {
    let (key, bytes) = (ctx.arg(1), merged(ctx)?.write(sparse_max(ctx)));
    let expires_at = ctx.db.expiry(key).flatten();
    ctx.db.set_str(key, &bytes, expires_at);
    ctx.changed_with(key, class::STRING, "pfadd");
    ctx.out.ok();
    Ok(())
}

fn pfdebug(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(2);
    let bytes = typed::peek_string(ctx.db, key)?;
    let bytes = bytes.ok_or_else(|| Error::err("The specified key does not exist"))?;
    let mut counter = Counter::read(bytes)?;
    match ctx.arg(1).to_ascii_lowercase().as_slice() {
        b"encoding" => ctx.out.simple(if counter.is_dense { "dense" } else { "sparse" }),
        b"getreg" => {
            ctx.out.array(REGISTERS);
            counter.registers.iter().for_each(|register| ctx.out.integer(i64::from(*register)));
        }
        b"todense" => {
            let was_sparse = !std::mem::replace(&mut counter.is_dense, true);
            if was_sparse {
                let expires_at = ctx.db.expiry(key).flatten();
                ctx.db.set_str(key, &counter.dense(), expires_at);
                ctx.changed(key);
            }
            ctx.out.integer(i64::from(was_sparse));
        }
        _ => {
            let sub = String::from_utf8_lossy(ctx.arg(1)).into_owned();
            return Err(Error::err(format_args!("Unknown PFDEBUG subcommand '{sub}'")));
        }
    }
    Ok(())
}

/// PFSELFTEST: both encodings and in-place updates must agree, and the error must be small.
fn pfselftest(ctx: &mut Ctx<'_>) -> Done {
    let mut counter = Counter::new();
    let mut bytes = counter.dense();
    for number in 0..10_000u32 {
        let element = number.to_le_bytes();
        let (at, rank) = register_of(&element);
        counter.add(&element);
        let highest = rank.max(dense_register(&bytes, at));
        set_dense_register(&mut bytes, at, highest);
    }
    let read = Counter::read(&bytes)?;
    let error = (counter.count() as f64 - 10_000.0).abs() / 10_000.0;
    if read.registers != counter.registers || error > 0.05 {
        return Err(Error::err(format_args!("TESTFAILED the count is off by {error}")));
    }
    ctx.out.ok();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cardinality_is_accurate_after_encoding_round_trip() {
        let mut counter = Counter::new();
        for number in 0..100_000u32 {
            counter.add(number.to_string().as_bytes());
            if [10, 1000, 99_999].contains(&number) {
                let (count, real) = (counter.count() as f64, f64::from(number + 1));
                assert!((count - real).abs() / real < 0.02, "{count} for {real}");
            }
        }
        let again = Counter::read(&counter.write(3_000)).unwrap();
        assert_eq!(again.registers, counter.registers);
    }

    #[test]
    fn sparse_encoding_is_small_for_few_elements() {
        let mut counter = Counter::new();
        let mut was_sparse = true;
        for number in 0..5_000u32 {
            counter.add(number.to_string().as_bytes());
            if number > 30 && number % 197 != 0 {
                continue;
            }
            let bytes = counter.write(3_000);
            let again = Counter::read(&bytes).unwrap();
            assert_eq!(again.registers, counter.registers, "{number}");
            assert!(again.is_dense || bytes.len() <= 3_000);
            assert!(was_sparse || again.is_dense, "{number}");
            was_sparse = !again.is_dense;
            if number == 20 {
                assert!(bytes.len() < 100, "{}", bytes.len());
            }
        }
        assert!(!was_sparse);
        let mut dense = counter.dense();
        let (at, rank) = (16_383, 50);
        set_dense_register(&mut dense, at, rank);
        assert_eq!(dense_register(&dense, at), rank);
    }

    #[test]
    fn invalid_hyperloglog_is_rejected() {
        assert!(Counter::read(b"HYLL").is_err());
        assert!(Counter::read(&[0; DENSE_BYTES]).is_err());
        let mut sparse = b"HYLL\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        assert!(Counter::read(&sparse).is_err());
        // One run of zeros over all registers.
        sparse.extend_from_slice(&[0x7f, 0xff]);
        assert_eq!(Counter::read(&sparse).unwrap().count(), 0);
    }
}
