//! A member of the group that copies: the classic protocol, its first member shares the partitions out.

use bytes::Bytes;
use moim_wire_kafka::messages::{
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse,
    OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse, SyncGroupRequest,
    SyncGroupRequestAssignment, SyncGroupResponse,
};
use moim_wire_kafka::{ErrorCode, KString};

use super::clients::PARTITIONS;
use super::producer::Membership;
use super::wire::{Lost, Wire, said};

/// The group.
pub(super) const NAME: &str = "copy";
/// A member that is silent for so long is out.
const SESSION_MS: i32 = 1_000;

/// One member.
#[derive(Default)]
pub(super) struct Member {
    pub(super) membership: Membership,
}

impl Member {
    /// Joins the next generation. Answers the partitions that are this member's in it.
    pub(super) async fn join(&mut self, wire: &Wire) -> Result<Vec<i32>, Lost> {
        let at = wire.coordinator(NAME, false).await?;
        let question = JoinGroupRequest {
            group_id: NAME.into(),
            session_timeout_ms: SESSION_MS,
            rebalance_timeout_ms: SESSION_MS,
            member_id: self.membership.member.clone(),
            protocol_type: "consumer".into(),
            protocols: vec![JoinGroupRequestProtocol { name: "each".into(), metadata: Bytes::new() }],
            ..Default::default()
        };
        let joined: JoinGroupResponse = wire.ask(at, &question, 5).await?;
        match said(joined.error_code) {
            Ok(()) => {}
            Err(lost) if lost.is(ErrorCode::MemberIdRequired) => {
                self.membership.member = joined.member_id;
                return Err(lost);
            }
            Err(lost) => return Err(self.refused(lost)),
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
        let question = SyncGroupRequest {
            group_id: NAME.into(),
            generation_id: self.membership.generation,
            member_id: self.membership.member.clone(),
            assignments: assignments.collect(),
            ..Default::default()
        };
        let synced: SyncGroupResponse = wire.ask(at, &question, 3).await?;
        said(synced.error_code).map_err(|lost| self.refused(lost))?;
        Ok(synced.assignment.iter().map(|partition| i32::from(*partition)).collect())
    }

    /// Says that it is there. An error is a reason to join again.
    pub(super) async fn beat(&mut self, wire: &Wire) -> Result<(), Lost> {
        let at = wire.coordinator(NAME, false).await?;
        let question = HeartbeatRequest {
            group_id: NAME.into(),
            generation_id: self.membership.generation,
            member_id: self.membership.member.clone(),
            ..Default::default()
        };
        let answer: HeartbeatResponse = wire.ask(at, &question, 3).await?;
        said(answer.error_code).map_err(|lost| self.refused(lost))
    }

    fn refused(&mut self, lost: Lost) -> Lost {
        if lost.is(ErrorCode::UnknownMemberId) {
            self.membership = Membership::default();
        }
        lost
    }
}

/// Where the group goes on; only what no open transaction is about to change.
pub(super) async fn committed(wire: &Wire, topic: &'static str, partition: i32) -> Result<i64, Lost> {
    let at = wire.coordinator(NAME, false).await?;
    let topics = vec![OffsetFetchRequestTopic { name: topic.into(), partition_indexes: vec![partition] }];
    let question = OffsetFetchRequest {
        group_id: NAME.into(),
        topics: Some(topics),
        require_stable: true,
        ..Default::default()
    };
    let answer: OffsetFetchResponse = wire.ask(at, &question, 7).await?;
    said(answer.error_code)?;
    let mut found = answer.topics.into_iter().flat_map(|topic| topic.partitions);
    let found = found.next().ok_or(Lost::Unknown)?;
    said(found.error_code)?;
    Ok(found.committed_offset.max(0))
}
