//! The third-party clients with a small test program each: installation and start.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::{Bench, Protocol, Suite, SuiteError, check, install, require_tool};

/// Versions are pinned, so that a failure is ours and not a new release's.
const PYTHON: [(&str, &str); 3] =
    [("confluent-kafka", "2.16.1"), ("kafka-python", "3.0.12"), ("aiokafka", "0.14.0")];

pub(super) fn suites() -> Vec<Suite> {
    let suite = |name, install, run| Suite { name, protocol: Protocol::Kafka, install, run, settings: &[] };
    vec![
        suite("kcat", install_kcat, run_kcat),
        suite(
            "confluent-kafka-python",
            |bench| install_python(bench, 0),
            |bench, at| run_python(bench, "check_confluent.py", at),
        ),
        suite(
            "kafka-python",
            |bench| install_python(bench, 1),
            |bench, at| run_python(bench, "check_kafka_python.py", at),
        ),
        suite(
            "aiokafka",
            |bench| install_python(bench, 2),
            |bench, at| run_python(bench, "check_aiokafka.py", at),
        ),
        suite("kafkajs", install_node, run_node),
        suite("java-kafka-clients", install_java, run_java),
        suite("franz-go", |bench| install_go(bench, "franz"), |bench, at| run_go(bench, "franz", at)),
        suite("sarama", |bench| install_go(bench, "sarama"), |bench, at| run_go(bench, "sarama", at)),
    ]
}

/// kcat from the machine, or its Debian packages unpacked below `target`.
fn install_kcat(bench: &Bench) -> Result<String, SuiteError> {
    if require_tool("kcat").is_err() && !bench.home.join("kcat/usr/bin/kcat").exists() {
        require_tool("apt-get")?;
        require_tool("dpkg-deb")?;
        let dir = bench.dir("kcat")?;
        install(
            Command::new("apt-get").args(["download", "kcat", "librdkafka1", "libyajl2"]).current_dir(&dir),
        )?;
        let packages = std::fs::read_dir(&dir).context("the packages")?;
        for package in packages.filter_map(Result::ok).map(|entry| entry.path()) {
            if package.extension().is_some_and(|ext| ext == "deb") {
                install(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&dir))?;
            }
        }
    }
    let output = Command::new(kcat(bench)).arg("-V").env("LD_LIBRARY_PATH", kcat_libraries(bench)).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let version =
        text.split_whitespace().find_map(|word| word.strip_prefix("1.").map(|rest| format!("1.{rest}")));
    version.ok_or_else(|| SuiteError::Missing("kcat does not start".to_owned()))
}

fn kcat(bench: &Bench) -> PathBuf {
    let ours = bench.home.join("kcat/usr/bin/kcat");
    if ours.exists() { ours } else { PathBuf::from("kcat") }
}

fn kcat_libraries(bench: &Bench) -> PathBuf {
    let lib = bench.home.join("kcat/usr/lib");
    let machine = std::fs::read_dir(&lib).ok().and_then(|mut dirs| dirs.next()?.ok());
    machine.map_or(lib, |dir| dir.path())
}

fn run_kcat(bench: &Bench, address: &str) -> Result<usize, SuiteError> {
    check(
        Command::new("bash")
            .arg(bench.programs("kcat").join("check.sh"))
            .arg(kcat(bench))
            .arg(address)
            .env("LD_LIBRARY_PATH", kcat_libraries(bench)),
    )
}

fn install_python(bench: &Bench, which: usize) -> Result<String, SuiteError> {
    let (package, version) = PYTHON[which];
    install_packages(bench, "python", &[&format!("{package}=={version}")])?;
    Ok(version.to_owned())
}

/// Packages from PyPI, in a separate virtual environment.
pub(super) fn install_packages(
    bench: &Bench,
    environment: &str,
    packages: &[&str],
) -> Result<(), SuiteError> {
    require_tool("python3")?;
    let venv = bench.dir(environment)?;
    let python = venv.join("bin/python");
    if !python.exists() {
        install(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    install(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))
}

fn run_python(bench: &Bench, program: &str, address: &str) -> Result<usize, SuiteError> {
    let python = bench.dir("python")?.join("bin/python");
    check(Command::new(python).arg(bench.programs("python").join(program)).arg(address))
}

fn install_node(bench: &Bench) -> Result<String, SuiteError> {
    require_tool("node")?;
    require_tool("npm")?;
    let dir = bench.dir("node")?;
    bench.copy("node", &dir)?;
    install(Command::new("npm").args(["install", "--silent", "--no-audit", "--no-fund"]).current_dir(&dir))?;
    let manifest = dir.join("node_modules/kafkajs/package.json");
    version_of(&manifest)
}

pub(super) fn version_of(manifest: &Path) -> Result<String, SuiteError> {
    let text = std::fs::read_to_string(manifest).context("package.json")?;
    let json: serde_json::Value = serde_json::from_str(&text).context("package.json")?;
    Ok(json["version"].as_str().unwrap_or_default().to_owned())
}

fn run_node(bench: &Bench, address: &str) -> Result<usize, SuiteError> {
    check(Command::new("node").arg("check_kafkajs.mjs").arg(address).current_dir(bench.dir("node")?))
}

fn install_java(bench: &Bench) -> Result<String, SuiteError> {
    install_maven(bench, "java", "Check.java", "kafka-clients-")
}

/// A test program and its libraries from Maven; the version is the one in the name of the library.
pub(super) fn install_maven(
    bench: &Bench,
    name: &str,
    program: &str,
    library: &str,
) -> Result<String, SuiteError> {
    require_tool("javac")?;
    require_tool("mvn")?;
    let dir = bench.dir(name)?;
    bench.copy(name, &dir)?;
    let copy = ["-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"];
    install(Command::new("mvn").args(copy).current_dir(&dir))?;
    install(Command::new("javac").args(["-cp", "lib/*", "-d", "out", program]).current_dir(&dir))?;
    let jars = std::fs::read_dir(dir.join("lib")).context("the libraries")?;
    let names = jars.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let version =
        names.filter_map(|name| Some(name.strip_prefix(library)?.strip_suffix(".jar")?.to_owned())).next();
    Ok(version.unwrap_or_default())
}

fn run_java(bench: &Bench, address: &str) -> Result<usize, SuiteError> {
    check(Command::new("java").args(["-cp", "lib/*:out", "Check", address]).current_dir(bench.dir("java")?))
}

pub(super) fn install_go(bench: &Bench, name: &str) -> Result<String, SuiteError> {
    require_tool("go")?;
    let dir = bench.dir(&format!("go-{name}"))?;
    bench.copy(&format!("go/{name}"), &dir)?;
    install(Command::new("go").args(["mod", "tidy"]).current_dir(&dir))?;
    install(Command::new("go").args(["build", "-o", "check", "."]).current_dir(&dir))?;
    let manifest = std::fs::read_to_string(dir.join("go.mod")).context("go.mod")?;
    let version = manifest
        .split_whitespace()
        .find(|word| ["v0.", "v1.", "v3.", "v9."].iter().any(|major| word.starts_with(major)));
    Ok(version.unwrap_or_default().trim_start_matches('v').to_owned())
}

pub(super) fn run_go(bench: &Bench, name: &str, address: &str) -> Result<usize, SuiteError> {
    let program = bench.dir(&format!("go-{name}"))?.join("check");
    check(Command::new(program).arg(address))
}
