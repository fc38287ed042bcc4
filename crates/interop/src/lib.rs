//! The harness of the interop suite: a real `moim serve` process, started, killed and restarted, and a proxy that
//! loses what a network may lose.
//!
//! Nothing in here knows the inside of Moim: the ready line, signals and sockets are all it has. With
//! `INTEROP_KAFKA=HOST:PORT` in the environment the tests that need no process of their own run against that
//! broker instead, which is how the suite itself is checked against Apache Kafka.

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
