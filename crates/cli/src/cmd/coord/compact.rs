//! `moim coord compact`.

use moim_wire_grpc::etcd::CompactionRequest;
use serde::Serialize;

use super::CompactArgs;
use crate::coordination::{change_failure, connect};
use crate::exit::Outcome;
use crate::output::{Output, Report, Section};
use crate::target::EtcdArgs;

#[derive(Serialize)]
struct Compacted {
    compacted_revision: i64,
    revision: i64,
}

impl Report for Compacted {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("history begins at", self.compacted_revision.to_string()),
            ("revision", self.revision.to_string()),
        ])]
    }
}

pub(super) async fn run(client: &EtcdArgs, args: &CompactArgs, output: Output) -> Outcome {
    let request = CompactionRequest { revision: args.revision, physical: args.physical };
    let done = connect(client).await?.compact(&request).await.map_err(|error| change_failure(&error))?;
    let revision = done.header.map_or(0, |header| header.revision);
    output.print(&Compacted { compacted_revision: args.revision, revision })
}
