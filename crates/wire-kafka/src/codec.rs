//! Reading and writing the protocol's primitive types.
//!
//! [`Decoder`] walks a frame and hands out slices of it; [`Encoder`] appends to one buffer and leaves [`Gap`]s
//! where the server splices file ranges. Both know whether the message is flexible (compact lengths, tagged
//! fields), so the field declarations need not say it twice.
//!
//! Invariant: nothing here allocates by a length read from the wire before that length was compared with the
//! bytes that are left.

mod decoder;
mod encoder;
mod field;
pub(crate) mod message;

use bytes::Bytes;

pub use decoder::{DecodeError, Decoder};
pub use encoder::{EncodeError, Encoder, Gap};
pub use message::Message;

pub(crate) use field::{Field, Nullable};
pub(crate) use message::messages;

/// Longest string either side accepts, also where a compact length could say more.
pub const MAX_STRING: usize = i16::MAX as usize;

/// Record batches inside a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Records {
    /// The batches themselves. Decoding always gives this.
    Bytes(Bytes),
    /// A number of bytes that the server splices into the socket: the encoder writes the length and leaves a [`Gap`].
    Gap(usize),
}

impl Records {
    /// Size of the batches in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Gap(len) => *len,
        }
    }

    /// True when there are no batches.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batches, when they are in memory.
    pub fn bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Gap(_) => None,
        }
    }
}

impl From<Bytes> for Records {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

#[cfg(test)]
mod tests;
