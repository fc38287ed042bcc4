//! ListOffsets: the offset of a timestamp, of the log start or of the log end.

use std::io;
use std::sync::Arc;

use moim_base::task::offload;
use moim_wire_kafka::messages::{
    ListOffsetsPartition, ListOffsetsPartitionResponse, ListOffsetsRequest, ListOffsetsResponse,
    ListOffsetsTopicResponse,
};
use moim_wire_kafka::{ErrorCode, RequestHeader};

use crate::broker::{Broker, DECOMPRESSION_BYTES};
use crate::connection::Connection;
use crate::dispatch::{Request, spawn_async};
use crate::partition::Partition;
use crate::response_writer::Call;

/// The first version whose clients know OFFSET_NOT_AVAILABLE.
const KNOWS_NOT_AVAILABLE: i16 = 5;

const LATEST: i64 = -1;
const EARLIEST: i64 = -2;
const MAX_TIMESTAMP: i64 = -3;
const EARLIEST_LOCAL: i64 = -4;
const LATEST_TIERED: i64 = -5;

/// Responds at once to log start and log end lookups; a timestamp lookup reads and decompresses batches off the loop.
pub(crate) fn dispatch(
    connection: &mut Connection,
    call: Call,
    header: RequestHeader,
    request: ListOffsetsRequest,
) -> io::Result<()> {
    let mut wanted = request.topics.iter().flat_map(|topic| &topic.partitions).map(|p| p.timestamp);
    if wanted.any(|timestamp| timestamp >= 0 || timestamp == MAX_TIMESTAMP) {
        spawn_async(connection, call, header, request, search);
        return Ok(());
    }
    let response = handle(&connection.broker, request, call.version);
    connection.respond(call, &response)
}

async fn search(broker: Arc<Broker>, request: ListOffsetsRequest, by: Request) -> ListOffsetsResponse {
    let topics = request.topics.clone();
    // Waits while other requests use the whole decompression layer.
    let memory = broker.decompression.take(DECOMPRESSION_BYTES.min(broker.decompression.limit())).await;
    let searched = offload(move || Ok(handle(&broker, request, by.version))).await;
    drop(memory);
    searched.unwrap_or_else(|_| {
        let failed = |p: &ListOffsetsPartition| {
            partition_response(p.partition_index, Err(ErrorCode::UnknownServerError), 0)
        };
        let topics = topics.into_iter().map(|topic| ListOffsetsTopicResponse {
            partitions: topic.partitions.iter().map(failed).collect(),
            name: topic.name,
        });
        ListOffsetsResponse { topics: topics.collect(), ..Default::default() }
    })
}

fn handle(broker: &Broker, request: ListOffsetsRequest, version: i16) -> ListOffsetsResponse {
    let stable_only = request.isolation_level == 1;
    let topics = request
        .topics
        .into_iter()
        .map(|topic| {
            let partitions = topic
                .partitions
                .iter()
                .map(|wanted| {
                    let partition = broker.topics.partition(&topic.name, wanted.partition_index);
                    let found = partition.and_then(|p| find_offset(&p, wanted, stable_only, version));
                    partition_response(wanted.partition_index, found, version)
                })
                .collect();
            ListOffsetsTopicResponse { name: topic.name, partitions }
        })
        .collect();
    ListOffsetsResponse { topics, ..Default::default() }
}

struct Found {
    timestamp: i64,
    offset: i64,
    leader_epoch: i32,
}

fn partition_response(
    partition_index: i32,
    found: Result<Found, ErrorCode>,
    version: i16,
) -> ListOffsetsPartitionResponse {
    match found {
        Ok(found) => ListOffsetsPartitionResponse {
            partition_index,
            timestamp: found.timestamp,
            offset: found.offset,
            leader_epoch: if version >= 4 { found.leader_epoch } else { -1 },
            ..Default::default()
        },
        Err(code) => {
            ListOffsetsPartitionResponse { partition_index, error_code: code as i16, ..Default::default() }
        }
    }
}

fn find_offset(
    partition: &Partition,
    wanted: &ListOffsetsPartition,
    stable_only: bool,
    version: i16,
) -> Result<Found, ErrorCode> {
    let epoch = partition.leader_epoch();
    if wanted.current_leader_epoch >= 0 && wanted.current_leader_epoch != epoch {
        let fenced = wanted.current_leader_epoch < epoch;
        return Err(if fenced { ErrorCode::FencedLeaderEpoch } else { ErrorCode::UnknownLeaderEpoch });
    }
    if wanted.timestamp != EARLIEST
        && wanted.timestamp != EARLIEST_LOCAL
        && !partition.has_committed_in_epoch()
    {
        // A new leader whose high watermark has not reached its leader epoch's start.
        let knows_not_available = version >= KNOWS_NOT_AVAILABLE;
        return Err(if knows_not_available {
            ErrorCode::OffsetNotAvailable
        } else {
            ErrorCode::LeaderNotAvailable
        });
    }
    let at = |offset: i64| Found { timestamp: -1, offset, leader_epoch: partition.epoch_at(offset) };
    let visible = if stable_only { partition.last_stable() } else { partition.high_watermark() };
    match wanted.timestamp {
        LATEST => Ok(Found { timestamp: -1, offset: visible, leader_epoch: epoch }),
        EARLIEST => Ok(at(partition.journal.start())),
        EARLIEST_LOCAL if version >= 8 => Ok(at(partition.journal.start())),
        // There is no tiered storage.
        LATEST_TIERED if version >= 9 => Ok(Found { timestamp: -1, offset: -1, leader_epoch: -1 }),
        MAX_TIMESTAMP if version >= 7 => Ok(match partition.max_timestamp_record(visible)? {
            Some((timestamp, offset)) => Found { timestamp, ..at(offset) },
            None => Found { timestamp: -1, offset: -1, leader_epoch: -1 },
        }),
        moment if moment >= 0 => Ok(match partition.first_at_or_after(moment, visible)? {
            Some((timestamp, offset)) => Found { timestamp, ..at(offset) },
            None => Found { timestamp: -1, offset: -1, leader_epoch: -1 },
        }),
        _ => Err(ErrorCode::UnsupportedVersion),
    }
}
