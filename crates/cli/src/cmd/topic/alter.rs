//! `moim topic alter`: sets and unsets single settings; the others stay as they are.

use moim_wire_kafka::messages::IncrementalAlterConfigsRequest;
use moim_wire_kafka::messages::incremental_alter_configs::{AlterConfigsResource, AlterableConfig};

use super::AlterArgs;
use super::describe::TOPIC_RESOURCE;
use crate::cmd::Steps;
use crate::exit::Outcome;
use crate::kafka;
use crate::output::Output;
use crate::target::ClientArgs;

const SET: i8 = 0;
const DELETE: i8 = 1;

pub(super) async fn run(client: &ClientArgs, args: &AlterArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let set = args.configs.iter().map(|(key, value)| AlterableConfig {
        name: key.into(),
        config_operation: SET,
        value: Some(value.into()),
    });
    let unset = args.unset.iter().map(|key| AlterableConfig {
        name: key.into(),
        config_operation: DELETE,
        value: None,
    });
    let configs: Vec<_> = set.chain(unset).collect();
    let resource = |name: &String| AlterConfigsResource {
        resource_type: TOPIC_RESOURCE,
        resource_name: name.into(),
        configs: configs.clone(),
    };
    let request = IncrementalAlterConfigsRequest {
        resources: args.names.iter().map(resource).collect(),
        validate_only: args.dry_run,
    };
    let answer = client
        .request_controller(&request, |answer| answer.responses.first().map_or(0, |one| one.error_code))
        .await?;
    let mut steps = Steps::default();
    for one in answer.responses {
        let done = if args.dry_run { "would be altered" } else { "altered" };
        steps.add(&one.resource_name, done, one.error_code, one.error_message.as_deref());
    }
    steps.finish(output)
}
