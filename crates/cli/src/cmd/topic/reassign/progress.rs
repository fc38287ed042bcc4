//! Progress of reassignments: the adding replicas, and how much of them is there.
//!
//! Sizes come from DescribeLogDirs. A replica may be larger or smaller than its source (compaction and retention remove
//! different parts), so the sizes are approximate and never mean "done": a reassignment is over when it is no longer
//! listed.

use std::collections::HashMap;

use moim_kafka_client::Client;
use moim_wire_kafka::messages::{DescribeLogDirsRequest, ListPartitionReassignmentsRequest};
use serde::Serialize;

use crate::cmd::joined;
use crate::config::units::show_bytes;
use crate::exit::Outcome;
use crate::kafka::errors;
use crate::output::{Output, Report, Section, note_empty};

/// A partition with a reassignment in progress.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub(super) struct Progress {
    pub(super) topic: String,
    pub(super) partition: i32,
    replicas: Vec<i32>,
    adding: Vec<i32>,
    removing: Vec<i32>,
    /// The bytes of the adding replicas, of the bytes that they will have.
    copied_bytes: u64,
    total_bytes: u64,
}

/// Sizes of replicas by topic, partition and node.
type Sizes = HashMap<(String, i32, i32), u64>;

impl Progress {
    fn measure(&mut self, sizes: &Sizes) {
        let size = |node: &i32| sizes.get(&(self.topic.clone(), self.partition, *node)).copied();
        let settled = self.replicas.iter().filter(|node| !self.adding.contains(node));
        let whole = settled.filter_map(size).max().unwrap_or(0);
        self.total_bytes = whole * self.adding.len() as u64;
        self.copied_bytes = self.adding.iter().filter_map(size).map(|size| size.min(whole)).sum();
    }
}

/// The reassignments in progress, without sizes.
pub(super) async fn list(client: &mut Client) -> Outcome<Vec<Progress>> {
    let request = ListPartitionReassignmentsRequest { timeout_ms: client.timeout_ms(), topics: None };
    let answer = client.request_controller(&request, |answer| answer.error_code).await?;
    errors::check(answer.error_code, answer.error_message.as_deref())?;
    let mut all = Vec::new();
    for topic in answer.topics {
        all.extend(topic.partitions.into_iter().map(|one| Progress {
            topic: topic.name.to_string(),
            partition: one.partition_index,
            replicas: one.replicas,
            adding: one.adding_replicas,
            removing: one.removing_replicas,
            ..Progress::default()
        }));
    }
    all.sort_by(|one, two| (&one.topic, one.partition).cmp(&(&two.topic, two.partition)));
    Ok(all)
}

/// The reassignments in progress, with the sizes of nodes that answer.
pub(super) async fn look(client: &mut Client) -> Outcome<Vec<Progress>> {
    let mut all = list(client).await?;
    if all.is_empty() {
        return Ok(all);
    }
    let mut sizes = Sizes::new();
    for node in client.broker_ids().await? {
        // The sizes of an unavailable node are unknown.
        let Ok(answer) = client.request(node, &DescribeLogDirsRequest { topics: None }).await else {
            continue;
        };
        for topic in answer.results.into_iter().flat_map(|directory| directory.topics) {
            for one in topic.partitions {
                let key = (topic.name.to_string(), one.partition_index, node);
                sizes.insert(key, u64::try_from(one.partition_size).unwrap_or(0));
            }
        }
    }
    all.iter_mut().for_each(|one| one.measure(&sizes));
    Ok(all)
}

/// The total progress of several reassignments.
pub(super) fn sum<'a>(moves: impl Iterator<Item = &'a Progress>) -> String {
    let add = |(copied, total), one: &Progress| (copied + one.copied_bytes, total + one.total_bytes);
    let (copied, total) = moves.fold((0, 0), add);
    format!("{} of {} copied", show_bytes(copied), show_bytes(total))
}

#[derive(Serialize)]
struct Moving {
    moves: Vec<Progress>,
}

/// Prints the reassignments in progress.
pub(super) async fn show(
    client: &mut Client,
    names: &[String],
    partition: Option<i32>,
    output: Output,
) -> Outcome {
    let mut moves = look(client).await?;
    moves.retain(|one| {
        let named = names.is_empty() || names.contains(&one.topic);
        named && partition.is_none_or(|wanted| wanted == one.partition)
    });
    if moves.is_empty() {
        note_empty(output, "nothing is moving");
    }
    output.print(&Moving { moves })
}

impl Report for Moving {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["TOPIC", ">PARTITION", "REPLICAS", "ADDING", "REMOVING", "COPIED"]);
        for one in &self.moves {
            table.row(vec![
                one.topic.clone(),
                one.partition.to_string(),
                joined(&one.replicas),
                joined(&one.adding),
                joined(&one.removing),
                format!("{} of {}", show_bytes(one.copied_bytes), show_bytes(one.total_bytes)),
            ]);
        }
        vec![table]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_measured_against_the_largest_copy_that_stays() {
        let sizes = Sizes::from([
            (("t".into(), 0, 1), 100),
            (("t".into(), 0, 2), 90),
            (("t".into(), 0, 3), 40),
            (("t".into(), 1, 4), 7),
        ]);
        let check = |replicas: &[i32], adding: &[i32], copied: u64, total: u64| {
            let mut one = Progress {
                topic: "t".into(),
                replicas: replicas.to_vec(),
                adding: adding.to_vec(),
                ..Progress::default()
            };
            one.measure(&sizes);
            assert_eq!((one.copied_bytes, one.total_bytes), (copied, total), "{adding:?}");
        };
        check(&[1, 2, 3], &[3], 40, 100);
        check(&[1, 3, 4], &[3, 4], 40, 200);
        check(&[1, 2], &[], 0, 0);
        check(&[2, 1], &[1], 90, 90);
    }
}
