//! Tells the journal how record batches are framed. The journal itself knows nothing of Kafka.

use moim_journal::{Frame, Framing};
use moim_wire_kafka::records::{self, BatchHeader, HEADER_LEN};

/// Record batches of magic 2, stored as the bytes that arrived.
pub struct BatchFraming;

impl Framing for BatchFraming {
    fn header_len(&self) -> usize {
        HEADER_LEN
    }

    fn peek(&self, header: &[u8]) -> Option<Frame> {
        let batch = BatchHeader::parse(header)?;
        Some(Frame {
            len: batch.total_len(),
            base: batch.base_offset,
            last: batch.last_offset(),
            epoch: batch.partition_leader_epoch,
            max_timestamp_ms: batch.max_timestamp,
        })
    }

    fn verify(&self, frame: &[u8]) -> bool {
        BatchHeader::parse(frame).is_some_and(|h| h.total_len() == frame.len()) && records::check_crc(frame)
    }
}
