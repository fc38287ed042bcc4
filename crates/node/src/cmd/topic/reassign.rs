//! `moim topic reassign`: asks the controller to move a partition. On one node there is nowhere to move to,
//! and the server says so.

use moim_wire_kafka::messages::AlterPartitionReassignmentsRequest;
use moim_wire_kafka::messages::alter_partition_reassignments::{ReassignablePartition, ReassignableTopic};

use super::ReassignArgs;
use crate::client::{Client, errors};
use crate::cmd::Steps;
use crate::exit::{Failure, Outcome};
use crate::output::Output;
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &ReassignArgs, output: Output) -> Outcome {
    let replicas = match args.to.as_str() {
        "cancel" => None,
        list => {
            let wrong =
                |_| Failure::usage(format!("--to {list}: must be node numbers such as 1,2,3, or cancel"));
            Some(
                list.split(',')
                    .map(|id| id.trim().parse())
                    .collect::<Result<Vec<i32>, _>>()
                    .map_err(wrong)?,
            )
        }
    };
    let mut client = Client::connect(client).await?;
    let brokers = client.broker_ids().await?;
    if let Some(unknown) = replicas.iter().flatten().find(|id| !brokers.contains(id)) {
        let message = format!("there is no node {unknown}; the cluster has {}", crate::cmd::joined(&brokers));
        return Err(Failure::new(crate::exit::Status::NotFound, message));
    }
    let partition = ReassignablePartition { partition_index: args.partition, replicas };
    let topic = ReassignableTopic { name: args.name.as_str().into(), partitions: vec![partition] };
    let request = AlterPartitionReassignmentsRequest {
        timeout_ms: client.timeout_ms(),
        topics: vec![topic],
        ..Default::default()
    };
    let answer = client.controller(&request, |answer| answer.error_code).await?;
    errors::check(answer.error_code, answer.error_message.as_deref())?;
    let mut steps = Steps::default();
    for topic in answer.responses {
        for one in topic.partitions {
            let name = format!("{}:{}", topic.name, one.partition_index);
            let done = if args.to == "cancel" { "move cancelled" } else { "move accepted" };
            steps.add(&name, done, one.error_code, one.error_message.as_deref());
        }
    }
    steps.finish(output)
}
