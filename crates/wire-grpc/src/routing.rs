//! The routing table, pushed (service `moim.routing.v1.Routing`).
//!
//! `Follow` is a bidirectional stream: a subscriber sends its identity and its version, the manager sends newer
//! versions; servers also receive commands, and acknowledge them. `Change` is one operation on the table.

#![allow(missing_docs)] // fields have the names and the meaning of docs/cluster.md

use bytes::Bytes;

/// The methods' paths.
pub mod method {
    pub const FOLLOW: &str = "/moim.routing.v1.Routing/Follow";
    pub const CHANGE: &str = "/moim.routing.v1.Routing/Change";
    pub const SHOW: &str = "/moim.routing.v1.Routing/Show";
}

/// One partition of the table.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Route {
    #[prost(string, tag = "1")]
    pub partition_id: String,
    #[prost(string, tag = "2")]
    pub key_range_start: String,
    #[prost(string, tag = "3")]
    pub key_range_end: String,
    #[prost(string, tag = "4")]
    pub node_id: String,
    #[prost(string, tag = "5")]
    pub node_address: String,
    #[prost(int32, tag = "6")]
    pub node_status: i32,
}

/// A message of a subscriber.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowRequest {
    #[prost(oneof = "FollowRequestKind", tags = "1, 2")]
    pub kind: Option<FollowRequestKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FollowRequestKind {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Ack(Ack),
}

/// The first message: identity and version of the subscriber.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hello {
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Empty for an SDK.
    #[prost(string, tag = "2")]
    pub node_id: String,
    /// The table that the version belongs to.
    #[prost(int64, tag = "3")]
    pub incarnation: i64,
    #[prost(int64, tag = "4")]
    pub have_version: i64,
    /// Partitions that the server has stopped serving for an operation.
    #[prost(string, repeated, tag = "5")]
    pub drained: Vec<String>,
}

/// The answer to a command.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ack {
    #[prost(uint64, tag = "1")]
    pub operation: u64,
    /// Empty on success.
    #[prost(string, tag = "2")]
    pub error: String,
    #[prost(bytes = "bytes", tag = "3")]
    pub handoff: Bytes,
}

/// A message of a manager.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowResponse {
    #[prost(oneof = "FollowResponseKind", tags = "1, 2, 3")]
    pub kind: Option<FollowResponseKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FollowResponseKind {
    #[prost(message, tag = "1")]
    Snapshot(Snapshot),
    #[prost(message, tag = "2")]
    Delta(Delta),
    #[prost(message, tag = "3")]
    Command(Command),
}

/// A part of the whole table; complete when the last of `count` parts of one version has arrived.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Snapshot {
    #[prost(int64, tag = "1")]
    pub incarnation: i64,
    #[prost(int64, tag = "2")]
    pub version: i64,
    #[prost(uint32, tag = "3")]
    pub index: u32,
    #[prost(uint32, tag = "4")]
    pub count: u32,
    #[prost(message, repeated, tag = "5")]
    pub routes: Vec<Route>,
}

/// The difference between two versions.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Delta {
    #[prost(int64, tag = "1")]
    pub incarnation: i64,
    #[prost(int64, tag = "2")]
    pub from: i64,
    #[prost(int64, tag = "3")]
    pub to: i64,
    #[prost(message, repeated, tag = "4")]
    pub upserts: Vec<Route>,
    #[prost(string, repeated, tag = "5")]
    pub removes: Vec<String>,
}

/// A command to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum CommandKind {
    Unknown = 0,
    /// Stop serving the partition, and return what the next owner needs.
    Drain = 1,
    /// Prepare to serve the partition, with the previous owner's handover.
    Prepare = 2,
    /// Serve the partition again: the operation was cancelled.
    Resume = 3,
    /// Split the partition at `key`; the upper part is `other_id`.
    Split = 4,
    /// Merge `other_id` into the partition.
    Merge = 5,
}

/// A command to a server. Commands of an older term than already seen are refused.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Command {
    #[prost(uint64, tag = "1")]
    pub operation: u64,
    #[prost(int64, tag = "2")]
    pub term: i64,
    #[prost(enumeration = "CommandKind", tag = "3")]
    pub kind: i32,
    #[prost(string, tag = "4")]
    pub partition_id: String,
    #[prost(string, tag = "5")]
    pub other_id: String,
    #[prost(string, tag = "6")]
    pub key: String,
    #[prost(bytes = "bytes", tag = "7")]
    pub handoff: Bytes,
}

/// The requested change of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum ChangeKind {
    Unknown = 0,
    Split = 1,
    Merge = 2,
    Migrate = 3,
    Drain = 4,
    Undrain = 5,
}

/// One operation on the table.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ChangeRequest {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(enumeration = "ChangeKind", tag = "2")]
    pub kind: i32,
    #[prost(string, tag = "3")]
    pub partition_id: String,
    /// Where to split; for a merge the other partition.
    #[prost(string, tag = "4")]
    pub argument: String,
    /// The node to migrate to, or to drain.
    #[prost(string, tag = "5")]
    pub node_id: String,
}

/// It is done.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ChangeResponse {
    #[prost(int64, tag = "1")]
    pub version: i64,
    /// The partition that came to be.
    #[prost(string, tag = "2")]
    pub partition_id: String,
}

/// Asks for the state of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ShowRequest {
    #[prost(string, tag = "1")]
    pub namespace: String,
}

/// A server as the manager knows it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Server {
    #[prost(string, tag = "1")]
    pub node_id: String,
    #[prost(string, tag = "2")]
    pub node_address: String,
    #[prost(int32, tag = "3")]
    pub node_status: i32,
    #[prost(uint64, tag = "4")]
    pub partitions: u64,
    #[prost(bool, tag = "5")]
    pub connected: bool,
}

/// The state of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ShowResponse {
    #[prost(int64, tag = "1")]
    pub incarnation: i64,
    #[prost(int64, tag = "2")]
    pub version: i64,
    #[prost(message, repeated, tag = "3")]
    pub routes: Vec<Route>,
    #[prost(message, repeated, tag = "4")]
    pub servers: Vec<Server>,
    /// The manager that leads.
    #[prost(string, tag = "5")]
    pub leader: String,
    #[prost(uint64, tag = "6")]
    pub subscribers: u64,
}
