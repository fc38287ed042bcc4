//! Carries out what commands ask of the cluster.

use std::sync::Arc;
use std::time::Duration;

use moim_base::task::Scope;
use moim_cluster::{Compare, Txn, TxnOutcome};
use moim_replica::PartitionId;
use moim_replica::controller::requests::{self, ElectionKind};
use moim_replica::keys::SHARDS;
use tokio::sync::mpsc;

use super::map::SlotMap;
use super::{MAP, Service};
use crate::error::Error;
use crate::ops::{MapChange, Op, OpKind, Step};
use crate::shared::lock;

/// How long a change of the cluster may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at a shard that a script holds.
const PAUSE: Duration = Duration::from_millis(10);
/// How often a change is tried that meets others.
const TRIES: usize = 50;

/// Takes requests until the shutdown.
pub(super) async fn run(service: Arc<Service>, mut ops: mpsc::Receiver<Op>, scope: Scope) {
    while let Some(op) = ops.recv().await {
        let service = Arc::clone(&service);
        scope.spawn("slots-op", async move { service.carry_out(op).await });
    }
}

fn late() -> Error {
    Error::coded("CLUSTERDOWN The coordination core did not answer in time")
}

async fn in_time(work: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| Err(late()))
}

impl Service {
    async fn carry_out(&self, op: Op) {
        let index = op.shard.index;
        let mut results = Vec::new();
        match &op.kind {
            OpKind::Map(change) => results.push(in_time(self.change_map(index, change)).await),
            OpKind::Failover => results.push(in_time(self.take_lead(index)).await),
            OpKind::Several(steps) => {
                for step in steps {
                    if let Step::Change(change) = step {
                        results.push(in_time(self.change_map(index, change)).await);
                    }
                }
            }
        }
        loop {
            if let Some(mut turn) = op.shard.turn(&self.shared) {
                // Somebody else may have answered: CLIENT UNBLOCK, or the client is gone.
                let waits = turn.unblock(op.client);
                turn.finish();
                match &op.kind {
                    _ if !waits => {}
                    OpKind::Several(steps) => op.answer_several(steps, results),
                    OpKind::Map(_) | OpKind::Failover => {
                        op.answer(results.pop().unwrap_or_else(|| Err(late())))
                    }
                }
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Changes the slot map; several may do so at once.
    async fn change_map(&self, me: u16, change: &MapChange) -> Result<(), Error> {
        let repository = self.parts.repository.as_ref();
        for _ in 0..TRIES {
            let Ok(Some(entry)) = repository.get(MAP).await else { return Err(late()) };
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
            // Whoever asked goes on with the new map at once.
            return self.refresh(0).await.map(drop).map_err(Error::err);
        }
        Err(Error::err("the slot map was changed by others at the same time; try again"))
    }

    /// Makes this node the primary of a shard it is in sync with.
    async fn take_lead(&self, shard: u16) -> Result<(), Error> {
        let repository = self.parts.repository.as_ref();
        let id = PartitionId { topic: SHARDS, index: u32::from(shard) };
        let me = self.options.node;
        let mut replicas = lock(&self.records).get(&shard).map(|state| state.target()).unwrap_or_default();
        let Some(at) = replicas.iter().position(|node| *node == me) else {
            return Err(Error::err("You should send CLUSTER FAILOVER to a replica"));
        };
        replicas[..=at].rotate_right(1);
        requests::reassign(repository, id, Some(&replicas)).await.map_err(Error::err)?;
        requests::elect(repository, id, ElectionKind::Preferred).await.map_err(Error::err)?;
        self.refresh(0).await.map(drop).map_err(Error::err)
    }
}
