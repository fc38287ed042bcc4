//! The binary encoding of commands and replies: the content of the Raft log and of messages between nodes.
//!
//! A message is a format byte, then a tag and its fields. Numbers are LEB128 (negative ones in ten bytes), byte strings
//! have a length prefix, flags share a byte. Formats only grow: a tag is never reused, and golden tests hold the bytes.
//!
//! Decoding trusts nothing: byte strings are slices of the input, lists allocate as their items are read, nesting is
//! bounded, and trailing bytes are an error.

use bytes::{Buf, Bytes};

use crate::error::Error;
use crate::lease::LeaseId;
use crate::request::{Command, MAX_REQUEST_BYTES, Op};

mod reply;
mod request;

/// The format that is written. Every format up to it is read.
const FORMAT: u8 = 1;
/// A transaction within 128 operations along each path cannot be nested deeper than this.
const MAX_DEPTH: usize = 130;

/// Why bytes cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// The message ends too early.
    #[error("message truncated")]
    Truncated,
    /// Bytes follow the end of the message.
    #[error("{0} trailing bytes after the message")]
    Trailing(usize),
    /// Written by a newer version.
    #[error("message format {0} is newer than this version reads")]
    Format(u8),
    /// An unknown tag or flag.
    #[error("invalid {what}: {found}")]
    Unknown {
        /// The field.
        what: &'static str,
        /// Its value.
        found: u64,
    },
    /// A number of more than 64 bits.
    #[error("LEB128 number longer than 64 bits")]
    Number,
    /// Nested deeper than any valid transaction.
    #[error("transaction nested too deep")]
    Depth,
}

type Decoded<T> = Result<T, DecodeError>;

impl Command {
    /// Appends the encoding.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(FORMAT);
        request::put_command(out, self);
    }

    /// The encoding for a proposal; refuses a command above the request size limit.
    pub fn to_entry(&self) -> Result<Bytes, Error> {
        let size = match &self.op {
            Op::Put(put) => put.key.len() + put.value.len() + 32,
            _ => 256,
        };
        let mut out = Vec::with_capacity(size);
        self.encode(&mut out);
        if out.len() > MAX_REQUEST_BYTES { Err(Error::RequestTooLarge) } else { Ok(Bytes::from(out)) }
    }

    /// Decodes a command. Keys and values are slices of `bytes`.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        decode_all(bytes, request::command)
    }
}

impl crate::reply::Reply {
    /// Appends the encoding.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(FORMAT);
        reply::put_reply(out, self);
    }

    /// Decodes a reply. Keys and values are slices of `bytes`.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        decode_all(bytes, reply::reply)
    }
}

impl crate::request::RangeRequest {
    /// Appends the encoding: a range read that a follower forwards.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(FORMAT);
        request::put_range(out, self);
    }

    /// Decodes a range request.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        decode_all(bytes, request::range)
    }
}

impl crate::reply::RangeReply {
    /// Appends the encoding: the reply to a forwarded range read.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(FORMAT);
        reply::put_range_reply(out, self);
    }

    /// Decodes a range reply.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        decode_all(bytes, reply::range_reply)
    }
}

fn decode_all<T>(bytes: Bytes, read: impl FnOnce(&mut Input) -> Decoded<T>) -> Decoded<T> {
    let mut input = Input { bytes };
    match input.u8()? {
        FORMAT => {}
        other => return Err(DecodeError::Format(other)),
    }
    let message = read(&mut input)?;
    match input.bytes.len() {
        0 => Ok(message),
        left => Err(DecodeError::Trailing(left)),
    }
}

pub(crate) fn put_u64(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(crate) fn put_i64(out: &mut Vec<u8>, number: i64) {
    put_u64(out, number as u64);
}

pub(crate) fn put_lease(out: &mut Vec<u8>, lease: LeaseId) {
    put_i64(out, lease.0);
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_u64(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_flags<const N: usize>(out: &mut Vec<u8>, flags: [bool; N]) {
    const { assert!(N <= 8) };
    let byte = flags.iter().enumerate().fold(0, |byte, (bit, on)| byte | u8::from(*on) << bit);
    out.push(byte);
}

fn put_list<T>(out: &mut Vec<u8>, list: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    put_u64(out, list.len() as u64);
    for item in list {
        put(out, item);
    }
}

/// The input that is left to decode.
pub(crate) struct Input {
    pub(crate) bytes: Bytes,
}

impl Input {
    pub(crate) fn u8(&mut self) -> Decoded<u8> {
        if self.bytes.is_empty() { Err(DecodeError::Truncated) } else { Ok(self.bytes.get_u8()) }
    }

    pub(crate) fn u64(&mut self) -> Decoded<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Number);
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(DecodeError::Number)
    }

    pub(crate) fn i64(&mut self) -> Decoded<i64> {
        Ok(self.u64()? as i64)
    }

    pub(crate) fn lease(&mut self) -> Decoded<LeaseId> {
        Ok(LeaseId(self.i64()?))
    }

    pub(crate) fn bytes(&mut self) -> Decoded<Bytes> {
        let length = usize::try_from(self.u64()?).map_err(|_| DecodeError::Truncated)?;
        if length > self.bytes.len() { Err(DecodeError::Truncated) } else { Ok(self.bytes.split_to(length)) }
    }

    fn flags<const N: usize>(&mut self, what: &'static str) -> Decoded<[bool; N]> {
        let byte = self.u8()?;
        if u32::from(byte) >> N != 0 {
            return Err(DecodeError::Unknown { what, found: byte.into() });
        }
        Ok(std::array::from_fn(|bit| byte >> bit & 1 == 1))
    }

    fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Decoded<T>) -> Decoded<Vec<T>> {
        let length = self.u64()?;
        // Capacity grows with the input: a false length ends at the end of the bytes.
        let mut list = Vec::with_capacity(length.min(MAX_LIST_GUESS) as usize);
        for _ in 0..length {
            list.push(read(self)?);
        }
        Ok(list)
    }
}

/// Capacity allocated for a list before its items are read.
const MAX_LIST_GUESS: u64 = 256;

#[cfg(test)]
mod tests;
