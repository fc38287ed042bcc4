//! Membership in a consumer group: the classic protocol with the range assignor.
//!
//! Invariants: offsets are committed only in the generation in which they were read; after REBALANCE_IN_PROGRESS a member
//! rejoins before it fetches again; a member that ends sends LeaveGroup, so that its partitions are reassigned at once.

use std::collections::BTreeMap;
use std::time::Duration;

use moim_wire_kafka::messages::join_group::{JoinGroupRequestProtocol, JoinGroupResponseMember};
use moim_wire_kafka::messages::sync_group::SyncGroupRequestAssignment;
use moim_wire_kafka::messages::{
    HeartbeatRequest, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest, SyncGroupRequest,
};
use moim_wire_kafka::{ErrorCode, KString};
use tokio::time::Instant;

use crate::client::{BACKOFF, Client, TopicPartition};
use crate::error::{Error, Result, server_error};
use crate::offsets::Offsets;
use crate::subscription::{
    assign_range, decode_assignment, decode_subscription, encode_assignment, encode_subscription,
};

const SESSION_TIMEOUT: Duration = Duration::from_secs(10);
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
const REBALANCE_TIMEOUT: Duration = Duration::from_secs(60);
const RANGE: &str = "range";
const CONSUMER: &str = "consumer";

/// The state of a member, as the coordinator's last response says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// The generation is valid: the member may fetch.
    Stable,
    /// REBALANCE_IN_PROGRESS: commit, then rejoin.
    Rebalance,
    /// The generation or the member id is fenced, or the coordinator has moved: rejoin; offsets of this generation cannot
    /// be committed.
    Fenced,
}

/// One member of a consumer group.
pub struct Member {
    group: KString,
    topics: Vec<KString>,
    id: KString,
    generation: i32,
    coordinator: i32,
    last_heartbeat: Instant,
}

impl Member {
    /// A member that has not joined yet.
    pub fn new(group: &str, topics: &[KString]) -> Self {
        Self {
            group: group.into(),
            topics: topics.to_vec(),
            id: KString::default(),
            generation: -1,
            coordinator: -1,
            last_heartbeat: Instant::now(),
        }
    }

    /// Joins or rejoins the group; returns the partitions that are assigned to this member.
    pub async fn join(&mut self, client: &mut Client) -> Result<Vec<TopicPartition>> {
        let deadline = Instant::now() + client.timeout() + REBALANCE_TIMEOUT;
        loop {
            self.coordinator = client.coordinator(&self.group).await?;
            match self.try_join(client).await? {
                Ok(assigned) => {
                    self.last_heartbeat = Instant::now();
                    return Ok(assigned);
                }
                Err(code) => {
                    let error = ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownServerError);
                    let again = match error {
                        // The rejoin must carry the member id of this response, which `self.id` holds by now.
                        ErrorCode::MemberIdRequired => true,
                        ErrorCode::UnknownMemberId | ErrorCode::IllegalGeneration => {
                            self.id = KString::default();
                            true
                        }
                        ErrorCode::RebalanceInProgress => true,
                        error => error.is_retriable(),
                    };
                    if !again || Instant::now() >= deadline {
                        return Err(server_error(code, None).context(format!("joining group {}", self.group)));
                    }
                    if error != ErrorCode::MemberIdRequired {
                        tokio::time::sleep(BACKOFF).await;
                    }
                }
            }
        }
    }

    /// JoinGroup, then SyncGroup. The inner error is the error code of the response.
    async fn try_join(&mut self, client: &mut Client) -> Result<Result<Vec<TopicPartition>, i16>> {
        let metadata = encode_subscription(&self.topics).map_err(|error| Error::other(error.to_string()))?;
        let protocol = JoinGroupRequestProtocol { name: KString::from_static(RANGE), metadata };
        let request = JoinGroupRequest {
            group_id: self.group.clone(),
            session_timeout_ms: millis(SESSION_TIMEOUT),
            rebalance_timeout_ms: millis(REBALANCE_TIMEOUT),
            member_id: self.id.clone(),
            protocol_type: KString::from_static(CONSUMER),
            protocols: vec![protocol],
            ..Default::default()
        };
        // The response arrives when all members have joined, or when the rebalance timeout removes those that have not.
        let deadline = client.deadline() + REBALANCE_TIMEOUT;
        let joined = client.request_until(self.coordinator, &request, deadline).await?;
        if !joined.member_id.is_empty() {
            self.id = joined.member_id.clone();
        }
        if joined.error_code != 0 {
            return Ok(Err(joined.error_code));
        }
        self.generation = joined.generation_id;
        let assignments = if joined.leader == joined.member_id && !joined.skip_assignment {
            assign(client, &joined).await?
        } else {
            Vec::new()
        };
        let request = SyncGroupRequest {
            group_id: self.group.clone(),
            generation_id: self.generation,
            member_id: self.id.clone(),
            protocol_type: Some(KString::from_static(CONSUMER)),
            protocol_name: joined.protocol_name,
            assignments,
            ..Default::default()
        };
        let synced = client.request_until(self.coordinator, &request, deadline).await?;
        if synced.error_code != 0 {
            return Ok(Err(synced.error_code));
        }
        let assigned = decode_assignment(synced.assignment);
        assigned
            .map(Ok)
            .map_err(|error| Error::other(format!("the group's leader sent an unreadable share: {error}")))
    }

    /// True if the heartbeat interval is over.
    pub fn heartbeat_is_due(&self) -> bool {
        self.last_heartbeat.elapsed() >= HEARTBEAT_INTERVAL
    }

    /// Sends a heartbeat.
    pub async fn heartbeat(&mut self, client: &mut Client) -> Result<MemberState> {
        let request = HeartbeatRequest {
            group_id: self.group.clone(),
            generation_id: self.generation,
            member_id: self.id.clone(),
            ..Default::default()
        };
        let code = client.request(self.coordinator, &request).await?.error_code;
        self.last_heartbeat = Instant::now();
        state_of(code).ok_or_else(|| server_error(code, None).context(format!("group {}", self.group)))
    }

    /// Commits these offsets. Any state but [`MemberState::Stable`] means that they were not committed.
    pub async fn commit(&mut self, client: &mut Client, offsets: &Offsets) -> Result<MemberState> {
        if offsets.is_empty() {
            return Ok(MemberState::Stable);
        }
        let member = Some((self.generation, self.id.clone()));
        let group = self.group.clone();
        client.try_commit(&group, member, offsets).await?.map_or(Ok(MemberState::Stable), |code| {
            state_of(code).ok_or_else(|| server_error(code, None).context(format!("group {}", self.group)))
        })
    }

    /// Sends LeaveGroup.
    pub async fn leave(self, client: &mut Client) -> Result {
        let request = LeaveGroupRequest {
            group_id: self.group.clone(),
            member_id: self.id.clone(),
            ..Default::default()
        };
        let code = client.request(self.coordinator, &request).await?.error_code;
        match ErrorCode::try_from(code) {
            Ok(ErrorCode::None | ErrorCode::UnknownMemberId) => Ok(()),
            _ => Err(server_error(code, None).context(format!("leaving group {}", self.group))),
        }
    }
}

/// The state of a member after a response with this error code; `None` if the code says nothing about it.
fn state_of(code: i16) -> Option<MemberState> {
    match ErrorCode::try_from(code) {
        Ok(ErrorCode::None) => Some(MemberState::Stable),
        Ok(ErrorCode::RebalanceInProgress) => Some(MemberState::Rebalance),
        Ok(
            ErrorCode::UnknownMemberId
            | ErrorCode::IllegalGeneration
            | ErrorCode::NotCoordinator
            | ErrorCode::CoordinatorNotAvailable
            | ErrorCode::CoordinatorLoadInProgress,
        ) => Some(MemberState::Fenced),
        _ => None,
    }
}

/// The assignment that the group leader computes.
async fn assign(client: &mut Client, joined: &JoinGroupResponse) -> Result<Vec<SyncGroupRequestAssignment>> {
    let mut subscriptions = BTreeMap::new();
    for JoinGroupResponseMember { member_id, metadata, .. } in &joined.members {
        let topics = decode_subscription(metadata.clone()).map_err(|error| {
            Error::other(format!("member {member_id} sent an unreadable subscription: {error}"))
        })?;
        subscriptions.insert(member_id.clone(), topics);
    }
    let mut topics: Vec<KString> = subscriptions.values().flatten().cloned().collect();
    topics.sort();
    topics.dedup();
    // A topic that another member subscribes to may not exist: the other topics are assigned nevertheless.
    let known = client.metadata(Some(&topics), false).await?.topics;
    let count = |topic: &moim_wire_kafka::messages::MetadataResponseTopic| {
        i32::try_from(topic.partitions.len()).unwrap_or(0)
    };
    let partitions =
        known.iter().map(|topic| (topic.name.clone().unwrap_or_default(), count(topic))).collect();
    let encode = |(member_id, assigned): (KString, Vec<TopicPartition>)| {
        let assignment = encode_assignment(&assigned).map_err(|error| Error::other(error.to_string()))?;
        Ok(SyncGroupRequestAssignment { member_id, assignment })
    };
    assign_range(&subscriptions, &partitions).into_iter().map(encode).collect()
}

fn millis(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis()).unwrap_or(i32::MAX)
}
