//! Locks (service `v3lockpb.Lock`).

#![allow(missing_docs)] // fields have the names and the meaning of the public protocol

use bytes::Bytes;

use crate::etcd::ResponseHeader;

/// Waits for the lock of a name. A `lease` of 0 lets the server grant one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LockRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    #[prost(int64, tag = "2")]
    pub lease: i64,
}

/// The lock is held as long as `key` exists.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LockResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(bytes = "bytes", tag = "2")]
    pub key: Bytes,
}

/// Gives a lock back, by its key.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UnlockRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
}

/// The lock is free.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UnlockResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}
