//! A group that begins with a state: the first snapshot of a member that has no log.
//!
//! The snapshot stands where founding a group puts its first entry, the list of members, so the member goes on
//! from it as from any other. Only for a folder in which the group has never been opened, and only for a group of
//! one: two members that were seeded apart would believe in two histories.

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

/// The index a seeded state stands for: no entry has been applied to it.
pub const SEED_INDEX: u64 = 0;

/// Writes the state that the group's only member begins with. Blocks.
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
