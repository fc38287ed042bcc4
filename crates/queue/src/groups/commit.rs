//! OffsetCommit and TxnOffsetCommit: validation, and the write of the offsets.
//!
//! Invariant: an offset becomes visible, and its commit is answered, only when the log has it.

use super::api::{CommitTopic, OffsetCommit, Response, Token, TopicErrors, TxnOffsetCommit};
use super::codes::ErrorCode;
use super::group::{Group, Phase};
use super::offsets::{TopicPartition, TxnBatch};
use super::outbox::{OnWritten, Outbox};
use super::records::{self, OffsetValue};

/// The same error for every partition.
pub(super) fn all(topics: &[CommitTopic], error: ErrorCode) -> Vec<TopicErrors> {
    let line = |t: &CommitTopic| TopicErrors {
        topic: t.topic.clone(),
        partitions: t.partitions.iter().map(|p| (p.partition, error)).collect(),
    };
    topics.iter().map(line).collect()
}

/// Replaces the successes of a prepared response by an error; errors of single partitions stay.
pub(super) fn failed(mut response: Vec<TopicErrors>, error: ErrorCode) -> Vec<TopicErrors> {
    let partitions = response.iter_mut().flat_map(|topic| &mut topic.partitions);
    partitions.filter(|(_, e)| *e == ErrorCode::None).for_each(|(_, e)| *e = error);
    response
}

impl Group {
    pub(super) fn commit(&mut self, out: &mut Outbox, token: Token, commit: OffsetCommit) {
        let error =
            self.check_commit(commit.generation, &commit.member_id, commit.instance_id.as_deref(), false);
        if error != ErrorCode::None {
            return out.reply(token, Response::OffsetCommit(all(&commit.topics, error)));
        }
        // A commit counts as a heartbeat.
        if let Some(member) = self.members.get_mut(&commit.member_id) {
            member.touch(out.now);
        }
        let expire = commit.retention_ms.map(|keep| out.wall_ms().saturating_add(keep));
        let (response, offsets) = accept(out, commit.topics, expire);
        if offsets.is_empty() {
            return out.reply(token, Response::OffsetCommit(response));
        }
        let records = self.offset_records(&offsets);
        let write = out.persist(&self.name, records, None, OnWritten::Commit { token, response });
        self.offsets.begin(write, offsets);
    }

    /// Returns true if a transaction of the producer is open here now.
    pub(super) fn txn_commit(&mut self, out: &mut Outbox, token: Token, commit: TxnOffsetCommit) -> bool {
        let error =
            self.check_commit(commit.generation, &commit.member_id, commit.instance_id.as_deref(), true);
        if error != ErrorCode::None {
            out.reply(token, Response::OffsetCommit(all(&commit.topics, error)));
            return false;
        }
        let (response, offsets) = accept(out, commit.topics, None);
        if offsets.is_empty() {
            out.reply(token, Response::OffsetCommit(response));
            return false;
        }
        let records = self.offset_records(&offsets);
        let producer = commit.producer;
        let then = OnWritten::TxnCommit { token, response, producer_id: producer.id };
        let write = out.persist(&self.name, records, Some(producer), then);
        let batch = TxnBatch { write, durable: false, decided: None, offsets };
        self.offsets.begin_txn(producer, batch);
        true
    }

    /// Members commit in their generation. Clients without membership commit while the group has no members, and
    /// inside transactions always, since old versions of that request cannot name a member.
    fn check_commit(
        &self,
        generation: i32,
        member_id: &str,
        instance_id: Option<&str>,
        txn: bool,
    ) -> ErrorCode {
        if generation < 0 && member_id.is_empty() && instance_id.is_none() {
            let allowed = txn || self.phase == Phase::Empty;
            return if allowed { ErrorCode::None } else { ErrorCode::UnknownMemberId };
        }
        let error = self.check_member(member_id, instance_id);
        if error != ErrorCode::None {
            error
        } else if generation != self.generation {
            ErrorCode::IllegalGeneration
        } else if !txn && self.phase == Phase::Completing {
            // The member knows the generation but not yet its assignment.
            ErrorCode::RebalanceInProgress
        } else {
            ErrorCode::None
        }
    }

    fn offset_records(&self, offsets: &[(TopicPartition, OffsetValue)]) -> Vec<super::GroupRecord> {
        let record = |((topic, partition), value): &(TopicPartition, OffsetValue)| {
            (records::offset_key(&self.name, topic, *partition), Some(records::offset_value(value)))
        };
        offsets.iter().map(record).collect()
    }
}

/// Splits a commit into its response and the valid offsets.
fn accept(
    out: &Outbox,
    topics: Vec<CommitTopic>,
    expire_timestamp_ms: Option<i64>,
) -> (Vec<TopicErrors>, Vec<(TopicPartition, OffsetValue)>) {
    let max_metadata = out.config.max_offset_metadata.min(records::MAX_STR);
    let mut offsets = Vec::new();
    let mut response = Vec::with_capacity(topics.len());
    for CommitTopic { topic, partitions } in topics {
        let mut errors = Vec::with_capacity(partitions.len());
        for p in partitions {
            let metadata = p.metadata.unwrap_or_default();
            let error = if metadata.len() > max_metadata {
                ErrorCode::OffsetMetadataTooLarge
            } else if topic.len() > records::MAX_STR {
                ErrorCode::UnknownTopicOrPartition
            } else {
                ErrorCode::None
            };
            errors.push((p.partition, error));
            if error == ErrorCode::None {
                let value = OffsetValue {
                    offset: p.offset,
                    leader_epoch: p.leader_epoch,
                    metadata,
                    commit_timestamp_ms: out.wall_ms(),
                    expire_timestamp_ms,
                };
                offsets.push(((topic.clone(), p.partition), value));
            }
        }
        response.push(TopicErrors { topic, partitions: errors });
    }
    (response, offsets)
}
