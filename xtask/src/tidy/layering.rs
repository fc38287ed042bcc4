//! The allowed dependencies between crates. The list is the architecture: a crate may depend only on crates above it
//! here, some on fewer, and a crate that is not in the list is an error.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::Finding;

/// From the bottom up. A crate may use any crate before it, unless `ONLY` or `NEVER` says otherwise.
const ORDER: [&str; 24] = [
    "base",
    "history",
    "wire-kafka",
    "wire-resp",
    "wire-grpc",
    "journal",
    "raft",
    "coord",
    "state",
    "replica",
    "queue",
    "slots",
    "cluster",
    "slot-client",
    "kafka-client",
    "pipeline",
    "console",
    "node",
    "cli",
    "sim",
    "interop",
    "bench",
    "xtask",
    "fuzz",
];

/// Crates with fewer dependencies than their position allows.
const ONLY: [(&str, &[&str]); 11] = [
    // Judges client-observed histories: it must not depend on the systems under test.
    ("history", &[]),
    // Bytes to types and back: shares nothing with other crates.
    ("wire-kafka", &[]),
    ("wire-resp", &[]),
    ("wire-grpc", &[]),
    ("journal", &["base"]),
    // Clients: they reach the servers over a socket only.
    ("slot-client", &["base", "wire-resp"]),
    ("kafka-client", &["wire-kafka"]),
    ("pipeline", &["base", "wire-kafka", "wire-resp", "wire-grpc", "cluster", "slot-client"]),
    ("interop", &["base", "history", "wire-kafka", "wire-resp", "wire-grpc", "slot-client"]),
    // Uses interop's harness that starts servers; the libraries are those that users link.
    ("bench", &["base", "wire-kafka", "wire-resp", "wire-grpc", "cluster", "slot-client", "interop"]),
    ("xtask", &["base", "bench", "interop"]),
];

/// Forbidden pairs that the positions would allow.
const NEVER: [(&str, &str); 1] = [("slots", "queue")];

/// A crate of the workspace and its dependencies in the workspace, dev-dependencies included.
#[derive(Debug)]
pub(crate) struct Member {
    manifest: String,
    name: String,
    uses: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    path: Option<String>,
}

/// Reads the members from `cargo metadata`.
pub(crate) fn read(root: &Path) -> Result<Vec<Member>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("cargo did not start")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    parse(root, &output.stdout)
}

fn parse(root: &Path, json: &[u8]) -> Result<Vec<Member>> {
    let metadata: Metadata = serde_json::from_slice(json).context("cargo metadata is not understood")?;
    let member = |package: Package| Member {
        manifest: Path::new(&package.manifest_path)
            .strip_prefix(root)
            .map_or_else(|_| package.manifest_path.clone(), |path| path.display().to_string()),
        name: short(&package.name).to_owned(),
        uses: package
            .dependencies
            .iter()
            .filter(|dependency| dependency.path.is_some())
            .map(|dependency| short(&dependency.name).to_owned())
            .collect(),
    };
    Ok(metadata.packages.into_iter().map(member).collect())
}

/// The package name in the layering: the name of its directory.
fn short(package: &str) -> &str {
    match package {
        "moim" => "cli",
        name => name.strip_prefix("moim-").unwrap_or(name),
    }
}

/// Every dependency that the layering forbids.
pub(crate) fn check(members: &[Member]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for member in members {
        if rank(&member.name).is_none() {
            let message =
                format!("crate `{}` has no place in the layering (xtask/src/tidy/layering.rs)", member.name);
            findings.push(Finding::at(&member.manifest, 0, message));
            continue;
        }
        for used in &member.uses {
            if let Some(reason) = forbidden(&member.name, used) {
                let message = format!("`{}` must not use `{used}`: {reason}", member.name);
                findings.push(Finding::at(&member.manifest, 0, message));
            }
        }
    }
    findings
}

fn rank(name: &str) -> Option<usize> {
    ORDER.iter().position(|known| *known == name)
}

fn forbidden(user: &str, used: &str) -> Option<String> {
    if NEVER.contains(&(user, used)) {
        return Some("this pair is forbidden".to_owned());
    }
    if let Some((_, allowed)) = ONLY.iter().find(|(name, _)| *name == user) {
        return (!allowed.contains(&used)).then(|| match allowed {
            [] => "it may use no other crate".to_owned(),
            some => format!("it may use only {}", some.join(", ")),
        });
    }
    (rank(used) >= rank(user)).then(|| "dependencies go down the layering only".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_follow_the_layering() {
        let allowed = [
            ("journal", "base"),
            ("cluster", "state"),
            ("replica", "state"),
            ("queue", "replica"),
            ("queue", "wire-kafka"),
            ("slots", "replica"),
            ("node", "queue"),
            ("node", "slots"),
            ("cli", "node"),
            ("cli", "kafka-client"),
            ("kafka-client", "wire-kafka"),
            ("pipeline", "wire-resp"),
            ("sim", "node"),
            ("xtask", "bench"),
        ];
        for (user, used) in allowed {
            assert_eq!(forbidden(user, used), None, "{user} -> {used}");
        }
        let refused = [
            ("base", "wire-kafka"),
            ("base", "base"),
            ("wire-kafka", "base"),
            ("journal", "wire-kafka"),
            ("journal", "queue"),
            ("slots", "queue"),
            ("queue", "slots"),
            ("pipeline", "queue"),
            ("slot-client", "slots"),
            ("kafka-client", "queue"),
            ("node", "cli"),
            ("interop", "queue"),
            ("bench", "journal"),
            ("node", "xtask"),
        ];
        for (user, used) in refused {
            assert!(forbidden(user, used).is_some(), "{user} -> {used}");
        }
    }

    #[test]
    fn a_crate_outside_of_the_layering_is_reported() {
        let member =
            Member { manifest: "crates/utils/Cargo.toml".into(), name: "utils".into(), uses: vec![] };
        let findings = check(&[member]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].to_string().starts_with("crates/utils/Cargo.toml: crate `utils` has no place"));
    }

    #[test]
    fn metadata_gives_short_names_and_only_our_own_crates() {
        let json =
            br#"{"packages":[{"name":"moim","manifest_path":"/w/crates/cli/Cargo.toml","dependencies":[
            {"name":"moim-queue","path":"/w/crates/queue"},{"name":"bytes","path":null}]}]}"#;
        let members = parse(Path::new("/w"), json).unwrap();
        assert_eq!(members[0].manifest, "crates/cli/Cargo.toml");
        assert_eq!(
            (members[0].name.as_str(), members[0].uses.as_slice()),
            ("cli", &["queue".to_owned()][..])
        );
    }

    #[test]
    fn this_workspace_obeys() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let members = read(root).unwrap();
        assert!(members.iter().any(|member| member.name == "node"), "the workspace was read");
        assert_eq!(check(&members), []);
    }
}
