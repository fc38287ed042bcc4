//! A broker without loops or threads, for tests that must choose the moment at which the disk is done.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, SystemClock};
use moim_cluster::nodes::{MemberRecord, NodeRecord, member_key, node_key};
use moim_cluster::{BoxFuture, MemoryRepository, StateRepository, Txn, TxnOutcome};
use moim_journal::{RealDisk, Store, StoreOptions};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::message::Sender;
use moim_replica::transition::Draft;
use moim_replica::{BrokerEpoch, DirectoryId, InSync, PartitionState, Versioned, keys};
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{BatchBuilder, BatchHeader};

use crate::broker::{Broker, BrokerOptions, BrokerParts};
use crate::partition::{Appended, Partition};
use crate::topics::{NewTopic, TOPIC_PREFIX, TopicRecord};

pub(crate) struct Still {
    pub(crate) broker: Arc<Broker>,
    pub(crate) store: Arc<Store>,
    repository: Arc<MemoryRepository>,
    folder: tempfile::TempDir,
    /// Where the driver's tasks would run; nobody runs them.
    _home: tokio::runtime::Runtime,
}

/// There is nobody else.
struct Nobody;

impl Dialler for Nobody {
    fn dial(&self, _: BrokerId) -> BoxFuture<'_, std::io::Result<Box<dyn Socket>>> {
        Box::pin(async { Err(std::io::ErrorKind::NotConnected.into()) })
    }
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
        let shutdown = Shutdown::new();
        let home = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let driver = {
            let _home = home.enter();
            Driver::start(DriverParts {
                node: BrokerId(1),
                repository: repository.clone(),
                dialler: Arc::new(Nobody),
                clock: clock.clone(),
                scope: Scope::new(shutdown.clone()),
                tuning: DriverTuning::default(),
            })
        };
        driver.set_run(wait(register(repository.as_ref())));
        let parts = BrokerParts {
            store: Arc::clone(&store),
            repository: repository.clone(),
            driver,
            clock,
            metrics: Arc::new(Metrics::new()),
            shutdown,
        };
        let options =
            BrokerOptions { offsets_partitions: 1, transaction_partitions: 1, ..BrokerOptions::default() };
        let broker = wait(Broker::open(options, parts)).unwrap();
        let still = Self { broker, store, repository, folder, _home: home };
        still.settle();
        still
    }

    /// Has the coordinators follow the roles of their partitions.
    pub(crate) fn settle(&self) {
        let again = self.broker.follow_roles(self.broker.topics.roles.take_now());
        assert!(again.is_empty(), "every log can be read");
    }

    /// Ends in order, or as a crash after the last sync would, and starts again.
    pub(crate) fn restart(self, clean: bool) -> Self {
        let Self { broker, store, repository, folder, _home } = self;
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
        let (replication_factor, assignment) = (Some(1), None);
        let new = NewTopic { name: name.into(), partitions: 1, replication_factor, configs, assignment };
        let topic = wait(self.broker.create_topic(new)).unwrap();
        self.settle();
        topic.partition(0).unwrap()
    }

    /// Puts a topic into the state repository, as another broker would; this one does not hear of it.
    pub(crate) fn topic_elsewhere(&self, name: &str, partitions: i32) {
        let record = TopicRecord {
            id: "00000000-0000-0000-0000-000000000001".into(),
            partitions,
            replication_factor: 1,
            factor_asked: true,
            configs: BTreeMap::new(),
        };
        let put = Txn::new().put(format!("{TOPIC_PREFIX}{name}"), serde_json::to_vec(&record).unwrap());
        wait(self.repository.txn(put)).unwrap();
    }

    pub(crate) fn partition(&self, topic: &str) -> Arc<Partition> {
        self.broker.topics.partition(topic, 0).unwrap()
    }

    /// Lets the disk finish and tells the partition.
    pub(crate) fn sync(&self, partition: &Partition) {
        while self.store.pump() {}
        partition.on_durable();
    }
}

/// Begins a run of node 1, and does what the controller would: it leads again what it led.
async fn register(repository: &MemoryRepository) -> Sender {
    let node = NodeRecord { node_id: 1, kafka: "here:9092".into(), ..NodeRecord::default() };
    let mark = MemberRecord { node_id: 1, voter: 1, ..MemberRecord::default() };
    repository.txn(Txn::new().delete(member_key(1))).await.unwrap();
    let put = Txn::new().put(node_key(1), node.to_bytes()).put(member_key(1), mark.to_bytes());
    let TxnOutcome::Done { revision } = repository.txn(put).await.unwrap() else {
        panic!("nothing is compared")
    };
    let run = Sender { node: BrokerId(1), epoch: BrokerEpoch(revision), directory: DirectoryId(1) };
    let member = InSync { node: run.node, epoch: run.epoch, directory: run.directory };
    for entry in repository.list(keys::PARTITIONS).await.unwrap().1 {
        let value = PartitionState::decode(&entry.value).unwrap();
        let mut draft = Draft::new(&Versioned { revision: entry.mod_revision, value });
        draft.restamp(member);
        assert!(draft.elect(member.node), "it was in sync");
        let next = draft.finish(keys::parse_partition(&entry.key).unwrap()).unwrap().next.unwrap();
        repository.txn(Txn::new().put(entry.key, next.encode())).await.unwrap();
    }
    run
}

pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

pub(crate) fn append(partition: &Partition, batch: Bytes) -> Appended {
    let header = BatchHeader::parse(&batch).unwrap();
    // As if its coordinator had verified it.
    let producer = (header.producer_id, header.producer_epoch);
    let guard = partition.begin_verification(producer, header.base_sequence);
    let guard = guard.map(|guard| guard.verified(i32::MAX));
    partition.append_own(batch, 1_000, None, guard).unwrap()
}

/// A batch of one record.
pub(crate) fn batch(builder: impl FnOnce(BatchBuilder) -> BatchBuilder, key: &str, value: &str) -> Bytes {
    let mut batch = builder(BatchBuilder::new(Compression::None));
    batch.push(1_000, Some(key.as_bytes()), Some(value.as_bytes()), &[]);
    batch.build()
}
