//! DescribeCluster (60): the brokers and the id of the cluster, without its topics.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the brokers and the id of the cluster, without its topics.
    DescribeClusterRequest(DescribeCluster) {
        include_cluster_authorized_operations: bool,
        endpoint_type: i8 [1..] = 1,
        include_fenced_brokers: bool [2..],
    }

    /// The answer to [`DescribeClusterRequest`].
    DescribeClusterResponse(DescribeCluster) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        endpoint_type: i8 [1..] = 1,
        cluster_id: KString,
        controller_id: i32 = -1,
        brokers: Vec<DescribeClusterBroker>,
        cluster_authorized_operations: i32 = i32::MIN,
    }

    /// An entry of [`DescribeClusterResponse::brokers`].
    DescribeClusterBroker {
        broker_id: i32,
        host: KString,
        port: i32,
        rack: Option<KString>,
        is_fenced: bool [2..],
    }
}
