//! Decodes the packed encodings inside payloads: listpacks, the older ziplists, and intsets.

use super::BadFormat;
use super::read::Reader;

/// An entry of a listpack or ziplist.
pub(super) enum Entry<'a> {
    Bytes(&'a [u8]),
    Int(i64),
}

impl Entry<'_> {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        match self {
            Entry::Bytes(bytes) => bytes.to_vec(),
            Entry::Int(number) => number.to_string().into_bytes(),
        }
    }
}

/// All entries of a listpack.
pub(super) fn listpack(bytes: &[u8]) -> Result<Vec<Entry<'_>>, BadFormat> {
    let mut reader = Reader::new(bytes);
    let total = reader.u32_le()? as usize;
    let count = reader.u16_le()?;
    if total != bytes.len() {
        return Err(BadFormat);
    }
    let mut entries = Vec::new();
    loop {
        let before = reader.left();
        let first = reader.byte()?;
        let entry = match first {
            0xff => break,
            0x00..=0x7f => Entry::Int(i64::from(first)),
            0x80..=0xbf => Entry::Bytes(reader.take(usize::from(first & 0x3f))?),
            0xc0..=0xdf => {
                let number = i64::from(first & 0x1f) << 8 | i64::from(reader.byte()?);
                Entry::Int(if number >= 1 << 12 { number - (1 << 13) } else { number })
            }
            0xe0..=0xef => {
                let length = usize::from(first & 0x0f) << 8 | usize::from(reader.byte()?);
                Entry::Bytes(reader.take(length)?)
            }
            0xf0 => {
                let length = reader.u32_le()? as usize;
                Entry::Bytes(reader.take(length)?)
            }
            0xf1 => Entry::Int(reader.int_le(2)?),
            0xf2 => Entry::Int(reader.int_le(3)?),
            0xf3 => Entry::Int(reader.int_le(4)?),
            0xf4 => Entry::Int(reader.int_le(8)?),
            _ => return Err(BadFormat),
        };
        let back = match before - reader.left() {
            0..=127 => 1,
            128..16_384 => 2,
            16_384..2_097_152 => 3,
            2_097_152..268_435_456 => 4,
            _ => 5,
        };
        reader.take(back)?;
        entries.push(entry);
    }
    if reader.left() != 0 || (count != u16::MAX && usize::from(count) != entries.len()) {
        return Err(BadFormat);
    }
    Ok(entries)
}

/// All entries of a ziplist.
pub(super) fn ziplist(bytes: &[u8]) -> Result<Vec<Entry<'_>>, BadFormat> {
    let mut reader = Reader::new(bytes);
    let total = reader.u32_le()? as usize;
    let _tail = reader.u32_le()?;
    let count = reader.u16_le()?;
    if total != bytes.len() {
        return Err(BadFormat);
    }
    let mut entries = Vec::new();
    loop {
        match reader.byte()? {
            0xff => break,
            0xfe => drop(reader.take(4)?),
            _ => {}
        }
        let first = reader.byte()?;
        entries.push(match first {
            0x00..=0x3f => Entry::Bytes(reader.take(usize::from(first))?),
            0x40..=0x7f => {
                let length = usize::from(first & 0x3f) << 8 | usize::from(reader.byte()?);
                Entry::Bytes(reader.take(length)?)
            }
            0x80 => {
                let length = reader.u32_be()? as usize;
                Entry::Bytes(reader.take(length)?)
            }
            0xc0 => Entry::Int(reader.int_le(2)?),
            0xd0 => Entry::Int(reader.int_le(4)?),
            0xe0 => Entry::Int(reader.int_le(8)?),
            0xf0 => Entry::Int(reader.int_le(3)?),
            0xfe => Entry::Int(reader.int_le(1)?),
            0xf1..=0xfd => Entry::Int(i64::from(first & 0x0f) - 1),
            _ => return Err(BadFormat),
        });
    }
    if reader.left() != 0 || (count != u16::MAX && usize::from(count) != entries.len()) {
        return Err(BadFormat);
    }
    Ok(entries)
}

/// All numbers of an intset, which must ascend.
pub(super) fn intset(bytes: &[u8]) -> Result<Vec<i64>, BadFormat> {
    let mut reader = Reader::new(bytes);
    let width = reader.u32_le()? as usize;
    let count = reader.u32_le()? as usize;
    if !matches!(width, 2 | 4 | 8) || reader.left() != count.saturating_mul(width) {
        return Err(BadFormat);
    }
    let mut numbers: Vec<i64> = Vec::with_capacity(count);
    for _ in 0..count {
        let number = reader.int_le(width)?;
        if numbers.last().is_some_and(|&last| last >= number) {
            return Err(BadFormat);
        }
        numbers.push(number);
    }
    Ok(numbers)
}
