//! The encoding of an entry: key, value and expire time in one allocation.
//!
//! Layout: flags (1), access information (3), key length (1 or 2), expire time (8, if flagged), key, then either
//! value length (1 or 2) and value, or the number (4) of a value stored outside. A key that is too long is stored
//! outside as well, and its number (4) stands in its place. Lengths below 128 take one byte.

/// The entry has an expire time.
pub(crate) const EXPIRES: u8 = 1;
/// The value is the number of a [`crate::value::Value`] outside.
pub(crate) const OUTSIDE: u8 = 2;
/// The key is the number of a long key outside.
pub(crate) const LONG_KEY: u8 = 4;
/// The string was modified in place: Redis reports its encoding as `raw` from then on.
pub(crate) const RAW: u8 = 8;

/// Maximum key length inside the entry.
pub(crate) const MAX_KEY: usize = 512;

/// A decoded entry; positions are offsets into its bytes.
#[derive(Clone, Copy)]
pub(crate) struct Head {
    pub(crate) flags: u8,
    pub(crate) expires_at: Option<i64>,
    pub(crate) key: (usize, usize),
    pub(crate) value: (usize, usize),
}

impl Head {
    pub(crate) fn len(&self) -> usize {
        self.value.1
    }

    pub(crate) fn is_outside(&self) -> bool {
        self.flags & OUTSIDE != 0
    }
}

fn length_len(len: usize) -> usize {
    if len < 128 { 1 } else { 2 }
}

fn put_length(into: &mut [u8], len: usize) -> usize {
    if len < 128 {
        into[0] = len as u8;
        1
    } else {
        into[0] = 128 | (len >> 8) as u8;
        into[1] = len as u8;
        2
    }
}

fn get_length(from: &[u8]) -> (usize, usize) {
    match from[0] {
        short if short < 128 => (usize::from(short), 1),
        high => (usize::from(high & 127) << 8 | usize::from(from[1]), 2),
    }
}

/// Decodes the number of a value or key outside.
pub(crate) fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Decodes only the key and the flags, which a lookup needs.
#[inline]
pub(crate) fn key_of(bytes: &[u8]) -> (u8, &[u8]) {
    let flags = bytes[0];
    let (len, took) = get_length(&bytes[4..]);
    let at = 4 + took + if flags & EXPIRES != 0 { 8 } else { 0 };
    (flags, &bytes[at..at + len])
}

/// The expire time of an entry.
pub(crate) fn expiry_of(bytes: &[u8]) -> Option<i64> {
    if bytes[0] & EXPIRES == 0 {
        return None;
    }
    let at = 4 + length_len_at(bytes);
    let raw = bytes[at..at + 8].try_into().expect("eight bytes");
    Some(i64::from_le_bytes(raw))
}

fn length_len_at(bytes: &[u8]) -> usize {
    if bytes[4] < 128 { 1 } else { 2 }
}

pub(crate) fn parse(bytes: &[u8]) -> Head {
    let flags = bytes[0];
    let (key_len, took) = get_length(&bytes[4..]);
    let mut at = 4 + took;
    let mut expires_at = None;
    if flags & EXPIRES != 0 {
        expires_at = Some(i64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")));
        at += 8;
    }
    let key = (at, at + key_len);
    at += key_len;
    let value = if flags & OUTSIDE != 0 {
        (at, at + 4)
    } else {
        let (len, took) = get_length(&bytes[at..]);
        (at + took, at + took + len)
    };
    Head { flags, expires_at, key, value }
}

/// The parts of an entry to encode. `key` and `value` are numbers where the flags say so.
pub(crate) struct Parts<'a> {
    pub(crate) flags: u8,
    pub(crate) access: u32,
    pub(crate) expires_at: Option<i64>,
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

impl Parts<'_> {
    pub(crate) fn len(&self) -> usize {
        let value =
            self.value.len() + if self.flags & OUTSIDE != 0 { 0 } else { length_len(self.value.len()) };
        let expiry = if self.expires_at.is_some() { 8 } else { 0 };
        4 + length_len(self.key.len()) + expiry + self.key.len() + value
    }

    pub(crate) fn write(&self, into: &mut [u8]) {
        into[0] = (self.flags & !EXPIRES) | (u8::from(self.expires_at.is_some()) * EXPIRES);
        into[1..4].copy_from_slice(&self.access.to_le_bytes()[..3]);
        let mut at = 4 + put_length(&mut into[4..], self.key.len());
        if let Some(expires_at) = self.expires_at {
            into[at..at + 8].copy_from_slice(&expires_at.to_le_bytes());
            at += 8;
        }
        into[at..at + self.key.len()].copy_from_slice(self.key);
        at += self.key.len();
        if self.flags & OUTSIDE == 0 {
            at += put_length(&mut into[at..], self.value.len());
        }
        into[at..at + self.value.len()].copy_from_slice(self.value);
    }
}

pub(crate) fn access(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[1], bytes[2], bytes[3], 0])
}

pub(crate) fn set_access(bytes: &mut [u8], access: u32) {
    bytes[1..4].copy_from_slice(&access.to_le_bytes()[..3]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_encoding_round_trip() {
        for (key, value, expires_at, flags) in [
            (&b"k"[..], &b""[..], None, 0),
            (&[7; 200][..], &[9; 1000][..], Some(i64::MAX), RAW),
            (b"key:000000000001", &[1, 2, 3, 4], Some(5), OUTSIDE),
            (&[1, 0, 0, 0], b"x", None, LONG_KEY),
        ] {
            let parts = Parts { flags, access: 0xabcdef, expires_at, key, value };
            let mut bytes = vec![0xee; parts.len()];
            parts.write(&mut bytes);
            let head = parse(&bytes);
            assert_eq!(head.flags & !EXPIRES, flags);
            assert_eq!(head.expires_at, expires_at);
            assert_eq!(expiry_of(&bytes), expires_at);
            assert_eq!(&bytes[head.key.0..head.key.1], key);
            assert_eq!(key_of(&bytes).1, key);
            assert_eq!(&bytes[head.value.0..head.value.1], value);
            assert_eq!(head.len(), bytes.len());
            assert_eq!(access(&bytes), 0xabcdef);
        }
    }

    #[test]
    fn typical_entry_has_six_bytes_of_overhead() {
        let parts = Parts { flags: 0, access: 0, expires_at: None, key: &[0; 16], value: &[0; 64] };
        assert_eq!(parts.len(), 86);
    }
}
