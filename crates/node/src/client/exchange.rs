//! Which answer belongs to which question, and the newest version of it the command line uses.
//!
//! Some APIs changed their shape on the way (one group became many, names became ids). Each is capped below
//! the change where the old shape does all we need, so that a request is built the same way for every server.

use moim_wire_kafka::Message;
use moim_wire_kafka::messages::*;

/// A request and what comes back.
pub(crate) trait Exchange: Message {
    /// The answer.
    type Response: Message;
    /// The newest version asked for.
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
