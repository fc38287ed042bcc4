//! The `moim` binary under test: `MOIM_BIN`, or the one this workspace builds, rebuilt if it is stale.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

/// The binary under test. Built at most once per process.
pub fn moim_binary() -> Result<&'static Path> {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match BINARY.get_or_init(|| find().map_err(|error| format!("{error:#}"))) {
        Ok(path) => Ok(path),
        Err(message) => bail!("no moim binary: {message}"),
    }
}

/// True if the binary has an etcd port.
pub fn serves_etcd(binary: &Path) -> Result<bool> {
    static ANSWERS: Mutex<BTreeMap<PathBuf, bool>> = Mutex::new(BTreeMap::new());
    let mut answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(answer) = answers.get(binary) {
        return Ok(*answer);
    }
    let help = Command::new(binary).args(["serve", "--help"]).output().context("moim did not start")?;
    let answer = String::from_utf8_lossy(&help.stdout).contains("--etcd-port");
    answers.insert(binary.to_owned(), answer);
    Ok(answer)
}

fn find() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MOIM_BIN") {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("MOIM_BIN={} is not a file", path.display());
        }
        return Ok(path);
    }
    let profile = profile_dir()?;
    let binary = profile.join("moim");
    if !is_fresh(&binary) {
        build(&profile)?;
    }
    if !binary.is_file() {
        bail!("cargo built no {}", binary.display());
    }
    Ok(binary)
}

/// The directory in which cargo puts binaries of our own profile: ours is `<profile>/deps/<test>` or
/// `<profile>/xtask`.
fn profile_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("the path of this program")?;
    let dir = exe.parent().context("a folder")?;
    Ok(if dir.ends_with("deps") {
        dir.parent().context("a folder")?.to_path_buf()
    } else {
        dir.to_path_buf()
    })
}

fn build(profile: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--package", "moim"]).current_dir(workspace());
    if profile.ends_with("release") {
        command.arg("--release");
    }
    if let Some(target) = profile.parent() {
        command.arg("--target-dir").arg(target);
    }
    let output = command.output().context("cargo did not start")?;
    if !output.status.success() {
        bail!("cargo build -p moim failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// True if the binary is newer than all of its sources.
fn is_fresh(binary: &Path) -> bool {
    let Some(built) = modified(binary) else { return false };
    let crates = workspace().join("crates");
    let parts = [
        "base",
        "wire-kafka",
        "wire-resp",
        "wire-grpc",
        "journal",
        "raft",
        "coord",
        "cluster",
        "replica",
        "queue",
        "slots",
        "slot-client",
        "kafka-client",
        "pipeline",
        "node",
        "cli",
    ];
    let mut parts = parts.iter().filter(|part| crates.join(part).is_dir());
    parts.all(|part| newest(&crates.join(part)).is_some_and(|changed| changed <= built))
}

fn newest(dir: &Path) -> Option<SystemTime> {
    let mut newest = None;
    for entry in std::fs::read_dir(dir).ok()? {
        let path = entry.ok()?.path();
        let changed = if path.is_dir() { newest_of_folder(&path) } else { modified(&path) };
        newest = newest.max(changed);
    }
    newest
}

/// The newest modification time below a directory, without tests: they are not part of the binary.
fn newest_of_folder(path: &Path) -> Option<SystemTime> {
    if path.ends_with("tests") { None } else { newest(path) }
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().ok()?.modified().ok()
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
