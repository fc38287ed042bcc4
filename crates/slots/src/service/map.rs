//! The record of the slot map: runs of slots and their shards.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::SLOTS;
use crate::cluster::NOBODY;

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
