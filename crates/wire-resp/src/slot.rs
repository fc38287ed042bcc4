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
    let Some(open) = key.iter().position(|byte| *byte == b'{') else { return key };
    let rest = &key[open + 1..];
    match rest.iter().position(|byte| *byte == b'}') {
        Some(0) | None => key,
        Some(close) => &rest[..close],
    }
}

/// CRC16 with polynomial 0x1021, initial value 0, nothing reflected.
pub fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[((crc >> 8) as u8 ^ byte) as usize])
}

const TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
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
