//! What goes into the transaction coordinator and what comes out: plain data, no behaviour.

use std::sync::Arc;

use bytes::Bytes;

use moim_wire_kafka::ErrorCode;

/// Names the request that an answer belongs to. Chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Names a write to `__transaction_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PersistToken(pub u64);

/// Names one round of markers of one transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MarkersToken(pub u64);

/// A partition by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
}

impl TopicPartition {
    /// The partition of that topic.
    pub fn new(topic: impl Into<Arc<str>>, partition: i32) -> Self {
        Self { topic: topic.into(), partition }
    }
}

/// A request. `version` is that of its API: it decides how fencing is told to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// InitProducerId.
    InitProducerId {
        /// Where the answer goes.
        token: Token,
        /// 0 to 5.
        version: i16,
        /// None for a producer that is only idempotent.
        transactional_id: Option<Arc<str>>,
        /// `transaction.timeout.ms` of the client.
        timeout_ms: i32,
        /// The producer id and epoch the client has, when it asks for a new epoch after an error.
        current: Option<(i64, i16)>,
        /// A producer id that was never used, for when one is needed.
        fresh_id: i64,
    },
    /// AddPartitionsToTxn, for one transaction. A batched request is several of these; one that only
    /// verifies is [`super::Coordinator::verify`]. From version 4 on a broker sends it on behalf of a producer that has
    /// an epoch per transaction.
    AddPartitions {
        /// Where the answer goes.
        token: Token,
        /// 0 to 5.
        version: i16,
        /// The transaction.
        transactional_id: Arc<str>,
        /// As the client knows it.
        producer_id: i64,
        /// As the client knows it.
        producer_epoch: i16,
        /// What the transaction is about to write to. The caller has checked that they exist.
        partitions: Vec<TopicPartition>,
    },
    /// AddOffsetsToTxn: the transaction will commit offsets of a group.
    AddOffsets {
        /// Where the answer goes.
        token: Token,
        /// 0 to 4.
        version: i16,
        /// The transaction.
        transactional_id: Arc<str>,
        /// As the client knows it.
        producer_id: i64,
        /// As the client knows it.
        producer_epoch: i16,
        /// The partition of `__consumer_offsets` that keeps the group.
        offsets_partition: i32,
    },
    /// EndTxn. From version 5 on every transaction ends under a new epoch, which the answer carries.
    EndTxn {
        /// Where the answer goes.
        token: Token,
        /// 0 to 5.
        version: i16,
        /// The transaction.
        transactional_id: Arc<str>,
        /// As the client knows it.
        producer_id: i64,
        /// As the client knows it.
        producer_epoch: i16,
        /// Commit or abort.
        commit: bool,
        /// From version 5: a producer id that was never used, for a producer whose epochs have run out.
        fresh_id: i64,
    },
}

/// An answer. Id and epoch are -1 except in the answer to a successful InitProducerId, and to EndTxn from version 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The outcome.
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
    /// Answer a request.
    Reply(Token, Reply),
    /// Append a record to the partition of `__transaction_state` that keeps the id, then call
    /// [`super::Coordinator::on_persisted`] when it is durable, or when it certainly is not.
    Persist {
        /// Whose state it is.
        transactional_id: Arc<str>,
        /// The record's key.
        key: Bytes,
        /// The record's value; none is a tombstone.
        value: Option<Bytes>,
        /// To report with.
        token: PersistToken,
    },
    /// See [`WriteMarkers`].
    WriteMarkers(WriteMarkers),
}

/// Append a marker to every partition named, then call [`super::Coordinator::on_marker_written`] once for each of them,
/// when its marker is durable or has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteMarkers {
    /// To report with. Grows from round to round.
    pub token: MarkersToken,
    /// Whose transaction ends.
    pub transactional_id: Arc<str>,
    /// Its producer.
    pub producer_id: i64,
    /// The epoch that the markers carry.
    pub producer_epoch: i16,
    /// Commit or abort.
    pub commit: bool,
    /// The epoch of this coordinator.
    pub coordinator_epoch: i32,
    /// Whether the markers have a newer epoch than the records of the transaction (transaction version 2).
    pub epoch_per_transaction: bool,
    /// Topics with their partitions.
    pub partitions: Vec<(Arc<str>, Vec<i32>)>,
}

/// What an operator can set.
#[derive(Clone, Debug)]
pub struct Config {
    /// `transaction.max.timeout.ms`
    pub max_timeout_ms: i32,
    /// `transactional.id.expiration.ms`
    pub id_expiration_ms: u64,
    /// The first pause before something that failed is tried again; it doubles from there.
    pub retry_min_ms: u64,
    /// The longest such pause.
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

/// A transaction as DescribeTransactions shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The name of its state, as Kafka spells it.
    pub state: &'static str,
    /// Its producer.
    pub producer_id: i64,
    /// The producer's epoch.
    pub producer_epoch: i16,
    /// After how long it is aborted.
    pub timeout_ms: i32,
    /// Wall time of its start, or -1.
    pub start_ms: i64,
    /// Topics with their partitions.
    pub partitions: Vec<(Arc<str>, Vec<i32>)>,
}

/// Which transactions ListTransactions is asked for. Empty lists ask for all.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    /// Names of states.
    pub states: Vec<String>,
    /// Producers.
    pub producer_ids: Vec<i64>,
    /// Only those that have been running for longer than this; negative asks for all.
    pub min_duration_ms: Option<i64>,
}

/// A transaction as ListTransactions shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The transaction.
    pub transactional_id: Arc<str>,
    /// Its producer.
    pub producer_id: i64,
    /// The name of its state.
    pub state: &'static str,
}
