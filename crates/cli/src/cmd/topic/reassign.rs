//! `moim topic reassign`: partition reassignment without downtime, and its progress.
//!
//! The flags become a plan ([`plan`]): for each partition the nodes of its replicas, the preferred leader first. The plan
//! is sent as AlterPartitionReassignments, as Kafka's own tool does; the cluster executes it whether this command waits
//! or not.

mod plan;
mod progress;
mod throttle;

use std::collections::BTreeSet;
use std::time::Duration;

use moim_kafka_client::Client;
use moim_wire_kafka::messages::AlterPartitionReassignmentsRequest;
use moim_wire_kafka::messages::alter_partition_reassignments::{ReassignablePartition, ReassignableTopic};
use serde::Serialize;

use self::plan::{Move, Seat};
use super::{Rate, ReassignArgs};
use crate::cmd::joined;
use crate::exit::{Failure, Outcome, Status};
use crate::kafka::{self, errors};
use crate::output::{Output, Report, Section, counted, note};
use crate::target::ClientArgs;

/// The poll interval.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn run(client: &ClientArgs, args: &ReassignArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    if args.status {
        return progress::show(&mut client, &args.names, args.partition, output).await;
    }
    let (names_nothing, moves_nothing) = (args.names.is_empty(), args.to.is_none() && args.drain.is_none());
    if let (Some(Rate(rate)), true, true, None) = (args.throttle, names_nothing, moves_nothing, &args.plan) {
        return throttle::set(&mut client, rate).await;
    }
    let seats = seats(&mut client, args).await?;
    if args.cancel || args.to.as_deref() == Some("cancel") {
        return cancel(&mut client, &seats, output).await;
    }
    let brokers = client.broker_ids().await?;
    let moves = match (&args.to, args.drain, &args.plan) {
        (Some(list), _, _) => {
            let nodes = node_list(list, &brokers)?;
            match args.partition {
                Some(_) => seats.iter().map(|seat| seat.to(nodes.clone())).collect(),
                None => plan::spread(&seats, &nodes),
            }
        }
        (None, Some(node), _) => plan::drain(&seats, node, &brokers).map_err(refused)?,
        (None, None, Some(file)) => from_file(file, &seats, &brokers)?,
        (None, None, None) => {
            return Err(Failure::usage("where to? name nodes with --to 1,2,3, --drain NODE or --plan FILE"));
        }
    };
    let moves: Vec<Move> = moves.into_iter().filter(Move::changes_something).collect();
    let mut report = Moves { dry_run: args.dry_run, moves: moves.iter().map(Row::planned).collect() };
    if args.dry_run || moves.is_empty() {
        return output.print(&report);
    }
    if let Some(Rate(rate)) = args.throttle {
        throttle::set(&mut client, rate).await?;
    }
    send(&mut client, &moves, &mut report).await?;
    if !args.no_wait {
        watch(&mut client, &mut report).await?;
    }
    if let Some(Rate(Some(_))) = args.throttle {
        match args.no_wait {
            true => note("the rate stays until `moim topic reassign --throttle none`"),
            false => throttle::set(&mut client, None).await?,
        }
    }
    output.print(&report)?;
    match report.moves.iter().find(|row| row.state == "refused") {
        Some(row) => Err(Failure::error(format!("{}:{}: {}", row.topic, row.partition, row.why()))),
        None => Ok(()),
    }
}

fn refused(why: String) -> Failure {
    Failure::new(Status::Conflict, why)
}

/// The present replicas of the partitions that the flags select.
async fn seats(client: &mut Client, args: &ReassignArgs) -> Outcome<Vec<Seat>> {
    let named: Vec<_> = args.names.iter().map(|name| name.as_str().into()).collect();
    let names = if named.is_empty() { None } else { Some(&named[..]) };
    if names.is_none() && args.to.is_some() {
        return Err(Failure::usage("name the topics to move"));
    }
    let metadata = client.metadata(names, false).await?;
    let mut seats = Vec::new();
    for topic in metadata.topics {
        let name = topic.name.unwrap_or_default().to_string();
        errors::check(topic.error_code, None).map_err(|failure| failure.context(&name))?;
        let meant = |index: i32| args.partition.is_none_or(|wanted| wanted == index);
        let found = topic.partitions.into_iter().filter(|one| meant(one.partition_index));
        seats.extend(found.map(|one| Seat {
            topic: name.clone(),
            partition: one.partition_index,
            replicas: one.replica_nodes,
        }));
    }
    seats.sort();
    if let (true, Some(partition)) = (seats.is_empty(), args.partition) {
        return Err(Failure::new(Status::NotFound, format!("there is no partition {partition}")));
    }
    Ok(seats)
}

fn node_list(list: &str, brokers: &[i32]) -> Outcome<Vec<i32>> {
    let wrong = |_| Failure::usage(format!("--to {list}: must be node numbers such as 1,2,3, or cancel"));
    let nodes =
        list.split(',').map(|id| id.trim().parse()).collect::<Result<Vec<i32>, _>>().map_err(wrong)?;
    check_nodes(&nodes, brokers)?;
    Ok(nodes)
}

fn check_nodes(nodes: &[i32], brokers: &[i32]) -> Outcome {
    match nodes.iter().find(|id| !brokers.contains(id)) {
        None => Ok(()),
        Some(unknown) => {
            let message = format!("there is no node {unknown}; the cluster has {}", joined(brokers));
            Err(Failure::new(Status::NotFound, message))
        }
    }
}

/// A plan in the form of Kafka's own tool.
fn from_file(file: &str, seats: &[Seat], brokers: &[i32]) -> Outcome<Vec<Move>> {
    let text = std::fs::read_to_string(file).map_err(|error| Failure::usage(format!("{file}: {error}")))?;
    let wanted = plan::parse(&text).map_err(|error| Failure::usage(format!("{file}: {error}")))?;
    let mut moves = Vec::new();
    for one in wanted {
        check_nodes(&one.replicas, brokers)?;
        let seat = seats.iter().find(|seat| seat.topic == one.topic && seat.partition == one.partition);
        let Some(seat) = seat else {
            let message = format!("there is no partition {}:{}", one.topic, one.partition);
            return Err(Failure::new(Status::NotFound, message));
        };
        moves.push(seat.to(one.replicas));
    }
    Ok(moves)
}

/// Sends the plan and adds the result of each partition to the report.
async fn send(client: &mut Client, moves: &[Move], report: &mut Moves) -> Outcome {
    let timeout_ms = client.timeout_ms();
    let mut request = AlterPartitionReassignmentsRequest { timeout_ms, ..Default::default() };
    for one in moves {
        let wanted =
            ReassignablePartition { partition_index: one.seat.partition, replicas: Some(one.to.clone()) };
        match request.topics.last_mut().filter(|topic| *topic.name == *one.seat.topic) {
            Some(topic) => topic.partitions.push(wanted),
            None => request
                .topics
                .push(ReassignableTopic { name: one.seat.topic.as_str().into(), partitions: vec![wanted] }),
        }
    }
    let answer = client.request_controller(&request, |answer| answer.error_code).await?;
    errors::check(answer.error_code, answer.error_message.as_deref())?;
    for topic in answer.responses {
        for one in topic.partitions {
            let row = report.row(&topic.name, one.partition_index);
            let Some(row) = row else { continue };
            row.state = if one.error_code == 0 { "moving" } else { "refused" };
            row.error = (one.error_code != 0)
                .then(|| errors::failure(one.error_code, one.error_message.as_deref()).message);
        }
    }
    Ok(())
}

/// Shows the progress until no reassignment of the plan is in progress.
async fn watch(client: &mut Client, report: &mut Moves) -> Outcome {
    let deadline = client.deadline();
    let mut last = None;
    loop {
        let progress = progress::look(client).await?;
        let moving: BTreeSet<_> = progress.iter().map(|one| (one.topic.clone(), one.partition)).collect();
        for row in report.moves.iter_mut().filter(|row| row.state == "moving") {
            if !moving.contains(&(row.topic.clone(), row.partition)) {
                row.state = "moved";
            }
        }
        let left = report.moves.iter().filter(|row| row.state == "moving").count();
        if left == 0 {
            return Ok(());
        }
        let here = |one: &&progress::Progress| {
            report.moves.iter().any(|row| row.topic == one.topic && row.partition == one.partition)
        };
        let said = format!(
            "{left} of {} still moving, {}",
            counted(report.moves.len() as u64, "partition"),
            progress::sum(progress.iter().filter(here))
        );
        if last.as_ref() != Some(&said) {
            note(&said);
            last = Some(said);
        }
        if tokio::time::Instant::now() >= deadline {
            note("the moves go on; `moim topic reassign --status` shows how far they are");
            return Err(Failure::new(
                Status::Timeout,
                format!("{} still moving", counted(left as u64, "partition")),
            ));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The partitions with a reassignment in progress.
async fn under_way(client: &mut Client) -> Outcome<BTreeSet<(String, i32)>> {
    let moving = progress::list(client).await?;
    Ok(moving.into_iter().map(|one| (one.topic, one.partition)).collect())
}

/// Cancels the reassignments of the selected partitions, if any are in progress.
async fn cancel(client: &mut Client, seats: &[Seat], output: Output) -> Outcome {
    let moving = under_way(client).await?;
    let meant = seats.iter().filter(|seat| moving.contains(&(seat.topic.clone(), seat.partition)));
    let mut request =
        AlterPartitionReassignmentsRequest { timeout_ms: client.timeout_ms(), ..Default::default() };
    let mut report = Moves { dry_run: false, moves: Vec::new() };
    for seat in meant {
        let wanted = ReassignablePartition { partition_index: seat.partition, replicas: None };
        request.topics.push(ReassignableTopic { name: seat.topic.as_str().into(), partitions: vec![wanted] });
        report.moves.push(Row::new(seat, seat.replicas.clone(), "cancelled"));
    }
    if report.moves.is_empty() {
        return Err(Failure::new(Status::NotFound, "no move is under way there"));
    }
    let answer = client.request_controller(&request, |answer| answer.error_code).await?;
    errors::check(answer.error_code, answer.error_message.as_deref())?;
    for topic in &answer.responses {
        for one in &topic.partitions {
            errors::check(one.error_code, one.error_message.as_deref())
                .map_err(|failure| failure.context(format!("{}:{}", topic.name, one.partition_index)))?;
        }
    }
    output.print(&report)
}

#[derive(Serialize)]
struct Moves {
    dry_run: bool,
    moves: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    topic: String,
    partition: i32,
    from: Vec<i32>,
    to: Vec<i32>,
    /// `planned`, `moving`, `moved`, `cancelled` or `refused`.
    state: &'static str,
    error: Option<String>,
}

impl Moves {
    fn row(&mut self, topic: &str, partition: i32) -> Option<&mut Row> {
        self.moves.iter_mut().find(|row| row.topic == topic && row.partition == partition)
    }
}

impl Row {
    fn new(seat: &Seat, to: Vec<i32>, state: &'static str) -> Self {
        let (topic, partition) = (seat.topic.clone(), seat.partition);
        Self { topic, partition, from: seat.replicas.clone(), to, state, error: None }
    }

    fn planned(one: &Move) -> Self {
        Self::new(&one.seat, one.to.clone(), "planned")
    }

    fn why(&self) -> &str {
        self.error.as_deref().unwrap_or("refused")
    }
}

impl Report for Moves {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["TOPIC", ">PARTITION", "FROM", "TO", "STATE"]);
        for row in &self.moves {
            table.row(vec![
                row.topic.clone(),
                row.partition.to_string(),
                joined(&row.from),
                joined(&row.to),
                row.state.to_owned(),
            ]);
        }
        vec![table]
    }
}
