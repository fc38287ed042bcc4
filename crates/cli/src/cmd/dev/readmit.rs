//! A node that lost its data directory while the cluster runs: it must not vote with its old voter id, because it may have
//! lost a vote. `moim cluster replace` retires the old voter; then the node returns as a new one.

use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use super::plan::Member;
use super::roster::{Listing, listed};
use super::runner::node_folder;
use crate::exit::{Failure, Outcome, Status};

/// True if a node has no data although others have.
pub(super) fn lost_its_folder(data: &Path, id: i32, nodes: &[Member]) -> bool {
    !has_data(data, id) && nodes.iter().any(|node| has_data(data, node.id))
}

/// The nodes of an earlier start that have no data now although others have.
pub(super) fn all_lost(data: &Path) -> Outcome<Vec<i32>> {
    let nodes = Listing::read(data)?.map(|listing| listing.nodes).unwrap_or_default();
    let lost = nodes.iter().filter(|node| lost_its_folder(data, node.id, &nodes));
    Ok(lost.map(|node| node.id).collect())
}

fn has_data(data: &Path, id: i32) -> bool {
    node_folder(data, id).join("node.json").exists()
}

/// How a node without its data directory can return.
pub(super) enum Readmission {
    /// The old voter is retired: the node returns with an empty directory.
    Replaced,
    /// The node was removed from the cluster: it has to join as a new one.
    Removed,
}

/// Deletes the data directory of a node.
pub(super) fn delete_folder(data: &Path, id: i32) -> Outcome {
    let folder = node_folder(data, id);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::error(format!("cannot delete {}: {error}", folder.display())))
        }
        _ => Ok(()),
    }
}

/// Asks the other nodes to accept a new incarnation of this node.
pub(super) async fn replace(nodes: &[Member], id: i32) -> Outcome<Readmission> {
    let others: Vec<Member> = nodes.iter().filter(|node| node.id != id).cloned().collect();
    let output = Command::new(std::env::current_exe()?)
        .args([
            "cluster",
            "replace",
            &id.to_string(),
            "--yes",
            "--admin",
            &listed(&others, |node| &node.admin),
        ])
        .stdin(Stdio::null())
        .output()
        .await?;
    if output.status.success() {
        return Ok(Readmission::Replaced);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let status = output
        .status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(Status::Error, Status::from_number);
    if status == Status::NotFound {
        return Ok(Readmission::Removed);
    }
    let message = format!("node {id} cannot be let in again\n{}", said.trim());
    Err(Failure::new(status, message).hint("most of the other nodes must run"))
}

/// True if the other nodes list this node as a member.
pub(super) async fn is_member(nodes: &[Member], id: i32) -> Outcome<bool> {
    #[derive(serde::Deserialize)]
    struct Report {
        nodes: Vec<Known>,
    }
    #[derive(serde::Deserialize)]
    struct Known {
        node_id: i32,
    }
    let others: Vec<Member> =
        nodes.iter().filter(|node| node.id != id && node.pid.is_some()).cloned().collect();
    let output = Command::new(std::env::current_exe()?)
        .args(["cluster", "status", "-o", "json", "--admin", &listed(&others, |node| &node.admin)])
        .stdin(Stdio::null())
        .output()
        .await?;
    let report: Report = serde_json::from_slice(&output.stdout).map_err(|error| {
        let said = String::from_utf8_lossy(&output.stderr);
        Failure::error(format!("the cluster does not say who its members are: {error}\n{}", said.trim()))
    })?;
    Ok(report.nodes.iter().any(|node| node.node_id == id))
}
