//! `moim topic create`.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::CreateTopicsRequest;
use moim_wire_kafka::messages::create_topics::{CreatableTopic, CreatableTopicConfig};

use super::CreateArgs;
use crate::cmd::Steps;
use crate::exit::Outcome;
use crate::kafka;
use crate::output::Output;
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &CreateArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let config = |(key, value): &(String, String)| CreatableTopicConfig {
        name: key.into(),
        value: Some(value.into()),
    };
    let topic = |name: &String| CreatableTopic {
        name: name.into(),
        num_partitions: args.partitions.unwrap_or(-1),
        replication_factor: args.replication_factor.unwrap_or(-1),
        configs: args.configs.iter().map(config).collect(),
        ..Default::default()
    };
    let request = CreateTopicsRequest {
        topics: args.names.iter().map(topic).collect(),
        timeout_ms: client.timeout_ms(),
        validate_only: args.dry_run,
    };
    let answer = client
        .request_controller(&request, |answer| answer.topics.first().map_or(0, |topic| topic.error_code))
        .await?;
    let mut steps = Steps::default();
    for topic in answer.topics {
        let exists = topic.error_code == ErrorCode::TopicAlreadyExists.code();
        if exists && args.if_not_exists {
            steps.add(&topic.name, "exists already", 0, None);
        } else {
            let done = if args.dry_run { "would be created" } else { "created" };
            steps.add(&topic.name, done, topic.error_code, topic.error_message.as_deref());
        }
    }
    steps.finish(output)
}
