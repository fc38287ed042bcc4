//! `moim group seek`: changes the committed offsets of a group without members.

use moim_base::{Clock as _, SystemClock};
use moim_kafka_client::{Client, Isolation, Offsets, TopicPartition};
use moim_wire_kafka::{ErrorCode, KString};
use serde::Serialize;

use super::SeekArgs;
use super::describe::fetch;
use crate::cmd::or_dash;
use crate::exit::{Failure, Outcome, Status};
use crate::kafka::{self, errors};
use crate::offset_spec::parse_offset_spec;
use crate::output::{Output, Report, Section, note};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &SeekArgs, output: Output) -> Outcome {
    let spec = parse_offset_spec(&args.to, SystemClock::new().wall_ms()).map_err(Failure::usage)?;
    let mut client = kafka::connect(client).await?;
    let committed = match fetch(&mut client, &args.group).await {
        Ok((_, described, committed)) => {
            if !described.members.is_empty() {
                let failure = errors::failure(ErrorCode::NonEmptyGroup.code(), Some("the group has members"));
                return Err(failure.context(format!("group {}", args.group)));
            }
            committed
        }
        // A group that does not exist yet may get its first offsets, if the command names the topics.
        Err(failure) if failure.status == Status::NotFound && !args.topics.is_empty() => Offsets::new(),
        Err(failure) => return Err(failure),
    };
    let partitions = partitions(&mut client, &args.topics, &committed).await?;
    let targets = client.resolve(&partitions, spec, Isolation::ReadUncommitted).await?;
    let moves = targets.iter().map(|(key, to)| Move {
        topic: key.topic.to_string(),
        partition: key.partition,
        from: committed.get(key).copied(),
        to: *to,
    });
    let report = Moves { group: args.group.clone(), dry_run: args.dry_run, moves: moves.collect() };
    if !args.dry_run {
        client.commit(&args.group, &targets).await?;
    }
    output.print(&report)?;
    if args.dry_run {
        note("nothing was changed; leave out --dry-run to do it");
    }
    Ok(())
}

/// The partitions that are named, or all with a committed offset.
async fn partitions(
    client: &mut Client,
    named: &[String],
    committed: &Offsets,
) -> Outcome<Vec<TopicPartition>> {
    if named.is_empty() {
        return Ok(committed.keys().cloned().collect());
    }
    let mut all = Vec::new();
    for name in named {
        // A topic name cannot hold a colon, so what follows one is a partition.
        let (topic, partition) = match name.split_once(':') {
            Some((topic, partition)) => {
                let wrong = |_| Failure::usage(format!("--topic {name}: `{partition}` is not a partition"));
                (topic, Some(partition.parse::<i32>().map_err(wrong)?))
            }
            None => (name.as_str(), None),
        };
        let known = client.partitions(&[KString::from(topic)]).await?;
        let chosen: Vec<_> = known
            .into_iter()
            .filter(|key| partition.is_none_or(|partition| key.partition == partition))
            .collect();
        if chosen.is_empty() {
            return Err(Failure::new(Status::NotFound, format!("there is no partition {name}")));
        }
        all.extend(chosen);
    }
    all.sort();
    all.dedup();
    Ok(all)
}

#[derive(Serialize)]
struct Moves {
    group: String,
    dry_run: bool,
    moves: Vec<Move>,
}

#[derive(Serialize)]
struct Move {
    topic: String,
    partition: i32,
    from: Option<i64>,
    to: i64,
}

impl Report for Moves {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["TOPIC", ">PARTITION", ">FROM", ">TO"]);
        for one in &self.moves {
            table.row(vec![
                one.topic.clone(),
                one.partition.to_string(),
                or_dash(one.from),
                one.to.to_string(),
            ]);
        }
        vec![table]
    }
}
