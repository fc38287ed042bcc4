//! The pipeline on real processes: the demo, a small version of the documented faults, and bad input to a gateway.
//!
//! Everything goes through the command line, as a user would run it; the verdict is the exit status.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used)] // all of it is test

mod client;
mod gateway;
mod planted;
mod reference;
mod tls;
mod waiting;

use std::path::Path;
use std::process::{Command, Output};

use moim_interop::moim_binary;

/// Runs `moim` in its own directory.
fn moim(folder: &Path, args: &[&str]) -> Output {
    Command::new(moim_binary().unwrap()).args(args).current_dir(folder).env_clear().output().unwrap()
}

/// Serialises the tests: three nodes and eight processes saturate a machine with two cores.
fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static EXCLUSIVE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    EXCLUSIVE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn check_fault(name: &str, more: &[&str]) {
    let _turn = one_at_a_time();
    let folder = tempfile::tempdir().unwrap();
    let mut args = vec!["pipeline", "fault", name, "--clients", "5", "--lines", "400", "-o", "json"];
    args.extend(more);
    let output = moim(folder.path(), &args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}\n{err}", output.status);
    for line in
        ["\"verdict\": \"ok\"", "\"lost\": 0", "\"duplicated\": 0", "\"sent\": 2000", "\"counted\": 2000"]
    {
        assert!(out.contains(line), "{name}: no {line} in\n{out}");
    }
}

#[test]
fn demo_exits_with_the_verdict_and_leaves_no_process() {
    let _turn = one_at_a_time();
    let folder = tempfile::tempdir().unwrap();
    let output = moim(folder.path(), &["demo", "--exit"]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(
        out.contains("VERIFIED  sent 44,220 = counted 44,220 · lost 0 · duplicated 0 · dead-lettered 0 · "),
        "{out}\n{err}"
    );
    assert!(err.contains("kill -9 of node ") && err.contains(" is back, "), "{err}");
    let data = folder.path().join(".moim/demo").display().to_string();
    let left = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains(&data), "a node outlived the demo");
    assert!(!folder.path().join(".moim/context.toml").exists(), "the context was taken back");
}

#[test]
fn failed_delivery_is_resent() {
    check_fault("store-failure", &[]);
}

#[test]
fn missing_delivery_report_is_resent() {
    check_fault("report-lost", &[]);
}

#[test]
fn full_producer_applies_backpressure_and_loses_nothing() {
    check_fault("buffer-full", &[]);
}

#[test]
fn broker_graceful_restart() {
    check_fault("broker-restart", &[]);
}

#[test]
fn broker_killed() {
    check_fault("broker-kill", &[]);
}

#[test]
fn counters_join_and_leave() {
    check_fault("consumer-churn", &[]);
}

#[test]
fn store_primary_killed() {
    check_fault("primary-kill", &[]);
}

#[test]
fn gateway_killed() {
    check_fault("gateway-kill", &[]);
}

#[test]
fn repeated_kills_pauses_and_isolations() {
    check_fault("storm", &["--storm", "6s"]);
}
