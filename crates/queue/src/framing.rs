//! Record batch framing for the journal, which has no knowledge of Kafka formats.

use bytes::{BufMut, Bytes, BytesMut};

use moim_journal::{Frame, Framing};
use moim_wire_kafka::records::{self, BatchHeader, HEADER_LEN};

/// Record batches of magic 2, stored byte for byte as received.
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

    /// The CRC of a batch starts after its leader epoch; clients recompute neither.
    fn covers_epoch(&self) -> bool {
        false
    }

    /// A batch without records, as compaction also leaves behind: clients skip it.
    fn filler(&self, base: i64, last: i64, epoch: i32) -> Option<Bytes> {
        const MAGIC: u8 = 2;
        const NONE: i64 = -1;
        let last_offset_delta = i32::try_from(last - base).unwrap_or(i32::MAX);
        let mut checked = BytesMut::with_capacity(HEADER_LEN);
        checked.put_i16(0);
        checked.put_i32(last_offset_delta);
        // Timestamps, producer id, producer epoch, base sequence: all unset.
        checked.put_i64(NONE);
        checked.put_i64(NONE);
        checked.put_i64(NONE);
        checked.put_i16(-1);
        checked.put_i32(-1);
        checked.put_i32(0);
        let mut batch = BytesMut::with_capacity(HEADER_LEN);
        batch.put_i64(base);
        // The batch length excludes itself and the base offset.
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
    use std::path::Path;
    use std::sync::Arc;

    use moim_base::ManualClock;
    use moim_journal::disk::Survival;
    use moim_journal::{
        Append, Disk as _, Durability, Journal, JournalId, JournalOptions, ReadError, SimDisk, Store,
        StoreOptions,
    };

    use super::*;

    fn open(disk: &SimDisk) -> (Store, Arc<Journal>) {
        let options = StoreOptions {
            min_free_bytes: 0,
            commit_file_bytes: 64 << 10,
            first_commit_file_bytes: 64 << 10,
            ..StoreOptions::default()
        };
        let clock = Arc::new(ManualClock::at(1_000_000));
        let store = Store::open(Path::new("/data"), Arc::new(disk.clone()), clock, options).unwrap();
        let options = JournalOptions {
            folder: "queue/t/Partition-0".into(),
            framing: Arc::new(BatchFraming),
            durability: Durability::Fsync,
            segment_bytes: 1 << 20,
            tag: 0,
        };
        let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).unwrap();
        (store, journal)
    }

    /// The CRC of a batch covers neither its base offset nor its leader epoch: the journal's checksum does.
    #[test]
    fn flipped_bit_in_a_batch_is_never_returned() {
        let disk = SimDisk::new();
        let (store, journal) = open(&disk);
        let mut batches = Vec::new();
        for (base, epoch) in (0..30).step_by(3).zip([1, 1, 1, 2, 2, 5, 5, 5, 5, 6]) {
            let body = BatchFraming.filler(base, base + 2, epoch).unwrap();
            let append =
                Append { base, last: base + 2, epoch, max_timestamp_ms: -1, prefix: &[], body: &body };
            journal.append(append).unwrap();
            batches.push(body);
        }
        store.close().unwrap();
        drop((store, journal));
        let path = Path::new("/data/queue/t/Partition-0/00000000000000000000.log");
        let rest = disk.crash(Survival::Everything, 0);
        let bits = rest.stat(path).unwrap().unwrap().len * 8;
        for bit in 64 * 8..bits {
            let rotten = disk.crash(Survival::Everything, 0);
            rotten.rot(path, bit);
            let (_store, journal) = open(&rotten);
            let (mut next, mut refused) = (0, 0);
            while next < 30 {
                match journal.read(next, i64::MAX, 100) {
                    Ok(read) => {
                        let bytes: Vec<u8> =
                            read.chunks.iter().flat_map(|chunk| chunk.bytes().unwrap()).collect();
                        assert_eq!(bytes, batches[usize::try_from(next / 3).unwrap()], "bit {bit} at {next}");
                        next = read.next;
                    }
                    Err(ReadError::Damaged { .. }) => (next, refused) = (next + 3, refused + 1),
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!((refused, journal.is_damaged()), (1, true), "bit {bit}");
        }
    }

    #[test]
    fn filler_batch_is_valid_and_covers_the_offset_range() {
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
