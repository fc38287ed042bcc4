//! Every request and response, one file per API.
//!
//! The names are Kafka's own, in Rust case; what a field means is what Kafka's protocol guide says it means.
//! Everything is re-exported here. A few nested structs share a name across APIs (`EpochEndOffset`,
//! `TopicPartitions`, …): name those through their module, as the compiler will ask you to.
#![allow(missing_docs, reason = "fields carry the protocol's own names")]
#![allow(ambiguous_glob_reexports, reason = "names of nested structs that several APIs share")]

pub mod add_offsets_to_txn;
pub mod add_partitions_to_txn;
pub mod alter_client_quotas;
pub mod alter_configs;
pub mod alter_partition_reassignments;
pub mod alter_replica_log_dirs;
pub mod alter_user_scram_credentials;
pub mod api_versions;
pub mod consumer_group_describe;
pub mod consumer_group_heartbeat;
pub mod create_acls;
pub mod create_partitions;
pub mod create_topics;
pub mod delete_acls;
pub mod delete_groups;
pub mod delete_records;
pub mod delete_topics;
pub mod describe_acls;
pub mod describe_client_quotas;
pub mod describe_cluster;
pub mod describe_configs;
pub mod describe_groups;
pub mod describe_log_dirs;
pub mod describe_producers;
pub mod describe_topic_partitions;
pub mod describe_transactions;
pub mod describe_user_scram_credentials;
pub mod elect_leaders;
pub mod end_txn;
pub mod fetch;
pub mod find_coordinator;
pub mod heartbeat;
pub mod incremental_alter_configs;
pub mod init_producer_id;
pub mod join_group;
pub mod leave_group;
pub mod list_groups;
pub mod list_offsets;
pub mod list_partition_reassignments;
pub mod list_transactions;
pub mod metadata;
pub mod offset_commit;
pub mod offset_delete;
pub mod offset_fetch;
pub mod offset_for_leader_epoch;
pub mod produce;
pub mod sasl_authenticate;
pub mod sasl_handshake;
pub mod sync_group;
pub mod txn_offset_commit;
pub mod write_txn_markers;

pub use add_offsets_to_txn::*;
pub use add_partitions_to_txn::*;
pub use alter_client_quotas::*;
pub use alter_configs::*;
pub use alter_partition_reassignments::*;
pub use alter_replica_log_dirs::*;
pub use alter_user_scram_credentials::*;
pub use api_versions::*;
pub use consumer_group_describe::*;
pub use consumer_group_heartbeat::*;
pub use create_acls::*;
pub use create_partitions::*;
pub use create_topics::*;
pub use delete_acls::*;
pub use delete_groups::*;
pub use delete_records::*;
pub use delete_topics::*;
pub use describe_acls::*;
pub use describe_client_quotas::*;
pub use describe_cluster::*;
pub use describe_configs::*;
pub use describe_groups::*;
pub use describe_log_dirs::*;
pub use describe_producers::*;
pub use describe_topic_partitions::*;
pub use describe_transactions::*;
pub use describe_user_scram_credentials::*;
pub use elect_leaders::*;
pub use end_txn::*;
pub use fetch::*;
pub use find_coordinator::*;
pub use heartbeat::*;
pub use incremental_alter_configs::*;
pub use init_producer_id::*;
pub use join_group::*;
pub use leave_group::*;
pub use list_groups::*;
pub use list_offsets::*;
pub use list_partition_reassignments::*;
pub use list_transactions::*;
pub use metadata::*;
pub use offset_commit::*;
pub use offset_delete::*;
pub use offset_fetch::*;
pub use offset_for_leader_epoch::*;
pub use produce::*;
pub use sasl_authenticate::*;
pub use sasl_handshake::*;
pub use sync_group::*;
pub use txn_offset_commit::*;
pub use write_txn_markers::*;

use bytes::Bytes;

use crate::{ApiKey, DecodeError, Decoder, Encoder, Message};

/// Hands the table of APIs and their two messages to the macro `$then`.
macro_rules! with_all_messages {
    ($then:ident $($args:tt)*) => {
        $then! { $($args)*
            Produce: ProduceRequest, ProduceResponse;
            Fetch: FetchRequest, FetchResponse;
            ListOffsets: ListOffsetsRequest, ListOffsetsResponse;
            Metadata: MetadataRequest, MetadataResponse;
            OffsetCommit: OffsetCommitRequest, OffsetCommitResponse;
            OffsetFetch: OffsetFetchRequest, OffsetFetchResponse;
            FindCoordinator: FindCoordinatorRequest, FindCoordinatorResponse;
            JoinGroup: JoinGroupRequest, JoinGroupResponse;
            Heartbeat: HeartbeatRequest, HeartbeatResponse;
            LeaveGroup: LeaveGroupRequest, LeaveGroupResponse;
            SyncGroup: SyncGroupRequest, SyncGroupResponse;
            DescribeGroups: DescribeGroupsRequest, DescribeGroupsResponse;
            ListGroups: ListGroupsRequest, ListGroupsResponse;
            SaslHandshake: SaslHandshakeRequest, SaslHandshakeResponse;
            ApiVersions: ApiVersionsRequest, ApiVersionsResponse;
            CreateTopics: CreateTopicsRequest, CreateTopicsResponse;
            DeleteTopics: DeleteTopicsRequest, DeleteTopicsResponse;
            DeleteRecords: DeleteRecordsRequest, DeleteRecordsResponse;
            InitProducerId: InitProducerIdRequest, InitProducerIdResponse;
            OffsetForLeaderEpoch: OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse;
            AddPartitionsToTxn: AddPartitionsToTxnRequest, AddPartitionsToTxnResponse;
            AddOffsetsToTxn: AddOffsetsToTxnRequest, AddOffsetsToTxnResponse;
            EndTxn: EndTxnRequest, EndTxnResponse;
            WriteTxnMarkers: WriteTxnMarkersRequest, WriteTxnMarkersResponse;
            TxnOffsetCommit: TxnOffsetCommitRequest, TxnOffsetCommitResponse;
            DescribeAcls: DescribeAclsRequest, DescribeAclsResponse;
            CreateAcls: CreateAclsRequest, CreateAclsResponse;
            DeleteAcls: DeleteAclsRequest, DeleteAclsResponse;
            DescribeConfigs: DescribeConfigsRequest, DescribeConfigsResponse;
            AlterConfigs: AlterConfigsRequest, AlterConfigsResponse;
            AlterReplicaLogDirs: AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse;
            DescribeLogDirs: DescribeLogDirsRequest, DescribeLogDirsResponse;
            SaslAuthenticate: SaslAuthenticateRequest, SaslAuthenticateResponse;
            CreatePartitions: CreatePartitionsRequest, CreatePartitionsResponse;
            DeleteGroups: DeleteGroupsRequest, DeleteGroupsResponse;
            ElectLeaders: ElectLeadersRequest, ElectLeadersResponse;
            IncrementalAlterConfigs: IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse;
            AlterPartitionReassignments: AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse;
            ListPartitionReassignments: ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse;
            OffsetDelete: OffsetDeleteRequest, OffsetDeleteResponse;
            DescribeClientQuotas: DescribeClientQuotasRequest, DescribeClientQuotasResponse;
            AlterClientQuotas: AlterClientQuotasRequest, AlterClientQuotasResponse;
            DescribeUserScramCredentials: DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse;
            AlterUserScramCredentials: AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse;
            DescribeCluster: DescribeClusterRequest, DescribeClusterResponse;
            DescribeProducers: DescribeProducersRequest, DescribeProducersResponse;
            DescribeTransactions: DescribeTransactionsRequest, DescribeTransactionsResponse;
            ListTransactions: ListTransactionsRequest, ListTransactionsResponse;
            ConsumerGroupHeartbeat: ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse;
            ConsumerGroupDescribe: ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse;
            DescribeTopicPartitions: DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse;
        }
    };
}

macro_rules! recode_by_key {
    ($($api:ident: $request:ident, $response:ident;)+) => {
        /// Reads the body of any request and writes it again, for callers that check bytes without caring for
        /// their meaning. The result means the same; it is the same unless tagged fields were unknown or out
        /// of order, or a varint or a bool was spelled in an unusual way.
        pub fn recode_request(key: ApiKey, version: i16, body: Bytes) -> Result<Bytes, DecodeError> {
            match key {
                $( ApiKey::$api => recode::<$request>(version, body), )+
            }
        }

        /// As [`recode_request`], for responses.
        pub fn recode_response(key: ApiKey, version: i16, body: Bytes) -> Result<Bytes, DecodeError> {
            match key {
                $( ApiKey::$api => recode::<$response>(version, body), )+
            }
        }
    };
}
with_all_messages!(recode_by_key);

fn recode<M: Message>(version: i16, body: Bytes) -> Result<Bytes, DecodeError> {
    let mut d = Decoder::new(body);
    let message = M::decode(&mut d, version)?;
    d.finish()?;
    let mut e = Encoder::new();
    message.encode(&mut e, version).expect("what was read in a version can be written in it");
    Ok(e.finish().0.freeze())
}

#[cfg(test)]
mod tests;
