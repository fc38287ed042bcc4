//! Reads such a file, whoever wrote it: every offset and length in it is checked.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use moim_wire_grpc::etcd::KeyValue;
use prost::Message as _;

use super::{
    BRANCH, BUCKET_BYTES, ELEMENT_BYTES, FACTS, FILE_VERSION, IS_BUCKET, KEYS, LEAF, LEASES, MAGIC,
    META_BYTES, PAGE_HEADER_BYTES, StoredLease, fnv1a,
};
use crate::lease::{Lease, LeaseId, MAX_LEASE_TTL_MS, MIN_CLIENT_TTL_MS};
use crate::range::SpaceId;
use crate::request::Origin;
use crate::space::Space;
use crate::space::log::{Change, Version};
use crate::state::State;

/// No tree of a file that fits anywhere is higher.
const MAX_HEIGHT: usize = 24;

/// Why a file is no store.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BoltError {
    /// It does not begin as one.
    #[error("this is not a database of etcd")]
    Magic,
    /// Both meta pages are wrong.
    #[error("the database is damaged: neither of its first pages is whole")]
    Meta,
    /// A page is not where it should be, or not what it should be.
    #[error("the database is damaged: {0}")]
    Page(&'static str),
    /// An entry is no key, or no lease.
    #[error("the database holds an entry that is not etcd's: {0}")]
    Entry(&'static str),
    /// Keys that nobody but the cluster itself may write.
    #[error("the database holds keys below /moim/, which are the cluster's own")]
    SystemKeys,
}

struct File<'a> {
    bytes: &'a [u8],
    page_bytes: usize,
    /// Pages that may still be looked at: a file that goes in circles comes to an end.
    budget: usize,
}

/// A tree: its root page, or (small ones) its only page within the tree above.
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
            let root = u64_at(value, 0).ok_or(BoltError::Page("a bucket is too short"))?;
            let inline = value.get(BUCKET_BYTES..).ok_or(BoltError::Page("a bucket is too short"))?;
            buckets.insert(key.to_vec(), if root == 0 { Tree::Inline(inline) } else { Tree::At(root) });
        }
        Ok(())
    })?;
    let mut take = |name: &str| buckets.remove(name.as_bytes());

    let mut compact_revision = -1;
    if let Some(facts) = take(FACTS) {
        file.walk(facts, &mut |_, key, value| {
            if key == b"finishedCompactRev" || key == b"scheduledCompactRev" {
                compact_revision = compact_revision.max(change_name(value)?.revision);
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
    /// Answers the page of the tree of buckets, too.
    fn open(bytes: &'a [u8]) -> Result<(Self, u64), BoltError> {
        let first = bytes.get(PAGE_HEADER_BYTES..).unwrap_or_default();
        if u32_at(first, 0) != Some(MAGIC) {
            return Err(BoltError::Magic);
        }
        // The first page may be damaged while the second is not; pages of etcd have these sizes.
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
        const OUTSIDE: BoltError = BoltError::Page("a page is outside the file");
        self.budget = self.budget.checked_sub(1).ok_or(BoltError::Page("its pages go in circles"))?;
        let start = usize::try_from(id).ok().and_then(|id| id.checked_mul(self.page_bytes)).ok_or(OUTSIDE)?;
        let page = self.bytes.get(start..).ok_or(OUTSIDE)?;
        if u64_at(page, 0) != Some(id) {
            return Err(BoltError::Page("a page is not the one it should be"));
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
        const SHORT: BoltError = BoltError::Page("a page is too short for what it says");
        let flags = page.get(8..10).map(|at| u16::from_le_bytes([at[0], at[1]])).ok_or(SHORT)?;
        let count = page.get(10..12).map(|at| u16::from_le_bytes([at[0], at[1]])).ok_or(SHORT)?;
        for index in 0..usize::from(count) {
            let element = page.get(PAGE_HEADER_BYTES + index * ELEMENT_BYTES..).ok_or(SHORT)?;
            if flags & BRANCH != 0 {
                let child = u64_at(element, 8).ok_or(SHORT)?;
                let height = height.checked_sub(1).ok_or(BoltError::Page("a tree is too high"))?;
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
                return Err(BoltError::Page("a page is neither leaf nor branch"));
            }
        }
        Ok(())
    }
}

/// The transaction and the root of a meta page, if it is whole.
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

/// The name of a change, as a key of the file.
struct ChangeName {
    revision: i64,
    sub: u32,
    deleted: bool,
}

fn change_name(key: &[u8]) -> Result<ChangeName, BoltError> {
    const ODD: BoltError = BoltError::Entry("a change without a revision");
    let deleted = match key.get(17..).ok_or(ODD)? {
        [] => false,
        b"t" => true,
        _ => return Err(ODD),
    };
    let number =
        |at: usize| key.get(at..).and_then(|rest| rest.first_chunk()).map(|it| i64::from_be_bytes(*it));
    let revision = number(0).filter(|revision| *revision > 0).ok_or(ODD)?;
    let sub = number(9).and_then(|sub| u32::try_from(sub).ok()).ok_or(ODD)?;
    Ok(ChangeName { revision, sub, deleted })
}

fn add_lease(state: &mut State, value: &[u8]) -> Result<(), BoltError> {
    let stored = StoredLease::decode(value).map_err(|_| BoltError::Entry("a lease"))?;
    let ms = |seconds: i64| seconds.saturating_mul(1_000).clamp(0, MAX_LEASE_TTL_MS);
    if stored.id == 0 {
        return Err(BoltError::Entry("a lease without an id"));
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
    /// What is left of the time before that revision: the newest of each key that lives.
    bases: BTreeMap<Bytes, Change>,
    recent: Vec<Change>,
}

impl Changes {
    fn add(&mut self, key: &[u8], value: &[u8], leases: &BTreeSet<i64>) -> Result<(), BoltError> {
        let name = change_name(key)?;
        let kv = KeyValue::decode(value).map_err(|_| BoltError::Entry("a value"))?;
        if kv.key.is_empty() {
            return Err(BoltError::Entry("an empty key"));
        }
        if SpaceId::of(&kv.key) == SpaceId::System {
            return Err(BoltError::SystemKeys);
        }
        let mut version = Version::tombstone(name.revision, name.sub);
        if !name.deleted {
            version.value = Some(Bytes::copy_from_slice(&kv.value).into());
            version.create_revision = kv.create_revision;
            version.version = kv.version;
            // Old versions may name leases that have ended.
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
        const ORDER: BoltError = BoltError::Entry("a change that does not follow those before it");
        let last = self.recent.last().map_or(1, |change| change.version.revision);
        state.user = Space::restored(last.max(self.compact_revision).max(1), self.compact_revision, None);
        for base in self.bases.into_values() {
            state.user.restore_base(base).then_some(()).ok_or(ORDER)?;
        }
        for change in self.recent {
            // The deletion of what is forgotten already.
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
