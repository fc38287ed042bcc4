//! `cargo xtask ci`: the steps of `.ci/run`, in the same order, stopping at the first that fails.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

const STEPS: [&[&str]; 5] = [
    &["fmt", "--all", "--check"],
    &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
    &["xtask", "tidy"],
    &["test", "--workspace", "--locked"],
    &["test", "--package", "moim-sim", "--features", "planted", "--locked", "--", "planted"],
];

/// Runs all steps; true if every step passed.
#[allow(clippy::disallowed_methods)] // elapsed time for the user, not a deadline
pub(crate) fn run(root: &Path) -> Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    for step in STEPS {
        eprintln!("\n==> cargo {}", step.join(" "));
        let start = Instant::now();
        let status =
            Command::new(&cargo).args(step).current_dir(root).status().context("cargo did not start")?;
        eprintln!("    {:.0} s", start.elapsed().as_secs_f64());
        if !status.success() {
            eprintln!("failed: cargo {}", step.join(" "));
            return Ok(false);
        }
    }
    eprintln!("\nall green");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ci_script_runs_the_same_steps_in_the_same_order() {
        let script = include_str!("../../.ci/run");
        let steps: Vec<&str> = script.lines().filter_map(|line| line.strip_prefix("step cargo ")).collect();
        let ours: Vec<String> = STEPS.iter().map(|step| step.join(" ")).collect();
        assert_eq!(steps, ours);
    }
}
