//! `moim cluster events`: the event log of a node, one line per event.

use std::io::Write as _;
use std::time::Duration;

use moim_node::Signals;
use moim_node::api::ClusterEvent;
use serde::Deserialize;

use super::{EventsArgs, Nodes};
use crate::exit::{Failure, Outcome};
use crate::output::{Format, Output, escape_control};

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Deserialize)]
struct Events {
    node_id: i32,
    events: Vec<ClusterEvent>,
}

pub(super) async fn run(nodes: &Nodes, args: &EventsArgs, output: Output) -> Outcome {
    let mut signals = Signals::listen()?;
    let mut first = fetch_events(nodes, 0).await?;
    let skip = args.num.map_or(0, |num| first.events.len().saturating_sub(num));
    print(output, &first.events[skip..])?;
    let mut last = first.events.last().map_or(0, |event| event.number);
    if !args.follow {
        return Ok(());
    }
    loop {
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            _ = signals.next() => return Ok(()),
        }
        // An unavailable node is polled again; another node that answers in its stead numbers its events differently.
        let Ok(next) = fetch_events(nodes, last).await else { continue };
        if next.node_id != first.node_id {
            first.node_id = next.node_id;
            last = fetch_events(nodes, 0).await?.events.last().map_or(0, |event| event.number);
            continue;
        }
        print(output, &next.events)?;
        last = next.events.last().map_or(last, |event| event.number);
    }
}

async fn fetch_events(nodes: &Nodes, after: u64) -> Outcome<Events> {
    let body = nodes.get(&format!("/api/v1/cluster/events?after={after}")).await?;
    serde_json::from_str(&body)
        .map_err(|error| Failure::error(format!("a node says what this moim does not know: {error}")))
}

fn print(output: Output, events: &[ClusterEvent]) -> Outcome {
    let mut out = std::io::stdout().lock();
    for event in events {
        match output.format {
            Format::Json => {
                serde_json::to_writer(&mut out, event)?;
                writeln!(out)?;
            }
            Format::Table => {
                let at = crate::timestamp::show_time(event.at_ms);
                writeln!(out, "{at}  {:<10}  {}", event.kind, escape_control(&event.text))?;
            }
        }
    }
    Ok(out.flush()?)
}
