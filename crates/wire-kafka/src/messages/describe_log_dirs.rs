//! DescribeLogDirs (35): what lies in the directories of a broker, and how large it is.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks what lies in the directories of a broker, and how large it is.
    DescribeLogDirsRequest(DescribeLogDirs) {
        topics: Option<Vec<DescribableLogDirTopic>>,
    }

    /// An entry of [`DescribeLogDirsRequest::topics`].
    DescribableLogDirTopic {
        topic: KString,
        partitions: Vec<i32>,
    }

    /// The answer to [`DescribeLogDirsRequest`].
    DescribeLogDirsResponse(DescribeLogDirs) {
        throttle_time_ms: i32,
        error_code: i16 [3.., ignorable],
        results: Vec<DescribeLogDirsResult>,
    }

    /// An entry of [`DescribeLogDirsResponse::results`].
    DescribeLogDirsResult {
        error_code: i16,
        log_dir: KString,
        topics: Vec<DescribeLogDirsTopic>,
        total_bytes: i64 [4.., ignorable] = -1,
        usable_bytes: i64 [4.., ignorable] = -1,
        is_cordoned: bool [5.., ignorable],
    }

    /// An entry of [`DescribeLogDirsResult::topics`].
    DescribeLogDirsTopic {
        name: KString,
        partitions: Vec<DescribeLogDirsPartition>,
    }

    /// An entry of [`DescribeLogDirsTopic::partitions`].
    DescribeLogDirsPartition {
        partition_index: i32,
        partition_size: i64,
        offset_lag: i64,
        is_future_key: bool,
    }
}
