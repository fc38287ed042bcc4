//! ListPartitionReassignments: nothing ever moves on one node.

use moim_wire_kafka::messages::list_partition_reassignments::{
    ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse,
};

use crate::broker::Broker;

pub(crate) fn handle(
    _: &Broker,
    _: ListPartitionReassignmentsRequest,
    _version: i16,
) -> ListPartitionReassignmentsResponse {
    ListPartitionReassignmentsResponse::default()
}
