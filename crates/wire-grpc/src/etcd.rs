//! The messages of the etcd v3 API, one file per service.
//!
//! Field numbers and names are facts of the public protocol; fields that this version does not know are
//! skipped when reading, as the protocol wants it. Byte fields of a decoded message are slices of its frame.

mod auth;
mod cluster;
mod kv;
mod lease;
mod maintenance;
mod watch;

pub use auth::*;
pub use cluster::*;
pub use kv::*;
pub use lease::*;
pub use maintenance::*;
pub use watch::*;
