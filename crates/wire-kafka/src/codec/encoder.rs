//! [`Encoder`]: one growing buffer, and the gaps that record data will fill.
//!
//! Invariant: gaps are in ascending order of `at`, and none lies inside a tagged field, because closing a
//! tagged field moves its bytes.

use bytes::{BufMut, Bytes, BytesMut};

use super::{MAX_STRING, Records};
use crate::{KString, Uuid};

/// Why a message cannot be written in the version asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A non-ignorable field has a value, and this version does not have the field.
    #[error("{message}.{field} does not exist in version {version}")]
    NoSuchField {
        /// The struct.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// The version asked for.
        version: i16,
    },
    /// Null where this version has no null.
    #[error("{message}.{field} cannot be null in version {version}")]
    NotNullable {
        /// The struct.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// The version asked for.
        version: i16,
    },
    /// More than the length field can represent.
    #[error("{0} bytes or elements are too many for one field")]
    TooLong(usize),
    /// A version of the API that this codec does not know.
    #[error("unsupported version {version} of API key {key}")]
    UnsupportedVersion {
        /// The API.
        key: i16,
        /// The version asked for.
        version: i16,
    },
}

/// A gap in an encoded message: `len` bytes belong between `buf[..at]` and `buf[at..]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// Position in the encoder's buffer (earlier gaps take no room there).
    pub at: usize,
    /// Bytes to put there.
    pub len: usize,
}

/// Appends the protocol's types to a buffer.
#[derive(Debug, Default)]
pub struct Encoder {
    buf: BytesMut,
    gaps: Vec<Gap>,
    flexible: bool,
}

impl Encoder {
    /// An encoder with an empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// An encoder that appends to `buf`.
    pub fn with_buf(buf: BytesMut) -> Self {
        Self { buf, ..Self::default() }
    }

    /// The buffer and its gaps.
    pub fn finish(self) -> (BytesMut, Vec<Gap>) {
        (self.buf, self.gaps)
    }

    /// Chooses between compact and classic lengths. [`super::Message::encode`] does this for its message.
    pub fn set_flexible(&mut self, flexible: bool) {
        self.flexible = flexible;
    }

    /// True when lengths are compact and structs end with tagged fields.
    pub fn is_flexible(&self) -> bool {
        self.flexible
    }

    /// Bytes in the buffer, without gaps.
    pub fn position(&self) -> usize {
        self.buf.len()
    }

    /// The total size of all gaps.
    pub fn gap_bytes(&self) -> usize {
        self.gaps.iter().map(|gap| gap.len).sum()
    }

    /// Overwrites four bytes written before, for a size that is known only at the end.
    ///
    /// # Panics
    /// When fewer than four bytes lie at `at`.
    pub fn patch_i32(&mut self, at: usize, value: i32) {
        self.buf[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    /// A signed byte.
    pub fn i8(&mut self, value: i8) {
        self.buf.put_i8(value);
    }

    /// A big-endian 16-bit integer.
    pub fn i16(&mut self, value: i16) {
        self.buf.put_i16(value);
    }

    /// A big-endian 32-bit integer.
    pub fn i32(&mut self, value: i32) {
        self.buf.put_i32(value);
    }

    /// A big-endian 64-bit integer.
    pub fn i64(&mut self, value: i64) {
        self.buf.put_i64(value);
    }

    /// A big-endian double.
    pub fn f64(&mut self, value: f64) {
        self.buf.put_f64(value);
    }

    /// One byte, 0 or 1.
    pub fn bool(&mut self, value: bool) {
        self.buf.put_u8(value.into());
    }

    /// Sixteen raw bytes.
    pub fn uuid(&mut self, value: Uuid) {
        self.buf.put_slice(&value.0);
    }

    /// An unsigned varint.
    pub fn uvarint(&mut self, mut value: u32) {
        while value >= 0x80 {
            self.buf.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.buf.put_u8(value as u8);
    }

    /// The length of a byte field or an array: compact or four bytes; `None` is null.
    pub fn length(&mut self, len: Option<usize>) -> Result<(), EncodeError> {
        let wide = match len {
            None => -1,
            Some(len) => i32::try_from(len).map_err(|_| EncodeError::TooLong(len))?,
        };
        match self.flexible {
            true => self.uvarint((wide as u32).wrapping_add(1)),
            false => self.i32(wide),
        }
        Ok(())
    }

    /// A string that may be null.
    pub fn nullable_string(&mut self, text: Option<&KString>) -> Result<(), EncodeError> {
        if !self.flexible {
            return self.classic_nullable_string(text);
        }
        let bytes = checked_text(text)?;
        self.length(bytes.map(Bytes::len))?;
        self.raw(bytes);
        Ok(())
    }

    /// A string whose length takes two bytes whatever the message says: the client id of a request header.
    pub fn classic_nullable_string(&mut self, text: Option<&KString>) -> Result<(), EncodeError> {
        let bytes = checked_text(text)?;
        self.i16(bytes.map_or(-1, |bytes| bytes.len() as i16));
        self.raw(bytes);
        Ok(())
    }

    /// Bytes that may be null.
    pub fn nullable_bytes(&mut self, bytes: Option<&Bytes>) -> Result<(), EncodeError> {
        self.length(bytes.map(Bytes::len))?;
        self.raw(bytes);
        Ok(())
    }

    /// Record batches, or the gap that they will fill.
    pub fn nullable_records(&mut self, records: Option<&Records>) -> Result<(), EncodeError> {
        match records {
            Some(Records::Gap(len)) => {
                self.length(Some(*len))?;
                if *len > 0 {
                    self.gaps.push(Gap { at: self.buf.len(), len: *len });
                }
                Ok(())
            }
            Some(Records::Bytes(bytes)) => self.nullable_bytes(Some(bytes)),
            None => self.nullable_bytes(None),
        }
    }

    /// One tagged field: its number, its size, and what `write` appends.
    pub fn tagged_field(
        &mut self,
        tag: u32,
        write: impl FnOnce(&mut Self) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        self.uvarint(tag);
        let start = self.buf.len();
        let gaps = self.gaps.len();
        write(self)?;
        assert_eq!(gaps, self.gaps.len(), "record data inside a tagged field");
        // The size comes first but is known last: append its varint, then rotate it to the front. Tagged
        // fields are rare and small, so moving their bytes once beats measuring every field in advance.
        let size = self.buf.len() - start;
        self.uvarint(u32::try_from(size).map_err(|_| EncodeError::TooLong(size))?);
        self.buf[start..].rotate_left(size);
        Ok(())
    }

    fn raw(&mut self, bytes: Option<&Bytes>) {
        if let Some(bytes) = bytes {
            self.buf.put_slice(bytes);
        }
    }
}

fn checked_text(text: Option<&KString>) -> Result<Option<&Bytes>, EncodeError> {
    match text.map(KString::as_bytes) {
        Some(bytes) if bytes.len() > MAX_STRING => Err(EncodeError::TooLong(bytes.len())),
        bytes => Ok(bytes),
    }
}
