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
pub use repository::EtcdRepository;
pub use watch::{EtcdWatch, WatchBatch, WatchError, WatchOptions};

/// The end of the range of all keys that start with `prefix`; for an empty prefix, of all keys.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

/// The first key and the end of the range of all keys that start with `prefix`.
pub fn prefix_range(prefix: &[u8]) -> (Vec<u8>, Vec<u8>) {
    // No key is empty; a single zero byte is the first possible key.
    let start = if prefix.is_empty() { vec![0] } else { prefix.to_vec() };
    (start, prefix_end(prefix))
}

#[cfg(test)]
pub(crate) mod tests;
