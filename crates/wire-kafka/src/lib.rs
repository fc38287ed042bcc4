//! The Kafka protocol: bytes to types and back, no I/O.
//!
//! Every API is one short file in [`messages`]: the fields, the versions they exist in, and nothing else.
//! [`codec`] turns those declarations into bytes; [`api`] knows which versions exist and which are flexible;
//! [`frame`] adds the header and the size prefix of a connection. [`records`] reads, checks and
//! builds what Produce and Fetch carry.
//!
//! Invariants:
//! - Input is never trusted: a length is checked against the bytes that are left before anything is allocated.
//! - Strings, bytes and records of a decoded message are slices of the frame, not copies.
//! - Decoding and encoding are pure: no clock, no randomness, no sockets.

#![warn(missing_docs)]

pub mod api;
pub mod codec;
pub mod compression;
pub mod error;
pub mod frame;
#[doc(hidden)]
pub mod fuzzing;
pub mod header;
pub mod messages;
pub mod partitioner;
pub mod records;
mod text;
mod uuid;

pub use api::ApiKey;
pub use codec::{DecodeError, Decoder, EncodeError, Encoder, Gap, Message, Records};
pub use error::ErrorCode;
pub use frame::{decode_request, decode_response, encode_request, encode_response};
pub use header::{RequestHeader, ResponseHeader};
pub use text::KString;
pub use uuid::Uuid;
