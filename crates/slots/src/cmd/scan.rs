//! Keyspace iteration: SCAN, KEYS.

use moim_wire_resp::encode::Kind;

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::keyspace::Item;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new(
        "scan",
        -2,
        READONLY | WHOLE,
        Keys::None,
        "generic",
        "Iterates over the key names in the database.",
        scan,
    ),
    Spec::new(
        "keys",
        2,
        READONLY | WHOLE,
        Keys::None,
        "generic",
        "Returns all key names that match a pattern.",
        keys,
    ),
];

fn scan(ctx: &mut Ctx<'_>) -> Done {
    let mut cursor: u64 =
        std::str::from_utf8(ctx.arg(1)).ok().and_then(|text| text.parse().ok()).ok_or(Error::BAD_CURSOR)?;
    let options = ScanOptions::read(ctx, 2, true)?;
    let mut found: Vec<Vec<u8>> = Vec::new();
    let (mut seen, now) = (0, ctx.now);
    // One SCAN call inspects at most ten times COUNT groups of keys, as in Redis.
    for _ in 0..options.count.saturating_mul(10) {
        cursor = ctx.db.scan(cursor, |key, item, expires_at| {
            seen += 1;
            if options.takes(key, item) && expires_at.is_none_or(|at| at > now) {
                found.push(key.to_vec());
            }
        });
        if cursor == 0 || seen >= options.count {
            break;
        }
    }
    ctx.out.array(2);
    ctx.out.bulk(cursor.to_string().as_bytes());
    ctx.out.array(found.len());
    found.iter().for_each(|key| ctx.out.bulk(key));
    Ok(())
}

/// Keys inspected by KEYS, some tens of microseconds, before it yields the processor.
const YIELD_EVERY: usize = 512;

/// MATCH, COUNT and TYPE options of the SCAN family.
pub(super) struct ScanOptions<'a> {
    pub(super) pattern: Option<&'a [u8]>,
    pub(super) count: usize,
    kind: Option<String>,
}

impl<'a> ScanOptions<'a> {
    /// Parses the options from argument `at` on.
    pub(super) fn read(ctx: &Ctx<'a>, mut at: usize, with_type: bool) -> Result<Self, Error> {
        let mut options = Self { pattern: None, count: 10, kind: None };
        while at < ctx.argc() {
            let value = ctx.args.get(at + 1);
            match (ctx.arg(at).to_ascii_uppercase().as_slice(), value) {
                (b"COUNT", Some(value)) => {
                    options.count = usize::try_from(crate::ctx::int(value)?).unwrap_or(0);
                    if options.count == 0 {
                        return Err(Error::SYNTAX);
                    }
                }
                (b"MATCH", Some(pattern)) => options.pattern = Some(pattern),
                (b"TYPE", Some(kind)) if with_type => {
                    options.kind = Some(String::from_utf8_lossy(kind).to_lowercase());
                }
                _ => return Err(Error::SYNTAX),
            }
            at += 2;
        }
        Ok(options)
    }

    /// True if the name matches the pattern.
    pub(super) fn matches(&self, name: &[u8]) -> bool {
        self.pattern.is_none_or(|pattern| pattern == b"*" || glob(pattern, name, false))
    }

    fn takes(&self, key: &[u8], item: Item<'_>) -> bool {
        let kind = match item {
            Item::Str(_) => "string",
            Item::Value(value) => value.type_name(),
        };
        self.kind.as_ref().is_none_or(|wanted| wanted == kind) && self.matches(key)
    }
}

fn keys(ctx: &mut Ctx<'_>) -> Done {
    let (pattern, now) = (ctx.arg(1), ctx.now);
    let names = ctx.out.defer(Kind::Array);
    let (mut seen, mut found) = (0usize, 0);
    let out = &mut ctx.out;
    ctx.db.for_each(|key, _, expires_at| {
        seen += 1;
        if seen.is_multiple_of(YIELD_EVERY) {
            // Threads that wake up for other requests then need not wait for the end of this thread's time slice.
            std::thread::yield_now();
        }
        if expires_at.is_none_or(|at| at > now) && (pattern == b"*" || glob(pattern, key, false)) {
            out.bulk(key);
            found += 1;
        }
    });
    ctx.out.finish(names, found);
    Ok(())
}

/// Glob-style pattern matching: `*`, `?`, `[a-z]`, `[^a]`, `\` before a character.
///
/// A `*` that fails is retried one character further, but only the last one: backtracking to earlier ones can never
/// help, and makes patterns like `a*a*a*a*b` exponential.
pub(crate) fn glob(pattern: &[u8], name: &[u8], any_case: bool) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if p < pattern.len() && pattern[p] == b'*' {
            while p < pattern.len() && pattern[p] == b'*' {
                p += 1;
            }
            if p == pattern.len() {
                return true;
            }
            retry = Some((p, n));
            continue;
        }
        if n < name.len()
            && p < pattern.len()
            && let Some(next) = one(pattern, p, name[n], any_case)
        {
            (p, n) = (next, n + 1);
            continue;
        }
        if n == name.len() && p == pattern.len() {
            return true;
        }
        match retry {
            Some((star, from)) if from < name.len() => {
                retry = Some((star, from + 1));
                (p, n) = (star, from + 1);
            }
            _ => return false,
        }
    }
}

/// Matches one character against the item at `p`; returns the start of the next item.
fn one(pattern: &[u8], p: usize, c: u8, any_case: bool) -> Option<usize> {
    let fold = |c: u8| if any_case { c.to_ascii_lowercase() } else { c };
    match pattern[p] {
        b'?' => Some(p + 1),
        b'[' => {
            let mut at = p + 1;
            let negated = pattern.get(at) == Some(&b'^');
            at += usize::from(negated);
            let mut hit = false;
            while at < pattern.len() && pattern[at] != b']' {
                if pattern[at] == b'\\' && at + 1 < pattern.len() {
                    at += 1;
                    hit |= fold(pattern[at]) == fold(c);
                } else if pattern.get(at + 1) == Some(&b'-') && at + 2 < pattern.len() {
                    let (low, high) = (fold(pattern[at]), fold(pattern[at + 2]));
                    hit |= (low.min(high)..=low.max(high)).contains(&fold(c));
                    at += 2;
                } else {
                    hit |= fold(pattern[at]) == fold(c);
                }
                at += 1;
            }
            (hit != negated).then_some((at + 1).min(pattern.len()))
        }
        b'\\' if p + 1 < pattern.len() => (fold(pattern[p + 1]) == fold(c)).then_some(p + 2),
        other => (fold(other) == fold(c)).then_some(p + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glob_patterns_match_as_in_redis() {
        for (pattern, name, wanted) in [
            ("*", "", true),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h*llo", "heeello", true),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hello", false),
            ("h[a-b]llo", "hbllo", true),
            ("a\\*b", "a*b", true),
            ("a\\*b", "axb", false),
            ("*a*b", "xxaxxb", true),
            ("*a*b", "xxaxx", false),
            ("foo", "foobar", false),
            ("[", "[", false),
            ("[^a", "b", true),
        ] {
            assert_eq!(glob(pattern.as_bytes(), name.as_bytes(), false), wanted, "{pattern} {name}");
        }
        assert!(glob(b"HeL*", b"hello", true));
    }

    #[test]
    fn glob_with_many_stars_is_not_exponential() {
        let pattern = b"a*".repeat(50);
        assert!(!glob(&[&pattern[..], b"b"].concat(), &[b'a'; 20_000], false));
    }
}
