//! RDB serialization of values: the payloads of `DUMP`, `RESTORE` and `MIGRATE`.
//!
//! A payload is a type byte, a body, the RDB version (two bytes) and a CRC-64 of everything before it. We write the
//! plain encodings, which every Redis since 4.0 reads (streams in that of 7.0); we read all encodings up to Redis
//! 7.2, including packed ones. A payload is untrusted input: everything is validated, and no allocation exceeds what
//! the received bytes justify.

mod crc64;
#[doc(hidden)]
pub mod fuzzing;
mod lzf;
mod packed;
mod read;
mod stream;

pub use crc64::crc64;
pub use read::BadFormat;

use crate::value::hash::Hash;
use crate::value::list::List;
use crate::value::set::Set;
use crate::value::stream::Stream;
use crate::value::zset::Zset;

/// The RDB version written: that of Redis 7.0.
const VERSION: u16 = 10;
/// The newest RDB version accepted: that of Redis 7.4.
const NEWEST: u16 = 12;

/// Opcode of a function library.
const FUNCTION: u8 = 245;

/// Type bytes of the encodings written.
mod kind {
    pub(super) const STRING: u8 = 0;
    pub(super) const LIST: u8 = 1;
    pub(super) const SET: u8 = 2;
    pub(super) const HASH: u8 = 4;
    pub(super) const ZSET_2: u8 = 5;
    pub(super) const STREAM_2: u8 = 19;
}

/// A value to serialize.
#[derive(Clone, Copy, Debug)]
pub enum ObjectRef<'a> {
    /// A string.
    String(&'a [u8]),
    /// A list.
    List(&'a List),
    /// A set.
    Set(&'a Set),
    /// A hash.
    Hash(&'a Hash),
    /// A sorted set.
    Zset(&'a Zset),
    /// A stream.
    Stream(&'a Stream),
}

/// A deserialized value.
#[derive(Clone, Debug)]
pub enum Object {
    /// A string.
    String(Vec<u8>),
    /// A list.
    List(List),
    /// A set.
    Set(Set),
    /// A hash.
    Hash(Hash),
    /// A sorted set.
    Zset(Zset),
    /// A stream.
    Stream(Box<Stream>),
}

/// Why a payload was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Wrong version or checksum in the footer.
    #[error("ERR DUMP payload version or checksum are wrong")]
    Footer,
    /// The body does not match its type.
    #[error("ERR Bad data format")]
    Body,
}

/// Serializes a value with footer (DUMP).
pub fn dump(value: ObjectRef<'_>) -> Vec<u8> {
    let mut payload = Vec::new();
    write_object(&mut payload, value);
    payload.extend_from_slice(&VERSION.to_le_bytes());
    let sum = crc64(0, &payload);
    payload.extend_from_slice(&sum.to_le_bytes());
    payload
}

/// Serializes function libraries: the code of each after an opcode.
pub fn dump_functions<'a>(codes: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut payload = Vec::new();
    for code in codes {
        payload.push(FUNCTION);
        write_string(&mut payload, code);
    }
    payload.extend_from_slice(&VERSION.to_le_bytes());
    let sum = crc64(0, &payload);
    payload.extend_from_slice(&sum.to_le_bytes());
    payload
}

/// The code of each library in a payload.
pub fn restore_functions(payload: &[u8]) -> Result<Vec<Vec<u8>>, RestoreError> {
    let body = checked(payload)?;
    read::functions(body, FUNCTION).map_err(|BadFormat| RestoreError::Body)
}

/// Verifies version and checksum and returns the body.
fn checked(payload: &[u8]) -> Result<&[u8], RestoreError> {
    let body_end = payload.len().checked_sub(10).ok_or(RestoreError::Footer)?;
    let (covered, sum) = payload.split_at(body_end + 2);
    let version = u16::from_le_bytes([covered[body_end], covered[body_end + 1]]);
    if version > NEWEST || crc64(0, covered).to_le_bytes() != sum {
        return Err(RestoreError::Footer);
    }
    Ok(&payload[..body_end])
}

/// Deserializes a payload (RESTORE).
pub fn restore(payload: &[u8], limits: &crate::value::limits::Limits) -> Result<Object, RestoreError> {
    let body = checked(payload)?;
    read::object(body, limits).map_err(|BadFormat| RestoreError::Body)
}

/// Deserializes a type byte and body that were verified otherwise.
pub fn read_object(bytes: &[u8], limits: &crate::value::limits::Limits) -> Result<Object, BadFormat> {
    read::object(bytes, limits)
}

/// Writes type byte and body.
pub fn write_object(to: &mut Vec<u8>, value: ObjectRef<'_>) {
    match value {
        ObjectRef::String(bytes) => {
            to.push(kind::STRING);
            write_string(to, bytes);
        }
        ObjectRef::List(list) => {
            to.push(kind::LIST);
            write_length(to, list.len() as u64);
            list.iter().for_each(|element| write_string(to, element));
        }
        ObjectRef::Set(set) => {
            to.push(kind::SET);
            write_length(to, set.len() as u64);
            set.iter().for_each(|member| write_string(to, &member));
        }
        ObjectRef::Hash(hash) => {
            to.push(kind::HASH);
            write_length(to, hash.len() as u64);
            for (field, value) in hash.iter() {
                write_string(to, field);
                write_string(to, value);
            }
        }
        ObjectRef::Zset(zset) => {
            to.push(kind::ZSET_2);
            write_length(to, zset.len() as u64);
            // From the highest score down, as Redis does: the reader then always inserts at one end.
            for (member, score) in zset.iter().rev() {
                write_string(to, member);
                to.extend_from_slice(&score.to_le_bytes());
            }
        }
        ObjectRef::Stream(stream) => {
            to.push(kind::STREAM_2);
            stream::write(to, stream);
        }
    }
}

/// Writes a length: two bits of form, then 6, 14, 32 or 64 bits.
pub fn write_length(to: &mut Vec<u8>, length: u64) {
    match length {
        0..0x40 => to.push(length as u8),
        0x40..0x4000 => to.extend_from_slice(&[0x40 | (length >> 8) as u8, length as u8]),
        0x4000..=0xffff_ffff => {
            to.push(0x80);
            to.extend_from_slice(&(length as u32).to_be_bytes());
        }
        _ => {
            to.push(0x81);
            to.extend_from_slice(&length.to_be_bytes());
        }
    }
}

/// Writes a length-prefixed string.
pub fn write_string(to: &mut Vec<u8>, bytes: &[u8]) {
    write_length(to, bytes.len() as u64);
    to.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests;
