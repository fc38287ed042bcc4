//! Intset: sorted integers in one allocation, each as wide as the widest needs.

/// A set of integers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntSet {
    /// Invariant: strictly ascending numbers of `width` bytes each, little-endian.
    bytes: Vec<u8>,
    width: u8,
}

impl IntSet {
    /// An empty set. Does not allocate.
    pub fn new() -> IntSet {
        IntSet { bytes: Vec::new(), width: 2 }
    }

    /// Number of integers.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.width.max(2) as usize
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        self.bytes.capacity()
    }

    /// The integer at `index`, in ascending order.
    pub fn get(&self, index: usize) -> i64 {
        let at = index * self.width as usize;
        let bytes = &self.bytes[at..at + self.width as usize];
        match *bytes {
            [a, b] => i64::from(i16::from_le_bytes([a, b])),
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => unreachable!("a width is 2, 4 or 8"),
        }
    }

    /// Binary search: the index of `number`, or where it would be inserted.
    pub fn search(&self, number: i64) -> Result<usize, usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle).cmp(&number) {
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Err(low)
    }

    /// True if `number` is in the set.
    pub fn contains(&self, number: i64) -> bool {
        self.search(number).is_ok()
    }

    /// Adds a number; returns true if it is new.
    pub fn insert(&mut self, number: i64) -> bool {
        let Err(at) = self.search(number) else { return false };
        self.widen(width_of(number));
        let width = self.width as usize;
        self.bytes.reserve_exact(width);
        self.bytes.extend_from_slice(&number.to_le_bytes()[..width]);
        self.bytes[at * width..].rotate_right(width);
        true
    }

    /// Removes a number; returns true if it existed.
    pub fn remove(&mut self, number: i64) -> bool {
        let Ok(at) = self.search(number) else { return false };
        let width = self.width as usize;
        self.bytes.drain(at * width..(at + 1) * width);
        true
    }

    /// All numbers, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = i64> + Clone + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    fn widen(&mut self, width: u8) {
        if width <= self.width {
            return;
        }
        let mut bytes = Vec::with_capacity((self.len() + 1) * width as usize);
        self.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()[..width as usize]));
        *self = IntSet { bytes, width };
    }
}

fn width_of(number: i64) -> u8 {
    match number {
        number if i16::try_from(number).is_ok() => 2,
        number if i32::try_from(number).is_ok() => 4,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn intset_matches_model() {
        let mut random = fastrand::Rng::with_seed(9);
        for shift in [0, 8, 20, 50] {
            let (mut set, mut model) = (IntSet::new(), BTreeSet::new());
            for _ in 0..2000 {
                let number = (random.i64(-100..100) << random.u32(..=shift)).wrapping_add(random.i64(..3));
                if random.bool() {
                    assert_eq!(set.insert(number), model.insert(number));
                } else {
                    assert_eq!(set.remove(number), model.remove(&number));
                }
                assert_eq!(set.contains(number), model.contains(&number));
            }
            assert!(set.iter().eq(model.iter().copied()));
            assert_eq!(set.len(), model.len());
        }
    }
}
