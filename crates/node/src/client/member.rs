//! Membership in a consumer group by the classic protocol, with the range assignor.
//!
//! Invariants: offsets are committed only under the generation they were read in; a member that is told to
//! rebalance joins again before it reads on; a member that ends says so, so that others take over at once.

use std::collections::BTreeMap;
use std::time::Duration;

use moim_wire_kafka::messages::join_group::{JoinGroupRequestProtocol, JoinGroupResponseMember};
use moim_wire_kafka::messages::sync_group::SyncGroupRequestAssignment;
use moim_wire_kafka::messages::{
    HeartbeatRequest, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest, SyncGroupRequest,
};
use moim_wire_kafka::{ErrorCode, KString};
use tokio::time::Instant;

use super::offsets::Offsets;
use super::subscription::{
    assign_range, decode_assignment, decode_subscription, encode_assignment, encode_subscription,
};
use super::{BACKOFF, Client, TopicPartition, errors};
use crate::exit::{Failure, Outcome};

const SESSION: Duration = Duration::from_secs(10);
const HEARTBEAT: Duration = Duration::from_secs(3);
const REBALANCE: Duration = Duration::from_secs(60);
const RANGE: &str = "range";
const CONSUMER: &str = "consumer";

/// Whether a member may go on reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It may.
    Fine,
    /// The group is changing: commit, then join again.
    Rebalance,
    /// The group went on without us: join again; what was read cannot be committed.
    Lost,
}

/// One member of a group.
pub(crate) struct Member {
    group: KString,
    topics: Vec<KString>,
    id: KString,
    generation: i32,
    coordinator: i32,
    last_heartbeat: Instant,
}

impl Member {
    /// Somebody who has not joined yet.
    pub(crate) fn new(group: &str, topics: &[KString]) -> Self {
        Self {
            group: group.into(),
            topics: topics.to_vec(),
            id: KString::default(),
            generation: -1,
            coordinator: -1,
            last_heartbeat: Instant::now(),
        }
    }

    /// Joins, or joins again, and gets its share of the partitions.
    pub(crate) async fn join(&mut self, client: &mut Client) -> Outcome<Vec<TopicPartition>> {
        let give_up = Instant::now() + client.timeout() + REBALANCE;
        loop {
            self.coordinator = client.coordinator(&self.group).await?;
            match self.try_join(client).await? {
                Ok(share) => {
                    self.last_heartbeat = Instant::now();
                    return Ok(share);
                }
                Err(code) => {
                    let error = ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownServerError);
                    let again = match error {
                        // The coordinator wants to see the id it gave us; it is in `self.id` by now.
                        ErrorCode::MemberIdRequired => true,
                        ErrorCode::UnknownMemberId | ErrorCode::IllegalGeneration => {
                            self.id = KString::default();
                            true
                        }
                        ErrorCode::RebalanceInProgress => true,
                        error => error.is_retriable(),
                    };
                    if !again || Instant::now() >= give_up {
                        return Err(
                            errors::failure(code, None).context(format!("joining group {}", self.group))
                        );
                    }
                    if error != ErrorCode::MemberIdRequired {
                        tokio::time::sleep(BACKOFF).await;
                    }
                }
            }
        }
    }

    /// Join, then sync. The inner error is the server's code.
    async fn try_join(&mut self, client: &mut Client) -> Outcome<Result<Vec<TopicPartition>, i16>> {
        let metadata =
            encode_subscription(&self.topics).map_err(|error| Failure::error(error.to_string()))?;
        let protocol = JoinGroupRequestProtocol { name: KString::from_static(RANGE), metadata };
        let request = JoinGroupRequest {
            group_id: self.group.clone(),
            session_timeout_ms: millis(SESSION),
            rebalance_timeout_ms: millis(REBALANCE),
            member_id: self.id.clone(),
            protocol_type: KString::from_static(CONSUMER),
            protocols: vec![protocol],
            ..Default::default()
        };
        // The answer comes when everybody has joined, or when the slow ones are given up.
        let deadline = client.deadline() + REBALANCE;
        let joined = client.on_by(self.coordinator, &request, deadline).await?;
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
        let synced = client.on_by(self.coordinator, &request, deadline).await?;
        if synced.error_code != 0 {
            return Ok(Err(synced.error_code));
        }
        let share = decode_assignment(synced.assignment);
        share
            .map(Ok)
            .map_err(|error| Failure::error(format!("the group's leader sent an unreadable share: {error}")))
    }

    /// Whether it is time to say that we are here.
    pub(crate) fn heartbeat_is_due(&self) -> bool {
        self.last_heartbeat.elapsed() >= HEARTBEAT
    }

    /// Says that we are here.
    pub(crate) async fn heartbeat(&mut self, client: &mut Client) -> Outcome<Standing> {
        let request = HeartbeatRequest {
            group_id: self.group.clone(),
            generation_id: self.generation,
            member_id: self.id.clone(),
            ..Default::default()
        };
        let code = client.on(self.coordinator, &request).await?.error_code;
        self.last_heartbeat = Instant::now();
        standing(code).ok_or_else(|| errors::failure(code, None).context(format!("group {}", self.group)))
    }

    /// Commits what was read. Anything but [`Standing::Fine`] means it did not count.
    pub(crate) async fn commit(&mut self, client: &mut Client, offsets: &Offsets) -> Outcome<Standing> {
        if offsets.is_empty() {
            return Ok(Standing::Fine);
        }
        let member = Some((self.generation, self.id.clone()));
        let group = self.group.clone();
        client.try_commit(&group, member, offsets).await?.map_or(Ok(Standing::Fine), |code| {
            standing(code).ok_or_else(|| errors::failure(code, None).context(format!("group {}", self.group)))
        })
    }

    /// Says goodbye.
    pub(crate) async fn leave(self, client: &mut Client) -> Outcome {
        let request = LeaveGroupRequest {
            group_id: self.group.clone(),
            member_id: self.id.clone(),
            ..Default::default()
        };
        let code = client.on(self.coordinator, &request).await?.error_code;
        match ErrorCode::try_from(code) {
            Ok(ErrorCode::None | ErrorCode::UnknownMemberId) => Ok(()),
            _ => Err(errors::failure(code, None).context(format!("leaving group {}", self.group))),
        }
    }
}

/// What a code says about our place in the group, if it says that at all.
fn standing(code: i16) -> Option<Standing> {
    match ErrorCode::try_from(code) {
        Ok(ErrorCode::None) => Some(Standing::Fine),
        Ok(ErrorCode::RebalanceInProgress) => Some(Standing::Rebalance),
        Ok(
            ErrorCode::UnknownMemberId
            | ErrorCode::IllegalGeneration
            | ErrorCode::NotCoordinator
            | ErrorCode::CoordinatorNotAvailable
            | ErrorCode::CoordinatorLoadInProgress,
        ) => Some(Standing::Lost),
        _ => None,
    }
}

/// The leader's work: who gets what.
async fn assign(client: &mut Client, joined: &JoinGroupResponse) -> Outcome<Vec<SyncGroupRequestAssignment>> {
    let mut wants = BTreeMap::new();
    for JoinGroupResponseMember { member_id, metadata, .. } in &joined.members {
        let topics = decode_subscription(metadata.clone()).map_err(|error| {
            Failure::error(format!("member {member_id} sent an unreadable subscription: {error}"))
        })?;
        wants.insert(member_id.clone(), topics);
    }
    let mut topics: Vec<KString> = wants.values().flatten().cloned().collect();
    topics.sort();
    topics.dedup();
    // A topic somebody else wants may not exist; that is no reason to stop the others.
    let known = client.metadata(Some(&topics), false).await?.topics;
    let count = |topic: &moim_wire_kafka::messages::MetadataResponseTopic| {
        i32::try_from(topic.partitions.len()).unwrap_or(0)
    };
    let partitions =
        known.iter().map(|topic| (topic.name.clone().unwrap_or_default(), count(topic))).collect();
    let encode = |(member_id, share): (KString, Vec<TopicPartition>)| {
        let assignment = encode_assignment(&share).map_err(|error| Failure::error(error.to_string()))?;
        Ok(SyncGroupRequestAssignment { member_id, assignment })
    };
    assign_range(&wants, &partitions).into_iter().map(encode).collect()
}

fn millis(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis()).unwrap_or(i32::MAX)
}
