//! Merges the layers of the configuration: default, file, environment, flag, in this order.
//!
//! Invariant: each value has one origin, and every error names it. An unknown key is an error with the nearest known key
//! as its hint: an ignored key would make a typo look like a setting.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use moim_node::config::Config;
use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::units::{parse_bytes, parse_millis};
use crate::exit::{Failure, Outcome};

/// The file that is read if no file is named and it exists.
pub(crate) const DEFAULT_FILE: &str = "moim.toml";
const ENV_PREFIX: &str = "MOIM__";

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Built in.
    Default,
    /// A line of the configuration file.
    File { path: PathBuf, line: usize },
    /// An environment variable.
    Env(String),
    /// A flag of the command line.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Env(name) => f.write_str(name),
            Self::Flag(flag) => f.write_str(flag),
        }
    }
}

/// A value that a flag sets.
#[derive(Clone, Debug)]
pub(crate) struct FlagValue {
    /// The flag as typed, such as `--kafka-port`.
    pub(crate) flag: &'static str,
    /// The key it sets, such as `kafka.port`.
    pub(crate) key: &'static str,
    /// Its value.
    pub(crate) value: String,
}

/// The effective configuration, with the origin of each value.
#[derive(Clone, Debug)]
pub(crate) struct Effective {
    /// The values.
    pub(crate) config: Config,
    /// The origin of each dotted key that a file, a variable or a flag sets.
    pub(crate) origins: BTreeMap<String, Origin>,
    /// The file that was read.
    pub(crate) file: Option<PathBuf>,
}

impl Effective {
    /// Every key in the order of the structs: dotted name, value, origin.
    pub(crate) fn entries(&self) -> Vec<(String, Value, Origin)> {
        let tree = as_tree(&self.config);
        leaves(&tree)
            .into_iter()
            .map(|(key, value)| {
                let origin = self.origins.get(&key).cloned().unwrap_or(Origin::Default);
                (key, value, origin)
            })
            .collect()
    }
}

/// Reads and merges all layers. A named `file` must exist; without one, `moim.toml` in the current directory is read if it
/// exists.
pub(crate) fn load(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    flags: &[FlagValue],
) -> Outcome<Effective> {
    let mut layers = Layers { tree: as_tree(&Config::default()), origins: BTreeMap::new() };
    let path = match file {
        Some(path) => Some(path.to_owned()),
        None => Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.is_file()),
    };
    if let Some(path) = &path {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))?;
        layers.add_file(path, &text)?;
    }
    // Sorted, so that of two mistakes the same one is always reported.
    let mut env: Vec<_> = env.filter(|(name, _)| name.starts_with(ENV_PREFIX)).collect();
    env.sort();
    for (name, value) in env {
        let key = name[ENV_PREFIX.len()..].replace("__", ".").to_ascii_lowercase();
        layers.set(&key, &Raw::Text(&value), Origin::Env(name))?;
    }
    for flag in flags {
        layers.set(flag.key, &Raw::Text(&flag.value), Origin::Flag(flag.flag))?;
    }
    let effective = layers.finish(path)?;
    Ok(effective)
}

struct Layers {
    tree: Value,
    origins: BTreeMap<String, Origin>,
}

enum Raw<'a> {
    Text(&'a str),
    Toml(&'a DeValue<'a>),
}

impl Layers {
    fn add_file(&mut self, path: &Path, text: &str) -> Outcome {
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            Failure::usage(format!("{}:{line}: {}", path.display(), error.message()))
        })?;
        for (section, value) in table.get_ref().iter() {
            let at = |start| Origin::File { path: path.to_owned(), line: line_of(text, start) };
            let section_name: &str = section.get_ref();
            let DeValue::Table(keys) = value.get_ref() else {
                return Err(self.unknown(section_name, &at(section.span().start)));
            };
            if self.tree.get(section_name).is_none() {
                return Err(self.unknown_section(section_name, &at(section.span().start)));
            }
            for (key, value) in keys.iter() {
                let dotted = format!("{section_name}.{}", key.get_ref());
                self.set(&dotted, &Raw::Toml(value.get_ref()), at(key.span().start))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &str, raw: &Raw<'_>, origin: Origin) -> Outcome {
        let current =
            key.split_once('.').and_then(|(section, name)| self.tree.get(section)?.get(name)).cloned();
        let Some(current) = current else {
            return Err(self.unknown(key, &origin));
        };
        let wrong = |why: String| Failure::usage(format!("`{key}` ({origin}): {why}"));
        let value = convert(key, &current, raw).map_err(wrong)?;
        if let Some((section, name)) = key.split_once('.') {
            self.tree[section][name] = value;
        }
        // The types check one value at a time, so that a range error names its key.
        let typed: Result<Config, _> = serde_json::from_value(self.tree.clone());
        typed.map_err(|error| wrong(error.to_string()))?;
        self.origins.insert(key.to_owned(), origin);
        Ok(())
    }

    fn finish(self, file: Option<PathBuf>) -> Outcome<Effective> {
        let config: Config = serde_json::from_value(self.tree)?;
        let effective = Effective { config, origins: self.origins, file };
        effective.config.check().map_err(|(key, why)| {
            let origin = effective.origins.get(key).unwrap_or(&Origin::Default);
            Failure::usage(format!("`{key}` ({origin}): {why}"))
        })?;
        Ok(effective)
    }

    fn unknown(&self, key: &str, origin: &Origin) -> Failure {
        let name = key.rsplit('.').next().unwrap_or(key);
        let best = leaves(&self.tree)
            .into_iter()
            .map(|(known, _)| {
                let known_name = known.rsplit('.').next().unwrap_or(&known);
                // The right name in the wrong section is nearer than a similar name in the right one.
                let score = distance(key, &known).min(distance(name, known_name) + usize::from(key != known));
                (score, known)
            })
            .min();
        let failure = Failure::usage(format!("unknown key `{key}` ({origin})"));
        match best {
            Some((score, known)) if score <= (name.len() / 3).max(2) => {
                failure.hint(format!("did you mean `{known}`?"))
            }
            _ => failure.hint("`moim config show` lists every key"),
        }
    }

    fn unknown_section(&self, section: &str, origin: &Origin) -> Failure {
        let names = self.tree.as_object().into_iter().flat_map(|map| map.keys());
        let best = names.map(|known| (distance(section, known), known.clone())).min();
        let failure = Failure::usage(format!("unknown section [{section}] ({origin})"));
        match best {
            Some((score, known)) if score <= 2 => failure.hint(format!("did you mean [{known}]?")),
            _ => failure.hint("`moim config show` lists every key"),
        }
    }
}

/// Converts a value to the type of its key. Numbers may be text with a unit if the key names one.
fn convert(key: &str, current: &Value, raw: &Raw<'_>) -> Result<Value, String> {
    let mismatch = |wanted: &str| match raw {
        Raw::Text(text) => format!("must be {wanted}, not `{text}`"),
        Raw::Toml(value) => format!("must be {wanted}, not {}", value.type_str()),
    };
    let text = match raw {
        Raw::Text(text) => Some(*text),
        Raw::Toml(value) => value.as_str(),
    };
    match current {
        Value::Bool(_) => {
            let parsed = match raw {
                Raw::Text(text) => text.parse().ok(),
                Raw::Toml(value) => value.as_bool(),
            };
            parsed.map(Value::Bool).ok_or_else(|| mismatch("true or false"))
        }
        Value::Number(_) => {
            let number = match (raw, text) {
                (_, Some(text)) if key.ends_with("_ms") => parse_millis(text),
                (_, Some(text)) if key.ends_with("_bytes") => parse_bytes(text),
                (Raw::Text(text), _) => text.trim().parse().ok(),
                (Raw::Toml(DeValue::Integer(number)), _) => {
                    i64::from_str_radix(number.as_str(), number.radix()).ok()
                }
                _ => None,
            };
            let wanted = match key {
                _ if key.ends_with("_ms") => "milliseconds or a duration such as \"7d\"",
                _ if key.ends_with("_bytes") => "bytes or a size such as \"64MiB\"",
                _ => "a whole number",
            };
            number.map(Value::from).ok_or_else(|| mismatch(wanted))
        }
        _ => text.map(|text| Value::String(text.to_owned())).ok_or_else(|| mismatch("text")),
    }
}

fn as_tree(config: &Config) -> Value {
    // Plain structs of numbers, text and booleans always serialize; an empty tree would make every key unknown.
    serde_json::to_value(config).unwrap_or_default()
}

fn leaves(tree: &Value) -> Vec<(String, Value)> {
    let sections = tree.as_object().into_iter().flatten();
    let keys = sections.flat_map(|(section, keys)| {
        let keys = keys.as_object().into_iter().flatten();
        keys.map(move |(key, value)| (format!("{section}.{key}"), value.clone()))
    });
    keys.collect()
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1
}

/// The Levenshtein distance of two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
