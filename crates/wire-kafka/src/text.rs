//! [`KString`]: text that shares the frame it was read from.
//!
//! Invariant: the bytes are UTF-8. Every constructor checks or starts from `str`.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

use bytes::Bytes;

use crate::codec::DecodeError;

/// A UTF-8 string backed by [`Bytes`]: cloning counts a reference, decoding copies nothing.
///
/// Reading it as `str` validates again, because skipping that check would need `unsafe`; for names of a few
/// dozen bytes the check costs nanoseconds. Comparing two `KString`s looks at the bytes only.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KString(Bytes);

impl KString {
    /// Text known at compile time, without an allocation.
    pub const fn from_static(text: &'static str) -> Self {
        Self(Bytes::from_static(text.as_bytes()))
    }

    /// Takes bytes from outside; fails unless they are UTF-8.
    pub fn from_utf8(bytes: Bytes) -> Result<Self, DecodeError> {
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(Self(bytes)),
            Err(_) => Err(DecodeError::NotUtf8),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("every constructor of KString checks UTF-8")
    }

    /// The same text as bytes, sharing the storage.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// A copy that no longer keeps the frame it came from alive. Use it for text that outlives the request.
    pub fn detach(&self) -> Self {
        Self(Bytes::copy_from_slice(&self.0))
    }
}

impl Deref for KString {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for KString {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for KString {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

// `Borrow<str>` demands the hash of `str`, so hash the text and not the bytes.
impl Hash for KString {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl From<&str> for KString {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for KString {
    fn from(text: String) -> Self {
        Self(Bytes::from(text))
    }
}

impl From<&String> for KString {
    fn from(text: &String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<KString> for String {
    fn from(text: KString) -> Self {
        text.as_str().to_owned()
    }
}

impl PartialEq<str> for KString {
    fn eq(&self, other: &str) -> bool {
        *self.0 == *other.as_bytes()
    }
}

impl PartialEq<&str> for KString {
    fn eq(&self, other: &&str) -> bool {
        *self.0 == *other.as_bytes()
    }
}

impl fmt::Display for KString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Debug for KString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn only_utf8_gets_in() {
        assert_eq!(KString::from_utf8(Bytes::from_static(&[0x63, 0xff])), Err(DecodeError::NotUtf8));
        assert_eq!(KString::from_utf8(Bytes::from_static("모임".as_bytes())).unwrap(), "모임");
    }

    #[test]
    fn a_map_of_kstring_answers_to_str() {
        let map = HashMap::from([(KString::from("orders"), 1)]);
        assert_eq!(map.get("orders"), Some(&1));
    }

    #[test]
    fn decoded_text_shares_the_frame_until_detached() {
        let frame = Bytes::from(b"orders".to_vec());
        let text = KString::from_utf8(frame.slice(..)).unwrap();
        assert_eq!(text.as_bytes().as_ptr(), frame.as_ptr());
        assert_ne!(text.detach().as_bytes().as_ptr(), frame.as_ptr());
    }
}
