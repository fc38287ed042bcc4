//! A reply as a value, for clients and for the few server replies that are built before they are written.

use bytes::{Bytes, BytesMut};

use crate::encode::{Encoder, Protocol};

/// Any reply of RESP2 or RESP3.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing: RESP3's null, RESP2's null bulk string and null array.
    Null,
    /// A status such as `OK`.
    Simple(Bytes),
    /// An error: a code in capitals, a space, a text.
    Error(Bytes),
    /// An integer.
    Integer(i64),
    /// Bytes.
    Bulk(Bytes),
    /// Values in order.
    Array(Vec<Value>),
    /// Pairs, in the order they were sent. RESP2: an array.
    Map(Vec<(Value, Value)>),
    /// Values without order. RESP2: an array.
    Set(Vec<Value>),
    /// A double. RESP2: a bulk string.
    Double(f64),
    /// A truth value. RESP2: 0 or 1.
    Boolean(bool),
    /// An out-of-band push message (pub/sub, invalidation). RESP2: an array.
    Push(Vec<Value>),
    /// A text with its kind (`txt`, `mkd`). RESP2: a bulk string.
    Verbatim {
        /// Three letters.
        kind: [u8; 3],
        /// The text.
        text: Bytes,
    },
    /// An integer of any length, in decimal. RESP2: a bulk string.
    BigNumber(Bytes),
}

impl Value {
    /// A bulk string.
    pub fn bulk(bytes: impl Into<Bytes>) -> Self {
        Self::Bulk(bytes.into())
    }

    /// `+OK`.
    pub const fn ok() -> Self {
        Self::Simple(Bytes::from_static(b"OK"))
    }

    /// Appends the value as `protocol` writes it.
    pub fn encode(&self, protocol: Protocol, out: &mut BytesMut) {
        let mut encoder = Encoder::new(out, protocol);
        self.write(&mut encoder);
    }

    /// Writes the value.
    pub fn write(&self, to: &mut Encoder<'_>) {
        let all = |values: &[Value], to: &mut Encoder<'_>| values.iter().for_each(|value| value.write(to));
        match self {
            Self::Null => to.null(),
            Self::Simple(text) => to.simple(text),
            Self::Error(text) => to.error(text),
            Self::Integer(value) => to.integer(*value),
            Self::Bulk(bytes) => to.bulk(bytes),
            Self::Array(values) => {
                to.array(values.len());
                all(values, to);
            }
            Self::Map(pairs) => {
                to.map(pairs.len());
                for (key, value) in pairs {
                    key.write(to);
                    value.write(to);
                }
            }
            Self::Set(values) => {
                to.set(values.len());
                all(values, to);
            }
            Self::Double(value) => to.double(*value),
            Self::Boolean(value) => to.boolean(*value),
            Self::Push(values) => {
                to.push(values.len());
                all(values, to);
            }
            Self::Verbatim { kind, text } => to.verbatim(kind, text),
            Self::BigNumber(digits) => to.big_number(digits),
        }
    }

    /// The bytes of a status, a bulk string, a verbatim text or a big number.
    pub fn as_bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Simple(bytes) | Self::Bulk(bytes) | Self::BigNumber(bytes) => Some(bytes),
            Self::Verbatim { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The elements of an array, a set or a push.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(values) | Self::Set(values) | Self::Push(values) => Some(values),
            _ => None,
        }
    }
}
