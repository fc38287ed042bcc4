//! The harness of the interop suite: a real `moim serve` process, started, killed and restarted, and a
//! fault-injecting proxy that drops what a network may drop.
//!
//! The harness uses no internals of Moim: only the ready line, signals and sockets. With `INTEROP_KAFKA=HOST:PORT` in
//! the environment, the tests that do not manage their own process run against that broker instead; this validates
//! the suite itself against Apache Kafka.

#![warn(missing_docs)]
#![allow(clippy::disallowed_methods)] // real processes, real time

mod binary;
pub mod cluster;
pub mod net;
mod process;
pub mod proxy;
pub mod raw;
pub mod redis;
mod server;
mod wait;

pub use binary::{moim_binary, serves_etcd};
pub use server::{Options, Server};
pub use wait::{Deadline, until};
