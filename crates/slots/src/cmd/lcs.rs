//! LCS: the longest common subsequence of two strings.

use super::flag::READONLY;
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};

/// Command table of this family.
pub(crate) const COMMANDS: &[Spec] =
    &[Spec::new("lcs", -3, READONLY, Keys::TWO, "string", "Finds the longest common substring.", lcs)];

/// Memory limit of the dynamic programming table.
const MAX_BYTES: usize = 512 << 20;

/// A matching range: start and end (inclusive) in each string.
struct Match {
    left: (usize, usize),
    right: (usize, usize),
}

#[derive(Default)]
struct Options {
    len: bool,
    places: bool,
    with_length: bool,
    shortest: usize,
}

fn options(ctx: &Ctx<'_>) -> Result<Options, Error> {
    let mut options = Options::default();
    let mut at = 3;
    while at < ctx.argc() {
        if ctx.is(at, "IDX") {
            options.places = true;
        } else if ctx.is(at, "LEN") {
            options.len = true;
        } else if ctx.is(at, "WITHMATCHLEN") {
            options.with_length = true;
        } else if ctx.is(at, "MINMATCHLEN") && at + 1 < ctx.argc() {
            options.shortest = usize::try_from(ctx.int(at + 1)?).unwrap_or(0);
            at += 1;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    if options.len && options.places {
        return Err(Error::err("If you want both the length and indexes, please just use IDX."));
    }
    Ok(options)
}

fn lcs(ctx: &mut Ctx<'_>) -> Done {
    let wrong = |_| Error::err("The specified keys must contain string values");
    let left = typed::peek_string(ctx.db, ctx.arg(1)).map_err(wrong)?.unwrap_or_default();
    let right = typed::peek_string(ctx.db, ctx.arg(2)).map_err(wrong)?.unwrap_or_default();
    let options = options(ctx)?;
    let cells = (left.len() + 1).saturating_mul(right.len() + 1);
    if cells.saturating_mul(4) > MAX_BYTES {
        return Err(Error::err("Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len"));
    }
    let (common, matches) = trace(left, right);
    if options.len {
        ctx.out.integer(common.len() as i64);
        return Ok(());
    }
    if !options.places {
        ctx.out.bulk(&common);
        return Ok(());
    }
    let long_enough = |found: &&Match| found.left.1 - found.left.0 + 1 >= options.shortest;
    ctx.out.map(2);
    ctx.out.bulk(b"matches");
    ctx.out.array(matches.iter().filter(long_enough).count());
    for found in matches.iter().filter(long_enough) {
        ctx.out.array(if options.with_length { 3 } else { 2 });
        for (first, last) in [found.left, found.right] {
            ctx.out.array(2);
            ctx.out.integer(first as i64);
            ctx.out.integer(last as i64);
        }
        if options.with_length {
            ctx.out.integer((found.left.1 - found.left.0 + 1) as i64);
        }
    }
    ctx.out.bulk(b"len");
    ctx.out.integer(common.len() as i64);
    Ok(())
}

/// The common subsequence and its matching ranges, last first.
fn trace(left: &[u8], right: &[u8]) -> (Vec<u8>, Vec<Match>) {
    let width = right.len() + 1;
    let mut table = vec![0u32; (left.len() + 1) * width];
    for i in 1..=left.len() {
        for j in 1..=right.len() {
            table[i * width + j] = if left[i - 1] == right[j - 1] {
                table[(i - 1) * width + j - 1] + 1
            } else {
                table[(i - 1) * width + j].max(table[i * width + j - 1])
            };
        }
    }
    let (mut i, mut j) = (left.len(), right.len());
    let (mut common, mut matches) = (Vec::new(), Vec::<Match>::new());
    while i > 0 && j > 0 {
        if left[i - 1] == right[j - 1] {
            (i, j) = (i - 1, j - 1);
            common.push(left[i]);
            match matches.last_mut() {
                Some(last) if last.left.0 == i + 1 && last.right.0 == j + 1 => {
                    (last.left.0, last.right.0) = (i, j);
                }
                _ => matches.push(Match { left: (i, i), right: (j, j) }),
            }
        } else if table[(i - 1) * width + j] > table[i * width + j - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    common.reverse();
    (common, matches)
}
