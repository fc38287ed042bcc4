//! librdkafka's own test suite, from the sources in the `rdkafka-sys` crate.
//!
//! `crates/interop/librdkafka-allow.txt` lists the tests that pass. It only grows: a listed test that fails is our
//! failure, and `--rdkafka-tests all` shows which others have started to pass.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Bench, Protocol, Suite, SuiteError, capture, install, require_tool};

/// Timeout of one test on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The version of Apache Kafka whose behaviour the suite expects.
const KAFKA_VERSION: &str = "3.9.0";

pub(super) fn suite() -> Suite {
    Suite {
        name: "librdkafka",
        protocol: Protocol::Kafka,
        install: build,
        run,
        // The configuration of the suite's own cluster.
        settings: &[("kafka.num_partitions", "4"), ("kafka.group_min_session_timeout_ms", "1000")],
    }
}

/// Copies the sources below `target` and builds the test program there, once per version.
fn build(bench: &Bench) -> Result<String, SuiteError> {
    require_tool("cc")?;
    require_tool("make")?;
    let source = sources(&bench.root)?;
    let version = version(&source)?;
    let home = bench.dir("librdkafka")?.join(&version);
    if home.join("tests/test-runner").exists() {
        return Ok(version);
    }
    let _ = std::fs::remove_dir_all(&home);
    install(Command::new("cp").arg("-R").arg(&source).arg(&home))?;
    let steps: [&[&str]; 3] = [
        &["./configure", "--disable-curl", "--disable-sasl", "--disable-ssl"],
        &["make", "-j2", "libs"],
        &["make", "-C", "tests", "build"],
    ];
    for step in steps {
        install(Command::new(step[0]).args(&step[1..]).current_dir(&home))?;
    }
    Ok(version)
}

/// Path of the `rdkafka-sys` sources in cargo's registry.
fn sources(root: &Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root)
        .output()
        .context("cargo did not start")?;
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = json["packages"].as_array().context("no packages")?;
    let Some(package) = packages.iter().find(|package| package["name"] == "rdkafka-sys") else {
        bail!("rdkafka-sys is not a dependency");
    };
    let manifest = package["manifest_path"].as_str().context("no path")?;
    Ok(Path::new(manifest).parent().context("no folder")?.join("librdkafka"))
}

fn version(source: &Path) -> Result<String> {
    let header = std::fs::read_to_string(source.join("src/rdkafka.h")).context("rdkafka.h")?;
    let hex = header
        .lines()
        .find_map(|line| line.strip_prefix("#define RD_KAFKA_VERSION ")?.trim().strip_prefix("0x"))
        .context("no version in rdkafka.h")?;
    let part = |at: usize| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("0"), 16).unwrap_or(0);
    Ok(format!("{}.{}.{}", part(0), part(2), part(4)))
}

fn run(bench: &Bench, address: &str) -> Result<usize, SuiteError> {
    let version = version(&sources(&bench.root)?)?;
    let tests = bench.home.join("librdkafka").join(version).join("tests");
    std::fs::write(
        tests.join("test.conf"),
        format!("bootstrap.servers={address}\nbroker.address.family=v4\n"),
    )
    .context("test.conf")?;
    let wanted = match bench.rdkafka_tests.as_slice() {
        [] => allowed(&std::fs::read_to_string(allow_list(&bench.root)).context("the allow-list")?),
        [all] if all == "all" => numbers(&tests)?,
        some => some.to_vec(),
    };
    let (mut passed, mut failed) = (0, Vec::new());
    for test in &wanted {
        let mut end = run_one(&tests, test)?;
        if end == TestResult::Failed {
            // Some tests measure time and fail on a busy machine; a real defect fails twice.
            end = run_one(&tests, test)?;
        }
        eprintln!("    {test} {end:?}");
        match end {
            TestResult::Passed => passed += 1,
            // A listed test that no longer runs proves nothing.
            TestResult::Skipped if !bench.rdkafka_tests.is_empty() => {}
            TestResult::Skipped | TestResult::Failed => failed.push(test.as_str()),
        }
    }
    if failed.is_empty() {
        return Ok(passed);
    }
    Err(SuiteError::Failed { passed, reason: format!("failed: {}", failed.join(" ")) })
}

/// Result of one test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TestResult {
    Passed,
    /// It needs something unavailable (another version, a Kafka installation) and was skipped.
    Skipped,
    Failed,
}

fn run_one(tests: &Path, test: &str) -> Result<TestResult, SuiteError> {
    let mut command = Command::new("./test-runner");
    command
        .args(["-p1", "-Q", "-E"])
        .current_dir(tests)
        .env("TESTS", test)
        .env("TEST_KAFKA_VERSION", KAFKA_VERSION)
        .env("LD_LIBRARY_PATH", "../src:../src-cpp");
    let log = tests.join(format!("{test}.log"));
    match capture(&mut command, TIMEOUT) {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            let end = result_of(&String::from_utf8_lossy(&text), test);
            std::fs::write(log, text).context("its log")?;
            Ok(if output.status.success() { end } else { TestResult::Failed })
        }
        Err(SuiteError::Failed { reason, .. }) => {
            std::fs::write(log, reason).context("its log")?;
            Ok(TestResult::Failed)
        }
        Err(missing) => Err(missing),
    }
}

/// The test's line in the summary. Without such a line it did not run.
fn result_of(output: &str, test: &str) -> TestResult {
    for line in output.lines() {
        let plain = strip_colours(line);
        if plain.split('|').any(|cell| cell.trim().starts_with(test)) {
            if plain.contains("PASSED") {
                return TestResult::Passed;
            }
            if plain.contains("FAILED") {
                return TestResult::Failed;
            }
        }
    }
    TestResult::Skipped
}

fn strip_colours(line: &str) -> String {
    let mut plain = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    plain + rest
}

fn allow_list(root: &Path) -> PathBuf {
    root.join("crates/interop/librdkafka-allow.txt")
}

/// The tests of an allow-list: the first word of each line that is not a comment.
fn allowed(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// All tests, by the number in their file name. Tests from 1000 on do not terminate by design.
fn numbers(tests: &Path) -> Result<Vec<String>, SuiteError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(tests).context("the tests")? {
        let name = entry.context("a file")?.file_name().to_string_lossy().into_owned();
        let is_test = name.ends_with(".c") || name.ends_with(".cpp");
        if let (true, Some(number)) = (is_test, name.get(..4))
            && number.starts_with('0')
            && number.chars().all(|c| c.is_ascii_digit())
        {
            found.push(number.to_owned());
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allow_list_comments_are_ignored() {
        assert_eq!(allowed("# why\n0001  # produces\n\n0011\n"), ["0001", "0011"]);
    }

    #[test]
    fn allow_list_is_sorted_and_unique() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let listed = allowed(&std::fs::read_to_string(allow_list(root)).unwrap());
        let mut sorted = listed.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(listed, sorted);
        assert!(
            listed.iter().all(|test| test.len() == 4 && test.chars().all(|c| c.is_ascii_digit())),
            "{listed:?}"
        );
    }

    #[test]
    fn only_a_test_that_ran_has_passed() {
        let passed = "| \u{1b}[32m0011_produce_batch                      |   PASSED |   1.234s |\u{1b}[0m\n";
        assert_eq!(result_of(passed, "0011"), TestResult::Passed);
        assert_eq!(result_of(passed, "0012"), TestResult::Skipped);
        assert_eq!(
            result_of("| 0011_produce_batch   |  SKIPPED |   0.000s | why |", "0011"),
            TestResult::Skipped
        );
        assert_eq!(
            result_of("| 0011_produce_batch   |  FAILED |   0.000s | why |", "0011"),
            TestResult::Failed
        );
    }
}
