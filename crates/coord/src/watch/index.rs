//! Index from a key to its watchers: a hash lookup for single-key watchers, an interval tree for ranges.
//!
//! The tree is a treap ordered by range start (and end), with the farthest end of each subtree in its root. A search
//! skips every subtree whose farthest end is at or before the key, so it costs the depth for each range found, however
//! many there are. Watchers of the same range share a node.
//!
//! Priorities come from a counter through a mixing function, not from a random generator: the shape has no meaning, but
//! a simulation must be reproducible. A client that chooses ranges cannot choose priorities.

use std::cmp::Ordering;

use bytes::Bytes;
use hashbrown::HashMap;

use crate::range::{KeyRange, RangeEnd};

use super::WatcherId;

/// The watchers of one key space by range.
#[derive(Debug, Default)]
pub(super) struct WatchIndex {
    /// Invariant: no list is empty; lists are sorted.
    exact: HashMap<Bytes, Vec<WatcherId>>,
    ranges: Intervals,
}

impl WatchIndex {
    pub(super) fn insert(&mut self, range: &KeyRange, id: WatcherId) {
        let list = match &range.end {
            RangeEnd::Single => self.exact.entry(range.start.clone()).or_default(),
            RangeEnd::Before(end) => self.ranges.watchers_of(&range.start, Some(end)),
            RangeEnd::Open => self.ranges.watchers_of(&range.start, None),
        };
        if let Err(at) = list.binary_search(&id) {
            list.insert(at, id);
        }
    }

    pub(super) fn remove(&mut self, range: &KeyRange, id: WatcherId) {
        match &range.end {
            RangeEnd::Single => {
                if let Some(list) = self.exact.get_mut(&range.start) {
                    take(list, id);
                    if list.is_empty() {
                        self.exact.remove(&range.start);
                    }
                }
            }
            RangeEnd::Before(end) => self.ranges.remove(&range.start, Some(end), id),
            RangeEnd::Open => self.ranges.remove(&range.start, None, id),
        }
    }

    /// Appends every watcher of this key.
    pub(super) fn find(&self, key: &[u8], found: &mut Vec<WatcherId>) {
        if let Some(list) = self.exact.get(key) {
            found.extend_from_slice(list);
        }
        self.ranges.find(self.ranges.root, key, found);
    }
}

fn take(list: &mut Vec<WatcherId>, id: WatcherId) {
    if let Ok(at) = list.binary_search(&id) {
        list.remove(at);
    }
}

const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Node {
    start: Bytes,
    /// `None` is unbounded.
    end: Option<Bytes>,
    /// The farthest end in this subtree.
    farthest: Option<Bytes>,
    priority: u64,
    left: usize,
    right: usize,
    watchers: Vec<WatcherId>,
}

#[derive(Debug)]
struct Intervals {
    nodes: Vec<Node>,
    free: Vec<usize>,
    root: usize,
    created_nodes: u64,
}

impl Default for Intervals {
    fn default() -> Self {
        Self { nodes: Vec::new(), free: Vec::new(), root: NONE, created_nodes: 0 }
    }
}

impl Intervals {
    /// The watcher list of a range, created if missing.
    fn watchers_of(&mut self, start: &Bytes, end: Option<&Bytes>) -> &mut Vec<WatcherId> {
        let mut at = self.root;
        while at != NONE {
            match self.compare(start, end, at) {
                Ordering::Less => at = self.nodes[at].left,
                Ordering::Greater => at = self.nodes[at].right,
                Ordering::Equal => break,
            }
        }
        if at == NONE {
            at = self.make(start, end);
            self.root = self.insert(self.root, at);
        }
        &mut self.nodes[at].watchers
    }

    fn make(&mut self, start: &Bytes, end: Option<&Bytes>) -> usize {
        self.created_nodes += 1;
        let node = Node {
            // Copied: a slice would keep the request alive as long as the watcher.
            start: Bytes::copy_from_slice(start),
            end: end.map(|end| Bytes::copy_from_slice(end)),
            farthest: end.cloned(),
            priority: mix(self.created_nodes),
            left: NONE,
            right: NONE,
            watchers: Vec::new(),
        };
        match self.free.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    fn compare(&self, start: &[u8], end: Option<&Bytes>, at: usize) -> Ordering {
        let node = &self.nodes[at];
        start.cmp(&node.start).then_with(|| compare_ends(end, node.end.as_ref()))
    }

    fn insert(&mut self, root: usize, new: usize) -> usize {
        if root == NONE {
            return new;
        }
        let (start, end) = (self.nodes[new].start.clone(), self.nodes[new].end.clone());
        if self.compare(&start, end.as_ref(), root) == Ordering::Less {
            let left = self.insert(self.nodes[root].left, new);
            self.nodes[root].left = left;
            if self.nodes[left].priority > self.nodes[root].priority {
                return self.rotate_right(root);
            }
        } else {
            let right = self.insert(self.nodes[root].right, new);
            self.nodes[root].right = right;
            if self.nodes[right].priority > self.nodes[root].priority {
                return self.rotate_left(root);
            }
        }
        self.update_farthest(root);
        root
    }

    fn rotate_right(&mut self, root: usize) -> usize {
        let top = self.nodes[root].left;
        self.nodes[root].left = self.nodes[top].right;
        self.nodes[top].right = root;
        self.update_farthest(root);
        self.update_farthest(top);
        top
    }

    fn rotate_left(&mut self, root: usize) -> usize {
        let top = self.nodes[root].right;
        self.nodes[root].right = self.nodes[top].left;
        self.nodes[top].left = root;
        self.update_farthest(root);
        self.update_farthest(top);
        top
    }

    /// Recomputes the farthest end of a node from its own and its children's.
    fn update_farthest(&mut self, at: usize) {
        let node = &self.nodes[at];
        let mut farthest = node.end.as_ref();
        for child in [node.left, node.right] {
            if child != NONE {
                let below = self.nodes[child].farthest.as_ref();
                if compare_ends(below, farthest) == Ordering::Greater {
                    farthest = below;
                }
            }
        }
        self.nodes[at].farthest = farthest.cloned();
    }

    fn remove(&mut self, start: &[u8], end: Option<&Bytes>, id: WatcherId) {
        self.root = self.remove_below(self.root, start, end, id);
    }

    fn remove_below(&mut self, root: usize, start: &[u8], end: Option<&Bytes>, id: WatcherId) -> usize {
        if root == NONE {
            return NONE;
        }
        match self.compare(start, end, root) {
            Ordering::Less => {
                let left = self.remove_below(self.nodes[root].left, start, end, id);
                self.nodes[root].left = left;
            }
            Ordering::Greater => {
                let right = self.remove_below(self.nodes[root].right, start, end, id);
                self.nodes[root].right = right;
            }
            Ordering::Equal => {
                take(&mut self.nodes[root].watchers, id);
                if self.nodes[root].watchers.is_empty() {
                    let (left, right) = (self.nodes[root].left, self.nodes[root].right);
                    self.free.push(root);
                    return self.merge(left, right);
                }
            }
        }
        self.update_farthest(root);
        root
    }

    /// Merges two trees; every range in `left` is before every range in `right`.
    fn merge(&mut self, left: usize, right: usize) -> usize {
        if left == NONE {
            return right;
        }
        if right == NONE {
            return left;
        }
        if self.nodes[left].priority > self.nodes[right].priority {
            let below = self.merge(self.nodes[left].right, right);
            self.nodes[left].right = below;
            self.update_farthest(left);
            left
        } else {
            let below = self.merge(left, self.nodes[right].left);
            self.nodes[right].left = below;
            self.update_farthest(right);
            right
        }
    }

    fn find(&self, at: usize, key: &[u8], found: &mut Vec<WatcherId>) {
        if at == NONE || !is_before(key, self.nodes[at].farthest.as_ref()) {
            return;
        }
        let node = &self.nodes[at];
        self.find(node.left, key, found);
        if key >= &node.start[..] {
            if is_before(key, node.end.as_ref()) {
                found.extend_from_slice(&node.watchers);
            }
            self.find(node.right, key, found);
        }
    }
}

fn is_before(key: &[u8], end: Option<&Bytes>) -> bool {
    end.is_none_or(|end| key < &end[..])
}

/// Compares ends; an unbounded end is after all others.
fn compare_ends(a: Option<&Bytes>, b: Option<&Bytes>) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => a.cmp(b),
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Greater,
        (Some(_), None) => Ordering::Less,
    }
}

/// Spreads a counter over all 64 bits (the finishing steps of SplitMix64).
fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inserts and removes many ranges and compares every lookup with a linear scan.
    #[test]
    fn interval_lookup_matches_linear_scan() {
        let letter = |n: u64| Bytes::from(vec![b'a' + (n % 12) as u8]);
        let mut index = WatchIndex::default();
        let mut all: Vec<(WatcherId, KeyRange)> = Vec::new();
        for step in 0..3_000_u64 {
            let dice = mix(step + 1);
            if dice % 5 < 3 || all.is_empty() {
                let start = letter(dice >> 8);
                let end = match dice >> 16 & 3 {
                    0 => RangeEnd::Single,
                    1 => RangeEnd::Open,
                    _ => RangeEnd::Before(letter(dice >> 24)),
                };
                let range = KeyRange { start, end };
                if !range.is_empty() {
                    index.insert(&range, WatcherId(step));
                    all.push((WatcherId(step), range));
                }
            } else {
                let (id, range) = all.swap_remove((dice >> 8) as usize % all.len());
                index.remove(&range, id);
            }
            if step == 2_500 {
                for (id, range) in all.drain(..) {
                    index.remove(&range, id);
                }
                assert!(index.exact.is_empty() && index.ranges.root == NONE);
            }
            for n in 0..12 {
                let key = letter(n);
                let mut found = Vec::new();
                index.find(&key, &mut found);
                found.sort_unstable();
                let mut expected: Vec<_> =
                    all.iter().filter(|(_, range)| range.contains(&key)).map(|(id, _)| *id).collect();
                expected.sort_unstable();
                assert_eq!(found, expected, "step {step}, key {key:?}");
            }
        }
    }

    /// A hundred thousand nested and adjacent ranges keep the tree shallow.
    #[test]
    fn interval_tree_stays_balanced() {
        fn depth(tree: &Intervals, at: usize) -> usize {
            if at == NONE {
                return 0;
            }
            1 + depth(tree, tree.nodes[at].left).max(depth(tree, tree.nodes[at].right))
        }
        let mut index = WatchIndex::default();
        for n in 0..100_000_u64 {
            let start = Bytes::from(format!("key/{n:08}"));
            let end = RangeEnd::Before(Bytes::from(format!("key/{n:08}0")));
            index.insert(&KeyRange { start, end }, WatcherId(n));
        }
        let depth = depth(&index.ranges, index.ranges.root);
        assert!(depth < 64, "depth {depth}");
    }
}
