//! Client requests for reassignments and elections, carried out by the node that received them.
//!
//! A request is one compare-and-swap of the partition record, made by the same [`Draft`] as the controller's own
//! changes. The controller learns of it by its watch and completes a reassignment. Requests therefore need no
//! connection to the controller, and a controller failover loses none.
//!
//! Invariant: a change is drafted from a record that was read for this purpose, and compares its revision. The
//! elected leader is alive in the run that the record names, which is also compared.

use moim_base::{BrokerId, TopicId};
use moim_state::nodes::{self, LiveMember};
use moim_state::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};

use super::MoveError;
use super::batch::pack;
use crate::keys;
use crate::restart::Member;
use crate::state::PartitionState;
use crate::transition::Draft;
use crate::types::{PartitionId, Versioned};

/// The maximum number of retries after concurrent changes of the record.
const TRIES: usize = 16;

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The reassignment is not possible.
    #[error(transparent)]
    Move(#[from] MoveError),
    /// The preferred replica leads already; or, for an unclean election, the partition has a leader.
    #[error("an election is not needed")]
    ElectionNotNeeded,
    /// The preferred leader is not in sync, or is not running.
    #[error("the preferred leader is not available")]
    PreferredNotAvailable,
    /// No replica is running.
    #[error("no replica is available to lead")]
    NoReplicaAvailable,
    /// The record kept changing. A retry may succeed at once.
    #[error("the partition is being changed")]
    Contended,
    /// The record cannot be decoded.
    #[error("{0}")]
    Damaged(String),
    /// The repository did not answer, or not in time.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
}

/// The kind of election.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ElectionKind {
    /// Elects the preferred replica (the first one).
    Preferred,
    /// Elects any running replica when no replica may lead: committed records may be lost, and the record says so.
    Unclean,
}

/// Starts a reassignment to `target`, the preferred leader first, or (`None`) cancels it.
pub async fn reassign(
    repository: &dyn StateRepository,
    id: PartitionId,
    target: Option<&[BrokerId]>,
) -> Result<(), RequestError> {
    if let Some(target) = target {
        let (_, nodes) = nodes::nodes(repository).await?;
        let known = |node: &BrokerId| nodes.iter().any(|known| known.node_id == node.0);
        let distinct = target.iter().enumerate().all(|(at, node)| !target[..at].contains(node));
        if target.is_empty() || !distinct || !target.iter().all(known) {
            return Err(MoveError::InvalidReplicas.into());
        }
        if settled(repository, id).await? != target.len() {
            record_explicit_factor(repository, id.topic, target.len()).await?;
        }
    }
    change(repository, id, |draft| match target {
        Some(target) if draft.begin_move(target) => Ok(()),
        None if !draft.state().is_moving() => Err(MoveError::NoneInProgress.into()),
        None if draft.cancel_move() => Ok(()),
        Some(_) | None => Err(MoveError::NoInSyncReplicaStays.into()),
    })
    .await
}

/// The replica count of a partition, without the replicas that a reassignment adds.
async fn settled(repository: &dyn StateRepository, id: PartitionId) -> Result<usize, RequestError> {
    let key = keys::partition(id);
    let entry = repository.get(&key).await?.ok_or(MoveError::UnknownPartition)?;
    Ok(decode(&key, &entry)?.settled().len())
}

/// Records an explicit replication factor on the topic: it no longer follows the cluster size. The store's shards
/// always follow it.
async fn record_explicit_factor(
    repository: &dyn StateRepository,
    topic: TopicId,
    factor: usize,
) -> Result<(), RequestError> {
    for _ in 0..TRIES {
        let (_, topics) = repository.list(keys::TOPICS).await?;
        let id = topic.to_string();
        let found = topics.into_iter().find_map(|entry| {
            let record: serde_json::Value = serde_json::from_slice(&entry.value).ok()?;
            (record["id"] == id.as_str() && record["factor_asked"] == false).then_some((entry, record))
        });
        let Some((entry, mut record)) = found else { return Ok(()) };
        record["factor_asked"] = true.into();
        record["replication_factor"] = factor.into();
        let same = Compare::ModRevision(entry.key.clone(), entry.mod_revision);
        let txn = Txn::new().when(same).put(entry.key, record.to_string());
        if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
            return Ok(());
        }
    }
    Err(RequestError::Contended)
}

fn decode(key: &str, entry: &Entry) -> Result<PartitionState, RequestError> {
    PartitionState::decode(&entry.value).map_err(|error| RequestError::Damaged(format!("{key}: {error}")))
}

/// Runs an election.
pub async fn elect(
    repository: &dyn StateRepository,
    id: PartitionId,
    kind: ElectionKind,
) -> Result<(), RequestError> {
    let (_, live) = nodes::members(repository).await?;
    let members: Vec<Member> = live.iter().map(|live: &LiveMember| Member::from_live(live)).collect();
    let alive = |node: &BrokerId| members.iter().find(|member| member.node == *node);
    change(repository, id, |draft| {
        let state = draft.state();
        match kind {
            ElectionKind::Preferred => {
                let preferred = state.replicas[0];
                if state.leader == Some(preferred) {
                    return Err(RequestError::ElectionNotNeeded);
                }
                let is_current = |node: BrokerId| {
                    let entry = state.in_sync(node).zip(alive(&node));
                    entry.is_some_and(|(entry, member)| entry.epoch == member.epoch)
                };
                // Without a leader that maintains the in-sync set the logs must be compared: the controller does
                // that.
                let is_led = state.leader.is_some_and(is_current);
                if !is_led || !is_current(preferred) || !draft.elect(preferred) {
                    return Err(RequestError::PreferredNotAvailable);
                }
            }
            ElectionKind::Unclean => {
                if state.leader.is_some() {
                    return Err(RequestError::ElectionNotNeeded);
                }
                let usable = |node: &BrokerId| alive(node).filter(|member| !member.is_damaged(id));
                let Some(member) = state.replicas.iter().find_map(usable) else {
                    return Err(RequestError::NoReplicaAvailable);
                };
                draft.elect_out_of_sync(member.in_sync(), true);
            }
        }
        Ok(())
    })
    .await
}

/// Changes a record by compare-and-swap, and retries on concurrent changes. A change without effect succeeds.
async fn change(
    repository: &dyn StateRepository,
    id: PartitionId,
    edit: impl Fn(&mut Draft) -> Result<(), RequestError>,
) -> Result<(), RequestError> {
    let key = keys::partition(id);
    for _ in 0..TRIES {
        let entry = repository.get(&key).await?.ok_or(MoveError::UnknownPartition)?;
        let value = decode(&key, &entry)?;
        let mut draft = Draft::new(&Versioned { revision: entry.mod_revision, value });
        edit(&mut draft)?;
        let Some(mut change) = draft.finish(id) else { return Ok(()) };
        // Only the store's leaders answer under a serving right.
        change.fence = change.fence.filter(|_| id.topic == keys::SHARDS);
        let Some(batch) = pack(vec![change], None).pop() else { return Ok(()) };
        if let TxnOutcome::Done { .. } = repository.txn(batch.txn()).await? {
            return Ok(());
        }
    }
    Err(RequestError::Contended)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moim_base::ManualClock;
    use moim_state::MemoryRepository;
    use moim_state::nodes::{MemberRecord, NodeRecord, member_key, node_key};

    use super::*;
    use crate::types::Durability;

    const ID: PartitionId = PartitionId { topic: TopicId(5), index: 0 };

    struct Fixture(MemoryRepository);

    impl Fixture {
        async fn new() -> Self {
            let fixture = Self(MemoryRepository::new(Arc::new(ManualClock::at(0))));
            let mut runs = Vec::new();
            for node_id in 1..=4 {
                let record = NodeRecord { node_id, ..NodeRecord::default() };
                fixture.put(node_key(node_id), record.to_bytes()).await;
                let record = MemberRecord { node_id, voter: node_id as u64, ..MemberRecord::default() };
                let run = fixture.put(member_key(node_id), record.to_bytes()).await;
                runs.push((node_id, run, node_id as u64));
            }
            let isr = vec![runs[0].into(), runs[1].into()];
            fixture.put(keys::partition(ID), PartitionState::new(isr, 1, Durability::Fsync).encode()).await;
            fixture
        }

        async fn put(&self, key: String, value: impl Into<bytes::Bytes>) -> i64 {
            match self.0.txn(Txn::new().put(key, value)).await.unwrap() {
                TxnOutcome::Done { revision } => revision,
                TxnOutcome::Conflict { .. } => panic!("nothing was compared"),
            }
        }

        async fn state(&self) -> PartitionState {
            let entry = self.0.get(&keys::partition(ID)).await.unwrap().unwrap();
            PartitionState::decode(&entry.value).unwrap()
        }

        async fn set(&self, edit: impl Fn(&mut PartitionState)) {
            let mut state = self.state().await;
            edit(&mut state);
            self.put(keys::partition(ID), state.encode()).await;
        }
    }

    fn block_on(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
    }

    #[test]
    fn reassignment_starts_and_is_cancelled() {
        block_on(async {
            let fixture = Fixture::new().await;
            let refused = reassign(&fixture.0, ID, None).await;
            assert!(matches!(refused, Err(RequestError::Move(MoveError::NoneInProgress))));
            for wrong in [vec![], vec![1, 1], vec![1, 9]] {
                let wrong: Vec<_> = wrong.into_iter().map(BrokerId).collect();
                let refused = reassign(&fixture.0, ID, Some(&wrong)).await;
                assert!(matches!(refused, Err(RequestError::Move(MoveError::InvalidReplicas))), "{wrong:?}");
            }
            reassign(&fixture.0, ID, Some(&[BrokerId(3), BrokerId(1)])).await.unwrap();
            let state = fixture.state().await;
            assert_eq!((state.adding, state.removing), (vec![BrokerId(3)], vec![BrokerId(2)]));
            reassign(&fixture.0, ID, None).await.unwrap();
            assert!(!fixture.state().await.is_moving());
            let nowhere = PartitionId { index: 9, ..ID };
            let refused = reassign(&fixture.0, nowhere, Some(&[BrokerId(1)])).await;
            assert!(matches!(refused, Err(RequestError::Move(MoveError::UnknownPartition))));
        });
    }

    #[test]
    fn reassignment_with_another_count_makes_the_factor_explicit() {
        block_on(async {
            let fixture = Fixture::new().await;
            let record = |asked: bool, factor: usize| {
                let id = ID.topic;
                format!(
                    r#"{{"id":"{id}","partitions":1,"replication_factor":{factor},"factor_asked":{asked},"configs":{{"a":"b"}}}}"#
                )
            };
            fixture.put(keys::topic("t"), record(false, 2)).await;
            let topic = async || fixture.0.get(&keys::topic("t")).await.unwrap().unwrap().value;
            reassign(&fixture.0, ID, Some(&[BrokerId(3), BrokerId(1)])).await.unwrap();
            assert_eq!(topic().await, record(false, 2));
            reassign(&fixture.0, ID, Some(&[BrokerId(2)])).await.unwrap();
            assert_eq!(topic().await, record(true, 1), "nothing else is touched");
        });
    }

    #[test]
    fn preferred_leader_is_elected_if_running_and_in_sync() {
        block_on(async {
            let fixture = Fixture::new().await;
            let not_needed = elect(&fixture.0, ID, ElectionKind::Preferred).await;
            assert!(matches!(not_needed, Err(RequestError::ElectionNotNeeded)));
            fixture.set(|state| state.leader = Some(BrokerId(2))).await;
            elect(&fixture.0, ID, ElectionKind::Preferred).await.unwrap();
            let state = fixture.state().await;
            assert_eq!((state.leader, state.leader_epoch.0), (Some(BrokerId(1)), 1));
            // An entry of another run has yet to be judged by the controller.
            fixture.set(|state| state.leader = Some(BrokerId(2))).await;
            fixture.0.txn(Txn::new().delete(member_key(1))).await.unwrap();
            let refused = elect(&fixture.0, ID, ElectionKind::Preferred).await;
            assert!(matches!(refused, Err(RequestError::PreferredNotAvailable)));
        });
    }

    #[test]
    fn requested_unclean_election_is_recorded() {
        block_on(async {
            let fixture = Fixture::new().await;
            let not_needed = elect(&fixture.0, ID, ElectionKind::Unclean).await;
            assert!(matches!(not_needed, Err(RequestError::ElectionNotNeeded)));
            fixture.set(|state| (state.leader, state.isr) = (None, Vec::new())).await;
            fixture.0.txn(Txn::new().delete(member_key(1))).await.unwrap();
            elect(&fixture.0, ID, ElectionKind::Unclean).await.unwrap();
            let state = fixture.state().await;
            assert_eq!((state.leader, state.unclean), (Some(BrokerId(2)), Some(state.leader_epoch)));
        });
    }
}
