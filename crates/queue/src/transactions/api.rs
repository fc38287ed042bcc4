//! Inputs and outputs of the transaction coordinator: plain data, no behaviour.

use std::sync::Arc;

use bytes::Bytes;

use moim_wire_kafka::ErrorCode;

/// Identifies the request of a response. Chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Identifies a write to `__transaction_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PersistToken(pub u64);

/// Identifies one round of markers of one transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MarkersToken(pub u64);

/// A topic partition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    /// The topic name.
    pub topic: Arc<str>,
    /// The partition index.
    pub partition: i32,
}

impl TopicPartition {
    /// A partition of this topic.
    pub fn new(topic: impl Into<Arc<str>>, partition: i32) -> Self {
        Self { topic: topic.into(), partition }
    }
}

/// A request. `version` is that of its API: it selects the fencing error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An InitProducerId request.
    InitProducerId {
        /// Identifies the response.
        token: Token,
        /// API version 0 to 5.
        version: i16,
        /// `None` for a producer that is only idempotent.
        transactional_id: Option<Arc<str>>,
        /// `transaction.timeout.ms` of the client.
        timeout_ms: i32,
        /// The producer id and epoch the client has, if it requests a new epoch after an error.
        current: Option<(i64, i16)>,
        /// An unused producer id, in case one is needed.
        fresh_id: i64,
    },
    /// An AddPartitionsToTxn request for one transaction. A batched request is several of these; a verify-only one is
    /// [`super::Coordinator::verify`]. From version 4 on a broker sends it on behalf of a producer with an epoch per
    /// transaction.
    AddPartitions {
        /// Identifies the response.
        token: Token,
        /// API version 0 to 5.
        version: i16,
        /// The transactional id.
        transactional_id: Arc<str>,
        /// The client's producer id.
        producer_id: i64,
        /// The client's producer epoch.
        producer_epoch: i16,
        /// The partitions to add. The caller has checked that they exist.
        partitions: Vec<TopicPartition>,
    },
    /// An AddOffsetsToTxn request: the transaction will commit offsets of a group.
    AddOffsets {
        /// Identifies the response.
        token: Token,
        /// API version 0 to 4.
        version: i16,
        /// The transactional id.
        transactional_id: Arc<str>,
        /// The client's producer id.
        producer_id: i64,
        /// The client's producer epoch.
        producer_epoch: i16,
        /// The partition of `__consumer_offsets` that holds the group.
        offsets_partition: i32,
    },
    /// An EndTxn request. From version 5 on every transaction ends under a new epoch, which the response carries.
    EndTxn {
        /// Identifies the response.
        token: Token,
        /// API version 0 to 5.
        version: i16,
        /// The transactional id.
        transactional_id: Arc<str>,
        /// The client's producer id.
        producer_id: i64,
        /// The client's producer epoch.
        producer_epoch: i16,
        /// True to commit, false to abort.
        commit: bool,
        /// From version 5: an unused producer id, for a producer whose epochs are exhausted.
        fresh_id: i64,
    },
}

/// A response. Id and epoch are -1 except in the response to a successful InitProducerId, and to EndTxn from version
/// 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The error code.
    pub error: ErrorCode,
    /// The producer id.
    pub producer_id: i64,
    /// The producer epoch.
    pub producer_epoch: i16,
}

impl Reply {
    pub(super) fn to((producer_id, producer_epoch): (i64, i16)) -> Self {
        Self { error: ErrorCode::None, producer_id, producer_epoch }
    }

    pub(super) fn of(error: ErrorCode) -> Self {
        Self { error, producer_id: -1, producer_epoch: -1 }
    }
}

/// What the caller must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send the response of a request.
    Reply(Token, Reply),
    /// Append a record to the partition of `__transaction_state` that holds the id, then call
    /// [`super::Coordinator::on_persisted`] when it is durable, or when it certainly is not.
    Persist {
        /// The transactional id.
        transactional_id: Arc<str>,
        /// The record's key.
        key: Bytes,
        /// The record's value; `None` is a tombstone.
        value: Option<Bytes>,
        /// The token to report the outcome with.
        token: PersistToken,
    },
    /// Write markers; see [`WriteMarkers`].
    WriteMarkers(WriteMarkers),
}

/// Append a marker to every partition named, then call [`super::Coordinator::on_marker_written`] once for each of them,
/// when its marker is durable or has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteMarkers {
    /// The token to report the outcomes with. Grows from round to round.
    pub token: MarkersToken,
    /// The transactional id whose transaction ends.
    pub transactional_id: Arc<str>,
    /// The producer id.
    pub producer_id: i64,
    /// The epoch of the markers.
    pub producer_epoch: i16,
    /// True to commit, false to abort.
    pub commit: bool,
    /// The coordinator epoch.
    pub coordinator_epoch: i32,
    /// True if the markers have a newer epoch than the records of the transaction (transaction version 2).
    pub epoch_per_transaction: bool,
    /// Topics with their partitions.
    pub partitions: Vec<(Arc<str>, Vec<i32>)>,
}

/// Configuration of the transaction coordinator.
#[derive(Clone, Debug)]
pub struct Config {
    /// `transaction.max.timeout.ms`
    pub max_timeout_ms: i32,
    /// `transactional.id.expiration.ms`
    pub id_expiration_ms: u64,
    /// The first retry backoff; it doubles with each failure.
    pub retry_min_ms: u64,
    /// The maximum retry backoff.
    pub retry_max_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_timeout_ms: 900_000,
            id_expiration_ms: 7 * 24 * 3_600_000,
            retry_min_ms: 20,
            retry_max_ms: 2_000,
        }
    }
}

/// A transaction in the DescribeTransactions response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The state name, as Kafka spells it.
    pub state: &'static str,
    /// The producer id.
    pub producer_id: i64,
    /// The producer epoch.
    pub producer_epoch: i16,
    /// The transaction timeout.
    pub timeout_ms: i32,
    /// Wall time of its start, or -1.
    pub start_ms: i64,
    /// Topics with their partitions.
    pub partitions: Vec<(Arc<str>, Vec<i32>)>,
}

/// The filter of ListTransactions. An empty list matches everything.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    /// State names.
    pub states: Vec<String>,
    /// Producer ids.
    pub producer_ids: Vec<i64>,
    /// Minimum duration of the transaction so far; negative matches all.
    pub min_duration_ms: Option<i64>,
}

/// An entry of the ListTransactions response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The transactional id.
    pub transactional_id: Arc<str>,
    /// The producer id.
    pub producer_id: i64,
    /// The state name.
    pub state: &'static str,
}
