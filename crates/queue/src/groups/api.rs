//! What goes into the group machine and what comes out: plain types, no wire, no I/O.
//!
//! Requests are already decoded and answers are not yet encoded. What depends on the version of an API is
//! said where it matters; everything else is the newest version's shape.

use std::sync::Arc;

use bytes::Bytes;

use super::codes::ErrorCode;

/// Names the request an answer belongs to. The caller picks it; the machine hands it back exactly once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// Names a write the machine asked for. Tokens grow in the order in which the writes must enter the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PersistToken(pub u64);

/// The producer a transactional write belongs to.
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
    /// Answer the request.
    Reply(Token, Response),
    /// Append the records as one batch to the partition of `group`, then call `on_persisted(then, …)`.
    /// Writes of one group enter the log in the order of their effects, and those that succeed are
    /// reported in that order.
    Persist {
        /// Whose partition of `__consumer_offsets` the records go to.
        group: Arc<str>,
        /// The records of the batch.
        records: Vec<GroupRecord>,
        /// Set when the batch is part of a transaction.
        txn: Option<TxnProducer>,
        /// What to report the outcome under.
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

/// An answer.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)] // each variant is the answer its type documents
pub enum Response {
    Join(JoinResponse),
    Sync(SyncResponse),
    Heartbeat(ErrorCode),
    Leave(LeaveResponse),
    /// The answer of OffsetCommit and of TxnOffsetCommit.
    OffsetCommit(Vec<TopicErrors>),
    OffsetFetch(Vec<FetchedGroup>),
    OffsetDelete(OffsetDeleteResponse),
    DeleteGroups(Vec<(Arc<str>, ErrorCode)>),
    DescribeGroups(Vec<DescribedGroup>),
    ListGroups(Vec<ListedGroup>),
}

/// One way of assigning that a member offers, with what the assignor needs to know about the member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Protocol {
    /// The assignor's name.
    pub name: Arc<str>,
    /// The member's subscription, opaque to us except for its topics.
    pub metadata: Bytes,
}

/// JoinGroup.
#[derive(Clone, Debug)]
pub struct Join {
    /// The group.
    pub group: Arc<str>,
    /// Empty for a member that has no id yet.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// The client id of the request header.
    pub client_id: Arc<str>,
    /// The peer's address, as `/127.0.0.1`.
    pub client_host: Arc<str>,
    /// How long a silent member stays.
    pub session_timeout_ms: i32,
    /// How long a rebalance waits for this member; negative (version 0) means the session timeout.
    pub rebalance_timeout_ms: i32,
    /// `consumer` for consumers.
    pub protocol_type: Arc<str>,
    /// In order of preference.
    pub protocols: Vec<Protocol>,
    /// From version 4 a dynamic member must come back with the id it was given.
    pub require_known_member_id: bool,
    /// From version 9 a returning static leader can be told not to assign.
    pub can_skip_assignment: bool,
    /// Why the client joins (version 8), for the log.
    pub reason: Option<Arc<str>>,
}

/// The answer to JoinGroup.
#[derive(Clone, PartialEq, Debug)]
pub struct JoinResponse {
    /// What went wrong, or `None`.
    pub error: ErrorCode,
    /// The generation, -1 on an error.
    pub generation: i32,
    /// For version 7 and newer.
    pub protocol_type: Option<Arc<str>>,
    /// Below version 7 nothing is written as an empty string.
    pub protocol: Option<Arc<str>>,
    /// The member that assigns; empty on an error.
    pub leader: Arc<str>,
    /// Tells a leader that the group's assignment stands (version 9).
    pub skip_assignment: bool,
    /// The id of the member that asked.
    pub member_id: Arc<str>,
    /// For the leader: everybody. For others: nobody.
    pub members: Vec<JoinedMember>,
}

/// A member as its leader sees it.
#[derive(Clone, PartialEq, Debug)]
pub struct JoinedMember {
    /// The member.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// Its subscription under the chosen protocol.
    pub metadata: Bytes,
}

/// SyncGroup.
#[derive(Clone, Debug)]
pub struct Sync {
    /// The group.
    pub group: Arc<str>,
    /// The generation the member knows.
    pub generation: i32,
    /// The member.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// Checked when set (version 5).
    pub protocol_type: Option<Arc<str>>,
    /// Checked when set (version 5).
    pub protocol: Option<Arc<str>>,
    /// From the leader: who gets what. A member that is not named gets nothing.
    pub assignments: Vec<(Arc<str>, Bytes)>,
}

/// The answer to SyncGroup.
#[derive(Clone, PartialEq, Debug)]
pub struct SyncResponse {
    /// What went wrong, or `None`.
    pub error: ErrorCode,
    /// For version 5.
    pub protocol_type: Option<Arc<str>>,
    /// For version 5.
    pub protocol: Option<Arc<str>>,
    /// What the member has to do.
    pub assignment: Bytes,
}

/// Heartbeat.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// The group.
    pub group: Arc<str>,
    /// The generation the member knows.
    pub generation: i32,
    /// The member.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
}

/// LeaveGroup; below version 3 it names one member.
#[derive(Clone, Debug)]
pub struct Leave {
    /// The group.
    pub group: Arc<str>,
    /// Who leaves.
    pub members: Vec<LeavingMember>,
}

/// A member that leaves, or that an administrator removes by its instance id (then without a member id).
#[derive(Clone, PartialEq, Debug)]
pub struct LeavingMember {
    /// The member; empty to mean whoever has the instance id.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// Why (version 5), for the log.
    pub reason: Option<Arc<str>>,
}

/// The answer to LeaveGroup. Below version 3 the one member's error is the answer's error.
#[derive(Clone, PartialEq, Debug)]
pub struct LeaveResponse {
    /// An error of the whole request.
    pub error: ErrorCode,
    /// One line for each member named, in the request's order.
    pub members: Vec<(LeavingMember, ErrorCode)>,
}

/// OffsetCommit.
#[derive(Clone, Debug)]
pub struct OffsetCommit {
    /// The group.
    pub group: Arc<str>,
    /// Negative for a client that does not use the group's membership.
    pub generation: i32,
    /// Empty for a client that does not use the group's membership.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// Versions 2 to 4 may say how long to keep the offsets; `None` for the default.
    pub retention_ms: Option<i64>,
    /// The offsets.
    pub topics: Vec<CommitTopic>,
}

/// TxnOffsetCommit.
#[derive(Clone, Debug)]
pub struct TxnOffsetCommit {
    /// Whose transaction.
    pub producer: TxnProducer,
    /// The group.
    pub group: Arc<str>,
    /// Negative below version 3.
    pub generation: i32,
    /// Empty below version 3.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// The offsets.
    pub topics: Vec<CommitTopic>,
}

/// Offsets of one topic to commit.
#[derive(Clone, Debug)]
pub struct CommitTopic {
    /// The topic.
    pub topic: Arc<str>,
    /// Its partitions.
    pub partitions: Vec<CommitPartition>,
}

/// One offset to commit.
#[derive(Clone, Debug)]
pub struct CommitPartition {
    /// The partition.
    pub partition: i32,
    /// The next offset to consume.
    pub offset: i64,
    /// The leader epoch of the last record consumed, or -1.
    pub leader_epoch: i32,
    /// Free text that comes back on a fetch; nothing is the empty text.
    pub metadata: Option<String>,
}

/// An error per partition of a topic.
#[derive(Clone, PartialEq, Debug)]
pub struct TopicErrors {
    /// The topic.
    pub topic: Arc<str>,
    /// Partition and error, in the request's order.
    pub partitions: Vec<(i32, ErrorCode)>,
}

/// OffsetFetch for one group.
#[derive(Clone, Debug)]
pub struct OffsetFetch {
    /// The group.
    pub group: Arc<str>,
    /// Which partitions, or all that have an offset.
    pub topics: Option<Vec<(Arc<str>, Vec<i32>)>>,
    /// Refuse partitions whose offset an open transaction may change.
    pub require_stable: bool,
}

/// The answer to OffsetFetch for one group.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedGroup {
    /// The group.
    pub group: Arc<str>,
    /// An error of the whole group.
    pub error: ErrorCode,
    /// The offsets.
    pub topics: Vec<FetchedTopic>,
}

/// Committed offsets of one topic.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedTopic {
    /// The topic.
    pub topic: Arc<str>,
    /// Its partitions.
    pub partitions: Vec<FetchedOffset>,
}

/// One committed offset; -1 where there is none.
#[derive(Clone, PartialEq, Debug)]
pub struct FetchedOffset {
    /// The partition.
    pub partition: i32,
    /// The next offset to consume, or -1.
    pub offset: i64,
    /// The leader epoch, or -1.
    pub leader_epoch: i32,
    /// The text that came with the commit.
    pub metadata: String,
    /// `UnstableOffsetCommit` where a transaction is open and the client asked not to see through it.
    pub error: ErrorCode,
}

/// OffsetDelete.
#[derive(Clone, Debug)]
pub struct OffsetDelete {
    /// The group.
    pub group: Arc<str>,
    /// Which partitions.
    pub topics: Vec<(Arc<str>, Vec<i32>)>,
}

/// The answer to OffsetDelete.
#[derive(Clone, PartialEq, Debug)]
pub struct OffsetDeleteResponse {
    /// An error of the whole request; then there are no topics.
    pub error: ErrorCode,
    /// One line for each partition named.
    pub topics: Vec<TopicErrors>,
}

/// Which groups to list. An empty list lets everything through; names are compared without case.
#[derive(Clone, Default, Debug)]
pub struct ListFilter {
    /// `Stable`, `Empty`, …
    pub states: Vec<String>,
    /// `classic`.
    pub types: Vec<String>,
}

/// A line of ListGroups.
#[derive(Clone, PartialEq, Debug)]
pub struct ListedGroup {
    /// The group.
    pub group: Arc<str>,
    /// Empty for a group that only ever committed offsets.
    pub protocol_type: Arc<str>,
    /// Its state.
    pub state: State,
    /// Always `classic`.
    pub group_type: &'static str,
}

/// A group as DescribeGroups shows it.
#[derive(Clone, PartialEq, Debug)]
pub struct DescribedGroup {
    /// `GroupIdNotFound` for an unknown group from version 6; older versions answer no error and state `Dead`.
    pub error: ErrorCode,
    /// The group.
    pub group: Arc<str>,
    /// Its state.
    pub state: State,
    /// Empty for a group that only ever committed offsets.
    pub protocol_type: Arc<str>,
    /// The chosen assignor; empty unless the group is stable.
    pub protocol: Arc<str>,
    /// The members.
    pub members: Vec<DescribedMember>,
}

/// A member as DescribeGroups shows it; metadata and assignment are empty unless the group is stable.
#[derive(Clone, PartialEq, Debug)]
pub struct DescribedMember {
    /// The member.
    pub member_id: Arc<str>,
    /// Set for a static member.
    pub instance_id: Option<Arc<str>>,
    /// The client id it joined with.
    pub client_id: Arc<str>,
    /// Where it joined from.
    pub client_host: Arc<str>,
    /// Its subscription.
    pub metadata: Bytes,
    /// Its assignment.
    pub assignment: Bytes,
}

/// The state of a group, under the protocol's names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// No members; offsets may remain.
    Empty,
    /// Waiting for the members to join the next generation.
    PreparingRebalance,
    /// Waiting for the leader's assignment.
    CompletingRebalance,
    /// Everybody can have their assignment.
    Stable,
    /// There is no such group.
    Dead,
}

impl State {
    /// The name on the wire.
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
