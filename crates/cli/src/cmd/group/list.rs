//! `moim group list`: queries every broker, since each lists only the groups that it coordinates.

use moim_wire_kafka::messages::ListGroupsRequest;
use serde::Serialize;

use super::ListArgs;
use crate::exit::Outcome;
use crate::kafka::{self, errors};
use crate::output::{Output, Report, Section, note_empty};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &ListArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let mut groups = Vec::new();
    for broker in client.broker_ids().await? {
        let answer = client.request(broker, &ListGroupsRequest::default()).await?;
        errors::check(answer.error_code, None)?;
        groups.extend(answer.groups.iter().map(|group| Group {
            group: group.group_id.to_string(),
            state: group.group_state.to_string(),
            r#type: group.group_type.to_string(),
            protocol_type: group.protocol_type.to_string(),
            coordinator: broker,
        }));
    }
    // Filtered here: older servers ignore the filter.
    groups.retain(|group| {
        args.states.is_empty() || args.states.iter().any(|state| state.eq_ignore_ascii_case(&group.state))
    });
    groups.sort_by(|a, b| a.group.cmp(&b.group));
    if groups.is_empty() {
        note_empty(output, "no groups; `moim topic consume TOPIC -g GROUP` starts one");
    }
    output.print(&Groups { groups })
}

#[derive(Serialize)]
struct Groups {
    groups: Vec<Group>,
}

#[derive(Serialize)]
struct Group {
    group: String,
    state: String,
    r#type: String,
    protocol_type: String,
    coordinator: i32,
}

impl Report for Groups {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["GROUP", "STATE", "PROTOCOL", ">COORDINATOR"]);
        for one in &self.groups {
            let protocol =
                if one.protocol_type.is_empty() { "-".to_owned() } else { one.protocol_type.clone() };
            table.row(vec![one.group.clone(), one.state.clone(), protocol, one.coordinator.to_string()]);
        }
        vec![table]
    }
}
