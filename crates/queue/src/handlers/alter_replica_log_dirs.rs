//! AlterReplicaLogDirs: a node has one data directory, so only a move to that directory succeeds.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{
    AlterReplicaLogDirPartitionResult, AlterReplicaLogDirTopicResult, AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
};

use crate::broker::Broker;

pub(crate) fn handle(
    broker: &Broker,
    request: AlterReplicaLogDirsRequest,
    _version: i16,
) -> AlterReplicaLogDirsResponse {
    let mut results = Vec::new();
    for dir in request.dirs {
        let is_data_dir = *dir.path == *broker.options.data_dir;
        for topic in dir.topics {
            let result = |&partition_index: &i32| {
                let code = match broker.topics.replica(&topic.name, partition_index) {
                    Err(ErrorCode::NotLeaderOrFollower) => ErrorCode::ReplicaNotAvailable,
                    Err(code) => code,
                    Ok(_) if is_data_dir => ErrorCode::None,
                    Ok(_) => ErrorCode::LogDirNotFound,
                };
                AlterReplicaLogDirPartitionResult { partition_index, error_code: code as i16 }
            };
            let partitions = topic.partitions.iter().map(result).collect();
            results.push(AlterReplicaLogDirTopicResult { topic_name: topic.name, partitions });
        }
    }
    AlterReplicaLogDirsResponse { results, ..Default::default() }
}
