//! Changes of the data directory of a node that does not run: restore of a coordination snapshot, and recovery of a
//! rolled-back directory. Both take the lock of the directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moim_base::SystemClock;
use moim_coord::{SpaceId, State};
use moim_journal::RealDisk;
use moim_raft::{GroupOptions, VoterId, seed};

use crate::control::GROUP;
use crate::data_dir::{self, Admission, DataDir, Identity, random_id};
use crate::exit::{Failure, Outcome, Status};
use crate::journals::RAFT_TAG;

/// The peer address of the only voter until the node starts and publishes its own.
const PEER: &str = "127.0.0.1:9645";
/// Added to the run of a recovered directory: more than any directory was ever started.
const RUN_JUMP: u64 = 1 << 32;

/// A data directory that was made from a snapshot.
#[derive(Debug)]
pub struct Restored {
    /// The id of the new cluster.
    pub cluster_id: String,
    /// The revision of the clients' keys.
    pub revision: i64,
    /// The number of clients' keys.
    pub keys: usize,
}

/// Makes the data directory of a new node, alone in a new cluster, whose coordination core begins with this state.
///
/// Invariant: the directory gets its name when everything in it is complete and durable; until then its name ends with
/// `.restoring`.
pub fn restore(data: &Path, node_id: i32, state: State) -> Outcome<Restored> {
    let draft = PathBuf::from(format!("{}.restoring", data.display()));
    if draft.exists() {
        return Err(Failure::new(Status::Conflict, format!("{} is in the way", draft.display()))
            .hint("an earlier restore did not end; delete it"));
    }
    let state = state.for_new_cluster();
    let revision = state.revision(SpaceId::User);
    let keys = state.live_keys(SpaceId::User);
    let made = DataDir::open(&draft, node_id, &SystemClock::new())?;
    let options = GroupOptions::new(GROUP, VoterId(1), RAFT_TAG);
    let write = move |out: &mut dyn std::io::Write| {
        for piece in state.snapshot() {
            out.write_all(&piece)?;
        }
        Ok(())
    };
    seed(Arc::new(RealDisk), &draft, &options, PEER, Box::new(write))
        .map_err(|error| Failure::error(format!("cannot write {}: {error}", draft.display())))?;
    let cluster_id = random_id();
    let identity = Identity {
        cluster_id: cluster_id.clone(),
        secret: random_id(),
        voter: 1,
        admission: Admission::Member,
        ..made.identity()
    };
    made.record(identity)?;
    drop(made);
    fs::rename(&draft, data)
        .map_err(|error| Failure::error(format!("cannot make {}: {error}", data.display())))?;
    let parent = data.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()?;
    Ok(Restored { cluster_id, revision, keys })
}

/// Fails if there is something at the path of a data directory that is to be made.
pub fn refuse_used(data: &Path) -> Outcome {
    let used = match fs::read_dir(data) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => data.exists(),
    };
    if used {
        let message = format!("{} is there and not empty", data.display());
        return Err(
            Failure::new(Status::Conflict, message).hint("name a folder that does not exist with --data")
        );
    }
    Ok(())
}

/// A rolled-back data directory that may be started again.
#[derive(Debug)]
pub struct Recovered {
    /// The node that the directory belongs to.
    pub node_id: i32,
    /// The run of the next start.
    pub next_run: u64,
}

/// Accepts that a data directory is an older copy: its next run is above every run that the other voters have confirmed.
/// What was acknowledged after the copy was made, and is on no other node, is lost.
pub fn accept_rollback(data: &Path) -> Outcome<Recovered> {
    let identity = data_dir::edit(data, |identity| {
        identity.run += RUN_JUMP;
        identity.forced = true;
        identity.aside = None;
    })?;
    Ok(Recovered { node_id: identity.node_id, next_run: identity.run + 1 })
}
