//! Lua 5.1 pattern matching for `string.find`, `match`, `gmatch` and `gsub`.
//!
//! The matcher of the Lua library backtracks inside one C call, practically forever for a malicious pattern, and
//! cannot be interrupted. This one has the same semantics, quirks included (a pattern ends at its first zero byte; a
//! subject is followed by one), and reports its work as it proceeds: the caller's function aborts a match when the
//! script must end.
//!
//! Invariants: the recursion depth is bounded by [`MAX_DEPTH`], whatever the pattern; every byte comparison is
//! counted as work, including those inside sets.

/// Maximum number of captures of a pattern.
const MAX_CAPTURES: usize = 32;
/// Maximum recursion depth: pattern items that wait for the rest to match. The library has no limit and overflows its
/// stack.
const MAX_DEPTH: usize = 2_000;

/// Why a match was aborted: the text of a Lua error.
pub(super) type Failed = String;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Length {
    Unfinished,
    Position,
    Of(usize),
}

#[derive(Clone, Copy, Debug)]
struct Capture {
    start: usize,
    length: Length,
}

/// The value of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Captured<'a> {
    /// A part of the subject.
    Text(&'a [u8]),
    /// A position in the subject, counted from one.
    Position(usize),
}

/// A pattern match in progress.
pub(super) struct Matcher<'a, W> {
    subject: &'a [u8],
    pattern: &'a [u8],
    captures: Vec<Capture>,
    depth: usize,
    work: W,
}

/// The part of a pattern that the library sees.
pub(super) fn visible(pattern: &[u8]) -> &[u8] {
    pattern.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// True if a pattern has no special characters.
pub(super) fn is_plain(pattern: &[u8]) -> bool {
    !visible(pattern).iter().any(|byte| b"^$*+?.([%-".contains(byte))
}

/// Start of `needle` in `text`. Reports its work.
pub(super) fn find_plain(
    text: &[u8],
    needle: &[u8],
    mut work: impl FnMut(usize) -> Result<(), Failed>,
) -> Result<Option<usize>, Failed> {
    let Some((&first, rest)) = needle.split_first() else { return Ok(Some(0)) };
    let Some(last) = text.len().checked_sub(needle.len()) else { return Ok(None) };
    let mut at = 0;
    while at <= last {
        let Some(skipped) = text[at..=last].iter().position(|byte| *byte == first) else { return Ok(None) };
        at += skipped;
        let equal = text[at + 1..].iter().zip(rest).take_while(|(a, b)| a == b).count();
        if equal == rest.len() {
            return Ok(Some(at));
        }
        work(1 + skipped / 16 + equal / 4)?;
        at += 1;
    }
    Ok(None)
}

impl<'a, W: FnMut(usize) -> Result<(), Failed>> Matcher<'a, W> {
    pub(super) fn new(subject: &'a [u8], pattern: &'a [u8], work: W) -> Self {
        Self { subject, pattern: visible(pattern), captures: Vec::new(), depth: 0, work }
    }

    /// End of a match that starts at `at`. `from` is the start of the pattern, after an anchor for example.
    pub(super) fn run(&mut self, at: usize, from: usize) -> Result<Option<usize>, Failed> {
        self.captures.clear();
        self.depth = 0;
        self.go(at, from)
    }

    /// The first match at or after `at`: its start and end.
    pub(super) fn search(
        &mut self,
        at: usize,
        from: usize,
        anchored: bool,
    ) -> Result<Option<(usize, usize)>, Failed> {
        for start in at..=self.subject.len() {
            if let Some(end) = self.run(start, from)? {
                return Ok(Some((start, end)));
            }
            if anchored {
                break;
            }
        }
        Ok(None)
    }

    /// Number of captures of the last match.
    pub(super) fn count(&self) -> usize {
        self.captures.len()
    }

    /// The whole match.
    pub(super) fn whole(&self, start: usize, end: usize) -> Captured<'a> {
        Captured::Text(&self.subject[start..end])
    }

    /// Capture `index` of a match from `start` to `end`; without captures the first is the whole match.
    pub(super) fn capture(&self, index: usize, start: usize, end: usize) -> Result<Captured<'a>, Failed> {
        let Some(capture) = self.captures.get(index) else {
            if index == 0 {
                return Ok(Captured::Text(&self.subject[start..end]));
            }
            return Err("invalid capture index".to_owned());
        };
        match capture.length {
            Length::Unfinished => Err("unfinished capture".to_owned()),
            Length::Position => Ok(Captured::Position(capture.start + 1)),
            Length::Of(length) => Ok(Captured::Text(&self.subject[capture.start..capture.start + length])),
        }
    }

    fn pattern_at(&self, at: usize) -> u8 {
        self.pattern.get(at).copied().unwrap_or(0)
    }

    fn subject_at(&self, at: usize) -> u8 {
        self.subject.get(at).copied().unwrap_or(0)
    }

    fn go(&mut self, s: usize, p: usize) -> Result<Option<usize>, Failed> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err("pattern too complex".to_owned());
        }
        let outcome = self.walk(s, p);
        self.depth -= 1;
        outcome
    }

    /// Matches item by item as long as there is no choice, and recurses where there is one.
    fn walk(&mut self, mut s: usize, mut p: usize) -> Result<Option<usize>, Failed> {
        loop {
            (self.work)(1)?;
            match (self.pattern_at(p), self.pattern_at(p + 1)) {
                (0, _) => return Ok(Some(s)),
                (b'(', b')') => return self.open(s, p + 2, Length::Position),
                (b'(', _) => return self.open(s, p + 1, Length::Unfinished),
                (b')', _) => return self.close(s, p + 1),
                (b'$', 0) => return Ok((s == self.subject.len()).then_some(s)),
                (b'%', b'b') => match self.balance(s, p + 2)? {
                    Some(end) => (s, p) = (end, p + 4),
                    None => return Ok(None),
                },
                (b'%', b'f') => match self.frontier(s, p + 2)? {
                    Some(end) => p = end,
                    None => return Ok(None),
                },
                (b'%', digit @ b'0'..=b'9') => match self.again(s, digit)? {
                    Some(end) => (s, p) = (end, p + 2),
                    None => return Ok(None),
                },
                _ => {
                    let end = self.item_end(p)?;
                    let matches = self.single(s, p, end)?;
                    match self.pattern_at(end) {
                        b'?' => {
                            if matches && let Some(found) = self.go(s + 1, end + 1)? {
                                return Ok(Some(found));
                            }
                            p = end + 1;
                        }
                        b'*' => return self.most(s, p, end),
                        b'+' if matches => return self.most(s + 1, p, end),
                        b'-' => return self.fewest(s, p, end),
                        b'+' => return Ok(None),
                        _ if matches => (s, p) = (s + 1, end),
                        _ => return Ok(None),
                    }
                }
            }
        }
    }

    /// End of the item at `p`: a character, a class or a set.
    fn item_end(&self, p: usize) -> Result<usize, Failed> {
        match self.pattern_at(p) {
            b'%' if self.pattern_at(p + 1) == 0 => Err("malformed pattern (ends with '%')".to_owned()),
            b'%' => Ok(p + 2),
            b'[' => {
                let mut at = p + 1 + usize::from(self.pattern_at(p + 1) == b'^');
                loop {
                    match self.pattern_at(at) {
                        0 => return Err("malformed pattern (missing ']')".to_owned()),
                        b'%' if self.pattern_at(at + 1) != 0 => at += 2,
                        _ => at += 1,
                    }
                    if self.pattern_at(at) == b']' {
                        return Ok(at + 1);
                    }
                }
            }
            _ => Ok(p + 1),
        }
    }

    /// True if the item from `p` to `end` matches the byte at `s`.
    fn single(&mut self, s: usize, p: usize, end: usize) -> Result<bool, Failed> {
        let Some(&byte) = self.subject.get(s) else { return Ok(false) };
        Ok(match self.pattern_at(p) {
            b'.' => true,
            b'%' => is_of_class(byte, self.pattern_at(p + 1)),
            b'[' => return self.is_in_set(byte, p, end - 1),
            literal => literal == byte,
        })
    }

    /// True if a byte is in the set from `p`, the opening bracket, to `close`, the closing one.
    fn is_in_set(&mut self, byte: u8, p: usize, close: usize) -> Result<bool, Failed> {
        (self.work)((close - p) / 8)?;
        let is_inverted = self.pattern_at(p + 1) == b'^';
        let mut at = p + 1 + usize::from(is_inverted);
        while at < close {
            let first = self.pattern_at(at);
            let found = if first == b'%' {
                at += 1;
                is_of_class(byte, self.pattern_at(at))
            } else if self.pattern_at(at + 1) == b'-' && at + 2 < close {
                at += 2;
                (first..=self.pattern_at(at)).contains(&byte)
            } else {
                first == byte
            };
            if found {
                return Ok(!is_inverted);
            }
            at += 1;
        }
        Ok(is_inverted)
    }

    /// `*` and `+`: greedy repetition.
    fn most(&mut self, s: usize, p: usize, end: usize) -> Result<Option<usize>, Failed> {
        let mut count = 0;
        while self.single(s + count, p, end)? {
            (self.work)(1)?;
            count += 1;
        }
        for taken in (0..=count).rev() {
            if let Some(found) = self.go(s + taken, end + 1)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// `-`: lazy repetition.
    fn fewest(&mut self, mut s: usize, p: usize, end: usize) -> Result<Option<usize>, Failed> {
        loop {
            if let Some(found) = self.go(s, end + 1)? {
                return Ok(Some(found));
            }
            if !self.single(s, p, end)? {
                return Ok(None);
            }
            s += 1;
        }
    }

    fn open(&mut self, s: usize, p: usize, length: Length) -> Result<Option<usize>, Failed> {
        if self.captures.len() >= MAX_CAPTURES {
            return Err("too many captures".to_owned());
        }
        self.captures.push(Capture { start: s, length });
        let found = self.go(s, p)?;
        if found.is_none() {
            self.captures.pop();
        }
        Ok(found)
    }

    fn close(&mut self, s: usize, p: usize) -> Result<Option<usize>, Failed> {
        let open = self.captures.iter().rposition(|capture| capture.length == Length::Unfinished);
        let index = open.ok_or_else(|| "invalid pattern capture".to_owned())?;
        self.captures[index].length = Length::Of(s - self.captures[index].start);
        let found = self.go(s, p)?;
        if found.is_none() {
            self.captures[index].length = Length::Unfinished;
        }
        Ok(found)
    }

    /// `%bxy`: end of the balanced range at `s`.
    fn balance(&mut self, s: usize, p: usize) -> Result<Option<usize>, Failed> {
        let (opens, closes) = (self.pattern_at(p), self.pattern_at(p + 1));
        if opens == 0 || closes == 0 {
            return Err("unbalanced pattern".to_owned());
        }
        if self.subject.get(s) != Some(&opens) {
            return Ok(None);
        }
        let mut level = 1usize;
        for at in s + 1..self.subject.len() {
            (self.work)(1)?;
            let byte = self.subject[at];
            if byte == closes {
                level -= 1;
                if level == 0 {
                    return Ok(Some(at + 1));
                }
            } else if byte == opens {
                level += 1;
            }
        }
        Ok(None)
    }

    /// `%f[set]`: where the pattern continues, if there is a frontier at `s`.
    fn frontier(&mut self, s: usize, p: usize) -> Result<Option<usize>, Failed> {
        if self.pattern_at(p) != b'[' {
            return Err("missing '[' after '%f' in pattern".to_owned());
        }
        let end = self.item_end(p)?;
        let before = s.checked_sub(1).map_or(0, |at| self.subject_at(at));
        let here = self.subject_at(s);
        let begins = !self.is_in_set(before, p, end - 1)? && self.is_in_set(here, p, end - 1)?;
        Ok(begins.then_some(end))
    }

    /// `%1`: back reference to a capture.
    fn again(&mut self, s: usize, digit: u8) -> Result<Option<usize>, Failed> {
        let index = usize::from(digit).checked_sub(usize::from(b'1'));
        let capture = index.and_then(|index| self.captures.get(index)).copied();
        let Some(capture) = capture.filter(|capture| capture.length != Length::Unfinished) else {
            return Err("invalid capture index".to_owned());
        };
        let Length::Of(length) = capture.length else {
            // The library compares the length of a position capture, which is negative, and so never matches.
            return Ok(None);
        };
        (self.work)(length / 8)?;
        let held = &self.subject[capture.start..capture.start + length];
        Ok(self.subject[s..].starts_with(held).then_some(s + length))
    }
}

/// `%a` and other classes; upper case negates, and a character that is not a class letter matches itself.
fn is_of_class(byte: u8, class: u8) -> bool {
    let is = match class.to_ascii_lowercase() {
        b'a' => byte.is_ascii_alphabetic(),
        b'c' => byte.is_ascii_control(),
        b'd' => byte.is_ascii_digit(),
        b'l' => byte.is_ascii_lowercase(),
        b'p' => byte.is_ascii_punctuation(),
        b's' => matches!(byte, b' ' | 9..=13),
        b'u' => byte.is_ascii_uppercase(),
        b'w' => byte.is_ascii_alphanumeric(),
        b'x' => byte.is_ascii_hexdigit(),
        b'z' => byte == 0,
        _ => return class == byte,
    };
    is != class.is_ascii_uppercase()
}
