//! `moim cluster members`: the nodes, one line each.

use moim_node::api::{NodeReport, StrangerReport};
use serde::Serialize;

use super::Nodes;
use crate::cmd::or_dash;
use crate::exit::Outcome;
use crate::output::{Output, Report, Section};

#[derive(Serialize)]
struct Members {
    members: Vec<NodeReport>,
    strangers: Vec<StrangerReport>,
}

pub(super) async fn run(nodes: &Nodes, output: Output) -> Outcome {
    let report = nodes.report().await?;
    output.print(&Members { members: report.nodes, strangers: report.strangers })
}

impl Report for Members {
    fn sections(&self) -> Vec<Section> {
        let columns = [
            ">NODE",
            "STATE",
            "ROLE",
            ">VOTER",
            ">LAG",
            ">LEADS",
            ">REPLICAS",
            "ZONE",
            "KAFKA",
            "ETCD",
            "ADMIN",
            "PEER",
            "VERSION",
        ];
        let mut table = Section::new(&columns);
        for node in &self.members {
            table.row(vec![
                node.node_id.to_string(),
                match (node.up, node.order) {
                    (false, _) => "down".to_owned(),
                    (true, None) => "up".to_owned(),
                    (true, Some(order)) => format!("up ({})", order.as_str()),
                },
                node.role.clone(),
                or_dash(node.voter),
                or_dash(node.lag),
                node.leads.to_string(),
                node.replicas.to_string(),
                or_dash(node.zone.as_ref()),
                or_dash(node.kafka.as_ref()),
                or_dash(node.etcd.as_ref()),
                or_dash(node.admin.as_ref()),
                or_dash(node.peer.as_ref()),
                node.version.clone(),
            ]);
        }
        for stranger in &self.strangers {
            let state = if stranger.leaving { "leaving" } else { "no node" };
            let cells = columns.map(|column| match column {
                "STATE" => state.to_owned(),
                "ROLE" => stranger.role.clone(),
                ">VOTER" => stranger.voter.to_string(),
                "PEER" => stranger.peer.clone(),
                _ => "-".to_owned(),
            });
            table.row(cells.to_vec());
        }
        vec![table]
    }
}
