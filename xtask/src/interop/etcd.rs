//! The clients of etcd: etcdctl, Python, Go with the recipes, Java.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use super::clients::{install_go, install_maven, install_packages, run_go};
use super::{Bench, Protocol, Suite, SuiteError, check, install, require_tool};

/// The older client needs an old version of its retry library.
const ETCD3: [&str; 2] = ["etcd3==0.12.0", "tenacity==6.3.1"];
const AETCD: [&str; 1] = ["aetcd==1.0.0"];

pub(super) fn suites() -> Vec<Suite> {
    let suite = |name, install, run| Suite { name, protocol: Protocol::Etcd, install, run, settings: &[] };
    vec![
        suite("etcdctl", install_etcdctl, run_etcdctl),
        suite(
            "etcd3-python",
            |bench| install_python(bench, "python-etcd3", &ETCD3),
            |bench, at| run_python(bench, "python-etcd3", "check_etcd3.py", at),
        ),
        suite(
            "aetcd",
            |bench| install_python(bench, "python-aetcd", &AETCD),
            |bench, at| run_python(bench, "python-aetcd", "check_aetcd.py", at),
        ),
        suite("etcd-clientv3", |bench| install_go(bench, "etcd"), |bench, at| run_go(bench, "etcd", at)),
        suite(
            "jetcd",
            |bench| install_maven(bench, "jetcd", "CheckEtcd.java", "jetcd-core-"),
            |bench, at| {
                let dir = bench.dir("jetcd")?;
                check(Command::new("java").args(["-cp", "lib/*:out", "CheckEtcd", at]).current_dir(dir))
            },
        ),
    ]
}

/// etcdctl from the machine, or its Debian package unpacked below `target`.
fn install_etcdctl(bench: &Bench) -> Result<String, SuiteError> {
    require_tool("python3")?; // the script reads JSON with it
    if require_tool("etcdctl").is_err() && !unpacked(bench).exists() {
        require_tool("apt-get")?;
        require_tool("dpkg-deb")?;
        let dir = bench.dir("etcdctl")?;
        install(Command::new("apt-get").args(["download", "etcd-client"]).current_dir(&dir))?;
        let packages = std::fs::read_dir(&dir).context("the package")?;
        for package in packages.filter_map(Result::ok).map(|entry| entry.path()) {
            if package.extension().is_some_and(|ext| ext == "deb") {
                install(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&dir))?;
            }
        }
    }
    let output = Command::new(etcdctl(bench)).arg("version").env("ETCDCTL_API", "3").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let version = text.lines().find_map(|line| line.strip_prefix("etcdctl version: "));
    version.map(str::to_owned).ok_or_else(|| SuiteError::Missing("etcdctl does not start".to_owned()))
}

fn unpacked(bench: &Bench) -> PathBuf {
    bench.home.join("etcdctl/usr/bin/etcdctl")
}

fn etcdctl(bench: &Bench) -> PathBuf {
    if unpacked(bench).exists() { unpacked(bench) } else { PathBuf::from("etcdctl") }
}

fn run_etcdctl(bench: &Bench, addresses: &str) -> Result<usize, SuiteError> {
    let script = bench.programs("etcdctl").join("check.sh");
    check(Command::new("bash").arg(script).arg(etcdctl(bench)).arg(addresses))
}

fn install_python(bench: &Bench, environment: &str, packages: &[&str]) -> Result<String, SuiteError> {
    install_packages(bench, environment, packages)?;
    Ok(packages[0].rsplit("==").next().unwrap_or_default().to_owned())
}

fn run_python(bench: &Bench, environment: &str, program: &str, addresses: &str) -> Result<usize, SuiteError> {
    let python = bench.dir(environment)?.join("bin/python");
    check(
        Command::new(python)
            .arg(bench.programs("python").join(program))
            .arg(addresses)
            // The generated code of these clients is older than the installed protobuf library.
            .env("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python"),
    )
}
