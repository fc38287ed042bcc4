//! Request dispatch: from a request header to its handler. [`SUPPORTED_APIS`] is the table of supported API versions:
//! only these are advertised, and a client that sends another one is disconnected, as by Kafka, with a log line,
//! because the response to an unknown request has no defined format. Only ApiVersions defines a response to unknown
//! versions.

use std::future::Future;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use moim_wire_kafka::{ApiKey, Decoder, Message, RequestHeader};

use crate::async_response::AsyncResponse;
use crate::broker::Broker;
use crate::connection::{Connection, QueuedResponse, bad_frame, encode_alone};
use crate::handlers;
use crate::response_writer::Call;

/// The APIs of this broker and the versions it advertises.
///
/// Produce advertises 0 because older librdkafka disables features otherwise; versions below 3 carry message formats
/// that this broker does not store, and are rejected per partition.
pub(crate) static SUPPORTED_APIS: &[(ApiKey, RangeInclusive<i16>)] = &[
    (ApiKey::Produce, 0..=12),
    (ApiKey::Fetch, 4..=16),
    (ApiKey::ListOffsets, 1..=10),
    (ApiKey::Metadata, 0..=13),
    (ApiKey::OffsetCommit, 2..=9),
    (ApiKey::OffsetFetch, 1..=9),
    (ApiKey::FindCoordinator, 0..=6),
    (ApiKey::JoinGroup, 0..=9),
    (ApiKey::Heartbeat, 0..=4),
    (ApiKey::LeaveGroup, 0..=5),
    (ApiKey::SyncGroup, 0..=5),
    (ApiKey::DescribeGroups, 0..=6),
    (ApiKey::ListGroups, 0..=5),
    (ApiKey::SaslHandshake, 0..=1),
    (ApiKey::ApiVersions, 0..=4),
    (ApiKey::CreateTopics, 2..=7),
    (ApiKey::DeleteTopics, 1..=6),
    (ApiKey::DeleteRecords, 0..=2),
    (ApiKey::InitProducerId, 0..=5),
    (ApiKey::OffsetForLeaderEpoch, 2..=4),
    (ApiKey::AddPartitionsToTxn, 0..=5),
    (ApiKey::AddOffsetsToTxn, 0..=4),
    (ApiKey::EndTxn, 0..=5),
    (ApiKey::WriteTxnMarkers, 1..=2),
    (ApiKey::TxnOffsetCommit, 0..=5),
    (ApiKey::DescribeConfigs, 1..=4),
    (ApiKey::AlterConfigs, 0..=2),
    (ApiKey::AlterReplicaLogDirs, 1..=2),
    (ApiKey::DescribeLogDirs, 1..=4),
    (ApiKey::SaslAuthenticate, 0..=2),
    (ApiKey::CreatePartitions, 0..=3),
    (ApiKey::DeleteGroups, 0..=2),
    (ApiKey::ElectLeaders, 0..=2),
    (ApiKey::IncrementalAlterConfigs, 0..=1),
    (ApiKey::AlterPartitionReassignments, 0..=0),
    (ApiKey::ListPartitionReassignments, 0..=0),
    (ApiKey::OffsetDelete, 0..=0),
    (ApiKey::DescribeCluster, 0..=2),
    (ApiKey::DescribeProducers, 0..=0),
    (ApiKey::DescribeTransactions, 0..=0),
    (ApiKey::ListTransactions, 0..=1),
    (ApiKey::DescribeTopicPartitions, 0..=0),
];

fn supported_api(key: i16, version: i16) -> Option<ApiKey> {
    let key = ApiKey::try_from(key).ok()?;
    SUPPORTED_APIS.iter().any(|(k, versions)| *k == key && versions.contains(&version)).then_some(key)
}

/// Passes a request to its handler.
pub(crate) fn dispatch(connection: &mut Connection, header: RequestHeader, body: Decoder) -> io::Result<()> {
    let version = header.api_version;
    let call = Call { correlation_id: header.correlation_id, version };
    if header.api_key == ApiKey::ApiVersions as i16 {
        return handlers::api_versions::handle(connection, call, body);
    }
    let Some(key) = supported_api(header.api_key, version) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "UNSUPPORTED_VERSION: {} (API key {}) version {version} from client {:?}",
                ApiKey::try_from(header.api_key).map_or("unknown API", |key| key.name()),
                header.api_key,
                header.client_id.as_deref().unwrap_or_default(),
            ),
        ));
    };
    connection.broker.metrics.request(key);
    match key {
        ApiKey::SaslHandshake => {
            return handlers::sasl_handshake::handle(connection, call, decode(body, version)?);
        }
        ApiKey::SaslAuthenticate => {
            return handlers::sasl_authenticate::handle(connection, call, &decode(body, version)?);
        }
        _ if !connection.is_served() => return Err(io::ErrorKind::ConnectionAborted.into()),
        _ if !connection.auth.is_open() => {
            let why = format!("{} before authentication", key.name());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        _ => connection.has_requested = true,
    }
    match key {
        ApiKey::Produce => handlers::produce::handle(connection, call, decode(body, version)?),
        ApiKey::Fetch => handlers::fetch::handle(connection, call, &header, decode(body, version)?),
        ApiKey::ListOffsets => {
            handlers::list_offsets::dispatch(connection, call, header, decode(body, version)?)
        }
        ApiKey::Heartbeat => serve_sync(connection, call, body, handlers::heartbeat::handle),
        ApiKey::FindCoordinator => {
            serve_async(connection, call, header, body, handlers::find_coordinator::handle)
        }
        ApiKey::Metadata => handlers::metadata::dispatch(connection, call, header, decode(body, version)?),
        ApiKey::OffsetCommit => serve_async(connection, call, header, body, handlers::offset_commit::handle),
        ApiKey::OffsetFetch => serve_async(connection, call, header, body, handlers::offset_fetch::handle),
        ApiKey::JoinGroup => serve_async(connection, call, header, body, handlers::join_group::handle),
        ApiKey::LeaveGroup => serve_async(connection, call, header, body, handlers::leave_group::handle),
        ApiKey::SyncGroup => serve_async(connection, call, header, body, handlers::sync_group::handle),
        ApiKey::DescribeGroups => {
            serve_async(connection, call, header, body, handlers::describe_groups::handle)
        }
        ApiKey::ListGroups => serve_async(connection, call, header, body, handlers::list_groups::handle),
        ApiKey::CreateTopics => serve_async(connection, call, header, body, handlers::create_topics::handle),
        ApiKey::DeleteTopics => serve_async(connection, call, header, body, handlers::delete_topics::handle),
        ApiKey::DeleteRecords => {
            serve_async(connection, call, header, body, handlers::delete_records::handle)
        }
        ApiKey::InitProducerId => {
            serve_async(connection, call, header, body, handlers::init_producer_id::handle)
        }
        ApiKey::OffsetForLeaderEpoch => {
            serve_sync(connection, call, body, handlers::offset_for_leader_epoch::handle)
        }
        ApiKey::AddPartitionsToTxn => {
            serve_async(connection, call, header, body, handlers::add_partitions_to_txn::handle)
        }
        ApiKey::AddOffsetsToTxn => {
            serve_async(connection, call, header, body, handlers::add_offsets_to_txn::handle)
        }
        ApiKey::WriteTxnMarkers => {
            serve_async(connection, call, header, body, handlers::write_txn_markers::handle)
        }
        ApiKey::AlterReplicaLogDirs => {
            serve_sync(connection, call, body, handlers::alter_replica_log_dirs::handle)
        }
        ApiKey::EndTxn => serve_async(connection, call, header, body, handlers::end_txn::handle),
        ApiKey::TxnOffsetCommit => {
            serve_async(connection, call, header, body, handlers::txn_offset_commit::handle)
        }
        ApiKey::DescribeConfigs => serve_sync(connection, call, body, handlers::describe_configs::handle),
        ApiKey::AlterConfigs => serve_async(connection, call, header, body, handlers::alter_configs::handle),
        ApiKey::IncrementalAlterConfigs => {
            serve_async(connection, call, header, body, handlers::incremental_alter_configs::handle)
        }
        ApiKey::DescribeLogDirs => serve_sync(connection, call, body, handlers::describe_log_dirs::handle),
        ApiKey::CreatePartitions => {
            serve_async(connection, call, header, body, handlers::create_partitions::handle)
        }
        ApiKey::DeleteGroups => serve_async(connection, call, header, body, handlers::delete_groups::handle),
        ApiKey::ElectLeaders => serve_async(connection, call, header, body, handlers::elect_leaders::handle),
        ApiKey::AlterPartitionReassignments => {
            serve_async(connection, call, header, body, handlers::alter_partition_reassignments::handle)
        }
        ApiKey::ListPartitionReassignments => {
            serve_sync(connection, call, body, handlers::list_partition_reassignments::handle)
        }
        ApiKey::OffsetDelete => serve_async(connection, call, header, body, handlers::offset_delete::handle),
        ApiKey::DescribeCluster => serve_sync(connection, call, body, handlers::describe_cluster::handle),
        ApiKey::DescribeProducers => serve_sync(connection, call, body, handlers::describe_producers::handle),
        ApiKey::DescribeTransactions => {
            serve_sync(connection, call, body, handlers::describe_transactions::handle)
        }
        ApiKey::ListTransactions => serve_sync(connection, call, body, handlers::list_transactions::handle),
        ApiKey::DescribeTopicPartitions => {
            serve_sync(connection, call, body, handlers::describe_topic_partitions::handle)
        }
        // `supported_api` lets no other API through.
        other => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("API {} has no handler", other.name())))
        }
    }
}

/// The request context that a handler needs besides the body.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) version: i16,
    pub(crate) client_id: Arc<str>,
    pub(crate) client_host: Arc<str>,
}

impl Request {
    pub(crate) fn new(connection: &Connection, header: &RequestHeader) -> Self {
        Self {
            version: header.api_version,
            client_id: header.client_id.as_deref().unwrap_or("").into(),
            client_host: format!("/{}", connection.peer.ip()).into(),
        }
    }
}

/// Decodes a request. Bytes after the last field are ignored, as by Kafka: librdkafka 2.12 ends some admin requests
/// with tagged-field counts that the schema does not have.
pub(crate) fn decode<M: Message>(mut body: Decoder, version: i16) -> io::Result<M> {
    M::decode(&mut body, version).map_err(bad_frame)
}

/// Serves a request that never waits.
fn serve_sync<Q: Message, S: Message>(
    connection: &mut Connection,
    call: Call,
    body: Decoder,
    handler: fn(&Broker, Q, i16) -> S,
) -> io::Result<()> {
    let request = decode(body, call.version)?;
    let response = handler(&connection.broker, request, call.version);
    connection.respond(call, &response)
}

/// True if a request changes state that a later request of the same connection may read. Excluded are requests that
/// wait for other clients (JoinGroup, SyncGroup) and requests between brokers, of which many are in flight at a time.
fn is_mutation(key: i16) -> bool {
    use ApiKey as K;
    const MUTATIONS: [ApiKey; 17] = [
        K::OffsetCommit,
        K::LeaveGroup,
        K::CreateTopics,
        K::DeleteTopics,
        K::DeleteRecords,
        K::CreatePartitions,
        K::AlterConfigs,
        K::IncrementalAlterConfigs,
        K::DeleteGroups,
        K::OffsetDelete,
        K::ElectLeaders,
        K::AlterPartitionReassignments,
        K::InitProducerId,
        K::AddPartitionsToTxn,
        K::AddOffsetsToTxn,
        K::EndTxn,
        K::TxnOffsetCommit,
    ];
    MUTATIONS.iter().any(|api| *api as i16 == key)
}

/// Serves a request that may wait, in its own task.
pub(crate) fn serve_async<Q, S, F, Fut>(
    connection: &mut Connection,
    call: Call,
    header: RequestHeader,
    body: Decoder,
    handler: F,
) -> io::Result<()>
where
    Q: Message,
    S: Message,
    F: FnOnce(Arc<Broker>, Q, Request) -> Fut,
    Fut: Future<Output = S> + Send + 'static,
{
    let request = decode(body, call.version)?;
    spawn_async(connection, call, header, request, handler);
    Ok(())
}

/// As [`serve_async`], for a decoded request.
pub(crate) fn spawn_async<Q, S, F, Fut>(
    connection: &mut Connection,
    call: Call,
    header: RequestHeader,
    request: Q,
    handler: F,
) where
    S: Message,
    F: FnOnce(Arc<Broker>, Q, Request) -> Fut,
    Fut: Future<Output = S> + Send + 'static,
{
    let broker = Arc::clone(&connection.broker);
    let async_response = AsyncResponse::new(Arc::clone(&connection.wake));
    let answer = handler(Arc::clone(&broker), request, Request::new(connection, &header));
    match is_mutation(header.api_key) {
        true => connection.enqueue_mutation(Arc::clone(&async_response)),
        false => connection.enqueue(QueuedResponse::Async(Arc::clone(&async_response))),
    }
    let loops = Arc::clone(&broker.loops);
    broker.scope.spawn("request", async move {
        let response = answer.await;
        match encode_alone(call, &response) {
            Ok(bytes) => async_response.set(bytes, &loops),
            Err(error) => {
                tracing::error!(%error, "response encoding failed");
                async_response.fail(&loops);
            }
        }
    });
}
