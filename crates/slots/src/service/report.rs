//! What operators see of the slots, and what they change: the map, moves, what an answer promises.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use moim_cluster::{Compare, RepositoryError, Txn, TxnOutcome};
use moim_replica::keys;
use serde::{Deserialize, Serialize};

use super::map::{Move, Phase, SlotMap};
use super::take::Progress;
use super::{ConfigRecord, MAP, PROGRESS, SLOTS_ROOT, Service};
use crate::shared::lock;
use crate::slot_set::SlotSet;

/// Why a change was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// There is no such shard, move, or node.
    #[error("{0}")]
    NotFound(String),
    /// It makes no sense, or not now.
    #[error("{0}")]
    Conflict(String),
    /// The coordination core did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// The slots, their shards, and the moves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SlotsReport {
    /// Grows with every change of owners.
    pub epoch: u64,
    /// Slots that somebody owns.
    pub assigned: usize,
    /// By number.
    pub shards: Vec<ShardReport>,
    /// Moves that are not over, in order.
    pub moves: Vec<MoveReport>,
    /// The newest moves that are.
    pub over: Vec<MoveReport>,
}

/// One shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardReport {
    /// Its number.
    pub shard: u16,
    /// The node that leads it.
    pub primary_node: Option<i32>,
    /// Where its primary is reached.
    pub primary: Option<String>,
    /// The id of its primary.
    pub primary_id: Option<String>,
    /// Where its replicas are reached.
    pub replicas: Vec<String>,
    /// How many slots it has.
    pub slot_count: usize,
    /// Which.
    pub slots: String,
    /// `fsync` or `async`.
    pub durability: String,
    /// Its configuration epoch.
    pub epoch: u64,
}

/// One move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MoveReport {
    /// Its number.
    pub id: u64,
    /// Who gives.
    pub from: u16,
    /// Who gets.
    pub to: u16,
    /// How many slots.
    pub slot_count: usize,
    /// Which.
    pub slots: String,
    /// `waiting`, `copying`, `following`, `frozen`, `moved`, `aborted`.
    pub state: String,
    /// Bytes that have come, as far as is known.
    pub bytes: u64,
}

/// How far a move is. Each step is in a journal or in the slot map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The slot map knows of it.
    Begun,
    /// The target has set its slots aside.
    Staged,
    /// All keys have come.
    Loaded,
    /// The source holds commands back.
    Frozen,
    /// The slots have changed hands.
    Moved,
    /// The target serves them.
    Owned,
    /// The source has forgotten their keys.
    Dropped,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 7] =
        [Self::Begun, Self::Staged, Self::Loaded, Self::Frozen, Self::Moved, Self::Owned, Self::Dropped];
}

/// A move as one node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveStep {
    /// Its number.
    pub id: u64,
    /// Who gives.
    pub from: u16,
    /// Who gets.
    pub to: u16,
    /// The last step that this node knows of.
    pub step: Step,
}

/// Which slots a move takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// These.
    Slots(SlotSet),
    /// So many, the highest first.
    Count(usize),
}

impl Service {
    /// Everything about the slots.
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
        let active: Vec<u64> = map.active().map(|one| one.id).collect();
        let report = |one: &Move| {
            let progress = progress(one.id);
            let state = match (one.phase, progress.stage.as_str()) {
                (Phase::Moved, _) => "moved",
                (Phase::Aborted, _) => "aborted",
                (Phase::Copying, _) if !active.contains(&one.id) => "waiting",
                (Phase::Copying, "changes") => "following",
                (Phase::Copying, "frozen") => "frozen",
                (Phase::Copying, _) => "copying",
            };
            MoveReport {
                id: one.id,
                from: one.from,
                to: one.to,
                slot_count: one.slots.len(),
                slots: one.slots.to_string(),
                state: state.to_owned(),
                bytes: progress.bytes,
            }
        };
        Ok(SlotsReport {
            epoch: map.epoch,
            assigned: map.owners().iter().filter(|owner| **owner != crate::cluster::NOBODY).count(),
            shards: self.shard_reports(&map, config.as_ref()),
            moves: map.moves.iter().map(report).collect(),
            over: map.over.iter().map(report).collect(),
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

    /// The shard that an operator means: its number, the address or the id of its primary.
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

    /// Begins to move slots from a shard to another; gives the numbers of the moves.
    pub async fn begin_move(&self, from: &str, to: &str, wanted: &Selection) -> Result<Vec<u64>, Refused> {
        let (from, to) = (self.shard_named(from)?, self.shard_named(to)?);
        self.change_map_with(|map| {
            let slots = match wanted {
                Selection::Slots(slots) => slots.clone(),
                Selection::Count(count) => map.some_of(from, *count),
            };
            if slots.is_empty() {
                return Err(format!("shard {from} has no such slots to give"));
            }
            if let Selection::Count(count) = wanted
                && slots.len() < *count
            {
                return Err(format!("shard {from} has {} slots to give, not {count}", slots.len()));
            }
            map.with_move(from, to, &slots)
        })
        .await
    }

    /// Begins the moves that give every shard as many slots; gives their numbers.
    pub async fn rebalance(&self) -> Result<Vec<u64>, Refused> {
        let shards: Vec<u16> = (0..self.shared.view.load().shards.len() as u16).collect();
        self.change_map_with(|map| {
            let moves = map.evening(&shards);
            moves.iter().try_fold(map.clone(), |map, (from, to, slots)| map.with_move(*from, *to, slots))
        })
        .await
    }

    async fn change_map_with(
        &self,
        edit: impl Fn(&SlotMap) -> Result<SlotMap, String> + Send + Sync,
    ) -> Result<Vec<u64>, Refused> {
        let (refusal, first) = (Mutex::new(None), AtomicU64::new(0));
        let changed = self
            .change_moves(|map| {
                first.store(map.last_move, Ordering::Relaxed);
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
        Ok(changed.map_or_else(Vec::new, |map| (first.load(Ordering::Relaxed) + 1..=map.last_move).collect()))
    }

    /// How far the moves are that are not over and not given up, by the slot map and the journals of the shards that this node
    /// leads. What was journaled need not be committed.
    pub fn steps(&self) -> Vec<MoveStep> {
        let map = self.map();
        let moves = |shard: u16| self.primary_here(shard)?.lock_soon().map(|state| state.moves.clone());
        let step = |one: &Move| {
            let (source, target) = (moves(one.from), moves(one.to));
            let is_frozen = source.map(|moves| moves.frozen().contains_key(&one.id));
            let staged = target.map(|moves| moves.staged().get(&one.id).map(|staged| staged.position));
            let step = match (one.phase, is_frozen, staged) {
                (Phase::Aborted, ..) => return None,
                (Phase::Moved, Some(false), _) => Step::Dropped,
                (Phase::Moved, _, Some(None)) => Step::Owned,
                (Phase::Moved, ..) => Step::Moved,
                (Phase::Copying, Some(true), _) => Step::Frozen,
                (Phase::Copying, _, Some(Some(Some(_)))) => Step::Loaded,
                (Phase::Copying, _, Some(Some(None))) => Step::Staged,
                (Phase::Copying, ..) => Step::Begun,
            };
            Some(MoveStep { id: one.id, from: one.from, to: one.to, step })
        };
        map.moves.iter().filter_map(step).collect()
    }

    /// Whether this node is the primary of a shard.
    pub fn leads(&self, shard: u16) -> bool {
        self.primary_here(shard).is_some()
    }

    /// Gives a move up: its slots stay where they are.
    pub async fn abort_move(&self, id: u64) -> Result<(), Refused> {
        if self.change_moves(|map| map.aborted(id)).await?.is_some() {
            self.refresh(0).await?;
            return Ok(());
        }
        let map = self.read_map().await?.1;
        match map.moves.iter().chain(&map.over).find(|one| one.id == id) {
            Some(one) if one.phase == Phase::Aborted => Ok(()),
            Some(_) => Err(Refused::Conflict(format!("the slots of move {id} have moved already"))),
            None => Err(Refused::NotFound(format!("there is no move {id}"))),
        }
    }

    /// Says what an answer of a shard promises, or of all of them.
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
            let txn = Txn::new().when(same).put(entry.key, serde_json::to_vec(&config).unwrap_or_default());
            if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
                self.refresh(0).await?;
                return Ok(());
            }
        }
    }
}
