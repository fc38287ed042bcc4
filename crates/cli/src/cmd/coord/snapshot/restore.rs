//! `moim coord snapshot restore`: the data directory of a new node that begins with the keys of a snapshot file.

use std::path::Path;

use moim_node::offline;
use serde::Serialize;

use super::Snapshot;
use crate::exit::Outcome;
use crate::output::{Output, Report, Section};

#[derive(Serialize)]
struct Restored {
    data: String,
    node_id: i32,
    cluster_id: String,
    revision: i64,
    keys: usize,
}

impl Report for Restored {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("data", self.data.clone()),
            ("node", self.node_id.to_string()),
            ("cluster", self.cluster_id.clone()),
            ("revision", self.revision.to_string()),
            ("keys", self.keys.to_string()),
        ])]
    }
}

pub(super) fn run(file: &Path, data: &Path, node_id: i32, output: Output) -> Outcome {
    offline::refuse_used(data)?;
    let restored = offline::restore(data, node_id, Snapshot::read(file)?.state)?;
    output.print(&Restored {
        data: data.display().to_string(),
        node_id,
        cluster_id: restored.cluster_id,
        revision: restored.revision,
        keys: restored.keys,
    })
}
