//! Replicated partitions: acknowledged records survive their leader, and clients continue.

use bytes::Bytes;

use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::*;
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{ErrorCode, Records};

use crate::nodes::{Cluster, fetch, plain, produce, transactional};
use crate::support::{Client, until};

const TIMED_OUT: i16 = ErrorCode::RequestTimedOut as i16;

impl Cluster {
    /// Creates a topic of one partition on all brokers; returns its leader.
    fn replicated(&self, name: &str) -> i32 {
        self.client(1).create_replicated(name, 1, 3);
        let leader = self.agreed_leaders(name, 1)[0];
        self.wait_in_sync(name, 3);
        leader
    }

    /// Waits until partition 0 has this many in-sync replicas, as every broker reports.
    fn wait_in_sync(&self, name: &str, count: usize) {
        until("the replicas are in sync", || {
            let reported = |id: &i32| self.metadata(*id, &[name]).topics[0].partitions[0].isr_nodes.len();
            self.running().iter().all(|id| reported(id) == count)
        });
    }

    /// Waits until a broker other than `not` leads partition 0, and returns it.
    fn next_leader(&self, name: &str, not: i32) -> i32 {
        let mut leader = -1;
        until("another broker leads", || {
            let reported: Vec<i32> = self.running().iter().map(|id| self.leaders(*id, name)[0]).collect();
            leader = reported[0];
            leader != -1 && leader != not && reported.iter().all(|other| *other == leader)
        });
        leader
    }

    /// Produces until a leader accepts the batch, as clients do.
    fn produce_somewhere(&self, name: &str, batch: &Bytes, txn: Option<&str>) -> PartitionProduceResponse {
        let mut answer = PartitionProduceResponse::default();
        until("a leader accepts a batch", || {
            let leader = self.leaders(self.running()[0], name)[0];
            if leader == -1 || !self.running().contains(&leader) {
                return false;
            }
            answer = produce(&mut self.client(leader), name, 0, batch.clone(), txn);
            answer.error_code == 0
        });
        answer
    }
}

fn idempotent(producer: (i64, i16), sequence: i32, value: &str) -> Bytes {
    let mut batch = BatchBuilder::new(Compression::None).producer(producer.0, producer.1, sequence);
    batch.push(1_700_000_000_000, Some(b"k"), Some(value.as_bytes()), &[]);
    batch.build()
}

fn with_acks(client: &mut Client, topic: &str, acks: i16, timeout_ms: i32) -> i16 {
    let data = PartitionProduceData { index: 0, records: Some(Records::Bytes(plain("v"))) };
    let topic_data =
        vec![TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() }];
    let request = ProduceRequest { acks, timeout_ms, topic_data, ..Default::default() };
    let response: ProduceResponse = client.call(&request, 10).unwrap();
    response.responses[0].partition_responses[0].error_code
}

#[test]
fn acknowledged_records_survive_successive_leader_failures() {
    let mut cluster = Cluster::start(3);
    let mut leader = cluster.replicated("t");
    let producer = (4_000, 0);
    let mut sent = 0;
    for _ in 0..3 {
        for _ in 0..20 {
            let answer = cluster.produce_somewhere("t", &idempotent(producer, sent, "v"), None);
            assert_eq!(answer.base_offset, i64::from(sent), "in order, once each");
            sent += 1;
        }
        let folder = cluster.stop(leader, false);
        // A client without a response resends its last batch: the new leader detects the duplicate.
        let again = cluster.produce_somewhere("t", &idempotent(producer, sent - 1, "v"), None);
        assert_eq!(again.base_offset, i64::from(sent - 1), "the new leader detects the duplicate");
        let dead = leader;
        leader = cluster.next_leader("t", dead);
        assert_eq!(fetch(&mut cluster.client(leader), "t", 0).high_watermark, i64::from(sent));
        cluster.start_again(dead, folder);
        cluster.wait_in_sync("t", 3);
    }
}

#[test]
fn acks_all_fails_below_min_insync_replicas() {
    let mut cluster = Cluster::start(3);
    let leader = cluster.replicated("t");
    let others: Vec<i32> = (1..=3).filter(|id| *id != leader).collect();
    let mut client = cluster.client(leader);
    assert_eq!(with_acks(&mut client, "t", -1, 10_000), 0);
    let folder = cluster.stop(others[0], false);
    until("two replicas are enough", || with_acks(&mut client, "t", -1, 10_000) == 0);
    cluster.stop(others[1], false);
    let refused = ErrorCode::NotEnoughReplicas as i16;
    until("one replica is not enough", || match with_acks(&mut client, "t", -1, 500) {
        code if code == refused => true,
        // Until the in-sync set has shrunk.
        code => {
            assert!([TIMED_OUT, ErrorCode::NotEnoughReplicasAfterAppend as i16].contains(&code), "{code}");
            false
        }
    });
    assert_eq!(with_acks(&mut client, "t", 1, 10_000), 0, "acks=1 succeeds");
    let end = fetch(&mut client, "t", 0).high_watermark;
    assert_eq!(with_acks(&mut client, "t", 1, 10_000), 0);
    assert_eq!(fetch(&mut client, "t", 0).high_watermark, end, "one replica alone commits nothing");
    cluster.start_again(others[0], folder);
    until("acks=all succeeds again", || with_acks(&mut client, "t", -1, 10_000) == 0);
}

#[test]
fn transaction_ends_across_coordinator_and_leader_failover() {
    for number in 0..2 {
        let mut cluster = Cluster::start(3);
        let leader = cluster.replicated("t");
        let id = format!("txn-{number}");
        let (coordinator_id, producer) = {
            let producer = crate::nodes::Producer::new(&cluster, id.clone());
            producer.add("t", vec![0]);
            (producer.coordinator_id, producer.producer)
        };
        let answer = cluster.produce_somewhere("t", &transactional(producer, 0, "v"), Some(&id));
        assert_eq!(answer.base_offset, 0);
        // First the leader, then the coordinator; they may be the same broker.
        let victim = if number == 0 { leader } else { coordinator_id };
        let folder = cluster.stop(victim, false);
        let end = EndTxnRequest {
            transactional_id: id.as_str().into(),
            producer_id: producer.0,
            producer_epoch: producer.1,
            committed: true,
        };
        until("the transaction is ended", || {
            let Some(coordinator_id) = cluster.coordinator_id(cluster.running()[0], 1, &id) else {
                return false;
            };
            if !cluster.running().contains(&coordinator_id) {
                return false;
            }
            let answer: EndTxnResponse = cluster.client(coordinator_id).call(&end, 3).unwrap();
            let code = ErrorCode::try_from(answer.error_code).unwrap();
            let again = [
                ErrorCode::None,
                ErrorCode::NotCoordinator,
                ErrorCode::CoordinatorNotAvailable,
                ErrorCode::CoordinatorLoadInProgress,
                ErrorCode::ConcurrentTransactions,
            ];
            assert!(again.contains(&code), "{code:?}");
            code == ErrorCode::None
        });
        let leader = if victim == leader { cluster.next_leader("t", victim) } else { leader };
        until("its record is readable", || {
            fetch(&mut cluster.client(leader), "t", 0).last_stable_offset >= 2
        });
        let read = fetch(&mut cluster.client(leader), "t", 0);
        assert_eq!(read.aborted_transactions.as_deref().unwrap_or_default(), [], "committed, not aborted");
        cluster.start_again(victim, folder);
        cluster.wait_in_sync("t", 3);
    }
}

#[test]
fn committed_offsets_survive_coordinator_failover() {
    let mut cluster = Cluster::start(3);
    cluster.replicated("t");
    let coordinator_id = cluster.coordinator(0, "g");
    let partition = OffsetCommitRequestPartition { committed_offset: 42, ..Default::default() };
    let topic =
        OffsetCommitRequestTopic { name: "t".into(), partitions: vec![partition], ..Default::default() };
    let commit = OffsetCommitRequest {
        group_id: "g".into(),
        generation_id_or_member_epoch: -1,
        topics: vec![topic],
        ..Default::default()
    };
    let answer: OffsetCommitResponse = cluster.client(coordinator_id).call(&commit, 7).unwrap();
    assert_eq!(answer.topics[0].partitions[0].error_code, 0);
    cluster.stop(coordinator_id, false);
    let ask = OffsetFetchRequest { group_id: "g".into(), topics: None, ..Default::default() };
    until("the next coordinator has the offsets", || {
        let Some(next) =
            cluster.coordinator_id(cluster.running()[0], 0, "g").filter(|next| *next != coordinator_id)
        else {
            return false;
        };
        let answer: OffsetFetchResponse = cluster.client(next).call(&ask, 7).unwrap();
        let wait = [ErrorCode::NotCoordinator as i16, ErrorCode::CoordinatorLoadInProgress as i16];
        assert!(answer.error_code == 0 || wait.contains(&answer.error_code), "{answer:?}");
        answer.error_code == 0 && answer.topics[0].partitions[0].committed_offset == 42
    });
}

#[test]
fn consumer_with_rack_reads_from_the_preferred_read_replica() {
    let cluster = Cluster::start(3);
    let leader = cluster.replicated("t");
    let other = leader % 3 + 1;
    assert_eq!(cluster.produce_somewhere("t", &plain("v"), None).base_offset, 0);
    let read = |from: i32, rack: &str, offset: i64| fetch_in_rack(&cluster, from, rack, offset);
    let rack = format!("zone-{other}");
    until("the leader returns the preferred read replica", || {
        read(leader, &rack, 0).preferred_read_replica == other
    });
    assert_eq!(read(leader, &format!("zone-{leader}"), 0).preferred_read_replica, -1);
    until("the follower's high watermark has advanced", || read(other, &rack, 0).high_watermark == 1);
    let served = read(other, &rack, 0);
    assert!(served.error_code == 0 && served.records.is_some_and(|r| !r.is_empty()));
    assert_eq!(read(other, &rack, 9).error_code, ErrorCode::OffsetNotAvailable as i16);
    let misled = read(other, "", 0);
    assert_eq!(
        misled.error_code,
        ErrorCode::NotLeaderOrFollower as i16,
        "a client without a rack is sent to the leader"
    );
    assert_eq!(misled.current_leader.leader_id, leader);
}

#[test]
fn reassignment_removes_the_old_replica() {
    let cluster = Cluster::start(3);
    let from = cluster.topic(1, "t", 1)[0];
    for sent in 0..10 {
        assert_eq!(cluster.produce_somewhere("t", &plain("v"), None).base_offset, sent);
    }
    let to = from % 3 + 1;
    let call = |replicas: Option<Vec<i32>>| {
        let partition = ReassignablePartition { partition_index: 0, replicas };
        let topic = ReassignableTopic { name: "t".into(), partitions: vec![partition] };
        let request = AlterPartitionReassignmentsRequest { topics: vec![topic], ..Default::default() };
        let answer: AlterPartitionReassignmentsResponse = cluster.client(1).call(&request, 0).unwrap();
        answer.responses[0].partitions[0].error_code
    };
    assert_eq!(call(None), ErrorCode::NoReassignmentInProgress as i16);
    assert_eq!(call(Some(vec![9])), ErrorCode::InvalidReplicaAssignment as i16);
    assert_eq!(call(Some(vec![to])), 0);
    until("the reassignment is complete", || {
        let shown = cluster.metadata(1, &["t"]);
        let partition = &shown.topics[0].partitions[0];
        partition.replica_nodes == [to] && partition.leader_id == to
    });
    let list: ListPartitionReassignmentsResponse =
        cluster.client(1).call(&ListPartitionReassignmentsRequest::default(), 0).unwrap();
    assert!(list.topics.is_empty(), "{list:?}");
    assert_eq!(cluster.produce_somewhere("t", &plain("v"), None).base_offset, 10);
    until("the former replica is removed", || {
        let request = DescribeLogDirsRequest { topics: None };
        let answer: DescribeLogDirsResponse = cluster.client(from).call(&request, 2).unwrap();
        answer.results[0].topics.iter().all(|topic| &*topic.name != "t" || topic.partitions.is_empty())
    });
}

#[test]
fn preferred_election_returns_leadership() {
    let mut cluster = Cluster::start(3);
    let leader = cluster.replicated("t");
    let elect = |cluster: &Cluster, topic: &str| {
        let wanted = elect_leaders::TopicPartitions { topic: topic.into(), partitions: vec![0] };
        let request = ElectLeadersRequest { topic_partitions: Some(vec![wanted]), ..Default::default() };
        let through = cluster.running()[0];
        let answer: ElectLeadersResponse = cluster.client(through).call(&request, 2).unwrap();
        answer.replica_election_results[0].partition_result[0].error_code
    };
    assert_eq!(elect(&cluster, "t"), ErrorCode::ElectionNotNeeded as i16);
    assert_eq!(elect(&cluster, "nowhere"), ErrorCode::UnknownTopicOrPartition as i16);
    let folder = cluster.stop(leader, false);
    cluster.next_leader("t", leader);
    assert_eq!(elect(&cluster, "t"), ErrorCode::PreferredLeaderNotAvailable as i16);
    cluster.start_again(leader, folder);
    cluster.wait_in_sync("t", 3);
    until("it leads again", || {
        let code = elect(&cluster, "t");
        assert!([0, ErrorCode::ElectionNotNeeded as i16].contains(&code), "{code}");
        cluster.leaders(1, "t")[0] == leader
    });
}

#[test]
fn delete_records_moves_log_start_on_every_replica() {
    let mut cluster = Cluster::start(3);
    let leader = cluster.replicated("t");
    for _ in 0..10 {
        cluster.produce_somewhere("t", &plain("v"), None);
    }
    let partition = delete_records::DeleteRecordsPartition { partition_index: 0, offset: 6 };
    let topic = delete_records::DeleteRecordsTopic { name: "t".into(), partitions: vec![partition] };
    let request = DeleteRecordsRequest { topics: vec![topic], timeout_ms: 10_000 };
    let answer: DeleteRecordsResponse = cluster.client(leader).call(&request, 2).unwrap();
    assert_eq!(answer.topics[0].partitions[0].low_watermark, 6);
    for id in 1..=3 {
        until("every replica has the new log start", || fetch_near(&cluster, id, 6).log_start_offset == 6);
        assert_eq!(fetch_near(&cluster, id, 0).error_code, ErrorCode::OffsetOutOfRange as i16);
    }
    cluster.stop(leader, false);
    let next = cluster.next_leader("t", leader);
    assert_eq!(fetch_near(&cluster, next, 0).error_code, ErrorCode::OffsetOutOfRange as i16);
}

#[test]
fn partition_with_log_start_inside_a_batch_is_reassigned() {
    let cluster = Cluster::start(3);
    let from = cluster.topic(1, "t", 1)[0];
    let mut batch = BatchBuilder::new(Compression::None);
    for record in 0..10i64 {
        batch.push(1_700_000_000_000 + record, Some(b"k"), Some(b"v"), &[]);
    }
    let batch = batch.build();
    for base in [0, 10] {
        assert_eq!(cluster.produce_somewhere("t", &batch, None).base_offset, base);
    }
    let partition = delete_records::DeleteRecordsPartition { partition_index: 0, offset: 13 };
    let topic = delete_records::DeleteRecordsTopic { name: "t".into(), partitions: vec![partition] };
    let request = DeleteRecordsRequest { topics: vec![topic], timeout_ms: 10_000 };
    let answer: DeleteRecordsResponse = cluster.client(from).call(&request, 2).unwrap();
    assert_eq!(answer.topics[0].partitions[0].low_watermark, 13);
    let to = from % 3 + 1;
    let partition = ReassignablePartition { partition_index: 0, replicas: Some(vec![to]) };
    let topic = ReassignableTopic { name: "t".into(), partitions: vec![partition] };
    let request = AlterPartitionReassignmentsRequest { topics: vec![topic], ..Default::default() };
    let answer: AlterPartitionReassignmentsResponse = cluster.client(1).call(&request, 0).unwrap();
    assert_eq!(answer.responses[0].partitions[0].error_code, 0);
    until("the reassignment is complete", || {
        let shown = cluster.metadata(1, &["t"]);
        let partition = &shown.topics[0].partitions[0];
        partition.replica_nodes == [to] && partition.leader_id == to
    });
    assert_eq!(cluster.produce_somewhere("t", &batch, None).base_offset, 20);
    let left = fetch_near(&cluster, to, 13);
    assert_eq!((left.error_code, left.log_start_offset, left.high_watermark), (0, 13, 30));
    assert_eq!(fetch_near(&cluster, to, 12).error_code, ErrorCode::OffsetOutOfRange as i16);
}

#[test]
fn topic_may_place_replicas_on_an_offline_broker() {
    let mut cluster = Cluster::start(3);
    let folder = cluster.stop(3, true);
    until("the others know that it is offline", || cluster.metadata(1, &[]).brokers.len() == 2);
    cluster.client(1).create_replicated("three", 2, 3);
    for partition in &cluster.metadata(1, &["three"]).topics[0].partitions {
        let mut replicas = partition.replica_nodes.clone();
        replicas.sort_unstable();
        assert_eq!(replicas, [1, 2, 3]);
        assert_ne!(partition.leader_id, 3, "an offline broker does not lead");
    }
    assert_eq!(cluster.produce_somewhere("three", &plain("v"), None).base_offset, 0);
    let topic = create_topics::CreatableTopic {
        name: "four".into(),
        num_partitions: 1,
        replication_factor: 4,
        ..Default::default()
    };
    let request = CreateTopicsRequest { topics: vec![topic], ..Default::default() };
    let answer: CreateTopicsResponse = cluster.client(1).call(&request, 5).unwrap();
    assert_eq!(answer.topics[0].error_code, ErrorCode::InvalidReplicationFactor as i16);
    cluster.start_again(3, folder);
    cluster.wait_in_sync("three", 3);
}

/// A fetch by a client in the broker's rack.
fn fetch_near(cluster: &Cluster, broker: i32, offset: i64) -> PartitionData {
    fetch_in_rack(cluster, broker, &format!("zone-{broker}"), offset)
}

fn fetch_in_rack(cluster: &Cluster, from: i32, rack: &str, fetch_offset: i64) -> PartitionData {
    let wanted = FetchPartition { fetch_offset, partition_max_bytes: 1 << 20, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![wanted], ..Default::default() };
    let request = FetchRequest {
        max_bytes: 1 << 20,
        session_epoch: -1,
        rack_id: rack.into(),
        topics: vec![topic],
        ..Default::default()
    };
    let response: FetchResponse = cluster.client(from).call(&request, 12).unwrap();
    response.responses[0].partitions[0].clone()
}

#[test]
fn default_replication_factor_is_three() {
    let cluster = Cluster::start(3);
    let create = |name: &str, factor: i16| {
        let topic = CreatableTopic {
            name: name.into(),
            num_partitions: -1,
            replication_factor: factor,
            ..Default::default()
        };
        let request = CreateTopicsRequest { topics: vec![topic], ..Default::default() };
        let answer: CreateTopicsResponse = cluster.client(2).call(&request, 5).unwrap();
        (answer.topics[0].error_code, answer.topics[0].replication_factor)
    };
    assert_eq!(create("four", 4).0, ErrorCode::InvalidReplicationFactor as i16);
    assert_eq!(create("t", -1), (0, 3));
    cluster.agreed_leaders("t", 1);
    let request = DescribeTopicPartitionsRequest {
        topics: vec![describe_topic_partitions::TopicRequest { name: "t".into() }],
        response_partition_limit: 10,
        ..Default::default()
    };
    let shown: DescribeTopicPartitionsResponse = cluster.client(3).call(&request, 0).unwrap();
    let partition = &shown.topics[0].partitions[0];
    assert_eq!((partition.replica_nodes.len(), partition.isr_nodes.len()), (3, 3));
    let resource = describe_configs::DescribeConfigsResource {
        resource_type: 2,
        resource_name: "t".into(),
        configuration_keys: Some(vec!["min.insync.replicas".into()]),
    };
    let request = DescribeConfigsRequest { resources: vec![resource], ..Default::default() };
    let answer: DescribeConfigsResponse = cluster.client(1).call(&request, 2).unwrap();
    assert_eq!(answer.results[0].configs[0].value.as_deref(), Some("2"));
}

#[test]
fn reordered_batches_after_leader_change_are_retriable() {
    let mut cluster = Cluster::start(3);
    let first = cluster.replicated("t");
    let known = (4_000, 0);
    assert_eq!(cluster.produce_somewhere("t", &idempotent(known, 0, "0"), None).base_offset, 0);
    let _folder = cluster.stop(first, false);
    let leader = cluster.next_leader("t", first);
    let offer = |producer, sequence: i32| {
        let batch = idempotent(producer, sequence, &sequence.to_string());
        let answer = produce(&mut cluster.client(leader), "t", 0, batch, None);
        (ErrorCode::try_from(answer.error_code).unwrap(), answer.base_offset)
    };
    until("the new leader accepts batches", || offer(known, 1) == (ErrorCode::None, 1));
    let again = (ErrorCode::NotEnoughReplicas, -1);
    // The client resends what the old leader did not acknowledge; of its two threads the wrong one was faster.
    assert_eq!(offer(known, 3), again, "no OUT_OF_ORDER_SEQUENCE_NUMBER");
    assert_eq!(offer(known, 2), (ErrorCode::None, 2));
    assert_eq!(offer(known, 3), (ErrorCode::None, 3));
    let new = (4_001, 0);
    assert_eq!(offer(new, 1), again, "not accepted as the first batch");
    assert_eq!(offer(new, 0), (ErrorCode::None, 4));
    assert_eq!(offer(new, 1), (ErrorCode::None, 5));
    // A producer that keeps retrying has no earlier batch to send.
    let forgotten = (4_002, 0);
    until("an expired producer continues", || offer(forgotten, 9) == (ErrorCode::None, 6));
    until("a gap gets OUT_OF_ORDER_SEQUENCE_NUMBER", || {
        offer(new, 9).0 == ErrorCode::OutOfOrderSequenceNumber
    });
}

#[test]
fn every_replica_describes_its_producers() {
    let cluster = Cluster::start(3);
    cluster.replicated("t");
    let producer = crate::nodes::Producer::new(&cluster, "hangs".into());
    producer.add("t", vec![0]);
    let batch = transactional(producer.producer, 0, "v");
    assert_eq!(cluster.produce_somewhere("t", &batch, Some("hangs")).error_code, 0);
    let topics = vec![describe_producers::TopicRequest { name: "t".into(), partition_indexes: vec![0] }];
    let request = describe_producers::DescribeProducersRequest { topics };
    for id in cluster.running() {
        until("the replica has the transaction", || {
            let answer: describe_producers::DescribeProducersResponse =
                cluster.client(id).call(&request, 0).unwrap();
            let partition = &answer.topics[0].partitions[0];
            assert_eq!(partition.error_code, 0, "broker {id} has a replica");
            let active = &partition.active_producers;
            active.iter().any(|p| p.producer_id == producer.producer.0 && p.current_txn_start_offset == 0)
        });
    }
}

#[test]
fn broker_with_stalled_loop_hands_over_leadership() {
    let cluster = Cluster::start(3);
    let leader = cluster.replicated("t");
    cluster.client(leader).create_replicated("alone", 3, 1);
    let alone = cluster.agreed_leaders("alone", 3);
    let broker = cluster.broker(leader);
    assert_eq!(crate::support::block_on(broker.on_stalled_loop(9_999)), 0);
    assert_eq!(cluster.leaders(leader, "t")[0], leader);
    assert!(crate::support::block_on(broker.on_stalled_loop(10_000)) >= 1);
    let next = cluster.next_leader("t", leader);
    assert_eq!(cluster.produce_somewhere("t", &plain("on"), None).error_code, 0);
    assert_eq!(cluster.agreed_leaders("alone", 3), alone, "no other broker has replicas");
    // The loop recovers, and leadership does not move back by itself: the new leader is the preferred one.
    let replicas = cluster.metadata(next, &["t"]).topics[0].partitions[0].replica_nodes.clone();
    assert_eq!(replicas.first(), Some(&next));
}
