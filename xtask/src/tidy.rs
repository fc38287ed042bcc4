//! `cargo xtask tidy`: repository rules that are enforced by a check instead of a reviewer.
//!
//! Each rule is a pure function from text to findings; this file only collects the input. A rule that
//! cannot read its input is an error, never a silent pass.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

mod docs;
mod files;
mod layering;
mod structs;

/// A violated rule, with its location.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    file: String,
    /// Line number from 1; 0 if the finding is about the whole file.
    line: usize,
    message: String,
}

impl Finding {
    fn at(file: &str, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.message),
            line => write!(f, "{}:{line}: {}", self.file, self.message),
        }
    }
}

/// Prints every finding; true if nothing was found.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let mut findings = layering::check(&layering::read(root)?);
    let paths = tracked(root)?;
    let crates = crate_names(&paths);
    for path in &paths {
        let Ok(bytes) = std::fs::read(root.join(path)) else { continue }; // deleted, not yet committed
        let Ok(text) = String::from_utf8(bytes) else { continue }; // pictures and golden files
        findings.extend(files::check(path, &text));
        findings.extend(structs::check(path, &text));
        if path.ends_with(".md") {
            findings.extend(docs::check(path, &text, &crates, &|target| root.join(target).exists()));
        }
    }
    findings.extend(docs::missing(&paths));
    findings.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    for finding in &findings {
        eprintln!("{finding}");
    }
    match findings.len() {
        0 => eprintln!("tidy: {} files, no findings", paths.len()),
        n => eprintln!("tidy: {n} finding{}", if n == 1 { "" } else { "s" }),
    }
    Ok(findings.is_empty())
}

/// Every file that git tracks or would track; without git (a source archive) every file outside of `target`.
fn tracked(root: &Path) -> Result<Vec<String>> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output();
    if let Ok(output) = git
        && output.status.success()
    {
        let listing = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
        let mut paths: Vec<String> =
            listing.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
        paths.sort();
        paths.dedup();
        return Ok(paths);
    }
    let mut paths = Vec::new();
    walk(root, &PathBuf::new(), &mut paths)?;
    if paths.is_empty() {
        bail!("no files under {}", root.display());
    }
    paths.sort();
    Ok(paths)
}

fn walk(root: &Path, below: &Path, paths: &mut Vec<String>) -> Result<()> {
    for entry in
        std::fs::read_dir(root.join(below)).with_context(|| format!("cannot list {}", below.display()))?
    {
        let entry = entry?;
        let path = below.join(entry.file_name());
        let text = path.to_str().context("a file name is not UTF-8")?;
        if entry.file_type()?.is_dir() {
            if !["target", ".git", ".moim"].contains(&text) {
                walk(root, &path, paths)?;
            }
        } else {
            paths.push(text.to_owned());
        }
    }
    Ok(())
}

/// The names of the directories under `crates/`.
fn crate_names(paths: &[String]) -> Vec<String> {
    let manifests = paths.iter().filter_map(|path| path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml"));
    manifests.filter(|name| !name.contains('/')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_its_line_only_when_it_has_one() {
        assert_eq!(Finding::at("a.rs", 3, "bad").to_string(), "a.rs:3: bad");
        assert_eq!(Finding::at("a.rs", 0, "bad").to_string(), "a.rs: bad");
    }

    #[test]
    fn crates_are_the_folders_with_a_manifest() {
        let paths =
            ["crates/base/Cargo.toml", "crates/base/src/lib.rs", "crates/base/fuzz/Cargo.toml", "Cargo.toml"];
        assert_eq!(crate_names(&paths.map(str::to_owned)), ["base"]);
    }
}
