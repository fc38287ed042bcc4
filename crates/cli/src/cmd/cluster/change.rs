//! `moim cluster remove` and `moim cluster replace`.

use std::time::Duration;

use serde::Serialize;

use super::{ChangeArgs, Nodes, RemoveArgs, empty};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, confirm};

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(200);

/// The result of a change.
#[derive(Serialize)]
pub(super) struct Changed {
    pub(super) node_id: i32,
    pub(super) result: &'static str,
}

impl Report for Changed {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&[">NODE", "RESULT"]);
        table.row(vec![self.node_id.to_string(), self.result.to_owned()]);
        vec![table]
    }
}

pub(super) async fn remove(nodes: &Nodes, args: &RemoveArgs, output: Output) -> Outcome {
    let node_id = args.change.node_id;
    confirm(&format!("remove node {node_id} from the cluster for good"), args.change.yes)?;
    if !args.force {
        empty::wait_until_empty(nodes, node_id).await?;
    }
    nodes.change(&format!("/api/v1/cluster/nodes/{node_id}/remove?force={}", args.force)).await?;
    let gone = async {
        loop {
            // The node that took the request may be the one that is removed: another node has to answer, if any is left.
            if let Ok(report) = nodes.report().await
                && !report.nodes.iter().any(|node| node.node_id == node_id)
                && !report.problems.iter().any(|problem| problem.contains("still has its vote"))
            {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    if tokio::time::timeout(nodes.timeout, gone).await.is_err() {
        let message = format!("node {node_id} is removed, but the cluster has not settled yet");
        return Err(
            Failure::new(Status::Timeout, message).hint("`moim cluster health --watch` shows how far it is")
        );
    }
    output.print(&Changed { node_id, result: "removed" })
}

pub(super) async fn replace(nodes: &Nodes, args: &ChangeArgs, output: Output) -> Outcome {
    let node_id = args.node_id;
    confirm(&format!("give the place of node {node_id} to another data folder"), args.yes)?;
    nodes.change(&format!("/api/v1/cluster/nodes/{node_id}/replace")).await?;
    output.print(&Changed { node_id, result: "waits for its replacement" })
}
