//! `moim dev purge`: stops the cluster of a folder and deletes what `moim dev` made there, and nothing else.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::control::stop_all;
use super::roster::Listing;
use super::runner::{log_path, node_folder};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{confirm, note};

/// The files of the supervisor.
const OWN_FILES: [&str; 4] = ["dev.log", "dev.lock", "dev.sock", "cluster.json"];

pub(super) async fn run(data: &Path, yes: bool, patience: Duration) -> Outcome {
    let listing = Listing::read(data)?.ok_or_else(|| {
        Failure::new(Status::NotFound, format!("{} holds no cluster of `moim dev`", data.display()))
    })?;
    confirm(&format!("delete {} nodes with all their data in {}", listing.nodes.len(), data.display()), yes)?;
    match stop_all(data, patience).await {
        Ok(()) => {}
        Err(failure) if failure.status == Status::Unreachable => {}
        Err(failure) => return Err(failure),
    }
    for node in &listing.nodes {
        gone(fs::remove_dir_all(node_folder(data, node.id)), data)?;
        gone(fs::remove_file(log_path(data, node.id)), data)?;
    }
    for name in OWN_FILES {
        gone(fs::remove_file(data.join(name)), data)?;
    }
    // An unknown file keeps the directory.
    let _ = fs::remove_dir(data);
    note(format_args!("{} is gone", data.display()));
    Ok(())
}

fn gone(removed: io::Result<()>, data: &Path) -> Outcome {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::error(format!("cannot delete everything in {}: {error}", data.display())))
        }
        _ => Ok(()),
    }
}
