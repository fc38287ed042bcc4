//! Replication types that are not in `moim_base`: broker epoch, directory id, partition id, durability.

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

/// The number that the cluster assigned to one data directory; never assigned twice. A node whose directory was
/// removed returns under its old node id with another directory id: it has none of the data of the old directory.
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
    /// The partition number within the topic.
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

/// The durability that a commit requires on every in-sync replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// The records are on stable storage.
    #[default]
    Fsync,
    /// The records are written: they survive a process crash, but a machine crash may lose them.
    Replicated,
}

/// A value read from the state repository, with the mod revision of its key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Versioned<T> {
    /// The mod revision of its key.
    pub revision: i64,
    /// The value of the key.
    pub value: T,
}
