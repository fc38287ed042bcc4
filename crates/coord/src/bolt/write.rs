//! Writes the file in chunks while commands are applied.
//!
//! The meta pages name the roots, so the file is measured before it is written: one pass over all changes for their
//! sizes, one more for their bytes. Both passes see the same changes: the state reclaims nothing while the cursor
//! lives, and changes applied meanwhile are past the log end that the cursor recorded.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_grpc::etcd::KeyValue;
use prost::Message as _;

use super::page::{Page, branches, header, leaf_cost, pages_for, tree};
use super::{
    FILE_VERSION, FREELIST, IS_BUCKET, KEYS, LEASES, MAGIC, META, META_BUCKET, META_BYTES, PAGE_BYTES,
    PAGE_HEADER_BYTES, StoredLease, fnv1a,
};
use crate::request::Origin;
use crate::snapshot::SnapshotError;
use crate::space::Space;
use crate::space::log::Change;
use crate::state::State;

/// Changes processed in one step.
const STEP_CHANGES: usize = 1024;
/// Target size of a chunk.
const CHUNK_BYTES: usize = 64 << 10;
/// Buckets that etcd expects to exist, in order. Ours are filled in between.
const BUCKETS: [&str; 9] =
    ["alarm", "auth", "authRoles", "authUsers", "cluster", KEYS, LEASES, "members", META_BUCKET];

/// Flags, key, value.
type Element = (u32, Vec<u8>, Vec<u8>);

/// Result of a step.
pub(crate) enum Step {
    /// Nothing to send yet.
    Measuring,
    /// The next bytes of the file.
    Chunk(Bytes),
    /// The file is complete.
    Done,
}

/// A file that is being written.
pub(crate) struct BoltCursor {
    pin: Arc<()>,
    applied: u64,
    compact_revision: i64,
    /// The log positions in the file.
    log: std::ops::Range<u64>,
    leases: Vec<StoredLease>,
    /// The changes that are not in the log: revision, sub-number, key. Sorted once all are found.
    bases: Vec<(i64, u32, Bytes)>,
    leaves: Vec<LeafPlan>,
    /// Bytes of the leaf that is being measured.
    leaf_bytes: usize,
    total_bytes: u64,
    stage: Stage,
}

/// A leaf of the tree of keys.
struct LeafPlan {
    /// The number of its first change, among all.
    first: u64,
    key: Vec<u8>,
    pages: u32,
}

enum Stage {
    /// Finding the bases of keys after this one.
    Bases(Option<Bytes>),
    /// Measuring from this change on.
    Measure(u64),
    Front,
    /// Writing from this leaf on, whose page is known; then the pages after the leaves.
    Leaves {
        leaf: usize,
        page: u64,
        back: Bytes,
    },
    Back(Bytes),
    Done,
}

impl State {
    /// Begins a file of the current user keys.
    pub(crate) fn begin_bolt(&self) -> BoltCursor {
        let client = self.leases.by_id.iter().filter(|(_, lease)| lease.origin == Origin::Client);
        let seconds = |ms: i64| ms.div_euclid(1_000) + i64::from(ms.rem_euclid(1_000) > 0);
        let leases = client.map(|(id, lease)| StoredLease {
            id: id.0,
            ttl: seconds(lease.ttl_ms),
            remaining_ttl: seconds(lease.remaining_ms),
        });
        BoltCursor {
            pin: Arc::clone(&self.pin),
            applied: self.applied,
            compact_revision: self.user.compact_revision(),
            log: self.user.log().first()..self.user.log().next(),
            leases: leases.collect(),
            bases: Vec::new(),
            leaves: Vec::new(),
            leaf_bytes: 0,
            total_bytes: 0,
            stage: Stage::Bases(None),
        }
    }
}

impl BoltCursor {
    /// Size of the whole file in bytes; 0 until it is known.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The next step. Fails if `state` is not the one the file was begun on.
    pub(crate) fn step(&mut self, state: &State) -> Result<Step, SnapshotError> {
        if !Arc::ptr_eq(&self.pin, &state.pin) {
            return Err(SnapshotError::Replaced);
        }
        let space = &state.user;
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Bases(after) => {
                self.stage = self.find_bases(space, after);
                Ok(Step::Measuring)
            }
            Stage::Measure(from) => {
                self.stage = self.measure(space, from);
                Ok(Step::Measuring)
            }
            Stage::Front => Ok(Step::Chunk(self.write_front())),
            Stage::Leaves { leaf, page, back } => {
                Ok(self.write_leaves(space, leaf, page, back).map_or(Step::Measuring, Step::Chunk))
            }
            Stage::Back(bytes) => Ok(Step::Chunk(bytes)),
            Stage::Done => Ok(Step::Done),
        }
    }

    fn find_bases(&mut self, space: &Space, after: Option<Bytes>) -> Stage {
        let before = self.bases.len();
        for base in space.bases_after(after.as_ref()).take(STEP_CHANGES) {
            self.bases.push((base.version.revision, base.version.sub, base.key.clone()));
        }
        match self.bases[before..].last() {
            Some((_, _, key)) => Stage::Bases(Some(key.clone())),
            None => {
                self.bases.sort_unstable_by_key(|(revision, sub, _)| (*revision, *sub));
                Stage::Measure(0)
            }
        }
    }

    fn changes(&self) -> u64 {
        self.bases.len() as u64 + (self.log.end - self.log.start)
    }

    /// The change of this number, if it is still visible: compacted ones may not be reclaimed yet.
    fn change<'a>(&self, space: &'a Space, number: u64) -> Option<&'a Change> {
        let change = match self.bases.get(usize::try_from(number).ok()?) {
            Some((revision, _, key)) => space.get_at(key, *revision)?,
            None => space.log().get(self.log.start + (number - self.bases.len() as u64)),
        };
        let order = |change: &Change| (change.version.revision, change.version.sub);
        let is_visible = change.version.revision > self.compact_revision
            || space.get_at(&change.key, self.compact_revision).is_some_and(|it| order(it) == order(change));
        is_visible.then_some(change)
    }

    fn measure(&mut self, space: &Space, from: u64) -> Stage {
        let end = self.changes().min(from + STEP_CHANGES as u64);
        for number in from..end {
            let Some(change) = self.change(space, number) else { continue };
            let (key, value) = (key_of(change), to_kv(change));
            let cost = leaf_cost(key.len(), value.encoded_len());
            let fits = PAGE_HEADER_BYTES + self.leaf_bytes + cost <= PAGE_BYTES;
            match self.leaves.last_mut() {
                Some(last) if fits => {
                    self.leaf_bytes += cost;
                    last.pages = pages_for(self.leaf_bytes);
                }
                _ => {
                    self.leaves.push(LeafPlan { first: number, key, pages: pages_for(cost) });
                    self.leaf_bytes = cost;
                }
            }
        }
        if end < self.changes() { Stage::Measure(end) } else { Stage::Front }
    }

    /// The pages before the leaves. The rest of the file is then known except for the leaves' bytes.
    fn write_front(&mut self) -> Bytes {
        let mut next = 3;
        let mut small = Vec::new();
        let mut roots = BUCKETS.map(|name| match name {
            KEYS => 0,
            LEASES => tree(self.leases(), &mut next, &mut small),
            META_BUCKET => tree(self.meta_entries(), &mut next, &mut small),
            _ => tree([], &mut next, &mut small),
        });
        let first_leaf = next;
        let mut row = Vec::with_capacity(self.leaves.len());
        for leaf in &self.leaves {
            row.push((leaf.key.clone(), next));
            next += u64::from(leaf.pages);
        }
        let mut back = Vec::new();
        let keys =
            if row.is_empty() { tree([], &mut next, &mut back) } else { branches(row, &mut next, &mut back) };
        for (root, _) in roots.iter_mut().zip(BUCKETS).filter(|(_, name)| *name == KEYS) {
            *root = keys;
        }
        let buckets = BUCKETS.iter().zip(roots).map(|(name, root)| {
            // The root, and the bucket's sequence, which etcd does not use.
            let bucket = [root.to_le_bytes(), [0; 8]].concat();
            (IS_BUCKET, name.as_bytes().to_vec(), bucket)
        });
        let root = tree(buckets, &mut next, &mut back);

        let mut front = Vec::with_capacity(3 * PAGE_BYTES + small.len());
        for (page, transaction) in [(0, 2), (1, 1)] {
            write_meta(&mut front, page, transaction, root, next);
        }
        header(&mut front, 2, FREELIST, 0, 0);
        front.resize(3 * PAGE_BYTES, 0);
        front.extend_from_slice(&small);
        self.total_bytes = next * PAGE_BYTES as u64;
        self.stage = Stage::Leaves { leaf: 0, page: first_leaf, back: Bytes::from(back) };
        Bytes::from(front)
    }

    fn leases(&self) -> Vec<Element> {
        let stored = self.leases.iter();
        let mut leases: Vec<Element> =
            stored.map(|lease| (0, lease.id.to_be_bytes().to_vec(), lease.encode_to_vec())).collect();
        // Ids may be any 64 bits; a tree is in byte order.
        leases.sort_unstable();
        leases
    }

    /// The `meta` bucket of etcd.
    fn meta_entries(&self) -> Vec<Element> {
        let mut meta_entries = vec![
            (0, b"consistent_index".to_vec(), self.applied.to_be_bytes().to_vec()),
            (0, b"term".to_vec(), 1_u64.to_be_bytes().to_vec()),
        ];
        if self.compact_revision > 0 {
            let revision = revision_key(self.compact_revision, 0, false);
            meta_entries.push((0, b"finishedCompactRev".to_vec(), revision.clone()));
            meta_entries.push((0, b"scheduledCompactRev".to_vec(), revision));
        }
        meta_entries.sort_unstable();
        meta_entries
    }

    fn write_leaves(&mut self, space: &Space, mut leaf: usize, mut page: u64, back: Bytes) -> Option<Bytes> {
        let mut out = Vec::with_capacity(CHUNK_BYTES + PAGE_BYTES);
        while out.len() < CHUNK_BYTES && leaf < self.leaves.len() {
            let end = self.leaves.get(leaf + 1).map_or(self.changes(), |next| next.first);
            let mut filled = Page::leaf();
            for number in self.leaves[leaf].first..end {
                if let Some(change) = self.change(space, number) {
                    filled.push(0, key_of(change), to_kv(change).encode_to_vec());
                }
            }
            let pages = filled.write(page, &mut out);
            assert_eq!(pages, self.leaves[leaf].pages, "leaf differs from its measured size");
            page += u64::from(pages);
            leaf += 1;
        }
        self.stage =
            if leaf < self.leaves.len() { Stage::Leaves { leaf, page, back } } else { Stage::Back(back) };
        (!out.is_empty()).then(|| Bytes::from(out))
    }
}

fn write_meta(out: &mut Vec<u8>, page: u64, transaction: u64, root: u64, pages: u64) {
    let start = out.len();
    header(out, page, META, 0, 0);
    let meta = out.len();
    for field in [MAGIC, FILE_VERSION, PAGE_BYTES as u32, 0] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    // The root bucket and its sequence, the free list page, the number of pages, the transaction id.
    for field in [root, 0, 2, pages, transaction] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    assert_eq!(out.len() - meta, META_BYTES, "meta page size");
    let checksum = fnv1a(&out[meta..]);
    out.extend_from_slice(&checksum.to_le_bytes());
    out.resize(start + PAGE_BYTES, 0);
}

fn key_of(change: &Change) -> Vec<u8> {
    revision_key(change.version.revision, change.version.sub, !change.is_put())
}

/// etcd's key of a change: both numbers in big endian, so that bytes sort as they do, and a mark on deletions.
fn revision_key(revision: i64, sub: u32, deleted: bool) -> Vec<u8> {
    let mut key = Vec::with_capacity(18);
    key.extend_from_slice(&revision.to_be_bytes());
    key.push(b'_');
    key.extend_from_slice(&u64::from(sub).to_be_bytes());
    if deleted {
        key.push(b't');
    }
    key
}

/// A deletion has only its key.
fn to_kv(change: &Change) -> KeyValue {
    let version = &change.version;
    let Some(value) = &version.value else {
        return KeyValue { key: change.key.clone(), ..KeyValue::default() };
    };
    KeyValue {
        key: change.key.clone(),
        create_revision: version.create_revision,
        mod_revision: version.revision,
        version: version.version,
        value: value.bytes(),
        lease: version.lease.0,
    }
}
