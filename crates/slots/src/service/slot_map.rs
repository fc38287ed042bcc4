//! The record of the slot map: slot ranges and their owners, slots that Redis tools migrate by SETSLOT, and slot
//! migrations.
//!
//! One record, changed by compare-and-swap: every decision about a migration (begin, flip, retry, abort) is one change
//! of this record, and concurrent decisions conflict.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::SLOTS;
use crate::cluster::UNASSIGNED;
use crate::error::Error;
use crate::ops::MapChange;
use crate::slot_set::SlotSet;

/// The slot map. The JSON form is the record in the coordination core.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlotMap {
    /// Grows with every change of an owner.
    pub(crate) epoch: u64,
    /// (first slot, last slot, owner).
    pub(crate) ranges: Vec<(u16, u16, u16)>,
    /// Slots in MIGRATING or IMPORTING state by SETSLOT: (slot, source, target).
    #[serde(default)]
    pub(crate) moving: Vec<(u16, u16, u16)>,
    /// Slot migrations that are not over, in the order of their requests.
    #[serde(default, rename = "moves")]
    pub(crate) migrations: Vec<Migration>,
    /// The newest finished migrations, the last one last.
    #[serde(default, rename = "over")]
    pub(crate) finished: Vec<Migration>,
    /// The id of the newest migration.
    #[serde(default, rename = "last_move")]
    pub(crate) last_migration: u64,
    /// How often each shard gained slots: its configuration epoch grows with it.
    #[serde(default)]
    pub(crate) gained: BTreeMap<u16, u64>,
}

/// The phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// The target imports; the source serves the slots, or has frozen them.
    Copying,
    /// Flipped: the slots belong to the target.
    Moved,
    /// Aborted: the slots stay at the source.
    Aborted,
}

/// A migration of slots between two shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Migration {
    /// The migration id, unique in the cluster.
    pub(crate) id: u64,
    /// The source shard.
    pub(crate) from: u16,
    /// The target shard.
    pub(crate) to: u16,
    /// The slots.
    pub(crate) slots: SlotSet,
    /// The phase.
    pub(crate) phase: Phase,
    /// Grows whenever the source times out: slots frozen under an older attempt may thaw.
    pub(crate) attempt: u32,
    /// The source has thawed or dropped the slots.
    pub(crate) source_done: bool,
    /// The target serves the slots or has discarded the imported keys.
    pub(crate) target_done: bool,
}

/// A side of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

/// The largest number of slots in one migration: the work that an interrupted migration repeats is bounded.
const MAX_SLOTS_PER_MIGRATION: usize = 2048;
/// The number of finished migrations that are kept.
const MAX_FINISHED: usize = 64;

impl SlotMap {
    /// All slots distributed evenly.
    pub(crate) fn even(shards: u16) -> Self {
        let at = |n: u16| (SLOTS * usize::from(n) / usize::from(shards)) as u16;
        let ranges = (0..shards).map(|shard| (at(shard), at(shard + 1).wrapping_sub(1), shard)).collect();
        Self { epoch: 1, ranges, ..Self::default() }
    }

    /// The owner of each slot.
    pub(crate) fn owners(&self) -> Vec<u16> {
        let mut owners = vec![UNASSIGNED; SLOTS];
        for (first, last, shard) in &self.ranges {
            if let Some(run) = owners.get_mut(usize::from(*first)..=usize::from(*last)) {
                run.fill(*shard);
            }
        }
        owners
    }

    fn with_owners(&self, owners: &[u16], moving: Vec<(u16, u16, u16)>) -> Self {
        let mut ranges: Vec<(u16, u16, u16)> = Vec::new();
        for (slot, owner) in owners.iter().enumerate().filter(|(_, owner)| **owner != UNASSIGNED) {
            let slot = slot as u16;
            match ranges.last_mut() {
                Some((_, last, shard)) if *shard == *owner && *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot, *owner)),
            }
        }
        Self { ranges, moving, ..self.clone() }
    }

    /// The migration with this id, if it is not over.
    pub(crate) fn find(&self, id: u64) -> Option<&Migration> {
        self.migrations.iter().find(|migration| migration.id == id)
    }

    /// The migrations that run; the others wait for an earlier one with the same shard.
    pub(crate) fn active(&self) -> impl Iterator<Item = &Migration> {
        self.migrations
            .iter()
            .enumerate()
            .filter(|(at, migration)| {
                let shares = |other: &Migration| {
                    [other.from, other.to].iter().any(|s| [migration.from, migration.to].contains(s))
                };
                !self.migrations[..*at].iter().any(shares)
            })
            .map(|(_, migration)| migration)
    }

    /// The slots of all migrations that are not over.
    fn migrating_slots(&self) -> SlotSet {
        let mut slots = SlotSet::default();
        self.migrations.iter().for_each(|migration| slots.add(&migration.slots));
        slots
    }

    /// Adds migrations of `slots` between two shards.
    pub(crate) fn with_migration(&self, from: u16, to: u16, slots: &SlotSet) -> Result<Self, String> {
        if from == to {
            return Err("the slots are there already".to_owned());
        }
        let (owners, migrating_slots) = (self.owners(), self.migrating_slots());
        for slot in slots.iter() {
            if owners[usize::from(slot)] != from {
                return Err(format!("slot {slot} does not belong to shard {from}"));
            }
            if migrating_slots.contains(slot) || self.moving.iter().any(|(moving, ..)| *moving == slot) {
                return Err(format!("slot {slot} is being moved already"));
            }
        }
        let mut map = self.clone();
        for slots in slots.iter().collect::<Vec<_>>().chunks(MAX_SLOTS_PER_MIGRATION) {
            map.last_migration += 1;
            let slots = slots.iter().copied().collect();
            map.migrations.push(Migration {
                id: map.last_migration,
                from,
                to,
                slots,
                phase: Phase::Copying,
                attempt: 0,
                source_done: false,
                target_done: false,
            });
        }
        Ok(map)
    }

    fn with(&self, id: u64, edit: impl FnOnce(&mut Migration)) -> Self {
        let mut map = self.clone();
        if let Some(migration) = map.migrations.iter_mut().find(|migration| migration.id == id) {
            edit(migration);
        }
        map
    }

    /// The flip, the commit point: the slots of a migration belong to the target. `None` if the migration is over or in
    /// another attempt.
    pub(crate) fn flipped(&self, id: u64, attempt: u32) -> Option<Self> {
        let migration = self
            .find(id)
            .filter(|migration| migration.phase == Phase::Copying && migration.attempt == attempt)?;
        let mut owners = self.owners();
        migration.slots.iter().for_each(|slot| owners[usize::from(slot)] = migration.to);
        let mut map = self
            .with_owners(&owners, self.moving.clone())
            .with(id, |migration| migration.phase = Phase::Moved);
        map.epoch += 1;
        *map.gained.entry(migration.to).or_default() += 1;
        Some(map)
    }

    /// The source has timed out: the migration repeats its last steps in the next attempt.
    pub(crate) fn retried(&self, id: u64, attempt: u32) -> Option<Self> {
        self.find(id)
            .filter(|migration| migration.phase == Phase::Copying && migration.attempt == attempt)?;
        Some(self.with(id, |migration| migration.attempt += 1))
    }

    /// Aborts a migration. `None` if it has flipped, or is over.
    pub(crate) fn aborted(&self, id: u64) -> Option<Self> {
        self.find(id).filter(|migration| migration.phase == Phase::Copying)?;
        Some(self.with(id, |migration| migration.phase = Phase::Aborted))
    }

    /// A side has done its part. `None` if that is recorded already.
    pub(crate) fn settled(&self, id: u64, side: Side) -> Option<Self> {
        let migration = self.find(id).filter(|migration| migration.phase != Phase::Copying)?;
        let known = if side == Side::Source { migration.source_done } else { migration.target_done };
        if known {
            return None;
        }
        let mut map = self.with(id, |migration| match side {
            Side::Source => migration.source_done = true,
            Side::Target => migration.target_done = true,
        });
        let is_over = |migration: &Migration| migration.source_done && migration.target_done;
        map.finished.extend(map.migrations.iter().filter(|migration| is_over(migration)).cloned());
        map.migrations.retain(|migration| !is_over(migration));
        let surplus = map.finished.len().saturating_sub(MAX_FINISHED);
        map.finished.drain(..surplus);
        Some(map)
    }

    /// Up to `count` slots of a shard that are free to migrate, the highest first.
    pub(crate) fn pick_slots(&self, shard: u16, count: usize) -> SlotSet {
        let (owners, migrating_slots) = (self.owners(), self.migrating_slots());
        let is_moving = |slot: u16| self.moving.iter().any(|(moving, ..)| *moving == slot);
        let free = |slot: &u16| {
            owners[usize::from(*slot)] == shard && !migrating_slots.contains(*slot) && !is_moving(*slot)
        };
        (0..SLOTS as u16).rev().filter(free).take(count).collect()
    }

    /// The migrations that balance the number of slots: (source, target, slots). Migrations in progress count as done.
    pub(crate) fn rebalance(&self, shards: &[u16]) -> Vec<(u16, u16, SlotSet)> {
        let mut owners = self.owners();
        for migration in &self.migrations {
            if migration.phase != Phase::Aborted {
                migration.slots.iter().for_each(|slot| owners[usize::from(slot)] = migration.to);
            }
        }
        let mut migrating_slots = self.migrating_slots();
        self.moving.iter().for_each(|(slot, ..)| migrating_slots.insert(*slot));
        let count = |shard: u16| owners.iter().filter(|owner| **owner == shard).count();
        let total = owners.iter().filter(|owner| shards.contains(owner)).count();
        let mut wants: Vec<(u16, usize, usize)> = shards.iter().map(|s| (*s, count(*s), 0)).collect();
        // The shards with most slots keep the remainder: the fewest slots migrate.
        wants.sort_by_key(|(shard, has, _)| (usize::MAX - has, *shard));
        for (at, want) in wants.iter_mut().enumerate() {
            want.2 = total / shards.len().max(1) + usize::from(at < total % shards.len().max(1));
        }
        let mut planned: Vec<(u16, u16, SlotSet)> = Vec::new();
        let (mut surplus_shards, mut deficit_shards) = (wants.clone(), wants);
        surplus_shards.retain(|(_, has, wants)| has > wants);
        deficit_shards.retain(|(_, has, wants)| has < wants);
        for (from, has, wants) in surplus_shards {
            let spare = (0..SLOTS as u16).rev().filter(|slot| owners[usize::from(*slot)] == from);
            let mut spare = spare.filter(|slot| !migrating_slots.contains(*slot)).take(has - wants);
            for (to, has, wants) in &mut deficit_shards {
                let slots: SlotSet = spare.by_ref().take(*wants - *has).collect();
                *has += slots.len();
                if !slots.is_empty() {
                    planned.push((from, *to, slots));
                }
            }
        }
        planned
    }

    /// The map after a change that the primary of shard `me` received.
    pub(crate) fn changed(&self, me: u16, change: &MapChange) -> Result<Self, Error> {
        let mut owners = self.owners();
        let mut moving = self.moving.clone();
        let owner = |slot: &u16| self.owners()[usize::from(*slot)];
        let migrating_slots = self.migrating_slots();
        if let Some(slot) = change.slots().into_iter().find(|slot| migrating_slots.contains(*slot)) {
            return Err(Error::err(format_args!("Slot {slot} is being moved; see moim slots status")));
        }
        let mut gained = self.gained.clone();
        match change {
            MapChange::Import(slot, from) => {
                if owner(slot) == me {
                    return Err(Error::err(format_args!("I'm already the owner of hash slot {slot}")));
                }
                moving.retain(|(moving, ..)| moving != slot);
                moving.push((*slot, *from, me));
            }
            MapChange::Migrate(slot, to) => {
                if owner(slot) != me {
                    return Err(Error::err(format_args!("I'm not the owner of hash slot {slot}")));
                }
                moving.retain(|(moving, ..)| moving != slot);
                moving.push((*slot, me, *to));
            }
            MapChange::Assign(slot, to) => {
                if owners[usize::from(*slot)] != *to {
                    *gained.entry(*to).or_default() += 1;
                }
                owners[usize::from(*slot)] = *to;
                moving.retain(|(moving, ..)| moving != slot);
            }
            MapChange::Stable(slot) => moving.retain(|(moving, ..)| moving != slot),
            MapChange::Add(slots) => {
                for slot in slots {
                    if owner(slot) != UNASSIGNED {
                        return Err(Error::err(format_args!("Slot {slot} is already busy")));
                    }
                    owners[usize::from(*slot)] = me;
                }
            }
            MapChange::Remove(slots) => {
                for slot in slots {
                    if owner(slot) == UNASSIGNED {
                        return Err(Error::err(format_args!("Slot {slot} is already unassigned")));
                    }
                    owners[usize::from(*slot)] = UNASSIGNED;
                }
                moving.retain(|(moving, ..)| !slots.contains(moving));
            }
        }
        let changed = Self { gained, ..self.with_owners(&owners, moving) };
        let same = changed.ranges == self.ranges && changed.moving == self.moving;
        Ok(Self { epoch: self.epoch + u64::from(!same), ..changed })
    }

    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("numbers serialize").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_of_a_slot_sets_it_migrating() {
        let map = SlotMap::even(2);
        assert!(map.changed(0, &MapChange::Import(5, 1)).is_err());
        assert!(map.changed(1, &MapChange::Migrate(5, 0)).is_err());
        let moving = map.changed(1, &MapChange::Import(5, 0)).unwrap();
        assert_eq!((moving.moving.as_slice(), moving.epoch), (&[(5, 0, 1)][..], 2));
        let same = moving.changed(0, &MapChange::Migrate(5, 1)).unwrap();
        assert_eq!(same, moving, "both sides describe the same migration");
        let moved = moving.changed(1, &MapChange::Assign(5, 1)).unwrap();
        assert_eq!((moved.owners()[4], moved.owners()[5], moved.owners()[6]), (0, 1, 0));
        assert_eq!(moved.moving, []);
        assert!(moved.changed(0, &MapChange::Add(vec![5])).is_err());
        let free = moved.changed(0, &MapChange::Remove(vec![5, 6])).unwrap();
        assert!(free.changed(0, &MapChange::Remove(vec![5])).is_err());
        assert_eq!(free.changed(0, &MapChange::Add(vec![5, 6])).unwrap().owners(), map.owners());
    }

    #[test]
    fn a_migration_has_one_commit_point_and_two_outcomes() {
        let slots = SlotSet::of(&[(0, 9)]);
        let map = SlotMap::even(2).with_migration(0, 1, &slots).unwrap();
        assert!(map.with_migration(0, 1, &SlotSet::of(&[(9, 9)])).is_err(), "the slot migrates already");
        assert!(map.with_migration(1, 0, &SlotSet::of(&[(20, 20)])).is_err(), "the source is not the owner");
        assert!(map.changed(0, &MapChange::Migrate(5, 1)).is_err(), "SETSLOT is refused during a migration");
        assert_eq!(map.owners()[5], 0);
        let again = map.retried(1, 0).unwrap();
        assert_eq!(again.flipped(1, 0), None, "the source has thawed");
        let moved = again.flipped(1, 1).unwrap();
        assert_eq!((moved.owners()[9], moved.owners()[10], moved.epoch), (1, 0, map.epoch + 1));
        assert_eq!((moved.aborted(1), moved.retried(1, 1)), (None, None), "after the flip");
        let half = moved.settled(1, Side::Target).unwrap();
        assert_eq!((half.settled(1, Side::Target), half.migrations.len()), (None, 1));
        let over = half.settled(1, Side::Source).unwrap();
        assert_eq!(
            (over.migrations.len(), over.finished.len(), over.finished[0].phase),
            (0, 1, Phase::Moved)
        );
        let aborted = map.aborted(1).unwrap();
        assert_eq!((aborted.flipped(1, 0), aborted.owners()[5]), (None, 0));
        assert_eq!(SlotMap::decode(&half.encode()), Some(half));
        let old = br#"{"epoch":3,"ranges":[[0,16383,0]]}"#;
        assert_eq!(SlotMap::decode(old).unwrap().owners()[7], 0, "a record from before migrations existed");
    }

    #[test]
    fn migrations_that_share_a_shard_run_one_after_the_other() {
        let map = SlotMap::even(4)
            .with_migration(0, 1, &SlotSet::of(&[(0, 2999)]))
            .and_then(|map| map.with_migration(2, 3, &SlotSet::of(&[(8192, 8192)])))
            .and_then(|map| map.with_migration(3, 0, &SlotSet::of(&[(16_383, 16_383)])))
            .unwrap();
        assert_eq!(
            map.migrations.iter().map(|migration| migration.slots.len()).collect::<Vec<_>>(),
            [2048, 952, 1, 1]
        );
        assert_eq!(map.active().map(|migration| migration.id).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn rebalance_migrates_as_few_slots_as_possible() {
        let grown = SlotMap::even(1);
        let planned = grown.rebalance(&[0, 1, 2]);
        assert_eq!(
            planned.iter().map(|(from, to, s)| (*from, *to, s.len())).collect::<Vec<_>>(),
            [(0, 1, 5461), (0, 2, 5461)]
        );
        let mut map = grown;
        for (from, to, slots) in &planned {
            map = map.with_migration(*from, *to, slots).unwrap();
        }
        assert_eq!(map.rebalance(&[0, 1, 2]), [], "migrations in progress count as done");
        assert_eq!(SlotMap::even(3).rebalance(&[0, 1, 2]), []);
    }

    #[test]
    fn an_even_map_covers_every_slot_once() {
        for shards in [1, 2, 3, 7, 100] {
            let map = SlotMap::even(shards);
            let owners = map.owners();
            assert!(owners.iter().all(|owner| *owner < shards));
            let most = (0..shards).map(|s| owners.iter().filter(|o| **o == s).count()).max().unwrap();
            assert!(most <= SLOTS / usize::from(shards) + 1);
            assert_eq!(SlotMap::decode(&map.encode()), Some(map));
        }
    }
}
