//! The user's keys as a database file of etcd, and back: the way in from an etcd and the way out to one.
//!
//! etcd keeps its store in a B+tree file (bbolt): pages of equal size, two of them with the file's roots, the others
//! leaves and branches of nested trees ("buckets"). What `etcdctl snapshot save` stores is such a file with a
//! checksum behind it, so ours is one too: `etcdctl snapshot status` and `restore` read it, and we read etcd's.
//!
//! ```text
//!  page 0, 1   where the roots are (the one with the higher transaction counts)
//!  page 2      free pages: none
//!  page 3…     small buckets, then the leaves of "key" by revision, its branches, and the tree of buckets
//! ```
//!
//! System keys are not in it: they say who the members of *this* cluster are. Only keys of the user's space and the
//! leases of clients are.
//!
//! Must never: trust an offset or a length of a file, or hold the state for longer than a piece takes.

mod page;
mod read;
mod write;

pub use self::read::{BoltError, read};
pub(crate) use self::write::{BoltCursor, Step};

/// Of every page, here and (by default) in etcd.
const PAGE_BYTES: usize = 4096;
const PAGE_HEADER_BYTES: usize = 16;
const ELEMENT_BYTES: usize = 16;
const BUCKET_BYTES: usize = 16;

const BRANCH: u16 = 0x01;
const LEAF: u16 = 0x02;
const META: u16 = 0x04;
const FREELIST: u16 = 0x10;
/// On a leaf's element: the value is a bucket.
const IS_BUCKET: u32 = 0x01;

const MAGIC: u32 = 0xED0C_DAED;
const FILE_VERSION: u32 = 2;
/// What the checksum of a meta page covers.
const META_BYTES: usize = 56;

const KEYS: &str = "key";
const LEASES: &str = "lease";
const FACTS: &str = "meta";

/// A lease as etcd stores it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct StoredLease {
    #[prost(int64, tag = "1")]
    id: i64,
    /// In seconds, as the next.
    #[prost(int64, tag = "2")]
    ttl: i64,
    #[prost(int64, tag = "3")]
    remaining_ttl: i64,
}

/// FNV-1a, 64 bits: the checksum of a meta page.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
