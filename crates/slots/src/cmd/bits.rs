//! Bitmap commands: SETBIT, GETBIT, BITCOUNT, BITPOS, BITOP. BITFIELD is in `bitfield`.
//!
//! Bit 0 is the most significant bit of the first byte.

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;

const GROUP: &str = "bitmap";
/// Maximum string length for SETBIT.
const MAX_BYTES: i64 = 512 << 20;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("setbit", 4, WRITE | DENYOOM, Keys::ONE, GROUP, "Sets or clears the bit at offset of the string value. Creates the key if it doesn't exist.", setbit),
    Spec::new("getbit", 3, READONLY | FAST, Keys::ONE, GROUP, "Returns a bit value by offset.", getbit),
    Spec::new("bitcount", -2, READONLY, Keys::ONE, GROUP, "Counts the number of set bits (population counting) in a string.", bitcount),
    Spec::new("bitpos", -3, READONLY, Keys::ONE, GROUP, "Finds the first set (1) or clear (0) bit in a string.", bitpos),
    Spec::new("bitop", -4, WRITE | DENYOOM, Keys::Range { first: 2, last: -1, step: 1 }, GROUP, "Performs bitwise operations on multiple strings, and stores the result.", bitop),
];

/// Parses a bit offset. `#n` counts in fields of `width` bits, where allowed.
pub(crate) fn bit_offset(text: &[u8], width: Option<u32>) -> Result<u64, Error> {
    let bad = || Error::err("bit offset is not an integer or out of range");
    let (text, unit) = match (text.strip_prefix(b"#"), width) {
        (Some(rest), Some(width)) => (rest, i64::from(width)),
        _ => (text, 1),
    };
    let offset = crate::ctx::int(text).ok().and_then(|offset| offset.checked_mul(unit)).ok_or_else(bad)?;
    match u64::try_from(offset) {
        Ok(bit) if offset >> 3 < MAX_BYTES => Ok(bit),
        _ => Err(bad()),
    }
}

fn setbit(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let offset = bit_offset(ctx.arg(2), None)?;
    let on = match ctx.arg(3) {
        b"0" => false,
        b"1" => true,
        _ => return Err(Error::err("bit is not an integer or out of range")),
    };
    let (byte, mask) = ((offset >> 3) as usize, 0x80u8 >> (offset & 7));
    let old = match typed::peek_string(ctx.db, key)? {
        Some(string) if byte < string.len() => Some(string[byte] & mask != 0),
        _ => None,
    };
    if old != Some(on) {
        ctx.db.edit_str(key, |string| {
            if string.len() <= byte {
                string.resize(byte + 1, 0);
            }
            if on { string[byte] |= mask } else { string[byte] &= !mask }
        });
        ctx.changed_with(key, class::STRING, "setbit");
    }
    ctx.out.integer(i64::from(old.unwrap_or(false)));
    Ok(())
}

fn getbit(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let offset = bit_offset(ctx.arg(2), None)?;
    let byte =
        typed::peek_string(ctx.db, key)?.and_then(|string| string.get((offset >> 3) as usize)).copied();
    let on = byte.is_some_and(|byte| byte & (0x80 >> (offset & 7)) != 0);
    ctx.out.integer(i64::from(on));
    Ok(())
}

/// Parses BIT or BYTE.
fn counts_bits(word: &[u8]) -> Result<bool, Error> {
    match word {
        word if word.eq_ignore_ascii_case(b"BIT") => Ok(true),
        word if word.eq_ignore_ascii_case(b"BYTE") => Ok(false),
        _ => Err(Error::SYNTAX),
    }
}

/// A bit range from bounds in units of `unit` bits; `None` if it is empty.
fn bit_range(start: i64, end: i64, bytes: usize, unit: i64) -> Option<(usize, usize)> {
    let total = bytes as i64 * 8 / unit;
    let from_end = |at: i64| if at < 0 { total.saturating_add(at).max(0) } else { at };
    let (start, end) = (from_end(start), from_end(end).min(total - 1));
    (start <= end).then(|| ((start * unit) as usize, ((end + 1) * unit) as usize))
}

/// Byte `at` with all bits outside `from` to `to` replaced by `outside`.
fn masked(string: &[u8], at: usize, from: usize, to: usize, outside: bool) -> u8 {
    let mut inside = 0xffu8;
    if at == from / 8 {
        inside &= 0xff >> (from % 8);
    }
    if at == (to - 1) / 8 {
        inside &= 0xff << (7 - (to - 1) % 8);
    }
    if outside { string[at] | !inside } else { string[at] & inside }
}

fn bitcount(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let Some(string) = typed::peek_string(ctx.db, key)? else {
        ctx.out.integer(0);
        return Ok(());
    };
    let range = match ctx.argc() {
        2 => bit_range(0, -1, string.len(), 8),
        4 | 5 => {
            let (start, end) = (ctx.int(2)?, ctx.int(3)?);
            if start < 0 && end < 0 && start > end {
                None
            } else {
                let unit = if ctx.argc() == 5 && counts_bits(ctx.arg(4))? { 1 } else { 8 };
                bit_range(start, end, string.len(), unit)
            }
        }
        _ => return Err(Error::SYNTAX),
    };
    let count = range.map_or(0, |(from, to)| {
        let (first, last) = (from / 8, (to - 1) / 8);
        if first == last {
            return u64::from(masked(string, first, from, to, false).count_ones());
        }
        let edges = masked(string, first, from, to, false).count_ones()
            + masked(string, last, from, to, false).count_ones();
        u64::from(edges) + count_ones(&string[first + 1..last])
    });
    ctx.out.integer(count as i64);
    Ok(())
}

fn count_ones(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    let whole: u64 = words
        .by_ref()
        .map(|word| u64::from(word.try_into().map_or(0, u64::from_ne_bytes).count_ones()))
        .sum();
    whole + words.remainder().iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>()
}

fn bitpos(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let wanted = match ctx.int(2)? {
        0 => false,
        1 => true,
        _ => return Err(Error::err("The bit argument must be 1 or 0.")),
    };
    let Some(string) = typed::peek_string(ctx.db, key)? else {
        ctx.out.integer(if wanted { -1 } else { 0 });
        return Ok(());
    };
    let (range, end_given) = match ctx.argc() {
        3 => (bit_range(0, -1, string.len(), 8), false),
        4 => (bit_range(ctx.int(3)?, -1, string.len(), 8), false),
        5 | 6 => {
            let start = ctx.int(3)?;
            let unit = if ctx.argc() == 6 && counts_bits(ctx.arg(5))? { 1 } else { 8 };
            (bit_range(start, ctx.int(4)?, string.len(), unit), true)
        }
        _ => return Err(Error::SYNTAX),
    };
    let position = match range {
        None => -1,
        Some((from, to)) => match find(string, from, to, wanted) {
            Some(at) => at as i64,
            // Without an explicit end the string is treated as padded with zeros.
            None if !wanted && !end_given => to as i64,
            None => -1,
        },
    };
    ctx.out.integer(position);
    Ok(())
}

fn find(string: &[u8], from: usize, to: usize, wanted: bool) -> Option<usize> {
    let (first, last) = (from / 8, (to - 1) / 8);
    let dull = if wanted { 0 } else { 0xff };
    let hit = |at: usize, byte: u8| {
        let zeros = if wanted { byte.leading_zeros() } else { byte.leading_ones() };
        at * 8 + zeros as usize
    };
    for at in [first, last] {
        let byte = masked(string, at, from, to, !wanted);
        if at == last && last > first + 1 {
            let between = string[first + 1..last].iter().position(|&byte| byte != dull);
            if let Some(at) = between {
                return Some(hit(first + 1 + at, string[first + 1 + at]));
            }
        }
        if byte != dull {
            return Some(hit(at, byte));
        }
    }
    None
}

fn bitop(ctx: &mut Ctx<'_>) -> Done {
    let join: fn(u8, u8) -> u8 = match ctx.arg(1).to_ascii_lowercase().as_slice() {
        b"and" => |a, b| a & b,
        b"or" => |a, b| a | b,
        b"xor" => |a, b| a ^ b,
        b"not" => |a, _| !a,
        _ => return Err(Error::SYNTAX),
    };
    let negates = ctx.is(1, "NOT");
    if negates && ctx.argc() != 4 {
        return Err(Error::err("BITOP NOT must be called with a single source key."));
    }
    let target = ctx.arg(2);
    let mut sources = Vec::with_capacity(ctx.argc() - 3);
    for key in ctx.args.iter().skip(3) {
        sources.push(typed::peek_string(ctx.db, key)?.unwrap_or_default());
    }
    let len = sources.iter().map(|source| source.len()).max().unwrap_or(0);
    let mut result = vec![0; len];
    if let Some((first, others)) = sources.split_first() {
        result[..first.len()].copy_from_slice(first);
        if negates {
            result.iter_mut().for_each(|byte| *byte = join(*byte, 0));
        }
        for other in others {
            let (both, alone) = result.split_at_mut(other.len());
            both.iter_mut().zip(*other).for_each(|(byte, &other)| *byte = join(*byte, other));
            alone.iter_mut().for_each(|byte| *byte = join(*byte, 0));
        }
    }
    if len == 0 {
        ctx.delete(target);
    } else {
        ctx.db.set_str(target, &result, None);
        ctx.changed_with(target, class::STRING, "set");
    }
    ctx.out.integer(len as i64);
    Ok(())
}
