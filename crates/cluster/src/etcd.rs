//! A client of the etcd v3 protocol: for a Moim, and for every etcd.
//!
//! | part | owns |
//! |---|---|
//! | [`channel`](Channel) | connections: which server, when to change it |
//! | `call` | one gRPC call over a connection: headers, frames, status |
//! | [`client`](EtcdClient) | the methods, and which of them may be asked again |
//! | [`watch`](EtcdWatch) | a watch that outlives connections |
//! | [`repository`](EtcdRepository) | the state repository on top |
//!
//! The connections live on the runtime the client was made on. The handles work from any thread and any
//! runtime that has timers.
//!
//! The rule about outcomes: a change is asked once. When it was sent and no answer came, the outcome is
//! unknown and the caller is told so, whatever made the answer stay away. Reads are asked again, on another
//! server if need be, until the deadline.

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
    // No key is empty; one zero byte is the first one there can be.
    let start = if prefix.is_empty() { vec![0] } else { prefix.to_vec() };
    (start, prefix_end(prefix))
}

#[cfg(test)]
pub(crate) mod tests;
