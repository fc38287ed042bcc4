//! PFADD, PFCOUNT, PFMERGE: counting without remembering.
//!
//! The value is a string in Redis's layout: `HYLL`, the form, the cached count, then 16,384 registers of six bits. We
//! write the dense form; the sparse one is read, so that values from a Redis work.

use super::flag::{DENYOOM, FAST, MAY_REPLICATE, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;

const GROUP: &str = "hyperloglog";

/// The commands of this file.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("pfadd", -2, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Adds elements to a count", pfadd),
    Spec::new("pfcount", -2, READONLY | MAY_REPLICATE, Keys::ALL, GROUP, "Says about how many different elements there were", pfcount),
    Spec::new("pfmerge", -2, WRITE | DENYOOM, Keys::ALL, GROUP, "Joins counts", pfmerge),
];

const REGISTERS: usize = 1 << 14;
const HEADER: usize = 16;
const DENSE_BYTES: usize = HEADER + REGISTERS * 6 / 8;
/// The highest value of a register.
const RANKS: usize = 64 - 14 + 1;

/// The registers, one byte each.
struct Counter {
    registers: Box<[u8; REGISTERS]>,
}

impl Counter {
    fn new() -> Counter {
        Counter { registers: Box::new([0; REGISTERS]) }
    }

    /// Reads a value in either form.
    fn read(bytes: &[u8]) -> Result<Counter, Error> {
        let wrong = || Error::coded("WRONGTYPE Key is not a valid HyperLogLog string value.");
        let broken = || Error::coded("INVALIDOBJ Corrupted HLL object detected");
        let (header, body) = bytes.split_at_checked(HEADER).ok_or_else(wrong)?;
        if &header[..4] != b"HYLL" || header[4] > 1 {
            return Err(wrong());
        }
        let mut counter = Counter::new();
        if header[4] == 0 {
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

    /// The dense form. The cached count is marked as old.
    fn write(&self) -> Vec<u8> {
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

    /// Adds an element; true when a register changed.
    fn add(&mut self, element: &[u8]) -> bool {
        let hash = murmur(element);
        let register = &mut self.registers[hash as usize & (REGISTERS - 1)];
        let rank = ((hash >> 14 | 1 << 50).trailing_zeros() + 1) as u8;
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

    /// Ertl's estimator, which needs no corrections for small or large counts.
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

/// MurmurHash64A with the seed Redis uses: the registers must mean the same everywhere.
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
    let new = stored.is_none();
    let mut counter = stored.map_or_else(|| Ok(Counter::new()), Counter::read)?;
    let changed = elements.iter().skip(2).fold(new, |changed, element| counter.add(element) | changed);
    if changed {
        let bytes = counter.write();
        let expires_at = ctx.db.expiry(key).flatten();
        ctx.db.set_str(key, &bytes, expires_at);
        ctx.changed_with(key, class::STRING, "pfadd");
    }
    ctx.out.integer(i64::from(changed));
    Ok(())
}

/// The counts at the keys, joined.
fn joined(ctx: &Ctx<'_>) -> Result<Counter, Error> {
    let mut all = Counter::new();
    for key in ctx.args.iter().skip(1) {
        if let Some(bytes) = typed::peek_string(ctx.db, key)? {
            all.merge(&Counter::read(bytes)?);
        }
    }
    Ok(all)
}

fn pfcount(ctx: &mut Ctx<'_>) -> Done {
    let count = joined(ctx)?.count();
    ctx.out.integer(count as i64);
    Ok(())
}

fn pfmerge(ctx: &mut Ctx<'_>) -> Done {
    let (key, bytes) = (ctx.arg(1), joined(ctx)?.write());
    let expires_at = ctx.db.expiry(key).flatten();
    ctx.db.set_str(key, &bytes, expires_at);
    ctx.changed_with(key, class::STRING, "pfadd");
    ctx.out.ok();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_near_and_survive_writing() {
        let mut counter = Counter::new();
        for number in 0..100_000u32 {
            counter.add(number.to_string().as_bytes());
            if [10, 1000, 99_999].contains(&number) {
                let (count, real) = (counter.count() as f64, f64::from(number + 1));
                assert!((count - real).abs() / real < 0.02, "{count} for {real}");
            }
        }
        let again = Counter::read(&counter.write()).unwrap();
        assert_eq!(again.registers, counter.registers);
    }

    #[test]
    fn what_is_no_count_is_refused() {
        assert!(Counter::read(b"HYLL").is_err());
        assert!(Counter::read(&[0; DENSE_BYTES]).is_err());
        let mut sparse = b"HYLL\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        assert!(Counter::read(&sparse).is_err());
        // One run of zeros over all registers.
        sparse.extend_from_slice(&[0x7f, 0xff]);
        assert_eq!(Counter::read(&sparse).unwrap().count(), 0);
    }
}
