//! [`Uuid`]: the 16 bytes that name a topic or a directory. Printed the way Kafka prints them.

use std::fmt;

/// A 128-bit identifier; all zero means "none".
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// The value that stands for "no id".
    pub const ZERO: Self = Self([0; 16]);

    /// True when this is no id at all.
    pub fn is_zero(&self) -> bool {
        *self == Self::ZERO
    }

    /// Reads the 22 characters that [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 22 {
            return None;
        }
        let mut bits: u128 = 0;
        for (i, byte) in text.bytes().enumerate() {
            let digit = ALPHABET.iter().position(|a| *a == byte)? as u128;
            // 22 digits hold 132 bits; the last digit gives only its upper two.
            bits = if i < 21 { bits << 6 | digit } else { bits << 2 | digit >> 4 };
        }
        let id = Self(bits.to_be_bytes());
        // Reject spellings whose spare bits are set: one id, one text.
        (id.to_string() == text).then_some(id)
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Unpadded URL-safe base64, as Kafka's tools show topic ids.
impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = u128::from_be_bytes(self.0);
        let mut text = String::with_capacity(22);
        for i in 0..21 {
            text.push(ALPHABET[(bits >> (122 - 6 * i)) as usize & 63] as char);
        }
        text.push(ALPHABET[(bits << 4) as usize & 63] as char);
        f.pad(&text)
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: [u8; 16], text: &str) {
        assert_eq!(Uuid(bytes).to_string(), text);
        assert_eq!(Uuid::parse(text), Some(Uuid(bytes)));
    }

    #[test]
    fn text_is_what_kafka_prints() {
        check([0; 16], "AAAAAAAAAAAAAAAAAAAAAA");
        check([0xff; 16], "_____________________w");
        check(std::array::from_fn(|i| i as u8), "AAECAwQFBgcICQoLDA0ODw");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in
            ["", "AAAA", "_____________________x", "AAAAAAAAAAAAAAAAAAAAA=", "AAAAAAAAAAAAAAAAAAAAAAA"]
        {
            assert_eq!(Uuid::parse(text), None, "{text}");
        }
    }
}
