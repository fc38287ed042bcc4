//! OffsetForLeaderEpoch: the end offset of a leader epoch, so that a client or follower can detect log divergence.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::offset_for_leader_epoch::{
    EpochEndOffset, OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse, OffsetForLeaderTopicResult,
};

use crate::broker::Broker;

pub(crate) fn handle(
    broker: &Broker,
    request: OffsetForLeaderEpochRequest,
    _version: i16,
) -> OffsetForLeaderEpochResponse {
    let topics = request.topics.into_iter().map(|topic| {
        let partitions = topic.partitions.iter().map(|wanted| {
            let mut response = EpochEndOffset { partition: wanted.partition, ..Default::default() };
            match broker.topics.partition(&topic.topic, wanted.partition) {
                Err(code) => response.error_code = code as i16,
                Ok(partition) => {
                    let ours = partition.leader_epoch();
                    let theirs = wanted.current_leader_epoch;
                    if theirs >= 0 && theirs < ours {
                        response.error_code = ErrorCode::FencedLeaderEpoch as i16;
                    } else if theirs > ours {
                        response.error_code = ErrorCode::UnknownLeaderEpoch as i16;
                    } else {
                        (response.leader_epoch, response.end_offset) =
                            partition.end_of_epoch(wanted.leader_epoch);
                    }
                }
            }
            response
        });
        OffsetForLeaderTopicResult { topic: topic.topic.clone(), partitions: partitions.collect() }
    });
    OffsetForLeaderEpochResponse { topics: topics.collect(), ..Default::default() }
}
