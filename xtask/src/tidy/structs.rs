//! Caps on the size of a struct: one with more than a dozen fields or a handful of locks is several things.
//!
//! Structs above the caps are listed with their numbers, which may only go down: a struct that grows is a finding, and so is one
//! that has become smaller than its entry.

use super::Finding;

/// Fields of a struct.
const MAX_FIELDS: usize = 16;
/// Fields of a struct that are locks.
const MAX_LOCKS: usize = 4;

/// Structs above the caps: file, name, fields, locks.
const EXCEPTIONS: [(&str, &str, usize, usize); 27] = [
    // Plain data: settings, arguments, figures, records.
    ("crates/cli/src/cli.rs", "ServeArgs", 21, 0),
    ("crates/cli/src/cmd/bench/pipeline.rs", "Measured", 17, 0),
    ("crates/cluster/src/metrics.rs", "ClusterMetrics", 25, 0),
    ("crates/node/src/config.rs", "KafkaConfig", 19, 0),
    ("crates/node/src/control/report.rs", "NodeReport", 21, 0),
    ("crates/node/src/data_dir.rs", "Identity", 17, 0),
    ("crates/queue/src/broker.rs", "BrokerOptions", 37, 0),
    ("crates/queue/src/config.rs", "TopicConfig", 17, 0),
    ("crates/slot-client/src/options.rs", "Options", 18, 0),
    // To be split.
    ("crates/coord/src/engine.rs", "Inner", 17, 0),
    ("crates/journal/src/journal.rs", "Journal", 18, 3),
    ("crates/journal/src/journal.rs", "State", 19, 0),
    ("crates/journal/src/store.rs", "Inner", 48, 18),
    ("crates/pipeline/src/simulation.rs", "World", 17, 0),
    ("crates/queue/src/broker.rs", "Broker", 30, 2),
    ("crates/queue/src/connection.rs", "Connection", 31, 0),
    ("crates/replica/src/controller.rs", "Controller", 18, 0),
    ("crates/replica/src/driver.rs", "Shared", 21, 5),
    ("crates/replica/src/world/node.rs", "SimNode", 18, 0),
    ("crates/slots/src/connection.rs", "Connection", 20, 0),
    ("crates/slots/src/keyspace.rs", "Keyspace", 19, 0),
    ("crates/slots/src/service.rs", "Service", 18, 10),
    ("crates/slots/src/session.rs", "Session", 33, 1),
    ("crates/slots/src/shard.rs", "Shard", 34, 2),
    ("crates/slots/src/shard.rs", "State", 19, 0),
    ("crates/slots/src/shared.rs", "About", 18, 0),
    ("crates/slots/src/shared.rs", "Shared", 29, 2),
];

/// A struct of a file: the line of its head, its name, its fields and how many of them are locks.
#[derive(Debug, PartialEq, Eq)]
struct Size<'a> {
    line: usize,
    name: &'a str,
    fields: usize,
    locks: usize,
}

/// Findings about the structs of a Rust file.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    if !path.ends_with(".rs") || !path.starts_with("crates/") {
        return Vec::new();
    }
    let sizes = sizes(text);
    let mut findings: Vec<Finding> = sizes.iter().filter_map(|size| judge(path, size)).collect();
    for (_, name, ..) in EXCEPTIONS.iter().filter(|(file, ..)| *file == path) {
        if !sizes.iter().any(|size| size.name == *name) {
            let message = format!("`{name}` is gone: remove it from EXCEPTIONS in xtask/src/tidy/structs.rs");
            findings.push(Finding::at(path, 0, message));
        }
    }
    findings
}

fn judge(path: &str, size: &Size<'_>) -> Option<Finding> {
    let Size { line, name, fields, locks } = size;
    let message = match EXCEPTIONS.iter().find(|(file, known, ..)| *file == path && known == name) {
        Some((.., max_fields, max_locks)) if fields > max_fields || locks > max_locks => {
            format!(
                "`{name}` has grown to {fields} fields and {locks} locks ({max_fields} and {max_locks} before): split it"
            )
        }
        Some((.., max_fields, max_locks)) if fields < max_fields || locks < max_locks => {
            format!(
                "`{name}` has shrunk to {fields} fields and {locks} locks: lower its entry in xtask/src/tidy/structs.rs"
            )
        }
        None if *fields > MAX_FIELDS || *locks > MAX_LOCKS => {
            format!(
                "`{name}` has {fields} fields and {locks} locks ({MAX_FIELDS} and {MAX_LOCKS} are allowed): split it"
            )
        }
        Some(_) | None => return None,
    };
    Some(Finding::at(path, *line, message))
}

/// The structs with named fields, as rustfmt writes them.
fn sizes(text: &str) -> Vec<Size<'_>> {
    let mut found: Vec<Size<'_>> = Vec::new();
    // The indentation of the struct whose body this is.
    let mut inside = None;
    for (at, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        match inside {
            None => {
                if let Some(name) = struct_name(line.trim_start()) {
                    found.push(Size { line: at + 1, name, fields: 0, locks: 0 });
                    inside = Some(indent);
                }
            }
            Some(of) if indent == of && line.trim_start().starts_with('}') => inside = None,
            Some(of) if indent == of + 4 && is_field(line.trim_start()) => {
                let size = found.last_mut().expect("inside of a struct");
                size.fields += 1;
                size.locks += usize::from(line.contains("Mutex<") || line.contains("RwLock<"));
            }
            Some(_) => {}
        }
    }
    found
}

/// The name in the head of a struct with named fields.
fn struct_name(line: &str) -> Option<&str> {
    let head = without_visibility(line).strip_prefix("struct ")?.strip_suffix('{')?;
    head.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

fn is_field(line: &str) -> bool {
    let rest = without_visibility(line);
    let name = rest.split(": ").next().unwrap_or_default();
    rest.contains(": ")
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

fn without_visibility(line: &str) -> &str {
    match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(line, |(_, rest)| rest),
        Some(rest) => rest.trim_start(),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
/// A thing.
pub(crate) struct Thing<'a, T: Copy> {
    /// doc: with a colon
    pub(super) one: u8,
    #[serde(rename = \"a: b\")]
    pub two: Arc<Mutex<u8>>,
    three: Vec<(
        u8,
    )>,
}

struct Unit;
mod inner {
    struct Small {
        only: u8,
    }
}
";

    #[test]
    fn fields_and_locks_are_counted() {
        let wanted = [
            Size { line: 2, name: "Thing", fields: 3, locks: 1 },
            Size { line: 14, name: "Small", fields: 1, locks: 0 },
        ];
        assert_eq!(sizes(TEXT), wanted);
    }

    #[test]
    fn large_struct_is_a_finding_and_an_exception_may_only_shrink() {
        let body = |fields: usize| {
            let fields: String = (0..fields).map(|n| format!("    f{n}: u8,\n")).collect();
            format!("struct Keyspace {{\n{fields}}}\n")
        };
        assert!(check("crates/x/src/a.rs", &body(MAX_FIELDS)).is_empty());
        assert_eq!(check("crates/x/src/a.rs", &body(MAX_FIELDS + 1)).len(), 1);
        let known = "crates/slots/src/keyspace.rs";
        let (_, _, fields, _) = EXCEPTIONS.iter().find(|(file, ..)| *file == known).expect("an exception");
        assert!(check(known, &body(*fields)).is_empty());
        assert_eq!(check(known, &body(fields + 1)).len(), 1, "it has grown");
        assert_eq!(check(known, &body(fields - 1)).len(), 1, "its entry is too high");
        assert_eq!(check(known, "").len(), 1, "it is gone");
    }
}
