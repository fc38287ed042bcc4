//! `moim cluster status`: the cluster in a few lines.

use moim_node::api::ClusterReport;

use super::Nodes;
use crate::cmd::or_dash;
use crate::config::units::show_bytes;
use crate::exit::Outcome;
use crate::output::{Output, Report, Section};

pub(super) async fn run(nodes: &Nodes, output: Output) -> Outcome {
    output.print(&nodes.report().await?)
}

impl Report for ClusterReport {
    fn sections(&self) -> Vec<Section> {
        let up = self.nodes.iter().filter(|node| node.up).count();
        let voters =
            self.nodes.iter().filter(|node| matches!(node.role.as_str(), "leader" | "voter")).count();
        let health = if self.healthy { "healthy".to_owned() } else { self.problems.join("; ") };
        let partitions = &self.partitions;
        let node = |id: Option<i32>| id.map_or_else(|| "-".to_owned(), |id| format!("node {id}"));
        vec![Section::pairs([
            ("Cluster", self.cluster_id.clone()),
            ("Health", health),
            ("Nodes", format!("{} ({up} up, {voters} vote)", self.nodes.len())),
            ("Leader", node(self.leader)),
            ("Controller", node(self.controller)),
            (
                "Partitions",
                format!(
                    "{} ({} without a leader, {} not fully in sync, {} moving)",
                    partitions.total, partitions.leaderless, partitions.under_replicated, partitions.moving
                ),
            ),
            ("Term", self.term.to_string()),
            ("Revision", self.revision.to_string()),
            ("Applied", self.applied.to_string()),
            ("Store", show_bytes(self.db_bytes)),
            ("Feature level", or_dash(self.feature_level)),
        ])]
    }
}
