//! The frames of a gRPC stream: a flag byte, a length of four bytes, a message.
//!
//! [`FrameReader`] takes the chunks of a body as they arrive and returns complete messages. A message within one
//! chunk is a slice of it; others are assembled once, so the cost is linear in the bytes.
//!
//! Invariant: at most the largest allowed message plus one chunk is buffered. A longer message is refused when its
//! length is read, before its bytes are buffered.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

/// The size of the frame prefix.
pub const PREFIX_BYTES: usize = 5;

/// Why a stream of frames is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// The announced length exceeds the limit.
    #[error("grpc: received message larger than max ({length} vs. {max})")]
    TooLarge {
        /// The announced length.
        length: usize,
        /// The limit.
        max: usize,
    },
    /// The message is compressed without a negotiated encoding.
    #[error("grpc: compressed flag set with identity or empty encoding")]
    Compressed,
    /// The flag byte is neither 0 nor 1.
    #[error("grpc: received unexpected payload format {0}")]
    Flag(u8),
    /// The stream ended inside a message.
    #[error("unexpected EOF")]
    Truncated,
}

/// Assembles frames from the chunks of a body.
#[derive(Debug)]
pub struct FrameReader {
    /// The piece being read. Invariant: empty when `joined` is not.
    piece: Bytes,
    /// Chunks that had to be joined.
    joined: BytesMut,
    max_bytes: usize,
}

impl FrameReader {
    /// A reader that refuses messages of more than `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self { piece: Bytes::new(), joined: BytesMut::new(), max_bytes }
    }

    /// Adds a chunk of the body.
    pub fn push(&mut self, piece: Bytes) {
        if !self.joined.is_empty() {
            self.joined.extend_from_slice(&piece);
        } else if self.piece.is_empty() {
            self.piece = piece;
        } else {
            self.joined.reserve(self.piece.len() + piece.len());
            self.joined.extend_from_slice(&self.piece);
            self.joined.extend_from_slice(&piece);
            self.piece = Bytes::new();
        }
    }

    /// The next message, once it is complete.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, FrameError> {
        let held: &[u8] = if self.joined.is_empty() { &self.piece } else { &self.joined };
        let Some(&[flag, a, b, c, d]) = held.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        match flag {
            0 => {}
            1 => return Err(FrameError::Compressed),
            other => return Err(FrameError::Flag(other)),
        }
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length > self.max_bytes {
            return Err(FrameError::TooLarge { length, max: self.max_bytes });
        }
        if held.len() - PREFIX_BYTES < length {
            return Ok(None);
        }
        if self.joined.is_empty() {
            self.piece.advance(PREFIX_BYTES);
            return Ok(Some(self.piece.split_to(length)));
        }
        self.joined.advance(PREFIX_BYTES);
        Ok(Some(self.joined.split_to(length).freeze()))
    }

    /// The number of buffered bytes.
    pub fn held_bytes(&self) -> usize {
        self.piece.len() + self.joined.len()
    }

    /// The body has ended: an error if that was inside a message.
    pub fn finish(&self) -> Result<(), FrameError> {
        if self.held_bytes() == 0 { Ok(()) } else { Err(FrameError::Truncated) }
    }
}

/// Encodes a message as a frame, in one buffer of the exact size.
pub fn encode_frame<M: Message>(message: &M) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX_BYTES + length);
    put_prefix(&mut frame, length);
    message.encode_raw(&mut frame);
    frame.freeze()
}

/// The frame prefix of a message of `length` bytes, for one that is written in parts.
pub fn frame_prefix(length: usize) -> Bytes {
    let mut prefix = BytesMut::with_capacity(PREFIX_BYTES);
    put_prefix(&mut prefix, length);
    prefix.freeze()
}

fn put_prefix(frame: &mut BytesMut, length: usize) {
    frame.put_u8(0);
    // A message of 4 GiB cannot be built: stores are bounded far below.
    frame.put_u32(u32::try_from(length).expect("a message is shorter than 4 GiB"));
}

/// Decodes the message of a frame.
pub fn decode<M: Message + Default>(frame: Bytes) -> Result<M, prost::DecodeError> {
    M::decode(frame)
}

#[cfg(test)]
mod tests;
