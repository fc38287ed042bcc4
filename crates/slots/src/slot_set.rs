//! A set of slots: which ones a move takes, holds back, or has yet to bring.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SLOTS;

const WORDS: usize = SLOTS / 64;

/// Some of the 16384 slots.
#[derive(Clone, PartialEq, Eq)]
pub struct SlotSet(Box<[u64; WORDS]>);

impl Default for SlotSet {
    fn default() -> Self {
        Self(Box::new([0; WORDS]))
    }
}

/// What is no list of slots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of slots such as 0-99,200; slots go from 0 to 16383")]
pub struct NoSlots(pub String);

impl SlotSet {
    /// The slots of these runs: first and last of each. Slots that are none are left out.
    pub fn of(ranges: &[(u16, u16)]) -> Self {
        let mut set = Self::default();
        for (first, last) in ranges {
            (*first..=*last).for_each(|slot| set.insert(slot));
        }
        set
    }

    /// Reads `0-99,200`.
    pub fn parse(text: &str) -> Result<Self, NoSlots> {
        let wrong = || NoSlots(text.to_owned());
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

    /// Whether a slot is in it.
    #[inline]
    pub fn contains(&self, slot: u16) -> bool {
        self.0.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Takes a slot in.
    pub fn insert(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word |= 1 << (slot % 64);
        }
    }

    /// Lets a slot go.
    pub fn remove(&mut self, slot: u16) {
        if let Some(word) = self.0.get_mut(usize::from(slot) / 64) {
            *word &= !(1 << (slot % 64));
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0..SLOTS as u16).filter(|slot| self.contains(*slot))
    }

    /// Takes in all of another.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0.iter()).for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// Lets all of another go.
    pub fn subtract(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0.iter()).for_each(|(mine, theirs)| *mine &= !theirs);
    }

    /// Whether they have a slot in common.
    pub fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0.iter()).any(|(mine, theirs)| mine & theirs != 0)
    }

    /// As runs: first and last.
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
    fn slots_are_read_and_written_as_people_write_them() {
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
    fn sets_join_and_part() {
        let (mut one, two) = (SlotSet::of(&[(0, 63), (64, 64)]), SlotSet::of(&[(60, 70)]));
        assert_eq!((one.len(), one.meets(&two), one.contains(64), one.contains(65)), (65, true, true, false));
        one.subtract(&two);
        assert_eq!((one.to_string(), one.meets(&two)), ("0-59".to_owned(), false));
        one.add(&two);
        assert_eq!(one.ranges(), [(0, 70)]);
    }
}
