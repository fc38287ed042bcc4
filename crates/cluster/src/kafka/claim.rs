//! Claims a partition that Kafka has assigned: its record becomes this worker's, and what was handed over is loaded.
//!
//! Invariant: a claim succeeds only if the group coordinator confirmed this member's generation after the record was read,
//! and the record is still the one that was read.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};

use super::worker::{ALERT_AFTER, Callbacks, Held, KAFKA_PATIENCE, Shared, claim_key, name_of};
use crate::assignment::{AssignmentRecord, HandedOver, HandoffError};
use crate::backoff::Backoff;
use crate::events::ClusterEvent;
use crate::keys;
use crate::repository::{Compare, Txn, TxnOutcome};

/// How a claim failed.
enum ClaimError {
    /// The group is another than the one this assignment was made in: the next rebalance decides.
    Superseded,
    Failed(HandoffError),
}

impl<E: Into<HandoffError>> From<E> for ClaimError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Shared {
    /// Makes the record ours and loads what was handed over. `None` when that did not work within `patience`.
    pub(super) fn claim(
        &self,
        consumer: &BaseConsumer<Callbacks>,
        topic: &str,
        number: i32,
        patience: Duration,
    ) -> Option<(Held, Option<HandedOver>)> {
        let partition = name_of(topic, number);
        let mut backoff = Backoff::default();
        let began = self.context.clock.monotonic_ns();
        while !self.stopping.load(Ordering::SeqCst) {
            match self.try_claim(consumer, topic, number) {
                Ok(claimed) => return Some(claimed),
                Err(ClaimError::Superseded) => return None,
                Err(ClaimError::Failed(error)) => {
                    self.alert(&partition, backoff.failures() + 1, &error.to_string());
                    let waited = self.context.clock.monotonic_ns().saturating_sub(began);
                    if Duration::from_nanos(waited) >= patience {
                        return None;
                    }
                    std::thread::sleep(backoff.next_pause());
                }
            }
        }
        None
    }

    /// Order matters: the record is read, then the coordinator confirms that this member is in the current generation, then
    /// the record is replaced if it is still the one that was read. A worker that was away and has lost the partition
    /// fails at the second step, or, when the rightful owner has claimed it meanwhile, at the third.
    fn try_claim(
        &self,
        consumer: &BaseConsumer<Callbacks>,
        topic: &str,
        number: i32,
    ) -> Result<(Held, Option<HandedOver>), ClaimError> {
        let partition = name_of(topic, number);
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
                self.alert(&partition, ALERT_AFTER, "it is over the limit of its age and not used any more");
                // Neither state nor position: Kafka says where to begin.
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
        let start = self.confirm_generation(consumer, topic, number, record.last_offset)?;
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
                let (offset, witness) = (record.last_offset, record.last_message);
                let recorded = record.last_offset;
                let held = Held { record, revision, offset, recorded, start, is_unproven: true, witness };
                Ok((held, handed_over))
            }
            TxnOutcome::Conflict { .. } => Err(HandoffError::NotOwner(partition).into()),
        }
    }

    /// Commits where the partition stands and waits for the answer: the coordinator accepts it from members of the current
    /// generation only. Answers where consuming begins if nothing is recorded.
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
        let start = if last_offset >= 0 {
            last_offset + 1
        } else {
            let mut asked = TopicPartitionList::new();
            asked.add_partition(topic, number);
            let committed = consumer.committed_offsets(asked, KAFKA_PATIENCE).map_err(failed)?;
            match committed.elements().first().map(|one| one.offset()) {
                Some(Offset::Offset(offset)) => offset,
                _ => {
                    let (low, high) =
                        consumer.fetch_watermarks(topic, number, KAFKA_PATIENCE).map_err(failed)?;
                    let reset = self.options.settings.get("auto.offset.reset").map(String::as_str);
                    if matches!(reset, Some("latest" | "largest" | "end")) { high } else { low }
                }
            }
        };
        let mut commits = TopicPartitionList::new();
        commits.add_partition_offset(topic, number, Offset::Offset(start)).map_err(failed)?;
        let sent = self.context.clock.monotonic_ns();
        match consumer.commit(&commits, CommitMode::Sync) {
            Ok(()) => {
                self.validity.confirm(sent);
                Ok(start)
            }
            Err(error) if is_superseded(&error) => Err(ClaimError::Superseded),
            Err(error) => Err(failed(error)),
        }
    }
}

/// Whether the coordinator says that this member's generation is over.
fn is_superseded(error: &rdkafka::error::KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let over =
        [Code::IllegalGeneration, Code::UnknownMemberId, Code::RebalanceInProgress, Code::FencedInstanceId];
    error.rdkafka_error_code().is_some_and(|code| over.contains(&code))
}
