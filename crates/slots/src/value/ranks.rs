//! Order-statistic B-tree of scores: inner nodes count the items below them, which gives ranks.
//!
//! It holds `(score, id)`. The id is the member's position in the table beside the tree, and equal scores are ordered
//! by the members' bytes, so every operation takes the table's members for comparison.
//!
//! Invariant: items ascend by (score, member); `Child::count` and `Child::max` describe the subtree. The tree never
//! contains NaN.

use std::cmp::Ordering;

/// Maximum items of a leaf and children of an inner node.
const FULL: usize = 64;
/// Neighbours with at most this many items together are merged.
const JOIN: usize = FULL / 2;

/// A score and the position of its member.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Item {
    pub(crate) score: f64,
    pub(crate) id: u32,
}

/// Access to the members by id.
pub(crate) trait Members {
    /// The bytes of a member.
    fn member(&self, id: u32) -> &[u8];
}

/// The order-statistic tree.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    root: Node,
    len: usize,
}

#[derive(Clone, Debug)]
enum Node {
    Leaf(Vec<Item>),
    Inner(Vec<Child>),
}

#[derive(Clone, Debug)]
struct Child {
    count: usize,
    max: Item,
    node: Box<Node>,
}

/// The search key.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    score: f64,
    member: &'a [u8],
}

impl Wanted<'_> {
    fn compare(&self, item: Item, members: &impl Members) -> Ordering {
        match item.score.partial_cmp(&self.score) {
            Some(Ordering::Equal) | None => members.member(item.id).cmp(self.member),
            Some(order) => order,
        }
    }
}

impl Default for Ranks {
    fn default() -> Ranks {
        Ranks { root: Node::Leaf(Vec::new()), len: 0 }
    }
}

impl Ranks {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_size(&self) -> usize {
        // Nodes are two thirds full on average.
        self.len * size_of::<Item>() * 3 / 2 + self.len / 40 * size_of::<Child>() * 3 / 2
    }

    /// Inserts a new item.
    pub(crate) fn insert(&mut self, item: Item, members: &impl Members) {
        let wanted = Wanted { score: item.score, member: members.member(item.id) };
        if let Some(right) = self.root.insert(item, wanted, members) {
            let left = std::mem::replace(&mut self.root, Node::Leaf(Vec::new()));
            self.root = Node::Inner(vec![Child::of(left), Child::of(right)]);
        }
        self.len += 1;
    }

    /// Removes an existing item.
    pub(crate) fn remove(&mut self, score: f64, member: &[u8], members: &impl Members) {
        let removed = self.root.remove(Wanted { score, member }, members);
        assert!(removed, "a member in the table has its score in the tree");
        self.len -= 1;
        while let Node::Inner(children) = &mut self.root
            && children.len() == 1
            && let Some(child) = children.pop()
        {
            self.root = *child.node;
        }
    }

    /// Changes the id of an existing item.
    pub(crate) fn relabel(&mut self, score: f64, member: &[u8], id: u32, members: &impl Members) {
        self.root.relabel(Wanted { score, member }, id, members);
    }

    /// Number of items before this score and member.
    pub(crate) fn rank(&self, score: f64, member: &[u8], members: &impl Members) -> usize {
        let wanted = Wanted { score, member };
        self.partition(|item| wanted.compare(item, members) == Ordering::Less)
    }

    /// Number of items that satisfy `before`, which must hold for a prefix of them.
    pub(crate) fn partition(&self, before: impl Fn(Item) -> bool) -> usize {
        let (mut node, mut rank) = (&self.root, 0);
        loop {
            match node {
                Node::Leaf(items) => return rank + items.partition_point(|&item| before(item)),
                Node::Inner(children) => {
                    let at = children.partition_point(|child| before(child.max));
                    rank += children[..at].iter().map(|child| child.count).sum::<usize>();
                    match children.get(at) {
                        Some(child) => node = &child.node,
                        None => return rank,
                    }
                }
            }
        }
    }

    /// The leaf with the item of this rank, and its position in the leaf.
    fn leaf(&self, mut rank: usize) -> Option<(&[Item], usize)> {
        if rank >= self.len {
            return None;
        }
        let mut node = &self.root;
        loop {
            match node {
                Node::Leaf(items) => return Some((items, rank)),
                Node::Inner(children) => {
                    let mut found = None;
                    for child in children {
                        if rank < child.count {
                            found = Some(child);
                            break;
                        }
                        rank -= child.count;
                    }
                    node = &found?.node;
                }
            }
        }
    }

    /// The items of a rank range, from either end.
    pub(crate) fn range(&self, low: usize, high: usize) -> Range<'_> {
        let high = high.min(self.len);
        Range { ranks: self, low: low.min(high), high, front: &[], back: &[] }
    }
}

/// Iterator over items by rank. Each end loads a leaf at a time.
#[derive(Clone, Debug)]
pub(crate) struct Range<'a> {
    ranks: &'a Ranks,
    low: usize,
    high: usize,
    front: &'a [Item],
    back: &'a [Item],
}

impl Iterator for Range<'_> {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        if self.low >= self.high {
            return None;
        }
        if self.front.is_empty() {
            let (leaf, at) = self.ranks.leaf(self.low)?;
            self.front = &leaf[at..];
        }
        let (first, rest) = self.front.split_first()?;
        self.front = rest;
        self.low += 1;
        Some(*first)
    }
}

impl DoubleEndedIterator for Range<'_> {
    fn next_back(&mut self) -> Option<Item> {
        if self.low >= self.high {
            return None;
        }
        if self.back.is_empty() {
            let (leaf, at) = self.ranks.leaf(self.high - 1)?;
            self.back = &leaf[..=at];
        }
        let (last, rest) = self.back.split_last()?;
        self.back = rest;
        self.high -= 1;
        Some(*last)
    }
}

impl Child {
    fn of(node: Node) -> Child {
        let (count, max) = node.summary();
        Child { count, max, node: Box::new(node) }
    }

    fn refresh(&mut self) {
        (self.count, self.max) = self.node.summary();
    }
}

impl Node {
    fn summary(&self) -> (usize, Item) {
        match self {
            Node::Leaf(items) => (items.len(), items.last().copied().unwrap_or(Item { score: 0.0, id: 0 })),
            Node::Inner(children) => (
                children.iter().map(|child| child.count).sum(),
                children.last().map_or(Item { score: 0.0, id: 0 }, |child| child.max),
            ),
        }
    }

    fn width(&self) -> usize {
        match self {
            Node::Leaf(items) => items.len(),
            Node::Inner(children) => children.len(),
        }
    }

    /// Inserts an item; a node that exceeds its capacity splits off its right half.
    fn insert(&mut self, item: Item, wanted: Wanted<'_>, members: &impl Members) -> Option<Node> {
        match self {
            Node::Leaf(items) => {
                let at = items.partition_point(|&other| wanted.compare(other, members) == Ordering::Less);
                // Ascending scores are common: then the old leaf stays full and the new one starts empty.
                let split = if at == items.len() { FULL } else { FULL / 2 };
                items.insert(at, item);
                (items.len() > FULL).then(|| Node::Leaf(items.split_off(split)))
            }
            Node::Inner(children) => {
                let at = children
                    .partition_point(|child| wanted.compare(child.max, members) == Ordering::Less)
                    .min(children.len() - 1);
                let last = at + 1 == children.len();
                if let Some(right) = children[at].node.insert(item, wanted, members) {
                    children[at].refresh();
                    children.insert(at + 1, Child::of(right));
                } else {
                    children[at].count += 1;
                    children[at].max = children[at].node.summary_max();
                }
                let split = if last { FULL - FULL / 8 } else { FULL / 2 };
                (children.len() > FULL).then(|| Node::Inner(children.split_off(split)))
            }
        }
    }

    fn summary_max(&self) -> Item {
        match self {
            Node::Leaf(items) => items.last().copied(),
            Node::Inner(children) => children.last().map(|child| child.max),
        }
        .unwrap_or(Item { score: 0.0, id: 0 })
    }

    fn remove(&mut self, wanted: Wanted<'_>, members: &impl Members) -> bool {
        match self {
            Node::Leaf(items) => match items.binary_search_by(|&item| wanted.compare(item, members)) {
                Ok(at) => {
                    items.remove(at);
                    true
                }
                Err(_) => false,
            },
            Node::Inner(children) => {
                let at =
                    children.partition_point(|child| wanted.compare(child.max, members) == Ordering::Less);
                if at == children.len() || !children[at].node.remove(wanted, members) {
                    return false;
                }
                children[at].count -= 1;
                if children[at].count == 0 {
                    children.remove(at);
                } else {
                    children[at].max = children[at].node.summary_max();
                    join_neighbours(children, at);
                }
                true
            }
        }
    }

    fn relabel(&mut self, wanted: Wanted<'_>, id: u32, members: &impl Members) {
        match self {
            Node::Leaf(items) => {
                if let Ok(at) = items.binary_search_by(|&item| wanted.compare(item, members)) {
                    items[at].id = id;
                }
            }
            Node::Inner(children) => {
                let at =
                    children.partition_point(|child| wanted.compare(child.max, members) == Ordering::Less);
                if let Some(child) = children.get_mut(at) {
                    child.node.relabel(wanted, id, members);
                    child.max = child.node.summary_max();
                }
            }
        }
    }
}

fn join_neighbours(children: &mut Vec<Child>, at: usize) {
    let fits = |left: usize| {
        children.get(left + 1).is_some_and(|right| children[left].node.width() + right.node.width() <= JOIN)
    };
    let left = match at {
        at if fits(at) => at,
        at if at > 0 && fits(at - 1) => at - 1,
        _ => return,
    };
    let right = children.remove(left + 1);
    match (&mut *children[left].node, *right.node) {
        (Node::Leaf(items), Node::Leaf(more)) => items.extend(more),
        (Node::Inner(nodes), Node::Inner(more)) => nodes.extend(more),
        _ => unreachable!("all leaves are equally deep"),
    }
    children[left].refresh();
}
