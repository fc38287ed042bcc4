//! The record of the slot map: runs of slots and their shards.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::SLOTS;
use crate::cluster::NOBODY;
use crate::error::Error;
use crate::ops::MapChange;

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
}

impl SlotMap {
    /// The slots shared out evenly.
    pub(crate) fn even(shards: u16) -> Self {
        let at = |n: u16| (SLOTS * usize::from(n) / usize::from(shards)) as u16;
        let ranges = (0..shards).map(|shard| (at(shard), at(shard + 1).wrapping_sub(1), shard)).collect();
        Self { epoch: 1, ranges, moving: Vec::new() }
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

    fn from_owners(owners: &[u16], moving: Vec<(u16, u16, u16)>, epoch: u64) -> Self {
        let mut ranges: Vec<(u16, u16, u16)> = Vec::new();
        for (slot, owner) in owners.iter().enumerate().filter(|(_, owner)| **owner != NOBODY) {
            let slot = slot as u16;
            match ranges.last_mut() {
                Some((_, last, shard)) if *shard == *owner && *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot, *owner)),
            }
        }
        Self { epoch, ranges, moving }
    }

    /// The map after a change that the primary of shard `me` was asked for.
    pub(crate) fn changed(&self, me: u16, change: &MapChange) -> Result<Self, Error> {
        let mut owners = self.owners();
        let mut moving = self.moving.clone();
        let owner = |slot: &u16| self.owners()[usize::from(*slot)];
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
        let changed = Self::from_owners(&owners, moving, self.epoch);
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
