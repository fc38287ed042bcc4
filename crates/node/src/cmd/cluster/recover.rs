//! `moim cluster recover`: lets a data directory go on that was found to be an older copy, where no other copy is left.

use std::path::Path;

use serde::Serialize;

use super::RecoverArgs;
use crate::data_dir;
use crate::exit::{Failure, Outcome};
use crate::output::{Output, Report, Section};

/// Added to the run: more than any folder was ever started.
const JUMP: u64 = 1 << 32;

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
    let identity = data_dir::edit(Path::new(&args.data), |identity| {
        identity.run += JUMP;
        identity.forced = true;
        identity.aside = None;
    })?;
    output.print(&Recovered {
        data: args.data.clone(),
        node_id: identity.node_id,
        run: identity.run + 1,
        may_be_missing: "whatever was acknowledged after this copy of the directory was made",
    })
}
