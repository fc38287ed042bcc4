//! Rules for the documents: links have existing targets, the crate map is complete, and the glossary defines each term
//! once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::Finding;

/// Required documents.
const NEEDED: [&str; 7] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs/compatibility.md",
    "docs/glossary.md",
    "docs/journal.md",
];

/// The required documents that are missing.
pub(crate) fn missing(paths: &[String]) -> Vec<Finding> {
    let absent = NEEDED.iter().filter(|needed| !paths.iter().any(|path| path == *needed));
    absent.map(|needed| Finding::at(needed, 0, "this document is missing")).collect()
}

/// All findings in one document. `exists` gets paths from the workspace root.
pub(crate) fn check(
    path: &str,
    text: &str,
    crates: &[String],
    exists: &dyn Fn(&str) -> bool,
) -> Vec<Finding> {
    let mut findings = broken_links(path, text, exists);
    match path {
        "ARCHITECTURE.md" => findings.extend(crate_map(path, text, crates)),
        "docs/glossary.md" => findings.extend(duplicate_terms(path, text)),
        _ => {}
    }
    findings
}

/// Relative links whose target does not exist.
fn broken_links(path: &str, text: &str, exists: &dyn Fn(&str) -> bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in prose(text) {
        for target in targets(line) {
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
                continue;
            }
            if !resolve(path, file).is_some_and(|found| exists(&found)) {
                findings.push(Finding::at(path, number, format!("a link to nothing: {target}")));
            }
        }
    }
    findings
}

/// Crates that the map names and that do not exist, and crates that it omits. A crate is named by `crates/<name>` or
/// by the first cell of a table row under a heading cell `crate`.
fn crate_map(path: &str, text: &str, crates: &[String]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut named = Vec::new();
    let mut in_table = false;
    for (index, line) in text.lines().enumerate() {
        let mut here: Vec<String> = mentions(line).map(str::to_owned).collect();
        match first_cell(line) {
            None => in_table = false,
            Some(cell) if cell.eq_ignore_ascii_case("crate") => in_table = true,
            Some(cell) if in_table => {
                let name = cell.trim_matches('`');
                let name = name.strip_prefix("crates/").unwrap_or(name);
                if is_name(name) && name != "xtask" {
                    here.push(name.to_owned());
                }
            }
            Some(_) => {}
        }
        here.dedup();
        for name in here {
            if !crates.contains(&name) {
                findings.push(Finding::at(path, index + 1, format!("no such crate: {name}")));
            }
            named.push(name);
        }
    }
    for forgotten in crates.iter().filter(|name| !named.contains(name)) {
        findings.push(Finding::at(path, 0, format!("the map misses crates/{forgotten}")));
    }
    findings
}

/// Terms that the glossary defines more than once, without regard to case. A definition is a table row; its first cell
/// has the term in bold, or several synonyms, each in bold.
fn duplicate_terms(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut defined: HashMap<String, usize> = HashMap::new();
    for (number, line) in prose(text) {
        let Some(cell) = first_cell(line) else { continue };
        for term in cell.split("**").skip(1).step_by(2) {
            match defined.entry(term.to_lowercase()) {
                Entry::Vacant(entry) => drop(entry.insert(number)),
                Entry::Occupied(entry) => {
                    let message = format!("term already defined in line {}: {term}", entry.get());
                    findings.push(Finding::at(path, number, message));
                }
            }
        }
    }
    findings
}

/// The lines outside of code fences.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((index + 1, line))
    })
}

/// The targets in the round brackets of `[text](target)`.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target.trim())
}

/// The path of a link, from the workspace root; none if it leaves the workspace.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = match target.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => from.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev().collect(),
    };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn mentions(line: &str) -> impl Iterator<Item = &str> {
    line.split("crates/").skip(1).filter_map(|rest| {
        let end = rest
            .find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'))
            .unwrap_or(rest.len());
        (end > 0).then(|| &rest[..end])
    })
}

fn first_cell(line: &str) -> Option<&str> {
    line.trim().strip_prefix('|')?.split('|').next().map(str::trim)
}

fn is_name(cell: &str) -> bool {
    !cell.is_empty()
        && cell.starts_with(|c: char| c.is_ascii_lowercase())
        && cell.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_resolve_from_the_folder_of_their_file() {
        let there = ["docs/journal.md", "README.md"];
        let exists = |path: &str| there.contains(&path);
        let cases = [
            ("README.md", "[j](docs/journal.md)", 0),
            ("README.md", "[j](docs/journal.md#recovery) and [r](#top)", 0),
            ("docs/glossary.md", "[j](journal.md), [r](../README.md)", 0),
            ("docs/glossary.md", "[j](docs/journal.md)", 1),
            ("README.md", "[out](../elsewhere.md)", 1),
            ("README.md", "[web](https://kafka.apache.org)", 0),
            ("README.md", "```\n[x](nothing.md)\n```", 0),
            ("README.md", "[a](nothing.md) [b](void.md)", 2),
        ];
        for (path, text, count) in cases {
            assert_eq!(broken_links(path, text, &exists).len(), count, "{path}: {text}");
        }
    }

    #[test]
    fn crate_map_is_compared_both_ways() {
        let crates = ["base".to_owned(), "queue".to_owned()];
        let check = |text| {
            crate_map("ARCHITECTURE.md", text, &crates).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            check("| crate | owns |\n|---|---|\n| `base` | ids |\n| `queue` | broker |\n"),
            [] as [&str; 0]
        );
        assert_eq!(check("crates/base, `crates/queue/src/lib.rs`\n"), [] as [&str; 0]);
        assert_eq!(check("crates/base\n"), ["ARCHITECTURE.md: the map misses crates/queue"]);
        assert_eq!(
            check("crates/base crates/queue\ncrates/slots\n"),
            ["ARCHITECTURE.md:2: no such crate: slots"]
        );
        assert_eq!(
            check("| crate |\n|---|\n| `base` |\n| `queue` |\n| `raft` |\n\n| word |\n|---|\n| `thing` |\n"),
            ["ARCHITECTURE.md:5: no such crate: raft"]
        );
    }

    #[test]
    fn term_is_defined_once_in_the_glossary() {
        let check = |text| {
            let findings = check("docs/glossary.md", text, &[], &|_| true);
            findings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let once = "| term | meaning |\n|---|---|\n| **run** | A start. |\n| **in-sync set**, **ISR** | Replicas. |\n";
        assert_eq!(check(once), [] as [&str; 0]);
        assert_eq!(check("| **run** | A start with a **mark**. |\n| **mark** | Entry. |\n"), [] as [&str; 0]);
        assert_eq!(
            check("| **Run** | A start. |\n\n## Nodes\n| **run** | A registration. |\n"),
            ["docs/glossary.md:4: term already defined in line 1: run"]
        );
        assert_eq!(
            check("| **in-sync set**, **ISR** | Replicas. |\n| **ISR** | The same. |\n"),
            ["docs/glossary.md:2: term already defined in line 1: ISR"]
        );
    }

    #[test]
    fn a_missing_document_is_named() {
        let all: Vec<String> = NEEDED.iter().map(ToString::to_string).collect();
        assert_eq!(missing(&all), []);
        assert_eq!(missing(&all[1..]), [Finding::at("ARCHITECTURE.md", 0, "this document is missing")]);
    }
}
