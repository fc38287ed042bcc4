//! The load client against a server with canned responses: it counts what was acknowledged and fails on an error
//! code.

use std::net::SocketAddr;
use std::path::PathBuf;

use bytes::BytesMut;
use moim_wire_kafka::messages::{
    FetchResponse, FetchableTopicResponse, PartitionData, PartitionProduceResponse, ProduceResponse,
    TopicProduceResponse,
};
use moim_wire_kafka::{ErrorCode, Records, encode_response};

use super::fetch::{FETCH_VERSION, FetchLoad, fetch};
use super::produce::{PRODUCE_VERSION, ProduceLoad, batch, produce};
use super::*;
use crate::probes::floor::{Floor, Keep};

/// A server that answers every request with the same bytes, and its directory.
struct Canned(Floor, PathBuf);

impl Canned {
    fn start(name: &str, answer: BytesMut) -> Canned {
        let dir = std::env::temp_dir().join(format!("moim-bench-load-{name}-{}", std::process::id()));
        Canned(Floor::start(&dir, Keep::PageCache, answer.to_vec()).unwrap(), dir)
    }
}

impl Drop for Canned {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

fn produced(error: ErrorCode) -> BytesMut {
    let partition = PartitionProduceResponse { error_code: error as i16, ..Default::default() };
    let topic = TopicProduceResponse { partition_responses: vec![partition], ..Default::default() };
    let response = ProduceResponse { responses: vec![topic], ..Default::default() };
    encode_response(BytesMut::new(), 0, PRODUCE_VERSION, &response).unwrap().0
}

fn fetched(records: bytes::Bytes) -> BytesMut {
    let partition = PartitionData { records: Some(Records::Bytes(records)), ..Default::default() };
    let topic = FetchableTopicResponse { partitions: vec![partition], ..Default::default() };
    let response = FetchResponse { responses: vec![topic], ..Default::default() };
    encode_response(BytesMut::new(), 0, FETCH_VERSION, &response).unwrap().0
}

fn produce_load(addr: SocketAddr) -> ProduceLoad {
    ProduceLoad { addr, topic: "t".into(), partitions: 3, window: 5, batch: batch(4096, 4) }
}

fn fetch_load(addr: SocketAddr, batches: usize) -> FetchLoad {
    FetchLoad {
        addr,
        topic: "t".into(),
        partitions: 2,
        window: 3,
        batches,
        batches_per_fetch: 1,
        batch_bytes: 4096,
        batch_records: 4,
    }
}

#[test]
fn batches_have_about_the_requested_size() {
    for (bytes, records) in [(4096, 4), (65536, 64), (1_000_000, 1000)] {
        let len = batch(bytes, records).len();
        assert!(len <= bytes && len > bytes - bytes / 50, "{bytes} asked, {len} made");
    }
}

#[test]
fn every_acknowledged_batch_is_counted_once() {
    let server = Canned::start("produce", produced(ErrorCode::None));
    let load = produce_load(server.0.addr);
    let work = runtime().unwrap().block_on(produce(&load, Until::Operations(101))).unwrap();
    assert_eq!(work.ops, 303);
    assert_eq!(work.bytes, 303 * load.batch.len() as u64);
    let latency = work.latency.unwrap();
    assert_eq!(latency.len(), 303);
    assert!(latency.value_at_quantile(0.5) > 1000, "no round trip takes under a microsecond");
}

#[test]
fn error_code_ends_the_run() {
    let server = Canned::start("refused", produced(ErrorCode::NotLeaderOrFollower));
    let load = produce_load(server.0.addr);
    let error = runtime().unwrap().block_on(produce(&load, Until::Operations(10))).unwrap_err();
    assert!(error.to_string().contains("NOT_LEADER_OR_FOLLOWER"), "{error}");
}

#[test]
fn permanently_overloaded_storage_ends_the_run() {
    let server = Canned::start("busy", produced(ErrorCode::KafkaStorageError));
    let load =
        ProduceLoad { partitions: 1, window: 500, batch: batch(100, 1), ..produce_load(server.0.addr) };
    let error = runtime().unwrap().block_on(produce(&load, Until::Operations(5000))).unwrap_err();
    assert!(error.to_string().contains("refuses more requests than it accepts"), "{error}");
}

#[test]
fn fetched_bytes_are_counted_and_offsets_checked() {
    let records = batch(4096, 4);
    let server = Canned::start("fetch", fetched(records.clone()));
    let runtime = runtime().unwrap();
    let work = runtime.block_on(fetch(&fetch_load(server.0.addr, 1), Until::Operations(50))).unwrap();
    assert_eq!((work.ops, work.bytes), (100, 100 * records.len() as u64));
    // The second range must not start at offset 0 again.
    let error = runtime.block_on(fetch(&fetch_load(server.0.addr, 2), Until::Operations(50))).unwrap_err();
    assert!(error.to_string().contains("asked for offset 4"), "{error}");
}

#[test]
fn connection_refused_is_an_error() {
    let error =
        runtime().unwrap().block_on(produce(&produce_load(([127, 0, 0, 1], 1).into()), Until::Operations(1)));
    assert!(error.unwrap_err().to_string().contains("connecting to 127.0.0.1:1"));
}
