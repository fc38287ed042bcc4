//! `moim topic add-partitions`.

use moim_wire_kafka::KString;
use moim_wire_kafka::messages::CreatePartitionsRequest;
use moim_wire_kafka::messages::create_partitions::CreatePartitionsTopic;

use super::AddPartitionsArgs;
use crate::cmd::Steps;
use crate::exit::Outcome;
use crate::kafka;
use crate::output::Output;
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &AddPartitionsArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let names: Vec<KString> = args.names.iter().map(Into::into).collect();
    let mut topics = Vec::new();
    for topic in client.topics(&names, false, |_, _| false).await? {
        let now = i32::try_from(topic.partitions.len()).unwrap_or(i32::MAX);
        let count = args.to.unwrap_or_else(|| now.saturating_add(args.num.unwrap_or(0)));
        topics.push(CreatePartitionsTopic { name: topic.name.unwrap_or_default(), count, assignments: None });
    }
    let counts: Vec<(KString, i32)> = topics.iter().map(|topic| (topic.name.clone(), topic.count)).collect();
    let request =
        CreatePartitionsRequest { topics, timeout_ms: client.timeout_ms(), validate_only: args.dry_run };
    let answer = client
        .request_controller(&request, |answer| answer.results.first().map_or(0, |one| one.error_code))
        .await?;
    let mut steps = Steps::default();
    for one in answer.results {
        let count = counts.iter().find(|(name, _)| *name == one.name).map_or(0, |(_, count)| *count);
        let verb = if args.dry_run { "would have" } else { "has" };
        let done = format!("{verb} {count} partitions");
        steps.add(&one.name, &done, one.error_code, one.error_message.as_deref());
    }
    steps.finish(output)
}
