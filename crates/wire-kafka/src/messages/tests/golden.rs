//! Bytes written by Kafka's own Java client, for the messages every client depends on.
//!
//! `golden.txt` holds one frame per line; each must decode to the message built here, and encode to the same
//! bytes again. A round trip alone would not notice a field that both directions get wrong. For all the others
//! `every_version.txt` holds bytes that Kafka reads and writes alike.

use std::fmt::Debug;

use super::*;
use crate::{
    KString, Records, RequestHeader, Uuid, decode_request, decode_response, encode_request, encode_response,
};

const ORDERS: KString = KString::from_static("orders");
const HOST: KString = KString::from_static("127.0.0.1");
const TOPIC_ID: Uuid = Uuid([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

fn golden(message: &str, version: i16) -> Bytes {
    let start = format!("{message} {version} ");
    let mut lines = include_str!("golden.txt").lines();
    bytes_of(lines.find_map(|line| line.strip_prefix(&start)).unwrap())
}

fn bytes_of(hex: &str) -> Bytes {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn every_message_in_every_version_reads_as_kafka_reads_it() {
    fn expect<M: Message>(all: &mut Vec<String>) {
        all.extend(M::KEY.versions().map(|version| format!("{} {version}", name_of::<M>())));
    }
    let mut missing = Vec::new();
    for_every_message!(expect, &mut missing);
    for line in include_str!("every_version.txt").lines().filter(|line| !line.starts_with('#')) {
        let [message, version, hex] = *line.split(' ').collect::<Vec<_>>() else { panic!("{line}") };
        let (request, api) = match message.strip_suffix("Request") {
            Some(api) => (true, api),
            None => (false, message.strip_suffix("Response").unwrap()),
        };
        let key = *ApiKey::ALL.iter().find(|key| key.name() == api).unwrap();
        let recode = if request { recode_request } else { recode_response };
        let body = if hex == "-" { Bytes::new() } else { bytes_of(hex) };
        assert_eq!(recode(key, version.parse().unwrap(), body.clone()), Ok(body), "{message} {version}");
        missing.retain(|known| *known != format!("{message} {version}"));
    }
    assert_eq!(missing, [""; 0], "no bytes to compare with");
}

fn with_size(frame: &Bytes) -> Vec<u8> {
    [&(frame.len() as i32).to_be_bytes(), &frame[..]].concat()
}

fn check_request<M: Message + PartialEq + Debug>(version: i16, request: M) {
    let frame = golden(name_of::<M>(), version);
    let header = RequestHeader {
        api_key: M::KEY as i16,
        api_version: version,
        correlation_id: 7,
        client_id: Some("cli".into()),
    };
    assert_eq!(encode_request(&header, &request).unwrap(), with_size(&frame), "{} {version}", name_of::<M>());
    assert_eq!(decode_request(frame), Ok((header, request)));
}

fn check_response<M: Message + PartialEq + Debug>(version: i16, response: M) {
    let frame = golden(name_of::<M>(), version);
    let (written, gaps) = encode_response(BytesMut::new(), 7, version, &response).unwrap();
    assert_eq!(written, with_size(&frame), "{} {version}", name_of::<M>());
    assert_eq!(gaps, []);
    let (header, read) = decode_response::<M>(frame, version).unwrap();
    assert_eq!((header.correlation_id, read), (7, response));
}

fn records() -> Option<Records> {
    Some(Records::Bytes(Bytes::from_static(&[0xde, 0xad, 0xbe, 0xef])))
}

#[test]
fn api_versions() {
    check_request(0, ApiVersionsRequest::default());
    check_request(
        3,
        ApiVersionsRequest { client_software_name: "moim".into(), client_software_version: "0.1".into() },
    );
    let api_keys = vec![
        ApiVersion { api_key: 0, min_version: 0, max_version: 12 },
        ApiVersion { api_key: 18, min_version: 0, max_version: 4 },
    ];
    check_response(0, ApiVersionsResponse { api_keys: api_keys.clone(), ..Default::default() });
    let flexible = ApiVersionsResponse {
        api_keys,
        throttle_time_ms: 5,
        supported_features: vec![SupportedFeatureKey {
            name: "transaction.version".into(),
            min_version: 0,
            max_version: 1,
        }],
        finalized_features_epoch: 3,
        ..Default::default()
    };
    check_response(3, flexible.clone());
    check_response(4, flexible);
}

#[test]
fn metadata() {
    let topics = Some(vec![MetadataRequestTopic { name: Some(ORDERS), ..Default::default() }]);
    check_request(1, MetadataRequest { topics: topics.clone(), ..Default::default() });
    check_request(12, MetadataRequest { topics, allow_auto_topic_creation: false, ..Default::default() });

    let partition = MetadataResponsePartition {
        leader_id: 1,
        replica_nodes: vec![1, 2],
        isr_nodes: vec![1],
        ..Default::default()
    };
    let old = MetadataResponse {
        brokers: vec![MetadataResponseBroker { node_id: 1, host: HOST, port: 9092, rack: None }],
        controller_id: 1,
        topics: vec![MetadataResponseTopic {
            name: Some(ORDERS),
            partitions: vec![partition.clone()],
            ..Default::default()
        }],
        ..Default::default()
    };
    let mut new = old.clone();
    new.cluster_id = Some("moim".into());
    new.topics[0].topic_id = TOPIC_ID;
    new.topics[0].partitions =
        vec![MetadataResponsePartition { leader_epoch: 4, offline_replicas: vec![2], ..partition }];
    check_response(1, old);
    check_response(12, new);
}

#[test]
fn produce() {
    let request = |topic: TopicProduceData| ProduceRequest {
        transactional_id: Some("tx".into()),
        acks: -1,
        timeout_ms: 1500,
        topic_data: vec![TopicProduceData {
            partition_data: vec![
                PartitionProduceData { index: 3, records: records() },
                PartitionProduceData { index: 4, records: None },
            ],
            ..topic
        }],
    };
    let by_name = TopicProduceData { name: ORDERS, ..Default::default() };
    check_request(7, request(by_name.clone()));
    check_request(9, request(by_name));
    check_request(13, request(TopicProduceData { topic_id: TOPIC_ID, ..Default::default() }));

    let old = PartitionProduceResponse {
        index: 3,
        error_code: 6,
        base_offset: 42,
        log_start_offset: 1,
        ..Default::default()
    };
    let new = PartitionProduceResponse {
        record_errors: vec![BatchIndexAndErrorMessage { batch_index: 2, batch_index_error_message: None }],
        error_message: Some("moved".into()),
        current_leader: LeaderIdAndEpoch { leader_id: 2, leader_epoch: 5 },
        ..old.clone()
    };
    let response = |partition| ProduceResponse {
        responses: vec![TopicProduceResponse {
            name: ORDERS,
            partition_responses: vec![partition],
            ..Default::default()
        }],
        throttle_time_ms: 9,
        ..Default::default()
    };
    check_response(7, response(old));
    let node_endpoints = vec![NodeEndpoint { node_id: 2, host: HOST, port: 9093, rack: None }];
    check_response(10, ProduceResponse { node_endpoints, ..response(new) });
}

#[test]
fn fetch_requests() {
    let partition =
        FetchPartition { partition: 3, fetch_offset: 42, partition_max_bytes: 999, ..Default::default() };
    let old = FetchRequest {
        max_wait_ms: 500,
        min_bytes: 1,
        max_bytes: 1000,
        isolation_level: 1,
        topics: vec![FetchTopic { topic: ORDERS, partitions: vec![partition], ..Default::default() }],
        ..Default::default()
    };
    let mut by_name = FetchRequest {
        cluster_id: Some("moim".into()),
        session_id: 11,
        session_epoch: 2,
        forgotten_topics_data: vec![ForgottenTopic {
            topic: "old".into(),
            partitions: vec![0, 1],
            ..Default::default()
        }],
        rack_id: "r1".into(),
        ..old.clone()
    };
    by_name.topics[0].partitions[0].current_leader_epoch = 4;
    let mut by_id = by_name.clone();
    by_id.replica_state = ReplicaState { replica_id: 2, replica_epoch: 8 };
    (by_id.topics[0].topic, by_id.topics[0].topic_id) = (KString::default(), TOPIC_ID);
    let forgotten = &mut by_id.forgotten_topics_data[0];
    (forgotten.topic, forgotten.topic_id) = (KString::default(), TOPIC_ID);
    check_request(4, old);
    check_request(12, by_name);
    check_request(16, by_id);
}

#[test]
fn fetch_responses() {
    let old = FetchResponse {
        responses: vec![FetchableTopicResponse {
            topic: ORDERS,
            partitions: vec![PartitionData {
                partition_index: 3,
                high_watermark: 50,
                last_stable_offset: 49,
                aborted_transactions: Some(vec![AbortedTransaction { producer_id: 1000, first_offset: 44 }]),
                records: records(),
                ..Default::default()
            }],
            ..Default::default()
        }],
        ..Default::default()
    };
    let mut by_name = FetchResponse { session_id: 11, ..old.clone() };
    let partition = &mut by_name.responses[0].partitions[0];
    partition.log_start_offset = 1;
    partition.diverging_epoch = fetch::EpochEndOffset { epoch: 3, end_offset: 40 };
    partition.current_leader = LeaderIdAndEpoch { leader_id: 2, leader_epoch: 5 };
    let mut by_id = by_name.clone();
    (by_id.responses[0].topic, by_id.responses[0].topic_id) = (KString::default(), TOPIC_ID);
    by_id.node_endpoints = vec![NodeEndpoint { node_id: 2, host: HOST, port: 9093, rack: Some("r1".into()) }];
    check_response(4, old);
    check_response(12, by_name);
    check_response(16, by_id);
}

#[test]
fn list_offsets() {
    let request = |current_leader_epoch, isolation_level| ListOffsetsRequest {
        replica_id: -1,
        isolation_level,
        topics: vec![ListOffsetsTopic {
            name: ORDERS,
            partitions: vec![ListOffsetsPartition {
                partition_index: 3,
                current_leader_epoch,
                timestamp: -2,
            }],
        }],
        ..Default::default()
    };
    check_request(1, request(-1, 0));
    check_request(6, request(4, 1));
}

#[test]
fn join_group() {
    let metadata = Bytes::from_static(&[0, 1, 2]);
    let old = JoinGroupRequest {
        group_id: "g".into(),
        session_timeout_ms: 10_000,
        rebalance_timeout_ms: 60_000,
        member_id: "m-1".into(),
        group_instance_id: Some("i-1".into()),
        protocol_type: "consumer".into(),
        protocols: vec![JoinGroupRequestProtocol { name: "range".into(), metadata: metadata.clone() }],
        reason: None,
    };
    check_request(5, old.clone());
    check_request(9, JoinGroupRequest { reason: Some("start".into()), ..old });

    let old = JoinGroupResponse {
        generation_id: 3,
        protocol_name: Some("range".into()),
        leader: "m-1".into(),
        member_id: "m-1".into(),
        members: vec![JoinGroupResponseMember {
            member_id: "m-1".into(),
            group_instance_id: Some("i-1".into()),
            metadata,
        }],
        ..Default::default()
    };
    check_response(5, old.clone());
    check_response(
        9,
        JoinGroupResponse { protocol_type: Some("consumer".into()), skip_assignment: true, ..old },
    );
}

#[test]
fn find_coordinator() {
    check_request(0, FindCoordinatorRequest { key: "g".into(), ..Default::default() });
    let coordinator_keys = vec!["g".into(), "h".into()];
    check_request(4, FindCoordinatorRequest { coordinator_keys, ..Default::default() });
    check_response(1, FindCoordinatorResponse { node_id: 1, host: HOST, port: 9092, ..Default::default() });
    let found = Coordinator { key: "g".into(), node_id: 1, host: HOST, port: 9092, ..Default::default() };
    check_response(4, FindCoordinatorResponse { coordinators: vec![found], ..Default::default() });
}

#[test]
fn offsets_of_groups() {
    let request = |committed_leader_epoch| OffsetCommitRequest {
        group_id: "g".into(),
        generation_id_or_member_epoch: 3,
        member_id: "m-1".into(),
        topics: vec![OffsetCommitRequestTopic {
            name: ORDERS,
            partitions: vec![OffsetCommitRequestPartition {
                partition_index: 3,
                committed_offset: 42,
                committed_leader_epoch,
                committed_metadata: Some("note".into()),
                ..Default::default()
            }],
            ..Default::default()
        }],
        ..Default::default()
    };
    check_request(2, request(-1));
    check_request(8, request(4));
    let groups = vec![OffsetFetchRequestGroup { group_id: "g".into(), topics: None, ..Default::default() }];
    check_request(8, OffsetFetchRequest { groups, require_stable: true, ..Default::default() });
}

#[test]
fn create_topics() {
    let request = CreateTopicsRequest {
        topics: vec![CreatableTopic {
            name: ORDERS,
            num_partitions: 4,
            replication_factor: 1,
            configs: vec![CreatableTopicConfig { name: "retention.ms".into(), value: Some("1000".into()) }],
            ..Default::default()
        }],
        timeout_ms: 1000,
        validate_only: true,
    };
    check_request(2, request.clone());
    check_request(7, request);
    let created = CreatableTopicResult {
        name: ORDERS,
        topic_id: TOPIC_ID,
        topic_config_error_code: 29,
        num_partitions: 4,
        replication_factor: 1,
        ..Default::default()
    };
    check_response(7, CreateTopicsResponse { topics: vec![created], ..Default::default() });
}

#[test]
fn init_producer_id() {
    check_request(
        4,
        InitProducerIdRequest {
            transactional_id: Some("tx".into()),
            transaction_timeout_ms: 60_000,
            ..Default::default()
        },
    );
}

#[test]
fn a_nullable_struct_follows_a_marker_byte() {
    let next_cursor = Some(Cursor { topic_name: ORDERS, partition_index: 2 });
    check_response(0, DescribeTopicPartitionsResponse { next_cursor, ..Default::default() });
}
