//! Value types other than small strings.
//!
//! One file per type under `value/`. `memory` is O(1): it is called after every command that modified the value.

mod extended;
pub mod hash;
pub mod intset;
pub mod limits;
pub mod list;
pub mod listpack;
pub mod number;
pub mod packed;
mod ranks;
pub mod set;
pub mod stream;
pub mod table;
pub mod zset;

use self::hash::Hash;
use self::list::List;
use self::set::Set;
use self::stream::Stream;
use self::zset::Zset;

/// A value stored outside its entry.
#[derive(Clone)]
pub enum Value {
    /// A string too large for its entry.
    Str(Vec<u8>),
    /// A list.
    List(List),
    /// A hash.
    Hash(Hash),
    /// A set.
    Set(Set),
    /// A sorted set.
    Zset(Zset),
    /// A stream.
    Stream(Box<Stream>),
}

impl Value {
    /// Memory usage in bytes.
    pub fn memory(&self) -> usize {
        let heap = match self {
            Self::Str(string) => string.capacity(),
            Self::List(list) => list.heap_size(),
            Self::Hash(hash) => hash.heap_size(),
            Self::Set(set) => set.heap_size(),
            Self::Zset(zset) => zset.heap_size(),
            Self::Stream(stream) => stream.heap_size(),
        };
        heap + size_of::<(Option<Self>, usize)>()
    }

    /// Number of allocations to free, which decides about lazy free.
    pub fn elements(&self) -> usize {
        match self {
            Self::Str(_) => 1,
            Self::List(list) => list.chunks(),
            Self::Hash(Hash::Packed(_))
            | Self::Set(Set::Ints(_) | Set::Packed(_))
            | Self::Zset(Zset::Packed(_)) => 1,
            Self::Hash(hash) => hash.len(),
            Self::Set(set) => set.len(),
            Self::Zset(zset) => zset.len(),
            Self::Stream(stream) => stream.pieces(),
        }
    }

    /// The type name of TYPE.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Str(_) => "string",
            Self::List(_) => "list",
            Self::Hash(_) => "hash",
            Self::Set(_) => "set",
            Self::Zset(_) => "zset",
            Self::Stream(_) => "stream",
        }
    }

    /// The encoding name of OBJECT ENCODING.
    pub fn encoding(&self) -> &'static str {
        match self {
            Self::Str(_) => "raw",
            Self::List(list) => list.encoding(),
            Self::Hash(hash) => hash.encoding(),
            Self::Set(set) => set.encoding(),
            Self::Zset(zset) => zset.encoding(),
            Self::Stream(_) => "stream",
        }
    }
}
