//! Inputs and outputs of the group coordinator: plain types, no wire format, no I/O.
//!
//! Requests are already decoded and responses are not yet encoded. Fields that depend on the API version say so;
//! everything else has the shape of the newest version.

use std::sync::Arc;

use bytes::Bytes;

use super::codes::ErrorCode;

/// Identifies the request of a response. Chosen by the caller; the coordinator returns it exactly once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// Identifies a write of the coordinator. Tokens grow in the order in which the writes must enter the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PersistToken(pub u64);

/// The producer of a transactional write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TxnProducer {
    /// The producer id.
    pub id: i64,
    /// The producer epoch.
    pub epoch: i16,
}

/// A record of `__consumer_offsets`: its key and its value; no value is a tombstone.
pub type GroupRecord = (Bytes, Option<Bytes>);

/// What the caller must do, in this order.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Send the response of the request.
    Reply(Token, Response),
    /// Append the records as one batch to the partition of `group`, then call `on_persisted(then, …)`. Writes of one
    /// group enter the log in the order of their effects, and successful ones are reported in that order.
    Persist {
        /// The group whose partition of `__consumer_offsets` gets the records.
        group: Arc<str>,
        /// The records of the batch.
        records: Vec<GroupRecord>,
        /// Set if the batch is part of a transaction.
        txn: Option<TxnProducer>,
        /// The token to report the outcome with.
        then: PersistToken,
    },
}

/// A request that may change a group, for [`super::Groups::step`].
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each variant is the request its type documents
pub enum Input {
    Join(Token, Join),
    Sync(Token, Sync),
    Heartbeat(Token, Heartbeat),
    Leave(Token, Leave),
    OffsetCommit(Token, OffsetCommit),
    TxnOffsetCommit(Token, TxnOffsetCommit),
    OffsetFetch(Token, Vec<OffsetFetch>),
    OffsetDelete(Token, OffsetDelete),
    DeleteGroups(Token, Vec<Arc<str>>),
    DescribeGroups(Token, Vec<Arc<str>>),
    ListGroups(Token, ListFilter),
    Persisted(PersistToken, Result<(), ErrorCode>),
    TxnMarker { producer: TxnProducer, commit: bool },
    TopicDeleted(Arc<str>),
    Tick,
}

/// A response of the coordinator.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)] // each variant is the response its type documents
pub enum Response {
    Join(JoinResponse),
    Sync(SyncResponse),
    Heartbeat(ErrorCode),
    Leave(LeaveResponse),
    /// The response of OffsetCommit and of TxnOffsetCommit.
    OffsetCommit(Vec<TopicErrors>),
    OffsetFetch(Vec<FetchedGroup>),
    OffsetDelete(OffsetDeleteResponse),
    DeleteGroups(Vec<(Arc<str>, ErrorCode)>),
    DescribeGroups(Vec<DescribedGroup>),
    ListGroups(Vec<ListedGroup>),
}

/// A partition assignment protocol that a member supports, with the metadata its assignor needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Protocol {
    /// The assignor's name.
    pub name: Arc<str>,
    /// The member's subscription, opaque to the coordinator except for its topics.
    pub metadata: Bytes,
}

/// A JoinGroup request.
#[derive(Clone, Debug)]
pub struct Join {
    /// The group id.
    pub group: Arc<str>,
    /// The member id; empty for a member that has none yet.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The client id of the request header.
    pub client_id: Arc<str>,
    /// The peer's address, as `/127.0.0.1`.
    pub client_host: Arc<str>,
    /// The session timeout: how long a member without heartbeats stays.
    pub session_timeout_ms: i32,
    /// The rebalance timeout: how long a rebalance waits for this member; negative (version 0) means the session
    /// timeout.
    pub rebalance_timeout_ms: i32,
    /// The protocol type: `consumer` for consumers.
    pub protocol_type: Arc<str>,
    /// The supported protocols, in order of preference.
    pub protocols: Vec<Protocol>,
    /// True from version 4: a dynamic member must join again with the member id it got (MEMBER_ID_REQUIRED).
    pub require_known_member_id: bool,
    /// True from version 9: a returning static leader can be told to skip the assignment.
    pub can_skip_assignment: bool,
    /// The client's reason for the join (version 8), for the log.
    pub reason: Option<Arc<str>>,
}

/// The response to JoinGroup.
#[derive(Clone, PartialEq, Debug)]
pub struct JoinResponse {
    /// The error code; `ErrorCode::None` on success.
    pub error: ErrorCode,
    /// The generation; -1 on an error.
    pub generation: i32,
    /// The protocol type, for version 7 and newer.
    pub protocol_type: Option<Arc<str>>,
    /// The selected protocol; `None` is encoded as an empty string below version 7.
    pub protocol: Option<Arc<str>>,
    /// The member id of the group leader; empty on an error.
    pub leader: Arc<str>,
    /// True if the leader must keep the current assignment (version 9).
    pub skip_assignment: bool,
    /// The member id of the joining member.
    pub member_id: Arc<str>,
    /// All members, in the leader's response; empty in the others.
    pub members: Vec<JoinedMember>,
}

/// A member in the leader's JoinGroup response.
#[derive(Clone, PartialEq, Debug)]
pub struct JoinedMember {
    /// The member id.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The subscription under the selected protocol.
    pub metadata: Bytes,
}

/// A SyncGroup request.
#[derive(Clone, Debug)]
pub struct Sync {
    /// The group id.
    pub group: Arc<str>,
    /// The generation the member knows.
    pub generation: i32,
    /// The member id.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The protocol type; checked if set (version 5).
    pub protocol_type: Option<Arc<str>>,
    /// The protocol; checked if set (version 5).
    pub protocol: Option<Arc<str>>,
    /// The leader's assignment by member id. A member without an entry gets an empty assignment.
    pub assignments: Vec<(Arc<str>, Bytes)>,
}

/// The response to SyncGroup.
#[derive(Clone, PartialEq, Debug)]
pub struct SyncResponse {
    /// The error code; `ErrorCode::None` on success.
    pub error: ErrorCode,
    /// The protocol type, for version 5.
    pub protocol_type: Option<Arc<str>>,
    /// The selected protocol, for version 5.
    pub protocol: Option<Arc<str>>,
    /// The member's assignment.
    pub assignment: Bytes,
}

/// A Heartbeat request.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// The group id.
    pub group: Arc<str>,
    /// The generation the member knows.
    pub generation: i32,
    /// The member id.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
}

/// A LeaveGroup request; below version 3 it names one member.
#[derive(Clone, Debug)]
pub struct Leave {
    /// The group id.
    pub group: Arc<str>,
    /// The leaving members.
    pub members: Vec<LeavingMember>,
}

/// A leaving member, or one that an administrator removes by its group instance id (then without a member id).
#[derive(Clone, PartialEq, Debug)]
pub struct LeavingMember {
    /// The member id; empty for the current owner of the group instance id.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The reason (version 5), for the log.
    pub reason: Option<Arc<str>>,
}

/// The response to LeaveGroup. Below version 3 the one member's error is the response's error.
#[derive(Clone, PartialEq, Debug)]
pub struct LeaveResponse {
    /// The error of the whole request.
    pub error: ErrorCode,
    /// One entry for each named member, in request order.
    pub members: Vec<(LeavingMember, ErrorCode)>,
}

/// An OffsetCommit request.
#[derive(Clone, Debug)]
pub struct OffsetCommit {
    /// The group id.
    pub group: Arc<str>,
    /// The generation; negative for a client without membership.
    pub generation: i32,
    /// The member id; empty for a client without membership.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The client's offset retention (versions 2 to 4); `None` for the default.
    pub retention_ms: Option<i64>,
    /// The offsets to commit.
    pub topics: Vec<CommitTopic>,
}

/// A TxnOffsetCommit request.
#[derive(Clone, Debug)]
pub struct TxnOffsetCommit {
    /// The producer of the transaction.
    pub producer: TxnProducer,
    /// The group id.
    pub group: Arc<str>,
    /// The generation; negative below version 3.
    pub generation: i32,
    /// The member id; empty below version 3.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The offsets to commit.
    pub topics: Vec<CommitTopic>,
}

/// Offsets of one topic to commit.
#[derive(Clone, Debug)]
pub struct CommitTopic {
    /// The topic name.
    pub topic: Arc<str>,
    /// The offsets by partition.
    pub partitions: Vec<CommitPartition>,
}

/// One offset to commit.
#[derive(Clone, Debug)]
pub struct CommitPartition {
    /// The partition index.
    pub partition: i32,
    /// The next offset to consume.
    pub offset: i64,
    /// The leader epoch of the last record consumed, or -1.
    pub leader_epoch: i32,
    /// The client's metadata, returned by OffsetFetch; `None` is the empty text.
    pub metadata: Option<String>,
}

/// An error per partition of a topic.
#[derive(Clone, PartialEq, Debug)]
pub struct TopicErrors {
    /// The topic name.
    pub topic: Arc<str>,
    /// Partition and error, in request order.
    pub partitions: Vec<(i32, ErrorCode)>,
}

/// OffsetFetch for one group.
#[derive(Clone, Debug)]
pub struct OffsetFetch {
    /// The group id.
    pub group: Arc<str>,
    /// The requested partitions; `None` for all that have an offset.
    pub topics: Option<Vec<(Arc<str>, Vec<i32>)>>,
    /// Fail for partitions whose offset an open transaction may change.
    pub require_stable: bool,
}

/// The response to OffsetFetch for one group.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedGroup {
    /// The group id.
    pub group: Arc<str>,
    /// The error of the whole group.
    pub error: ErrorCode,
    /// The committed offsets.
    pub topics: Vec<FetchedTopic>,
}

/// Committed offsets of one topic.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedTopic {
    /// The topic name.
    pub topic: Arc<str>,
    /// The offsets by partition.
    pub partitions: Vec<FetchedOffset>,
}

/// One committed offset; -1 without a committed offset.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedOffset {
    /// The partition index.
    pub partition: i32,
    /// The next offset to consume, or -1.
    pub offset: i64,
    /// The leader epoch, or -1.
    pub leader_epoch: i32,
    /// The metadata of the commit.
    pub metadata: String,
    /// `UnstableOffsetCommit` if a transaction is open and the client requires stable offsets.
    pub error: ErrorCode,
}

/// An OffsetDelete request.
#[derive(Clone, Debug)]
pub struct OffsetDelete {
    /// The group id.
    pub group: Arc<str>,
    /// The partitions by topic.
    pub topics: Vec<(Arc<str>, Vec<i32>)>,
}

/// The response to OffsetDelete.
#[derive(Clone, PartialEq, Debug)]
pub struct OffsetDeleteResponse {
    /// The error of the whole request; then there are no topics.
    pub error: ErrorCode,
    /// One entry for each named partition.
    pub topics: Vec<TopicErrors>,
}

/// The filter of ListGroups. An empty list matches everything; names are case-insensitive.
#[derive(Clone, Default, Debug)]
pub struct ListFilter {
    /// State names: `Stable`, `Empty`, …
    pub states: Vec<String>,
    /// Group types: `classic`.
    pub types: Vec<String>,
}

/// An entry of the ListGroups response.
#[derive(Clone, PartialEq, Debug)]
pub struct ListedGroup {
    /// The group id.
    pub group: Arc<str>,
    /// The protocol type; empty for a group that only ever committed offsets.
    pub protocol_type: Arc<str>,
    /// The group's state.
    pub state: State,
    /// The group type: always `classic`.
    pub group_type: &'static str,
}

/// A group in the DescribeGroups response.
#[derive(Clone, PartialEq, Debug)]
pub struct DescribedGroup {
    /// `GroupIdNotFound` for an unknown group from version 6; older versions return no error and state `Dead`.
    pub error: ErrorCode,
    /// The group id.
    pub group: Arc<str>,
    /// The group's state.
    pub state: State,
    /// The protocol type; empty for a group that only ever committed offsets.
    pub protocol_type: Arc<str>,
    /// The selected assignor; empty unless the group is stable.
    pub protocol: Arc<str>,
    /// The members.
    pub members: Vec<DescribedMember>,
}

/// A member in the DescribeGroups response; metadata and assignment are empty unless the group is stable.
#[derive(Clone, PartialEq, Debug)]
pub struct DescribedMember {
    /// The member id.
    pub member_id: Arc<str>,
    /// The group instance id of a static member.
    pub instance_id: Option<Arc<str>>,
    /// The client id of its JoinGroup request.
    pub client_id: Arc<str>,
    /// The host of its JoinGroup request.
    pub client_host: Arc<str>,
    /// The subscription.
    pub metadata: Bytes,
    /// The assignment.
    pub assignment: Bytes,
}

/// The state of a group, with the protocol's names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// No members; offsets may remain.
    Empty,
    /// Waiting for the members to join the next generation.
    PreparingRebalance,
    /// Waiting for the leader's assignment.
    CompletingRebalance,
    /// Every member can fetch its assignment.
    Stable,
    /// The group does not exist.
    Dead,
}

impl State {
    /// The state name in the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::PreparingRebalance => "PreparingRebalance",
            Self::CompletingRebalance => "CompletingRebalance",
            Self::Stable => "Stable",
            Self::Dead => "Dead",
        }
    }
}
