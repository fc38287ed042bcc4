//! A member of the copying group, with the classic group protocol: the group leader assigns the partitions.

use bytes::Bytes;
use moim_wire_kafka::messages::{
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse,
    OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse, SyncGroupRequest,
    SyncGroupRequestAssignment, SyncGroupResponse,
};
use moim_wire_kafka::{ErrorCode, KString};

use super::clients::PARTITIONS;
use super::kafka_client::{KafkaClient, RequestError, check_code};
use super::producer::Membership;

/// Group id.
pub(super) const NAME: &str = "copy";
/// Session timeout of a member.
const SESSION_MS: i32 = 1_000;

/// One group member.
#[derive(Default)]
pub(super) struct Member {
    pub(super) membership: Membership,
}

impl Member {
    /// Joins the next generation; returns the partitions assigned to this member.
    pub(super) async fn join(&mut self, kafka: &KafkaClient) -> Result<Vec<i32>, RequestError> {
        let coordinator = kafka.coordinator(NAME, false).await?;
        let request = JoinGroupRequest {
            group_id: NAME.into(),
            session_timeout_ms: SESSION_MS,
            rebalance_timeout_ms: SESSION_MS,
            member_id: self.membership.member.clone(),
            protocol_type: "consumer".into(),
            protocols: vec![JoinGroupRequestProtocol { name: "each".into(), metadata: Bytes::new() }],
            ..Default::default()
        };
        let joined: JoinGroupResponse = kafka.request(coordinator, &request, 5).await?;
        match check_code(joined.error_code) {
            Ok(()) => {}
            Err(error) if error.is(ErrorCode::MemberIdRequired) => {
                self.membership.member = joined.member_id;
                return Err(error);
            }
            Err(error) => return Err(self.on_rejected(error)),
        }
        self.membership = Membership { member: joined.member_id, generation: joined.generation_id };
        let mut members: Vec<KString> = joined.members.into_iter().map(|member| member.member_id).collect();
        members.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        let share = |at: usize| {
            let mine = |partition: &i32| usize::try_from(*partition).unwrap_or(0) % members.len() == at;
            (0..PARTITIONS).filter(mine).filter_map(|partition| u8::try_from(partition).ok()).collect()
        };
        let assignments = members.iter().enumerate().map(|(at, member)| SyncGroupRequestAssignment {
            member_id: member.clone(),
            assignment: share(at),
        });
        let request = SyncGroupRequest {
            group_id: NAME.into(),
            generation_id: self.membership.generation,
            member_id: self.membership.member.clone(),
            assignments: assignments.collect(),
            ..Default::default()
        };
        let synced: SyncGroupResponse = kafka.request(coordinator, &request, 3).await?;
        check_code(synced.error_code).map_err(|error| self.on_rejected(error))?;
        Ok(synced.assignment.iter().map(|partition| i32::from(*partition)).collect())
    }

    /// Sends a heartbeat. After an error the member joins again.
    pub(super) async fn heartbeat(&mut self, kafka: &KafkaClient) -> Result<(), RequestError> {
        let coordinator = kafka.coordinator(NAME, false).await?;
        let request = HeartbeatRequest {
            group_id: NAME.into(),
            generation_id: self.membership.generation,
            member_id: self.membership.member.clone(),
            ..Default::default()
        };
        let response: HeartbeatResponse = kafka.request(coordinator, &request, 3).await?;
        check_code(response.error_code).map_err(|error| self.on_rejected(error))
    }

    fn on_rejected(&mut self, error: RequestError) -> RequestError {
        if error.is(ErrorCode::UnknownMemberId) {
            self.membership = Membership::default();
        }
        error
    }
}

/// Committed offset of the group, with `require_stable`: fails while an open transaction may change it.
pub(super) async fn committed(
    kafka: &KafkaClient,
    topic: &'static str,
    partition: i32,
) -> Result<i64, RequestError> {
    let coordinator = kafka.coordinator(NAME, false).await?;
    let topics = vec![OffsetFetchRequestTopic { name: topic.into(), partition_indexes: vec![partition] }];
    let request = OffsetFetchRequest {
        group_id: NAME.into(),
        topics: Some(topics),
        require_stable: true,
        ..Default::default()
    };
    let response: OffsetFetchResponse = kafka.request(coordinator, &request, 7).await?;
    check_code(response.error_code)?;
    let mut found = response.topics.into_iter().flat_map(|topic| topic.partitions);
    let found = found.next().ok_or(RequestError::Unknown)?;
    check_code(found.error_code)?;
    Ok(found.committed_offset.max(0))
}
