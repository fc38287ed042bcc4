//! A broker without loops or threads, for tests that must choose the moment at which the disk is done.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use moim_base::SystemClock;
use moim_base::metrics::Metrics;
use moim_base::task::Shutdown;
use moim_cluster::MemoryRepository;
use moim_journal::{RealDisk, Store, StoreOptions};
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::BatchBuilder;

use crate::broker::{Broker, BrokerOptions, BrokerParts};
use crate::partition::{Appended, Partition};
use crate::topics::NewTopic;

pub(crate) struct Still {
    pub(crate) broker: Arc<Broker>,
    pub(crate) store: Arc<Store>,
    repository: Arc<MemoryRepository>,
    folder: tempfile::TempDir,
}

impl Still {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
        Self::open(folder, repository)
    }

    fn open(folder: tempfile::TempDir, repository: Arc<MemoryRepository>) -> Self {
        let clock: Arc<SystemClock> = Arc::new(SystemClock::new());
        let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
        let store = Arc::new(Store::open(folder.path(), Arc::new(RealDisk), clock.clone(), options).unwrap());
        let parts = BrokerParts {
            store: Arc::clone(&store),
            repository: repository.clone(),
            clock,
            metrics: Arc::new(Metrics::new()),
            shutdown: Shutdown::new(),
        };
        let options =
            BrokerOptions { offsets_partitions: 1, transaction_partitions: 1, ..BrokerOptions::default() };
        let broker = wait(Broker::open(options, parts)).unwrap();
        Self { broker, store, repository, folder }
    }

    /// Ends in order, or as a crash after the last sync would, and starts again.
    pub(crate) fn restart(self, clean: bool) -> Self {
        let Self { broker, store, repository, folder } = self;
        broker.close();
        if clean {
            store.close().unwrap();
        }
        drop((broker, store));
        Self::open(folder, repository)
    }

    pub(crate) fn topic(&self, name: &str, configs: &[(&str, &str)]) -> Arc<Partition> {
        let configs: BTreeMap<_, _> =
            configs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let new = NewTopic { name: name.into(), partitions: 1, replication_factor: 1, configs };
        wait(self.broker.create_topic(new, None)).unwrap().partition(0).unwrap()
    }

    pub(crate) fn partition(&self, topic: &str) -> Arc<Partition> {
        self.broker.topics.partition(topic, 0).unwrap()
    }

    /// Lets the disk finish and tells the partition.
    pub(crate) fn sync(&self, partition: &Partition) {
        while self.store.pump() {}
        partition.on_durable(partition.journal.durable_end(), &mut Vec::new());
    }
}

pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

pub(crate) fn append(partition: &Partition, batch: Bytes) -> Appended {
    partition.append_own(batch, 1_000, None, &mut Vec::new()).unwrap()
}

/// A batch of one record.
pub(crate) fn batch(builder: impl FnOnce(BatchBuilder) -> BatchBuilder, key: &str, value: &str) -> Bytes {
    let mut batch = builder(BatchBuilder::new(Compression::None));
    batch.push(1_000, Some(key.as_bytes()), Some(value.as_bytes()), &[]);
    batch.build()
}
