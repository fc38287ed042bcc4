//! gRPC framing and the messages of the etcd v3 API: bytes to types and back, no I/O.
//!
//! | part | what it is |
//! |---|---|
//! | [`frame`] | the five bytes before each message of a stream |
//! | [`status`] | codes, and the text of an error as a header carries it |
//! | [`timeout`] | the deadline header |
//! | [`method`] | the path of every method |
//! | [`etcd`], [`lock`], [`election`], [`health`], [`routing`] | the messages of the services |
//!
//! Invariants:
//! - Input is never trusted: a length is checked before anything is kept for it, and nesting has a bound.
//! - Byte fields of a decoded message are slices of the frame, not copies.
//! - The messages are written by hand from the field numbers of the public protocol; nothing is generated
//!   when building.

#![warn(missing_docs)]

pub mod election;
pub mod etcd;
pub mod frame;
pub mod health;
pub mod lock;
pub mod method;
pub mod routing;
pub mod status;
pub mod timeout;

pub use frame::{FrameError, FrameReader, decode, encode_frame};
pub use prost::Message;
pub use status::{Code, Status};
