//! `moim version`.

use moim_node::DATA_FORMAT;
use serde::Serialize;

use crate::exit::Outcome;
use crate::output::{Output, Report, Section};

#[derive(Serialize)]
struct Version {
    version: &'static str,
    data_format: u32,
    target: String,
}

impl Report for Version {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("moim", self.version.to_owned()),
            ("data format", self.data_format.to_string()),
            ("target", self.target.clone()),
        ])]
    }
}

pub(crate) fn run(output: Output) -> Outcome {
    let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    output.print(&Version { version: env!("CARGO_PKG_VERSION"), data_format: DATA_FORMAT, target })
}
