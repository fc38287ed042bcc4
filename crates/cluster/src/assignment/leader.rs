//! The assignment leader: reads membership and assignment records, plans, and commits the plan.
//!
//! An owner counts as failed only after its lease has expired at the store; a silent member keeps its
//! partitions. Every transaction compares the leadership, so a replaced leader is fenced. The records are
//! the complete state, so the next leader continues from them and no step is applied twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::plan::{PlanNode, PlanPartition, plan};
use super::record::{AssignmentRecord, PartitionSpec};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::fault_injection::{self, Bug};
use crate::keys;
use crate::leadership::{LeaderElection, Leadership};
use crate::membership::{MemberStatus, NodeRecord};
use crate::metrics::seconds;
use crate::repository::{Compare, Entry, RepositoryError, Txn, TxnOutcome};

/// Partitions per transaction: each needs up to two comparisons, and one is for the leadership.
const MAX_PARTITIONS_PER_TXN: usize = 60;

/// Options of the assignment leader of a group.
#[derive(Clone, Debug)]
pub struct LeaderOptions {
    /// Maximum interval between two rebalances, with or without changes.
    pub interval: Duration,
    /// Delay after a change, to combine it with further changes.
    pub settle: Duration,
    /// Only members with this role get partitions; empty for all members.
    pub role: String,
}

impl Default for LeaderOptions {
    fn default() -> Self {
        Self { interval: Duration::from_secs(10), settle: Duration::from_millis(50), role: String::new() }
    }
}

/// Result of a rebalance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebalanced {
    /// Partitions with a new owner, or with their first owner.
    pub moves: usize,
    /// Number of records written.
    pub written: usize,
    /// Records that another writer changed concurrently; the next rebalance plans them again.
    pub conflicts: usize,
}

/// Leads the assignment of one group while this node is elected.
pub struct AssignmentLeader {
    context: Context,
    group: Arc<str>,
    options: LeaderOptions,
    partitions: watch::Receiver<Vec<PartitionSpec>>,
}

struct Member {
    id: String,
    zone: String,
    epoch: i64,
}

impl AssignmentLeader {
    /// A candidate for the leadership of `group`; `partitions` may change while it runs.
    pub fn new(
        context: &Context,
        group: impl Into<Arc<str>>,
        partitions: watch::Receiver<Vec<PartitionSpec>>,
        options: LeaderOptions,
    ) -> Self {
        Self { context: context.clone(), group: group.into(), options, partitions }
    }

    /// Campaigns, and rebalances while elected. Runs until it is dropped or the process stops.
    pub async fn run(mut self, election: Arc<dyn LeaderElection>) {
        let mut backoff = Backoff::default();
        while !self.context.scope.shutdown().is_stopped() {
            let leadership = match election.campaign().await {
                Ok(leadership) => leadership,
                Err(error) => {
                    tracing::debug!(%error, group = %self.group, "assignment leader election failed");
                    backoff.pause().await;
                    continue;
                }
            };
            backoff.reset();
            tokio::select! {
                biased;
                _ = leadership.lost() => {}
                () = self.lead(&leadership) => {}
            }
        }
    }

    async fn lead(&mut self, leadership: &Leadership) {
        let mut backoff = Backoff::default();
        loop {
            // Start the watches before the list, so that no change is missed in between.
            let members = self.context.repository.watch(keys::NODES, 0).await;
            let records = self.context.repository.watch(&keys::assignments(&self.group), 0).await;
            let (Ok(mut members), Ok(mut records)) = (members, records) else {
                backoff.pause().await;
                continue;
            };
            loop {
                if let Err(error) = self.rebalance(leadership).await {
                    tracing::debug!(%error, group = %self.group, "rebalance failed");
                    if !leadership.is_valid() {
                        return;
                    }
                    backoff.pause().await;
                    break;
                }
                backoff.reset();
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(self.options.interval) => {}
                    changed = self.partitions.changed() => if changed.is_err() { std::future::pending().await },
                    more = membership_changed(&mut members) => if !more { break },
                    more = released(&mut records) => if !more { break },
                }
                tokio::time::sleep(self.options.settle).await;
            }
        }
    }

    /// Plans and commits one rebalance.
    pub async fn rebalance(&self, leadership: &Leadership) -> Result<Rebalanced, RepositoryError> {
        let began = self.context.clock.monotonic_ns();
        let members = self.members().await?;
        let prefix = keys::assignments(&self.group);
        let (revision, entries) = self.context.repository.list(&prefix).await?;
        let records: BTreeMap<String, (&Entry, AssignmentRecord)> =
            entries.iter().filter_map(|entry| self.read(&prefix, entry)).collect();
        let specs = self.partitions.borrow().clone();
        let alive = |id: &str| members.iter().find(|member| member.id == id);
        let owns = |record: &AssignmentRecord| {
            let careless =
                fault_injection::is_injected(Bug::TakeFromLiveOwner) && !record.target_node_id.is_empty();
            !careless && alive(&record.owner_node_id).is_some_and(|member| member.epoch == record.owner_epoch)
        };
        // The target of a partition counts as its owner: a transfer in progress is not planned again.
        let planned = specs.iter().map(|spec| {
            let record = records.get(&spec.id).map(|(_, record)| record);
            let owner = record.and_then(|record| {
                if alive(&record.target_node_id).is_some() {
                    Some(record.target_node_id.clone())
                } else {
                    owns(record).then(|| record.owner_node_id.clone())
                }
            });
            PlanPartition { owner, zone: spec.zone.clone() }
        });
        let planned: Vec<_> = planned.collect();
        let nodes: Vec<_> =
            members.iter().map(|one| PlanNode { id: one.id.clone(), zone: one.zone.clone() }).collect();
        let plan = plan(&nodes, &planned);
        let mut steps = Vec::new();
        for (at, spec) in specs.iter().enumerate() {
            let Some(wanted) = plan.owners.get(at).map(|node| nodes[*node].id.as_str()) else { continue };
            let found = records.get(&spec.id);
            let is_owned = found.is_some_and(|(_, record)| owns(record));
            if let Some(step) = self.step(spec, found, is_owned, wanted, revision, &members) {
                steps.push(step);
            }
        }
        for (partition, (entry, record)) in &records {
            if specs.iter().all(|spec| spec.id != *partition)
                && let Some(step) = self.retire(entry, record, owns(record), revision, &members)
            {
                steps.push(step);
            }
        }
        let mut done = Rebalanced { moves: plan.moves, ..Rebalanced::default() };
        self.commit(leadership, &steps, &mut done).await?;
        if plan.moves > 0 && done.written > 0 {
            self.context.metrics.rebalances.inc();
            self.context.metrics.rebalance_moves.inc_by(plan.moves as u64);
            let took = self.context.clock.monotonic_ns().saturating_sub(began);
            self.context.metrics.rebalance_commit_time.observe(seconds(took));
            let (group, moves) = (self.group.to_string(), plan.moves);
            self.context.events.publish(ClusterEvent::Rebalanced { group, moves });
        }
        Ok(done)
    }

    /// The live members that can own partitions, in order of their ids.
    async fn members(&self) -> Result<Vec<Member>, RepositoryError> {
        let (_, entries) = self.context.repository.list(keys::NODES).await?;
        let member = |entry: &Entry| {
            let record: NodeRecord = serde_json::from_slice(&entry.value).ok()?;
            let has_role = self.options.role.is_empty() || record.info.roles.contains(&self.options.role);
            (record.status != MemberStatus::Left && has_role).then_some(Member {
                id: record.info.id,
                zone: record.info.zone,
                epoch: entry.create_revision,
            })
        };
        Ok(entries.iter().filter_map(member).collect())
    }

    fn read<'a>(&self, prefix: &str, entry: &'a Entry) -> Option<(String, (&'a Entry, AssignmentRecord))> {
        let partition = keys::name(entry.key.strip_prefix(prefix)?);
        match AssignmentRecord::from_bytes(&entry.value) {
            Ok(record) => Some((partition, (entry, record))),
            Err(reason) => {
                self.context.events.publish(ClusterEvent::Malformed { key: entry.key.clone(), reason });
                // Treat the malformed record as new; the comparison of its mod revision replaces exactly the
                // record that was read.
                Some((partition, (entry, AssignmentRecord::new())))
            }
        }
    }

    /// The writes that move the partition towards the owner `wanted`.
    fn step(
        &self,
        spec: &PartitionSpec,
        found: Option<&(&Entry, AssignmentRecord)>,
        is_owned: bool,
        wanted: &str,
        revision: i64,
        members: &[Member],
    ) -> Option<(Vec<Compare>, Txn)> {
        let key = keys::assignment(&self.group, &spec.id);
        let mut compares = vec![match found {
            Some((entry, _)) => Compare::ModRevision(key.clone(), entry.mod_revision),
            None => Compare::Absent(key.clone()),
        }];
        let old = found.map_or_else(AssignmentRecord::new, |(_, record)| record.clone());
        let mut new = old.clone();
        new.equipment_ids.clone_from(&spec.equipment_ids);
        new.is_retired = false;
        if is_owned && old.owner_node_id == wanted {
            new.target_node_id.clear();
        } else {
            wanted.clone_into(&mut new.target_node_id);
        }
        if !is_owned {
            compares.extend(clear_failed_owner(&mut new, members));
        }
        if found.is_some() && new == old {
            return None;
        }
        Some((compares, self.write(key, new, revision)))
    }

    /// The writes that remove the owner of a partition that is no longer configured.
    fn retire(
        &self,
        entry: &Entry,
        old: &AssignmentRecord,
        is_owned: bool,
        revision: i64,
        members: &[Member],
    ) -> Option<(Vec<Compare>, Txn)> {
        let mut new = old.clone();
        new.is_retired = true;
        new.target_node_id.clear();
        let mut compares = vec![Compare::ModRevision(entry.key.clone(), entry.mod_revision)];
        if !is_owned {
            compares.extend(clear_failed_owner(&mut new, members));
        }
        (new != *old).then(|| (compares, self.write(entry.key.clone(), new, revision)))
    }

    fn write(&self, key: String, mut record: AssignmentRecord, revision: i64) -> Txn {
        record.last_applied_index = revision;
        record.updated_at = self.context.clock.wall_ms();
        Txn::new().put(key, record.to_bytes())
    }

    async fn commit(
        &self,
        leadership: &Leadership,
        steps: &[(Vec<Compare>, Txn)],
        done: &mut Rebalanced,
    ) -> Result<(), RepositoryError> {
        for batch in steps.chunks(MAX_PARTITIONS_PER_TXN) {
            match self.context.repository.txn(combined_txn(leadership, batch)).await? {
                TxnOutcome::Done { .. } => done.written += batch.len(),
                TxnOutcome::Conflict { .. } if !leadership.is_valid() => {
                    return Err(RepositoryError::Unavailable("the leadership has ended".to_owned()));
                }
                // One record has changed: commit the others one by one.
                TxnOutcome::Conflict { .. } => {
                    for one in batch {
                        let outcome =
                            self.context.repository.txn(combined_txn(leadership, std::slice::from_ref(one)));
                        match outcome.await? {
                            TxnOutcome::Done { .. } => done.written += 1,
                            TxnOutcome::Conflict { .. } => done.conflicts += 1,
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Clears a failed owner. The returned comparison requires that its lease has expired at the store when the
/// transaction commits.
fn clear_failed_owner(record: &mut AssignmentRecord, members: &[Member]) -> Option<Compare> {
    if record.owner_node_id.is_empty() {
        return None;
    }
    let member = keys::node(&record.owner_node_id);
    let compare = match members.iter().find(|member| member.id == record.owner_node_id) {
        Some(reborn) => Compare::CreateRevision(member, reborn.epoch),
        None => Compare::Absent(member),
    };
    record.owner_node_id.clear();
    record.owner_epoch = 0;
    Some(compare)
}

fn combined_txn(leadership: &Leadership, steps: &[(Vec<Compare>, Txn)]) -> Txn {
    let mut txn = leadership.fenced(Txn::new());
    for (compares, step) in steps {
        for compare in compares {
            // Compare a failed owner once, independent of its number of partitions.
            if !txn.compares.contains(compare) {
                txn.compares.push(compare.clone());
            }
        }
        txn.ops.extend(step.ops.iter().cloned());
    }
    txn
}

/// Returns true when a member joined or left, and false when the watch has ended. Heartbeats do not count.
async fn membership_changed(watch: &mut crate::Watch) -> bool {
    loop {
        match watch.next().await {
            Some(Ok(crate::Event::Put(entry))) => {
                let status = serde_json::from_slice::<NodeRecord>(&entry.value).map(|record| record.status);
                if entry.version == 1 || !matches!(status, Ok(MemberStatus::Up)) {
                    return true;
                }
            }
            Some(Ok(crate::Event::Delete { .. })) => return true,
            Some(Err(_)) | None => return false,
        }
    }
}

/// Returns true when a record is deleted or names a member that cannot acquire it, and false when the watch
/// has ended.
async fn released(watch: &mut crate::Watch) -> bool {
    loop {
        match watch.next().await {
            Some(Ok(crate::Event::Delete { .. })) => return true,
            Some(Ok(crate::Event::Put(entry))) => {
                let record = AssignmentRecord::from_bytes(&entry.value);
                let needs_us = |record: AssignmentRecord| {
                    !record.is_retired && record.owner_node_id.is_empty() && record.target_node_id.is_empty()
                };
                if record.map_or(true, needs_us) {
                    return true;
                }
            }
            Some(Err(_)) | None => return false,
        }
    }
}
