//! `moim cluster drain`, `undrain`, and the first half of `remove`: gives a node an order and waits until it is executed.

use std::time::Duration;

use moim_node::api::{ClusterReport, NodeReport};

use super::change::Changed;
use super::{NodeArgs, Nodes};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, counted, note};

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn drain(nodes: &Nodes, args: &NodeArgs, output: Output) -> Outcome {
    let node_id = args.node_id;
    nodes.change(&format!("/api/v1/cluster/nodes/{node_id}/drain")).await?;
    let stays = |node: &NodeReport| node.leads.saturating_sub(node.only_copies);
    wait(nodes, node_id, "led by node", stays).await?;
    let left = find(&nodes.report().await?, node_id).map_or(0, |node| node.leads);
    if left > 0 {
        let what = counted(left as u64, "partition");
        note(format!("{what} stay with node {node_id}: no other node has an in-sync replica"));
    }
    output.print(&Changed { node_id, result: "drained" })
}

pub(super) async fn undrain(nodes: &Nodes, args: &NodeArgs, output: Output) -> Outcome {
    let node_id = args.node_id;
    nodes.change(&format!("/api/v1/cluster/nodes/{node_id}/undrain")).await?;
    output.print(&Changed { node_id, result: "may lead again" })
}

/// Orders that all replicas leave a node, and returns when none is left.
pub(super) async fn wait_until_empty(nodes: &Nodes, node_id: i32) -> Outcome {
    nodes.change(&format!("/api/v1/cluster/nodes/{node_id}/empty")).await?;
    let report = nodes.report().await?;
    if let Some(node) = find(&report, node_id).filter(|node| node.only_copies > 0) {
        let what = counted(node.only_copies as u64, "partition");
        let hint = match node.up {
            true => "they are copied to other nodes first",
            false => "and it is down: start it, or add --force to give them up",
        };
        note(format!("of {what} only node {node_id} has everything; {hint}"));
    }
    wait(nodes, node_id, "on node", |node| node.replicas).await
}

/// Shows the progress until no replica is left.
async fn wait(nodes: &Nodes, node_id: i32, what: &str, left: impl Fn(&NodeReport) -> usize) -> Outcome {
    let mut last = None;
    let done = async {
        loop {
            if let Ok(report) = nodes.report().await {
                let Some(node) = find(&report, node_id) else { return };
                let left = left(node);
                if left == 0 {
                    return;
                }
                if last != Some(left) {
                    note(format!("{} still {what} {node_id}", counted(left as u64, "partition")));
                }
                last = Some(left);
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    if tokio::time::timeout(nodes.timeout, done).await.is_err() {
        let left = counted(last.unwrap_or(0) as u64, "partition");
        let message = format!("{left} still {what} {node_id} after {} s", nodes.timeout.as_secs());
        return Err(Failure::new(Status::Timeout, message)
            .hint("the order stands and is carried out; `moim cluster undrain` takes it back"));
    }
    Ok(())
}

fn find(report: &ClusterReport, node_id: i32) -> Option<&NodeReport> {
    report.nodes.iter().find(|node| node.node_id == node_id)
}
