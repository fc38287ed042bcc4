//! DescribeLogDirs: the disk usage of each partition.

use moim_wire_kafka::messages::describe_log_dirs::{
    DescribeLogDirsPartition, DescribeLogDirsRequest, DescribeLogDirsResponse, DescribeLogDirsResult,
    DescribeLogDirsTopic,
};

use crate::broker::Broker;
use crate::partition::Partition;
use crate::topics::Topic;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeLogDirsRequest,
    _version: i16,
) -> DescribeLogDirsResponse {
    let topics = match &request.topics {
        None => broker.topics.all().iter().map(|t| describe(t, None)).collect(),
        Some(wanted) => wanted
            .iter()
            .filter_map(|w| broker.topics.get(&w.topic).map(|t| describe(&t, Some(&w.partitions))))
            .collect(),
    };
    let stats = broker.store.stats();
    let used: i64 =
        broker.topics.all().iter().flat_map(|t| t.replicas()).map(|p| p.journal.size_bytes() as i64).sum();
    let free = i64::try_from(stats.free_bytes).unwrap_or(i64::MAX);
    let result = DescribeLogDirsResult {
        log_dir: broker.options.data_dir.as_str().into(),
        topics,
        total_bytes: free.saturating_add(used),
        usable_bytes: free,
        ..Default::default()
    };
    DescribeLogDirsResponse { results: vec![result], ..Default::default() }
}

fn describe(topic: &Topic, wanted: Option<&[i32]>) -> DescribeLogDirsTopic {
    let partitions = topic.replicas();
    let partitions = partitions.iter().filter(|p| wanted.is_none_or(|w| w.contains(&p.index)));
    DescribeLogDirsTopic {
        name: (&*topic.name).into(),
        partitions: partitions
            .map(|p| DescribeLogDirsPartition {
                partition_index: p.index,
                partition_size: i64::try_from(p.journal.size_bytes()).unwrap_or(i64::MAX),
                offset_lag: offset_lag(p),
                is_future_key: false,
            })
            .collect(),
    }
}

/// The offset lag of a follower behind the leader's log end, as last reported by the leader; -1 before that.
fn offset_lag(partition: &Partition) -> i64 {
    const UNKNOWN: i64 = -1;
    let Some(replicated) = partition.replicated().filter(|_| partition.is_follower()) else { return 0 };
    let behind = replicated.leader_end().map(|end| end.0.saturating_sub(partition.journal.end()).max(0));
    behind.unwrap_or(UNKNOWN)
}
