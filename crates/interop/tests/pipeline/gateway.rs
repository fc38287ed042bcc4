//! Bad input to a pipeline: a clear error, no message lost, none counted twice.
//!
//! Runs on a dedicated node; or on the Kafka and the Redis Cluster that `INTEROP_KAFKA` and `INTEROP_REDIS` name,
//! which are first wiped of earlier runs.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use moim_interop::{Options, Server, moim_binary};

use crate::client::{Client, Response, connect, frame, hello};

/// A queue and a store, and the pipeline processes on them.
pub(crate) struct Pipeline {
    _server: Option<Server>,
    kafka: String,
    redis: String,
    name: String,
    process: Child,
    pub(crate) address: String,
    folder: tempfile::TempDir,
    /// Kept open: a process that cannot write its output exits.
    _stdout: Lines<BufReader<ChildStdout>>,
}

impl Pipeline {
    /// Runs `moim pipeline VERB`: the gateway alone, or all roles.
    pub(crate) fn start(verb: &str, more: &[&str]) -> Self {
        let outside = std::env::var("INTEROP_KAFKA").ok().zip(std::env::var("INTEROP_REDIS").ok());
        let folder = tempfile::tempdir().unwrap();
        let (server, kafka, redis, stack): (_, _, _, &[&str]) = match outside {
            None => {
                let server = Server::start(Options::new()).unwrap();
                let (kafka, redis) = (server.kafka().to_owned(), server.redis().to_owned());
                (Some(server), kafka, redis, &[])
            }
            Some((kafka, redis)) => {
                let args = ["pipeline", "clean", "--yes", "--kafka", &kafka, "--redis", &redis];
                let clean = Command::new(moim_binary().unwrap()).args(args).output().unwrap();
                assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stderr));
                (None, kafka, redis, &["--ack-after-queue"])
            }
        };
        // Groups of earlier tests may still have members.
        let name = format!("test-{:x}", fastrand::u64(..));
        let mut process = Command::new(moim_binary().unwrap())
            .args(["pipeline", verb, "--listen", "127.0.0.1:0", "-o", "json"])
            .args(["--kafka", &kafka, "--redis", &redis, "--name", &name])
            .args(stack)
            .args(more)
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map(|line| line.unwrap())
            .find_map(|line| {
                line.trim()
                    .strip_prefix("\"127.")
                    .map(|rest| format!("127.{}", rest.trim_end_matches(['"', ','])))
            })
            .unwrap();
        Self { _server: server, kafka, redis, name, process, address, folder, _stdout: lines }
    }

    /// Stops the pipeline processes; the topics and the store stay. Changes made there from now on are not repaired.
    pub(crate) fn stop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn kafka(&self) -> &str {
        &self.kafka
    }

    pub(crate) fn redis(&self) -> &str {
        &self.redis
    }

    fn authenticate(&self, name: &str, incarnation: u64) -> (Client, Response) {
        Client::authenticate(&self.address, self.folder(), name, incarnation)
    }

    /// Runs `moim` with this pipeline's addresses.
    fn moim(&self, args: &[&str]) -> Output {
        Command::new(moim_binary().unwrap())
            .args(args)
            .args(["--kafka", &self.kafka])
            .current_dir(self.folder())
            .output()
            .unwrap()
    }

    pub(crate) fn load(&self, more: &[&str]) -> Output {
        let mut args = vec!["pipeline", "load", "--gateway", &self.address];
        args.extend(more);
        self.moim(&args)
    }

    /// Starts a load in the background.
    pub(crate) fn loading(&self, more: &[&str]) -> Child {
        Command::new(moim_binary().unwrap())
            .args(["pipeline", "load", "--gateway", &self.address])
            .args(more)
            .current_dir(self.folder())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    pub(crate) fn verify(&self, more: &[&str]) -> Output {
        let mut args = vec!["pipeline", "verify", "-o", "json", "--redis", &self.redis, "--name", &self.name];
        args.extend(more);
        self.moim(&args)
    }

    /// The verdict once no message is in flight; it must be ok.
    fn verdict(&self) -> String {
        let output = self.verify(&["--wait", "60s"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Sends bytes before the handshake, and returns the reason of the refusal.
    fn refusal(&self, bytes: &[u8]) -> String {
        let mut stream = connect(&self.address);
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A reset after the response is an end as well.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() > 6 && answer[4] == 5, "not a refusal: {answer:?}");
        String::from_utf8_lossy(&answer[6..]).into_owned()
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn expect(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}

fn reason(response: &Response) -> (bool, &str) {
    match response {
        Response::Refused { retry, reason } => (*retry, reason),
        other => panic!("not a refusal: {other:?}"),
    }
}

#[test]
fn malformed_handshakes_are_refused_with_a_reason() {
    let _turn = super::one_at_a_time();
    let gateway = Pipeline::start("gateway", &[]);
    let too_long = gateway.refusal(&u32::MAX.to_be_bytes());
    assert!(too_long.contains("4294967295 bytes"), "{too_long}");
    let garbage = gateway.refusal(&frame(b"GET / HTTP/1.1\r\n"));
    assert!(garbage.contains("malformed"), "{garbage}");
    let version = gateway.refusal(&frame(&[1, 9]));
    assert!(version.contains("version 9"), "{version}");
    let name = gateway.refusal(&hello(b"a}b", 7));
    assert!(name.contains("client id"), "{name}");
    let early = gateway.refusal(&frame(&[8, 0, 0, 0, 0, 0, 0, 0, 1]));
    assert!(early.contains("first frame"), "{early}");

    let mut liar = connect(&gateway.address);
    liar.write_all(&hello(b"liar", 7)).unwrap();
    let mut challenge = [0; 21];
    liar.read_exact(&mut challenge).unwrap();
    assert_eq!(challenge[4], 2, "a challenge");
    liar.write_all(&frame(&[&[3][..], &[0; 32]].concat())).unwrap();
    let mut answer = Vec::new();
    let _ = liar.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("the proof of liar is wrong"), "{answer:?}");

    // A file without lines is not a load.
    std::fs::write(gateway.folder().join("empty"), "\n\n").unwrap();
    let empty = gateway.load(&["--file", "empty"]);
    assert_eq!(empty.status.code(), Some(2), "{}", String::from_utf8_lossy(&empty.stderr));
}

#[test]
fn out_of_order_and_duplicate_sequence_numbers_count_once() {
    let _turn = super::one_at_a_time();
    let pipeline = Pipeline::start("run", &[]);
    // Out of order, duplicated, and again from the beginning: each number counts once.
    let (mut client, response) = pipeline.authenticate("zigzag", 1);
    assert_eq!(response, Response::Welcome { acked: 0 });
    for sn in [2u64, 4, 1, 2, 3, 1, 2, 3, 4, 5] {
        client.send(sn, format!("line {sn}").as_bytes());
    }
    client.bye(5);
    assert_eq!(client.outcome(), Response::Done);
    client.send(3, b"another text under an old number");
    client.send(6, b"line 6");
    client.bye(6);
    assert_eq!(client.outcome(), Response::Done);
    // Invalid sequence numbers: the refusal names them.
    for sn in [0u64, 1_000_000] {
        client.send(sn, b"x");
        let response = client.outcome();
        let (retry, why) = reason(&response);
        assert!(!retry && why.contains(&format!("message {sn} is outside the window")), "{why}");
        let response;
        (client, response) = pipeline.authenticate("zigzag", 1);
        assert_eq!(response, Response::Welcome { acked: 6 }, "what was acknowledged stays so");
    }
    // An oversized frame after the handshake ends the session, and only that.
    client.send(7, &vec![b'x'; 2 << 20]);
    let response = client.outcome();
    assert!(
        matches!(&response, Response::Refused { retry: false, reason } if reason.contains("bytes"))
            || response == Response::Closed,
        "{response:?}"
    );
    expect(
        &pipeline.verdict(),
        &["\"sent\": 6", "\"counted\": 6", "\"distinct\": 6", "\"lost\": 0", "\"duplicated\": 0"],
    );
}

#[test]
fn newer_connection_fences_the_older_one() {
    let _turn = super::one_at_a_time();
    let pipeline = Pipeline::start("run", &[]);
    let (mut first, _) = pipeline.authenticate("twin", 5);
    first.send(1, b"one");
    first.bye(1);
    assert_eq!(first.outcome(), Response::Done);
    let (mut second, response) = pipeline.authenticate("twin", 5);
    assert_eq!(response, Response::Welcome { acked: 1 });
    // The older connection may reconnect, but not continue beside the newer one.
    first.send(2, b"two");
    let response = first.outcome();
    assert!(reason(&response).0 && reason(&response).1.contains("another gateway"), "{response:?}");
    second.send(2, b"two");
    second.bye(2);
    assert_eq!(second.outcome(), Response::Done);
    // A newer incarnation takes over permanently.
    let (mut third, response) = pipeline.authenticate("twin", 6);
    assert_eq!(response, Response::Welcome { acked: 2 });
    let (_, response) = pipeline.authenticate("twin", 5);
    assert!(
        !reason(&response).0 && reason(&response).1.contains("a newer client of the name twin"),
        "{response:?}"
    );
    third.send(3, b"three");
    third.bye(3);
    assert_eq!(third.outcome(), Response::Done);
    expect(&pipeline.verdict(), &["\"sent\": 3", "\"counted\": 3", "\"duplicated\": 0"]);
}

#[test]
fn non_text_message_is_dead_lettered_and_counting_continues() {
    let _turn = super::one_at_a_time();
    let pipeline = Pipeline::start("run", &[]);
    let (mut client, _) = pipeline.authenticate("poison", 1);
    client.send(1, b"fine");
    client.send(2, &[0xff, 0xfe, 0x00]);
    client.send(3, b"fine again");
    client.bye(3);
    assert_eq!(client.outcome(), Response::Done);
    // A record from another producer, without an origin.
    let mut stray = Command::new(moim_binary().unwrap())
        .args(["topic", "produce", "client_message", "--kafka", pipeline.kafka()])
        .current_dir(pipeline.folder())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    stray.stdin.take().unwrap().write_all(b"stray\n").unwrap();
    assert!(stray.wait().unwrap().success());
    let letters = pipeline.moim(&[
        "topic",
        "consume",
        "pipeline_dead_letter",
        "--offset",
        "start",
        "-n",
        "2",
        "-o",
        "json",
    ]);
    let letters = String::from_utf8_lossy(&letters.stdout).into_owned();
    expect(&letters, &["not text", "poison", "client_message", "no client or sequence number", "stray"]);
    let verdict = pipeline.verdict();
    expect(
        &verdict,
        &["\"sent\": 3", "\"counted\": 2", "\"dead_lettered\": 1", "\"lost\": 0", "\"distinct\": 2"],
    );
}

#[test]
fn messages_in_flight_are_pending_and_not_lost() {
    let _turn = super::one_at_a_time();
    // No counter is running: everything stays in the topic.
    let pipeline = Pipeline::start("gateway", &[]);
    let (mut client, _) = pipeline.authenticate("early", 1);
    for sn in 1..=5u64 {
        client.send(sn, format!("line {sn}").as_bytes());
    }
    client.bye(5);
    assert_eq!(client.outcome(), Response::Done);
    let pending = pipeline.verify(&[]);
    let text = String::from_utf8_lossy(&pending.stdout).into_owned();
    assert_eq!(pending.status.code(), Some(6), "{text}");
    let expected = ["\"verdict\": \"pending\"", "\"in_flight\": 5", "\"lost\": 0", "\"duplicated\": 0"];
    expect(&text, &expected);
}

#[test]
fn second_run_on_the_same_topics_is_detected() {
    let _turn = super::one_at_a_time();
    let pipeline = Pipeline::start("run", &[]);
    std::fs::write(pipeline.folder().join("text"), "a\nb\nc\n").unwrap();
    std::fs::write(pipeline.folder().join("short"), "a\n").unwrap();
    let fine = |output: Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    fine(pipeline.load(&["--file", "text", "--client", "ann"]));
    // The same client with the same text: all of it has been sent already.
    fine(pipeline.load(&["--file", "text", "--client", "ann"]));
    // The same name with fewer lines than were accepted.
    let short = pipeline.load(&["--file", "short", "--client", "ann"]);
    let why = String::from_utf8_lossy(&short.stderr).into_owned();
    assert_eq!(short.status.code(), Some(5), "{why}");
    assert!(why.contains("3 messages of ann are known already") && why.contains("another run"), "{why}");
    // The same name and number of lines, with different text: nothing of it would be sent.
    std::fs::write(pipeline.folder().join("other"), "a\nx\nc\n").unwrap();
    std::fs::write(pipeline.folder().join("longer"), "a\nx\nc\nd\n").unwrap();
    for file in ["other", "longer"] {
        let other = pipeline.load(&["--file", file, "--client", "ann"]);
        let why = String::from_utf8_lossy(&other.stderr).into_owned();
        assert_eq!(other.status.code(), Some(5), "{why}");
        assert!(why.contains("the first 3 messages of ann are others than these"), "{why}");
    }
    // Another name is another client.
    fine(pipeline.load(&["--file", "text", "--client", "bob"]));
    expect(
        &pipeline.verdict(),
        &["\"counted\": 6", "\"distinct\": 3", "\"expected_each\": 2", "\"duplicated\": 0"],
    );
    // A benchmark refuses to run on these topics.
    let bench = pipeline.moim(&["bench", "pipeline", "--redis", pipeline.redis()]);
    assert_eq!(bench.status.code(), Some(7), "{}", String::from_utf8_lossy(&bench.stderr));
}
