//! [`Decoder`]: a bounded cursor over one frame.
//!
//! Invariant: `pos <= buf.len()`. No method panics on any input; all of it comes from outside.

use bytes::Bytes;

use super::MAX_STRING;
use crate::{KString, Uuid};

/// Why a frame cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The frame ends inside a field.
    #[error("the message ends {missing} bytes early")]
    Truncated {
        /// Bytes that were needed beyond the end.
        missing: usize,
    },
    /// A length is negative, or more than the rest of the frame could hold.
    #[error("length {0} is impossible here")]
    BadLength(i64),
    /// A varint does not end within five bytes.
    #[error("malformed varint")]
    BadVarint,
    /// Text is not UTF-8.
    #[error("text is not UTF-8")]
    NotUtf8,
    /// Null where this version has no null.
    #[error("null in a field that cannot be null")]
    UnexpectedNull,
    /// A tagged field is shorter or longer than its announced size.
    #[error("tagged field {0} does not have its announced size")]
    BadTagSize(u32),
    /// Bytes are left after the last field.
    #[error("{0} bytes left after the last field")]
    TrailingBytes(usize),
    /// An API key that this codec does not know.
    #[error("unknown API key {0}")]
    UnknownApi(i16),
    /// A version of a known API that this codec does not know.
    #[error("unsupported version {version} of API key {key}")]
    UnsupportedVersion {
        /// The API.
        key: i16,
        /// The version asked for.
        version: i16,
    },
}

/// Reads the protocol's types from a frame, front to back.
#[derive(Debug)]
pub struct Decoder {
    buf: Bytes,
    pos: usize,
    flexible: bool,
}

impl Decoder {
    /// A decoder at the start of `buf`.
    pub fn new(buf: Bytes) -> Self {
        Self { buf, pos: 0, flexible: false }
    }

    /// Chooses between compact and classic lengths. [`super::Message::decode`] does this for its message.
    pub fn set_flexible(&mut self, flexible: bool) {
        self.flexible = flexible;
    }

    /// True when lengths are compact and structs end with tagged fields.
    pub fn is_flexible(&self) -> bool {
        self.flexible
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.buf.len() - self.pos
    }

    /// Bytes read so far.
    pub fn position(&self) -> usize {
        self.pos
    }

    /// Everything not read yet, without a copy.
    pub fn rest(self) -> Bytes {
        self.buf.slice(self.pos..)
    }

    /// Ends strict decoding: trailing bytes are an error. Skip this call to tolerate them.
    pub fn finish(&self) -> Result<(), DecodeError> {
        match self.remaining() {
            0 => Ok(()),
            left => Err(DecodeError::TrailingBytes(left)),
        }
    }

    /// The next `len` bytes as a slice of the frame.
    pub fn take(&mut self, len: usize) -> Result<Bytes, DecodeError> {
        self.need(len)?;
        let slice = self.buf.slice(self.pos..self.pos + len);
        self.pos += len;
        Ok(slice)
    }

    /// Steps over `len` bytes.
    pub fn skip(&mut self, len: usize) -> Result<(), DecodeError> {
        self.need(len)?;
        self.pos += len;
        Ok(())
    }

    /// A signed byte.
    pub fn i8(&mut self) -> Result<i8, DecodeError> {
        self.array().map(i8::from_be_bytes)
    }

    /// A big-endian 16-bit integer.
    pub fn i16(&mut self) -> Result<i16, DecodeError> {
        self.array().map(i16::from_be_bytes)
    }

    /// A big-endian 32-bit integer.
    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_be_bytes)
    }

    /// A big-endian 64-bit integer.
    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.array().map(i64::from_be_bytes)
    }

    /// A big-endian double.
    pub fn f64(&mut self) -> Result<f64, DecodeError> {
        self.array().map(f64::from_be_bytes)
    }

    /// A byte; anything but zero is true.
    pub fn bool(&mut self) -> Result<bool, DecodeError> {
        self.i8().map(|byte| byte != 0)
    }

    /// Sixteen raw bytes.
    pub fn uuid(&mut self) -> Result<Uuid, DecodeError> {
        self.array().map(Uuid)
    }

    /// An unsigned varint of at most 32 bits.
    pub fn uvarint(&mut self) -> Result<u32, DecodeError> {
        let mut value: u64 = 0;
        for shift in (0..35).step_by(7) {
            let byte = self.i8()? as u8;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).map_err(|_| DecodeError::BadVarint);
            }
        }
        Err(DecodeError::BadVarint)
    }

    /// The length of a byte field or an array: compact or four bytes; `None` is null.
    pub fn length(&mut self) -> Result<Option<usize>, DecodeError> {
        let len = match self.flexible {
            true => i64::from(self.uvarint()?) - 1,
            false => i64::from(self.i32()?),
        };
        Self::checked_length(len)
    }

    /// A string that may be null.
    pub fn nullable_string(&mut self) -> Result<Option<KString>, DecodeError> {
        let len = match self.flexible {
            true => Self::checked_length(i64::from(self.uvarint()?) - 1)?,
            false => self.short_length()?,
        };
        self.string_of(len)
    }

    /// A string whose length takes two bytes whatever the message says: the client id of a request header.
    pub fn classic_nullable_string(&mut self) -> Result<Option<KString>, DecodeError> {
        let len = self.short_length()?;
        self.string_of(len)
    }

    /// Bytes that may be null, as a slice of the frame.
    pub fn nullable_bytes(&mut self) -> Result<Option<Bytes>, DecodeError> {
        match self.length()? {
            Some(len) => self.take(len).map(Some),
            None => Ok(None),
        }
    }

    /// Reads the tagged fields that end a flexible struct. `on_tag` reads a known field and returns true; an unknown
    /// field is skipped.
    pub fn tagged_fields(
        &mut self,
        mut on_tag: impl FnMut(&mut Self, u32) -> Result<bool, DecodeError>,
    ) -> Result<(), DecodeError> {
        // The count needs no bound: every field takes at least two bytes, so a lie ends in `Truncated`.
        for _ in 0..self.uvarint()? {
            let tag = self.uvarint()?;
            let size = self.uvarint()? as usize;
            self.need(size)?;
            let end = self.pos + size;
            if !on_tag(self, tag)? {
                self.pos = end;
            }
            if self.pos != end {
                return Err(DecodeError::BadTagSize(tag));
            }
        }
        Ok(())
    }

    /// Skips the tagged fields of a struct that has none.
    pub fn skip_tagged_fields(&mut self) -> Result<(), DecodeError> {
        self.tagged_fields(|_, _| Ok(false))
    }

    fn short_length(&mut self) -> Result<Option<usize>, DecodeError> {
        Self::checked_length(i64::from(self.i16()?))
    }

    fn checked_length(len: i64) -> Result<Option<usize>, DecodeError> {
        match len {
            -1 => Ok(None),
            _ => usize::try_from(len).map(Some).map_err(|_| DecodeError::BadLength(len)),
        }
    }

    fn string_of(&mut self, len: Option<usize>) -> Result<Option<KString>, DecodeError> {
        match len {
            Some(len) if len > MAX_STRING => Err(DecodeError::BadLength(len as i64)),
            Some(len) => KString::from_utf8(self.take(len)?).map(Some),
            None => Ok(None),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        match self.buf[self.pos..].first_chunk::<N>() {
            Some(bytes) => {
                self.pos += N;
                Ok(*bytes)
            }
            None => Err(DecodeError::Truncated { missing: N - self.remaining() }),
        }
    }

    fn need(&self, len: usize) -> Result<(), DecodeError> {
        match len.checked_sub(self.remaining()) {
            None | Some(0) => Ok(()),
            Some(missing) => Err(DecodeError::Truncated { missing }),
        }
    }
}
