//! `moim topic delete`.

use moim_wire_kafka::messages::DeleteTopicsRequest;

use super::DeleteArgs;
use crate::cmd::Steps;
use crate::exit::Outcome;
use crate::kafka;
use crate::output::{Output, confirm};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &DeleteArgs, output: Output) -> Outcome {
    confirm(&format!("delete {} with all messages", args.names.join(", ")), args.yes)?;
    let mut client = kafka::connect(client).await?;
    let request = DeleteTopicsRequest {
        topic_names: args.names.iter().map(Into::into).collect(),
        timeout_ms: client.timeout_ms(),
        ..Default::default()
    };
    let answer = client
        .request_controller(&request, |answer| answer.responses.first().map_or(0, |topic| topic.error_code))
        .await?;
    let mut steps = Steps::default();
    for topic in answer.responses {
        let name = topic.name.unwrap_or_default();
        steps.add(&name, "deleted", topic.error_code, topic.error_message.as_deref());
    }
    steps.finish(output)
}
