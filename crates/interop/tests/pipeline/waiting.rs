//! A pipeline started before its queue has enough brokers prints what it waits for, and continues once they have
//! joined.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use moim_interop::{Options, Server, moim_binary};

#[test]
fn pipeline_waits_for_enough_brokers_for_its_replication_factor() {
    let server = Server::start(Options::new()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let settings = format!(
        "kafka = \"{}\"\nredis = \"{}\"\nreplication_factor = 3\n[gateway]\nlisten = \"127.0.0.1:0\"\n",
        server.kafka(),
        server.redis()
    );
    std::fs::write(folder.path().join("pipeline.toml"), settings).unwrap();
    let mut process = Command::new(moim_binary().unwrap())
        .args(["pipeline", "run", "--config", "pipeline.toml"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut response = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
    let waits = "waiting up to 30 s for more brokers: the topics are to have 3 copies";
    assert!(response.any(|line| line == waits), "it did not say what it waits for");
    // Joining brokers would do; topics created by another client meanwhile do as well.
    for topic in ["client_message", "message_aggregation", "pipeline_dead_letter"] {
        let args = ["topic", "create", topic, "--kafka", server.kafka()];
        assert!(Command::new(moim_binary().unwrap()).args(args).output().unwrap().status.success());
    }
    let mut printed = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    let runs = printed.any(|line| line.starts_with("gateways") && line.contains("127.0.0.1:"));
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(runs, "it did not start");
}
