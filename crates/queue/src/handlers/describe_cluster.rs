//! DescribeCluster: the live brokers and the controller.

use moim_wire_kafka::messages::describe_cluster::{
    DescribeClusterBroker, DescribeClusterRequest, DescribeClusterResponse,
};
use moim_wire_kafka::{ErrorCode, KString};

use crate::broker::Broker;
use crate::handlers::metadata::ALL_CLUSTER_OPERATIONS;

const BROKERS: i8 = 1;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeClusterRequest,
    _version: i16,
) -> DescribeClusterResponse {
    if request.endpoint_type != BROKERS {
        // There is no separate controller endpoint.
        let code = ErrorCode::UnsupportedEndpointType;
        return DescribeClusterResponse {
            error_code: code as i16,
            error_message: Some(KString::from_static(code.message())),
            ..Default::default()
        };
    }
    DescribeClusterResponse {
        cluster_id: broker.options.cluster_id.as_str().into(),
        controller_id: broker.controller().0,
        brokers: broker
            .live()
            .iter()
            .map(|broker| DescribeClusterBroker {
                broker_id: broker.id.0,
                host: broker.host.as_str().into(),
                port: i32::from(broker.port),
                rack: broker.rack.as_deref().map(Into::into),
                is_fenced: false,
            })
            .collect(),
        cluster_authorized_operations: if request.include_cluster_authorized_operations {
            ALL_CLUSTER_OPERATIONS
        } else {
            i32::MIN
        },
        ..Default::default()
    }
}
