//! Decodes the body of a payload, by encoding.

use super::Object;
use super::lzf;
use super::packed::{self, Entry};
use crate::value::hash::Hash;
use crate::value::limits::Limits;
use crate::value::list::{End, List};
use crate::value::set::Set;
use crate::value::zset::{Inserted, Zset};

/// The bytes do not match their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadFormat;

/// A cursor over untrusted bytes.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes }
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], BadFormat> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(BadFormat)?;
        self.bytes = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, BadFormat> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn u16_le(&mut self) -> Result<u16, BadFormat> {
        let bytes = self.take(2)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    pub(super) fn u32_le(&mut self) -> Result<u32, BadFormat> {
        self.take(4)?.try_into().map(u32::from_le_bytes).map_err(|_| BadFormat)
    }

    pub(super) fn u32_be(&mut self) -> Result<u32, BadFormat> {
        self.take(4)?.try_into().map(u32::from_be_bytes).map_err(|_| BadFormat)
    }

    /// A signed little-endian number of `width` bytes.
    pub(super) fn int_le(&mut self, width: usize) -> Result<i64, BadFormat> {
        let bytes = self.take(width)?;
        let mut number = [if bytes[width - 1] & 0x80 != 0 { 0xff } else { 0 }; 8];
        number[..width].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(number))
    }

    fn f64_le(&mut self) -> Result<f64, BadFormat> {
        self.take(8)?.try_into().map(f64::from_le_bytes).map_err(|_| BadFormat)
    }

    /// A length, or the number of a special string encoding.
    fn length_or_form(&mut self) -> Result<Result<u64, u8>, BadFormat> {
        let first = self.byte()?;
        Ok(Ok(match first >> 6 {
            0 => u64::from(first),
            1 => u64::from(first & 0x3f) << 8 | u64::from(self.byte()?),
            3 => return Ok(Err(first & 0x3f)),
            _ if first == 0x80 => u64::from(self.u32_be()?),
            _ if first == 0x81 => self.take(8)?.try_into().map(u64::from_be_bytes).map_err(|_| BadFormat)?,
            _ => return Err(BadFormat),
        }))
    }

    pub(super) fn length_u64(&mut self) -> Result<u64, BadFormat> {
        self.length_or_form()?.map_err(|_| BadFormat)
    }

    pub(super) fn length(&mut self) -> Result<usize, BadFormat> {
        let length = self.length_or_form()?.map_err(|_| BadFormat)?;
        usize::try_from(length).map_err(|_| BadFormat)
    }

    pub(super) fn string(&mut self) -> Result<Vec<u8>, BadFormat> {
        match self.length_or_form()? {
            Ok(length) => Ok(self.take(usize::try_from(length).map_err(|_| BadFormat)?)?.to_vec()),
            Err(0) => Ok(self.int_le(1)?.to_string().into_bytes()),
            Err(1) => Ok(self.int_le(2)?.to_string().into_bytes()),
            Err(2) => Ok(self.int_le(4)?.to_string().into_bytes()),
            Err(3) => {
                let packed = self.length()?;
                let length = self.length()?;
                lzf::unpack(self.take(packed)?, length)
            }
            Err(_) => Err(BadFormat),
        }
    }

    /// A score as text, with three special lengths for NaN and infinities.
    fn text_score(&mut self) -> Result<f64, BadFormat> {
        match self.byte()? {
            253 => Err(BadFormat),
            254 => Ok(f64::INFINITY),
            255 => Ok(f64::NEG_INFINITY),
            length => {
                let text = self.take(usize::from(length))?;
                crate::value::number::parse_f64(text).ok_or(BadFormat)
            }
        }
    }
}

/// A type byte and body, which must span the whole input.
pub(super) fn object(bytes: &[u8], limits: &Limits) -> Result<Object, BadFormat> {
    let mut reader = Reader::new(bytes);
    let value = match reader.byte()? {
        0 => Object::String(reader.string()?),
        1 => plain_list(&mut reader, limits)?,
        2 => plain_set(&mut reader, limits)?,
        3 => plain_zset(&mut reader, limits, Reader::text_score)?,
        4 => plain_hash(&mut reader, limits)?,
        5 => plain_zset(&mut reader, limits, Reader::f64_le)?,
        10 => list_of(packed::ziplist(&reader.string()?)?, limits)?,
        11 => set_of(packed::intset(&reader.string()?)?.into_iter().map(Entry::Int), limits)?,
        12 => zset_of(packed::ziplist(&reader.string()?)?, limits)?,
        13 => hash_of(packed::ziplist(&reader.string()?)?, limits)?,
        14 => quicklist(&mut reader, limits)?,
        16 => hash_of(packed::listpack(&reader.string()?)?, limits)?,
        17 => zset_of(packed::listpack(&reader.string()?)?, limits)?,
        18 => quicklist_2(&mut reader, limits)?,
        form @ (15 | 19 | 21) => Object::Stream(super::stream::read(&mut reader, form)?),
        20 => set_of(packed::listpack(&reader.string()?)?.into_iter(), limits)?,
        _ => return Err(BadFormat),
    };
    let empty = match &value {
        Object::String(_) => false,
        Object::List(list) => list.is_empty(),
        Object::Set(set) => set.is_empty(),
        Object::Hash(hash) => hash.is_empty(),
        Object::Zset(zset) => zset.is_empty(),
        Object::Stream(_) => false,
    };
    if empty || reader.left() != 0 { Err(BadFormat) } else { Ok(value) }
}

/// Strings, each after an opcode.
pub(super) fn functions(bytes: &[u8], mark: u8) -> Result<Vec<Vec<u8>>, BadFormat> {
    let mut reader = Reader::new(bytes);
    let mut codes = Vec::new();
    while reader.left() > 0 {
        if reader.byte()? != mark {
            return Err(BadFormat);
        }
        codes.push(reader.string()?);
    }
    Ok(codes)
}

fn plain_list(reader: &mut Reader<'_>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut list = List::new();
    for _ in 0..reader.length()? {
        list.push(End::Right, &reader.string()?, limits);
    }
    Ok(Object::List(list))
}

fn plain_set(reader: &mut Reader<'_>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut set = Set::new();
    for _ in 0..reader.length()? {
        if !set.insert(&reader.string()?, limits) {
            return Err(BadFormat);
        }
    }
    Ok(Object::Set(set))
}

fn plain_hash(reader: &mut Reader<'_>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut hash = Hash::new();
    for _ in 0..reader.length()? {
        let (field, value) = (reader.string()?, reader.string()?);
        if !hash.set(&field, &value, limits) {
            return Err(BadFormat);
        }
    }
    Ok(Object::Hash(hash))
}

fn plain_zset<'a>(
    reader: &mut Reader<'a>,
    limits: &Limits,
    score: fn(&mut Reader<'a>) -> Result<f64, BadFormat>,
) -> Result<Object, BadFormat> {
    let mut zset = Zset::new();
    for _ in 0..reader.length()? {
        let member = reader.string()?;
        let score = score(reader)?;
        if score.is_nan() || zset.insert(&member, score, limits) != Inserted::New {
            return Err(BadFormat);
        }
    }
    Ok(Object::Zset(zset))
}

fn quicklist(reader: &mut Reader<'_>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut list = List::new();
    for _ in 0..reader.length()? {
        push_all(&mut list, packed::ziplist(&reader.string()?)?, limits);
    }
    Ok(Object::List(list))
}

fn quicklist_2(reader: &mut Reader<'_>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut list = List::new();
    for _ in 0..reader.length()? {
        match reader.length()? {
            1 => list.push(End::Right, &reader.string()?, limits),
            2 => push_all(&mut list, packed::listpack(&reader.string()?)?, limits),
            _ => return Err(BadFormat),
        }
    }
    Ok(Object::List(list))
}

fn push_all(list: &mut List, entries: Vec<Entry<'_>>, limits: &Limits) {
    entries.into_iter().for_each(|entry| list.push(End::Right, &entry.into_bytes(), limits));
}

fn list_of(entries: Vec<Entry<'_>>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut list = List::new();
    push_all(&mut list, entries, limits);
    Ok(Object::List(list))
}

fn set_of<'a>(entries: impl Iterator<Item = Entry<'a>>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut set = Set::new();
    for entry in entries {
        if !set.insert(&entry.into_bytes(), limits) {
            return Err(BadFormat);
        }
    }
    Ok(Object::Set(set))
}

fn hash_of(entries: Vec<Entry<'_>>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut hash = Hash::new();
    let mut entries = entries.into_iter();
    while let Some(field) = entries.next() {
        let value = entries.next().ok_or(BadFormat)?;
        if !hash.set(&field.into_bytes(), &value.into_bytes(), limits) {
            return Err(BadFormat);
        }
    }
    Ok(Object::Hash(hash))
}

fn zset_of(entries: Vec<Entry<'_>>, limits: &Limits) -> Result<Object, BadFormat> {
    let mut zset = Zset::new();
    let mut entries = entries.into_iter();
    while let Some(member) = entries.next() {
        let score = match entries.next().ok_or(BadFormat)? {
            Entry::Int(score) => score as f64,
            Entry::Bytes(text) => crate::value::number::parse_f64(text).ok_or(BadFormat)?,
        };
        if zset.insert(&member.into_bytes(), score, limits) != Inserted::New {
            return Err(BadFormat);
        }
    }
    Ok(Object::Zset(zset))
}
