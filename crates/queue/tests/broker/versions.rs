//! Every API responds in every advertised version, with a response that decodes in that version.

use moim_wire_kafka::messages::*;
use moim_wire_kafka::{ApiKey, Message};

use crate::support::{Client, Running, start};

fn advertised(running: &Running) -> Vec<(i16, std::ops::RangeInclusive<i16>)> {
    let response: ApiVersionsResponse =
        Client::connect(running).call(&ApiVersionsRequest::default(), 0).unwrap();
    response.api_keys.iter().map(|a| (a.api_key, a.min_version..=a.max_version)).collect()
}

/// Sends a request in each advertised version, on its own connection, so that one failure is one message.
fn check<Q: Message, S: Message>(running: &Running, request: impl Fn(i16) -> Q, checked: &mut Vec<i16>) {
    let versions = advertised(running).into_iter().find(|(key, _)| *key == Q::KEY as i16);
    let (key, versions) = versions.unwrap_or_else(|| panic!("{} is not advertised", Q::KEY.name()));
    for version in versions {
        let answer = Client::connect(running).call::<Q, S>(&request(version), version);
        assert!(answer.is_ok(), "{} version {version}: {:?}", Q::KEY.name(), answer.err());
    }
    checked.push(key);
}

macro_rules! check_empty {
    ($running:expr, $checked:expr, $($request:ty => $response:ty),+ $(,)?) => {
        $( check::<$request, $response>($running, |_| <$request>::default(), $checked); )+
    };
}

#[test]
fn every_advertised_version_answers_an_empty_request() {
    let running = start();
    let mut checked = Vec::new();
    let name = |v: i16| ApiVersionsRequest {
        client_software_name: if v >= 3 { "test".into() } else { Default::default() },
        client_software_version: if v >= 3 { "1".into() } else { Default::default() },
    };
    check::<ApiVersionsRequest, ApiVersionsResponse>(&running, name, &mut checked);
    let produce = |_| ProduceRequest { acks: 1, ..Default::default() };
    check::<ProduceRequest, ProduceResponse>(&running, produce, &mut checked);
    check_empty!(&running, &mut checked,
        FetchRequest => FetchResponse,
        ListOffsetsRequest => ListOffsetsResponse,
        MetadataRequest => MetadataResponse,
        OffsetCommitRequest => OffsetCommitResponse,
        OffsetFetchRequest => OffsetFetchResponse,
        FindCoordinatorRequest => FindCoordinatorResponse,
        JoinGroupRequest => JoinGroupResponse,
        HeartbeatRequest => HeartbeatResponse,
        LeaveGroupRequest => LeaveGroupResponse,
        SyncGroupRequest => SyncGroupResponse,
        DescribeGroupsRequest => DescribeGroupsResponse,
        ListGroupsRequest => ListGroupsResponse,
        CreateTopicsRequest => CreateTopicsResponse,
        DeleteTopicsRequest => DeleteTopicsResponse,
        DeleteRecordsRequest => DeleteRecordsResponse,
        InitProducerIdRequest => InitProducerIdResponse,
        SaslHandshakeRequest => SaslHandshakeResponse,
        SaslAuthenticateRequest => SaslAuthenticateResponse,
        WriteTxnMarkersRequest => WriteTxnMarkersResponse,
        AlterReplicaLogDirsRequest => AlterReplicaLogDirsResponse,
        OffsetForLeaderEpochRequest => OffsetForLeaderEpochResponse,
        AddPartitionsToTxnRequest => AddPartitionsToTxnResponse,
        AddOffsetsToTxnRequest => AddOffsetsToTxnResponse,
        EndTxnRequest => EndTxnResponse,
        TxnOffsetCommitRequest => TxnOffsetCommitResponse,
        DescribeConfigsRequest => DescribeConfigsResponse,
        AlterConfigsRequest => AlterConfigsResponse,
        DescribeLogDirsRequest => DescribeLogDirsResponse,
        CreatePartitionsRequest => CreatePartitionsResponse,
        DeleteGroupsRequest => DeleteGroupsResponse,
        ElectLeadersRequest => ElectLeadersResponse,
        IncrementalAlterConfigsRequest => IncrementalAlterConfigsResponse,
        AlterPartitionReassignmentsRequest => AlterPartitionReassignmentsResponse,
        ListPartitionReassignmentsRequest => ListPartitionReassignmentsResponse,
        OffsetDeleteRequest => OffsetDeleteResponse,
        DescribeClusterRequest => DescribeClusterResponse,
        DescribeProducersRequest => DescribeProducersResponse,
        DescribeTransactionsRequest => DescribeTransactionsResponse,
        ListTransactionsRequest => ListTransactionsResponse,
        DescribeTopicPartitionsRequest => DescribeTopicPartitionsResponse,
    );
    let all: Vec<i16> = advertised(&running).into_iter().map(|(key, _)| key).collect();
    let forgotten: Vec<_> = all.iter().filter(|key| !checked.contains(key)).collect();
    assert!(forgotten.is_empty(), "advertised but not checked: {forgotten:?}");
}

#[test]
fn every_version_describes_a_topic_with_records_and_a_group() {
    let running = start();
    let mut client = Client::connect(&running);
    client.create_topic("full", 2);
    assert_eq!(client.produce("full", b"one"), 0);
    assert_eq!(client.produce("full", b"two"), 1);
    let id = topic_id(&mut client, "full");
    let mut done = Vec::new();
    let metadata = |_| MetadataRequest { topics: None, ..Default::default() };
    check_with::<MetadataRequest, MetadataResponse>(&running, 1, metadata, |r, v| {
        assert_eq!(r.topics.len(), 1, "{v}")
    });
    let offsets = |_| ListOffsetsRequest {
        replica_id: -1,
        topics: vec![ListOffsetsTopic {
            name: "full".into(),
            partitions: vec![ListOffsetsPartition { timestamp: -1, ..Default::default() }],
        }],
        ..Default::default()
    };
    check_with::<ListOffsetsRequest, ListOffsetsResponse>(&running, 1, offsets, |r, v| {
        assert_eq!((r.topics[0].partitions[0].error_code, r.topics[0].partitions[0].offset), (0, 2), "{v}");
    });
    let fetch = |v: i16| FetchRequest {
        max_bytes: 1 << 20,
        topics: vec![FetchTopic {
            topic: if v < 13 { "full".into() } else { Default::default() },
            topic_id: if v >= 13 { id } else { Default::default() },
            partitions: vec![FetchPartition { partition_max_bytes: 1 << 20, ..Default::default() }],
        }],
        ..Default::default()
    };
    check_with::<FetchRequest, FetchResponse>(&running, 4, fetch, |r, v| {
        let data = &r.responses[0].partitions[0];
        assert_eq!((data.error_code, data.high_watermark), (0, 2), "{v}");
        assert!(data.records.as_ref().is_some_and(|r| r.len() > 2 * 61), "{v}");
    });
    let commit = |_| OffsetCommitRequest {
        group_id: "g".into(),
        topics: vec![OffsetCommitRequestTopic {
            name: "full".into(),
            partitions: vec![OffsetCommitRequestPartition { committed_offset: 1, ..Default::default() }],
            ..Default::default()
        }],
        ..Default::default()
    };
    check_with::<OffsetCommitRequest, OffsetCommitResponse>(&running, 2, commit, |r, v| {
        assert_eq!(r.topics[0].partitions[0].error_code, 0, "{v}");
    });
    let describe =
        |_| DescribeGroupsRequest { groups: vec!["g".into(), "none".into()], ..Default::default() };
    check_with::<DescribeGroupsRequest, DescribeGroupsResponse>(&running, 0, describe, |r, v| {
        assert_eq!((&*r.groups[0].group_state, &*r.groups[1].group_state), ("Empty", "Dead"), "{v}");
    });
    check::<ListGroupsRequest, ListGroupsResponse>(&running, |_| Default::default(), &mut done);
    let configs = |_| DescribeConfigsRequest {
        resources: vec![DescribeConfigsResource {
            resource_type: 2,
            resource_name: "full".into(),
            ..Default::default()
        }],
        include_synonyms: true,
        ..Default::default()
    };
    check_with::<DescribeConfigsRequest, DescribeConfigsResponse>(&running, 1, configs, |r, v| {
        assert!(r.results[0].configs.len() > 20, "{v}");
    });
    let delete = |v: i16| DeleteTopicsRequest {
        topic_names: if v < 6 { vec!["nothing".into()] } else { Vec::new() },
        topics: if v < 6 {
            Vec::new()
        } else {
            vec![DeleteTopicState { name: Some("nothing".into()), ..Default::default() }]
        },
        ..Default::default()
    };
    check_with::<DeleteTopicsRequest, DeleteTopicsResponse>(&running, 1, delete, |r, v| {
        assert_eq!(r.responses[0].error_code, 3, "{v}");
    });
}

/// As `check`, with a check of each response from version `from` on.
fn check_with<Q: Message, S: Message>(
    running: &Running,
    from: i16,
    request: impl Fn(i16) -> Q,
    check_response: impl Fn(&S, i16),
) {
    let versions = advertised(running).into_iter().find(|(key, _)| *key == Q::KEY as i16).unwrap().1;
    for version in versions.filter(|v| *v >= from) {
        let answer = Client::connect(running).call::<Q, S>(&request(version), version);
        check_response(
            &answer.unwrap_or_else(|e| panic!("{} version {version}: {e}", Q::KEY.name())),
            version,
        );
    }
}

fn topic_id(client: &mut Client, name: &str) -> moim_wire_kafka::Uuid {
    let topic = MetadataRequestTopic { name: Some(name.into()), ..Default::default() };
    let request = MetadataRequest { topics: Some(vec![topic]), ..Default::default() };
    client.call::<_, MetadataResponse>(&request, 12).unwrap().topics[0].topic_id
}

#[test]
fn unknown_api_versions_version_gets_a_version_0_response() {
    use std::io::{Read, Write};
    let running = start();
    let mut stream = std::net::TcpStream::connect(running.address).unwrap();
    // Key 18, version 99, correlation id 7, no client id.
    stream.write_all(&[0, 0, 0, 10, 0, 18, 0, 99, 0, 0, 0, 7, 0xff, 0xff]).unwrap();
    let mut size = [0; 4];
    stream.read_exact(&mut size).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(size) as usize];
    stream.read_exact(&mut frame).unwrap();
    let (header, response) =
        moim_wire_kafka::decode_response::<ApiVersionsResponse>(frame.into(), 0).unwrap();
    assert_eq!((header.correlation_id, response.error_code), (7, 35));
    assert!(response.api_keys.iter().any(|a| a.api_key == ApiKey::ApiVersions as i16 && a.max_version >= 4));
}
