//! Replies as they arrive at a client, in either protocol version.
//!
//! Two steps: the scanner walks over the received bytes and finds the end of the reply, continuing where it stopped;
//! once it is complete, the value is built in one pass. Small strings are copied, so that a kept value does not pin a
//! whole read buffer; a reply above [`COPY_UP_TO`] bytes gives away its buffer and its strings are slices of it.
//!
//! Invariants:
//! - Nothing is built, hence nothing allocated, before the answer is there as a whole; it is bounded by
//!   [`ReplyDecoder::max_bytes`].
//! - Nesting is bounded: building is recursive.

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

use crate::number::parse_i64;
use crate::value::Value;

/// Replies up to this size are copied out of the read buffer.
pub const COPY_UP_TO: usize = 16 * 1024;

/// The maximum nesting depth of replies. Redis itself nests few levels; scripts may nest more.
const MAX_DEPTH: usize = 64;

/// The maximum length of a line that is not a bulk string.
const MAX_LINE: usize = 64 * 1024;

/// Why a connection cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReplyError {
    /// An unknown type byte.
    #[error("an answer begins with byte {0:#04x}")]
    UnknownType(u8),
    /// An invalid length or number.
    #[error("an answer has a bad number")]
    BadNumber,
    /// A missing line end.
    #[error("an answer has no line end where one belongs")]
    NoLineEnd,
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("an answer nests too deep")]
    TooDeep,
    /// Longer than this client's limit.
    #[error("an answer is too large")]
    TooLarge,
}

/// Decodes the replies of one connection.
///
/// ```
/// use bytes::BytesMut;
/// use moim_wire_resp::{ReplyDecoder, Value};
/// let mut decoder = ReplyDecoder::default();
/// let mut bytes = BytesMut::from("*2\r\n:1\r\n$1\r\na\r\n+O");
/// let value = decoder.decode(&mut bytes).unwrap();
/// assert_eq!(value, Some(Value::Array(vec![Value::Integer(1), Value::bulk("a")])));
/// assert_eq!(decoder.decode(&mut bytes).unwrap(), None);
/// ```
#[derive(Debug)]
pub struct ReplyDecoder {
    max_bytes: usize,
    at: usize,
    searched: usize,
    /// How many values each open array still needs, outermost first. Empty: the answer has not begun.
    open: Vec<u64>,
}

impl Default for ReplyDecoder {
    fn default() -> Self {
        Self::new(1 << 30)
    }
}

impl ReplyDecoder {
    /// A decoder of answers up to `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, at: 0, searched: 0, open: Vec::new() }
    }

    /// The largest answer.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Takes the first answer out of `bytes`; `None` while it is not complete.
    pub fn decode(&mut self, bytes: &mut BytesMut) -> Result<Option<Value>, ReplyError> {
        if bytes.is_empty() || !self.scan(bytes)? {
            return Ok(None);
        }
        let len = std::mem::take(&mut self.at);
        if len <= COPY_UP_TO {
            let mut builder = Builder { bytes: &bytes[..len], at: 0, shared: None };
            let value = builder.value();
            bytes.advance(len);
            value.map(Some)
        } else {
            let shared = bytes.split_to(len).freeze();
            Builder { bytes: &shared, at: 0, shared: Some(&shared) }.value().map(Some)
        }
    }

    /// Walks on; true when the answer ends at `at`.
    fn scan(&mut self, bytes: &[u8]) -> Result<bool, ReplyError> {
        if self.open.is_empty() {
            self.open.push(1);
        }
        while let Some(needed) = self.open.last_mut() {
            if *needed == 0 {
                self.open.pop();
                continue;
            }
            let Some(end) = find_line(&bytes[self.at..], &mut self.searched)? else {
                return Ok(false);
            };
            let line = &bytes[self.at..self.at + end];
            let after = self.at + end + 2;
            let part = Part::of(line)?;
            let next = match part {
                Part::Line => after,
                Part::Bulk(len) => after.saturating_add(len).saturating_add(2),
                Part::Many { .. } => after,
            };
            if next > self.max_bytes {
                return Err(ReplyError::TooLarge);
            }
            if next > bytes.len() {
                // Only a bulk string can be here; its header is read again, which is cheap.
                return Ok(false);
            }
            self.searched = 0;
            self.at = next;
            // An attribute stands before the value it belongs to: it does not count.
            let counts = !matches!(part, Part::Many { attribute: true, .. });
            *needed -= u64::from(counts);
            if let Part::Many { values, .. } = part
                && values > 0
            {
                if self.open.len() > MAX_DEPTH {
                    return Err(ReplyError::TooDeep);
                }
                self.open.push(values);
            }
        }
        Ok(true)
    }
}

/// The length of the line at the start of `rest`, without its end.
fn find_line(rest: &[u8], searched: &mut usize) -> Result<Option<usize>, ReplyError> {
    match rest[*searched..].iter().position(|byte| *byte == b'\r') {
        Some(found) => {
            let end = *searched + found;
            match rest.get(end + 1) {
                Some(b'\n') => Ok(Some(end)),
                Some(_) => Err(ReplyError::NoLineEnd),
                None => {
                    *searched = end;
                    Ok(None)
                }
            }
        }
        None if rest.len() > MAX_LINE => Err(ReplyError::TooLarge),
        None => {
            *searched = rest.len();
            Ok(None)
        }
    }
}

/// What follows a line of an answer.
#[derive(Clone, Copy)]
enum Part {
    /// Nothing.
    Line,
    /// So many bytes and a line end.
    Bulk(usize),
    /// So many values.
    Many { values: u64, attribute: bool },
}

impl Part {
    fn of(line: &[u8]) -> Result<Self, ReplyError> {
        let Some((mark, rest)) = line.split_first() else { return Err(ReplyError::UnknownType(b'\r')) };
        let many = |per: u64, attribute: bool| match parse_i64(rest) {
            Some(-1) if !attribute => Ok(Self::Line),
            Some(len @ 0..=0xffff_ffff) => Ok(Self::Many { values: len as u64 * per, attribute }),
            _ => Err(ReplyError::BadNumber),
        };
        match mark {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => Ok(Self::Line),
            b'$' | b'=' | b'!' => match parse_i64(rest) {
                Some(-1) => Ok(Self::Line),
                Some(len) => Ok(Self::Bulk(usize::try_from(len).map_err(|_| ReplyError::BadNumber)?)),
                None => Err(ReplyError::BadNumber),
            },
            b'*' | b'~' | b'>' => many(1, false),
            b'%' => many(2, false),
            b'|' => many(2, true),
            other => Err(ReplyError::UnknownType(*other)),
        }
    }
}

/// Builds the value of a complete answer.
struct Builder<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The same bytes, to be sliced instead of copied.
    shared: Option<&'a Bytes>,
}

impl Builder<'_> {
    fn value(&mut self) -> Result<Value, ReplyError> {
        let start = self.at;
        let mut searched = 0;
        let end = start + find_line(&self.bytes[start..], &mut searched)?.ok_or(ReplyError::NoLineEnd)?;
        self.at = end + 2;
        let part = Part::of(&self.bytes[start..end])?;
        let mark = self.bytes[start];
        let text = start + 1..end;
        match part {
            Part::Line => self.line(mark, text),
            Part::Bulk(len) => {
                let body = self.at..self.at + len;
                self.at += len + 2;
                if self.bytes.get(body.end..body.end + 2) != Some(b"\r\n") {
                    return Err(ReplyError::NoLineEnd);
                }
                Ok(match mark {
                    b'!' => Value::Error(self.take(body)),
                    b'=' if len >= 4 => Value::Verbatim {
                        kind: [
                            self.bytes[body.start],
                            self.bytes[body.start + 1],
                            self.bytes[body.start + 2],
                        ],
                        text: self.take(body.start + 4..body.end),
                    },
                    _ => Value::Bulk(self.take(body)),
                })
            }
            Part::Many { values, attribute: true } => {
                for _ in 0..values {
                    self.value()?;
                }
                self.value()
            }
            Part::Many { values, .. } => self.many(mark, values),
        }
    }

    fn line(&self, mark: u8, text: std::ops::Range<usize>) -> Result<Value, ReplyError> {
        let bytes = &self.bytes[text.clone()];
        Ok(match mark {
            b'+' if bytes == b"OK" => Value::ok(),
            b'+' => Value::Simple(self.take(text)),
            b'-' => Value::Error(self.take(text)),
            b':' => Value::Integer(parse_i64(bytes).ok_or(ReplyError::BadNumber)?),
            b'#' => match bytes {
                b"t" => Value::Boolean(true),
                b"f" => Value::Boolean(false),
                _ => return Err(ReplyError::BadNumber),
            },
            b',' => {
                let number = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
                Value::Double(number.ok_or(ReplyError::BadNumber)?)
            }
            b'(' => Value::BigNumber(self.take(text)),
            _ => Value::Null,
        })
    }

    fn many(&mut self, mark: u8, values: u64) -> Result<Value, ReplyError> {
        // A value has at least three bytes, and all of them are here: the announced number cannot make us allocate.
        let room = (self.bytes.len() - self.at) / 3;
        if mark == b'%' {
            let pairs = (values / 2) as usize;
            let mut map = Vec::with_capacity(pairs.min(room));
            for _ in 0..pairs {
                map.push((self.value()?, self.value()?));
            }
            return Ok(Value::Map(map));
        }
        let mut all = Vec::with_capacity((values as usize).min(room));
        for _ in 0..values {
            all.push(self.value()?);
        }
        Ok(match mark {
            b'~' => Value::Set(all),
            b'>' => Value::Push(all),
            _ => Value::Array(all),
        })
    }

    fn take(&self, range: std::ops::Range<usize>) -> Bytes {
        match self.shared {
            Some(shared) => shared.slice(range),
            None => Bytes::copy_from_slice(&self.bytes[range]),
        }
    }
}

#[cfg(test)]
mod tests;
