//! Several brokers on one state repository: each partition is led by one of them, and every broker knows which.

use std::sync::Arc;

use bytes::Bytes;

use moim_base::SystemClock;
use moim_journal::StoreOptions;
use moim_state::nodes::member_key;
use moim_state::{Expect, MemoryRepository, StateRepository, Txn};
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::*;
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{ErrorCode, Records};

use crate::support::{Client, ControllerThread, Net, Running, block_on, start_in, until};

/// Brokers 1, 2, ….
pub(crate) struct Cluster {
    pub(crate) repository: Arc<MemoryRepository>,
    net: Arc<Net>,
    brokers: Vec<Option<Running>>,
    _controller: ControllerThread,
}

impl Cluster {
    pub(crate) fn start(count: i32) -> Self {
        let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
        let controller = ControllerThread::start(&repository);
        let mut cluster =
            Self { repository, net: Arc::default(), brokers: Vec::new(), _controller: controller };
        for id in 1..=count {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            cluster.brokers.push(Some(cluster.run(id, folder)));
        }
        for id in 1..=count {
            until("every broker sees all", || cluster.metadata(id, &[]).brokers.len() == count as usize);
        }
        cluster
    }

    fn run(&self, id: i32, folder: tempfile::TempDir) -> Running {
        let repository = Arc::clone(&self.repository);
        start_in(folder, repository, &self.net, StoreOptions::default(), |options| {
            options.node_id = moim_base::BrokerId(id);
            options.rack = Some(format!("zone-{id}"));
            options.event_loops = 1;
        })
    }

    /// Stops a broker and removes its member record, as its lease expiry would.
    pub(crate) fn stop(&mut self, id: i32, in_order: bool) -> tempfile::TempDir {
        let folder = self.brokers[id as usize - 1].take().unwrap().stop(in_order);
        block_on(self.repository.txn(Txn::new().delete(member_key(id)))).unwrap();
        folder
    }

    pub(crate) fn start_again(&mut self, id: i32, folder: tempfile::TempDir) {
        self.brokers[id as usize - 1] = Some(self.run(id, folder));
    }

    pub(crate) fn client(&self, id: i32) -> Client {
        Client::connect(self.brokers[id as usize - 1].as_ref().unwrap())
    }

    pub(crate) fn metadata(&self, id: i32, topics: &[&str]) -> MetadataResponse {
        let named = |name: &&str| MetadataRequestTopic { name: Some((*name).into()), ..Default::default() };
        let request = MetadataRequest {
            topics: Some(topics.iter().map(named).collect()),
            allow_auto_topic_creation: false,
            ..Default::default()
        };
        self.client(id).call(&request, 12).unwrap()
    }

    /// The leaders of a topic's partitions, as one broker reports them.
    pub(crate) fn leaders(&self, id: i32, topic: &str) -> Vec<i32> {
        self.metadata(id, &[topic]).topics[0].partitions.iter().map(|p| p.leader_id).collect()
    }

    /// Creates a topic through one broker and waits until all know it.
    pub(crate) fn topic(&self, through: i32, name: &str, partitions: i32) -> Vec<i32> {
        self.client(through).create_topic(name, partitions);
        self.agreed_leaders(name, partitions)
    }

    pub(crate) fn agreed_leaders(&self, name: &str, partitions: i32) -> Vec<i32> {
        let ids = self.running();
        let mut agreed = Vec::new();
        until("every broker knows every leader", || {
            let reported: Vec<_> = ids.iter().map(|id| self.leaders(*id, name)).collect();
            agreed.clone_from(&reported[0]);
            agreed.len() == partitions as usize
                && !agreed.contains(&-1)
                && reported.iter().all(|t| *t == agreed)
        });
        agreed
    }

    /// The coordinator of a group (0) or a transactional id (1), on which all brokers must agree.
    pub(crate) fn coordinator(&self, kind: i8, key: &str) -> i32 {
        let mut found = None;
        until("brokers agree on a coordinator", || {
            let running = self.running();
            found = self.coordinator_id(running[0], kind, key);
            found.is_some() && running.iter().all(|id| self.coordinator_id(*id, kind, key) == found)
        });
        found.unwrap()
    }

    /// The coordinator as one broker reports it.
    pub(crate) fn coordinator_id(&self, id: i32, kind: i8, key: &str) -> Option<i32> {
        let coordinator_keys = vec![key.into()];
        let request = FindCoordinatorRequest { key_type: kind, coordinator_keys, ..Default::default() };
        let answer: FindCoordinatorResponse = self.client(id).call(&request, 4).unwrap();
        let found = answer.coordinators[0].clone();
        (found.error_code == 0).then_some(found.node_id)
    }

    /// A live broker.
    pub(crate) fn broker(&self, id: i32) -> &Arc<moim_queue::Broker> {
        &self.brokers[id as usize - 1].as_ref().unwrap().broker
    }

    /// The live brokers.
    pub(crate) fn running(&self) -> Vec<i32> {
        (1..).zip(&self.brokers).filter(|(_, b)| b.is_some()).map(|(id, _)| id).collect()
    }
}

pub(crate) fn produce(
    client: &mut Client,
    topic: &str,
    index: i32,
    batch: Bytes,
    txn: Option<&str>,
) -> PartitionProduceResponse {
    let data = PartitionProduceData { index, records: Some(Records::Bytes(batch)) };
    let topic_data =
        vec![TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() }];
    let request =
        ProduceRequest { acks: -1, timeout_ms: 10_000, transactional_id: txn.map(Into::into), topic_data };
    let response: ProduceResponse = client.call(&request, 10).unwrap();
    response.responses[0].partition_responses[0].clone()
}

pub(crate) fn plain(value: &str) -> Bytes {
    let mut batch = BatchBuilder::new(Compression::None);
    batch.push(1_700_000_000_000, Some(b"k"), Some(value.as_bytes()), &[]);
    batch.build()
}

pub(crate) fn transactional(producer: (i64, i16), sequence: i32, value: &str) -> Bytes {
    let batch = BatchBuilder::new(Compression::None);
    let mut batch = batch.producer(producer.0, producer.1, sequence).transactional(true);
    batch.push(1_700_000_000_000, Some(b"k"), Some(value.as_bytes()), &[]);
    batch.build()
}

/// A `read_committed` fetch of a partition: records and the last stable offset.
pub(crate) fn fetch(client: &mut Client, topic: &str, partition: i32) -> PartitionData {
    let wanted = FetchPartition { partition, partition_max_bytes: 1 << 20, ..Default::default() };
    let topic = FetchTopic { topic: topic.into(), partitions: vec![wanted], ..Default::default() };
    let request = FetchRequest {
        max_bytes: 1 << 20,
        isolation_level: 1,
        session_epoch: -1,
        topics: vec![topic],
        ..Default::default()
    };
    let response: FetchResponse = client.call(&request, 12).unwrap();
    response.responses[0].partitions[0].clone()
}

#[test]
fn topic_created_through_one_broker_is_served_by_all() {
    let cluster = Cluster::start(3);
    let leaders = cluster.topic(2, "t", 6);
    for id in 1..=3 {
        assert_eq!(leaders.iter().filter(|l| **l == id).count(), 2, "{leaders:?}");
    }
    let shown = cluster.metadata(3, &["t"]);
    assert_eq!(shown.brokers.iter().map(|b| b.node_id).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(shown.brokers[0].rack.as_deref(), Some("zone-1"));
    assert_eq!(shown.controller_id, cluster.metadata(1, &["t"]).controller_id);
    for (index, leader) in (0..).zip(&leaders) {
        let answer = produce(&mut cluster.client(*leader), "t", index, plain("v"), None);
        assert_eq!((answer.error_code, answer.base_offset), (0, 0));
        assert_eq!(fetch(&mut cluster.client(*leader), "t", index).high_watermark, 1);
        let other = leader % 3 + 1;
        let misled = produce(&mut cluster.client(other), "t", index, plain("v"), None);
        assert_eq!(misled.error_code, ErrorCode::NotLeaderOrFollower as i16);
        assert_eq!(misled.current_leader.leader_id, *leader);
        let misled = fetch(&mut cluster.client(other), "t", index);
        assert_eq!(misled.error_code, ErrorCode::NotLeaderOrFollower as i16);
        assert_eq!(misled.current_leader.leader_id, *leader);
    }
}

#[test]
fn topics_are_changed_through_any_broker() {
    let cluster = Cluster::start(2);
    cluster.topic(1, "t", 2);
    let grow = CreatePartitionsTopic { name: "t".into(), count: 5, ..Default::default() };
    let request = CreatePartitionsRequest { topics: vec![grow], ..Default::default() };
    let answer: CreatePartitionsResponse = cluster.client(2).call(&request, 1).unwrap();
    assert_eq!(answer.results[0].error_code, 0, "{answer:?}");
    cluster.agreed_leaders("t", 5);
    let twice: CreateTopicsResponse = {
        let topic = CreatableTopic {
            name: "t".into(),
            num_partitions: 1,
            replication_factor: 1,
            ..Default::default()
        };
        cluster.client(2).call(&CreateTopicsRequest { topics: vec![topic], ..Default::default() }, 5).unwrap()
    };
    assert_eq!(twice.topics[0].error_code, ErrorCode::TopicAlreadyExists as i16);
    let delete = DeleteTopicsRequest { topic_names: vec!["t".into()], ..Default::default() };
    for round in 0..5 {
        // At once through the other broker, which may not have applied the change yet.
        let (one, two) = if round % 2 == 0 { (1, 2) } else { (2, 1) };
        let gone: DeleteTopicsResponse = cluster.client(one).call(&delete, 4).unwrap();
        assert_eq!(gone.responses[0].error_code, 0, "{gone:?}");
        cluster.client(two).create_topic("t", 3);
    }
    let leaders = cluster.agreed_leaders("t", 3);
    for (index, leader) in (0..).zip(leaders) {
        let answer = produce(&mut cluster.client(leader), "t", index, plain("v"), None);
        assert_eq!((answer.error_code, answer.base_offset), (0, 0), "the new topic is empty");
    }
}

#[test]
fn settings_changed_through_one_broker_apply_to_all() {
    let cluster = Cluster::start(2);
    let leaders = cluster.topic(1, "t", 2);
    let (other, index) = if leaders[0] == 2 { (1, 0) } else { (1, 1) };
    let config = incremental_alter_configs::AlterableConfig {
        name: "max.message.bytes".into(),
        config_operation: 0,
        value: Some("10".into()),
    };
    let resource = incremental_alter_configs::AlterConfigsResource {
        resource_type: 2,
        resource_name: "t".into(),
        configs: vec![config],
    };
    let request = IncrementalAlterConfigsRequest { resources: vec![resource], ..Default::default() };
    let answer: IncrementalAlterConfigsResponse = cluster.client(other).call(&request, 1).unwrap();
    assert_eq!(answer.responses[0].error_code, 0, "{answer:?}");
    until("the leader rejects a batch above the new limit", || {
        let answer = produce(&mut cluster.client(2), "t", index, plain("v"), None);
        answer.error_code == ErrorCode::MessageTooLarge as i16
    });
}

#[test]
fn group_coordinator_is_the_leader_of_the_offsets_partition() {
    let cluster = Cluster::start(3);
    cluster.topic(1, "t", 1);
    let mut coordinators = std::collections::HashSet::new();
    for number in 0..12 {
        let group = format!("group-{number}");
        let coordinator_id = cluster.coordinator(0, &group);
        coordinators.insert(coordinator_id);
        let partition = OffsetCommitRequestPartition { committed_offset: number, ..Default::default() };
        let topic =
            OffsetCommitRequestTopic { name: "t".into(), partitions: vec![partition], ..Default::default() };
        let commit = OffsetCommitRequest {
            group_id: group.as_str().into(),
            generation_id_or_member_epoch: -1,
            topics: vec![topic],
            ..Default::default()
        };
        let code = |id| {
            let answer: OffsetCommitResponse = cluster.client(id).call(&commit, 7).unwrap();
            answer.topics[0].partitions[0].error_code
        };
        assert_eq!(code(coordinator_id), 0);
        assert_eq!(code(coordinator_id % 3 + 1), ErrorCode::NotCoordinator as i16);
        let fetch =
            OffsetFetchRequest { group_id: group.as_str().into(), topics: None, ..Default::default() };
        let committed = |id| -> OffsetFetchResponse { cluster.client(id).call(&fetch, 7).unwrap() };
        assert_eq!(committed(coordinator_id).topics[0].partitions[0].committed_offset, number);
        assert_eq!(committed(coordinator_id % 3 + 1).error_code, ErrorCode::NotCoordinator as i16);
        let beat = HeartbeatRequest { group_id: group.as_str().into(), ..Default::default() };
        let beat: HeartbeatResponse = cluster.client(coordinator_id % 3 + 1).call(&beat, 4).unwrap();
        assert_eq!(beat.error_code, ErrorCode::NotCoordinator as i16);
    }
    assert!(coordinators.len() > 1, "the groups are spread: {coordinators:?}");
}

#[test]
fn producer_ids_are_unique_in_the_cluster() {
    let cluster = Cluster::start(2);
    let mut seen = std::collections::HashSet::new();
    for id in [1, 2, 1, 2] {
        let request = InitProducerIdRequest { producer_id: -1, producer_epoch: -1, ..Default::default() };
        let answer: InitProducerIdResponse = cluster.client(id).call(&request, 4).unwrap();
        assert_eq!(answer.error_code, 0);
        assert!(seen.insert(answer.producer_id));
    }
}

/// A transactional producer that behaves like a client.
pub(crate) struct Producer<'a> {
    cluster: &'a Cluster,
    pub(crate) id: String,
    pub(crate) coordinator_id: i32,
    pub(crate) producer: (i64, i16),
}

impl<'a> Producer<'a> {
    pub(crate) fn new(cluster: &'a Cluster, id: String) -> Self {
        let coordinator_id = cluster.coordinator(1, &id);
        let request = InitProducerIdRequest {
            transactional_id: Some(id.as_str().into()),
            transaction_timeout_ms: 60_000,
            producer_id: -1,
            producer_epoch: -1,
        };
        let answer: InitProducerIdResponse = cluster.client(coordinator_id).call(&request, 4).unwrap();
        assert_eq!(answer.error_code, 0, "{answer:?}");
        Self { cluster, id, coordinator_id, producer: (answer.producer_id, answer.producer_epoch) }
    }

    pub(crate) fn add(&self, topic: &str, partitions: Vec<i32>) {
        let topic = AddPartitionsToTxnTopic { name: topic.into(), partitions };
        let request = AddPartitionsToTxnRequest {
            v3_and_below_transactional_id: self.id.as_str().into(),
            v3_and_below_producer_id: self.producer.0,
            v3_and_below_producer_epoch: self.producer.1,
            v3_and_below_topics: vec![topic],
            ..Default::default()
        };
        let answer: AddPartitionsToTxnResponse =
            self.cluster.client(self.coordinator_id).call(&request, 3).unwrap();
        let results = answer.results_by_topic_v3_and_below.iter().flat_map(|t| &t.results_by_partition);
        results.for_each(|r| assert_eq!(r.partition_error_code, 0));
    }

    pub(crate) fn end(&self, committed: bool) -> i16 {
        let request = EndTxnRequest {
            transactional_id: self.id.as_str().into(),
            producer_id: self.producer.0,
            producer_epoch: self.producer.1,
            committed,
        };
        let answer: EndTxnResponse = self.cluster.client(self.coordinator_id).call(&request, 3).unwrap();
        answer.error_code
    }
}

#[test]
fn transactions_span_brokers() {
    let cluster = Cluster::start(3);
    let leaders = cluster.topic(1, "t", 3);
    let mut coordinators = std::collections::HashSet::new();
    for number in 0..6 {
        let producer = Producer::new(&cluster, format!("txn-{number}"));
        coordinators.insert(producer.coordinator_id);
        // A partition that was not added is rejected, wherever the coordinator is.
        let early = transactional(producer.producer, 0, "early");
        for (index, leader) in (0..).zip(&leaders) {
            let refused =
                produce(&mut cluster.client(*leader), "t", index, early.clone(), Some(&producer.id));
            assert_ne!(
                refused.error_code, 0,
                "partition {index} accepts a record outside of the transaction"
            );
        }
        producer.add("t", vec![0, 1, 2]);
        let before: Vec<i64> =
            (0..).zip(&leaders).map(|(p, l)| fetch(&mut cluster.client(*l), "t", p).high_watermark).collect();
        for (index, leader) in (0..).zip(&leaders) {
            let batch = transactional(producer.producer, 0, "v");
            let answer = produce(&mut cluster.client(*leader), "t", index, batch, Some(&producer.id));
            assert_eq!(answer.error_code, 0, "{answer:?}");
            assert_eq!(
                fetch(&mut cluster.client(*leader), "t", index).last_stable_offset,
                before[index as usize]
            );
        }
        assert_eq!(producer.end(number % 2 == 0), 0);
        for (index, leader) in (0..).zip(&leaders) {
            // The record and its marker.
            let end = before[index as usize] + 2;
            until("the marker is written", || {
                fetch(&mut cluster.client(*leader), "t", index).last_stable_offset == end
            });
        }
    }
    assert!(coordinators.len() > 1, "coordinators are spread: {coordinators:?}");
}

#[test]
fn transactional_offsets_become_visible_at_commit_on_any_coordinator() {
    let cluster = Cluster::start(3);
    cluster.topic(1, "t", 1);
    let mut apart = 0;
    for number in 0..8 {
        let producer = Producer::new(&cluster, format!("txn-{number}"));
        let group = format!("group-{}", 7 * number);
        let coordinator_id = cluster.coordinator(0, &group);
        apart += i32::from(coordinator_id != producer.coordinator_id);
        let add = AddOffsetsToTxnRequest {
            transactional_id: producer.id.as_str().into(),
            producer_id: producer.producer.0,
            producer_epoch: producer.producer.1,
            group_id: group.as_str().into(),
        };
        let partition = TxnOffsetCommitRequestPartition { committed_offset: 42, ..Default::default() };
        let commit = TxnOffsetCommitRequest {
            transactional_id: producer.id.as_str().into(),
            group_id: group.as_str().into(),
            producer_id: producer.producer.0,
            producer_epoch: producer.producer.1,
            topics: vec![TxnOffsetCommitRequestTopic { name: "t".into(), partitions: vec![partition] }],
            ..Default::default()
        };
        let send = || {
            let answer: TxnOffsetCommitResponse = cluster.client(coordinator_id).call(&commit, 3).unwrap();
            answer.topics[0].partitions[0].error_code
        };
        assert_ne!(send(), 0, "the transaction does not include the group yet");
        let added: AddOffsetsToTxnResponse = cluster.client(producer.coordinator_id).call(&add, 3).unwrap();
        assert_eq!(added.error_code, 0);
        assert_eq!(send(), 0);
        let fetch =
            OffsetFetchRequest { group_id: group.as_str().into(), topics: None, ..Default::default() };
        let committed = || {
            let answer: OffsetFetchResponse = cluster.client(coordinator_id).call(&fetch, 7).unwrap();
            answer.topics.first().map_or(-1, |t| t.partitions[0].committed_offset)
        };
        assert_eq!(committed(), -1);
        assert_eq!(producer.end(true), 0);
        until("the offsets are visible", || committed() == 42);
    }
    assert!(apart > 0, "no group had another coordinator than the transaction");
}

#[test]
fn offline_broker_leads_nothing_and_returns_with_its_data() {
    let mut cluster = Cluster::start(3);
    let leaders = cluster.topic(1, "t", 3);
    let of_two = leaders.iter().position(|l| *l == 2).unwrap() as i32;
    let group = (0..).map(|n| format!("group-{n}")).find(|g| cluster.coordinator(0, g) == 2).unwrap();
    assert_eq!(produce(&mut cluster.client(2), "t", of_two, plain("v"), None).error_code, 0);
    let epoch = |cluster: &Cluster, id| {
        let shown = cluster.metadata(id, &["t"]);
        let partition = shown.topics[0].partitions[of_two as usize].clone();
        (partition.leader_id, partition.leader_epoch, partition.offline_replicas)
    };
    assert_eq!(epoch(&cluster, 1), (2, 0, vec![]));
    let folder = cluster.stop(2, false);
    until("the others know that it is offline", || epoch(&cluster, 1).0 == -1);
    assert_eq!(epoch(&cluster, 3).2, [2]);
    // The internal topic of the groups is replicated.
    until("another broker coordinates the group", || {
        matches!(cluster.coordinator_id(1, 0, &group), Some(1 | 3))
    });
    cluster.start_again(2, folder);
    // An unclean stop: its next records have a new leader epoch, which every broker reports.
    until("every broker knows the new leader epoch", || {
        (1..=3).all(|id| epoch(&cluster, id) == (2, 1, vec![]))
    });
    assert_eq!(fetch(&mut cluster.client(2), "t", of_two).high_watermark, 1);
    let answer = produce(&mut cluster.client(2), "t", of_two, plain("w"), None);
    assert_eq!((answer.error_code, answer.base_offset), (0, 1));
}

#[test]
fn partitions_that_nobody_placed_get_a_place() {
    let cluster = Cluster::start(2);
    let record =
        r#"{"id":"00000000000000010000000000000007","partitions":4,"replication_factor":1,"configs":{}}"#;
    let swap = cluster.repository.compare_and_swap(
        "/moim/topics/half-made",
        Expect::Absent,
        Some(Bytes::from(record)),
        None,
    );
    block_on(swap).unwrap();
    let leaders = cluster.agreed_leaders("half-made", 4);
    assert_eq!(leaders.iter().filter(|l| **l == 1).count(), 2, "{leaders:?}");
    for (index, leader) in (0..).zip(leaders) {
        assert_eq!(produce(&mut cluster.client(leader), "half-made", index, plain("v"), None).error_code, 0);
    }
}

#[test]
fn large_topic_is_created_and_deleted_in_several_transactions() {
    let cluster = Cluster::start(2);
    let leaders = cluster.topic(1, "large", 300);
    assert_eq!(leaders.iter().filter(|l| **l == 1).count(), 150);
    let delete = DeleteTopicsRequest { topic_names: vec!["large".into()], ..Default::default() };
    let gone: DeleteTopicsResponse = cluster.client(2).call(&delete, 4).unwrap();
    assert_eq!(gone.responses[0].error_code, 0);
    let (_, left) = block_on(cluster.repository.list("/moim/partitions/")).unwrap();
    assert!(left.is_empty(), "{} records are left", left.len());
    until("the other broker applies the deletion", || {
        cluster.metadata(1, &["large"]).topics[0].error_code != 0
    });
}

#[test]
fn concurrent_partition_creation_keeps_every_partition() {
    let cluster = Cluster::start(2);
    for round in 0..4 {
        let name = format!("growing-{round}");
        cluster.topic(1, &name, 1);
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for (through, count) in [(1, 300), (2, 350)] {
                let (cluster, name, together) = (&cluster, name.as_str(), &together);
                scope.spawn(move || {
                    let topics =
                        vec![CreatePartitionsTopic { name: name.into(), count, ..Default::default() }];
                    let request =
                        CreatePartitionsRequest { topics, timeout_ms: 30_000, ..Default::default() };
                    let mut client = cluster.client(through);
                    together.wait();
                    let answer: CreatePartitionsResponse = client.call(&request, 3).unwrap();
                    if count == 350 {
                        assert_eq!(answer.results[0].error_code, 0, "{:?}", answer.results[0]);
                    }
                });
            }
        });
        let (_, places) = block_on(cluster.repository.list("/moim/partitions/")).unwrap();
        assert_eq!(places.len(), 350 * (round + 1), "each partition has one record");
        cluster.agreed_leaders(&name, 350);
    }
}

#[test]
fn partition_with_transient_open_failure_is_served_later() {
    let cluster = Cluster::start(1);
    let folder = cluster.brokers[0].as_ref().unwrap().folder().join("queue");
    std::fs::create_dir_all(&folder).unwrap();
    let in_the_way = folder.join("late");
    std::fs::write(&in_the_way, "").unwrap();
    let topics = vec![CreatableTopic {
        name: "late".into(),
        num_partitions: 1,
        replication_factor: 1,
        ..Default::default()
    }];
    let request = CreateTopicsRequest { topics, timeout_ms: 10_000, ..Default::default() };
    let answer: CreateTopicsResponse = cluster.client(1).call(&request, 5).unwrap();
    assert_eq!(answer.topics[0].error_code, ErrorCode::KafkaStorageError as i16);
    // Later changes are not blocked.
    cluster.topic(1, "other", 1);
    std::fs::remove_file(&in_the_way).unwrap();
    let mut client = cluster.client(1);
    until("it is served", || produce(&mut client, "late", 0, plain("v"), None).error_code == 0);
    assert_eq!(produce(&mut client, "other", 0, plain("v"), None).error_code, 0);
}
