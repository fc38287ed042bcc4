//! What comes back. Replies travel between nodes (a follower forwards), so they have a binary form too.

use bytes::Bytes;

use crate::error::Error;
use crate::lease::LeaseId;
use crate::request::Alarm;

/// A key and what is known about it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KeyValue {
    /// The key.
    pub key: Bytes,
    /// What it holds.
    pub value: Bytes,
    /// The revision at which it appeared; 0 for a deletion.
    pub create_revision: i64,
    /// The revision of its last change.
    pub mod_revision: i64,
    /// How often it was put since it appeared; 0 for a deletion.
    pub version: i64,
    /// The lease that takes it away; 0 is none.
    pub lease: LeaseId,
}

/// Entries of a range.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RangeReply {
    /// The revision of the space at the time of reading, whatever revision was asked for.
    pub revision: i64,
    /// The entries.
    pub kvs: Vec<KeyValue>,
    /// Whether the limit left some out.
    pub more: bool,
    /// How many keys are in the range, whatever limit and filters say.
    pub count: i64,
}

/// A put that happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutReply {
    /// Its revision.
    pub revision: i64,
    /// What the key held before, if asked for.
    pub prev_kv: Option<KeyValue>,
}

/// A deletion that happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteReply {
    /// The revision after it: unchanged when there was nothing to delete.
    pub revision: i64,
    /// How many keys are gone.
    pub deleted: i64,
    /// What they held, if asked for.
    pub prev_kvs: Vec<KeyValue>,
}

/// The answer to one step of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOpReply {
    /// To a read.
    Range(RangeReply),
    /// To a put.
    Put(PutReply),
    /// To a deletion.
    Delete(DeleteReply),
    /// To a transaction inside.
    Txn(TxnReply),
}

/// A transaction that happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TxnReply {
    /// The revision after it: unchanged when it changed nothing. 0 in a nested reply, as in etcd.
    pub revision: i64,
    /// Whether the conditions held.
    pub succeeded: bool,
    /// One answer for each step of the branch that was taken.
    pub responses: Vec<TxnOpReply>,
}

/// The checksum of a space up to a revision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HashReply {
    /// The checksum. Comparable between nodes of equal `compact_revision`, and not with etcd's.
    pub hash: u32,
    /// The revision it was taken at.
    pub hash_revision: i64,
    /// How far history was forgotten; -1 when never.
    pub compact_revision: i64,
    /// The revision of the space.
    pub revision: i64,
}

/// What a command comes to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Refused; nothing was changed.
    Error(Error),
    /// To [`Op::Put`](crate::Op::Put).
    Put(PutReply),
    /// To [`Op::Delete`](crate::Op::Delete).
    Delete(DeleteReply),
    /// To [`Op::Txn`](crate::Op::Txn).
    Txn(TxnReply),
    /// To both kinds of compaction.
    Compacted {
        /// The revision of the space: the user's for an automatic one.
        revision: i64,
    },
    /// To [`Op::LeaseGrant`](crate::Op::LeaseGrant).
    LeaseGranted {
        /// The revision of the user's space.
        revision: i64,
        /// The lease.
        id: LeaseId,
        /// What was granted, possibly more than was asked for.
        ttl_ms: i64,
    },
    /// To [`Op::LeaseRevoke`](crate::Op::LeaseRevoke).
    LeaseRevoked {
        /// The revision of the user's space after it.
        revision: i64,
    },
    /// To [`Op::AlarmOn`](crate::Op::AlarmOn) and [`Op::AlarmOff`](crate::Op::AlarmOff).
    Alarms {
        /// The revision of the user's space.
        revision: i64,
        /// The alarms that were changed by this command: none when it was on, or off, already.
        changed: Vec<Alarm>,
    },
    /// To what has no answer of its own.
    Done {
        /// The revision of the user's space.
        revision: i64,
    },
}
