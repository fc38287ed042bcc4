//! Transactions over the wire: version 2 (an epoch per transaction), and markers from admin tools.

use moim_wire_kafka::messages::*;
use moim_wire_kafka::{ErrorCode, Records};

use crate::nodes::{Cluster, Producer, fetch, transactional};
use crate::support::{Client, start, until};

/// Produces as a client of transaction version 2 does: without AddPartitionsToTxn.
fn produce(cluster: &Cluster, producer: &Producer<'_>, (leader, index): (i32, i32), sequence: i32) -> i16 {
    let batch = transactional(producer.producer, sequence, "v");
    let data = PartitionProduceData { index, records: Some(Records::Bytes(batch)) };
    let topic_data =
        vec![TopicProduceData { name: "t".into(), partition_data: vec![data], ..Default::default() }];
    let transactional_id = Some(producer.id.as_str().into());
    let request = ProduceRequest { acks: -1, timeout_ms: 10_000, transactional_id, topic_data };
    let answer: ProduceResponse = cluster.client(leader).call(&request, 12).unwrap();
    answer.responses[0].partition_responses[0].error_code
}

fn end(cluster: &Cluster, producer: &Producer<'_>, committed: bool) -> EndTxnResponse {
    let request = EndTxnRequest {
        transactional_id: producer.id.as_str().into(),
        producer_id: producer.producer.0,
        producer_epoch: producer.producer.1,
        committed,
    };
    cluster.client(producer.coordinator_id).call(&request, 5).unwrap()
}

/// The last stable offset, if no transaction is open.
fn stable(cluster: &Cluster, leader: i32, index: i32) -> Option<i64> {
    let read = fetch(&mut cluster.client(leader), "t", index);
    (read.last_stable_offset == read.high_watermark).then_some(read.last_stable_offset)
}

#[test]
fn version_2_transactions_have_their_own_epoch() {
    let cluster = Cluster::start(3);
    let leaders = cluster.topic(1, "t", 3);
    let (mut apart, mut together) = (0, 0);
    for number in 0..4 {
        let mut producer = Producer::new(&cluster, format!("txn-{number}"));
        let first = producer.producer;
        for (round, committed) in [(0, true), (1, false), (2, true)] {
            for (index, &leader) in (0..).zip(&leaders) {
                let at = (leader, index);
                // The markers of the previous transaction may still be in flight.
                until("the transaction begins", || match produce(&cluster, &producer, at, 0) {
                    0 => true,
                    code => {
                        assert_eq!(code, ErrorCode::NotEnoughReplicas as i16, "which the client retries");
                        false
                    }
                });
                if leader == producer.coordinator_id { together += 1 } else { apart += 1 }
            }
            let answer = end(&cluster, &producer, committed);
            let next = (first.0, first.1 + round + 1);
            assert_eq!((answer.error_code, answer.producer_id, answer.producer_epoch), (0, next.0, next.1));
            until("a retried EndTxn gets the same response", || {
                let again = end(&cluster, &producer, committed);
                assert!([0, ErrorCode::ConcurrentTransactions as i16].contains(&again.error_code));
                (again.error_code, again.producer_epoch) == (0, next.1)
            });
            // A batch sent before the end that arrives after it belongs to no transaction.
            let late = produce(&cluster, &producer, (leaders[0], 0), 1);
            assert_eq!(late, ErrorCode::InvalidProducerEpoch as i16);
            producer.producer = next;
        }
        for (index, &leader) in (0..).zip(&leaders) {
            let ends = (number + 1) * 6;
            until("no transaction is open", || stable(&cluster, leader, index) == Some(ends));
            let read = fetch(&mut cluster.client(leader), "t", index);
            let aborted = read.aborted_transactions.unwrap_or_default();
            assert_eq!(aborted.len() as i64, number + 1, "one of three each");
        }
    }
    assert!(apart > 0 && together > 0, "coordinator and leader were on the same broker, and were not");
}

#[test]
fn version_2_offset_commit_needs_no_add_offsets() {
    let cluster = Cluster::start(3);
    cluster.topic(1, "t", 1);
    for number in 0..3 {
        let mut producer = Producer::new(&cluster, format!("txn-{number}"));
        let group = format!("group-{number}");
        let coordinator_id = cluster.coordinator(0, &group);
        for offset in 1..3 {
            let partition = txn_offset_commit::TxnOffsetCommitRequestPartition {
                partition_index: 0,
                committed_offset: offset,
                ..Default::default()
            };
            let commit = TxnOffsetCommitRequest {
                transactional_id: producer.id.as_str().into(),
                group_id: group.as_str().into(),
                producer_id: producer.producer.0,
                producer_epoch: producer.producer.1,
                generation_id: -1,
                topics: vec![txn_offset_commit::TxnOffsetCommitRequestTopic {
                    name: "t".into(),
                    partitions: vec![partition],
                }],
                ..Default::default()
            };
            let send = || {
                let answer: TxnOffsetCommitResponse =
                    cluster.client(coordinator_id).call(&commit, 5).unwrap();
                answer.topics[0].partitions[0].error_code
            };
            until("the offsets are accepted", || send() == 0);
            let answer = end(&cluster, &producer, true);
            assert_eq!(answer.error_code, 0);
            let next = (answer.producer_id, answer.producer_epoch);
            let topic =
                offset_fetch::OffsetFetchRequestTopic { name: "t".into(), partition_indexes: vec![0] };
            let request = OffsetFetchRequest {
                group_id: group.as_str().into(),
                topics: Some(vec![topic]),
                require_stable: true,
                ..Default::default()
            };
            until("the offset is visible", || {
                let answer: OffsetFetchResponse = cluster.client(coordinator_id).call(&request, 7).unwrap();
                answer.topics[0].partitions[0].committed_offset == offset
            });
            assert_ne!(send(), 0, "the transaction has ended");
            producer.producer = next;
        }
    }
}

#[test]
fn transaction_version_2_is_advertised_as_a_feature() {
    let running = start();
    let name =
        ApiVersionsRequest { client_software_name: "test".into(), client_software_version: "1".into() };
    let ask = |version| -> ApiVersionsResponse { Client::connect(&running).call(&name, version).unwrap() };
    let response = ask(4);
    let supported: Vec<_> =
        response.supported_features.iter().map(|f| (&*f.name, f.min_version, f.max_version)).collect();
    assert_eq!(supported, [("transaction.version", 0, 2)]);
    for response in [response, ask(3)] {
        let finalized: Vec<_> =
            response.finalized_features.iter().map(|f| (&*f.name, f.max_version_level)).collect();
        assert_eq!((response.finalized_features_epoch, finalized), (0, vec![("transaction.version", 2)]));
    }
    assert!(ask(3).supported_features.is_empty(), "its clients do not accept a minimum level of 0");
}
