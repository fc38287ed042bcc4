//! Reads a bbolt file from any writer: every offset and length in it is checked.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use moim_wire_grpc::etcd::KeyValue;
use prost::Message as _;

use super::{
    BRANCH, BUCKET_BYTES, ELEMENT_BYTES, FILE_VERSION, IS_BUCKET, KEYS, LEAF, LEASES, MAGIC, META_BUCKET,
    META_BYTES, PAGE_HEADER_BYTES, StoredLease, fnv1a,
};
use crate::lease::{Lease, LeaseId, MAX_LEASE_TTL_MS, MIN_CLIENT_TTL_MS};
use crate::range::SpaceId;
use crate::request::Origin;
use crate::space::Space;
use crate::space::log::{Change, Version};
use crate::state::State;

/// Taller than the tree of any file that fits on a disk.
const MAX_HEIGHT: usize = 24;

/// Why a file cannot be imported.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BoltError {
    /// The magic is wrong.
    #[error("not an etcd database file")]
    Magic,
    /// Both meta pages are invalid.
    #[error("damaged etcd database: both meta pages are invalid")]
    Meta,
    /// A page is invalid or missing.
    #[error("damaged etcd database: {0}")]
    Page(&'static str),
    /// An entry is not a valid key-value or lease.
    #[error("invalid entry in the etcd database: {0}")]
    Entry(&'static str),
    /// System keys, which only the cluster itself may write.
    #[error("the etcd database holds keys below /moim/, which are reserved for the cluster")]
    SystemKeys,
}

struct File<'a> {
    bytes: &'a [u8],
    page_bytes: usize,
    /// Pages that may still be read: bounds a file with cyclic page references.
    budget: usize,
}

/// A tree: its root page, or (small ones) its only page, inline in the parent tree.
enum Tree<'a> {
    At(u64),
    Inline(&'a [u8]),
}

/// The keys and leases of a file as a state.
pub fn read(bytes: &[u8]) -> Result<State, BoltError> {
    let (mut file, root) = File::open(bytes)?;
    let mut buckets = BTreeMap::new();
    file.walk(Tree::At(root), &mut |flags, key, value| {
        if flags & IS_BUCKET != 0 {
            let root = u64_at(value, 0).ok_or(BoltError::Page("bucket too short"))?;
            let inline = value.get(BUCKET_BYTES..).ok_or(BoltError::Page("bucket too short"))?;
            buckets.insert(key.to_vec(), if root == 0 { Tree::Inline(inline) } else { Tree::At(root) });
        }
        Ok(())
    })?;
    let mut take = |name: &str| buckets.remove(name.as_bytes());

    let mut compact_revision = -1;
    if let Some(meta_bucket) = take(META_BUCKET) {
        file.walk(meta_bucket, &mut |_, key, value| {
            if key == b"finishedCompactRev" || key == b"scheduledCompactRev" {
                compact_revision = compact_revision.max(change_key(value)?.revision);
            }
            Ok(())
        })?;
    }
    let mut state = State::new();
    if let Some(leases) = take(LEASES) {
        file.walk(leases, &mut |_, _, value| add_lease(&mut state, value))?;
    }
    let mut changes = Changes { compact_revision, bases: BTreeMap::new(), recent: Vec::new() };
    if let Some(keys) = take(KEYS) {
        let known: BTreeSet<i64> = state.leases.by_id.keys().map(|id| id.0).collect();
        file.walk(keys, &mut |_, key, value| changes.add(key, value, &known))?;
    }
    changes.restore(&mut state)?;
    Ok(state)
}

impl<'a> File<'a> {
    /// Also returns the root page of the tree of buckets.
    fn open(bytes: &'a [u8]) -> Result<(Self, u64), BoltError> {
        let first = bytes.get(PAGE_HEADER_BYTES..).unwrap_or_default();
        if u32_at(first, 0) != Some(MAGIC) {
            return Err(BoltError::Magic);
        }
        // The first meta page may be damaged while the second is valid; etcd's page sizes are these.
        let sizes = u32_at(first, 8).into_iter().chain([4096, 8192, 16384, 65536]);
        for page_bytes in sizes.map(|bytes| bytes as usize).filter(|bytes| (512..=1 << 20).contains(bytes)) {
            let metas = [0, page_bytes].map(|at| meta(bytes.get(at + PAGE_HEADER_BYTES..)?, page_bytes));
            if let Some((_, root)) = metas.into_iter().flatten().max() {
                let budget = bytes.len() / page_bytes;
                return Ok((Self { bytes, page_bytes, budget }, root));
            }
        }
        Err(BoltError::Meta)
    }

    fn page(&mut self, id: u64) -> Result<&'a [u8], BoltError> {
        const OUTSIDE: BoltError = BoltError::Page("page outside the file");
        self.budget = self.budget.checked_sub(1).ok_or(BoltError::Page("cyclic page references"))?;
        let start = usize::try_from(id).ok().and_then(|id| id.checked_mul(self.page_bytes)).ok_or(OUTSIDE)?;
        let page = self.bytes.get(start..).ok_or(OUTSIDE)?;
        if u64_at(page, 0) != Some(id) {
            return Err(BoltError::Page("page id mismatch"));
        }
        let pages = u32_at(page, 12).ok_or(OUTSIDE)? as usize + 1;
        page.get(..pages.checked_mul(self.page_bytes).ok_or(OUTSIDE)?).ok_or(OUTSIDE)
    }

    /// Visits the elements of a tree in order: flags, key, value.
    fn walk(
        &mut self,
        tree: Tree<'a>,
        visit: &mut dyn FnMut(u32, &'a [u8], &'a [u8]) -> Result<(), BoltError>,
    ) -> Result<(), BoltError> {
        let page = match tree {
            Tree::At(root) => self.page(root)?,
            Tree::Inline(page) => page,
        };
        self.walk_page(page, MAX_HEIGHT, visit)
    }

    fn walk_page(
        &mut self,
        page: &'a [u8],
        height: usize,
        visit: &mut dyn FnMut(u32, &'a [u8], &'a [u8]) -> Result<(), BoltError>,
    ) -> Result<(), BoltError> {
        const SHORT: BoltError = BoltError::Page("page too short for its elements");
        let flags = page.get(8..10).map(|at| u16::from_le_bytes([at[0], at[1]])).ok_or(SHORT)?;
        let count = page.get(10..12).map(|at| u16::from_le_bytes([at[0], at[1]])).ok_or(SHORT)?;
        for index in 0..usize::from(count) {
            let element = page.get(PAGE_HEADER_BYTES + index * ELEMENT_BYTES..).ok_or(SHORT)?;
            if flags & BRANCH != 0 {
                let child = u64_at(element, 8).ok_or(SHORT)?;
                let height = height.checked_sub(1).ok_or(BoltError::Page("tree too deep"))?;
                let child = self.page(child)?;
                self.walk_page(child, height, visit)?;
            } else if flags & LEAF != 0 {
                let field = |at| u32_at(element, at).map(|field| field as usize).ok_or(SHORT);
                let (at, key_bytes, value_bytes) = (field(4)?, field(8)?, field(12)?);
                let data = element.get(at..).ok_or(SHORT)?;
                let key = data.get(..key_bytes).ok_or(SHORT)?;
                let value = data[key_bytes..].get(..value_bytes).ok_or(SHORT)?;
                visit(field(0)? as u32, key, value)?;
            } else {
                return Err(BoltError::Page("page is neither leaf nor branch"));
            }
        }
        Ok(())
    }
}

/// The transaction id and the root of a meta page, if it is valid.
fn meta(page: &[u8], page_bytes: usize) -> Option<(u64, u64)> {
    let fields = page.get(..META_BYTES)?;
    let whole = u32_at(fields, 0)? == MAGIC
        && u32_at(fields, 4)? == FILE_VERSION
        && u32_at(fields, 8)? as usize == page_bytes
        && u64_at(page, META_BYTES)? == fnv1a(fields);
    whole.then_some((u64_at(fields, 48)?, u64_at(fields, 16)?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// The revision of a change, decoded from its bbolt key.
struct ChangeKey {
    revision: i64,
    sub: u32,
    deleted: bool,
}

fn change_key(key: &[u8]) -> Result<ChangeKey, BoltError> {
    const INVALID_KEY: BoltError = BoltError::Entry("key without a revision");
    let deleted = match key.get(17..).ok_or(INVALID_KEY)? {
        [] => false,
        b"t" => true,
        _ => return Err(INVALID_KEY),
    };
    let number =
        |at: usize| key.get(at..).and_then(|rest| rest.first_chunk()).map(|it| i64::from_be_bytes(*it));
    let revision = number(0).filter(|revision| *revision > 0).ok_or(INVALID_KEY)?;
    let sub = number(9).and_then(|sub| u32::try_from(sub).ok()).ok_or(INVALID_KEY)?;
    Ok(ChangeKey { revision, sub, deleted })
}

fn add_lease(state: &mut State, value: &[u8]) -> Result<(), BoltError> {
    let stored = StoredLease::decode(value).map_err(|_| BoltError::Entry("undecodable lease"))?;
    let ms = |seconds: i64| seconds.saturating_mul(1_000).clamp(0, MAX_LEASE_TTL_MS);
    if stored.id == 0 {
        return Err(BoltError::Entry("lease without an id"));
    }
    let lease = Lease {
        ttl_ms: ms(stored.ttl).max(MIN_CLIENT_TTL_MS),
        remaining_ms: ms(stored.remaining_ttl),
        origin: Origin::Client,
        keys: BTreeSet::new(),
    };
    state.leases.by_id.insert(LeaseId(stored.id), lease);
    Ok(())
}

/// The changes of a file, until all are known.
struct Changes {
    compact_revision: i64,
    /// The newest change of each key live at the compact revision.
    bases: BTreeMap<Bytes, Change>,
    recent: Vec<Change>,
}

impl Changes {
    fn add(&mut self, key: &[u8], value: &[u8], leases: &BTreeSet<i64>) -> Result<(), BoltError> {
        let name = change_key(key)?;
        let kv = KeyValue::decode(value).map_err(|_| BoltError::Entry("undecodable key-value"))?;
        if kv.key.is_empty() {
            return Err(BoltError::Entry("empty key"));
        }
        if SpaceId::of(&kv.key) == SpaceId::System {
            return Err(BoltError::SystemKeys);
        }
        let mut version = Version::tombstone(name.revision, name.sub);
        if !name.deleted {
            version.value = Some(Bytes::copy_from_slice(&kv.value).into());
            version.create_revision = kv.create_revision;
            version.version = kv.version;
            // Old versions may name expired leases.
            version.lease = if leases.contains(&kv.lease) { LeaseId(kv.lease) } else { LeaseId::NONE };
        }
        let change = Change { key: Bytes::copy_from_slice(&kv.key), version };
        if name.revision >= self.compact_revision {
            self.recent.push(change);
        } else if change.is_put() {
            self.bases.insert(change.key.clone(), change);
        } else {
            self.bases.remove(&change.key);
        }
        Ok(())
    }

    fn restore(self, state: &mut State) -> Result<(), BoltError> {
        const ORDER: BoltError = BoltError::Entry("change out of order");
        let last = self.recent.last().map_or(1, |change| change.version.revision);
        state.user = Space::restored(last.max(self.compact_revision).max(1), self.compact_revision, None);
        for base in self.bases.into_values() {
            state.user.restore_base(base).then_some(()).ok_or(ORDER)?;
        }
        for change in self.recent {
            // A deletion of a key that is compacted already.
            let idle = !change.is_put() && state.user.current(&change.key).is_none();
            if idle && change.version.revision <= self.compact_revision {
                continue;
            }
            state.user.restore_change(change).then_some(()).ok_or(ORDER)?;
        }
        for change in state.user.live().filter(|change| !change.version.lease.is_none()) {
            if let Some(lease) = state.leases.by_id.get_mut(&change.version.lease) {
                lease.keys.insert((SpaceId::User, change.key.clone()));
            }
        }
        Ok(())
    }
}
