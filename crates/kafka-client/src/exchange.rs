//! The response type of each request, and the newest version that this client uses.
//!
//! Some APIs changed their structure between versions (one group became many, names became ids). Each of these is capped
//! below the change if the old structure is sufficient, so that a request is built the same way for every server.

use moim_wire_kafka::Message;
use moim_wire_kafka::messages::*;

/// A request and its response.
pub trait Exchange: Message {
    /// The response to this request.
    type Response: Message;
    /// The newest version that is sent.
    const NEWEST: i16;
}

macro_rules! exchanges {
    ($( $request:ident => $response:ident $(up to $newest:literal)?; )+) => { $(
        impl Exchange for $request {
            type Response = $response;
            const NEWEST: i16 = exchanges!(@newest $($newest)?);
        }
    )+ };
    (@newest $newest:literal) => { $newest };
    (@newest) => { i16::MAX };
}

exchanges! {
    AlterPartitionReassignmentsRequest => AlterPartitionReassignmentsResponse;
    CreatePartitionsRequest => CreatePartitionsResponse;
    CreateTopicsRequest => CreateTopicsResponse;
    DeleteGroupsRequest => DeleteGroupsResponse;
    DeleteTopicsRequest => DeleteTopicsResponse up to 5;
    DescribeConfigsRequest => DescribeConfigsResponse;
    DescribeGroupsRequest => DescribeGroupsResponse;
    DescribeLogDirsRequest => DescribeLogDirsResponse;
    FetchRequest => FetchResponse up to 12;
    FindCoordinatorRequest => FindCoordinatorResponse up to 3;
    HeartbeatRequest => HeartbeatResponse;
    IncrementalAlterConfigsRequest => IncrementalAlterConfigsResponse;
    InitProducerIdRequest => InitProducerIdResponse;
    JoinGroupRequest => JoinGroupResponse;
    LeaveGroupRequest => LeaveGroupResponse up to 2;
    ListGroupsRequest => ListGroupsResponse;
    ListOffsetsRequest => ListOffsetsResponse;
    ListPartitionReassignmentsRequest => ListPartitionReassignmentsResponse;
    MetadataRequest => MetadataResponse;
    OffsetCommitRequest => OffsetCommitResponse up to 9;
    OffsetFetchRequest => OffsetFetchResponse up to 7;
    ProduceRequest => ProduceResponse up to 12;
    SyncGroupRequest => SyncGroupResponse;
}
