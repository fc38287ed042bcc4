//! Argument parsing shared by command families: counts, numkeys, SCAN options, random selection.

use super::scan::ScanOptions;
use super::typed::{self, Typed};
use crate::ctx::{Ctx, int};
use crate::error::Error;

/// Parses a non-negative count.
pub(crate) fn positive(text: &[u8]) -> Result<usize, Error> {
    int(text).ok().and_then(|count| usize::try_from(count).ok()).ok_or(Error::OUT_OF_RANGE)
}

/// Parses a number of at least 1; otherwise the error is `message`.
pub(crate) fn at_least_one(text: &[u8], message: &'static str) -> Result<usize, Error> {
    match int(text) {
        Ok(number) if number > 0 => Ok(usize::try_from(number).unwrap_or(usize::MAX)),
        _ => Err(Error::err(message)),
    }
}

/// Parses a random selection count: a negative count allows repetition.
pub(crate) fn picks(text: &[u8]) -> Result<i64, Error> {
    /// Limit on selections with repetition: more would be a reply of gigabytes.
    const MAX_REPEATED: i64 = 1 << 28;
    let count = int(text)?;
    if count == i64::MIN {
        let most = i64::MAX;
        return Err(Error::err(format_args!("value is out of range, value must between -{most} and {most}")));
    }
    if count < -MAX_REPEATED { Err(Error::err("value is out of range")) } else { Ok(count) }
}

/// `count` distinct numbers below `len`, in random order; all of them in order if there are no more.
pub(crate) fn sample(len: usize, count: usize) -> Vec<usize> {
    if count >= len {
        return (0..len).collect();
    }
    if count * 4 >= len {
        let mut all: Vec<usize> = (0..len).collect();
        for at in 0..count {
            all.swap(at, fastrand::usize(at..len));
        }
        all.truncate(count);
        return all;
    }
    let mut seen = hashbrown::HashSet::with_capacity(count);
    let mut chosen = Vec::with_capacity(count);
    while chosen.len() < count {
        let pick = fastrand::usize(..len);
        if seen.insert(pick) {
            chosen.push(pick);
        }
    }
    chosen
}

/// Random positions: `count` distinct ones, or with repetition if it is negative.
pub(crate) fn pick_positions(len: usize, count: i64) -> Vec<usize> {
    if len == 0 {
        return Vec::new();
    }
    match usize::try_from(count) {
        Ok(count) => sample(len, count),
        Err(_) => (0..count.unsigned_abs()).map(|_| fastrand::usize(..len)).collect(),
    }
}

/// Cursor and options of HSCAN, SSCAN and ZSCAN; no options if the key does not exist. As in Redis, the cursor is
/// validated first, then the key, then the options.
pub(crate) fn scan_options<'a, T: Typed>(ctx: &mut Ctx<'a>) -> Result<(u64, Option<ScanOptions<'a>>), Error> {
    let cursor = std::str::from_utf8(ctx.arg(2)).ok().and_then(|text| text.parse().ok());
    let cursor = cursor.ok_or(Error::BAD_CURSOR)?;
    match typed::get::<T>(ctx.db, ctx.arg(1))? {
        Some(_) => Ok((cursor, Some(ScanOptions::read(ctx, 3, false)?))),
        None => Ok((cursor, None)),
    }
}

/// Replies with a scan result: the next cursor and the elements.
pub(crate) fn write_scan(ctx: &mut Ctx<'_>, cursor: u64, found: &[Vec<u8>]) {
    ctx.out.array(2);
    ctx.out.bulk(cursor.to_string().as_bytes());
    ctx.out.array(found.len());
    found.iter().for_each(|element| ctx.out.bulk(element));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_distinct_and_in_range() {
        for (len, count) in [(10, 3), (10, 9), (10, 10), (10, 20), (1000, 5), (0, 3)] {
            let mut picked = sample(len, count);
            assert_eq!(picked.len(), count.min(len));
            picked.sort_unstable();
            picked.dedup();
            assert_eq!(picked.len(), count.min(len));
            assert!(picked.iter().all(|&pick| pick < len));
        }
        assert_eq!(pick_positions(3, -50).len(), 50);
        assert!(pick_positions(0, -50).is_empty());
    }
}
