//! Which slot a key is in: CRC16 (XMODEM) of the key, or of its hash tag, modulo 16,384.

use std::fmt;

/// One of the 16,384 slots.
///
/// Invariant: the number is below [`Slot::COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// How many slots there are.
    pub const COUNT: u16 = 16_384;

    /// The slot of `key`.
    pub fn of(key: &[u8]) -> Self {
        Self(crc16(hash_tag(key)) % Self::COUNT)
    }

    /// Slot `number`, when there is one.
    pub const fn new(number: u16) -> Option<Self> {
        if number < Self::COUNT { Some(Self(number)) } else { None }
    }

    /// Its number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Its number, for tables.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All slots, in order.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator {
        (0..Self::COUNT).map(Self)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The part of `key` that is hashed: what stands between the first `{` and the first `}` after it, unless that is nothing.
pub fn hash_tag(key: &[u8]) -> &[u8] {
    // Most have none, and this finds that out several bytes at a time.
    if !key.contains(&b'{') {
        return key;
    }
    let Some(open) = key.iter().position(|byte| *byte == b'{') else { return key };
    let rest = &key[open + 1..];
    match rest.iter().position(|byte| *byte == b'}') {
        Some(0) | None => key,
        Some(close) => &rest[..close],
    }
}

/// CRC16 with polynomial 0x1021, initial value 0, nothing reflected.
pub fn crc16(bytes: &[u8]) -> u16 {
    // Four bytes at once, because each has to wait for the one before otherwise.
    let (fours, rest) = bytes.as_chunks();
    let crc = fours.iter().fold(0u16, |crc, [first, second, third, fourth]| {
        let [high, low] = crc.to_be_bytes();
        TABLES[3][usize::from(first ^ high)]
            ^ TABLES[2][usize::from(second ^ low)]
            ^ TABLES[1][usize::from(*third)]
            ^ TABLES[0][usize::from(*fourth)]
    });
    rest.iter().fold(crc, |crc, byte| (crc << 8) ^ TABLES[0][usize::from((crc >> 8) as u8 ^ byte)])
}

/// What a byte adds that has none, one, two or three behind it.
const TABLES: [[u16; 256]; 4] = tables();

const fn tables() -> [[u16; 256]; 4] {
    let mut tables = [[0; 256]; 4];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 32 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
            if bit % 8 == 0 {
                tables[bit / 8 - 1][index] = crc;
            }
        }
        index += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in
            [("", 0), ("foo", 12182), ("bar", 5061), ("user:1000", 1649), ("{user1000}.following", 3443)]
        {
            assert_eq!(Slot::of(key.as_bytes()).get(), slot, "{key}");
        }
        assert_eq!((Slot::new(16383).map(Slot::get), Slot::new(16384)), (Some(16383), None));
        assert_eq!(Slot::all().len(), 16384);
    }

    #[test]
    fn a_sum_is_the_same_whether_bytes_are_taken_one_by_one_or_together() {
        let one_by_one = |bytes: &[u8]| {
            bytes.iter().fold(0u16, |crc, byte| {
                (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
                    (crc << 1) ^ if crc & 0x8000 != 0 { 0x1021 } else { 0 }
                })
            })
        };
        let bytes: Vec<u8> = (0..97u32).map(|n| (n * 151 + n * n) as u8).collect();
        for from in 0..bytes.len() {
            assert_eq!(crc16(&bytes[from..]), one_by_one(&bytes[from..]), "from {from}");
        }
    }

    #[test]
    fn only_the_first_filled_braces_are_a_tag() {
        for (key, tag) in [
            ("plain", "plain"),
            ("{a}b", "a"),
            ("x{a}{b}", "a"),
            ("x{}{b}", "x{}{b}"),
            ("x{{a}}", "{a"),
            ("x{a", "x{a"),
            ("x}a{b}", "b"),
        ] {
            assert_eq!(hash_tag(key.as_bytes()), tag.as_bytes(), "{key}");
        }
    }
}
