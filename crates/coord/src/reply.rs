//! Replies to requests. They have a binary encoding, because a follower forwards them.

use bytes::Bytes;

use crate::error::Error;
use crate::lease::LeaseId;
use crate::request::Alarm;

/// A key-value with its revisions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KeyValue {
    /// The key.
    pub key: Bytes,
    /// The value.
    pub value: Bytes,
    /// The create revision; 0 for a deletion.
    pub create_revision: i64,
    /// The mod revision.
    pub mod_revision: i64,
    /// The number of puts since the key was created; 0 for a deletion.
    pub version: i64,
    /// The lease the key is attached to; 0 for no lease.
    pub lease: LeaseId,
}

/// Reply to a range read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RangeReply {
    /// The current revision of the key space, whatever revision was read.
    pub revision: i64,
    /// The key-values.
    pub kvs: Vec<KeyValue>,
    /// True if the limit cut off key-values.
    pub more: bool,
    /// The number of keys in the range, regardless of limit and filters.
    pub count: i64,
}

/// Reply to a put.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutReply {
    /// The revision of the put.
    pub revision: i64,
    /// The previous key-value, if requested.
    pub prev_kv: Option<KeyValue>,
}

/// Reply to a deletion.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteReply {
    /// The revision after it: unchanged if no key was deleted.
    pub revision: i64,
    /// The number of deleted keys.
    pub deleted: i64,
    /// The deleted key-values, if requested.
    pub prev_kvs: Vec<KeyValue>,
}

/// Reply to one operation of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOpReply {
    /// Reply to a range read.
    Range(RangeReply),
    /// Reply to a put.
    Put(PutReply),
    /// Reply to a deletion.
    Delete(DeleteReply),
    /// Reply to a nested transaction.
    Txn(TxnReply),
}

/// Reply to a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TxnReply {
    /// The revision after it: unchanged if it changed nothing. 0 in a nested reply, as in etcd.
    pub revision: i64,
    /// True if all compares held.
    pub succeeded: bool,
    /// One reply for each operation of the chosen branch.
    pub responses: Vec<TxnOpReply>,
}

/// Reply to a hash request: the checksum of a key space up to a revision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HashReply {
    /// The checksum. Comparable between nodes of equal `compact_revision`, but not with etcd's.
    pub hash: u32,
    /// The revision of the checksum.
    pub hash_revision: i64,
    /// The compact revision; -1 if never compacted.
    pub compact_revision: i64,
    /// The current revision of the key space.
    pub revision: i64,
}

/// Reply to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Refused; nothing was changed.
    Error(Error),
    /// Reply to [`Op::Put`](crate::Op::Put).
    Put(PutReply),
    /// Reply to [`Op::Delete`](crate::Op::Delete).
    Delete(DeleteReply),
    /// Reply to [`Op::Txn`](crate::Op::Txn).
    Txn(TxnReply),
    /// Reply to both kinds of compaction.
    Compacted {
        /// The revision of the key space; of the user keys for an automatic compaction.
        revision: i64,
    },
    /// Reply to [`Op::LeaseGrant`](crate::Op::LeaseGrant).
    LeaseGranted {
        /// The revision of the user keys.
        revision: i64,
        /// The granted lease.
        id: LeaseId,
        /// The granted TTL, possibly longer than requested.
        ttl_ms: i64,
    },
    /// Reply to [`Op::LeaseRevoke`](crate::Op::LeaseRevoke).
    LeaseRevoked {
        /// The revision of the user keys after it.
        revision: i64,
    },
    /// Reply to [`Op::AlarmOn`](crate::Op::AlarmOn) and [`Op::AlarmOff`](crate::Op::AlarmOff).
    Alarms {
        /// The revision of the user keys.
        revision: i64,
        /// The alarms changed by this command: empty if the alarm was in that state already.
        changed: Vec<Alarm>,
    },
    /// Reply to commands without a reply of their own.
    Done {
        /// The revision of the user keys.
        revision: i64,
    },
}
