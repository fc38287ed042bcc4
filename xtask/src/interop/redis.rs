//! The clients of Redis Cluster (Python, Node, Go, Java) on three nodes, and Redis's own test suite on one node with
//! all slots.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

use super::clients::{install_go, install_maven, install_packages, run_go};
use super::{Bench, Protocol, Suite, SuiteError, capture, check, install, output_tail, require_tool};

const PYTHON: [&str; 1] = ["redis==8.1.0"];
/// Environment variable with the path of a Redis 7.0 checkout, whose test suite is run.
const SOURCES: &str = "MOIM_TEST_REDIS_SOURCES";
/// Excludes tests that need a command which stops the server, forks, or inspects Redis internals.
const TAGS: &str = "-slow -needs:debug -needs:repl -needs:save";
/// A unit that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(600);

pub(super) fn suites() -> Vec<Suite> {
    let suite = |name, install, run| Suite { name, protocol: Protocol::Redis, install, run, settings: &[] };
    vec![
        suite("redis-py", install_python, run_python),
        suite(
            "ioredis",
            |bench| install_node(bench, "ioredis"),
            |bench, at| run_node(bench, "check_ioredis.mjs", at),
        ),
        suite(
            "node-redis",
            |bench| install_node(bench, "redis"),
            |bench, at| run_node(bench, "check_node_redis.mjs", at),
        ),
        suite("go-redis", |bench| install_go(bench, "goredis"), |bench, at| run_go(bench, "goredis", at)),
        suite("jedis", |bench| install_java(bench, "jedis-"), |bench, at| run_java(bench, "jedis", at)),
        suite(
            "lettuce",
            |bench| install_java(bench, "lettuce-core-"),
            |bench, at| run_java(bench, "lettuce", at),
        ),
        super::redis_tools::suite(),
        Suite {
            name: "redis-tcl",
            protocol: Protocol::RedisAlone,
            install: find_suite,
            run: run_suite,
            settings: &[],
        },
    ]
}

fn install_python(bench: &Bench) -> Result<String, SuiteError> {
    install_packages(bench, "python-redis", &PYTHON)?;
    Ok(PYTHON[0].rsplit("==").next().unwrap_or_default().to_owned())
}

fn run_python(bench: &Bench, addresses: &str) -> Result<usize, SuiteError> {
    let python = bench.dir("python-redis")?.join("bin/python");
    check(Command::new(python).arg(bench.programs("python").join("check_redis.py")).arg(addresses))
}

fn install_node(bench: &Bench, package: &str) -> Result<String, SuiteError> {
    require_tool("node")?;
    require_tool("npm")?;
    let dir = bench.dir("node")?;
    bench.copy("node", &dir)?;
    install(Command::new("npm").args(["install", "--silent", "--no-audit", "--no-fund"]).current_dir(&dir))?;
    super::clients::version_of(&dir.join("node_modules").join(package).join("package.json"))
}

fn run_node(bench: &Bench, program: &str, addresses: &str) -> Result<usize, SuiteError> {
    check(Command::new("node").arg(program).arg(addresses).current_dir(bench.dir("node")?))
}

fn install_java(bench: &Bench, library: &str) -> Result<String, SuiteError> {
    install_maven(bench, "redis-java", "CheckRedis.java", library)
}

fn run_java(bench: &Bench, client: &str, addresses: &str) -> Result<usize, SuiteError> {
    let dir = bench.dir("redis-java")?;
    check(Command::new("java").args(["-cp", "lib/*:out", "CheckRedis", client, addresses]).current_dir(dir))
}

fn sources() -> Result<PathBuf, SuiteError> {
    let missing = || SuiteError::Missing(format!("{SOURCES} names no checkout of Redis 7.0"));
    let path = PathBuf::from(std::env::var_os(SOURCES).ok_or_else(missing)?);
    if path.join("tests/test_helper.tcl").is_file() { Ok(path) } else { Err(missing()) }
}

fn find_suite(_: &Bench) -> Result<String, SuiteError> {
    require_tool("tclsh")?;
    let version = std::fs::read_to_string(sources()?.join("src/version.h")).context("version.h")?;
    Ok(version.split('"').nth(1).unwrap_or_default().to_owned())
}

/// A unit of Redis's test suite.
struct Unit {
    name: String,
    /// Minimum number of passing tests: it only grows.
    wanted: usize,
    /// Excluded tests, because they would abort the unit.
    without: Vec<String>,
}

/// The units that pass. A line that begins with `- ` names an excluded test of the unit above it.
fn units(text: &str) -> anyhow::Result<Vec<Unit>> {
    let mut units: Vec<Unit> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(test) = line.strip_prefix("- ") {
            units.last_mut().context("a test of no unit")?.without.push(test.to_owned());
            continue;
        }
        let (name, count) = line.split_once(' ').context("a line of redis-units.txt")?;
        units.push(Unit { name: name.to_owned(), wanted: count.trim().parse()?, without: Vec::new() });
    }
    Ok(units)
}

fn run_suite(bench: &Bench, address: &str) -> Result<usize, SuiteError> {
    let (host, port) = address.rsplit_once(':').unwrap_or((address, "6379"));
    let (mut passed, mut short) = (0, Vec::new());
    let sources = sources()?;
    std::fs::create_dir_all(sources.join("tests/tmp")).context("the suite's folder")?;
    let list = bench.root.join("crates/interop/redis-units.txt");
    let text = std::fs::read_to_string(&list).context("redis-units.txt")?;
    for Unit { name: unit, wanted, without } in units(&text)? {
        let mut command = Command::new("tclsh");
        command
            .args(["tests/test_helper.tcl", "--host", host, "--port", port, "--cluster-mode"])
            .args([
                "--ignore-encoding",
                "--ignore-digest",
                "--clients",
                "1",
                "--tags",
                TAGS,
                "--single",
                &unit,
            ])
            .args(without.iter().flat_map(|test| ["--skiptest", test]))
            .current_dir(&sources);
        let output = capture(&mut command, TIMEOUT)?;
        let fine = String::from_utf8_lossy(&output.stdout).lines().filter(|line| is_ok(line)).count();
        eprintln!("    {unit} {fine} of {wanted}");
        std::fs::write(bench.home.join(format!("redis-{}.log", unit.replace('/', "-"))), &output.stdout)
            .context("its log")?;
        passed += fine;
        if fine < wanted {
            short.push(format!("{unit} {fine} of {wanted}: {}", output_tail(&output)));
        }
    }
    if short.is_empty() { Ok(passed) } else { Err(SuiteError::Failed { passed, reason: short.join("\n") }) }
}

/// A line like `[ok]: name (3 ms)`, coloured or not.
fn is_ok(line: &str) -> bool {
    let mut plain = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, text)| text);
    }
    plain.push_str(rest);
    plain.starts_with("[ok]:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_tests_belong_to_the_unit_above_them() {
        let units = units("# why\nunit/a 3\n  - one test\n\nunit/b 4\n").unwrap();
        assert_eq!((units[0].wanted, units[0].without.as_slice()), (3, &["one test".to_owned()][..]));
        assert!(units[1].name == "unit/b" && units[1].without.is_empty());
        assert!(super::units("- one").is_err() && super::units("unit/a x").is_err());
    }

    #[test]
    fn tests_that_passed_are_counted_in_any_colour() {
        assert!(is_ok("[ok]: a test (1 ms)"));
        assert!(is_ok("[\u{1b}[0;32;49mok\u{1b}[0m]: a test (1 ms)"));
        assert!(!is_ok("[\u{1b}[0;31;49merr\u{1b}[0m]: a test"));
        assert!(!is_ok("all [ok]: not at the start"));
    }
}
