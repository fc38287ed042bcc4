//! `moim slots map`, `where` and `durability`.

use moim_slots::service::ShardReport;
use serde::Serialize;

use super::report;
use crate::cmd::cluster::Nodes;
use crate::cmd::or_dash;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section};

#[derive(Serialize)]
struct Map {
    epoch: u64,
    assigned: usize,
    moves: usize,
    shards: Vec<ShardReport>,
}

impl Report for Map {
    fn sections(&self) -> Vec<Section> {
        let columns = [">SHARD", ">NODE", "PRIMARY", "REPLICAS", ">SLOTS", ">EPOCH", "DURABILITY", "RANGES"];
        let mut table = Section::new(&columns);
        for shard in &self.shards {
            let replicas = Some(shard.replicas.join(",")).filter(|replicas| !replicas.is_empty());
            table.row(vec![
                shard.shard.to_string(),
                or_dash(shard.primary_node),
                or_dash(shard.primary.as_ref()),
                or_dash(replicas),
                shard.slot_count.to_string(),
                shard.epoch.to_string(),
                shard.durability.clone(),
                or_dash(Some(&shard.slots).filter(|slots| !slots.is_empty())),
            ]);
        }
        vec![table]
    }
}

pub(super) async fn map(nodes: &Nodes, output: Output) -> Outcome {
    let report = report(nodes).await?;
    output.print(&Map {
        epoch: report.epoch,
        assigned: report.assigned,
        moves: report.moves.len(),
        shards: report.shards,
    })
}

#[derive(Serialize)]
struct KeyOwner {
    key: String,
    slot: u16,
    shard: u16,
    primary_node: Option<i32>,
    primary: Option<String>,
    replicas: Vec<String>,
}

impl Report for KeyOwner {
    fn sections(&self) -> Vec<Section> {
        let replicas = Some(self.replicas.join(",")).filter(|replicas| !replicas.is_empty());
        vec![Section::pairs([
            ("key", self.key.clone()),
            ("slot", self.slot.to_string()),
            ("shard", self.shard.to_string()),
            ("node", or_dash(self.primary_node)),
            ("primary", or_dash(self.primary.as_ref())),
            ("replicas", or_dash(replicas)),
        ])]
    }
}

pub(super) async fn place(nodes: &Nodes, key: &str, output: Output) -> Outcome {
    let (report, slot) = (report(nodes).await?, moim_slots::slot_of(key.as_bytes()));
    let has = |shard: &ShardReport| {
        moim_slots::slot_set::SlotSet::parse(&shard.slots).is_ok_and(|slots| slots.contains(slot))
    };
    let Some(shard) = report.shards.into_iter().find(has) else {
        return Err(Failure::new(Status::NotFound, format!("slot {slot} has no owner")));
    };
    output.print(&KeyOwner {
        key: key.to_owned(),
        slot,
        shard: shard.shard,
        primary_node: shard.primary_node,
        primary: shard.primary,
        replicas: shard.replicas,
    })
}

#[derive(Serialize)]
struct Promise {
    shard: Option<String>,
    durability: String,
}

impl Report for Promise {
    fn sections(&self) -> Vec<Section> {
        let shard = self.shard.clone().unwrap_or_else(|| "all".to_owned());
        vec![Section::pairs([("shard", shard), ("durability", self.durability.clone())])]
    }
}

pub(super) async fn durability(
    nodes: &Nodes,
    durability: &str,
    shard: Option<&str>,
    output: Output,
) -> Outcome {
    if !["fsync", "async"].contains(&durability) {
        return Err(Failure::usage(format!("{durability} is no durability"))
            .hint("fsync: an answer is on disk; async: it is not yet"));
    }
    let of = shard.map_or_else(String::new, |shard| format!("&shard={shard}"));
    nodes.ask_for(&format!("/api/v1/slots/durability?durability={durability}{of}")).await?;
    output.print(&Promise { shard: shard.map(str::to_owned), durability: durability.to_owned() })
}
