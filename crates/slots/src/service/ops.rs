//! Executes the cluster operations of commands: SETSLOT, ADDSLOTS, DELSLOTS, CLUSTER FAILOVER.

mod event_loops;

use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;
use moim_base::task::Scope;
use moim_replica::PartitionId;
use moim_replica::controller::requests::{self, ElectionKind, RequestError};
use moim_replica::keys::SHARDS;
use moim_state::{Compare, Txn, TxnOutcome};
use tokio::sync::mpsc;

use super::slot_map::SlotMap;
use super::{MAP, Service};
use crate::cluster::UNASSIGNED;
use crate::error::Error;
use crate::ops::{MapChange, Op, OpKind, Step};
use crate::peer::{PeerConnection, PeerRequest, PeerResponse};
use crate::shared::lock;

/// The timeout of one operation.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before the lock of a shard is tried again that a script holds.
const LOCK_RETRY: Duration = Duration::from_millis(10);
/// How often a change of the slot map is tried against concurrent changes.
const MAX_TRIES: usize = 50;

/// Executes operations until the shutdown.
pub(super) async fn run(service: Arc<Service>, mut ops: mpsc::Receiver<Op>, scope: Scope) {
    if !service.server.is_on_current_runtime() {
        scope.spawn("slots-watchdog", event_loops::watch(Arc::clone(&service)));
    }
    while let Some(op) = ops.recv().await {
        let service = Arc::clone(&service);
        scope.spawn("slots-op", async move { service.execute_op(op).await });
    }
}

fn timed_out() -> Error {
    Error::coded("CLUSTERDOWN The coordination core did not answer in time")
}

async fn with_timeout(work: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| Err(timed_out()))
}

impl Service {
    async fn execute_op(&self, op: Op) {
        let index = op.shard.index;
        let mut results = Vec::new();
        match &op.kind {
            OpKind::Map(change) => results.push(with_timeout(self.change_map(index, change)).await),
            OpKind::Failover => results.push(with_timeout(self.become_primary(index)).await),
            OpKind::Transaction(steps) => {
                for step in steps {
                    if let Step::Change(change) = step {
                        results.push(with_timeout(self.change_map(index, change)).await);
                    }
                }
            }
        }
        loop {
            if let Some(mut turn) = op.shard.turn(&self.shared) {
                // The client may be unblocked already: by CLIENT UNBLOCK, or because it disconnected.
                let waits = turn.unblock(op.client);
                turn.finish();
                match &op.kind {
                    _ if !waits => {}
                    OpKind::Transaction(steps) => op.answer_transaction(steps, results),
                    OpKind::Map(_) | OpKind::Failover => {
                        op.answer(results.pop().unwrap_or_else(|| Err(timed_out())))
                    }
                }
                return;
            }
            tokio::time::sleep(LOCK_RETRY).await;
        }
    }

    /// Changes the slot map for the shard `me`. The map belongs to the whole cluster: a slot is taken from its owner
    /// only by the owner or by the migration target, and never while the owner holds keys of it.
    async fn change_map(&self, me: u16, change: &MapChange) -> Result<(), Error> {
        match change {
            MapChange::Assign(slot, to) => self.assign(me, *slot, *to).await,
            MapChange::Remove(slots) => self.remove(me, slots).await,
            _ => self.apply(me, change).await,
        }
    }

    /// SETSLOT NODE. While the slot is migrating no key is created in it at its owner, so a slot that was empty stays
    /// empty.
    async fn assign(&self, me: u16, slot: u16, to: u16) -> Result<(), Error> {
        let (_, map) = self.read_slot_map().await.map_err(Error::err)?;
        let owner = map.owners()[usize::from(slot)];
        let assign = MapChange::Assign(slot, to);
        if owner == to || owner == UNASSIGNED {
            return self.apply(me, &assign).await;
        }
        if me != owner && me != to {
            return Err(Error::err(format_args!("I'm not the owner of hash slot {slot}")));
        }
        let is_marked = !map.moving.contains(&(slot, owner, to));
        if is_marked {
            self.apply(owner, &MapChange::Migrate(slot, to)).await?;
        }
        if self.keys_in(owner, slot).await? > 0 {
            if is_marked {
                self.apply(owner, &MapChange::Stable(slot)).await?;
            }
            let whose = if me == owner { "I still hold" } else { "its owner still holds" };
            return Err(Error::err(format_args!(
                "Can't assign hashslot {slot} to a different node while {whose} keys for this hash slot."
            )));
        }
        self.apply(me, &assign).await
    }

    /// DELSLOTS. A key may be created between the check and the change. After the change none is, so the slots are
    /// checked again, and assigned back if one has keys.
    async fn remove(&self, me: u16, slots: &[u16]) -> Result<(), Error> {
        self.check_unused(me, slots).await?;
        let owners = self.read_slot_map().await.map_err(Error::err)?.1.owners();
        let ours: Vec<u16> = slots.iter().copied().filter(|slot| owners[usize::from(*slot)] == me).collect();
        self.apply(me, &MapChange::Remove(slots.to_vec())).await?;
        let refusal = match self.check_empty(me, &ours).await {
            Ok(()) => return Ok(()),
            Err(refusal) => refusal,
        };
        self.apply(me, &MapChange::Add(ours)).await?;
        Err(refusal)
    }

    async fn check_empty(&self, me: u16, slots: &[u16]) -> Result<(), Error> {
        let refusal = |slot: u16| {
            Error::err(format_args!(
                "Can't remove hashslot {slot} while I still hold keys for this hash slot."
            ))
        };
        if let Some(shard) = self.local_primary(me) {
            let held = shard
                .with_state(|state| slots.iter().copied().find(|slot| state.db.slot_len(*slot) > 0))
                .await;
            return held.map_or(Ok(()), |slot| Err(refusal(slot)));
        }
        for slot in slots {
            if self.keys_in(me, *slot).await? > 0 {
                return Err(refusal(*slot));
            }
        }
        Ok(())
    }

    /// Checks that each slot belongs to this shard or is unassigned, and is empty.
    async fn check_unused(&self, me: u16, slots: &[u16]) -> Result<(), Error> {
        let owners = self.read_slot_map().await.map_err(Error::err)?.1.owners();
        for slot in slots {
            let owner = owners[usize::from(*slot)];
            if owner != me && owner != UNASSIGNED {
                return Err(Error::err(format_args!("I'm not the owner of hash slot {slot}")));
            }
            if owner == me {
                self.check_empty(me, std::slice::from_ref(slot)).await?;
            }
        }
        Ok(())
    }

    /// The number of keys that the primary of a shard has in a slot, by a slot map at least as new as this node's.
    async fn keys_in(&self, shard: u16, slot: u16) -> Result<u64, Error> {
        if let Some(shard) = self.local_primary(shard) {
            return Ok(shard.with_state(|state| state.db.slot_len(slot) as u64).await);
        }
        let leader = lock(&self.records).get(&shard).and_then(|state| state.leader);
        let request = PeerRequest::CountKeys { shard, slot, map_epoch: self.map().epoch };
        let asked = async {
            let node = leader.ok_or(std::io::ErrorKind::NotConnected)?;
            let mut connection = PeerConnection::open(self.parts.dialler.dial(node).await?).await?;
            connection.send(&request, &[]).await?;
            connection.receive::<PeerResponse>().await
        };
        match asked.await {
            Ok(Some((PeerResponse::Count { keys }, _))) => Ok(keys),
            Ok(_) => Err(Error::coded("TRYAGAIN The owner of the slot has another primary")),
            Err(error) => Err(Error::err(format_args!("the owner of the slot cannot be asked: {error}"))),
        }
    }

    /// One compare-and-swap change of the slot map; concurrent changes are retried.
    async fn apply(&self, me: u16, change: &MapChange) -> Result<(), Error> {
        let repository = self.parts.repository.as_ref();
        for _ in 0..MAX_TRIES {
            let Ok(Some(entry)) = repository.get(MAP).await else { return Err(timed_out()) };
            let map = SlotMap::decode(&entry.value).ok_or_else(|| Error::err("the slot map is damaged"))?;
            let changed = map.changed(me, change)?;
            if changed != map {
                let same = Compare::ModRevision(MAP.to_owned(), entry.mod_revision);
                match repository.txn(Txn::new().when(same).put(MAP, changed.encode())).await {
                    Ok(TxnOutcome::Done { .. }) => {}
                    Ok(TxnOutcome::Conflict { .. }) => continue,
                    Err(error) => return Err(Error::err(error)),
                }
            }
            // The client sees the new map at once.
            return self.refresh(0).await.map(drop).map_err(Error::err);
        }
        Err(Error::err("the slot map was changed by others at the same time; try again"))
    }

    /// CLUSTER FAILOVER: makes this node the primary of a shard in whose in-sync set it is.
    async fn become_primary(&self, shard: u16) -> Result<(), Error> {
        let me = self.options.node;
        let state = lock(&self.records).get(&shard).cloned();
        let Some(state) = state.filter(|state| state.target().contains(&me)) else {
            return Err(Error::err("You should send CLUSTER FAILOVER to a replica"));
        };
        // Before any change: a refused failover must not happen later.
        if state.in_sync(me).is_none() {
            return Err(Error::err("This replica is not in sync with its master; try again later"));
        }
        self.transfer_leadership(shard, me).await
    }

    /// Hands leadership of a shard to another in-sync replica; `None` if there is none.
    async fn hand_over(&self, shard: u16) -> Result<Option<BrokerId>, Error> {
        let me = self.options.node;
        let up = lock(&self.live_peers).clone();
        let state = lock(&self.records).get(&shard).cloned();
        let Some(state) = state.filter(|state| state.leader == Some(me)) else { return Ok(None) };
        let fits = |node: &&BrokerId| up.contains(&node.0) && state.in_sync(**node).is_some();
        let Some(to) = state.target().iter().find(fits).copied() else { return Ok(None) };
        with_timeout(self.transfer_leadership(shard, to)).await.map(|()| Some(to))
    }

    async fn transfer_leadership(&self, shard: u16, to: BrokerId) -> Result<(), Error> {
        let repository = self.parts.repository.as_ref();
        let id = PartitionId { topic: SHARDS, index: u32::from(shard) };
        let mut replicas = lock(&self.records).get(&shard).map(|state| state.target()).unwrap_or_default();
        let at = replicas.iter().position(|node| *node == to).unwrap_or(0);
        replicas[..=at].rotate_right(1);
        requests::reassign(repository, id, Some(&replicas)).await.map_err(Error::err)?;
        loop {
            let elected = requests::elect(repository, id, ElectionKind::Preferred).await;
            self.refresh(0).await.map_err(Error::err)?;
            // The controller sees the new replica order, too: it may have held the election already, or not have
            // applied the order yet.
            if lock(&self.records).get(&shard).is_some_and(|state| state.leader == Some(to)) {
                return Ok(());
            }
            match elected {
                Ok(())
                | Err(
                    RequestError::ElectionNotNeeded
                    | RequestError::PreferredNotAvailable
                    | RequestError::Contended,
                ) => tokio::time::sleep(LOCK_RETRY).await,
                Err(error) => return Err(Error::err(error)),
            }
        }
    }
}
