//! `moim cluster health`: the health of the cluster, once, on change, or until it is healthy.

use std::time::Duration;

use moim_node::Signals;
use moim_node::api::PartitionCounts;
use serde::Serialize;

use super::{HealthArgs, Nodes};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Format, Output, Report, Section};

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Health {
    healthy: bool,
    problems: Vec<String>,
    nodes: usize,
    nodes_up: usize,
    leader: Option<i32>,
    controller: Option<i32>,
    partitions: PartitionCounts,
}

pub(super) async fn run(nodes: &Nodes, args: &HealthArgs, output: Output) -> Outcome {
    if !args.watch && !args.exit_when_healthy {
        let health = fetch_health(nodes).await?;
        output.print(&health)?;
        return verdict(&health);
    }
    let mut signals = Signals::listen()?;
    let deadline = tokio::time::sleep(nodes.timeout);
    tokio::pin!(deadline);
    let mut last = None;
    loop {
        let health = match fetch_health(nodes).await {
            Ok(health) => health,
            // A cluster without a reachable node is unhealthy, and may come back.
            Err(failure) => Health {
                healthy: false,
                problems: vec![failure.message],
                nodes: 0,
                nodes_up: 0,
                leader: None,
                controller: None,
                partitions: PartitionCounts::default(),
            },
        };
        if args.watch && last.as_ref() != Some(&health) {
            print_line(output, &health)?;
        }
        if health.healthy && args.exit_when_healthy {
            if !args.watch {
                output.print(&health)?;
            }
            return Ok(());
        }
        last = Some(health);
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = &mut deadline, if args.exit_when_healthy => {
                let problems = last.map(|health| health.problems.join("; ")).unwrap_or_default();
                let message = format!("not healthy after {} s: {problems}", nodes.timeout.as_secs());
                return Err(Failure::new(Status::Unhealthy, message));
            }
            _ = signals.next() => return Ok(()),
        }
    }
}

async fn fetch_health(nodes: &Nodes) -> Outcome<Health> {
    let report = nodes.report().await?;
    Ok(Health {
        healthy: report.healthy,
        problems: report.problems,
        nodes: report.nodes.len(),
        nodes_up: report.nodes.iter().filter(|node| node.up).count(),
        leader: report.leader,
        controller: report.controller,
        partitions: report.partitions,
    })
}

fn verdict(health: &Health) -> Outcome {
    if health.healthy {
        return Ok(());
    }
    Err(Failure::new(Status::Unhealthy, "the cluster is not healthy"))
}

/// One line per change: a JSON object, or a sentence.
fn print_line(output: Output, health: &Health) -> Outcome {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    match output.format {
        Format::Json => {
            serde_json::to_writer(&mut out, health)?;
            writeln!(out)?;
        }
        Format::Table => {
            let what = if health.healthy { "healthy".to_owned() } else { health.problems.join("; ") };
            writeln!(
                out,
                "{} of {} nodes up; {}",
                health.nodes_up,
                health.nodes,
                crate::output::escape_control(&what)
            )?;
        }
    }
    Ok(out.flush()?)
}

impl Report for Health {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&[]);
        table.row(vec!["Healthy".to_owned(), if self.healthy { "yes" } else { "no" }.to_owned()]);
        table.row(vec!["Nodes up".to_owned(), format!("{} of {}", self.nodes_up, self.nodes)]);
        let leader = self.leader.map_or_else(|| "-".to_owned(), |leader| format!("node {leader}"));
        table.row(vec!["Leader".to_owned(), leader]);
        let partitions = &self.partitions;
        table.row(vec![
            "Partitions".to_owned(),
            format!(
                "{} ({} without a leader, {} not fully in sync)",
                partitions.total, partitions.leaderless, partitions.under_replicated
            ),
        ]);
        for problem in &self.problems {
            table.row(vec!["Problem".to_owned(), problem.clone()]);
        }
        vec![table]
    }
}
