//! BITFIELD: integers of arbitrary width at arbitrary bit offsets of a string.

use super::bits::bit_offset;
use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::{Ctx, int};
use crate::error::{Done, Error};
use crate::events::class;

const GROUP: &str = "bitmap";

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("bitfield", -2, WRITE | DENYOOM, Keys::ONE, GROUP, "Performs arbitrary bitfield integer operations on strings.", |ctx| bitfield(ctx, false)),
    Spec::new("bitfield_ro", -2, READONLY | FAST, Keys::ONE, GROUP, "Performs arbitrary read-only bitfield integer operations on strings.", |ctx| bitfield(ctx, true)),
];

/// An integer type: `i8`, `u16` …
#[derive(Clone, Copy)]
struct Kind {
    signed: bool,
    width: u32,
}

#[derive(Clone, Copy)]
enum Overflow {
    Wrap,
    Saturate,
    Fail,
}

#[derive(Clone, Copy)]
enum Action {
    Get,
    Set(i64),
    Add(i64, Overflow),
    /// SET under an OVERFLOW rule.
    SetChecked(i64, Overflow),
}

struct Step {
    kind: Kind,
    offset: u64,
    action: Action,
}

impl Kind {
    fn read(text: &[u8]) -> Result<Kind, Error> {
        let bad = || {
            Error::err(
                "Invalid bitfield type. Use something like i16 u8. Note that u64 is not supported but i64 is.",
            )
        };
        let (signed, digits) = match text {
            [b'i', digits @ ..] => (true, digits),
            [b'u', digits @ ..] => (false, digits),
            _ => return Err(bad()),
        };
        let most = if signed { 64 } else { 63 };
        match int(digits) {
            Ok(width) if (1..=most).contains(&width) => Ok(Kind { signed, width: width as u32 }),
            _ => Err(bad()),
        }
    }

    fn bounds(self) -> (i128, i128) {
        match self.signed {
            true => (-(1i128 << (self.width - 1)), (1i128 << (self.width - 1)) - 1),
            false => (0, (1i128 << self.width) - 1),
        }
    }

    /// The integer represented by the low bits.
    fn of_bits(self, bits: u64) -> i64 {
        let unused = 64 - self.width;
        match self.signed {
            true => ((bits << unused) as i64) >> unused,
            false => ((bits << unused) >> unused) as i64,
        }
    }

    /// The stored value of a number; `None` if it does not fit under OVERFLOW FAIL.
    fn fit(self, number: i128, overflow: Overflow) -> Option<i64> {
        let (low, high) = self.bounds();
        if (low..=high).contains(&number) {
            return Some(number as i64);
        }
        match overflow {
            Overflow::Wrap => Some(self.of_bits(number as u64)),
            Overflow::Saturate => Some(if number < low { low } else { high } as i64),
            Overflow::Fail => None,
        }
    }
}

/// The bits from `offset` on; bits past the end of the string are zero.
fn read_bits(string: &[u8], offset: u64, width: u32) -> u64 {
    (offset..offset + u64::from(width)).fold(0, |bits, at| {
        let byte = string.get((at >> 3) as usize).copied().unwrap_or(0);
        bits << 1 | u64::from(byte >> (7 - (at & 7)) & 1)
    })
}

fn write_bits(string: &mut [u8], offset: u64, width: u32, bits: u64) {
    for at in 0..u64::from(width) {
        let on = bits >> (u64::from(width) - 1 - at) & 1 == 1;
        let (byte, mask) = (((offset + at) >> 3) as usize, 0x80u8 >> ((offset + at) & 7));
        if on { string[byte] |= mask } else { string[byte] &= !mask }
    }
}

fn read_steps(ctx: &Ctx<'_>) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    let mut overflow = Overflow::Wrap;
    let mut at = 2;
    while at < ctx.argc() {
        let left = ctx.argc() - at - 1;
        if ctx.is(at, "OVERFLOW") && left >= 1 {
            overflow = match ctx.arg(at + 1).to_ascii_lowercase().as_slice() {
                b"wrap" => Overflow::Wrap,
                b"sat" => Overflow::Saturate,
                b"fail" => Overflow::Fail,
                _ => return Err(Error::err("Invalid OVERFLOW type specified")),
            };
            at += 2;
            continue;
        }
        let (gets, sets) = (ctx.is(at, "GET") && left >= 2, ctx.is(at, "SET") && left >= 3);
        let adds = ctx.is(at, "INCRBY") && left >= 3;
        if !(gets || sets || adds) {
            return Err(Error::SYNTAX);
        }
        let kind = Kind::read(ctx.arg(at + 1))?;
        let offset = bit_offset(ctx.arg(at + 2), Some(kind.width))?;
        let action = match (gets, sets) {
            (true, _) => Action::Get,
            (_, true) => match overflow {
                Overflow::Wrap => Action::Set(ctx.int(at + 3)?),
                overflow => Action::SetChecked(ctx.int(at + 3)?, overflow),
            },
            _ => Action::Add(ctx.int(at + 3)?, overflow),
        };
        steps.push(Step { kind, offset, action });
        at += if gets { 3 } else { 4 };
    }
    Ok(steps)
}

/// Executes one operation; returns its reply and whether a bit changed.
fn apply(string: &mut [u8], step: &Step) -> (Option<i64>, bool) {
    let Step { kind, offset, action } = *step;
    let old = kind.of_bits(read_bits(string, offset, kind.width));
    // A negative number for an unsigned field is interpreted by its bits, as a large number.
    let given = |number: i64| if kind.signed { i128::from(number) } else { i128::from(number as u64) };
    let (new, shows_old) = match action {
        Action::Get => return (Some(old), false),
        Action::Set(number) => (kind.fit(given(number), Overflow::Wrap), true),
        Action::SetChecked(number, overflow) => (kind.fit(given(number), overflow), true),
        Action::Add(by, overflow) => (kind.fit(i128::from(old) + i128::from(by), overflow), false),
    };
    let Some(new) = new else { return (None, false) };
    write_bits(string, offset, kind.width, new as u64);
    (Some(if shows_old { old } else { new }), new != old)
}

fn bitfield(ctx: &mut Ctx<'_>, read_only: bool) -> Done {
    let key = ctx.arg(1);
    let steps = read_steps(ctx)?;
    let end = |step: &Step| (step.offset + u64::from(step.kind.width)).div_ceil(8) as usize;
    let need = steps.iter().filter(|step| !matches!(step.action, Action::Get)).map(end).max();
    if need.is_some() && read_only {
        return Err(Error::err("BITFIELD_RO only supports the GET subcommand"));
    }
    let string = typed::peek_string(ctx.db, key)?;
    let Some(need) = need else {
        let string = string.unwrap_or_default();
        ctx.out.array(steps.len());
        for step in &steps {
            ctx.out.integer(step.kind.of_bits(read_bits(string, step.offset, step.kind.width)));
        }
        return Ok(());
    };
    let grows = string.is_none_or(|string| string.len() < need);
    let replies: Vec<_> = ctx.db.edit_str(key, |string| {
        if string.len() < need {
            string.resize(need, 0);
        }
        steps.iter().map(|step| apply(string, step)).collect()
    });
    if grows || replies.iter().any(|(_, changed)| *changed) {
        ctx.changed_with(key, class::STRING, "setbit");
    }
    ctx.out.array(replies.len());
    for (reply, _) in replies {
        match reply {
            Some(number) => ctx.out.integer(number),
            None => ctx.out.null(),
        }
    }
    Ok(())
}
