//! The record of the slot map: runs of slots and their shards, slots that tools move by hand, and moves of our own.
//!
//! One record, changed by compare-and-swap: whatever is decided about a move (that it begins, that its slots change hands,
//! that it is tried again or given up) is one change of this record, and no two can be made at once.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::SLOTS;
use crate::cluster::NOBODY;
use crate::error::Error;
use crate::ops::MapChange;
use crate::slot_set::SlotSet;

/// Which shard owns which slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlotMap {
    /// Grows with every change.
    pub(crate) epoch: u64,
    /// First slot, last slot, shard.
    pub(crate) ranges: Vec<(u16, u16, u16)>,
    /// Slots on their way: slot, from, to.
    #[serde(default)]
    pub(crate) moving: Vec<(u16, u16, u16)>,
    /// Our own moves that are not over, in the order in which they were asked for.
    #[serde(default)]
    pub(crate) moves: Vec<Move>,
    /// The newest that are over, the last one last.
    #[serde(default)]
    pub(crate) over: Vec<Move>,
    /// The number of the newest move.
    #[serde(default)]
    pub(crate) last_move: u64,
    /// How often each shard was given slots: its configuration epoch grows with it.
    #[serde(default)]
    pub(crate) gained: BTreeMap<u16, u64>,
}

/// Where a move stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// The target takes the keys in; the source serves them, or holds them in the end.
    Copying,
    /// The slots are the target's.
    Moved,
    /// The slots stay at the source.
    Aborted,
}

/// One move of slots from a shard to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Move {
    /// Its number; no other move of this cluster has it.
    pub(crate) id: u64,
    /// Who gives.
    pub(crate) from: u16,
    /// Who gets.
    pub(crate) to: u16,
    /// What.
    pub(crate) slots: SlotSet,
    /// Where it stands.
    pub(crate) phase: Phase,
    /// Grows whenever the source stops waiting for the target: what was frozen under an older one may thaw.
    pub(crate) attempt: u32,
    /// The source has thawed or dropped them.
    pub(crate) source_done: bool,
    /// The target serves them or has discarded them.
    pub(crate) target_done: bool,
}

/// Who of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

/// Slots of one move at most: what an interrupted move has to do again is bounded.
const MOVE_SLOTS: usize = 2048;
/// Moves that are over and still shown.
const SHOWN: usize = 64;

impl SlotMap {
    /// The slots shared out evenly.
    pub(crate) fn even(shards: u16) -> Self {
        let at = |n: u16| (SLOTS * usize::from(n) / usize::from(shards)) as u16;
        let ranges = (0..shards).map(|shard| (at(shard), at(shard + 1).wrapping_sub(1), shard)).collect();
        Self { epoch: 1, ranges, ..Self::default() }
    }

    /// By slot.
    pub(crate) fn owners(&self) -> Vec<u16> {
        let mut owners = vec![NOBODY; SLOTS];
        for (first, last, shard) in &self.ranges {
            if let Some(run) = owners.get_mut(usize::from(*first)..=usize::from(*last)) {
                run.fill(*shard);
            }
        }
        owners
    }

    fn with_owners(&self, owners: &[u16], moving: Vec<(u16, u16, u16)>) -> Self {
        let mut ranges: Vec<(u16, u16, u16)> = Vec::new();
        for (slot, owner) in owners.iter().enumerate().filter(|(_, owner)| **owner != NOBODY) {
            let slot = slot as u16;
            match ranges.last_mut() {
                Some((_, last, shard)) if *shard == *owner && *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot, *owner)),
            }
        }
        Self { ranges, moving, ..self.clone() }
    }

    /// The move with this number, if it is not over.
    pub(crate) fn find(&self, id: u64) -> Option<&Move> {
        self.moves.iter().find(|one| one.id == id)
    }

    /// The moves that may be worked on: the others wait for an earlier one with the same shard.
    pub(crate) fn active(&self) -> impl Iterator<Item = &Move> {
        self.moves
            .iter()
            .enumerate()
            .filter(|(at, one)| {
                let shares =
                    |other: &Move| [other.from, other.to].iter().any(|s| [one.from, one.to].contains(s));
                !self.moves[..*at].iter().any(shares)
            })
            .map(|(_, one)| one)
    }

    /// The slots that moves of our own are about.
    fn under_way(&self) -> SlotSet {
        let mut slots = SlotSet::default();
        self.moves.iter().for_each(|one| slots.add(&one.slots));
        slots
    }

    /// The map with more moves: `slots` shall go from a shard to another.
    pub(crate) fn with_move(&self, from: u16, to: u16, slots: &SlotSet) -> Result<Self, String> {
        if from == to {
            return Err("the slots are there already".to_owned());
        }
        let (owners, under_way) = (self.owners(), self.under_way());
        for slot in slots.iter() {
            if owners[usize::from(slot)] != from {
                return Err(format!("slot {slot} does not belong to shard {from}"));
            }
            if under_way.contains(slot) || self.moving.iter().any(|(moving, ..)| *moving == slot) {
                return Err(format!("slot {slot} is being moved already"));
            }
        }
        let mut map = self.clone();
        for slots in slots.iter().collect::<Vec<_>>().chunks(MOVE_SLOTS) {
            map.last_move += 1;
            let slots = slots.iter().copied().collect();
            map.moves.push(Move {
                id: map.last_move,
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

    fn with(&self, id: u64, edit: impl FnOnce(&mut Move)) -> Self {
        let mut map = self.clone();
        if let Some(one) = map.moves.iter_mut().find(|one| one.id == id) {
            edit(one);
        }
        map
    }

    /// The commit point: the slots of a move are the target's. `None` when they may not become so any more.
    pub(crate) fn flipped(&self, id: u64, attempt: u32) -> Option<Self> {
        let one = self.find(id).filter(|one| one.phase == Phase::Copying && one.attempt == attempt)?;
        let mut owners = self.owners();
        one.slots.iter().for_each(|slot| owners[usize::from(slot)] = one.to);
        let mut map = self.with_owners(&owners, self.moving.clone()).with(id, |one| one.phase = Phase::Moved);
        map.epoch += 1;
        *map.gained.entry(one.to).or_default() += 1;
        Some(map)
    }

    /// The source waits for the target no more; the move begins its last steps anew.
    pub(crate) fn retried(&self, id: u64, attempt: u32) -> Option<Self> {
        self.find(id).filter(|one| one.phase == Phase::Copying && one.attempt == attempt)?;
        Some(self.with(id, |one| one.attempt += 1))
    }

    /// A move is given up. `None` when it is too late, or over.
    pub(crate) fn aborted(&self, id: u64) -> Option<Self> {
        self.find(id).filter(|one| one.phase == Phase::Copying)?;
        Some(self.with(id, |one| one.phase = Phase::Aborted))
    }

    /// A side has done what the outcome asks of it. `None` when that is known.
    pub(crate) fn settled(&self, id: u64, side: Side) -> Option<Self> {
        let one = self.find(id).filter(|one| one.phase != Phase::Copying)?;
        let known = if side == Side::Source { one.source_done } else { one.target_done };
        if known {
            return None;
        }
        let mut map = self.with(id, |one| match side {
            Side::Source => one.source_done = true,
            Side::Target => one.target_done = true,
        });
        let is_over = |one: &Move| one.source_done && one.target_done;
        map.over.extend(map.moves.iter().filter(|one| is_over(one)).cloned());
        map.moves.retain(|one| !is_over(one));
        let surplus = map.over.len().saturating_sub(SHOWN);
        map.over.drain(..surplus);
        Some(map)
    }

    /// So many slots of a shard that are free to move, the highest first.
    pub(crate) fn some_of(&self, shard: u16, count: usize) -> SlotSet {
        let (owners, under_way) = (self.owners(), self.under_way());
        let is_moving = |slot: u16| self.moving.iter().any(|(moving, ..)| *moving == slot);
        let free = |slot: &u16| {
            owners[usize::from(*slot)] == shard && !under_way.contains(*slot) && !is_moving(*slot)
        };
        (0..SLOTS as u16).rev().filter(free).take(count).collect()
    }

    /// The moves that give every shard the same number of slots, or as nearly: (from, to, slots). Those under way count as
    /// done.
    pub(crate) fn evening(&self, shards: &[u16]) -> Vec<(u16, u16, SlotSet)> {
        let mut owners = self.owners();
        for one in &self.moves {
            if one.phase != Phase::Aborted {
                one.slots.iter().for_each(|slot| owners[usize::from(slot)] = one.to);
            }
        }
        let mut under_way = self.under_way();
        self.moving.iter().for_each(|(slot, ..)| under_way.insert(*slot));
        let count = |shard: u16| owners.iter().filter(|owner| **owner == shard).count();
        let total = owners.iter().filter(|owner| shards.contains(owner)).count();
        let mut wants: Vec<(u16, usize, usize)> = shards.iter().map(|s| (*s, count(*s), 0)).collect();
        // Those that have most keep the odd ones: the fewest slots move.
        wants.sort_by_key(|(shard, has, _)| (usize::MAX - has, *shard));
        for (at, want) in wants.iter_mut().enumerate() {
            want.2 = total / shards.len().max(1) + usize::from(at < total % shards.len().max(1));
        }
        let mut moves: Vec<(u16, u16, SlotSet)> = Vec::new();
        let (mut rich, mut poor) = (wants.clone(), wants);
        rich.retain(|(_, has, wants)| has > wants);
        poor.retain(|(_, has, wants)| has < wants);
        for (from, has, wants) in rich {
            let spare = (0..SLOTS as u16).rev().filter(|slot| owners[usize::from(*slot)] == from);
            let mut spare = spare.filter(|slot| !under_way.contains(*slot)).take(has - wants);
            for (to, has, wants) in &mut poor {
                let slots: SlotSet = spare.by_ref().take(*wants - *has).collect();
                *has += slots.len();
                if !slots.is_empty() {
                    moves.push((from, *to, slots));
                }
            }
        }
        moves
    }

    /// The map after a change that the primary of shard `me` was asked for.
    pub(crate) fn changed(&self, me: u16, change: &MapChange) -> Result<Self, Error> {
        let mut owners = self.owners();
        let mut moving = self.moving.clone();
        let owner = |slot: &u16| self.owners()[usize::from(*slot)];
        let under_way = self.under_way();
        if let Some(slot) = change.slots().into_iter().find(|slot| under_way.contains(*slot)) {
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
                    if owner(slot) != NOBODY {
                        return Err(Error::err(format_args!("Slot {slot} is already busy")));
                    }
                    owners[usize::from(*slot)] = me;
                }
            }
            MapChange::Remove(slots) => {
                for slot in slots {
                    if owner(slot) == NOBODY {
                        return Err(Error::err(format_args!("Slot {slot} is already unassigned")));
                    }
                    owners[usize::from(*slot)] = NOBODY;
                }
                moving.retain(|(moving, ..)| !slots.contains(moving));
            }
        }
        let changed = Self { gained, ..self.with_owners(&owners, moving) };
        let same = changed.ranges == self.ranges && changed.moving == self.moving;
        Ok(Self { epoch: self.epoch + u64::from(!same), ..changed })
    }

    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("numbers can be written down").into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_move_and_only_their_owner_gives_them_away() {
        let map = SlotMap::even(2);
        assert!(map.changed(0, &MapChange::Import(5, 1)).is_err());
        assert!(map.changed(1, &MapChange::Migrate(5, 0)).is_err());
        let moving = map.changed(1, &MapChange::Import(5, 0)).unwrap();
        assert_eq!((moving.moving.as_slice(), moving.epoch), (&[(5, 0, 1)][..], 2));
        let same = moving.changed(0, &MapChange::Migrate(5, 1)).unwrap();
        assert_eq!(same, moving, "both sides say the same");
        let moved = moving.changed(1, &MapChange::Assign(5, 1)).unwrap();
        assert_eq!((moved.owners()[4], moved.owners()[5], moved.owners()[6]), (0, 1, 0));
        assert_eq!(moved.moving, []);
        assert!(moved.changed(0, &MapChange::Add(vec![5])).is_err());
        let free = moved.changed(0, &MapChange::Remove(vec![5, 6])).unwrap();
        assert!(free.changed(0, &MapChange::Remove(vec![5])).is_err());
        assert_eq!(free.changed(0, &MapChange::Add(vec![5, 6])).unwrap().owners(), map.owners());
    }

    #[test]
    fn a_move_has_one_commit_point_and_two_ends() {
        let slots = SlotSet::of(&[(0, 9)]);
        let map = SlotMap::even(2).with_move(0, 1, &slots).unwrap();
        assert!(map.with_move(0, 1, &SlotSet::of(&[(9, 9)])).is_err(), "it is being moved");
        assert!(map.with_move(1, 0, &SlotSet::of(&[(20, 20)])).is_err(), "it is not theirs");
        assert!(map.changed(0, &MapChange::Migrate(5, 1)).is_err(), "tools keep away");
        assert_eq!(map.owners()[5], 0);
        let again = map.retried(1, 0).unwrap();
        assert_eq!(again.flipped(1, 0), None, "the source has thawed");
        let moved = again.flipped(1, 1).unwrap();
        assert_eq!((moved.owners()[9], moved.owners()[10], moved.epoch), (1, 0, map.epoch + 1));
        assert_eq!((moved.aborted(1), moved.retried(1, 1)), (None, None), "too late");
        let half = moved.settled(1, Side::Target).unwrap();
        assert_eq!((half.settled(1, Side::Target), half.moves.len()), (None, 1));
        let over = half.settled(1, Side::Source).unwrap();
        assert_eq!((over.moves.len(), over.over.len(), over.over[0].phase), (0, 1, Phase::Moved));
        let aborted = map.aborted(1).unwrap();
        assert_eq!((aborted.flipped(1, 0), aborted.owners()[5]), (None, 0));
        assert_eq!(SlotMap::decode(&half.encode()), Some(half));
        let old = br#"{"epoch":3,"ranges":[[0,16383,0]]}"#;
        assert_eq!(SlotMap::decode(old).unwrap().owners()[7], 0, "of before there were moves");
    }

    #[test]
    fn moves_that_share_a_shard_wait_for_each_other() {
        let map = SlotMap::even(4)
            .with_move(0, 1, &SlotSet::of(&[(0, 2999)]))
            .and_then(|map| map.with_move(2, 3, &SlotSet::of(&[(8192, 8192)])))
            .and_then(|map| map.with_move(3, 0, &SlotSet::of(&[(16_383, 16_383)])))
            .unwrap();
        assert_eq!(map.moves.iter().map(|one| one.slots.len()).collect::<Vec<_>>(), [2048, 952, 1, 1]);
        assert_eq!(map.active().map(|one| one.id).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn evening_out_moves_as_few_slots_as_can_be() {
        let grown = SlotMap::even(1);
        let moves = grown.evening(&[0, 1, 2]);
        assert_eq!(
            moves.iter().map(|(from, to, s)| (*from, *to, s.len())).collect::<Vec<_>>(),
            [(0, 1, 5461), (0, 2, 5461)]
        );
        let mut map = grown;
        for (from, to, slots) in &moves {
            map = map.with_move(*from, *to, slots).unwrap();
        }
        assert_eq!(map.evening(&[0, 1, 2]), [], "what is under way counts");
        assert_eq!(SlotMap::even(3).evening(&[0, 1, 2]), []);
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
