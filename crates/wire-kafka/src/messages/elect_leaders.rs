//! ElectLeaders (43): elect the preferred leader, or any replica if the operator accepts loss.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to elect the preferred leader, or any replica if the operator accepts loss.
    ElectLeadersRequest(ElectLeaders) {
        election_type: i8 [1..],
        topic_partitions: Option<Vec<TopicPartitions>>,
        timeout_ms: i32 = 60000,
    }

    /// An entry of [`ElectLeadersRequest::topic_partitions`].
    TopicPartitions {
        topic: KString,
        partitions: Vec<i32>,
    }

    /// The answer to [`ElectLeadersRequest`].
    ElectLeadersResponse(ElectLeaders) {
        throttle_time_ms: i32,
        error_code: i16 [1..],
        replica_election_results: Vec<ReplicaElectionResult>,
    }

    /// An entry of [`ElectLeadersResponse::replica_election_results`].
    ReplicaElectionResult {
        topic: KString,
        partition_result: Vec<PartitionResult>,
    }

    /// An entry of [`ReplicaElectionResult::partition_result`].
    PartitionResult {
        partition_id: i32,
        error_code: i16,
        error_message: Option<KString>,
    }
}
