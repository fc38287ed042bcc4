//! What a gateway does with clients that misbehave: a clear answer, and nothing of it in the counts.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moim_interop::{Options, Server, moim_binary};

/// A node and a gateway on it.
struct Gateway {
    _server: Server,
    process: Child,
    address: String,
    folder: tempfile::TempDir,
}

impl Gateway {
    fn start() -> Self {
        let server = Server::start(Options::new()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut process = Command::new(moim_binary().unwrap())
            .args(["pipeline", "gateway", "--listen", "127.0.0.1:0", "-o", "json"])
            .args(["--kafka", server.kafka(), "--redis", server.redis()])
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines
            .map(|line| line.unwrap())
            .find_map(|line| {
                line.trim()
                    .strip_prefix("\"127.")
                    .map(|rest| format!("127.{}", rest.trim_end_matches(['"', ','])))
            })
            .unwrap();
        Self { _server: server, process, address, folder }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Says something, and gives back the reason for which it is refused.
    fn refusal(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // A reset after the answer is an end as well.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() > 6 && answer[4] == 5, "not a refusal: {answer:?}");
        String::from_utf8_lossy(&answer[6..]).into_owned()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    frame.extend_from_slice(body);
    frame
}

fn hello(client: &[u8]) -> Vec<u8> {
    let mut body = vec![1, 1];
    body.extend_from_slice(&7u64.to_be_bytes());
    body.extend_from_slice(&[0; 16]);
    body.extend_from_slice(client);
    frame(&body)
}

#[test]
fn misbehaving_clients_are_told_why() {
    let _turn = super::one_at_a_time();
    let gateway = Gateway::start();
    let too_long = gateway.refusal(&u32::MAX.to_be_bytes());
    assert!(too_long.contains("4294967295 bytes"), "{too_long}");
    let garbage = gateway.refusal(&frame(b"GET / HTTP/1.1\r\n"));
    assert!(garbage.contains("malformed"), "{garbage}");
    let version = gateway.refusal(&frame(&[1, 9]));
    assert!(version.contains("version 9"), "{version}");
    let name = gateway.refusal(&hello(b"a}b"));
    assert!(name.contains("client id"), "{name}");
    let early = gateway.refusal(&frame(&[8, 0, 0, 0, 0, 0, 0, 0, 1]));
    assert!(early.contains("first frame"), "{early}");
}

#[test]
fn a_client_that_does_not_know_the_secret_is_refused() {
    let _turn = super::one_at_a_time();
    let gateway = Gateway::start();
    let mut stream = gateway.connect();
    stream.write_all(&hello(b"liar")).unwrap();
    let mut challenge = [0; 21];
    stream.read_exact(&mut challenge).unwrap();
    assert_eq!(challenge[4], 2, "a challenge");
    let mut proof = vec![3];
    proof.extend_from_slice(&[0; 32]);
    stream.write_all(&frame(&proof)).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("the proof of liar is wrong"), "{answer:?}");

    // The same gateway serves those who do, meanwhile.
    let load = Command::new(moim_binary().unwrap())
        .args(["pipeline", "load", "--gateway", &gateway.address, "--client", "honest"])
        .current_dir(gateway.folder.path())
        .output()
        .unwrap();
    assert!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    // And a text with nothing in it is no load.
    std::fs::write(gateway.folder.path().join("empty"), "\n\n").unwrap();
    let empty = Command::new(moim_binary().unwrap())
        .args(["pipeline", "load", "--gateway", &gateway.address, "--file", "empty"])
        .current_dir(gateway.folder.path())
        .output()
        .unwrap();
    assert_eq!(empty.status.code(), Some(2), "{}", String::from_utf8_lossy(&empty.stderr));
}
