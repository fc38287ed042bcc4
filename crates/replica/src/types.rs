//! The words of replication that are not already in `moim_base`.

use std::fmt;

use moim_base::TopicId;

/// One run of a broker: the create revision of its member key. A restart, or a lost lease, gives a higher one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BrokerEpoch(pub i64);

impl fmt::Display for BrokerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for BrokerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BrokerEpoch({})", self.0)
    }
}

/// The number the cluster gave to one data directory, never given twice. A node whose directory was removed comes
/// back under its old node id with another directory id: it has none of the data that id once had.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DirectoryId(pub u64);

impl fmt::Display for DirectoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for DirectoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirectoryId({})", self.0)
    }
}

/// A partition of one incarnation of a topic.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PartitionId {
    /// The topic's incarnation.
    pub topic: TopicId,
    /// Which of its partitions.
    pub index: u32,
}

impl fmt::Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.index)
    }
}

impl fmt::Debug for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What a commit waits for on every in-sync replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// The records are on stable storage.
    #[default]
    Fsync,
    /// The records are written: a crash of the process does not lose them, a crash of the machine may.
    Replicated,
}

/// Something read from the repository, and the revision of its last change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Versioned<T> {
    /// The mod revision of its key.
    pub revision: i64,
    /// What the key held.
    pub value: T,
}
