//! One shard with all slots, without the rest of a node: to measure the store by itself.
//! `cargo run --release -p moim-slots --example alone -- PORT DATA [async]`

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moim_base::SystemClock;
use moim_base::task::Shutdown;
use moim_journal::{
    Durability, DurableSink, JournalId, JournalOptions, PlainFraming, RealDisk, Store, StoreOptions,
};
use moim_slots::cluster;
use moim_slots::log::LocalLog;
use moim_slots::server::Server;
use moim_slots::shard::Shard;
use moim_slots::shared::{Shared, hex_id};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Sink(Arc<Shard>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        advanced.iter().for_each(|(_, end)| self.0.on_committed(*end));
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let port: u16 = args.next().and_then(|port| port.parse().ok()).expect("a port");
    let data = args.next().expect("a folder");
    let is_async = args.next().is_some();
    let clock = Arc::new(SystemClock::new());
    let store = Store::open(data.as_ref(), Arc::new(RealDisk), clock.clone(), StoreOptions::default())
        .expect("the folder can be opened");
    let options = JournalOptions {
        folder: "slots/shard-0".into(),
        framing: Arc::new(PlainFraming),
        durability: Durability::Fsync,
        segment_bytes: 64 << 20,
        tag: 1,
    };
    let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).expect("the journal opens");
    let shared = Arc::new(Shared::new(clock));
    let shutdown = Shutdown::new();
    let server = Server::start(Arc::clone(&shared), 1, shutdown).expect("threads start");
    let id = hex_id();
    shared.view.store(Arc::new(cluster::standalone(id.clone(), "127.0.0.1".into(), port)));
    let shard = Shard::new(
        0,
        id,
        Arc::new(LocalLog::new(journal.clone())),
        server.loops(),
        Some(moim_slots::snapshot::folder(data.as_ref(), 0)),
    );
    shard.is_async.store(is_async, Ordering::Relaxed);
    store.set_sink(Arc::new(Sink(Arc::clone(&shard))));
    shard.on_committed(journal.durable_end());
    store.start();
    server.run_shard(&shard).expect("the loop runs");
    let listener = Server::bind(([127, 0, 0, 1], port).into()).expect("the port is free");
    server.listen(&shard, listener).expect("the loop runs");
    server.join();
}
