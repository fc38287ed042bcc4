//! Tells the journal how record batches are framed. The journal itself knows nothing of Kafka.

use bytes::{BufMut, Bytes, BytesMut};

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

    /// A batch without records, as compaction leaves them behind too: clients pass over it.
    fn filler(&self, base: i64, last: i64, epoch: i32) -> Option<Bytes> {
        const MAGIC: u8 = 2;
        const NONE: i64 = -1;
        let last_offset_delta = i32::try_from(last - base).unwrap_or(i32::MAX);
        let mut checked = BytesMut::with_capacity(HEADER_LEN);
        checked.put_i16(0);
        checked.put_i32(last_offset_delta);
        // Times, producer, its epoch, its sequence: none of them.
        checked.put_i64(NONE);
        checked.put_i64(NONE);
        checked.put_i64(NONE);
        checked.put_i16(-1);
        checked.put_i32(-1);
        checked.put_i32(0);
        let mut batch = BytesMut::with_capacity(HEADER_LEN);
        batch.put_i64(base);
        // What follows the length itself.
        batch.put_i32(i32::try_from(HEADER_LEN - 12).ok()?);
        batch.put_i32(epoch);
        batch.put_u8(MAGIC);
        batch.put_u32(crc32c::crc32c(&checked));
        batch.put_slice(&checked);
        Some(batch.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filler_is_an_intact_batch_of_the_extent_asked_for() {
        for (base, last, end) in [(7, 7, 7), (100, 4_000, 4_000), (0, 1 << 40, i64::from(i32::MAX))] {
            let filler = BatchFraming.filler(base, last, 3).unwrap();
            assert!(BatchFraming.verify(&filler));
            let frame = BatchFraming.peek(&filler).unwrap();
            assert_eq!((frame.base, frame.last, frame.epoch, frame.len), (base, end, 3, HEADER_LEN));
            let mut records = 0;
            records::for_each_record(&filler, 1 << 20, &mut |_| {
                records += 1;
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
            assert_eq!(records, 0);
        }
    }
}
