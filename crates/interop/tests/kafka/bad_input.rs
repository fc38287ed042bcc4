//! Malformed input: each request gets the protocol's error or a closed connection, and affects no other client.

use std::time::Duration;

use moim_interop::raw::{Raw, Reaction, framed, produce, produce_error, request, string};
use moim_interop::until;

use super::support::*;

const CORRUPT_MESSAGE: i16 = 2;
const UNKNOWN_TOPIC_OR_PARTITION: i16 = 3;
const MESSAGE_TOO_LARGE: i16 = 10;
const INVALID_TOPIC: i16 = 17;
const INVALID_REQUIRED_ACKS: i16 = 21;
const UNSUPPORTED_VERSION: i16 = 35;
const OUT_OF_ORDER_SEQUENCE: i16 = 45;
const INVALID_RECORD: i16 = 87;

fn varint(value: i64) -> Vec<u8> {
    let mut zigzag = ((value << 1) ^ (value >> 63)) as u64;
    let mut out = Vec::new();
    while zigzag >= 0x80 {
        out.push((zigzag & 0x7f) as u8 | 0x80);
        zigzag >>= 7;
    }
    out.push(zigzag as u8);
    out
}

/// A batch of identical records, with every field open to corruption.
struct Batch {
    magic: u8,
    attributes: i16,
    count: i32,
    producer: (i64, i16, i32),
    records: Vec<u8>,
    crc_error: u32,
    length_error: i32,
}

impl Default for Batch {
    fn default() -> Self {
        let mut record = vec![0]; // attributes
        record.extend(varint(0)); // timestamp delta
        record.extend(varint(0)); // offset delta
        record.extend(varint(-1)); // no key
        record.extend(varint(2));
        record.extend(b"ok");
        record.extend(varint(0)); // no headers
        let records = [varint(i64::try_from(record.len()).unwrap()), record].concat();
        Self {
            magic: 2,
            attributes: 0,
            count: 1,
            producer: (-1, -1, -1),
            records,
            crc_error: 0,
            length_error: 0,
        }
    }
}

impl Batch {
    fn bytes(&self) -> Vec<u8> {
        let mut covered = Vec::new();
        covered.extend(self.attributes.to_be_bytes());
        covered.extend((self.count - 1).to_be_bytes());
        covered.extend(1_700_000_000_000i64.to_be_bytes());
        covered.extend(1_700_000_000_000i64.to_be_bytes());
        covered.extend(self.producer.0.to_be_bytes());
        covered.extend(self.producer.1.to_be_bytes());
        covered.extend(self.producer.2.to_be_bytes());
        covered.extend(self.count.to_be_bytes());
        covered.extend(&self.records);
        let mut batch = Vec::new();
        batch.extend(0i64.to_be_bytes());
        let length = i32::try_from(covered.len() + 9).unwrap() + self.length_error;
        batch.extend(length.to_be_bytes());
        batch.extend((-1i32).to_be_bytes());
        batch.push(self.magic);
        batch.extend((crc32c::crc32c(&covered) ^ self.crc_error).to_be_bytes());
        batch.extend(covered);
        batch
    }
}

fn produced(server: &Shared, topic: &str, batch: &[u8]) -> Option<i16> {
    let mut raw = Raw::connect(&server.leader_of(topic, 0)).unwrap();
    raw.send(&produce(1, topic, 0, -1, batch)).unwrap();
    match raw.reaction().unwrap() {
        Reaction::Answer(1, body) => produce_error(&body),
        Reaction::Closed => None,
        other => panic!("{other:?}"),
    }
}

/// Asserts that the server still serves, quickly and with bounded memory.
fn assert_healthy(server: &Shared) {
    let mut raw = Raw::connect(server.kafka()).unwrap();
    raw.send(&request(18, 0, 5, &[])).unwrap();
    let Reaction::Answer(5, _) = raw.reaction().unwrap() else { panic!("no answer") };
    if let Some(pid) = server.pid() {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: u64 = resident.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        assert!(kib < 512 * 1024, "{kib} KiB resident");
    }
}

#[test]
fn valid_handmade_batch_is_accepted() {
    let server = server();
    let topic = topic(server.kafka(), "hand", 1, &[]);
    assert_eq!(produced(&server, &topic, &Batch::default().bytes()), Some(0));
    assert_eq!(values(server.kafka(), &topic, &[("check.crcs", "true")]), ["ok"]);
}

#[test]
fn malformed_frames_close_the_connection() {
    let server = server();
    let topic = topic(server.kafka(), "victim", 1, &[]);
    let mut random = fastrand::Rng::with_seed(3);
    let garbage: Vec<u8> = (0..4_000).map(|_| random.u8(..)).collect();
    let cases: [(&str, Vec<u8>); 9] = [
        ("a negative length", (-1i32).to_be_bytes().to_vec()),
        ("an absurd length", i32::MAX.to_be_bytes().to_vec()),
        ("an empty frame", 0i32.to_be_bytes().to_vec()),
        ("half a header", framed(&[0, 18, 0])),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("garbage in a frame", framed(&garbage)),
        ("an unknown api", request(999, 0, 1, &[])),
        ("an array of two thousand million", request(3, 1, 1, &0x7fff_ffffi32.to_be_bytes())),
        ("a string longer than its frame", request(3, 1, 1, &[0, 0, 0, 1, 0x7f, 0xff, b'x'])),
    ];
    for (what, bytes) in cases {
        let mut raw = Raw::connect(server.kafka()).unwrap();
        raw.send(&bytes).unwrap();
        assert_eq!(raw.reaction().unwrap(), Reaction::Closed, "{what}");
        assert_healthy(&server);
    }
    deliver(server.kafka(), &topic, &["still here"]);
}

#[test]
fn incomplete_frame_does_not_affect_other_clients() {
    let server = server();
    let whole = request(18, 0, 9, &[]);
    let mut half = Raw::connect(server.kafka()).unwrap();
    half.send(&whole[..7]).unwrap();
    assert_eq!(half.reaction_within(Duration::from_millis(300)).unwrap(), Reaction::Silence);
    assert_healthy(&server);
    half.send(&whole[7..]).unwrap();
    let Reaction::Answer(9, _) = half.reaction().unwrap() else { panic!("no answer") };
    // Many connections that announce large frames and send little do not fill the memory.
    let promises: Vec<Raw> = (0..200)
        .map(|_| {
            let mut raw = Raw::connect(server.kafka()).unwrap();
            raw.send(&50_000_000i32.to_be_bytes()).unwrap();
            raw.send(&whole[4..]).unwrap();
            raw
        })
        .collect();
    assert_healthy(&server);
    drop(promises);
}

#[test]
fn unknown_api_versions_version_is_answered_with_supported_versions() {
    let server = server();
    let mut raw = Raw::connect(server.kafka()).unwrap();
    // As a newer client sends it: no tagged fields, then its name and version.
    raw.send(&request(18, 99, 3, &[0, 2, b'x', 2, b'1', 0])).unwrap();
    let Reaction::Answer(3, body) = raw.reaction().unwrap() else { panic!("no answer") };
    assert_eq!(body[..2], UNSUPPORTED_VERSION.to_be_bytes());
    let count = i32::from_be_bytes([body[2], body[3], body[4], body[5]]);
    assert!(count > 0, "the ranges are named");
    raw.send(&request(18, 0, 4, &[])).unwrap();
    let Reaction::Answer(4, body) = raw.reaction().unwrap() else { panic!("the connection goes on") };
    assert_eq!(body[..2], [0, 0]);
}

#[test]
fn unknown_version_of_other_apis_closes_the_connection() {
    let server = server();
    for key in [0, 1, 3, 11] {
        let mut raw = Raw::connect(server.kafka()).unwrap();
        raw.send(&request(key, 99, 1, &[0; 40])).unwrap();
        assert_eq!(raw.reaction().unwrap(), Reaction::Closed, "api {key}");
    }
    assert_healthy(&server);
}

#[test]
fn corrupt_batch_is_refused() {
    let server = server();
    let topic = topic(server.kafka(), "damaged", 1, &[]);
    let fine = Batch::default;
    let mut flipped = fine().bytes();
    *flipped.last_mut().unwrap() ^= 1;
    let cut = fine().bytes()[..70.min(fine().bytes().len() - 1)].to_vec();
    let cases: [(&str, Vec<u8>, &[i16]); 9] = [
        ("a wrong CRC", Batch { crc_error: 1, ..fine() }.bytes(), &[CORRUPT_MESSAGE]),
        ("a flipped bit", flipped, &[CORRUPT_MESSAGE]),
        ("a batch cut short", cut, &[CORRUPT_MESSAGE, INVALID_RECORD]),
        (
            "a length too long",
            Batch { length_error: 10, ..fine() }.bytes(),
            &[CORRUPT_MESSAGE, INVALID_RECORD],
        ),
        (
            "a length too short",
            Batch { length_error: -5, ..fine() }.bytes(),
            &[CORRUPT_MESSAGE, INVALID_RECORD],
        ),
        (
            "more records than there are",
            Batch { count: 5, ..fine() }.bytes(),
            &[CORRUPT_MESSAGE, INVALID_RECORD],
        ),
        (
            "an unknown codec",
            Batch { attributes: 7, ..fine() }.bytes(),
            &[CORRUPT_MESSAGE, INVALID_RECORD, 76],
        ),
        ("a control batch", Batch { attributes: 0x20, ..fine() }.bytes(), &[CORRUPT_MESSAGE, INVALID_RECORD]),
        (
            "a format of the future",
            Batch { magic: 9, ..fine() }.bytes(),
            &[CORRUPT_MESSAGE, INVALID_RECORD, 43],
        ),
    ];
    for (what, batch, allowed) in cases {
        // The protocol allows closing the connection for a malformed frame.
        if let Some(code) = produced(&server, &topic, &batch) {
            assert!(allowed.contains(&code), "{what}: {code}");
        }
        assert_eq!(watermarks(server.kafka(), &topic, 0), (0, 0), "{what} was written");
    }
    assert_eq!(produced(&server, &topic, &fine().bytes()), Some(0));
}

#[test]
fn decompression_bomb_is_refused() {
    let server = server();
    let topic = topic(server.kafka(), "bomb", 1, &[("compression.type", "uncompressed")]);
    // A few hundred bytes of snappy that claim to be two gigabytes.
    let claim = [0xff, 0xff, 0xff, 0xff, 0x07];
    let raw_snappy = [&claim[..], &[0u8; 200]].concat();
    let batch = Batch { attributes: 2, records: raw_snappy, ..Batch::default() }.bytes();
    for _ in 0..20 {
        let code = produced(&server, &topic, &batch);
        assert!(
            matches!(code, None | Some(CORRUPT_MESSAGE | INVALID_RECORD | MESSAGE_TOO_LARGE)),
            "{code:?}"
        );
    }
    assert_healthy(&server);
    assert_eq!(watermarks(server.kafka(), &topic, 0), (0, 0));
}

#[test]
fn oversized_requests_and_batches_are_refused() {
    let server = server();
    let topic = topic(server.kafka(), "large", 1, &[("max.message.bytes", "1000")]);
    let batch = Batch { records: vec![0; 2_000], ..Batch::default() };
    assert_eq!(produced(&server, &topic, &batch.bytes()), Some(MESSAGE_TOO_LARGE));
    assert_eq!(produced(&server, &topic, &Batch::default().bytes()), Some(0));
}

#[test]
fn invalid_names_and_numbers_are_refused() {
    let server = server();
    let topic = topic(server.kafka(), "names", 1, &[]);
    let batch = Batch::default().bytes();
    for name in ["../../etc/passwd", "with space", "", "."] {
        let code = produced(&server, name, &batch);
        assert!(
            matches!(code, None | Some(INVALID_TOPIC | UNKNOWN_TOPIC_OR_PARTITION)),
            "{name:?}: {code:?}"
        );
    }
    let mut raw = Raw::connect(&server.leader_of(&topic, 0)).unwrap();
    let cases = [
        (99, -1, UNKNOWN_TOPIC_OR_PARTITION),
        (-5, -1, UNKNOWN_TOPIC_OR_PARTITION),
        (0, 7, INVALID_REQUIRED_ACKS),
    ];
    for (partition, acks, expected) in cases {
        raw.send(&produce(2, &topic, partition, acks, &batch)).unwrap();
        let Reaction::Answer(2, body) = raw.reaction().unwrap() else { panic!("no answer") };
        assert_eq!(produce_error(&body), Some(expected), "partition {partition}, acks {acks}");
    }
}

#[test]
fn producer_sequence_gap_is_refused() {
    let server = server();
    let topic = topic(server.kafka(), "gap", 1, &[]);
    let mut raw = Raw::connect(server.kafka()).unwrap();
    // InitProducerId version 0: no transactional id, some timeout.
    raw.send(&request(22, 0, 1, &[&(-1i16).to_be_bytes()[..], &60_000i32.to_be_bytes()].concat())).unwrap();
    let Reaction::Answer(1, body) = raw.reaction().unwrap() else { panic!("no answer") };
    assert_eq!(body[4..6], [0, 0]);
    let id = i64::from_be_bytes(body[6..14].try_into().unwrap());
    let send = |sequence: i32| {
        produced(&server, &topic, &Batch { producer: (id, 0, sequence), ..Batch::default() }.bytes())
    };
    assert_eq!(send(0), Some(0));
    assert_eq!(send(1), Some(0));
    assert_eq!(send(1), Some(0), "a duplicate is answered as the first time");
    assert_eq!(send(5), Some(OUT_OF_ORDER_SEQUENCE));
    assert_eq!(send(2), Some(0));
    assert_eq!(watermarks(server.kafka(), &topic, 0), (0, 3));
}

#[test]
fn connection_flood_is_survived() {
    let server = server();
    for _ in 0..5 {
        let crowd: Vec<Raw> = (0..200).filter_map(|_| Raw::connect(server.kafka()).ok()).collect();
        assert!(!crowd.is_empty());
        drop(crowd);
    }
    until(PATIENCE, "the server to be well", || {
        let mut raw = Raw::connect(server.kafka()).ok()?;
        raw.send(&request(18, 0, 5, &[])).ok()?;
        matches!(raw.reaction(), Ok(Reaction::Answer(5, _))).then_some(())
    });
}

#[test]
fn random_bytes_after_a_valid_header_affect_no_other_client() {
    let server = server();
    let topic = topic(server.kafka(), "random", 1, &[]);
    let seed = fastrand::u64(..1_000_000);
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let (key, version) = (random.i16(0..80), random.i16(0..14));
        let mut body: Vec<u8> = (0..random.usize(0..200)).map(|_| random.u8(..)).collect();
        if random.bool() {
            body = [string(&topic), body].concat();
        }
        let mut raw = Raw::connect(server.kafka()).unwrap();
        raw.send(&request(key, version, 1, &body)).unwrap();
        // Any response is acceptable, and none is as well: some of these requests mean "wait".
        let _ = raw.reaction_within(Duration::from_millis(20));
    }
    eprintln!("seed {seed}");
    assert_healthy(&server);
    deliver(server.kafka(), &topic, &["still here"]);
}
