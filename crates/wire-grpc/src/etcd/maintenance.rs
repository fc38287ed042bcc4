//! Status, checksums, snapshots, alarms (service `etcdserverpb.Maintenance`).

#![allow(missing_docs)] // fields have the names and the meaning of the public protocol

use bytes::Bytes;

use super::kv::ResponseHeader;

/// A kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum AlarmType {
    None = 0,
    NoSpace = 1,
    Corrupt = 2,
}

/// What to do with alarms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum AlarmAction {
    Get = 0,
    Activate = 1,
    Deactivate = 2,
}

/// Asks for alarms, raises one or takes it back.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AlarmRequest {
    #[prost(enumeration = "AlarmAction", tag = "1")]
    pub action: i32,
    #[prost(uint64, tag = "2")]
    pub member_id: u64,
    #[prost(enumeration = "AlarmType", tag = "3")]
    pub alarm: i32,
}

/// An alarm and the member that raised it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AlarmMember {
    #[prost(uint64, tag = "1")]
    pub member_id: u64,
    #[prost(enumeration = "AlarmType", tag = "2")]
    pub alarm: i32,
}

/// The alarms in question.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AlarmResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub alarms: Vec<AlarmMember>,
}

/// Asks a member how it is.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct StatusRequest {}

/// How a member is.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(int64, tag = "3")]
    pub db_size: i64,
    #[prost(uint64, tag = "4")]
    pub leader: u64,
    #[prost(uint64, tag = "5")]
    pub raft_index: u64,
    #[prost(uint64, tag = "6")]
    pub raft_term: u64,
    #[prost(uint64, tag = "7")]
    pub raft_applied_index: u64,
    #[prost(string, repeated, tag = "8")]
    pub errors: Vec<String>,
    #[prost(int64, tag = "9")]
    pub db_size_in_use: i64,
    #[prost(bool, tag = "10")]
    pub is_learner: bool,
    #[prost(string, tag = "11")]
    pub storage_version: String,
    #[prost(int64, tag = "12")]
    pub db_size_quota: i64,
    #[prost(message, optional, tag = "13")]
    pub downgrade_info: Option<DowngradeInfo>,
}

/// Asks to give back unused space.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct DefragmentRequest {}

/// Done.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DefragmentResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}

/// Asks for the checksum of the whole store.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct HashRequest {}

/// The checksum of the whole store.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HashResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(uint32, tag = "2")]
    pub hash: u32,
}

/// Asks for the checksum of the keys up to a revision; 0 is now.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HashKvRequest {
    #[prost(int64, tag = "1")]
    pub revision: i64,
}

/// The checksum of the keys.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HashKvResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(uint32, tag = "2")]
    pub hash: u32,
    #[prost(int64, tag = "3")]
    pub compact_revision: i64,
    #[prost(int64, tag = "4")]
    pub hash_revision: i64,
}

/// Asks for the store as a file.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct SnapshotRequest {}

/// A piece of the file. The last piece is the SHA-256 of all before it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SnapshotResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(uint64, tag = "2")]
    pub remaining_bytes: u64,
    #[prost(bytes = "bytes", tag = "3")]
    pub blob: Bytes,
    #[prost(string, tag = "4")]
    pub version: String,
}

/// Asks the leader to step down for another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MoveLeaderRequest {
    #[prost(uint64, tag = "1")]
    pub target_id: u64,
}

/// It did.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MoveLeaderResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
}

/// What to do about an older version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum DowngradeAction {
    Validate = 0,
    Enable = 1,
    Cancel = 2,
}

/// Asks to go back to an older version.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DowngradeRequest {
    #[prost(enumeration = "DowngradeAction", tag = "1")]
    pub action: i32,
    #[prost(string, tag = "2")]
    pub version: String,
}

/// The version now.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DowngradeResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(string, tag = "2")]
    pub version: String,
}

/// Whether the cluster is on its way to an older version.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DowngradeInfo {
    #[prost(bool, tag = "1")]
    pub enabled: bool,
    #[prost(string, tag = "2")]
    pub target_version: String,
}
