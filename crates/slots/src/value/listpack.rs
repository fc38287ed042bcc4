//! Listpack elements: strings and integers in sequence, each followed by its back length.
//!
//! Streams store their entries in this form because it is compact and because DUMP payloads of Redis contain it
//! unchanged. Untrusted bytes never reach this module: the payload decoder (`rdb/packed.rs`) validates them, and its
//! result is encoded anew. These functions read only what they wrote.

use moim_wire_resp::number::{Decimal, parse_i64};

/// A listpack element.
#[derive(Clone, Copy)]
pub enum Element<'a> {
    /// A string that is not an integer.
    Bytes(&'a [u8]),
    /// An integer, with its decimal digits.
    Int(i64, Decimal),
}

impl Element<'_> {
    /// The element as a string.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Int(_, digits) => digits.as_bytes(),
        }
    }

    fn int(&self) -> i64 {
        match self {
            Self::Int(number, _) => *number,
            Self::Bytes(_) => unreachable!("an integer was written here"),
        }
    }
}

/// Reads elements in sequence.
#[derive(Clone, Copy)]
pub struct Elements<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Elements<'a> {
    /// Starts at `at`.
    pub fn at(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    /// Position of the next element.
    pub fn position(&self) -> usize {
        self.at
    }

    /// True if no element is left.
    pub fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// The next element, which must exist.
    pub fn read(&mut self) -> Element<'a> {
        let (element, size) = read(&self.bytes[self.at..]);
        self.at += size + back_size(size);
        element
    }

    /// The next element, which must be an integer.
    pub fn read_int(&mut self) -> i64 {
        self.read().int()
    }

    /// Skips elements.
    pub fn skip(&mut self, count: usize) {
        for _ in 0..count {
            let size = read(&self.bytes[self.at..]).1;
            self.at += size + back_size(size);
        }
    }
}

/// Appends a string; one that is an integer is encoded as such.
pub fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    if bytes.len() <= 20
        && let Some(number) = parse_i64(bytes)
    {
        return put_int(to, number);
    }
    let start = to.len();
    match bytes.len() {
        0..64 => to.push(0x80 | bytes.len() as u8),
        64..4096 => to.extend_from_slice(&[0xe0 | (bytes.len() >> 8) as u8, bytes.len() as u8]),
        len => {
            to.push(0xf0);
            to.extend_from_slice(&(len as u32).to_le_bytes());
        }
    }
    to.extend_from_slice(bytes);
    put_back(to, start);
}

/// Appends an integer.
pub fn put_int(to: &mut Vec<u8>, number: i64) {
    let start = to.len();
    match number {
        0..=127 => to.push(number as u8),
        -4096..=4095 => {
            let bits = (number & 0x1fff) as u16;
            to.extend_from_slice(&[0xc0 | (bits >> 8) as u8, bits as u8]);
        }
        _ => {
            let (form, width) = match number {
                -0x8000..=0x7fff => (0xf1, 2),
                -0x80_0000..=0x7f_ffff => (0xf2, 3),
                -0x8000_0000..=0x7fff_ffff => (0xf3, 4),
                _ => (0xf4, 8),
            };
            to.push(form);
            to.extend_from_slice(&number.to_le_bytes()[..width]);
        }
    }
    put_back(to, start);
}

/// Appends the back length of an element, which allows reading backwards: seven bits per byte, high bits first, with
/// a continuation flag in all but the first byte.
fn put_back(to: &mut Vec<u8>, start: usize) {
    let size = to.len() - start;
    let count = back_size(size);
    for at in (0..count).rev() {
        let bits = (size >> (7 * at)) as u8 & 0x7f;
        to.push(if at + 1 == count { bits } else { bits | 0x80 });
    }
}

fn back_size(size: usize) -> usize {
    match size {
        0..=127 => 1,
        128..16_384 => 2,
        16_384..2_097_152 => 3,
        2_097_152..268_435_456 => 4,
        _ => 5,
    }
}

/// The first element and its size without the back length.
fn read(bytes: &[u8]) -> (Element<'_>, usize) {
    let first = bytes[0];
    let int = |width: usize| {
        let negative = bytes[width] & 0x80 != 0;
        let mut number = [if negative { 0xff } else { 0 }; 8];
        number[..width].copy_from_slice(&bytes[1..=width]);
        (i64::from_le_bytes(number), width + 1)
    };
    let (number, size) = match first {
        0x00..=0x7f => (i64::from(first), 1),
        0x80..=0xbf => return text(bytes, 1, usize::from(first & 0x3f)),
        0xc0..=0xdf => {
            let bits = i64::from(first & 0x1f) << 8 | i64::from(bytes[1]);
            (if bits >= 1 << 12 { bits - (1 << 13) } else { bits }, 2)
        }
        0xe0..=0xef => return text(bytes, 2, usize::from(first & 0x0f) << 8 | usize::from(bytes[1])),
        0xf0 => {
            let length = u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]);
            return text(bytes, 5, length as usize);
        }
        0xf1 => int(2),
        0xf2 => int(3),
        0xf3 => int(4),
        0xf4 => int(8),
        _ => unreachable!("unknown listpack encoding"),
    };
    (Element::Int(number, Decimal::new(number)), size)
}

fn text(bytes: &[u8], header: usize, length: usize) -> (Element<'_>, usize) {
    (Element::Bytes(&bytes[header..header + length]), header + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listpack_elements_round_trip_in_every_encoding() {
        let numbers = [
            0,
            127,
            128,
            4095,
            4096,
            -1,
            -4096,
            -4097,
            32_767,
            32_768,
            -32_769,
            8_388_607,
            8_388_608,
            i64::MAX,
            i64::MIN,
        ];
        let long: Vec<Vec<u8>> =
            [0, 1, 63, 64, 4095, 4096, 20_000].iter().map(|&len| vec![b'x'; len]).collect();
        let texts: Vec<Vec<u8>> = numbers.iter().map(|number| number.to_string().into_bytes()).collect();
        let odd: Vec<Vec<u8>> = ["007", "-0", "+1", "9223372036854775808"].map(|text| text.into()).to_vec();
        let mut bytes = Vec::new();
        let all: Vec<Vec<u8>> = [long, texts, odd].concat();
        all.iter().for_each(|text| put(&mut bytes, text));
        let mut elements = Elements::at(&bytes, 0);
        for text in &all {
            assert_eq!(elements.read().as_bytes(), text);
        }
        assert!(elements.is_at_end());
        let mut again = Elements::at(&bytes, 0);
        again.skip(all.len());
        assert_eq!(again.position(), bytes.len());
    }
}
