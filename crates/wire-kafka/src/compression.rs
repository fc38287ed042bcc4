//! The compression codecs of a record batch.
//!
//! Owns the five codecs and their framing on the wire. Invariant: no input, however hostile, makes a decoder produce
//! more than the caller's limit; a length a frame declares is checked before anything is reserved for it. This module
//! must never look inside the records.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read, Write};

use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use lz4_flex::frame::{BlockMode, BlockSize, FrameDecoder, FrameEncoder, FrameInfo};
use zstd::zstd_safe::DCtx;

/// How the records of a batch are compressed: the low three bits of its attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Compression {
    /// Records as they are.
    #[default]
    None = 0,
    /// One or more gzip members.
    Gzip = 1,
    /// Snappy, raw or in the framing of the Java library.
    Snappy = 2,
    /// An LZ4 frame.
    Lz4 = 3,
    /// One or more zstd frames.
    Zstd = 4,
}

/// Why bytes could not be compressed or decompressed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompressionError {
    /// The attributes name a codec the protocol does not have.
    #[error("unknown compression codec {0}")]
    Unknown(u8),
    /// The codec refused the bytes.
    #[error("{codec}: {reason}")]
    Corrupt {
        /// The codec that was asked.
        codec: Compression,
        /// What it said.
        reason: String,
    },
    /// The output would exceed the caller's limit.
    #[error("decompressed data exceeds the limit")]
    TooLarge,
}

impl Compression {
    /// Every codec, in the order of its code.
    pub const ALL: [Self; 5] = [Self::None, Self::Gzip, Self::Snappy, Self::Lz4, Self::Zstd];

    /// The bits of the batch attributes that name the codec.
    pub const ATTRIBUTE_MASK: i16 = 0b111;

    /// The name used in topic and client configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Snappy => "snappy",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// The codec with this configuration name. `uncompressed` is the topic configuration's word for `none`.
    pub fn parse(name: &str) -> Option<Self> {
        if name == "uncompressed" {
            return Some(Self::None);
        }
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// The codec named in the attributes of a batch.
    pub fn from_attributes(attributes: i16) -> Result<Self, CompressionError> {
        let code = (attributes & Self::ATTRIBUTE_MASK) as u8;
        Self::ALL.get(usize::from(code)).copied().ok_or(CompressionError::Unknown(code))
    }

    fn corrupt(self, reason: impl fmt::Display) -> CompressionError {
        CompressionError::Corrupt { codec: self, reason: reason.to_string() }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Appends `input`, compressed, to `out`.
pub fn compress(codec: Compression, input: &[u8], out: &mut Vec<u8>) -> Result<(), CompressionError> {
    match codec {
        Compression::None => {
            out.extend_from_slice(input);
            Ok(())
        }
        Compression::Gzip => {
            let mut encoder = GzEncoder::new(out, flate2::Compression::default());
            encoder.write_all(input).and_then(|()| encoder.try_finish()).map_err(|e| codec.corrupt(e))
        }
        Compression::Snappy => xerial_compress(input, out),
        Compression::Lz4 => {
            // The Java decoder refuses frames whose blocks depend on each other.
            let frame = FrameInfo::new().block_mode(BlockMode::Independent).block_size(BlockSize::Max64KB);
            let mut encoder = FrameEncoder::with_frame_info(frame, out);
            encoder.write_all(input).map_err(|e| codec.corrupt(e))?;
            encoder.finish().map(|_| ()).map_err(|e| codec.corrupt(e))
        }
        Compression::Zstd => zstd::stream::copy_encode(input, out, zstd::DEFAULT_COMPRESSION_LEVEL)
            .map_err(|e| codec.corrupt(e)),
    }
}

/// Appends what `input` decompresses to to `out`, and stops with [`CompressionError::TooLarge`] rather than append more
/// than `limit` bytes. On an error `out` holds an unspecified part of the output.
pub fn decompress_into(
    codec: Compression,
    input: &[u8],
    out: &mut Vec<u8>,
    limit: usize,
) -> Result<(), CompressionError> {
    match codec {
        Compression::None => {
            if input.len() > limit {
                return Err(CompressionError::TooLarge);
            }
            out.extend_from_slice(input);
            Ok(())
        }
        Compression::Gzip => read_bounded(codec, MultiGzDecoder::new(input), out, limit),
        Compression::Snappy => snappy_decompress(input, out, limit),
        Compression::Lz4 => lz4_decompress(input, out, limit),
        Compression::Zstd => zstd_decompress(input, out, limit),
    }
}

/// Drains `reader` into `out`, at most `limit` bytes of it. One byte more is asked for to tell "exactly the limit" from
/// "beyond it", so memory stays within a small factor of the limit whatever the ratio of the stream.
fn read_bounded(
    codec: Compression,
    reader: impl Read,
    out: &mut Vec<u8>,
    limit: usize,
) -> Result<(), CompressionError> {
    let ceiling = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let read = reader.take(ceiling).read_to_end(out).map_err(|e: io::Error| codec.corrupt(e))?;
    if read > limit { Err(CompressionError::TooLarge) } else { Ok(()) }
}

/// Frames are decoded one by one, each with a fresh decoder: the decoder keeps the buffers of the frame before and
/// expects them to fit the next one exactly.
fn lz4_decompress(mut input: &[u8], out: &mut Vec<u8>, limit: usize) -> Result<(), CompressionError> {
    let start = out.len();
    loop {
        let mut decoder = FrameDecoder::new(input);
        read_bounded(Compression::Lz4, &mut decoder, out, limit - (out.len() - start))?;
        let rest = decoder.into_inner();
        if rest.is_empty() {
            return Ok(());
        }
        // A frame that consumes nothing would repeat for ever.
        if rest.len() == input.len() {
            return Err(Compression::Lz4.corrupt("no progress"));
        }
        input = rest;
    }
}

/// A thread keeps its zstd context up to this size; a frame may ask for a window of 128 MiB.
const ZSTD_CONTEXT_KEPT: usize = 4 << 20;

thread_local! {
    static ZSTD_CONTEXT: Cell<Option<DCtx<'static>>> = const { Cell::new(None) };
}

/// Making a context costs more than a small batch does, so each thread keeps one. An earlier stream that stopped half
/// way leaves no trace in it: the decoder resets it first.
fn zstd_decompress(input: &[u8], out: &mut Vec<u8>, limit: usize) -> Result<(), CompressionError> {
    let codec = Compression::Zstd;
    let Some(mut context) = ZSTD_CONTEXT.take().or_else(DCtx::try_create) else {
        return Err(codec.corrupt("no memory for a context"));
    };
    let decoder = zstd::stream::read::Decoder::with_context(input, &mut context);
    let result = read_bounded(codec, decoder, out, limit);
    if context.sizeof() <= ZSTD_CONTEXT_KEPT {
        ZSTD_CONTEXT.set(Some(context));
    }
    result
}

/// What opens the framing of the Java snappy library: magic, then version and lowest compatible version.
const XERIAL_MAGIC: [u8; 8] = *b"\x82SNAPPY\0";
const XERIAL_HEADER_LEN: usize = 16;
const XERIAL_VERSION: u32 = 1;
const XERIAL_BLOCK: usize = 32 * 1024;

fn xerial_compress(input: &[u8], out: &mut Vec<u8>) -> Result<(), CompressionError> {
    out.extend_from_slice(&XERIAL_MAGIC);
    out.extend_from_slice(&XERIAL_VERSION.to_be_bytes());
    out.extend_from_slice(&XERIAL_VERSION.to_be_bytes());
    let mut encoder = snap::raw::Encoder::new();
    for block in input.chunks(XERIAL_BLOCK) {
        let length_at = out.len();
        let block_at = length_at + 4;
        out.resize(block_at + snap::raw::max_compress_len(block.len()), 0);
        let written =
            encoder.compress(block, &mut out[block_at..]).map_err(|e| Compression::Snappy.corrupt(e))?;
        // A block of 32 KiB compresses to far less than 4 GiB.
        out[length_at..block_at].copy_from_slice(&(written as u32).to_be_bytes());
        out.truncate(block_at + written);
    }
    Ok(())
}

fn snappy_decompress(input: &[u8], out: &mut Vec<u8>, limit: usize) -> Result<(), CompressionError> {
    if !input.starts_with(&XERIAL_MAGIC) {
        return snappy_block(input, out, limit);
    }
    let start = out.len();
    let mut rest = input;
    while !rest.is_empty() {
        // Streams that were concatenated repeat the header where a block length would stand.
        if rest.starts_with(&XERIAL_MAGIC) {
            rest = rest
                .get(XERIAL_HEADER_LEN..)
                .ok_or_else(|| Compression::Snappy.corrupt("stream header cut short"))?;
            continue;
        }
        let (length, after) =
            rest.split_first_chunk().ok_or_else(|| Compression::Snappy.corrupt("block length cut short"))?;
        let (block, after) = usize::try_from(u32::from_be_bytes(*length))
            .ok()
            .and_then(|length| after.split_at_checked(length))
            .ok_or_else(|| Compression::Snappy.corrupt("block cut short"))?;
        snappy_block(block, out, limit - (out.len() - start))?;
        rest = after;
    }
    Ok(())
}

/// A raw snappy block says its decompressed length first, so the limit is checked before any memory is taken.
fn snappy_block(block: &[u8], out: &mut Vec<u8>, limit: usize) -> Result<(), CompressionError> {
    let length = snap::raw::decompress_len(block).map_err(|e| Compression::Snappy.corrupt(e))?;
    if length > limit {
        return Err(CompressionError::TooLarge);
    }
    let start = out.len();
    out.resize(start + length, 0);
    snap::raw::Decoder::new()
        .decompress(block, &mut out[start..])
        .map(|_| ())
        .map_err(|e| Compression::Snappy.corrupt(e))
}

#[cfg(test)]
mod tests;
