//! Validation of batches before the append, and the mapping of errors to protocol codes.

use moim_journal::{AppendError, ReadError};
use moim_wire_kafka::compression::{Compression, CompressionError};
use moim_wire_kafka::error::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader, RecordsError};

use super::{MAX_DECOMPRESSED_BYTES, Refused};
use crate::config::TopicConfig;
use crate::producer_state::{BatchInfo, Marker};

pub(crate) fn batch_info(header: &BatchHeader, batch: &[u8]) -> BatchInfo {
    BatchInfo {
        producer_id: header.producer_id,
        producer_epoch: header.producer_epoch,
        base_sequence: header.base_sequence,
        last_sequence: header.last_sequence(),
        max_timestamp: header.max_timestamp,
        transactional: header.is_transactional(),
        control: header.is_control().then(|| marker(batch)).flatten(),
    }
}

/// The marker in a control batch.
fn marker(batch: &[u8]) -> Option<Marker> {
    let kind = records::control_kind(batch)?;
    let mut coordinator_epoch = 0;
    let _ = records::for_each_record(batch, batch.len(), &mut |record| {
        // Two bytes of version, then the coordinator epoch.
        if let Some(bytes) = record.value.and_then(|v| v.get(2..6)).and_then(|b| b.try_into().ok()) {
            coordinator_epoch = i32::from_be_bytes(bytes);
        }
        std::ops::ControlFlow::Break(())
    });
    Some(Marker { kind, coordinator_epoch })
}

pub(super) fn check_timestamps(
    header: &BatchHeader,
    config: &TopicConfig,
    now_ms: i64,
) -> Result<(), Refused> {
    if config.log_append_time || header.max_timestamp < 0 {
        return Ok(());
    }
    let ahead = header.max_timestamp.saturating_sub(now_ms);
    let behind = now_ms.saturating_sub(header.base_timestamp);
    if ahead > config.timestamp_after_max_ms || behind > config.timestamp_before_max_ms {
        return Err(Refused::new(
            ErrorCode::InvalidTimestamp,
            format!("Timestamp {} is too far from the broker's clock {now_ms}.", header.max_timestamp),
        ));
    }
    Ok(())
}

pub(super) fn refuse_records(error: RecordsError) -> Refused {
    let code = match &error {
        RecordsError::Magic(_) => ErrorCode::UnsupportedForMessageFormat,
        RecordsError::TooLarge => ErrorCode::MessageTooLarge,
        RecordsError::TimestampType => ErrorCode::InvalidTimestamp,
        RecordsError::Compression(CompressionError::Unknown(_)) => ErrorCode::UnsupportedCompressionType,
        RecordsError::Keyless | RecordsError::Count | RecordsError::Invalid(_) => ErrorCode::InvalidRecord,
        _ => ErrorCode::CorruptMessage,
    };
    Refused::new(code, error.to_string())
}

/// The indexes of the records without a key.
pub(super) fn keyless_records(batch: &[u8]) -> Vec<i32> {
    let mut keyless = Vec::new();
    // The batch was decoded before without an error, up to the first keyless record.
    let _ = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
        if record.key.is_none() {
            keyless.push(record.offset_delta);
        }
        std::ops::ControlFlow::Continue(())
    });
    keyless
}

pub(super) fn refuse_append(error: AppendError) -> Refused {
    let code = match &error {
        AppendError::Closed => ErrorCode::NotLeaderOrFollower,
        _ => ErrorCode::KafkaStorageError,
    };
    Refused::new(code, error.to_string())
}

pub(crate) fn refuse_read(error: ReadError) -> ErrorCode {
    match error {
        ReadError::OutOfRange { .. } => ErrorCode::OffsetOutOfRange,
        _ => {
            tracing::error!(%error, "partition read failed");
            ErrorCode::KafkaStorageError
        }
    }
}

/// True if a Produce version may carry this compression.
pub(crate) fn compression_allowed(kind: Compression, produce_version: i16) -> bool {
    kind != Compression::Zstd || produce_version >= 7
}
