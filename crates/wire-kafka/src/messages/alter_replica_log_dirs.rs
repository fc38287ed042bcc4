//! AlterReplicaLogDirs (34): move replicas between directories of a broker.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to move replicas between directories of a broker.
    AlterReplicaLogDirsRequest(AlterReplicaLogDirs) {
        dirs: Vec<AlterReplicaLogDir>,
    }

    /// An entry of [`AlterReplicaLogDirsRequest::dirs`].
    AlterReplicaLogDir {
        path: KString,
        topics: Vec<AlterReplicaLogDirTopic>,
    }

    /// An entry of [`AlterReplicaLogDir::topics`].
    AlterReplicaLogDirTopic {
        name: KString,
        partitions: Vec<i32>,
    }

    /// The answer to [`AlterReplicaLogDirsRequest`].
    AlterReplicaLogDirsResponse(AlterReplicaLogDirs) {
        throttle_time_ms: i32,
        results: Vec<AlterReplicaLogDirTopicResult>,
    }

    /// An entry of [`AlterReplicaLogDirsResponse::results`].
    AlterReplicaLogDirTopicResult {
        topic_name: KString,
        partitions: Vec<AlterReplicaLogDirPartitionResult>,
    }

    /// An entry of [`AlterReplicaLogDirTopicResult::partitions`].
    AlterReplicaLogDirPartitionResult {
        partition_index: i32,
        error_code: i16,
    }
}
