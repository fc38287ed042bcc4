//! The requests that are here whole, several at a time: a pipeline.
//!
//! Knowing the keys of a pipeline before its first command runs lets the store fetch all of them from memory at once. Only
//! plain requests are taken: arrays within the limits, complete. Whatever else comes next (a typed line, a request that is
//! not complete, one that is wrong) ends the batch and is left to [`Decoder::decode`], so there is one place that says what
//! is an error.

use super::{Args, Decoder, Limits, Span};

/// Requests found by [`Decoder::batch`]. Kept between uses, so that it is not allocated again.
#[derive(Debug, Default)]
pub struct Batch {
    spans: Vec<Span>,
    /// For each request: where its spans end, and its length on the wire.
    requests: Vec<(u32, u32)>,
}

/// The most arguments of a plain request; one with more is decoded by itself.
const MOST_ARGS: usize = 64;

impl Batch {
    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.requests.clear();
    }

    /// Request `index` and its length on the wire. `bytes` are those the batch was found in.
    pub fn get<'a>(&'a self, bytes: &'a [u8], index: usize) -> Option<(Args<'a>, usize)> {
        let (end, consumed) = *self.requests.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.requests[before].0);
        Some((Args::new(bytes, &self.spans[start as usize..end as usize]), consumed as usize))
    }
}

impl Decoder {
    /// Finds the plain requests at the start of `bytes`, at most `most`; none in the middle of a request, and none before the
    /// client has authenticated, because that changes the limits of what follows.
    pub fn batch(&self, bytes: &[u8], most: usize, batch: &mut Batch) {
        batch.clear();
        if self.limits.unauthenticated || self.missing.is_some() || self.searched > 0 {
            return;
        }
        let mut at = 0;
        while batch.requests.len() < most {
            let known = batch.spans.len();
            let Some(end) = plain(bytes, at, &self.limits, &mut batch.spans) else {
                batch.spans.truncate(known);
                return;
            };
            batch.requests.push((batch.spans.len() as u32, (end - at) as u32));
            at = end;
        }
    }
}

/// Reads one request; gives its end. `None` where it is not plain: the spans it left mean nothing then.
#[inline]
fn plain(bytes: &[u8], start: usize, limits: &Limits, spans: &mut Vec<Span>) -> Option<usize> {
    let (count, mut at) = number(bytes, start, b'*')?;
    if count == 0 || count > limits.args.min(MOST_ARGS) {
        return None;
    }
    for _ in 0..count {
        let (len, from) = number(bytes, at, b'$')?;
        at = from + len + 2;
        if len > limits.bulk || at > bytes.len() || at - start > limits.request {
            return None;
        }
        spans.push(Span::new(from, len)?);
    }
    Some(at)
}

/// The number of a header and where what follows it begins. At most nine digits, in the one spelling that is right.
#[inline]
fn number(bytes: &[u8], at: usize, mark: u8) -> Option<(usize, usize)> {
    let rest = bytes.get(at..)?;
    match *rest {
        [first, digit @ b'0'..=b'9', b'\r', _, ..] if first == mark => {
            Some((usize::from(digit - b'0'), at + 4))
        }
        [first, tens @ b'1'..=b'9', ones @ b'0'..=b'9', b'\r', _, ..] if first == mark => {
            Some((usize::from(tens - b'0') * 10 + usize::from(ones - b'0'), at + 5))
        }
        [first, b'1'..=b'9', ..] if first == mark => longer(rest, at),
        _ => None,
    }
}

fn longer(rest: &[u8], at: usize) -> Option<(usize, usize)> {
    let mut number = 0;
    for (index, byte) in rest.iter().enumerate().skip(1).take(10) {
        match byte {
            b'0'..=b'9' => number = number * 10 + usize::from(byte - b'0'),
            b'\r' if index + 1 < rest.len() => return Some((number, at + index + 2)),
            _ => return None,
        }
    }
    None
}
