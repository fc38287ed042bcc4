//! `moim topic list`.

use serde::Serialize;

use super::ListArgs;
use crate::exit::Outcome;
use crate::kafka::{self, errors};
use crate::output::{Output, Report, Section, note_empty};
use crate::target::ClientArgs;

pub(super) async fn run(client: &ClientArgs, args: &ListArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let metadata = client.metadata(None, false).await?;
    let mut topics = Vec::new();
    for topic in metadata.topics {
        if topic.is_internal && !args.internal {
            continue;
        }
        let name = topic.name.unwrap_or_default().to_string();
        errors::check(topic.error_code, None).map_err(|failure| failure.context(&name))?;
        topics.push(Topic {
            name,
            partitions: topic.partitions.len(),
            replication_factor: topic.partitions.first().map_or(0, |partition| partition.replica_nodes.len()),
            internal: topic.is_internal,
        });
    }
    topics.sort_by(|a, b| a.name.cmp(&b.name));
    if topics.is_empty() {
        note_empty(output, "no topics yet; `moim topic create NAME` makes one");
    }
    output.print(&Topics { topics })
}

#[derive(Serialize)]
struct Topics {
    topics: Vec<Topic>,
}

#[derive(Serialize)]
struct Topic {
    name: String,
    partitions: usize,
    replication_factor: usize,
    internal: bool,
}

impl Report for Topics {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["NAME", ">PARTITIONS", ">REPLICAS"]);
        for topic in &self.topics {
            table.row(vec![
                topic.name.clone(),
                topic.partitions.to_string(),
                topic.replication_factor.to_string(),
            ]);
        }
        vec![table]
    }
}
