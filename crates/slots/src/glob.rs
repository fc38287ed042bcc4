//! Patterns as KEYS, SCAN and PSUBSCRIBE take them: `*`, `?`, `[a-c]`, `[^x]`, `\` before a character taken as it is.
//!
//! A star tries again only from the last star, which suffices: the time is at most the product of the lengths,
//! whatever the pattern.

/// Whether all of `text` fits `pattern`.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    matches_with(pattern, text, |byte| byte)
}

/// The same whatever the case of letters.
pub fn matches_ignoring_case(pattern: &[u8], text: &[u8]) -> bool {
    matches_with(pattern, text, |byte| byte.to_ascii_lowercase())
}

fn matches_with(pattern: &[u8], text: &[u8], fold: fn(u8) -> u8) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on when the text does not fit: behind the last star, one character further.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            while pattern.get(p) == Some(&b'*') {
                p += 1;
            }
            if p == pattern.len() {
                return true;
            }
            retry = Some((p, t));
            continue;
        }
        if t == text.len() {
            // Stars were eaten above: what is left of the pattern wants a character.
            return p == pattern.len();
        }
        match one(&pattern[p..], text[t], fold) {
            Some(used) => {
                p += used;
                t += 1;
            }
            None => match &mut retry {
                Some((after_star, from)) => {
                    *from += 1;
                    (p, t) = (*after_star, *from);
                }
                None => return false,
            },
        }
    }
}

/// Fits the first item of the pattern to one character: how long the item is, if it fits.
fn one(pattern: &[u8], byte: u8, fold: fn(u8) -> u8) -> Option<usize> {
    let byte = fold(byte);
    match *pattern.first()? {
        b'?' => Some(1),
        b'[' => class(pattern, byte, fold),
        b'\\' if pattern.len() > 1 => (fold(pattern[1]) == byte).then_some(2),
        literal => (fold(literal) == byte).then_some(1),
    }
}

fn class(pattern: &[u8], byte: u8, fold: fn(u8) -> u8) -> Option<usize> {
    let mut at = 1;
    let negated = pattern.get(at) == Some(&b'^');
    at += usize::from(negated);
    let mut found = false;
    loop {
        match pattern.get(at..).unwrap_or_default() {
            // A class that is not closed ends with the pattern.
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', literal, ..] => {
                found |= fold(*literal) == byte;
                at += 2;
            }
            [low, b'-', high, ..] => {
                let (low, high) = (fold(*low.min(high)), fold(*low.max(high)));
                found |= (low..=high).contains(&byte);
                at += 3;
            }
            [literal, ..] => {
                found |= fold(*literal) == byte;
                at += 1;
            }
        }
    }
    (found != negated).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_in_redis() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxbyyd", false),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hello", false),
            ("h[^e]llo", "hallo", true),
            ("h[a-c]llo", "hbllo", true),
            ("h[c-a]llo", "hbllo", true),
            ("h\\*llo", "h*llo", true),
            ("h\\*llo", "hello", false),
            ("[\\]]", "]", true),
            ("[abc", "c", true),
            ("foo*", "barfoo", false),
            ("*?", "", false),
            ("a\\", "a\\", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
        assert!(matches_ignoring_case(b"H[A-C]l*", b"hBLLO"));
    }

    #[test]
    fn patterns_made_to_explode_do_not() {
        let pattern = b"a*".repeat(2000);
        let text = [b"a".repeat(20_000), b"b".to_vec()].concat();
        assert!(matches(&pattern, &text));
        let pattern = [pattern, b"c".to_vec()].concat();
        assert!(!matches(&pattern, &text));
    }
}
