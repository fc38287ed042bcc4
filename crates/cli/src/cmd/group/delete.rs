//! `moim group delete`.

use moim_wire_kafka::messages::DeleteGroupsRequest;

use super::DeleteArgs;
use crate::cmd::Steps;
use crate::exit::Outcome;
use crate::kafka;
use crate::output::{Output, confirm};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &DeleteArgs, output: Output) -> Outcome {
    confirm(&format!("delete {} with all committed offsets", args.groups.join(", ")), args.yes)?;
    let mut client = kafka::connect(client).await?;
    let mut steps = Steps::default();
    for group in &args.groups {
        let coordinator = client.coordinator(group).await?;
        let request = DeleteGroupsRequest { groups_names: vec![group.into()] };
        for one in client.request(coordinator, &request).await?.results {
            steps.add(&one.group_id, "deleted", one.error_code, None);
        }
    }
    steps.finish(output)
}
