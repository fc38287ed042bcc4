//! Members (service `etcdserverpb.Cluster`).

#![allow(missing_docs)] // fields have the names and the meaning of the public protocol

use super::kv::ResponseHeader;

/// A member of the cluster.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Member {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, repeated, tag = "3")]
    pub peer_urls: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub client_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    pub is_learner: bool,
}

/// Adds a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberAddRequest {
    #[prost(string, repeated, tag = "1")]
    pub peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    pub is_learner: bool,
}

/// The new member, and all.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberAddResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, optional, tag = "2")]
    pub member: Option<Member>,
    #[prost(message, repeated, tag = "3")]
    pub members: Vec<Member>,
}

/// Removes a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberRemoveRequest {
    #[prost(uint64, tag = "1")]
    pub id: u64,
}

/// Who is left.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberRemoveResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<Member>,
}

/// Changes the peer addresses of a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberUpdateRequest {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(string, repeated, tag = "2")]
    pub peer_urls: Vec<String>,
}

/// All members.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberUpdateResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<Member>,
}

/// Asks for the members.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberListRequest {
    #[prost(bool, tag = "1")]
    pub linearizable: bool,
}

/// The members.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberListResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<Member>,
}

/// Makes a learner a voter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberPromoteRequest {
    #[prost(uint64, tag = "1")]
    pub id: u64,
}

/// All members.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberPromoteResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<Member>,
}
