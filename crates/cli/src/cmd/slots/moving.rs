//! `moim slots move`, `rebalance`, `status` and `abort`.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use moim_slots::service::{MoveReport, SlotsReport};
use moim_slots::slot_set::SlotSet;
use serde::{Deserialize, Serialize};

use super::{MoveArgs, WaitArgs, report};
use crate::cmd::cluster::Nodes;
use crate::cmd::or_dash;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section};

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Deserialize)]
struct Begun {
    moves: Vec<u64>,
}

/// Moves, as they stand.
#[derive(Serialize)]
struct Moves {
    moves: Vec<MoveReport>,
}

impl Report for Moves {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&[">MOVE", ">FROM", ">TO", ">SLOTS", "STATE", ">BYTES", "RANGES"]);
        for one in &self.moves {
            table.row(vec![
                one.id.to_string(),
                one.from.to_string(),
                one.to.to_string(),
                one.slot_count.to_string(),
                one.state.clone(),
                or_dash(Some(one.bytes).filter(|bytes| *bytes > 0)),
                one.slots.clone(),
            ]);
        }
        vec![table]
    }
}

pub(super) async fn begin(nodes: &Nodes, args: &MoveArgs, output: Output) -> Outcome {
    let which = match (&args.slots, args.count) {
        (Some(slots), _) => {
            let slots = SlotSet::parse(slots).map_err(|error| Failure::usage(error.to_string()))?;
            format!("slots={slots}")
        }
        (None, count) => format!("count={}", count.unwrap_or(0)),
    };
    let path = format!("/api/v1/slots/move?from={}&to={}&{which}", args.from, args.to);
    finish(nodes, &path, &args.wait, output).await
}

pub(super) async fn rebalance(nodes: &Nodes, args: &WaitArgs, output: Output) -> Outcome {
    finish(nodes, "/api/v1/slots/rebalance", args, output).await
}

/// Begins moves and sees them to their end.
async fn finish(nodes: &Nodes, path: &str, args: &WaitArgs, output: Output) -> Outcome {
    let body = nodes.ask_for(path).await?;
    let begun: Begun = serde_json::from_str(&body)
        .map_err(|error| Failure::error(format!("a node says what this moim does not know: {error}")))?;
    let mine = |report: SlotsReport| -> Vec<MoveReport> {
        let all = report.over.into_iter().chain(report.moves);
        all.filter(|one| begun.moves.contains(&one.id)).collect()
    };
    if args.no_wait {
        return output.print(&Moves { moves: mine(report(nodes).await?) });
    }
    let deadline = tokio::time::Instant::now() + nodes.timeout;
    let mut line = Line::new();
    loop {
        // A node that fails over meanwhile does not end the move; another answers.
        if let Ok(report) = report(nodes).await {
            let waits: Vec<u64> = report.moves.iter().map(|one| one.id).collect();
            let left = begun.moves.iter().filter(|id| waits.contains(id)).count();
            let now = report.moves.iter().find(|one| begun.moves.contains(&one.id));
            line.show(begun.moves.len() - left, begun.moves.len(), now);
            if left == 0 {
                line.end();
                return outcome(Moves { moves: mine(report) }, output);
            }
        }
        if tokio::time::Instant::now() >= deadline {
            line.end();
            let message = format!("the slots have not all moved after {} s", nodes.timeout.as_secs());
            return Err(Failure::new(Status::Timeout, message)
                .hint("the move goes on: `moim slots status` shows it, --timeout waits longer"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn outcome(moves: Moves, output: Output) -> Outcome {
    output.print(&moves)?;
    match moves.moves.iter().find(|one| one.state == "aborted") {
        Some(one) => Err(Failure::new(Status::Conflict, format!("move {} was given up", one.id))),
        None => Ok(()),
    }
}

pub(super) async fn status(nodes: &Nodes, output: Output) -> Outcome {
    let report = report(nodes).await?;
    output.print(&Moves { moves: report.over.into_iter().chain(report.moves).collect() })
}

pub(super) async fn abort(nodes: &Nodes, id: u64, output: Output) -> Outcome {
    nodes.ask_for(&format!("/api/v1/slots/moves/{id}/abort")).await?;
    let report = report(nodes).await?;
    let all = report.over.into_iter().chain(report.moves);
    output.print(&Moves { moves: all.filter(|one| one.id == id).collect() })
}

/// How far the moves are, on one line of a terminal.
struct Line {
    is_terminal: bool,
}

impl Line {
    fn new() -> Self {
        Self { is_terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, done: usize, all: usize, now: Option<&MoveReport>) {
        if !self.is_terminal {
            return;
        }
        let what = now.map_or_else(String::new, |one| {
            format!(
                "  move {}: {} slots from shard {} to {}, {} ({:.1} MiB)",
                one.id,
                one.slot_count,
                one.from,
                one.to,
                one.state,
                one.bytes as f64 / f64::from(1 << 20)
            )
        });
        let mut out = std::io::stderr().lock();
        // A terminal that cannot be written to is no reason to stop.
        let _ = write!(out, "\r\x1b[K{done}/{all} moves{what}").and_then(|()| out.flush());
    }

    fn end(&mut self) {
        if self.is_terminal {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }
}
