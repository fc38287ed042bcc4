//! A group with an initial state: the first snapshot of a member that has no log.
//!
//! The snapshot has the log position of the group's first entry, the member list, so the member continues from it as
//! from any other. Only for a directory in which the group was never opened, and only for a group of one: two members
//! seeded separately would have two histories.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use moim_journal::Disk;
use openraft::BasicNode;

use crate::group::GroupOptions;
use crate::machine::SnapshotWriter;
use crate::snapshot::SnapshotDir;
use crate::types::{LogId, Member, Membership, SnapshotMeta, StoredMembership};

/// The index of a seeded state: no entry has been applied to it.
pub const SEED_INDEX: u64 = 0;

/// Writes the initial state of the group's only member. Blocks.
pub fn seed(
    disk: Arc<dyn Disk>,
    root: &Path,
    options: &GroupOptions,
    address: &str,
    state: SnapshotWriter,
) -> io::Result<()> {
    let snapshots = SnapshotDir::open(disk, root, &format!("{}/snapshots", options.folder))?;
    if snapshots.current().is_some() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the group has a state already"));
    }
    let Member { id, address } = Member { id: options.voter, address: address.to_owned() };
    let at = LogId::new_term_index(0, SEED_INDEX);
    let nodes = BTreeMap::from([(id.0, BasicNode::new(address))]);
    let members = Membership::new(vec![[id.0].into()], nodes).map_err(io::Error::other)?;
    let meta =
        SnapshotMeta { last_log_id: Some(at), last_membership: StoredMembership::new(Some(at), members) };
    snapshots.write(&meta, state)
}
