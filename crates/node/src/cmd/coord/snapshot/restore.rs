//! `moim coord snapshot restore`: the data folder of a new node that begins with the keys of a file.
//!
//! Invariant: the folder gets its name when everything in it is whole and durable; before that it has another.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moim_base::SystemClock;
use moim_coord::SpaceId;
use moim_journal::RealDisk;
use moim_raft::{GroupOptions, VoterId, seed};
use serde::Serialize;

use super::Snapshot;
use crate::control::GROUP;
use crate::data_dir::{Admission, DataDir, Identity, random_id};
use crate::exit::{Failure, Outcome, Status};
use crate::journals::RAFT_TAG;
use crate::output::{Output, Report, Section};

/// Until the node starts and says where it is.
const PEER: &str = "127.0.0.1:9645";

#[derive(Serialize)]
struct Restored {
    data: String,
    node_id: i32,
    cluster_id: String,
    revision: i64,
    keys: usize,
}

impl Report for Restored {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("data", self.data.clone()),
            ("node", self.node_id.to_string()),
            ("cluster", self.cluster_id.clone()),
            ("revision", self.revision.to_string()),
            ("keys", self.keys.to_string()),
        ])]
    }
}

pub(super) fn run(file: &Path, data: &Path, node_id: i32, output: Output) -> Outcome {
    refuse_used(data)?;
    let state = Snapshot::read(file)?.state.for_new_cluster();
    let draft = PathBuf::from(format!("{}.restoring", data.display()));
    if draft.exists() {
        return Err(Failure::new(Status::Conflict, format!("{} is in the way", draft.display()))
            .hint("an earlier restore did not end; delete it"));
    }
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
    output.print(&Restored { data: data.display().to_string(), node_id, cluster_id, revision, keys })
}

fn refuse_used(data: &Path) -> Outcome {
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
