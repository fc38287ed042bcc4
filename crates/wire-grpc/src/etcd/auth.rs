//! Whether authentication is on (service `etcdserverpb.Auth`). Nothing else of it is spoken: there are no users yet.

#![allow(missing_docs)] // fields have the names and the meaning of the public protocol

use super::kv::ResponseHeader;

/// Asks whether authentication is on.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct AuthStatusRequest {}

/// Whether authentication is on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AuthStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub enabled: bool,
    #[prost(uint64, tag = "3")]
    pub auth_revision: u64,
}
