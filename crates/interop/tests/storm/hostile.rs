//! Hostile clients on every port, all the time: garbage, lengths beyond every limit, incomplete handshakes, requests
//! whose responses are never read, slow scripts. They may get errors or lose their connections; other clients must
//! not be affected.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moim_interop::cluster::Cluster;

/// Connections that one hostile client keeps open.
const OPEN_CONNECTIONS: usize = 24;

pub(super) struct Hostile {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<u64>>,
}

/// Generator of a connection's first bytes, by protocol.
type Bytes = fn(&mut fastrand::Rng) -> Vec<u8>;
/// Selector of one of a server's ports.
type Port = fn(&moim_interop::Server) -> &str;

impl Hostile {
    pub(super) fn start(cluster: &Cluster, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ports: [(Port, Bytes); 5] = [
            (moim_interop::Server::kafka, kafka),
            (moim_interop::Server::redis, redis),
            (moim_interop::Server::etcd, etcd),
            (moim_interop::Server::admin, http),
            (moim_interop::Server::peer, garbage),
        ];
        let clients = ports.into_iter().enumerate().map(|(at, (port, bytes))| {
            let addresses: Vec<String> =
                (0..3).map(|node| port(cluster.server(node).unwrap()).to_owned()).collect();
            let (stop, rng) = (Arc::clone(&stop), fastrand::Rng::with_seed(seed ^ (77 + at as u64)));
            std::thread::spawn(move || run_hostile_client(&addresses, bytes, rng, &stop))
        });
        Self { clients: clients.collect(), stop }
    }

    /// Stops the clients; returns the number of connections.
    pub(super) fn finish(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.clients.into_iter().map(|client| client.join().unwrap()).sum()
    }
}

fn run_hostile_client(addresses: &[String], bytes: Bytes, mut rng: fastrand::Rng, stop: &AtomicBool) -> u64 {
    let (mut held, mut count) = (Vec::new(), 0);
    while !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(rng.u64(50..250)));
        let address = addresses[rng.usize(..addresses.len())].parse().unwrap();
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_millis(500)) else {
            continue;
        };
        count += 1;
        let _ = stream.set_write_timeout(Some(Duration::from_millis(300)));
        let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
        let _ = stream.write_all(&bytes(&mut rng));
        if rng.bool() {
            let _ = stream.read(&mut [0; 64]);
        }
        held.push(stream); // most never read and never close
        if held.len() > OPEN_CONNECTIONS {
            drop(held.swap_remove(rng.usize(..held.len())));
        }
    }
    count
}

/// Random bytes, occasionally many.
fn garbage(rng: &mut fastrand::Rng) -> Vec<u8> {
    let len = if rng.u8(..8) == 0 { 1 << 18 } else { rng.usize(1..300) };
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
    if rng.bool() {
        // Resembles the length of a small frame.
        bytes[..1].copy_from_slice(&[0]);
    }
    bytes
}

/// A Kafka request.
fn request(api: i16, version: i16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&api.to_be_bytes());
    bytes.extend_from_slice(&version.to_be_bytes());
    bytes.extend_from_slice(&7_i32.to_be_bytes());
    bytes.extend_from_slice(&(-1_i16).to_be_bytes());
    bytes.extend_from_slice(body);
    let mut framed = u32::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
    framed.extend_from_slice(&bytes);
    framed
}

fn kafka(rng: &mut fastrand::Rng) -> Vec<u8> {
    match rng.u8(..6) {
        0 => i32::MAX.to_be_bytes().to_vec(),
        // The first bytes of a frame of 90 MiB.
        1 => [&(90_u32 << 20).to_be_bytes()[..], &[0; 4096]].concat(),
        2 => request(rng.i16(-5..200), rng.i16(-1..20), &garbage(rng)),
        // Metadata of all topics, repeated, without reading any response.
        3 => request(3, 1, &(-1_i32).to_be_bytes()).repeat(400),
        // Produce and fetch with malformed bodies.
        4 => request(rng.i16(0..2), 7, &garbage(rng)),
        _ => garbage(rng),
    }
}

fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    words
        .iter()
        .for_each(|word| bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes()));
    bytes
}

fn redis(rng: &mut fastrand::Rng) -> Vec<u8> {
    match rng.u8(..9) {
        0 => b"*1048576\r\n$1\r\nx\r\n".to_vec(),
        1 => [b"*3\r\n$3\r\nSET\r\n$1\r\nh\r\n$536870912\r\n".to_vec(), vec![b'x'; 1 << 16]].concat(),
        2 => b"*2147483647\r\n$-5\r\n".to_vec(),
        // Responses that are never read.
        3 => command(&["COMMAND"]).repeat(50),
        4 => command(&["SUBSCRIBE", "noise"]),
        5 => command(&["PUBLISH", "noise", &"n".repeat(4096)]).repeat(64),
        // A long time in one call of the pattern matcher. An endless one blocks its shard, as in Redis, until SCRIPT
        // KILL.
        6 => command(&["EVAL", "return string.find(string.rep('a',30), string.rep('a-',5)..'b')", "0"]),
        7 => [command(&["MULTI"]), command(&["SET", "hostile", "x"]).repeat(500)].concat(),
        _ => garbage(rng),
    }
}

fn etcd(rng: &mut fastrand::Rng) -> Vec<u8> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    match rng.u8(..4) {
        0 => preface.to_vec(),
        // An endless run of SETTINGS frames.
        1 => [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0].repeat(2_000)].concat(),
        // A frame above the maximum frame size.
        2 => [&preface[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1], &garbage(rng)].concat(),
        _ => garbage(rng),
    }
}

fn http(rng: &mut fastrand::Rng) -> Vec<u8> {
    match rng.u8(..4) {
        0 => b"GET /api/v1/cluster HTTP/1.1\r\nHost:".to_vec(),
        1 => format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(60_000)).into_bytes(),
        2 => {
            b"POST /api/v1/cluster/nodes/9/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n"
                .to_vec()
        }
        _ => garbage(rng),
    }
}
