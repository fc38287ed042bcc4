//! The subjects of the queue's comparisons: each broker under each load, and the probes.
//!
//! Owns preparation and cleanup of a slice. A produce slice gets a fresh topic, which is deleted and the disk settled
//! before the next subject's slice: otherwise one side would pay for the other's write-back.

use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::{Bytes, BytesMut};
use moim_wire_kafka::messages::{PartitionProduceResponse, ProduceResponse, TopicProduceResponse};
use moim_wire_kafka::{KString, encode_response};

use super::{Bench, MIB};
use crate::load::admin::{self, NewTopic};
use crate::load::end_to_end::{EndToEnd, end_to_end};
use crate::load::fetch::{FetchLoad, fetch};
use crate::load::produce::{self, PRODUCE_VERSION, ProduceLoad};
use crate::load::{Until, drain};
use crate::peers::Server;
use crate::probes::blast::{self, Blast};
use crate::probes::floor::{self, Floor, Keep};
use crate::procfs;
use crate::slices::{Subject, Work};

/// Durability of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ack {
    /// Written to the page cache.
    Written,
    /// Synced to disk.
    Synced,
}

impl Ack {
    /// The topic configs that request this durability from a broker.
    pub(super) fn configs(self, broker: &str) -> Vec<(String, String)> {
        let pair = match (broker, self) {
            ("Moim", Ack::Written) => ("durability", "replicated"),
            ("Moim", Ack::Synced) => ("durability", "fsync"),
            // Without it Kafka leaves the data in the page cache.
            (_, Ack::Synced) => ("flush.messages", "1"),
            (_, Ack::Written) => return vec![("file.delete.delay.ms".into(), "100".into())],
        };
        let mut configs = vec![(pair.0.to_owned(), pair.1.to_owned())];
        if broker != "Moim" {
            configs.push(("file.delete.delay.ms".into(), "100".into()));
        }
        configs
    }

    pub(super) fn text(self, broker: &str) -> String {
        match (broker, self) {
            ("Moim", Ack::Written) => "page cache (durability=replicated)",
            ("Moim", Ack::Synced) => "fsync (durability=fsync)",
            (_, Ack::Written) => "page cache (default)",
            (_, Ack::Synced) => "fsync (flush.messages=1)",
        }
        .into()
    }
}

/// A produce load without its target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) partitions: i32,
    pub(super) window: usize,
    pub(super) batch_bytes: usize,
    pub(super) records: usize,
    pub(super) ack: Ack,
}

/// Number of warm-up slices. Kafka JIT-compiles its hot path, so it gets more.
fn warm_up_of(server: &Server) -> u32 {
    if server.name() == "Kafka" { 3 } else { 1 }
}

/// Waits until the disk has finished the write-back of a slice.
pub(super) fn settle_disk() {
    rustix::fs::sync();
}

/// Deletes a slice's topic and waits until the server has processed it: unlinking gigabytes takes a broker a while,
/// and the next subject's slice must not pay for it.
fn delete_topic(bench: &Bench<'_>, server: &Server, topic: &str) -> Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(100);
    const MAX_POLLS: u32 = 50;
    bench.runtime.block_on(admin::delete(server.addr, &[topic.to_owned()]))?;
    let mut quiet = 0;
    let mut before = procfs::cpu_of(server.pid())?;
    for _ in 0..MAX_POLLS {
        std::thread::sleep(POLL_INTERVAL);
        let now = procfs::cpu_of(server.pid())?;
        quiet = if now.saturating_sub(before) <= POLL_INTERVAL / 10 { quiet + 1 } else { 0 };
        before = now;
        if quiet >= 3 {
            break;
        }
    }
    settle_disk();
    Ok(())
}

/// A broker under a produce load.
pub(super) struct ProduceSubject<'a> {
    bench: &'a Bench<'a>,
    server: &'a Server,
    shape: Shape,
    load: ProduceLoad,
}

impl<'a> ProduceSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, server: &'a Server, shape: &Shape) -> Self {
        let load = ProduceLoad {
            addr: server.addr,
            topic: String::new(),
            partitions: shape.partitions,
            window: shape.window,
            batch: produce::batch(shape.batch_bytes, shape.records),
        };
        ProduceSubject { bench, server, shape: *shape, load }
    }
}

impl Subject for ProduceSubject<'_> {
    fn label(&self) -> String {
        self.server.name().into()
    }

    fn durability(&self) -> String {
        self.shape.ack.text(self.server.name())
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid())
    }

    fn warm_up(&self) -> u32 {
        warm_up_of(self.server)
    }

    fn prepare(&mut self) -> Result<()> {
        self.load.topic = self.bench.topic();
        let topic = NewTopic {
            name: self.load.topic.clone(),
            partitions: self.shape.partitions,
            configs: self.shape.ack.configs(self.server.name()),
        };
        self.bench.runtime.block_on(admin::create(self.server.addr, &[topic]))
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        self.bench.runtime.block_on(produce::produce(&self.load, Until::Elapsed(slice)))
    }

    fn settle(&mut self) -> Result<()> {
        self.bench
            .runtime
            .block_on(admin::delete(self.server.addr, std::slice::from_ref(&self.load.topic)))?;
        settle_disk();
        Ok(())
    }
}

/// A broker under a fetch load.
pub(super) struct FetchSubject<'a> {
    bench: &'a Bench<'a>,
    server: &'a Server,
    load: FetchLoad,
}

impl<'a> FetchSubject<'a> {
    /// Fills a topic with `partition_bytes` in every partition.
    pub(super) fn fill(
        bench: &'a Bench<'a>,
        server: &'a Server,
        partitions: i32,
        partition_bytes: usize,
    ) -> Result<Self> {
        let records = 64;
        let batch = produce::batch(64 << 10, records);
        let batches_per_fetch = MIB / batch.len();
        let batches = partition_bytes / batch.len() / batches_per_fetch * batches_per_fetch;
        let topic = bench.topic();
        let configs = Ack::Written.configs(server.name());
        let new = NewTopic { name: topic.clone(), partitions, configs };
        bench.runtime.block_on(admin::create(server.addr, &[new]))?;
        let fill = ProduceLoad {
            addr: server.addr,
            topic: topic.clone(),
            partitions,
            window: 4,
            batch: batch.clone(),
        };
        bench.runtime.block_on(produce::produce(&fill, Until::Operations(batches as u64)))?;
        settle_disk();
        let load = FetchLoad {
            addr: server.addr,
            topic,
            partitions,
            window: 2,
            batches,
            batches_per_fetch,
            batch_bytes: batch.len(),
            batch_records: records,
        };
        Ok(FetchSubject { bench, server, load })
    }
}

impl Subject for FetchSubject<'_> {
    fn label(&self) -> String {
        self.server.name().into()
    }

    fn durability(&self) -> String {
        "hot data".into()
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid())
    }

    fn warm_up(&self) -> u32 {
        warm_up_of(self.server)
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        self.bench.runtime.block_on(fetch(&self.load, Until::Elapsed(slice)))
    }
}

/// A broker between a fixed-rate producer and a waiting consumer.
pub(super) struct EndToEndSubject<'a> {
    bench: &'a Bench<'a>,
    server: &'a Server,
    ack: Ack,
    load: EndToEnd,
}

impl<'a> EndToEndSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, server: &'a Server, ack: Ack, every: Duration) -> Self {
        let load = EndToEnd { addr: server.addr, topic: String::new(), from: 0, every };
        EndToEndSubject { bench, server, ack, load }
    }
}

impl Subject for EndToEndSubject<'_> {
    fn label(&self) -> String {
        match self.ack {
            Ack::Written => self.server.name().into(),
            Ack::Synced => format!("{}, fsync", self.server.name()),
        }
    }

    fn durability(&self) -> String {
        self.ack.text(self.server.name())
    }

    fn pid(&self) -> Option<u32> {
        Some(self.server.pid())
    }

    fn warm_up(&self) -> u32 {
        warm_up_of(self.server)
    }

    fn prepare(&mut self) -> Result<()> {
        self.load.topic = self.bench.topic();
        let configs = self.ack.configs(self.server.name());
        let topic = NewTopic { name: self.load.topic.clone(), partitions: 1, configs };
        self.bench.runtime.block_on(admin::create(self.server.addr, &[topic]))
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        self.bench.runtime.block_on(end_to_end(&self.load, slice))
    }

    fn settle(&mut self) -> Result<()> {
        delete_topic(self.bench, self.server, &self.load.topic)
    }
}

/// The floor probe under the same produce load.
pub(super) struct FloorSubject<'a> {
    bench: &'a Bench<'a>,
    keep: Keep,
    answer: Vec<u8>,
    load: ProduceLoad,
    server: Option<Floor>,
}

impl<'a> FloorSubject<'a> {
    pub(super) fn new(bench: &'a Bench<'a>, keep: Keep, shape: &Shape) -> Result<Self> {
        let load = ProduceLoad {
            addr: ([127, 0, 0, 1], 0).into(),
            topic: "floor".into(),
            partitions: shape.partitions,
            window: shape.window,
            batch: produce::batch(shape.batch_bytes, shape.records),
        };
        Ok(FloorSubject { bench, keep, answer: canned_answer()?.to_vec(), load, server: None })
    }
}

/// A response that acknowledges one batch, whatever the request.
fn canned_answer() -> Result<Bytes> {
    let partition_responses = vec![PartitionProduceResponse::default()];
    let topic =
        TopicProduceResponse { name: KString::from("floor"), partition_responses, ..Default::default() };
    let response = ProduceResponse { responses: vec![topic], ..Default::default() };
    let (frame, _) =
        encode_response(BytesMut::new(), 0, PRODUCE_VERSION, &response).context("canned answer")?;
    Ok(frame.freeze())
}

impl Subject for FloorSubject<'_> {
    fn label(&self) -> String {
        "floor server".into()
    }

    fn durability(&self) -> String {
        match self.keep {
            Keep::PageCache => "page cache, growing file",
            Keep::SyncEach => "fsync each, prewritten file",
            Keep::SyncShared => "fsync shared, prewritten file",
        }
        .into()
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn prepare(&mut self) -> Result<()> {
        let server = Floor::start(&self.bench.folder.join("floor"), self.keep, self.answer.clone())?;
        self.load.addr = server.addr;
        self.server = Some(server);
        Ok(())
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let before = procfs::cpu_of_threads(floor::THREADS)?;
        let mut work = self.bench.runtime.block_on(produce::produce(&self.load, Until::Elapsed(slice)))?;
        work.cpu = Some(procfs::cpu_of_threads(floor::THREADS)?.saturating_sub(before));
        Ok(work)
    }

    fn settle(&mut self) -> Result<()> {
        self.server = None;
        settle_disk();
        Ok(())
    }
}

/// The sendfile probe.
pub(super) struct BlastSubject<'a> {
    bench: &'a Bench<'a>,
    server: Blast,
}

impl<'a> BlastSubject<'a> {
    pub(super) fn start(bench: &'a Bench<'a>, file_bytes: u64) -> Result<Self> {
        Ok(BlastSubject { bench, server: Blast::start(&bench.folder.join("blast"), file_bytes, MIB)? })
    }
}

impl Subject for BlastSubject<'_> {
    fn label(&self) -> String {
        "sendfile blast".into()
    }

    fn durability(&self) -> String {
        "hot file, no protocol".into()
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let before = procfs::cpu_of_threads(blast::THREAD)?;
        let mut work = self.bench.runtime.block_on(drain(self.server.addr, MIB as u64, slice))?;
        work.cpu = Some(procfs::cpu_of_threads(blast::THREAD)?.saturating_sub(before));
        Ok(work)
    }
}

/// A probe loop inside this process.
pub(super) struct RawSubject {
    label: &'static str,
    durability: &'static str,
    body: Box<dyn FnMut(Duration) -> Result<Work>>,
}

impl RawSubject {
    pub(super) fn new(
        label: &'static str,
        durability: &'static str,
        body: impl FnMut(Duration) -> Result<Work> + 'static,
    ) -> Self {
        RawSubject { label, durability, body: Box::new(body) }
    }
}

impl Subject for RawSubject {
    fn label(&self) -> String {
        self.label.into()
    }

    fn durability(&self) -> String {
        self.durability.into()
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        (self.body)(slice)
    }

    fn settle(&mut self) -> Result<()> {
        settle_disk();
        Ok(())
    }
}
