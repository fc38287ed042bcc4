//! `moim cluster recover`: accepts a rolled-back data directory if no other replica of its data is left.

use std::path::Path;

use moim_node::offline;
use serde::Serialize;

use super::RecoverArgs;
use crate::exit::{Failure, Outcome};
use crate::output::{Output, Report, Section};

#[derive(Serialize)]
struct Recovered {
    data: String,
    node_id: i32,
    run: u64,
    may_be_missing: &'static str,
}

impl Report for Recovered {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("Directory", self.data.clone()),
            ("Node", self.node_id.to_string()),
            ("Next run", self.run.to_string()),
            ("May be missing", self.may_be_missing.to_owned()),
        ])]
    }
}

pub(super) fn run(args: &RecoverArgs, output: Output) -> Outcome {
    if !args.accept_data_loss {
        let message = "this gives up what was acknowledged after the copy was made and is on no other node";
        return Err(Failure::usage(message).hint("add --accept-data-loss to do it"));
    }
    let recovered = offline::accept_rollback(Path::new(&args.data))?;
    output.print(&Recovered {
        data: args.data.clone(),
        node_id: recovered.node_id,
        run: recovered.next_run,
        may_be_missing: "whatever was acknowledged after this copy of the directory was made",
    })
}
