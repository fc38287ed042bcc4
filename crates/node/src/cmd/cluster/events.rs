//! `moim cluster events`: what has happened, one line each.

use std::io::Write as _;
use std::time::Duration;

use serde::Deserialize;

use super::{EventsArgs, Nodes};
use crate::control::events::ClusterEvent;
use crate::exit::{Failure, Outcome};
use crate::output::{Format, Output, harmless};
use crate::signals::Signals;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(300);

#[derive(Deserialize)]
struct Events {
    node_id: i32,
    events: Vec<ClusterEvent>,
}

pub(super) async fn run(nodes: &Nodes, args: &EventsArgs, output: Output) -> Outcome {
    let mut signals = Signals::listen()?;
    let mut heard = look(nodes, 0).await?;
    let skip = args.num.map_or(0, |num| heard.events.len().saturating_sub(num));
    print(output, &heard.events[skip..])?;
    let mut last = heard.events.last().map_or(0, |event| event.number);
    if !args.follow {
        return Ok(());
    }
    loop {
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            _ = signals.next() => return Ok(()),
        }
        // A node that is away for a while is asked again; whoever else answers has numbers of its own.
        let Ok(news) = look(nodes, last).await else { continue };
        if news.node_id != heard.node_id {
            heard.node_id = news.node_id;
            last = look(nodes, 0).await?.events.last().map_or(0, |event| event.number);
            continue;
        }
        print(output, &news.events)?;
        last = news.events.last().map_or(last, |event| event.number);
    }
}

async fn look(nodes: &Nodes, after: u64) -> Outcome<Events> {
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
                let at = crate::place::show_time(event.at_ms);
                writeln!(out, "{at}  {:<10}  {}", event.kind, harmless(&event.text))?;
            }
        }
    }
    Ok(out.flush()?)
}
