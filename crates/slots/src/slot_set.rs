//! A set of hash slots, such as the slots of a migration.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SLOTS;

const WORDS: usize = SLOTS / 64;

/// A subset of the 16384 hash slots.
#[derive(Clone, PartialEq, Eq)]
pub struct SlotSet(Box<[u64; WORDS]>);

impl Default for SlotSet {
    fn default() -> Self {
        Self(Box::new([0; WORDS]))
    }
}

/// Not a valid list of slots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of slots such as 0-99,200; slots go from 0 to 16383")]
pub struct InvalidSlots(pub String);

impl SlotSet {
    /// The slots of the given ranges (first and last, inclusive). Invalid slots are ignored.
    pub fn of(ranges: &[(u16, u16)]) -> Self {
        let mut set = Self::default();
        for (first, last) in ranges {
            (*first..=*last).for_each(|slot| set.insert(slot));
        }
        set
    }

    /// Parses a list such as `0-99,200`.
    pub fn parse(text: &str) -> Result<Self, InvalidSlots> {
        let wrong = || InvalidSlots(text.to_owned());
        let number = |word: &str| -> Option<u16> {
            word.trim().parse().ok().filter(|slot| usize::from(*slot) < SLOTS)
        };
        let mut set = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = number(first).zip(number(last)).ok_or_else(wrong)?;
            if first > last {
                return Err(wrong());
            }
            (first..=last).for_each(|slot| set.insert(slot));
        }
        Ok(set)
    }

    /// True if the slot is in the set.
    #[inline]
    pub fn contains(&self, slot: u16) -> bool {
        self.0.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Adds a slot.
    pub fn insert(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word |= 1 << (slot % 64);
        }
    }

    /// Removes a slot.
    pub fn remove(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word &= !(1 << (slot % 64));
        }
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The slots in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0..SLOTS as u16).filter(|slot| self.contains(*slot))
    }

    /// Adds all slots of another set.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0.iter()).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// Removes all slots of another set.
    pub fn subtract(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0.iter()).for_each(|(mine, theirs)| *mine &= !theirs);
    }

    /// True if the sets have a slot in common.
    pub fn intersects(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0.iter()).any(|(mine, theirs)| mine & theirs != 0)
    }

    /// The set as ranges (first and last, inclusive).
    pub fn ranges(&self) -> Vec<(u16, u16)> {
        let mut ranges: Vec<(u16, u16)> = Vec::new();
        for slot in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot)),
            }
        }
        ranges
    }
}

impl FromIterator<u16> for SlotSet {
    fn from_iter<T: IntoIterator<Item = u16>>(slots: T) -> Self {
        let mut set = Self::default();
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }
}

impl fmt::Display for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.ranges().iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{self}]")
    }
}

impl Serialize for SlotSet {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'a> Deserialize<'a> for SlotSet {
    fn deserialize<D: Deserializer<'a>>(from: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_ranges_round_trip_as_text() {
        for (text, wanted) in [
            ("0-99,200", Some("0-99,200")),
            ("5,4,3", Some("3-5")),
            ("16383", Some("16383")),
            (" 1 - 2 , 7", Some("1-2,7")),
            ("", Some("")),
            ("16384", None),
            ("9-3", None),
            ("-1", None),
            ("x", None),
        ] {
            assert_eq!(SlotSet::parse(text).ok().map(|set| set.to_string()).as_deref(), wanted, "{text:?}");
        }
    }

    #[test]
    fn slot_sets_union_and_subtract() {
        let (mut one, two) = (SlotSet::of(&[(0, 63), (64, 64)]), SlotSet::of(&[(60, 70)]));
        assert_eq!(
            (one.len(), one.intersects(&two), one.contains(64), one.contains(65)),
            (65, true, true, false)
        );
        one.subtract(&two);
        assert_eq!((one.to_string(), one.intersects(&two)), ("0-59".to_owned(), false));
        one.add(&two);
        assert_eq!(one.ranges(), [(0, 70)]);
    }
}
