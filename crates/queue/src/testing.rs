//! A broker without loops or threads, for tests that choose when the disk completes a sync.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, SystemClock};
use moim_journal::{RealDisk, Store, StoreOptions};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::message::Sender;
use moim_replica::transition::Draft;
use moim_replica::{BrokerEpoch, DirectoryId, InSync, PartitionState, Versioned, keys};
use moim_state::nodes::{MemberRecord, NodeRecord, member_key, node_key};
use moim_state::{BoxFuture, MemoryRepository, StateRepository, Txn, TxnOutcome};
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{BatchBuilder, BatchHeader};

use crate::broker::{Broker, BrokerOptions, BrokerParts};
use crate::partition::{Appended, Partition};
use crate::topics::{NewTopic, TOPIC_PREFIX, TopicRecord};

pub(crate) struct TestBroker {
    pub(crate) broker: Arc<Broker>,
    pub(crate) store: Arc<Store>,
    repository: Arc<MemoryRepository>,
    folder: tempfile::TempDir,
    /// The runtime of the driver's tasks; it is never run.
    _runtime: tokio::runtime::Runtime,
}

/// A dialler without peers: every connection fails.
struct NoPeers;

impl Dialler for NoPeers {
    fn dial(&self, _: BrokerId) -> BoxFuture<'_, std::io::Result<Box<dyn Socket>>> {
        Box::pin(async { Err(std::io::ErrorKind::NotConnected.into()) })
    }
}

impl TestBroker {
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
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let driver = {
            let _runtime = runtime.enter();
            Driver::start(DriverParts {
                node: BrokerId(1),
                repository: repository.clone(),
                dialler: Arc::new(NoPeers),
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
        let fixture = Self { broker, store, repository, folder, _runtime: runtime };
        fixture.apply_roles();
        fixture
    }

    /// Lets the coordinators follow the roles of their partitions.
    pub(crate) fn apply_roles(&self) {
        let retry = self.broker.apply_role_changes(self.broker.topics.roles.take_now());
        assert!(retry.is_empty(), "every coordinator log is readable");
    }

    /// Stops cleanly, or as a crash after the last sync would, and starts again.
    pub(crate) fn restart(self, clean: bool) -> Self {
        let Self { broker, store, repository, folder, _runtime } = self;
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
        self.apply_roles();
        topic.partition(0).unwrap()
    }

    /// Writes a topic into the state repository, as another broker would; this broker is not notified.
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

    /// Completes the pending sync and notifies the partition.
    pub(crate) fn sync(&self, partition: &Partition) {
        while self.store.pump() {}
        partition.on_durable();
    }
}

/// Registers a new broker epoch of node 1 and elects it, as the controller would, for the partitions it led.
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
    // As if verified by the transaction coordinator.
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
