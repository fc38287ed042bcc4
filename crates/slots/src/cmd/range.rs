//! String ranges: APPEND, SETRANGE, GETRANGE, SUBSTR.

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;

/// Maximum string length.
const MAX_STRING: usize = 512 << 20;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new(
        "append",
        3,
        WRITE | DENYOOM | FAST,
        Keys::ONE,
        "string",
        "Appends a string to the value of a key. Creates the key if it doesn't exist.",
        append,
    ),
    Spec::new(
        "setrange",
        4,
        WRITE | DENYOOM,
        Keys::ONE,
        "string",
        "Overwrites a part of a string value with another by an offset. Creates the key if it doesn't exist.",
        setrange,
    ),
    Spec::new(
        "getrange",
        4,
        READONLY,
        Keys::ONE,
        "string",
        "Returns a substring of the string stored at a key.",
        getrange,
    ),
    Spec::new(
        "substr",
        4,
        READONLY,
        Keys::ONE,
        "string",
        "Returns a substring from a string value.",
        getrange,
    ),
];

fn append(ctx: &mut Ctx<'_>) -> Done {
    let (key, tail) = (ctx.arg(1), ctx.arg(2));
    let len = ctx.string(key)?.map(<[u8]>::len);
    if len.unwrap_or(0) + tail.len() > MAX_STRING {
        return Err(Error::STRING_TOO_LONG);
    }
    let len = match len {
        None => {
            ctx.db.set_str(key, tail, None);
            tail.len()
        }
        Some(_) => ctx.db.edit_str(key, |string| {
            string.extend_from_slice(tail);
            string.len()
        }),
    };
    ctx.changed_with(key, class::STRING, "append");
    ctx.out.integer(len as i64);
    Ok(())
}

fn setrange(ctx: &mut Ctx<'_>) -> Done {
    let (key, part) = (ctx.arg(1), ctx.arg(3));
    let offset = usize::try_from(ctx.int(2)?).map_err(|_| Error::BAD_OFFSET)?;
    let len = ctx.string(key)?.map_or(0, <[u8]>::len);
    if part.is_empty() {
        ctx.out.integer(len as i64);
        return Ok(());
    }
    let end =
        offset.checked_add(part.len()).filter(|end| *end <= MAX_STRING).ok_or(Error::STRING_TOO_LONG)?;
    let len = ctx.db.edit_str(key, |string| {
        if string.len() < end {
            string.resize(end, 0);
        }
        string[offset..end].copy_from_slice(part);
        string.len()
    });
    ctx.changed_with(key, class::STRING, "setrange");
    ctx.out.integer(len as i64);
    Ok(())
}

fn getrange(ctx: &mut Ctx<'_>) -> Done {
    let (start, end) = (ctx.int(2)?, ctx.int(3)?);
    let key = ctx.arg(1);
    let string = match ctx.db.touch(key) {
        None => &[][..],
        Some(crate::keyspace::Item::Str(string)) => string,
        Some(_) => return Err(Error::WRONG_TYPE),
    };
    let range = clamp(start, end, string.len()).map_or(&[][..], |(from, to)| &string[from..to]);
    ctx.out.bulk(range);
    Ok(())
}

/// Resolves inclusive bounds, negative ones from the end, to `[from, to)`; `None` if the range is empty.
pub(super) fn clamp(start: i64, end: i64, len: usize) -> Option<(usize, usize)> {
    if len == 0 || start < 0 && end < 0 && start > end {
        return None;
    }
    let len = len as i64;
    let start = if start < 0 { (len + start).max(0) } else { start };
    let end = if end < 0 { (len + end).max(0) } else { end }.min(len - 1);
    (start <= end && start < len).then_some((start as usize, end as usize + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_clamped_to_the_string() {
        for (start, end, wanted) in [
            (0, -1, Some((0, 5))),
            (1, 2, Some((1, 3))),
            (-3, -1, Some((2, 5))),
            (-100, 1, Some((0, 2))),
            (3, 100, Some((3, 5))),
            (5, 9, None),
            (2, 1, None),
            (-1, -5, None),
            (0, -100, Some((0, 1))),
        ] {
            assert_eq!(clamp(start, end, 5), wanted, "{start} {end}");
        }
        assert_eq!(clamp(0, -1, 0), None);
    }
}
