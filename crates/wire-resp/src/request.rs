//! Requests as they arrive at a server: an array of bulk strings, or an inline command.
//!
//! The caller keeps the bytes of its connection; the decoder keeps its position. After [`Decoded::Incomplete`] the
//! next call passes the same bytes and more; after [`Decoded::Request`] the next call starts after the consumed
//! bytes.
//!
//! Invariants:
//! - An announced length is checked before it is used; memory grows only with received bytes.
//! - A byte is examined a bounded number of times, however small the chunks it arrives in.
//! - The error texts are those of Redis: clients and test suites compare them. After an error the connection must be
//!   closed, because the start of the next request is unknown.

mod batch;

use thiserror::Error;

use crate::args::{Args, Span};
use crate::number::parse_i64;

pub use batch::Batch;

/// The maximum line length: an inline command, or the header of an array or of a bulk string.
const MAX_LINE: usize = 64 * 1024;

/// The limits of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum length of an argument (`proto-max-bulk-len`).
    pub bulk: usize,
    /// The maximum number of arguments.
    pub args: usize,
    /// The maximum size of one request, headers included (`client-query-buffer-limit`). Below 4 GiB.
    pub request: usize,
    /// True before authentication: then a request may have 10 arguments of 16 KiB, enough for AUTH and HELLO.
    pub unauthenticated: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bulk: 512 << 20, args: i32::MAX as usize, request: 1 << 30, unauthenticated: false }
    }
}

impl Limits {
    /// The maximum number and length of arguments before authentication.
    const UNAUTHENTICATED: (usize, usize) = (10, 16 * 1024);
}

/// Why a connection must be closed. `Display` is the text after `-ERR `.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// A line without an end.
    #[error("Protocol error: too big inline request")]
    InlineTooBig,
    /// An unbalanced quote, or a character directly after a closing quote.
    #[error("Protocol error: unbalanced quotes in request")]
    UnbalancedQuotes,
    /// The header of an array without an end.
    #[error("Protocol error: too big mbulk count string")]
    CountTooBig,
    /// Not a valid number of arguments, or too many.
    #[error("Protocol error: invalid multibulk length")]
    InvalidCount,
    /// Too many arguments for an unauthenticated client.
    #[error("Protocol error: unauthenticated multibulk length")]
    UnauthenticatedCount,
    /// The header of a bulk string without an end.
    #[error("Protocol error: too big bulk count string")]
    LengthTooBig,
    /// Not a bulk string.
    #[error("Protocol error: expected '$', got '{}'", char::from(if *.0 == 0 { b' ' } else { *.0 }))]
    ExpectedBulk(u8),
    /// Not a valid argument length, or too long.
    #[error("Protocol error: invalid bulk length")]
    InvalidLength,
    /// An argument too long for an unauthenticated client.
    #[error("Protocol error: unauthenticated bulk length")]
    UnauthenticatedLength,
    /// More bytes than one request may have.
    #[error("Protocol error: too big request")]
    RequestTooBig,
}

/// The result of [`Decoder::decode`] at the start of the bytes.
#[derive(Debug)]
pub enum Decoded<'a> {
    /// A command; the next one begins `consumed` bytes further.
    Request {
        /// Its name and arguments: at least one.
        args: Args<'a>,
        /// Its length on the wire.
        consumed: usize,
    },
    /// Nothing to answer (an empty line, an empty array), `consumed` bytes long.
    Empty {
        /// Its length on the wire.
        consumed: usize,
    },
    /// The request is not complete.
    Incomplete {
        /// A good size for the next read: at most what is missing, at most double what arrived, at least 1.
        want: usize,
    },
}

/// Decodes the requests of one connection.
///
/// ```
/// use moim_wire_resp::{Decoded, Decoder};
/// let mut decoder = Decoder::default();
/// let bytes = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING\r\n";
/// let Ok(Decoded::Request { args, consumed }) = decoder.decode(bytes) else { panic!() };
/// assert_eq!((args.name(), &args[1], consumed), (&b"GET"[..], &b"k"[..], 20));
/// ```
#[derive(Debug, Default)]
pub struct Decoder {
    limits: Limits,
    /// The position in the current request.
    at: usize,
    /// How far beyond `at` a line end has been searched for without success.
    searched: usize,
    /// The arguments still to come of an array; `None` before its header.
    missing: Option<usize>,
    /// The length of the argument at `at`, once its header was read.
    bulk: Option<usize>,
    /// The arguments read so far. Kept between requests, so that it is not allocated again.
    spans: Vec<Span>,
    /// The arguments of an inline command, quotes and escapes taken away.
    inline: Vec<u8>,
}

/// Spans kept between requests; a rare request with more gives the memory back.
const KEEP_SPANS: usize = 1024;

impl Decoder {
    /// A decoder with limits of its own.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Changes the limits, from the next length on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes that the decoder holds itself: where the arguments of a request lie that has begun.
    pub fn held_bytes(&self) -> usize {
        self.spans.capacity() * size_of::<Span>() + self.inline.capacity()
    }

    /// Decodes a request at the start of `bytes`.
    pub fn decode<'a>(&'a mut self, bytes: &'a [u8]) -> Result<Decoded<'a>, ProtocolError> {
        match bytes.first() {
            None => return Ok(Decoded::Incomplete { want: 1 }),
            Some(b'*') => {}
            Some(_) => return self.inline(bytes),
        }
        let missing = match self.missing {
            Some(missing) => missing,
            None => {
                self.start();
                let Some(line) = self.line(bytes, 1, ProtocolError::CountTooBig)? else {
                    return Ok(Decoded::Incomplete { want: 1 });
                };
                match self.count(line)? {
                    0 => return Ok(Decoded::Empty { consumed: std::mem::take(&mut self.at) }),
                    count => *self.missing.insert(count),
                }
            }
        };
        match self.arguments(bytes, missing)? {
            Some(want) => Ok(Decoded::Incomplete { want }),
            None => {
                self.missing = None;
                let consumed = std::mem::take(&mut self.at);
                Ok(Decoded::Request { args: Args::new(bytes, &self.spans), consumed })
            }
        }
    }

    /// Clears the arguments of the previous request.
    fn start(&mut self) {
        self.spans.clear();
        if self.spans.capacity() > KEEP_SPANS {
            self.spans.shrink_to(KEEP_SPANS);
        }
    }

    /// Reads arguments until all are complete (`None`), or until more bytes are needed.
    fn arguments(&mut self, bytes: &[u8], mut missing: usize) -> Result<Option<usize>, ProtocolError> {
        while missing > 0 {
            let len = match self.bulk {
                Some(len) => len,
                None => {
                    let kind = bytes.get(self.at).copied();
                    let Some(line) = self.line(bytes, 1, ProtocolError::LengthTooBig)? else {
                        return Ok(Some(1));
                    };
                    match kind {
                        Some(b'$') => {}
                        other => return Err(ProtocolError::ExpectedBulk(other.unwrap_or_default())),
                    }
                    *self.bulk.insert(self.length(line)?)
                }
            };
            // Redis does not look at the two bytes after an argument either.
            let end = self.at + len + 2;
            if end > self.limits.request {
                return Err(ProtocolError::RequestTooBig);
            }
            if bytes.len() < end {
                return Ok(Some((end - bytes.len()).min(bytes.len().max(16 * 1024))));
            }
            self.spans.push(Span::new(self.at, len).ok_or(ProtocolError::RequestTooBig)?);
            self.at = end;
            self.bulk = None;
            missing -= 1;
            self.missing = Some(missing);
        }
        Ok(None)
    }

    /// The line at `at` without its first `skip` bytes, and moves past its end; `None` while it has no end.
    #[inline]
    fn line<'a>(
        &mut self,
        bytes: &'a [u8],
        skip: usize,
        too_long: ProtocolError,
    ) -> Result<Option<&'a [u8]>, ProtocolError> {
        let rest = &bytes[self.at..];
        match rest[self.searched..].iter().position(|byte| *byte == b'\r') {
            // The end of a line is two bytes; like Redis we do not look at the second.
            Some(found) if self.searched + found + 1 < rest.len() => {
                let end = self.searched + found;
                self.searched = 0;
                self.at += end + 2;
                Ok(Some(rest.get(skip..end).unwrap_or_default()))
            }
            Some(found) => {
                self.searched += found;
                Ok(None)
            }
            None if rest.len() > MAX_LINE => Err(too_long),
            None => {
                self.searched = rest.len();
                Ok(None)
            }
        }
    }

    fn count(&self, text: &[u8]) -> Result<usize, ProtocolError> {
        let count = parse_i64(text).ok_or(ProtocolError::InvalidCount)?;
        // Redis takes a negative number for none.
        let count = usize::try_from(count).unwrap_or(0);
        if count > self.limits.args {
            return Err(ProtocolError::InvalidCount);
        }
        if self.limits.unauthenticated && count > Limits::UNAUTHENTICATED.0 {
            return Err(ProtocolError::UnauthenticatedCount);
        }
        Ok(count)
    }

    #[inline]
    fn length(&self, text: &[u8]) -> Result<usize, ProtocolError> {
        let len = match text {
            [digit @ b'0'..=b'9'] => usize::from(digit - b'0'),
            _ => {
                let len = parse_i64(text).ok_or(ProtocolError::InvalidLength)?;
                usize::try_from(len).map_err(|_| ProtocolError::InvalidLength)?
            }
        };
        if len > self.limits.bulk {
            return Err(ProtocolError::InvalidLength);
        }
        if self.limits.unauthenticated && len > Limits::UNAUTHENTICATED.1 {
            return Err(ProtocolError::UnauthenticatedLength);
        }
        Ok(len)
    }

    /// A command on one line, ended by a line feed.
    fn inline<'a>(&'a mut self, bytes: &'a [u8]) -> Result<Decoded<'a>, ProtocolError> {
        let Some(found) = bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
            if bytes.len() > MAX_LINE {
                return Err(ProtocolError::InlineTooBig);
            }
            self.searched = bytes.len();
            return Ok(Decoded::Incomplete { want: 1 });
        };
        let end = self.searched + found;
        if end > MAX_LINE {
            return Err(ProtocolError::InlineTooBig);
        }
        self.searched = 0;
        self.start();
        self.inline.clear();
        let line = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
        split_line(line, &mut self.inline, &mut self.spans).ok_or(ProtocolError::UnbalancedQuotes)?;
        let consumed = end + 1;
        if self.spans.is_empty() {
            return Ok(Decoded::Empty { consumed });
        }
        Ok(Decoded::Request { args: Args::new(&self.inline, &self.spans), consumed })
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
}

/// Splits a typed line into words: `"…"` with escapes, `'…'` with `\'`, or anything without space. `None` when a quote
/// is open at the end or something stands directly after a closing one.
fn split_line(line: &[u8], words: &mut Vec<u8>, spans: &mut Vec<Span>) -> Option<()> {
    // Redis reads the line as a C string.
    let mut rest = line.split(|byte| *byte == 0).next().unwrap_or_default();
    loop {
        while let [first, tail @ ..] = rest
            && is_space(*first)
        {
            rest = tail;
        }
        if rest.is_empty() {
            return Some(());
        }
        let start = words.len();
        while let Some((&byte, tail)) = rest.split_first() {
            rest = match byte {
                byte if is_space(byte) => break,
                b'"' => after_quote(double_quoted(tail, words)?)?,
                b'\'' => after_quote(single_quoted(tail, words)?)?,
                byte => {
                    words.push(byte);
                    tail
                }
            };
        }
        spans.push(Span::new(start, words.len() - start)?);
    }
}

/// A closing quote ends the word: space or the end must follow.
fn after_quote(rest: &[u8]) -> Option<&[u8]> {
    match rest.first() {
        Some(byte) if !is_space(*byte) => None,
        _ => Some(rest),
    }
}

fn double_quoted<'a>(mut rest: &'a [u8], words: &mut Vec<u8>) -> Option<&'a [u8]> {
    loop {
        rest = match rest {
            [] => return None,
            [b'"', tail @ ..] => return Some(tail),
            [b'\\', b'x', high, low, tail @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                words.push(hex(*high) << 4 | hex(*low));
                tail
            }
            [b'\\', escaped, tail @ ..] => {
                words.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 0x08,
                    b'a' => 0x07,
                    other => *other,
                });
                tail
            }
            [byte, tail @ ..] => {
                words.push(*byte);
                tail
            }
        };
    }
}

fn single_quoted<'a>(mut rest: &'a [u8], words: &mut Vec<u8>) -> Option<&'a [u8]> {
    loop {
        rest = match rest {
            [] => return None,
            [b'\'', tail @ ..] => return Some(tail),
            [b'\\', b'\'', tail @ ..] => {
                words.push(b'\'');
                tail
            }
            [byte, tail @ ..] => {
                words.push(*byte);
                tail
            }
        };
    }
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

#[cfg(test)]
mod tests;
