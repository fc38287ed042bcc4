//! Reports and changes for operators: the slot map, slot migrations, durability.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use moim_replica::keys;
use moim_state::{Compare, RepositoryError, Txn, TxnOutcome};
use serde::{Deserialize, Serialize};

use super::slot_map::{Migration, Phase, SlotMap};
use super::{ConfigRecord, MAP, PROGRESS, SLOTS_ROOT, Service};
use crate::migration::import::Progress;
use crate::shared::lock;
use crate::slot_set::SlotSet;

/// Why a change was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// There is no such shard, migration or node.
    #[error("{0}")]
    NotFound(String),
    /// The change is invalid, or not possible now.
    #[error("{0}")]
    Conflict(String),
    /// The coordination core did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// The slot map, the shards and the slot migrations.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SlotsReport {
    /// The epoch of the slot map; grows with every change of an owner.
    pub epoch: u64,
    /// The number of slots with an owner.
    pub assigned: usize,
    /// The shards, by number.
    pub shards: Vec<ShardReport>,
    /// Migrations that are not over, in order.
    pub moves: Vec<MoveReport>,
    /// The newest finished migrations.
    pub over: Vec<MoveReport>,
}

/// A shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardReport {
    /// The shard number.
    pub shard: u16,
    /// The node that leads the shard.
    pub primary_node: Option<i32>,
    /// The address of the primary.
    pub primary: Option<String>,
    /// The Redis node id of the primary.
    pub primary_id: Option<String>,
    /// The addresses of the replicas.
    pub replicas: Vec<String>,
    /// The number of slots.
    pub slot_count: usize,
    /// The slots as ranges.
    pub slots: String,
    /// `fsync` or `async`.
    pub durability: String,
    /// The configuration epoch.
    pub epoch: u64,
}

/// A slot migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MoveReport {
    /// The migration id.
    pub id: u64,
    /// The source shard.
    pub from: u16,
    /// The target shard.
    pub to: u16,
    /// The number of slots.
    pub slot_count: usize,
    /// The slots as ranges.
    pub slots: String,
    /// `waiting`, `copying`, `following`, `frozen`, `moved`, `aborted`.
    pub state: String,
    /// Bytes imported, as last published.
    pub bytes: u64,
}

/// The progress of a migration. Each step is in a journal or in the slot map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The migration is in the slot map.
    Begun,
    /// The target has staged the slots: importing, and hidden from clients.
    Staged,
    /// The target has loaded all keys of the snapshot.
    Loaded,
    /// The source has frozen the slots.
    Frozen,
    /// Flipped: the slots belong to the target.
    Moved,
    /// The target serves the slots.
    Owned,
    /// The source has dropped the keys.
    Dropped,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 7] =
        [Self::Begun, Self::Staged, Self::Loaded, Self::Frozen, Self::Moved, Self::Owned, Self::Dropped];
}

/// A migration as one node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveStep {
    /// The migration id.
    pub id: u64,
    /// The source shard.
    pub from: u16,
    /// The target shard.
    pub to: u16,
    /// The last step that this node knows of.
    pub step: Step,
}

/// Selects the slots of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// These slots.
    Slots(SlotSet),
    /// This many slots, the highest first.
    Count(usize),
}

impl Service {
    /// Reports the slot map, the shards and the migrations.
    pub async fn report(&self) -> Result<SlotsReport, Refused> {
        let (_, entries) = self.parts.repository.list(SLOTS_ROOT).await?;
        let find = |key: &str| entries.iter().find(|entry| entry.key == key);
        let map = find(MAP).and_then(|entry| SlotMap::decode(&entry.value)).unwrap_or_default();
        let config: Option<ConfigRecord> =
            find(keys::SLOTS_CONFIG).and_then(|entry| serde_json::from_slice(&entry.value).ok());
        let progress = |id: u64| -> Progress {
            let entry = find(&format!("{PROGRESS}{id}"));
            entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()).unwrap_or_default()
        };
        let active: Vec<u64> = map.active().map(|migration| migration.id).collect();
        let report = |migration: &Migration| {
            let progress = progress(migration.id);
            let state = match (migration.phase, progress.stage.as_str()) {
                (Phase::Moved, _) => "moved",
                (Phase::Aborted, _) => "aborted",
                (Phase::Copying, _) if !active.contains(&migration.id) => "waiting",
                (Phase::Copying, "changes") => "following",
                (Phase::Copying, "frozen") => "frozen",
                (Phase::Copying, _) => "copying",
            };
            MoveReport {
                id: migration.id,
                from: migration.from,
                to: migration.to,
                slot_count: migration.slots.len(),
                slots: migration.slots.to_string(),
                state: state.to_owned(),
                bytes: progress.bytes,
            }
        };
        Ok(SlotsReport {
            epoch: map.epoch,
            assigned: map.owners().iter().filter(|owner| **owner != crate::cluster::UNASSIGNED).count(),
            shards: self.shard_reports(&map, config.as_ref()),
            moves: map.migrations.iter().map(report).collect(),
            over: map.finished.iter().map(report).collect(),
        })
    }

    fn shard_reports(&self, map: &SlotMap, config: Option<&ConfigRecord>) -> Vec<ShardReport> {
        let (view, records, owners) = (self.shared.view.load(), lock(&self.records).clone(), map.owners());
        let report = |(at, shard): (usize, &crate::cluster::ShardView)| {
            let index = at as u16;
            let address = |node: &crate::cluster::NodeView| format!("{}:{}", node.host, node.port);
            let primary = view.primary(index);
            let slots: SlotSet =
                (0..owners.len() as u16).filter(|slot| owners[usize::from(*slot)] == index).collect();
            ShardReport {
                shard: index,
                primary_node: records.get(&index).and_then(|state| state.leader).map(|node| node.0),
                primary: primary.map(address),
                primary_id: primary.map(|node| node.id.clone()),
                replicas: shard.nodes.iter().skip(usize::from(shard.has_primary)).map(address).collect(),
                slot_count: slots.len(),
                slots: slots.to_string(),
                durability: config.map_or_else(String::new, |config| config.durability_of(index).to_owned()),
                epoch: shard.epoch,
            }
        };
        view.shards.iter().enumerate().map(report).collect()
    }

    /// The shard that an operator names: by its number, or by the address or id of its primary.
    fn shard_named(&self, name: &str) -> Result<u16, Refused> {
        let view = self.shared.view.load();
        let number = name.parse().ok().filter(|shard: &u16| usize::from(*shard) < view.shards.len());
        let named = || {
            let is = |node: &crate::cluster::NodeView| {
                node.id == name || format!("{}:{}", node.host, node.port) == name
            };
            view.nodes().find(|(_, node, is_primary)| *is_primary && is(node)).map(|(shard, ..)| shard)
        };
        number.or_else(named).ok_or_else(|| Refused::NotFound(format!("there is no shard {name}")))
    }

    /// Begins to migrate slots between two shards; returns the migration ids.
    pub async fn begin_move(&self, from: &str, to: &str, wanted: &Selection) -> Result<Vec<u64>, Refused> {
        let (from, to) = (self.shard_named(from)?, self.shard_named(to)?);
        self.change_map_with(|map| {
            let slots = match wanted {
                Selection::Slots(slots) => slots.clone(),
                Selection::Count(count) => map.pick_slots(from, *count),
            };
            if slots.is_empty() {
                return Err(format!("shard {from} has no such slots to give"));
            }
            if let Selection::Count(count) = wanted
                && slots.len() < *count
            {
                return Err(format!("shard {from} has {} slots to give, not {count}", slots.len()));
            }
            map.with_migration(from, to, &slots)
        })
        .await
    }

    /// Begins the migrations that balance the number of slots; returns their ids.
    pub async fn rebalance(&self) -> Result<Vec<u64>, Refused> {
        let shards: Vec<u16> = (0..self.shared.view.load().shards.len() as u16).collect();
        self.change_map_with(|map| {
            let planned = map.rebalance(&shards);
            planned
                .iter()
                .try_fold(map.clone(), |map, (from, to, slots)| map.with_migration(*from, *to, slots))
        })
        .await
    }

    async fn change_map_with(
        &self,
        edit: impl Fn(&SlotMap) -> Result<SlotMap, String> + Send + Sync,
    ) -> Result<Vec<u64>, Refused> {
        let (refusal, first) = (Mutex::new(None), AtomicU64::new(0));
        let changed = self
            .edit_slot_map(|map| {
                first.store(map.last_migration, Ordering::Relaxed);
                match edit(map) {
                    Ok(changed) => Some(changed).filter(|changed| changed != map),
                    Err(why) => {
                        *lock(&refusal) = Some(why);
                        None
                    }
                }
            })
            .await?;
        if let Some(why) = lock(&refusal).take() {
            return Err(Refused::Conflict(why));
        }
        self.refresh(0).await?;
        Ok(changed
            .map_or_else(Vec::new, |map| (first.load(Ordering::Relaxed) + 1..=map.last_migration).collect()))
    }

    /// The progress of all migrations that are not over and not aborted, by the slot map and the journals of the shards
    /// that this node leads. A journaled step need not be committed.
    pub fn steps(&self) -> Vec<MoveStep> {
        let map = self.map();
        let migrations_of =
            |shard: u16| self.local_primary(shard)?.lock_soon().map(|state| state.migrations.clone());
        let step = |migration: &Migration| {
            let (source, target) = (migrations_of(migration.from), migrations_of(migration.to));
            let is_frozen = source.map(|migrations| migrations.frozen().contains_key(&migration.id));
            let staged =
                target.map(|migrations| migrations.staged().get(&migration.id).map(|staged| staged.position));
            let step = match (migration.phase, is_frozen, staged) {
                (Phase::Aborted, ..) => return None,
                (Phase::Moved, Some(false), _) => Step::Dropped,
                (Phase::Moved, _, Some(None)) => Step::Owned,
                (Phase::Moved, ..) => Step::Moved,
                (Phase::Copying, Some(true), _) => Step::Frozen,
                (Phase::Copying, _, Some(Some(Some(_)))) => Step::Loaded,
                (Phase::Copying, _, Some(Some(None))) => Step::Staged,
                (Phase::Copying, ..) => Step::Begun,
            };
            Some(MoveStep { id: migration.id, from: migration.from, to: migration.to, step })
        };
        map.migrations.iter().filter_map(step).collect()
    }

    /// True if this node is the primary of a shard.
    pub fn leads(&self, shard: u16) -> bool {
        self.local_primary(shard).is_some()
    }

    /// Aborts a migration: its slots stay at the source.
    pub async fn abort_move(&self, id: u64) -> Result<(), Refused> {
        if self.edit_slot_map(|map| map.aborted(id)).await?.is_some() {
            self.refresh(0).await?;
            return Ok(());
        }
        let map = self.read_slot_map().await?.1;
        match map.migrations.iter().chain(&map.finished).find(|migration| migration.id == id) {
            Some(migration) if migration.phase == Phase::Aborted => Ok(()),
            Some(_) => Err(Refused::Conflict(format!("the slots of move {id} have moved already"))),
            None => Err(Refused::NotFound(format!("there is no move {id}"))),
        }
    }

    /// Sets the durability of one shard, or of all.
    pub async fn set_durability(&self, shard: Option<&str>, word: &str) -> Result<(), Refused> {
        if !["fsync", "async"].contains(&word) {
            return Err(Refused::Conflict(format!("{word} is no durability; there are fsync and async")));
        }
        let shard = shard.map(|name| self.shard_named(name)).transpose()?;
        let repository = self.parts.repository.as_ref();
        loop {
            let entry = repository.get(keys::SLOTS_CONFIG).await?;
            let Some(entry) = entry else {
                return Err(Refused::Conflict("there are no shards yet".to_owned()));
            };
            let damaged = |_| RepositoryError::Damaged(keys::SLOTS_CONFIG.to_owned());
            let mut config: ConfigRecord = serde_json::from_slice(&entry.value).map_err(damaged)?;
            match shard {
                Some(shard) => drop(config.shard_durability.insert(shard, word.to_owned())),
                None => {
                    config.shard_durability.clear();
                    word.clone_into(&mut config.durability);
                }
            }
            let same = Compare::ModRevision(entry.key.clone(), entry.mod_revision);
            let txn = Txn::new()
                .when(same)
                .put(entry.key, serde_json::to_vec(&config).expect("plain data encodes as JSON"));
            if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
                self.refresh(0).await?;
                return Ok(());
            }
        }
    }
}
