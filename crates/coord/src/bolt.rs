//! The user keys as a bbolt database file of etcd: import from an etcd snapshot and export to one.
//!
//! etcd keeps its store in a B+tree file (bbolt): pages of equal size, two of them meta pages with the roots, the
//! others leaves and branches of nested trees ("buckets"). `etcdctl snapshot save` stores such a file with a checksum
//! appended, and so do we: `etcdctl snapshot status` and `restore` read our file, and we read etcd's.
//!
//! ```text
//!  page 0, 1   meta pages with the root (the one with the higher transaction id is valid)
//!  page 2      free list: empty
//!  page 3…     small buckets, then the leaves of "key" by revision, its branches, and the tree of buckets
//! ```
//!
//! The file has no system keys, because they describe the members of *this* cluster. It holds only user keys and the
//! leases of clients.
//!
//! Must never: trust an offset or a length in a file, or hold the state lock for longer than one chunk takes.

mod page;
mod read;
mod write;

pub use self::read::{BoltError, read};
pub(crate) use self::write::{BoltCursor, Step};

/// Page size, here and (by default) in etcd.
const PAGE_BYTES: usize = 4096;
const PAGE_HEADER_BYTES: usize = 16;
const ELEMENT_BYTES: usize = 16;
const BUCKET_BYTES: usize = 16;

const BRANCH: u16 = 0x01;
const LEAF: u16 = 0x02;
const META: u16 = 0x04;
const FREELIST: u16 = 0x10;
/// Flag of a leaf element whose value is a bucket.
const IS_BUCKET: u32 = 0x01;

const MAGIC: u32 = 0xED0C_DAED;
const FILE_VERSION: u32 = 2;
/// Bytes of a meta page covered by its checksum.
const META_BYTES: usize = 56;

const KEYS: &str = "key";
const LEASES: &str = "lease";
const META_BUCKET: &str = "meta";

/// A lease as etcd stores it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct StoredLease {
    #[prost(int64, tag = "1")]
    id: i64,
    /// In seconds, like `remaining_ttl`.
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
