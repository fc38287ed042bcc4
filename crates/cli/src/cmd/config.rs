//! `moim config check` and `moim config show`.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::cli::ConfigVerb;
use crate::effective;
use crate::exit::Outcome;
use crate::output::{Output, Report, Section};

pub(crate) fn run(verb: &ConfigVerb, output: Output) -> Outcome {
    match verb {
        ConfigVerb::Check(args) => {
            let effective = effective(args)?;
            let set = effective.origins.len();
            output.print(&Checked { ok: true, file: shown(effective.file.as_deref()), values_set: set })
        }
        ConfigVerb::Show(args) => {
            let effective = effective(args)?;
            let entry =
                |(key, value, origin): (String, Value, _)| Entry { key, value, origin: format!("{origin}") };
            let entries = effective.entries().into_iter().map(entry).collect();
            output.print(&Shown { file: shown(effective.file.as_deref()), entries })
        }
    }
}

fn shown(file: Option<&Path>) -> Option<String> {
    file.map(|path| path.display().to_string())
}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    file: Option<String>,
    values_set: usize,
}

impl Report for Checked {
    fn sections(&self) -> Vec<Section> {
        let file = self.file.clone().unwrap_or_else(|| "none (defaults)".to_owned());
        vec![Section::pairs([
            ("configuration", "ok".to_owned()),
            ("file", file),
            ("values set", self.values_set.to_string()),
        ])]
    }
}

#[derive(Serialize)]
struct Shown {
    file: Option<String>,
    entries: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    key: String,
    value: Value,
    origin: String,
}

impl Report for Shown {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["KEY", "VALUE", "FROM"]);
        for entry in &self.entries {
            let value = match &entry.value {
                Value::String(text) if text.is_empty() => "\"\"".to_owned(),
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            table.row(vec![entry.key.clone(), value, entry.origin.clone()]);
        }
        vec![table]
    }
}
