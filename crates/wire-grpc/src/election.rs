//! Elections (service `v3electionpb.Election`).

#![allow(missing_docs)] // fields have the names and the meaning of the public protocol

use bytes::Bytes;

use crate::etcd::{KeyValue, ResponseHeader};

/// Waits to become the leader of a name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CampaignRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    #[prost(int64, tag = "2")]
    pub lease: i64,
    #[prost(bytes = "bytes", tag = "3")]
    pub value: Bytes,
}

/// The caller leads.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CampaignResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, optional, tag = "2")]
    pub leader: Option<LeaderKey>,
}

/// What proves a leadership.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LeaderKey {
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub key: Bytes,
    #[prost(int64, tag = "3")]
    pub rev: i64,
    #[prost(int64, tag = "4")]
    pub lease: i64,
}

/// Asks who leads, once or from now on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LeaderRequest {
    #[prost(bytes = "bytes", tag = "1")]
    pub name: Bytes,
}

/// Who leads.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LeaderResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, optional, tag = "2")]
    pub kv: Option<KeyValue>,
}

/// Gives a leadership up.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResignRequest {
    #[prost(message, optional, tag = "1")]
    pub leader: Option<LeaderKey>,
}

/// It was given up.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResignResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}

/// Changes the value of a leadership.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProclaimRequest {
    #[prost(message, optional, tag = "1")]
    pub leader: Option<LeaderKey>,
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// It was changed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProclaimResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}
