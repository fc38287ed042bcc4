//! Grows the number of shards with the number of nodes: a node that joins gets a shard that prefers it as its primary,
//! and slots migrate there until all shards have as many.
//!
//! The first node that sees the new member does it, in one transaction with the record of the number of shards, so it
//! is done once. Shards are never removed; the replicas on other nodes take over for a node that leaves.

use std::collections::BTreeMap;

use moim_replica::controller::Maker;
use moim_replica::keys::{self, SHARDS};
use moim_replica::{PartitionId, PartitionState};
use moim_state::nodes::{self, LiveMember, NodeOrder};
use moim_state::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};

use super::slot_map::SlotMap;
use super::{ConfigRecord, MAP, Service};
use crate::shared::lock;

/// The largest number of shards.
pub(super) const MOST: usize = 100;

/// The operators' orders about nodes.
pub(super) async fn orders(
    repository: &dyn StateRepository,
) -> Result<BTreeMap<i32, NodeOrder>, RepositoryError> {
    let (_, entries) = repository.list(nodes::ORDERS).await?;
    let order = |entry: &Entry| {
        let node = nodes::node_of(&entry.key, nodes::ORDERS)?;
        Some((node, NodeOrder::parse(&entry.value)?))
    };
    Ok(entries.iter().filter_map(order).collect())
}

/// The live nodes without an order to leave that are the preferred primary of no shard: each gets a shard.
fn nodes_without_shard(
    members: &[LiveMember],
    orders: &BTreeMap<i32, NodeOrder>,
    records: &BTreeMap<u16, PartitionState>,
    shards: usize,
) -> Vec<i32> {
    let wanted: Vec<i32> =
        members.iter().map(|live| live.record.node_id).filter(|node| !orders.contains_key(node)).collect();
    let missing = wanted.len().min(MOST).saturating_sub(shards);
    let preferred =
        |node: &i32| records.values().any(|state| state.replicas.first().is_some_and(|n| n.0 == *node));
    wanted.into_iter().filter(|node| !preferred(node)).take(missing).collect()
}

impl Service {
    /// Creates the missing shards, and plans the migrations that fill them.
    pub(super) async fn grow(&self, slots: &[Entry], members: &[LiveMember]) -> Result<(), RepositoryError> {
        let find = |key: &str| slots.iter().find(|entry| entry.key == key);
        let (Some(entry), Some(map_entry)) = (find(keys::SLOTS_CONFIG), find(MAP)) else { return Ok(()) };
        let Ok(mut config) = serde_json::from_slice::<ConfigRecord>(&entry.value) else { return Ok(()) };
        let shards = usize::try_from(config.shards).unwrap_or(0);
        if members.len() <= shards || shards >= MOST {
            return Ok(());
        }
        let repository = self.parts.repository.as_ref();
        let orders = orders(repository).await?;
        let records = lock(&self.records).clone();
        let new = nodes_without_shard(members, &orders, &records, shards);
        // Not before every existing shard has a leader.
        if new.is_empty() || records.len() != shards || records.values().any(|state| state.leader.is_none()) {
            return Ok(());
        }
        let Some(map) = SlotMap::decode(&map_entry.value) else { return Ok(()) };
        let (_, all) = nodes::nodes(repository).await?;
        let mut maker = Maker::new(&all, members, &orders);
        records.values().for_each(|state| maker.count(state));
        config.shards = (shards + new.len()) as i32;
        let mut txn = Txn::new()
            .when(Compare::ModRevision(entry.key.clone(), entry.mod_revision))
            .when(Compare::ModRevision(MAP.to_owned(), map_entry.mod_revision))
            .put(keys::SLOTS_CONFIG, serde_json::to_vec(&config).expect("plain data encodes as JSON"));
        let mut alive = Vec::new();
        for (at, node) in new.iter().enumerate() {
            let id = PartitionId { topic: SHARDS, index: (shards + at) as u32 };
            let node = moim_base::BrokerId(*node);
            let mut replicas = maker.place(maker.default_factor());
            // The new node first: the shard is created for it.
            match replicas.iter().position(|replica| *replica == node) {
                Some(at) => replicas[..=at].rotate_right(1),
                None => {
                    replicas.pop();
                    replicas.insert(0, node);
                }
            }
            let Some(change) = maker.create(id, replicas, None, moim_replica::Durability::Fsync) else {
                return Ok(());
            };
            alive.extend(change.members.iter().copied());
            let Some(state) = &change.next else { return Ok(()) };
            txn = txn.when(Compare::Absent(keys::partition(id))).put(keys::partition(id), state.encode());
        }
        let numbers: Vec<u16> = (0..config.shards as u16).collect();
        let planned = map
            .rebalance(&numbers)
            .iter()
            .try_fold(map, |map, (from, to, slots)| map.with_migration(*from, *to, slots));
        txn = match planned {
            Ok(planned) => txn.put(MAP, planned.encode()),
            Err(why) => {
                tracing::warn!(why, "slot rebalance over the new shards not planned");
                txn
            }
        };
        alive.sort_unstable();
        alive.dedup();
        for (node, epoch) in alive {
            txn = txn.when(Compare::CreateRevision(keys::member(node), epoch.0));
        }
        if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
            tracing::info!(shards = config.shards, "shards created for nodes that joined");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moim_replica::Durability;
    use moim_state::nodes::MemberRecord;

    use super::*;

    #[test]
    fn every_node_without_an_order_to_leave_gets_a_shard() {
        let live = |node_id: i32| LiveMember {
            record: MemberRecord { node_id, ..MemberRecord::default() },
            broker_epoch: i64::from(node_id),
        };
        let members: Vec<_> = (1..=3).map(live).collect();
        let first = PartitionState::new(vec![(1, 1, 1).into(), (2, 2, 2).into()], 1, Durability::Fsync);
        let records: BTreeMap<u16, PartitionState> = [(0, first)].into();
        let none = BTreeMap::new();
        assert_eq!(nodes_without_shard(&members, &none, &records, 1), [2, 3]);
        assert_eq!(nodes_without_shard(&members, &none, &records, 2), [2]);
        assert_eq!(nodes_without_shard(&members, &none, &records, 3), [0; 0]);
        assert_eq!(nodes_without_shard(&members, &[(2, NodeOrder::Drain)].into(), &records, 1), [3]);
        assert_eq!(nodes_without_shard(&members[..1], &none, &records, 1), [0; 0]);
    }
}
