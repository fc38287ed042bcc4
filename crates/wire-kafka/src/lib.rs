//! The Kafka protocol: bytes to types and back. This crate does no I/O and knows no broker state.

#![warn(missing_docs)]

pub mod compression;
#[doc(hidden)]
pub mod fuzzing;
pub mod partitioner;
pub mod records;
