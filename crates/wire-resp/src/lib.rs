//! The Redis protocol, RESP2 and RESP3: bytes to types and back, no I/O.
//!
//! A server reads requests with [`Decoder`] and writes answers with [`Encoder`]; a client writes requests with
//! [`command::encode`] and reads answers with [`ReplyDecoder`]. [`Slot`] says which of the 16,384 slots a key is in.
//!
//! Invariants:
//! - Input is never trusted: a length is checked against its limit before anything is allocated for it, and memory grows
//!   with the bytes that arrived, never with the bytes that were announced.
//! - Both decoders go on where they stopped: a request that arrives byte by byte is looked at once.
//! - The arguments of a request are slices of the connection's buffer, not copies.
//! - Decoding and encoding are pure: no clock, no randomness, no sockets.

#![warn(missing_docs)]

pub mod args;
pub mod command;
pub mod encode;
#[doc(hidden)]
pub mod fuzzing;
pub mod number;
pub mod reply;
pub mod request;
pub mod slot;
pub mod value;

pub use args::{Args, OwnedArgs};
pub use encode::{Encoder, Protocol};
pub use reply::{ReplyDecoder, ReplyError};
pub use request::{Batch, Decoded, Decoder, Limits, ProtocolError};
pub use slot::Slot;
pub use value::Value;
