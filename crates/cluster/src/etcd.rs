//! A client of the etcd v3 protocol, for Moim and for any etcd.
//!
//! | part | owns |
//! |---|---|
//! | [`channel`](Channel) | connections: server selection and failover |
//! | `call` | one gRPC call over a connection: headers, frames, status |
//! | [`client`](EtcdClient) | the methods, and which of them may be retried |
//! | [`watch`](EtcdWatch) | a watch that outlives connections |
//! | [`repository`](EtcdRepository) | the state repository on top |
//!
//! The connections live on the runtime the client was created on. The handles work from any thread and any
//! runtime with timers.
//!
//! Retry rule: a write is sent once. When it was sent and no reply came, for any reason, the outcome is
//! unknown and the caller gets that error. Reads are retried, also on another server, until the deadline.

mod call;
mod channel;
mod client;
mod error;
mod repository;
mod watch;

pub(crate) use call::{Stream, unary};
pub(crate) use channel::Link;
pub use channel::{Channel, EtcdOptions};
pub use client::{EtcdClient, Snapshot};
pub use error::EtcdError;
pub use moim_state::{prefix_end, prefix_range};
pub use repository::EtcdRepository;
pub use watch::{EtcdWatch, WatchBatch, WatchError, WatchOptions};

#[cfg(test)]
pub(crate) mod tests;
