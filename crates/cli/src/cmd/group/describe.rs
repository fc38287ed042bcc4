//! `moim group describe`: members, committed offsets and lag of a group.

use std::collections::BTreeMap;

use moim_kafka_client::{Client, Isolation, LATEST, Offsets, TopicPartition, decode_assignment};
use moim_wire_kafka::messages::DescribeGroupsRequest;
use moim_wire_kafka::messages::describe_groups::{DescribedGroup, DescribedGroupMember};
use moim_wire_kafka::{ErrorCode, KString};
use serde::Serialize;

use super::DescribeArgs;
use crate::cmd::or_dash;
use crate::exit::Outcome;
use crate::kafka::{self, errors};
use crate::output::{Output, Report, Section};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &DescribeArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let mut groups = Vec::new();
    for group in &args.groups {
        groups.push(describe(&mut client, group).await?);
    }
    output.print(&Groups { groups })
}

/// The group as its coordinator describes it. A dead group is not found, unless it has committed offsets.
pub(super) async fn fetch(client: &mut Client, group: &str) -> Outcome<(i32, DescribedGroup, Offsets)> {
    let coordinator = client.coordinator(group).await?;
    let request = DescribeGroupsRequest { groups: vec![group.into()], ..Default::default() };
    let described =
        client.request(coordinator, &request).await?.groups.into_iter().next().unwrap_or_default();
    let missing = ErrorCode::GroupIdNotFound.code();
    if described.error_code != missing {
        errors::check(described.error_code, described.error_message.as_deref())
            .map_err(|failure| failure.context(format!("group {group}")))?;
    }
    let committed = client.committed(group, None).await?;
    let gone = described.error_code == missing || described.group_state == "Dead";
    if gone && committed.is_empty() {
        return Err(
            errors::failure(missing, Some("there is no such group")).context(format!("group {group}"))
        );
    }
    Ok((coordinator, described, committed))
}

async fn describe(client: &mut Client, group: &str) -> Outcome<Group> {
    let (coordinator, described, committed) = fetch(client, group).await?;
    let members: Vec<Member> = described.members.iter().map(member).collect();
    let mut owners: BTreeMap<TopicPartition, &Member> = BTreeMap::new();
    for member in &members {
        owners.extend(member.assigned.iter().map(|key| (key.clone(), member)));
    }
    let mut keys: Vec<TopicPartition> = committed.keys().chain(owners.keys()).cloned().collect();
    keys.sort();
    keys.dedup();
    let ends = ends(client, &keys).await?;
    let offsets: Vec<PartitionLag> = keys
        .iter()
        .map(|key| {
            let (committed, end) = (committed.get(key).copied(), ends.get(key).copied());
            let owner = owners.get(key);
            PartitionLag {
                topic: key.topic.to_string(),
                partition: key.partition,
                committed_offset: committed,
                end_offset: end,
                lag: committed.zip(end).map(|(committed, end)| (end - committed).max(0)),
                member_id: owner.map(|member| member.member_id.clone()),
                client_id: owner.map(|member| member.client_id.clone()),
                host: owner.map(|member| member.host.clone()),
            }
        })
        .collect();
    Ok(Group {
        group: group.to_owned(),
        state: if described.group_state.is_empty() {
            "Dead".to_owned()
        } else {
            described.group_state.to_string()
        },
        protocol_type: described.protocol_type.to_string(),
        assignor: described.protocol_data.to_string(),
        coordinator,
        total_lag: offsets.iter().filter_map(|one| one.lag).sum(),
        members,
        offsets,
    })
}

/// The ends of the partitions that still exist.
async fn ends(client: &mut Client, keys: &[TopicPartition]) -> Outcome<Offsets> {
    let mut topics: Vec<KString> = keys.iter().map(|key| key.topic.clone()).collect();
    topics.dedup();
    if topics.is_empty() {
        return Ok(Offsets::new());
    }
    let known = client.metadata(Some(&topics), false).await?.topics;
    let exists = |key: &TopicPartition| {
        known.iter().any(|topic| {
            topic.name.as_ref() == Some(&key.topic)
                && topic.partitions.iter().any(|one| one.partition_index == key.partition)
        })
    };
    let existing: Vec<TopicPartition> = keys.iter().filter(|key| exists(key)).cloned().collect();
    if existing.is_empty() {
        return Ok(Offsets::new());
    }
    Ok(client.list_offsets(&existing, LATEST, Isolation::ReadUncommitted).await?)
}

fn member(one: &DescribedGroupMember) -> Member {
    // Another protocol's members may carry something else there; then we do not know their partitions.
    let assigned = decode_assignment(one.member_assignment.clone()).unwrap_or_default();
    Member {
        member_id: one.member_id.to_string(),
        instance_id: one.group_instance_id.as_ref().map(ToString::to_string),
        client_id: one.client_id.to_string(),
        host: one.client_host.trim_start_matches('/').to_owned(),
        partitions: assigned
            .iter()
            .map(|key| Owned { topic: key.topic.to_string(), partition: key.partition })
            .collect(),
        assigned,
    }
}

#[derive(Serialize)]
struct Groups {
    groups: Vec<Group>,
}

#[derive(Serialize)]
struct Group {
    group: String,
    state: String,
    protocol_type: String,
    assignor: String,
    coordinator: i32,
    total_lag: i64,
    members: Vec<Member>,
    offsets: Vec<PartitionLag>,
}

#[derive(Serialize)]
struct Member {
    member_id: String,
    instance_id: Option<String>,
    client_id: String,
    host: String,
    partitions: Vec<Owned>,
    #[serde(skip)]
    assigned: Vec<TopicPartition>,
}

#[derive(Serialize)]
struct Owned {
    topic: String,
    partition: i32,
}

#[derive(Serialize)]
struct PartitionLag {
    topic: String,
    partition: i32,
    committed_offset: Option<i64>,
    end_offset: Option<i64>,
    lag: Option<i64>,
    member_id: Option<String>,
    client_id: Option<String>,
    host: Option<String>,
}

impl Report for Groups {
    fn sections(&self) -> Vec<Section> {
        self.groups.iter().flat_map(Group::sections).collect()
    }
}

impl Group {
    fn sections(&self) -> Vec<Section> {
        let mut all = vec![Section::pairs([
            ("group", self.group.clone()),
            ("state", self.state.clone()),
            ("assignor", or_dash(Some(&self.assignor).filter(|name| !name.is_empty()))),
            ("coordinator", self.coordinator.to_string()),
            ("members", self.members.len().to_string()),
            ("total lag", self.total_lag.to_string()),
        ])];
        if !self.offsets.is_empty() {
            let mut table = Section::new(&[
                "TOPIC",
                ">PARTITION",
                ">COMMITTED",
                ">END",
                ">LAG",
                "CLIENT",
                "HOST",
                "MEMBER",
            ]);
            for one in &self.offsets {
                table.row(vec![
                    one.topic.clone(),
                    one.partition.to_string(),
                    or_dash(one.committed_offset),
                    or_dash(one.end_offset),
                    or_dash(one.lag),
                    or_dash(one.client_id.as_ref()),
                    or_dash(one.host.as_ref()),
                    or_dash(one.member_id.as_ref()),
                ]);
            }
            all.push(table);
        }
        let idle: Vec<&Member> = self.members.iter().filter(|member| member.assigned.is_empty()).collect();
        if !idle.is_empty() {
            let mut table = Section::new(&["MEMBER WITHOUT PARTITIONS", "CLIENT", "HOST"]);
            for member in idle {
                table.row(vec![member.member_id.clone(), member.client_id.clone(), member.host.clone()]);
            }
            all.push(table);
        }
        all
    }
}
