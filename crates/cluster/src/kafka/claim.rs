//! Claims an assigned partition: makes this worker the owner in the assignment record, and loads the hand-off.
//!
//! Invariant: a claim succeeds only if the group coordinator confirmed this member's generation after the record was
//! read, and the record has not changed since.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};

use super::worker::{
    ALERT_AFTER, Callbacks, KAFKA_TIMEOUT, OwnedPartition, Shared, claim_key, partition_name,
};
use crate::assignment::{AssignmentRecord, HandedOver, HandoffError};
use crate::backoff::Backoff;
use crate::events::ClusterEvent;
use crate::keys;
use crate::repository::{Compare, Txn, TxnOutcome};

/// Why a claim failed.
enum ClaimError {
    /// The group has left the generation of this assignment: the next rebalance decides.
    Superseded,
    Failed(HandoffError),
}

impl<E: Into<HandoffError>> From<E> for ClaimError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Shared {
    /// Claims the assignment record and loads the hand-off. `None` if that fails for longer than `timeout`, or if the
    /// assignment is superseded.
    pub(super) fn claim(
        &self,
        consumer: &BaseConsumer<Callbacks>,
        topic: &str,
        number: i32,
        timeout: Duration,
    ) -> Option<(OwnedPartition, Option<HandedOver>)> {
        let partition = partition_name(topic, number);
        let mut backoff = Backoff::default();
        let started = self.context.clock.monotonic_ns();
        while !self.stopping.load(Ordering::SeqCst) {
            match self.try_claim(consumer, topic, number) {
                Ok(claimed) => return Some(claimed),
                Err(ClaimError::Superseded) => return None,
                Err(ClaimError::Failed(error)) => {
                    self.alert(&partition, backoff.failures() + 1, &error.to_string());
                    let waited = self.context.clock.monotonic_ns().saturating_sub(started);
                    if Duration::from_nanos(waited) >= timeout {
                        return None;
                    }
                    std::thread::sleep(backoff.next_pause());
                }
            }
        }
        None
    }

    /// Order matters: read the record, have the coordinator confirm that this member is in the current generation, then
    /// replace the record if it is unchanged. A worker that was disconnected and has lost the partition fails at the
    /// second step, or at the third if the current owner has claimed the record meanwhile.
    fn try_claim(
        &self,
        consumer: &BaseConsumer<Callbacks>,
        topic: &str,
        number: i32,
    ) -> Result<(OwnedPartition, Option<HandedOver>), ClaimError> {
        let partition = partition_name(topic, number);
        let key = keys::assignment(&self.options.group, &partition);
        let (read_at, entries) = self.runtime.block_on(self.context.repository.list(&key))?;
        let entry = entries.into_iter().find(|entry| entry.key == key);
        let mut record = match &entry {
            Some(entry) => AssignmentRecord::from_bytes(&entry.value).unwrap_or_else(|reason| {
                self.context.events.publish(ClusterEvent::Malformed { key: key.clone(), reason });
                AssignmentRecord::new()
            }),
            None => AssignmentRecord::new(),
        };
        let now = self.context.clock.wall_ms();
        let handed_over = match &record.workflow_handoff {
            Some(_) if self.handoffs.is_expired(record.updated_at, now) => {
                self.alert(&partition, ALERT_AFTER, "hand-off is over the limit of its age and is not used");
                // Neither state nor offset: consuming starts at the offset committed to Kafka.
                record.last_offset = -1;
                record.workflow_handoff = None;
                None
            }
            Some(stored) => {
                let handoff = self.runtime.block_on(self.handoffs.load(stored))?;
                Some(HandedOver { handoff, last_offset: record.last_offset })
            }
            None => None,
        };
        let start_offset = self.confirm_generation(consumer, topic, number, record.last_offset)?;
        record.owner_node_id = self.context.node_id.to_string();
        record.owner_epoch = 0;
        record.target_node_id.clear();
        record.version = record.next_version(read_at);
        record.updated_at = self.context.clock.wall_ms();
        if let Some(equipment) = self.options.equipment.get(&partition) {
            record.equipment_ids.clone_from(equipment);
        }
        let expected = match &entry {
            Some(entry) => Compare::ModRevision(key.clone(), entry.mod_revision),
            None => Compare::Absent(key.clone()),
        };
        let txn = Txn::new()
            .when(expected)
            .put(&key, record.to_bytes())
            .put(claim_key(&self.options.group, &partition), record.version.to_string());
        match self.runtime.block_on(self.context.repository.txn(txn))? {
            TxnOutcome::Done { revision } => {
                let (processed_offset, fingerprint) = (record.last_offset, record.last_message);
                let owned = OwnedPartition {
                    recorded_offset: record.last_offset,
                    record,
                    revision,
                    processed_offset,
                    start_offset,
                    is_topic_unverified: true,
                    fingerprint,
                };
                Ok((owned, handed_over))
            }
            TxnOutcome::Conflict { .. } => Err(HandoffError::NotOwner(partition).into()),
        }
    }

    /// Commits the partition's offset and waits for the reply: the coordinator accepts a commit from members of the
    /// current generation only. Returns the start offset for a partition without a record.
    fn confirm_generation(
        &self,
        consumer: &BaseConsumer<Callbacks>,
        topic: &str,
        number: i32,
        last_offset: i64,
    ) -> Result<i64, ClaimError> {
        let failed = |error: rdkafka::error::KafkaError| {
            ClaimError::from(crate::RepositoryError::Unavailable(format!("Kafka: {error}")))
        };
        let start_offset = if last_offset >= 0 {
            last_offset + 1
        } else {
            let mut request = TopicPartitionList::new();
            request.add_partition(topic, number);
            let committed = consumer.committed_offsets(request, KAFKA_TIMEOUT).map_err(failed)?;
            match committed.elements().first().map(|element| element.offset()) {
                Some(Offset::Offset(offset)) => offset,
                _ => {
                    let (low, high) =
                        consumer.fetch_watermarks(topic, number, KAFKA_TIMEOUT).map_err(failed)?;
                    let reset = self.options.settings.get("auto.offset.reset").map(String::as_str);
                    if matches!(reset, Some("latest" | "largest" | "end")) { high } else { low }
                }
            }
        };
        let mut commits = TopicPartitionList::new();
        commits.add_partition_offset(topic, number, Offset::Offset(start_offset)).map_err(failed)?;
        let sent = self.context.clock.monotonic_ns();
        match consumer.commit(&commits, CommitMode::Sync) {
            Ok(()) => {
                self.validity.confirm(sent);
                Ok(start_offset)
            }
            Err(error) if is_superseded(&error) => Err(ClaimError::Superseded),
            Err(error) => Err(failed(error)),
        }
    }
}

/// True if the coordinator rejects this member's generation.
fn is_superseded(error: &rdkafka::error::KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let superseded =
        [Code::IllegalGeneration, Code::UnknownMemberId, Code::RebalanceInProgress, Code::FencedInstanceId];
    error.rdkafka_error_code().is_some_and(|code| superseded.contains(&code))
}
